"""EAGLE behind masks (P-EAGLE): one pass of the network for all tokens ahead, with any grower."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftwood.drafters.eagle import RecurrentDrafter
from draftwood.drafters.pard import chain_of_masks
from draftwood.model.runner import ModelRunner
from draftwood.nets.embeddings import TargetEmbeddings
from draftwood.nets.pard import ParallelEagle
from draftwood.protocols import BatchView, FrontierModel, Grower, Span
from draftwood.treebuilder import TreeBuilder


class ParallelEagleDrafter(RecurrentDrafter):
    """A `ParallelEagle`, and a grower."""

    net: ParallelEagle  # type: ignore[assignment]

    def __init__(self, net: ParallelEagle, words: TargetEmbeddings, grower: Grower) -> None:
        own = net.embed_tokens
        super().__init__(net, words if own is None else words.with_embedding(own.weight), grower)
        self.deepest = net.ahead.guesses

    def has_room(self, seq_id: int, length: int) -> bool:
        """Masks are written behind the text, however small the tree will be."""
        return self.target.cache.tables.reserve(seq_id, length - 1 + self.net.ahead.guesses)

    def resident(self, target: ModelRunner) -> None:
        """Not in rounds on a device yet."""
        return None

    def begin(self, view: BatchView, ready: Sequence[int]) -> FrontierModel:
        """All slots in one pass."""
        return _Growth(self, ready)

    def slots(self, view: BatchView, ready: Sequence[int]) -> Tensor:
        """Read what is pending of the sequences `ready`, with masks behind it. [n, guesses, R]."""
        ahead, count = self.net.ahead, len(ready)
        pending = [self._pending[view.seq_ids[b]] for b in ready]
        spans = [
            Span(view.seq_ids[b], view.tokens[b][1:], known.start, known.end)
            for b, known in zip(ready, pending, strict=True)
        ]
        masked = self.digest(self.net.mask_hidden[None])
        features = torch.cat([self.take(spans), masked])
        masks = chain_of_masks(count, ahead.guesses - 1, ahead.mask_token, self.target.device)
        batch = self.target.cache.stage(spans, masks)
        rows = torch.full_like(batch.tokens, len(features) - 1)
        text = torch.arange(len(features) - 1, device=rows.device)
        rows[text if batch.text_rows is None else batch.text_rows] = text
        _, logits = self.run(batch, self.pages, features, rows)
        behind = logits[count:].view(count, ahead.guesses - 1, logits.shape[1])
        return torch.cat([logits[:count, None], behind], 1)


@dataclass
class _Growth:
    """One pass, and the slots it gave."""

    drafter: ParallelEagleDrafter
    ready: Sequence[int]
    logits: Tensor = field(init=False)  # [B, guesses, R]

    def begin(self, view: BatchView) -> Tensor:
        """Logits at the roots. [B, V]."""
        found = self.drafter.slots(view, self.ready)
        self.logits = found.new_zeros(len(view.seq_ids), *found.shape[1:])
        self.logits[list(self.ready)] = found
        return self.drafter.net.head.spread(self.logits[:, 0])

    def extend(self, builder: TreeBuilder, columns: Tensor) -> Tensor:
        """The slots of their depths. [B, k] -> [B, k, V]."""
        slot = builder.depth.gather(1, columns).clamp(max=self.logits.shape[1] - 1)
        return self.drafter.net.head.spread(self.logits.gather(1, slot[..., None].expand(-1, -1, self.logits.shape[2])))
