"""Heads on the target's last feature (blockwise, Medusa, Hydra), with any grower."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftwood.drafters.features import FeatureDrafter
from draftwood.drafters.growths import growth_of
from draftwood.drafters.resident_features import ResidentHeads
from draftwood.model.runner import ModelRunner
from draftwood.nets.embeddings import TargetEmbeddings
from draftwood.nets.medusa import HeadStack
from draftwood.protocols import BatchView, FrontierModel, Grower, Span
from draftwood.treebuilder import TreeBuilder


class HeadStackDrafter(FeatureDrafter):
    """A `HeadStack`, and a grower."""

    net: HeadStack

    def __init__(self, net: HeadStack, words: TargetEmbeddings, grower: Grower) -> None:
        super().__init__(net, words, grower)
        self.deepest = net.guesses

    def digest(self, features: Tensor) -> Tensor:
        """What the target's own head reads."""
        return self.words.final_norm(features)

    def settle(self, spans: Sequence[Span]) -> None:
        """Only the last feature counts."""
        for span in spans:
            pending = self._pending[span.seq_id]
            pending.take(pending.count - 1)

    def resident(self, target: ModelRunner) -> ResidentHeads | None:
        """In rounds on the device, if its trees can grow there."""
        growth = growth_of(self.grower, self.deepest)
        return None if growth is None else ResidentHeads(self, growth, target)

    def begin(self, view: BatchView, ready: Sequence[int]) -> FrontierModel:
        """All heads look at the last feature."""
        last = []
        for b in ready:
            pending = self._pending[view.seq_ids[b]]
            pending.take(pending.count - 1)
            last.append(pending.parts[0][-1])
        return _Growth(self, ready, self.digest(torch.stack(last)))


@dataclass
class _Growth:
    """One feature for each sequence, and the paths that hang from it."""

    drafter: HeadStackDrafter
    ready: Sequence[int]
    last: Tensor  # [len(ready), hidden]
    feature: Tensor = field(init=False)  # [B, hidden]

    def begin(self, view: BatchView) -> Tensor:
        """Logits at the roots. [B, V]."""
        self.feature = self.last.new_zeros(len(view.seq_ids), self.last.shape[-1])
        self.feature[list(self.ready)] = self.last
        return self._logits(0, self.feature[:, None], view.roots[:, None, None])[:, 0]

    def extend(self, builder: TreeBuilder, columns: Tensor) -> Tensor:
        """Logits after the nodes in `columns`, head by head. [B, k] -> [B, k, V]."""
        depth = builder.depth.gather(1, columns)
        out = self.feature.new_zeros(*columns.shape, self.drafter.words.config.vocab_size)
        for number in range(1, self.drafter.net.guesses):
            owner, place = (depth == number).nonzero(as_tuple=True)
            if len(owner):
                path = _paths(builder, owner, columns[owner, place], number)
                out[owner, place] = self._logits(number, self.feature[owner], path)
        return out

    def _logits(self, number: int, feature: Tensor, path: Tensor) -> Tensor:
        """Of head `number` behind `path` [*, number + 1], root first. [*, V]."""
        net = self.drafter.net
        embedded = self.drafter.words.embed(path)
        return net.heads[number].spread(net.logits(number, feature, embedded))


def _paths(builder: TreeBuilder, owner: Tensor, column: Tensor, depth: int) -> Tensor:
    """The tokens from the root to nodes of one depth. [n], [n] -> [n, depth + 1]."""
    tokens = []
    for _ in range(depth + 1):
        tokens.append(builder.tokens[owner, column])
        column = builder.parents[owner, column].clamp(min=0)
    return torch.stack(tokens[::-1], -1)
