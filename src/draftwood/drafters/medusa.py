"""Heads on the target's last feature (blockwise, Medusa, Hydra), with any grower."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwood.drafters.features import FeatureDrafter, vectors_under
from draftwood.drafting import Front, Grower, State, Vocabulary
from draftwood.model.runner import ModelRunner
from draftwood.nets.embeddings import TargetEmbeddings
from draftwood.nets.medusa import HeadStack
from draftwood.protocols import BatchView


class HeadStackDrafter(FeatureDrafter):
    """A `HeadStack`, and a grower. Only the last feature of a text counts."""

    net: HeadStack
    _kept: Tensor  # [slots + 1, hidden] features as they come; the last is of no token

    def __init__(self, net: HeadStack, words: TargetEmbeddings, grower: Grower) -> None:
        super().__init__(net, words, grower, net.guesses)

    def attach(self, target: ModelRunner) -> None:
        """One vector for every slot."""
        super().attach(target)
        self._kept = vectors_under(target, self.net.hidden)

    def digest(self, features: Tensor) -> Tensor:
        """What the target's own head reads. [N, hidden] -> the same."""
        return self.words.final_norm(features)

    def store(self, slots: Tensor, positions: Tensor, features: Tensor) -> None:
        """As they are: of most nothing is ever read."""
        self._kept.index_copy_(0, slots, features.to(self._kept.dtype))

    def begin(self, view: BatchView) -> tuple[Tensor, State]:
        """Also the last feature [B, 1, hidden]."""
        slots, _ = self.around_end(view, -2, -1)
        feature = self.digest(self._kept.index_select(0, slots))[:, None]
        return self._logits(0, feature, view.roots[:, None, None]), (feature,)

    def extend(self, view: BatchView, front: Front, state: State) -> tuple[Tensor, State]:
        """Behind the path to each node, by the head of its depth."""
        (feature,) = state
        count = front.tokens.shape[1]
        path = torch.cat([view.roots[:, None, None].expand(-1, count, 1), front.path], -1)
        feature = feature.expand(-1, count, -1)
        if front.level is not None:
            return self._logits(front.level, feature, path), state
        return self._of_any_depth(front.depth, feature, path, look=view.may_look), state

    def vocabulary(self, level: int | None) -> Vocabulary | None:
        """What the head of that depth knows."""
        return None if level is None else self.net.heads[level]

    def _of_any_depth(self, depth: Tensor, feature: Tensor, path: Tensor, *, look: bool) -> Tensor:
        """Where depths differ [B, k]: logits of all tokens; every head runs at all nodes where none may be looked for.
        [B, k, V].
        """
        logits = path.new_zeros(*depth.shape, self.words.config.vocab_size, dtype=feature.dtype)
        for number in range(1, min(path.shape[-1], self.net.guesses)):
            there, behind = depth == number, path[..., : number + 1]
            if look:
                logits[there] = self._spread(number, feature[there], behind[there])
            else:
                logits = torch.where(there[..., None], self._spread(number, feature, behind), logits)
        return logits

    def _spread(self, number: int, feature: Tensor, path: Tensor) -> Tensor:
        return self.net.heads[number].spread(self._logits(number, feature, path))

    def _logits(self, number: int, feature: Tensor, path: Tensor) -> Tensor:
        """Of head `number` behind `path` [*, number + 1], root first. [*, R]."""
        return self.net.logits(number, feature, self.words.embed(path))
