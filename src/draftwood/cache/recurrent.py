"""The states of a model's recurrent layers, beside the pages: a place for every sequence that is open.

Keys of a rejected node are overwritten. A state is a sum and cannot be: so it stays at the committed text while a tree
is verified, and the accepted path is folded in behind it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftwood.model.layers import wide
from draftwood.model.spec import RecurrentSpec
from draftwood.ops.recurrence import advanced
from draftwood.states import StagedTrees, StateStore


@dataclass(frozen=True)
class RecurrentStates:
    """One store a recurrent layer."""

    stores: tuple[StateStore, ...]

    @property
    def num_bytes(self) -> int:
        """Memory of all states."""
        return sum(store.num_bytes for store in self.stores)

    def keep(self, staged: StagedTrees, last: Tensor) -> None:
        """Fold the path to node `last` [B] of each tree into its sequence's states, root and all."""
        for store, rows in zip(self.stores, staged.layers, strict=True):
            states = store.at(staged.places, staged.fresh)
            store.write(staged.places, advanced(states, rows, staged.block, last))

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy states from place to place, one after the other."""
        for source, target in copies:
            for store in self.stores:
                store.copy(source, target)


def new_stores(
    specs: Sequence[RecurrentSpec], places: int, dtype: torch.dtype, device: torch.device
) -> tuple[StateStore, ...]:
    """Empty states, and one place more that no sequence owns."""

    def empty(*shape: int, kind: torch.dtype) -> Tensor:
        return torch.zeros(places + 1, *shape, dtype=kind, device=device)

    return tuple(
        StateStore(
            empty(spec.kernel - 1, spec.channels, kind=dtype),
            None if spec.memory is None else empty(*spec.memory, kind=wide(dtype)),
        )
        for spec in specs
    )


def state_bytes(specs: Sequence[RecurrentSpec], dtype: torch.dtype) -> int:
    """Memory of one sequence's states."""
    tails = sum((spec.kernel - 1) * spec.channels for spec in specs)
    memories = sum(math.prod(spec.memory) for spec in specs if spec.memory is not None)
    return tails * dtype.itemsize + memories * wide(dtype).itemsize
