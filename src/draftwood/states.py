"""The states of recurrent layers: what is kept of a sequence, and what a forward has made of rows that may be dropped.

A state is the last few inputs of a short convolution (`tail`) and a matrix of each head (`memory`), which holds the
text up to where its sequence is committed. Rows behind it, a tree's nodes or a chain's, change nothing: what each
would add is staged, and the rows of the accepted path are folded in when it is known (`ops/recurrence.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Carried:
    """One layer's states of S sequences."""

    tail: Tensor  # [S, K - 1, C] oldest first
    memory: Tensor | None  # [S, H, P, N]; None: the tail is all there is


@dataclass(frozen=True)
class StateStore:
    """One layer's states of all sequences that have a place, and of one that rows write to that only fill up."""

    tail: Tensor  # [places, K - 1, C]
    memory: Tensor | None  # [places, H, P, N]

    @property
    def num_bytes(self) -> int:
        """Memory of all places."""
        parts = [self.tail] if self.memory is None else [self.tail, self.memory]
        return sum(part.numel() * part.element_size() for part in parts)

    def at(self, places: Tensor, fresh: Tensor | None) -> Carried:
        """The states at `places` [S]; empty where a text is about to begin, `fresh` [S]; None: nowhere."""
        tail = self.tail.index_select(0, places)
        memory = None if self.memory is None else self.memory.index_select(0, places)
        if fresh is not None:
            tail.masked_fill_(fresh[:, None, None], 0)
            memory = memory if memory is None else memory.masked_fill_(fresh[:, None, None, None], 0)
        return Carried(tail, memory)

    def write(self, places: Tensor, states: Carried) -> None:
        """Replace the states at `places` [S]."""
        self.tail.index_copy_(0, places, states.tail)
        if self.memory is not None and states.memory is not None:
            self.memory.index_copy_(0, places, states.memory)

    def copy(self, source: int, target: int) -> None:
        """Copy one place to another."""
        self.tail[target].copy_(self.tail[source])
        if self.memory is not None:
            self.memory[target].copy_(self.memory[source])


@dataclass(frozen=True)
class Block:
    """Rows of S sequences side by side, up to R of each: where they lie among all rows, and which follow from which."""

    index: Tensor  # [S, R] int64 row of the forward, any where there is none
    there: Tensor  # [S, R] bool
    columns: Tensor  # [S, R] int64 places behind the text, -1: its last token
    sees: Tensor  # [S, R, R] bool the rows on the path to each, itself included; empty where there is no row
    depth: Tensor  # [S, R] int64 rows before it on its path
    _windows: dict[int, Tensor] = field(default_factory=dict)

    @property
    def last(self) -> Tensor:
        """The last row of each sequence; any where it has none. [S]."""
        return (self.there * torch.arange(self.there.shape[1], device=self.there.device)).amax(1)

    def windows(self, kernel: int) -> Tensor:
        """For each row the last `kernel` inputs along its path, itself last: numbers in a tail of `kernel` - 1 inputs
        and the rows behind it. [S, R, K].
        """
        if kernel not in self._windows:
            self._windows[kernel] = self._found(kernel)
        return self._windows[kernel]

    def _found(self, kernel: int) -> Tensor:
        places = []
        for before in range(kernel - 1, -1, -1):
            wanted = self.depth - before  # depth of that row; less than 0 in the tail
            match = self.sees & (self.depth[:, None, :] == wanted[:, :, None])
            row = match.to(torch.int8).argmax(-1)
            places.append(torch.where(wanted < 0, wanted, row) + kernel - 1)
        return torch.stack(places, -1)


@dataclass(frozen=True)
class Deposit:
    """What rows add to a memory: each its value times its key, less what decays on the way behind it."""

    total: Tensor  # [S, H, R] float64 logarithm of the decay along the path to each row
    keys: Tensor  # [S, G, R, N] of groups of heads
    values: Tensor  # [S, H, R, P]
    rates: Tensor | None = None  # [H, N] what `total` is multiplied by for each number of a key; None: nothing


@dataclass(frozen=True)
class StagedRows:
    """What one layer has made of a block that is not committed."""

    inputs: Tensor  # [S, R, C] of the convolution
    deposit: Deposit | None


@dataclass(frozen=True)
class StagedTrees:
    """The same of all recurrent layers."""

    places: Tensor  # [S] of the sequences' states
    fresh: Tensor | None  # [S] bool; None: none is
    block: Block
    layers: tuple[StagedRows, ...]

    def reached(self, path: KeptPath) -> tuple[Tensor, Tensor]:
        """The last row of each path that is here, and how many nodes of the path are up to it. Twice [S]."""
        columns = path.columns - 1
        here = (self.block.columns[:, None] == columns[:, :, None]) & self.block.there[:, None]  # [S, D + 1, R]
        steps = torch.arange(columns.shape[1], device=columns.device)
        wanted = (steps <= path.length[:, None]) & ((columns >= 0) | (steps == 0))
        count = (here.any(2) & wanted).long().cumprod(1).sum(1) - 1
        row = here.to(torch.int8).argmax(2).gather(1, count.clamp(min=0)[:, None])[:, 0]
        return row, count


@dataclass(frozen=True)
class KeptPath:
    """The path of each tree that is kept."""

    block_table: Tensor  # [B, P]
    base: Tensor  # [B] committed tokens, the root included
    columns: Tensor  # [B, D + 1] where its nodes were staged behind them, from 1; 0: the root, and nowhere
    length: Tensor  # [B] nodes of it, the root not counted
    chain: bool = False  # all of them lie there already
    staged: StagedTrees | None = None

    def of(self, trees: Tensor) -> KeptPath:
        """Those of some trees [b], which are the ones that were staged."""
        table, base = self.block_table[trees], self.base[trees]
        return KeptPath(table, base, self.columns[trees], self.length[trees], self.chain, self.staged)


class LayerState(Protocol):
    """What layers keep of sequences: pages of keys and values, states of recurrent layers."""

    @property
    def num_bytes(self) -> int:
        """Memory of all of it."""
        ...

    def commit(self, path: KeptPath) -> None:
        """Keep the path of every tree, and nothing else of it."""
        ...


class PlacedState(LayerState, Protocol):
    """One with a place for each sequence."""

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """From place to place, one after the other."""
        ...
