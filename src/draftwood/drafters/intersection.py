"""A draft model of another vocabulary, token by token: it guesses only what both vocabularies have.

Its law is that of the draft model, restricted to the common tokens and renormalised, so every law is exact at any
temperature. It reads a token that it does not have as the last of those it would write it with: a poorer guess, no
other text.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftwood.batch import ForwardBatch
from draftwood.cache.kv import Places
from draftwood.drafters.encoder import Encoder, pieces_of
from draftwood.drafters.model import ModelDrafter
from draftwood.drafting import Grower, Vocabulary
from draftwood.model.runner import ModelRunner
from draftwood.model.tokenizer import Tokenizer
from draftwood.protocols import BatchView, Features


@dataclass(frozen=True)
class Bridge:
    """Which token of a draft model each of the target's is."""

    common: Tensor  # [R] int64 the target's tokens that both have, ascending
    drafted: Tensor  # [R] int64 the same in the draft model's numbers
    read: Tensor  # [V] int64 what the draft model reads for each of the target's

    @classmethod
    def between(cls, target: Tokenizer, size: int, draft: Tokenizer, draft_size: int) -> Bridge:
        """By what tokens stand for. `size`: tokens that a model has logits for; its tokenizer may have fewer."""
        theirs, ours = pieces_of(target, size), pieces_of(draft, draft_size)
        pairs = {token: ours[piece] for piece, token in theirs.items() if piece in ours}
        ends = sorted(target.eos_ids)[:1], sorted(draft.eos_ids)[:1]
        if ends[0] and ends[1] and ends[1][0] not in pairs.values():
            pairs.setdefault(ends[0][0], ends[1][0])
        pairs = {token: other for token, other in pairs.items() if token < size and other < draft_size}
        read = [pairs.get(token, -1) for token in range(size)]
        encoder = Encoder(draft, draft_size)
        for token in (token for token, other in enumerate(read) if other < 0):
            text = target.piece(token, skip_special=False).decode("utf-8", "ignore")
            written = [other for other in encoder.behind("", text) if other < draft_size]
            read[token] = written[-1] if written else 0
        common = sorted(pairs)
        return cls(torch.tensor(common), torch.tensor([pairs[token] for token in common]), torch.tensor(read))

    @property
    def share(self) -> float:
        """Of the target's tokens, those that both have."""
        return len(self.common) / len(self.read)

    def to(self, device: torch.device) -> Bridge:
        """There."""
        return Bridge(self.common.to(device), self.drafted.to(device), self.read.to(device))


@dataclass(frozen=True)
class _Common:
    """The common tokens, as a draft head's."""

    tokens: Tensor
    size: int

    def spread(self, logits: Tensor) -> Tensor:
        """No chance for others. [*, R] -> [*, V]."""
        wide = logits.new_full((*logits.shape[:-1], self.size), -torch.inf)
        return wide.index_copy(-1, self.tokens, logits)


class IntersectionDrafter(ModelDrafter):
    """A small model of another vocabulary, and a grower."""

    def __init__(self, runner: ModelRunner, grower: Grower, bridge: Bridge) -> None:
        super().__init__(runner, grower)
        self._bridge = bridge.to(runner.device)
        self._common = _Common(self._bridge.common, len(bridge.read))

    def vocabulary(self, level: int | None) -> Vocabulary | None:
        """The common tokens."""
        return self._common

    def ingest(self, batch: ForwardBatch, features: Features | None) -> None:
        """In its own tokens."""
        super().ingest(replace(batch, tokens=self._bridge.read[batch.tokens]), features)

    def run(self, view: BatchView, tokens: Tensor, places: Places, rows: Tensor | None = None) -> Tensor:
        """Logits of the common tokens. [K, R]."""
        return super().run(view, self._bridge.read[tokens], places, rows).index_select(-1, self._bridge.drafted)
