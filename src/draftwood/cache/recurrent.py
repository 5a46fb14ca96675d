"""The states of a model's recurrent layers, beside the pages: a place for every sequence that is open.

Keys of a rejected node are overwritten. A state is a sum and cannot be: so it stays at the committed text while a tree
is verified, and the accepted path is folded in behind it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftwood.batch import ForwardBatch
from draftwood.model.layers import wide
from draftwood.model.mixer_spec import RecurrentSpec
from draftwood.ops.recurrence import advanced
from draftwood.states import KeptPath, StagedTrees, StateStore


@dataclass(frozen=True)
class RecurrentStates:
    """One store a recurrent layer."""

    stores: tuple[StateStore, ...]

    @property
    def num_bytes(self) -> int:
        """Memory of all states."""
        return sum(store.num_bytes for store in self.stores)

    def commit(self, path: KeptPath) -> None:
        """Fold the path of each tree into its sequence's states, root and all, as far as it was run."""
        if path.staged is not None:
            self.fold(path.staged, path.staged.reached(path)[0])

    def fold(self, staged: StagedTrees, last: Tensor) -> None:
        """Fold the paths to rows `last` [S] into their sequences' states."""
        for store, rows in zip(self.stores, staged.layers, strict=True):
            states = store.at(staged.places, staged.fresh)
            store.write(staged.places, advanced(states, rows, staged.block, last))

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy states from place to place, one after the other."""
        for source, target in copies:
            for store in self.stores:
                store.copy(source, target)


@dataclass(frozen=True)
class FollowingStates:
    """The same of a draft model, in the places of its target's sequences; each knows how much it has taken in.

    A draft model runs its last tokens again, and reads again what it may have missed: what a state holds it must not
    take in twice.
    """

    states: RecurrentStates
    held: Tensor  # [places + 1] int64 tokens

    @classmethod
    def of(cls, states: RecurrentStates) -> FollowingStates:
        """Of nothing so far."""
        tail = states.stores[0].tail
        return cls(states, torch.zeros(len(tail), dtype=torch.int64, device=tail.device))

    @property
    def num_bytes(self) -> int:
        """Memory of all states."""
        return self.states.num_bytes

    def reading(self, batch: ForwardBatch) -> ForwardBatch:
        """Rows of text, those marked that the states hold already; they will hold the others."""
        assert batch.states is not None
        rows = torch.arange(len(batch.tokens), device=batch.tokens.device)
        owner = torch.searchsorted(batch.row_offsets[1:], rows, right=True).clamp(max=len(batch.states) - 1)
        first = batch.positions[batch.row_offsets[:-1].clamp(max=len(rows) - 1)]
        held = self.held[batch.states].masked_fill(first == 0, 0)  # which begins anew
        taken_in = batch.positions < held[owner]
        if batch.taken_in is not None:
            taken_in |= batch.taken_in
        ends = held.scatter_reduce(0, owner, (batch.positions + 1).masked_fill(taken_in, 0), "amax")
        self.held.index_copy_(0, batch.states, ends)
        return replace(batch, taken_in=taken_in)

    def behind(self, lengths: Tensor, places: Tensor, columns: Tensor) -> Tensor:
        """Which rows at `columns` [B, R] behind the text, its last tokens among them, the states hold. [B * R]."""
        keys = lengths[:, None] + columns
        held = self.held[places][:, None].masked_fill(keys[:, :1] <= 0, 0)
        return (keys < held).view(-1)

    def commit(self, path: KeptPath) -> None:
        """Fold the path of each tree as far as it was run."""
        if path.staged is not None:
            last, count = path.staged.reached(path)
            self.states.fold(path.staged, last)
            self.held.index_copy_(0, path.staged.places, path.base + count)

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy states from place to place, one after the other."""
        self.states.copy(copies)
        for source, target in copies:
            self.held[target] = self.held[source]


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
