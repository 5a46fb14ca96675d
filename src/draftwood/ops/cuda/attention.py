"""Paged attention for prefill, decode, verification and draft growth on a GPU, the same bits in all of them.

A row's keys have logical numbers: its `visible` linear keys, then its own ancestors in the tree in path order. They
are taken in an order that these numbers alone decide, never the batch: blocks of 64 into the running softmax of their
chunk of 256, chunks one after the other. So a token gives the same result as a draft node, among others or alone, and
later as a committed token; in a tile of any height; with one program for all its keys, or one for each chunk.

    logical key   0 ─────────────── 256 ───────── visible ── length          a draft node's row
    chunks        |     states[0]    |    states[1]  :  |
    blocks        |   |   |   |   |  |   |   |   |   :  |
                  └── scan_linear: rows in tiles ──┘ └ finish_rows: row by row, with its own keys

Products are at most 32 lines high if their bits have to be the same. Up to there Triton uses the warp's matrix
instruction for every height; from 64 on the warp group's, whose bits are not promised to be the same.
"""
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from draftwood.batch import AttentionShape, ForwardBatch, Pages
from draftwood.links import BITS
from draftwood.ops.cuda.attention_kernels import CHUNK, LARGEST_GROUP, finish_rows, scan_linear
from draftwood.ops.cuda.online_softmax import BLOCK
from draftwood.ops.cuda.pdl import OVERLAPPING
from draftwood.ops.cuda.tails import Tails, tails_of
from draftwood.ops.prefill import PrefillAttention

FILLS_CHIP = 264  # programs, two for each multiprocessor of an H200
TALLEST_EXACT = 32  # lines of a tile whose bits are those of lower ones
FEW_ROWS, TALL, TALLEST = 128, 64, 128  # lines where bits are free, for few rows and for many; measured on an H200
UNLIMITED = 1 << 30  # a window no sequence reaches


@dataclass(frozen=True)
class Tiling:
    """How the rows of a batch are cut into programs."""

    lines: int  # of a tile: rows times padded group
    group_padded: int
    one_tile: bool  # a sequence's rows fit into one tile
    num_tiles: int
    num_splits: int

    @classmethod
    def choose(cls, plan: TreeAttention, group: int, kv_heads: int) -> Tiling:
        """The lowest tile that holds a sequence's rows, and as many splits as fill the chip."""
        if group > LARGEST_GROUP:
            raise ValueError(f"{group} query heads share a key head; the kernels take at most {LARGEST_GROUP}")
        group_padded = _power_of_2(group)
        fits = _power_of_2(plan.max_rows * group_padded)
        lines = max(16, min(fits, plan.largest_tile))
        rows = lines // group_padded
        one_tile = plan.max_rows <= rows
        num_sequences = plan.batch.tree_base.shape[0]
        num_tiles = num_sequences if one_tile else plan.batch.tokens.shape[0] // rows + num_sequences
        wanted = plan.num_splits or math.ceil(FILLS_CHIP / (num_tiles * kv_heads))
        return cls(lines, group_padded, one_tile, num_tiles, min(wanted, plan.num_chunks))


@dataclass(frozen=True)
class TreeAttention:
    """Attention planned for one batch; means what `DenseAttention` means. Its `run` can be captured in a graph."""

    batch: ForwardBatch
    cache: Pages
    shape: AttentionShape
    tails: Tails | None  # None: no row is a draft node, or its bits are not asked for
    max_nodes: int  # that may lie behind a sequence's linear keys, where masks are bits; 0: none
    max_rows: int
    largest_tile: int
    num_splits: int | None

    @classmethod
    def plan(
        cls,
        batch: ForwardBatch,
        cache: Pages,
        shape: AttentionShape,
        *,
        max_rows: int | None = None,
        linear: bool = False,
        max_depth: int | None = None,
        max_nodes: int | None = None,
        exact: bool = True,
        largest_tile: int | None = None,
        num_splits: int | None = None,
    ) -> TreeAttention:
        """Plan for a batch of which the host knows: no sequence has more than `max_rows` rows, whether all are
        `linear`, that is no draft nodes, no tree is deeper than `max_depth`, and none has more than `max_nodes` nodes.
        Knowing less is only slower. Not `exact`, nodes are masked where they lie: faster, but a node's bits then are
        not those of the token it becomes.

        `num_splits` programs share the chunks of a tile of `largest_tile` lines; None: as is fastest.
        """
        depth = batch.ancestors.shape[1] * BITS if max_depth is None else max_depth
        rows = batch.tokens.shape[0] if max_rows is None else max_rows
        largest_tile = largest_tile or (TALLEST_EXACT if exact else TALL if rows <= FEW_ROWS else TALLEST)
        # With a window, how far back a node lies is a matter of its path.
        if linear or (not exact and shape.window is None):
            nodes = batch.ancestors.shape[1] * BITS if max_nodes is None else max_nodes
            return cls(batch, cache, shape, None, 0 if linear else nodes, rows, largest_tile, num_splits)
        tails = tails_of(batch, cache.page_size, depth)
        return cls(batch, cache, shape, tails, 0, rows, largest_tile, num_splits)

    @property
    def num_chunks(self) -> int:
        """Chunks that the longest sequence these block tables can hold has."""
        return -(-self.batch.block_table.shape[1] * self.cache.page_size // CHUNK)

    def run(self, layer: int, query: Tensor, out: Tensor | None = None, *, sinks: Tensor | None = None) -> Tensor:
        """[N, heads, D], [heads] -> [N, heads * D]."""
        num_rows, heads, dim = query.shape
        kv_heads = self.cache.store.shape[2]
        tiling = Tiling.choose(self, heads // kv_heads, kv_heads)
        query, out = query.contiguous(), query.new_empty(num_rows, heads * dim) if out is None else out
        split = tiling.num_splits > 1
        in_parts = split or self.tails is not None
        num_states = (self.num_chunks if split else 2) if in_parts else 0
        states = query.new_empty(num_rows * heads, num_states, dim, dtype=torch.float32)
        sums = query.new_empty(num_rows * heads, num_states, 2, dtype=torch.float32)
        if num_rows:
            self._scan(layer, query, out, states, sums, sinks, tiling)
        if num_rows and self.tails is not None:
            self._finish(layer, query, out, states, sums, sinks, self.tails, split)
        return out

    def _scan(
        self, layer: int, query: Tensor, out: Tensor, states: Tensor, sums: Tensor, sinks: Tensor | None, tiling: Tiling
    ) -> None:
        batch, (keys, values) = self.batch, self.cache.store[layer]
        kv_heads, num_slots, dim = keys.shape
        padded = _padded(dim)
        scan_linear[(tiling.num_tiles, kv_heads, tiling.num_splits)](
            query, keys, values, batch.block_table, batch.row_offsets, batch.positions, batch.visible,
            self._lengths, batch.ancestors.contiguous(), batch.tree_base, out, states, sums,
            self._arrived if tiling.num_splits > 1 and self.tails is None else None, sinks, self._scale, self._window,
            batch.tree_base.shape[0], batch.block_table.stride(0), num_slots, states.shape[1],
            batch.ancestors.shape[1], self.max_nodes,
            kv_heads, query.shape[1] // kv_heads, tiling.group_padded, dim, padded, self.cache.page_size,
            tiling.lines, tiling.one_tile, self.tails is not None, self._masked, tiling.num_splits > 1,
            self._cap,
            num_warps=_warps(tiling.lines, padded), num_stages=_stages(keys, len(query)), enable_fp_fusion=False,
            **OVERLAPPING,
        )  # fmt: skip

    def _finish(
        self, layer: int, query: Tensor, out: Tensor, states: Tensor, sums: Tensor, sinks: Tensor | None, tails: Tails,
        split: bool,
    ) -> None:  # fmt: skip
        batch, (keys, values) = self.batch, self.cache.store[layer]
        kv_heads, num_slots, dim = keys.shape
        finish_rows[(query.shape[0], kv_heads)](
            query, keys, values, batch.positions, batch.visible, tails.lengths, tails.slots, out, states, sums,
            sinks, self._scale, self._window, num_slots, states.shape[1], tails.slots.shape[1],
            kv_heads, query.shape[1] // kv_heads, dim, _padded(dim), split, self._cap,
            num_warps=4, num_stages=1, enable_fp_fusion=False, **OVERLAPPING,
        )  # fmt: skip

    @cached_property
    def _arrived(self) -> Tensor:
        """Of each tile and key head, the programs that are done with their chunks; all layers count in the same."""
        batch = self.batch
        most_tiles = len(batch.tokens) + len(batch.tree_base)
        return torch.zeros(most_tiles * self.cache.store.shape[2], dtype=torch.int32, device=batch.tokens.device)

    @property
    def _masked(self) -> int:
        """Whether nodes are masked where they lie, and if so by how many words: 2 of them, or more."""
        return 0 if self.max_nodes == 0 else 2 if self.batch.ancestors.shape[1] <= 2 else 3

    @property
    def _lengths(self) -> Tensor:
        return self.batch.visible if self.tails is None else self.tails.lengths

    @property
    def _scale(self) -> float:
        return self.shape.scale * math.log2(math.e)

    @property
    def _cap(self) -> float:
        return 0.0 if self.shape.softcap is None else self.shape.softcap * math.log2(math.e)

    @property
    def _window(self) -> int:
        return UNLIMITED if self.shape.window is None else self.shape.window


@dataclass(frozen=True)
class Apart:
    """Attention of a batch that was joined of others, each as it would be by itself: in tiles of its own height."""

    plans: tuple[TreeAttention | PrefillAttention, ...]

    def run(self, layer: int, query: Tensor, *, sinks: Tensor | None = None) -> Tensor:
        """[N, heads, D], [heads] -> [N, heads * D]."""
        out = query.new_empty(len(query), query[0].numel())
        sizes = [len(plan.batch.tokens) for plan in self.plans]
        for plan, rows, results in zip(self.plans, query.split(sizes), out.split(sizes), strict=True):
            plan.run(layer, rows, results, sinks=sinks)
        return out


def _warps(lines: int, dim: int) -> int:
    """Of a tile: with four, sums of that size leave the registers."""
    return 8 if lines >= 128 or dim >= 256 else 4


def _stages(keys: Tensor, num_rows: int) -> int:
    """Of the pipeline: with three, two blocks of keys and values are on their way. Behind and before products of one
    row it is one: they need the memory that a longer pipeline takes as a cache, and a step with it took 8 % longer.
    """
    bytes_of_block = 2 * BLOCK * _power_of_2(keys.shape[-1]) * keys.element_size()
    return 3 if num_rows > 1 and 2 * bytes_of_block <= 128 << 10 else 2


def _padded(dim: int) -> int:
    """Width of a head in products, which are at least 16 wide."""
    return max(16, _power_of_2(dim))


def _power_of_2(number: int) -> int:
    """The first that is not below `number`."""
    return 1 << (number - 1).bit_length()
