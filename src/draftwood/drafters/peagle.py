"""EAGLE behind masks (P-EAGLE): one pass of the network for all tokens ahead, with any grower."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwood.drafters.eagle import RecurrentDrafter
from draftwood.drafters.features import at_depths
from draftwood.drafting import Front, Grower, State
from draftwood.model.runner import ModelRunner
from draftwood.nets.embeddings import TargetEmbeddings
from draftwood.nets.pard import ParallelEagle
from draftwood.protocols import BatchView


class ParallelEagleDrafter(RecurrentDrafter):
    """A `ParallelEagle`, and a grower."""

    net: ParallelEagle  # type: ignore[assignment]

    def __init__(self, net: ParallelEagle, words: TargetEmbeddings, grower: Grower) -> None:
        own = net.embed_tokens
        words = words if own is None else words.with_embedding(own.weight)
        super().__init__(net, words, grower, net.ahead.guesses)

    def attach(self, target: ModelRunner) -> None:
        """The feature of masks lies behind all others."""
        super().attach(target)
        self._keep_mask()

    def refresh(self) -> None:
        """It was learnt as well."""
        super().refresh()
        self._keep_mask()

    def staged(self, nodes: int) -> int:
        """Masks are written behind the row of the root, however small the tree will be."""
        return max(0, self.grower.levels - 2) if nodes else 0

    def begin(self, view: BatchView) -> tuple[Tensor, State]:
        """Also logits of all slots that a tree can be deep [B, levels, R]."""
        levels = self.grower.levels
        batch, rows = self.last_rows(view, levels - 1, self.net.ahead.mask_token)
        _, logits = self.run(batch, self._kept, rows)
        slots = logits.view(view.size, levels, -1)
        return slots[:, :1], (slots,)

    def extend(self, view: BatchView, front: Front, state: State) -> tuple[Tensor, State]:
        """The slots of their depths."""
        logits = at_depths(state[0], front)
        return logits if front.level is not None else self.net.head.spread(logits), state

    def _keep_mask(self) -> None:
        with torch.no_grad():
            self._kept[-1] = self.digest(self.net.mask_hidden[None])[0]
