"""Keys and values of a model's layers with attention, as a layer state: the accepted path moves behind the text.

A sequence of length n (root included) with a tree of three draft nodes, before and after the path root, a, c:

    index    0 … n-1        n    n+1   n+2            0 … n-1     n    n+1
    holds    committed      a     b     c      ->     committed   a     c        (b is overwritten)

A chain is already in place, so nothing moves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftwood.batch import Pages
from draftwood.links import may_look
from draftwood.states import KeptPath


@dataclass(frozen=True)
class KeyPages:
    """Keys and values of layers with attention: those of an accepted path move behind the text."""

    memory: Pages
    scratch_page: int

    @property
    def num_bytes(self) -> int:
        """Memory of all pages."""
        return self.memory.store.numel() * self.memory.store.element_size()

    def commit(self, path: KeptPath) -> None:
        """Move staged nodes right behind `base`. In a chain they are there already."""
        store, index = self.memory.store, path.columns
        if path.chain or index.shape[1] == 1 or not store.numel():  # no layer has attention
            return
        if store.is_cuda:
            from draftwood.ops.cuda.commit import keep_path

            return keep_path(store, path.block_table, path.base, index, path.length, self.memory.page_size)
        steps = torch.arange(index.shape[1], device=store.device).expand_as(index)
        moves = (steps <= path.length[:, None]) & (index > steps)  # a node that lies nowhere has the number 0
        look = may_look(moves)
        if look and not bool(moves.any()):
            return
        source, target = (self._behind(path, number, moves) for number in (index, steps))
        if look:
            source, target = source[moves], target[moves]
        store[:, :, :, target.view(-1)] = store[:, :, :, source.view(-1)]

    def _behind(self, path: KeptPath, number: Tensor, wanted: Tensor) -> Tensor:
        """Slots of the keys `number` [B, n], counted from 1 at the base; of the scratch page where not wanted."""
        at, size = path.base[:, None] + number - 1, self.memory.page_size
        page = path.block_table.gather(1, (at // size).clamp(max=path.block_table.shape[1] - 1))
        return torch.where(wanted, page * size + at % size, self.scratch_page * size)
