"""A language model that guesses several tokens in one forward, behind masks (PaSS, PARD), with any grower.

It was trained to read `text, mask, mask, …` and to say at the i-th mask what stands i tokens further on. So a round is
one forward, and the guesses of a slot do not depend on what was chosen before it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from draftwood.cache.kv import NodeRows
from draftwood.drafters.model import Growth, ModelDrafter
from draftwood.model.runner import ModelRunner
from draftwood.protocols import BatchView, Budget, Grower, Randomness, Span
from draftwood.tree import TokenTree
from draftwood.treebuilder import TreeBuilder

GUESSES = 8  # tokens ahead that PARD's drafters are trained for


def chain_of_masks(count: int, each: int, mask: int, device: torch.device) -> NodeRows | None:
    """So many masks behind each of `count` texts."""
    if not each:
        return None
    number = torch.arange(1, each + 1, device=device).repeat(count)
    return NodeRows(
        span=torch.arange(count, device=device).repeat_interleave(each),
        index=number,
        tokens=torch.full_like(number, mask),
        depth=number,
        ancestors=((1 << number) - 1)[:, None],
    )


@dataclass
class _Growth(Growth):
    """One forward, and the slots it gave."""

    mask: int = 0
    guesses: int = GUESSES
    slots: Tensor = field(init=False)  # [B, guesses, V]

    def begin(self, view: BatchView) -> Tensor:
        """Run everything pending and the masks behind it; logits at the roots. [B, V]."""
        self._read_ahead()
        config = self.runner.model.config
        self.slots = self.runner.no_logits(len(view.seq_ids), self.guesses)
        if self.seats:
            spans = [self._pending(b) for b in self.seats]
            masks = chain_of_masks(len(spans), self.guesses - 1, self.mask, self.runner.device)
            out = self.runner.forward(self.runner.cache.stage(spans, masks))
            count = len(spans)
            behind = out.logits[count:].view(count, self.guesses - 1, config.vocab_size)
            self.slots[self.seats] = torch.cat([out.logits[:count, None], behind], 1).to(self.slots.dtype)
            for span in spans:
                self.runner.cache.tables.advance(span.seq_id, span.end, span.tokens)
        return self.slots[:, 0]

    def _pending(self, b: int) -> Span:
        seq_id, tokens = self.view.seq_ids[b], self.view.tokens[b]
        return Span(seq_id, tokens, self.runner.cache.tables.num_cached(seq_id), len(tokens))

    def _read_ahead(self) -> None:
        """Long texts first, so that what is left fits into one forward."""
        room = max(self.max_rows // max(len(self.seats), 1) - self.guesses, 1)
        for b in self.seats:
            span = self._pending(b)
            for start in range(span.start, span.end - room, self.max_rows):
                piece = replace(span, start=start, end=min(start + self.max_rows, span.end - 1))
                self.runner.forward(self.runner.cache.stage_text([piece]))
                self.runner.cache.tables.advance(piece.seq_id, piece.end, piece.tokens)

    def extend(self, builder: TreeBuilder, columns: Tensor) -> Tensor:
        """The slots of their depths. [B, k] -> [B, k, V]."""
        depth = builder.depth.gather(1, columns).clamp(max=self.guesses - 1)
        return self.slots.gather(1, depth[..., None].expand(-1, -1, self.slots.shape[-1]))


class ParallelDrafter(ModelDrafter):
    """A model of the target's vocabulary that was trained to guess behind masks."""

    def __init__(
        self, runner: ModelRunner, grower: Grower, mask: int, guesses: int = GUESSES, max_rows: int = 512
    ) -> None:
        super().__init__(runner, grower, max_rows)
        self.mask, self.guesses = mask, guesses

    def propose(self, view: BatchView, budget: Budget, rng: Randomness) -> TokenTree:
        """No deeper than there are slots."""
        return super().propose(replace(view, max_depth=view.max_depth.clamp(max=self.guesses)), budget, rng)

    def start(self, view: BatchView, seats: list[int]) -> Growth:
        """One forward for all slots."""
        return _Growth(self.runner, view, seats, self.max_rows, self.mask, self.guesses)

    @property
    def room(self) -> int:
        """For the masks as well, however small the tree is."""
        return max(super().room, self.guesses)

    def resident(self, target: ModelRunner) -> None:
        """Not in rounds on a device yet."""
        return None
