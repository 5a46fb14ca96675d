"""Which experts of a mixture are hot: those that committed text has gone to most lately; drafts run these alone.

SpecMoE's self-draft. All of it stays on the device, in tensors that never move, so that captured steps go on with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftwood.errors import IncompatibleParts
from draftwood.model.spec import ExpertsSpec

FADING = 0.97  # of what was counted before, with every step or piece of a prompt


class HotExperts:
    """Counts of the experts of each mixture, and the `kept` with most of them; 0: half as many as a row goes to."""

    def __init__(self, mixtures: Sequence[ExpertsSpec], kept: int, device: torch.device) -> None:
        sizes = {(each.count, each.top_k) for each in mixtures}
        if len(sizes) != 1:
            raise IncompatibleParts("Drafts with hot experts need a target whose mixtures are all of one size.")
        ((count, top_k),) = sizes
        self._kept = min(kept or -(-top_k // 2), count)
        self.top_k = min(top_k, self._kept)  # experts that a row of a draft goes to
        self._counts = torch.zeros(len(mixtures), count, device=device)
        self._allowed = torch.zeros(len(mixtures), count, dtype=torch.uint8, device=device)
        self._allowed[:, : self._kept] = 1

    @property
    def allowed(self) -> tuple[Tensor, ...]:
        """Of each mixture, which experts are hot; written over by `count`. Each [count] uint8."""
        return self._allowed.unbind(0)

    def count(self, routes: Tensor, committed: Tensor) -> None:
        """What rows went to, [N, mixtures, top_k], of those that are committed, [N] bool."""
        experts = routes.long().permute(1, 2, 0).flatten(1)
        weight = committed.to(self._counts.dtype).expand(*routes.shape[1:], -1).flatten(1)
        self._counts.mul_(FADING).add_(torch.zeros_like(self._counts).scatter_add_(1, experts, weight))
        self._allowed.zero_().scatter_(1, self._counts.topk(self._kept, 1).indices, 1)
