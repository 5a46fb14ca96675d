"""The target as a teacher: its features and its next-token logits at every place of a batch, by its own forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftwood.errors import InvalidRequest
from draftwood.model.runner import ModelRunner
from draftwood.protocols import Span
from draftwood.train.data import TextBatch


@dataclass(frozen=True)
class Lesson:
    """What a drafter may learn of a batch."""

    batch: TextBatch
    features: Tensor  # [B, T, len(reads) * hidden] of the layers that are read, side by side
    logits: Tensor  # [N, V] of each answered token, in the order of the batch
    row: Tensor  # [B, T] int64: where in `logits` the token after each place stands, if the target wrote it

    def answers(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of `logits`, and tokens, of answered places of the flat batch. [N] each."""
        return self.row.flatten()[places - 1], self.batch.tokens.flatten()[places]


class Teacher:
    """Runs texts through the target's own paged forward, as decoding does, a page table for each text."""

    def __init__(self, runner: ModelRunner, reads: Sequence[int]) -> None:
        self.runner, self.reads = runner, tuple(reads)

    @torch.no_grad()
    def teach(self, batch: TextBatch) -> Lesson:
        """Everything at once. Features behind the last text are zeros; only tokens the target wrote get logits."""
        spans, at = self._open(batch)
        taught = torch.zeros_like(batch.answer)
        taught[:, :-1] = batch.answer[:, 1:] & batch.follows(1)
        rows = taught.flatten()[at].nonzero()[:, 0].to(self.runner.device)
        try:
            out = self.runner.forward(self.runner.cache.stage_text(spans, rows), frozenset(self.reads))
        finally:
            self._close(spans)
        at = at.to(self.runner.device)
        shape = batch.tokens.shape
        row = torch.zeros(shape.numel(), dtype=torch.int64, device=self.runner.device)
        row[at[rows]] = torch.arange(len(rows), device=self.runner.device)
        width = len(self.reads) * self.runner.model.config.hidden_size
        features = torch.zeros(shape.numel(), width, device=self.runner.device, dtype=self.runner.model.dtype)
        if self.reads:
            features[at] = torch.cat([out.features[layer] for layer in self.reads], -1)
        # What was made in inference mode may not be saved for gradients; what is kept of it is copied before.
        return Lesson(batch.to(self.runner.device), features.view(*shape, -1), out.logits, row.view(shape))

    def _close(self, spans: Sequence[Span]) -> None:
        for span in spans:
            self.runner.cache.tables.close(span.seq_id)

    def _open(self, batch: TextBatch) -> tuple[list[Span], Tensor]:
        """A span for each text, and where its tokens stand in the batch, on the host."""
        tables, spans, places = self.runner.cache.tables, [], []
        width = batch.tokens.shape[1]
        for b in range(len(batch.tokens)):
            for number in range(int(batch.text[b].max()) + 1):
                place = (batch.text[b] == number).nonzero()[:, 0]
                tokens, seq_id = batch.tokens[b, place].tolist(), -1 - len(spans)
                if tables.states is not None and len(spans) == tables.states.count:
                    self._close(spans)
                    raise InvalidRequest(
                        f"The teacher has states for {len(spans)} texts, and a batch holds more: lower the rows, or "
                        "raise max_running."
                    )
                tables.open(seq_id, [])
                spans.append(Span(seq_id, tokens, 0, len(tokens)))
                places.append(place + b * width)
                if not tables.reserve(seq_id, len(tokens)):
                    self._close(spans)
                    raise InvalidRequest("The teacher's cache is too small for a batch: lower the rows.")
        return spans, torch.cat(places)
