"""Keys and values in pages: stage a forward's rows to slots, and keep the accepted path.

A sequence of length n (root included) with a tree of three draft nodes, before and after the path root, a, c:

    index    0 … n-1        n    n+1   n+2            0 … n-1     n    n+1
    holds    committed      a     b     c      ->     committed   a     c        (b is overwritten)

A chain is already in place, so nothing moves.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from draftwood.cache.batch_state import DeviceBatchView
from draftwood.cache.blocks import PageTables
from draftwood.errors import InvalidRequest
from draftwood.machine import zeroed_memory
from draftwood.model.batch import ForwardBatch, Pages
from draftwood.model.config import ModelConfig
from draftwood.ops.staging import staged
from draftwood.protocols import Span
from draftwood.tree import TokenTree, Verdict
from draftwood.treebuilder import TreeBuilder


@dataclass(frozen=True)
class NodeRows:
    """Draft nodes to run: K rows of trees that hang behind the last token of some span."""

    span: Tensor  # [K] int64 index of the span
    index: Tensor  # [K] int64 the node's number in its own tree, 1 …: where its key is staged
    tokens: Tensor  # [K] int64
    depth: Tensor  # [K] int64
    ancestors: Tensor  # [K, W] int64

    @classmethod
    def of_tree(cls, tree: TokenTree, span: Tensor) -> NodeRows | None:
        """All draft nodes of `tree`, whose b-th tree belongs to span `span[b]`; None if there are none."""
        if tree.num_drafted == 0:
            return None
        drafted = tree.parents >= 0
        owner = span[tree.owner[drafted]]
        return cls(owner, tree.local[drafted], tree.tokens[drafted], tree.depth[drafted], tree.ancestors[drafted])

    @classmethod
    def of_growth(cls, builder: TreeBuilder, columns: Tensor, runs: Tensor, spans: Sequence[int]) -> NodeRows:
        """Those nodes in `columns` [B, k] of growing trees that are to run [B, k]; tree `spans[i]` is behind span i."""
        owner, place = runs.nonzero(as_tuple=True)
        column = columns[owner, place]
        span_of = torch.full((builder.num_trees,), -1, device=columns.device)
        span_of[list(spans)] = torch.arange(len(spans), device=columns.device)
        return cls(
            span=span_of[owner],
            index=column,
            tokens=builder.tokens[owner, column],
            depth=builder.depth[owner, column],
            ancestors=builder.ancestors(columns)[owner, place],
        )


class KVCache:
    """The pages' tensors and the tables that say who owns them."""

    def __init__(
        self, config: ModelConfig, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        # One page more than anybody can own: rows that only fill a batch up write there.
        shape = (config.num_layers, 2, config.num_kv_heads, (num_pages + 1) * page_size, config.head_dim)
        self.memory = Pages(_zeros(shape, dtype, device), page_size)
        self.tables = PageTables(num_pages, page_size)
        self.device = device

    @property
    def page_size(self) -> int:
        """Tokens a page holds."""
        return self.tables.page_size

    @property
    def num_bytes(self) -> int:
        """Memory of all pages."""
        return self.memory.store.numel() * self.memory.store.element_size()

    @property
    def scratch_page(self) -> int:
        """A page nobody owns."""
        return self.tables.pool.num_pages

    def block_table(self, spans: Sequence[Span], device: torch.device | None = None) -> Tensor:
        """The pages of each span's sequence, there or on another device. [S, P], -1 padded."""
        pages = [self.tables.pages(span.seq_id) for span in spans]
        widest = max(len(own) for own in pages)
        return torch.tensor([own + [-1] * (widest - len(own)) for own in pages], device=device or self.device)

    def slots(self, block_table: Tensor, span: Tensor, index: Tensor) -> Tensor:
        """Slots of key number `index` of spans `span`; [S, P], [K], [K] -> [K]."""
        page = block_table[span, index // self.page_size]
        return page * self.page_size + index % self.page_size

    def stage(self, spans: Sequence[Span], nodes: NodeRows | None, logit_rows: Tensor | None = None) -> ForwardBatch:
        """Rows for every pending token of `spans` and every node, with their slots and masks.

        Without `logit_rows` (indices into pending tokens followed by nodes), logits are wanted at each span's
        last pending token, then at every node.
        """
        text, owner = self._pending(spans, self.device)
        if logit_rows is None:
            count = len(text.tokens)
            extra = torch.arange(count, count + (nodes.tokens.shape[0] if nodes else 0), device=self.device)
            logit_rows = torch.cat([text.row_offsets[1:] - 1, extra])
        batch = replace(text, logit_rows=logit_rows)
        return batch if nodes is None else self._with_nodes(batch, owner, nodes)

    def stage_text(self, spans: Sequence[Span], device: torch.device | None = None) -> ForwardBatch:
        """Rows for every pending token of `spans`, of which no logits are wanted; there, or on another device."""
        return self._pending(spans, device or self.device)[0]

    def _pending(self, spans: Sequence[Span], device: torch.device) -> tuple[ForwardBatch, Tensor]:
        """Rows for every pending token, without logits, and the span of each."""
        tokens, index, owner = _pending_rows(spans, device)
        table = self.block_table(spans, device)
        base = torch.tensor([span.end for span in spans], device=device)
        ends = [0, *itertools.accumulate(span.end - span.start for span in spans)]
        batch = ForwardBatch(
            tokens=tokens,
            positions=index,
            slots=self.slots(table, owner, index),
            visible=index + 1,
            ancestors=torch.zeros(len(tokens), 1, dtype=torch.int64, device=device),
            row_offsets=torch.tensor(ends, device=device),
            tree_base=base,
            num_keys=base,
            block_table=table,
            logit_rows=torch.empty(0, dtype=torch.int64, device=device),
            max_rows=max((span.end - span.start for span in spans), default=0),
            linear=True,
        )
        return batch, owner

    def stage_next(self, seq_ids: Sequence[int], index: Tensor, tokens: Tensor) -> ForwardBatch:
        """One further row of text for each of some sequences, with key number `index` [S]: a node of a chain."""
        return replace(self.stage_ahead(seq_ids, index, 1)[0], tokens=tokens)

    def stage_ahead(self, seq_ids: Sequence[int], index: Tensor, count: int) -> list[ForwardBatch]:
        """That `count` times, from `index` [S] on, for tokens which are not known yet."""
        table = self.block_table([Span(seq_id, (), 0, 0) for seq_id in seq_ids])
        rows = torch.arange(len(seq_ids) + 1, device=self.device)
        ahead = index + torch.arange(count, device=self.device)[:, None]  # [count, S]
        slots = self.slots(table, rows[:-1].expand_as(ahead).reshape(-1), ahead.reshape(-1)).view_as(ahead)
        nothing = torch.zeros(len(seq_ids), 1, dtype=torch.int64, device=self.device)
        return [
            ForwardBatch(
                tokens=nothing[:, 0],
                positions=here,
                slots=slot,
                visible=seen,
                ancestors=nothing,
                row_offsets=rows,
                tree_base=seen,
                num_keys=seen,
                block_table=table,
                logit_rows=rows[:-1],
                max_rows=1,
                linear=True,
            )
            for here, slot, seen in zip(ahead, slots, ahead + 1, strict=True)
        ]

    def _with_nodes(self, pending: ForwardBatch, owner: Tensor, nodes: NodeRows) -> ForwardBatch:
        """The same batch with `nodes` behind their sequences' pending rows."""
        before = pending.tree_base[nodes.span]
        index = before + nodes.index - 1
        owner = torch.cat([owner, nodes.span])
        order = torch.argsort(owner, stable=True)
        placed = torch.empty_like(order)
        placed[order] = torch.arange(order.shape[0], device=self.device)
        counts = torch.bincount(owner, minlength=pending.tree_base.shape[0])
        words = nodes.ancestors.new_zeros(pending.tokens.shape[0], nodes.ancestors.shape[1])
        return ForwardBatch(
            tokens=torch.cat([pending.tokens, nodes.tokens])[order],
            positions=torch.cat([pending.positions, before - 1 + nodes.depth])[order],
            slots=torch.cat([pending.slots, self.slots(pending.block_table, nodes.span, index)])[order],
            visible=torch.cat([pending.visible, before])[order],
            ancestors=torch.cat([words, nodes.ancestors])[order],
            row_offsets=torch.cat([counts.new_zeros(1), counts.cumsum(0)]),
            tree_base=pending.tree_base,
            num_keys=pending.num_keys.scatter_reduce(0, nodes.span, index + 1, "amax"),
            block_table=pending.block_table,
            logit_rows=placed[pending.logit_rows],
            text_rows=placed[: pending.tokens.shape[0]],
        )

    def commit(self, batch: ForwardBatch, tree: TokenTree, verdict: Verdict, span: Tensor) -> None:
        """Move the keys and values of accepted nodes to where committed tokens live."""
        if tree.num_drafted:
            index = tree.local[verdict.path.clamp(min=0)]  # [B, D + 1]
            self.keep(batch.block_table[span], batch.tree_base[span], index, verdict.length)

    def keep(self, block_table: Tensor, base: Tensor, index: Tensor, length: Tensor, *, chain: bool = False) -> None:
        """Move staged nodes `index` [B, D + 1] (root first, `length` of the others count) right behind `base` [B].

        In a `chain` they are there already.
        """
        if chain:
            return
        if self.device.type == "cuda":
            from draftwood.ops.cuda.commit import keep_path

            return keep_path(self.memory.store, block_table, base, index, length, self.page_size)
        depth = torch.arange(index.shape[1], device=self.device).expand_as(index)
        moves = (depth >= 1) & (depth <= length[:, None]) & (index != depth)
        if not bool(moves.any()):
            return
        owner, step = moves.nonzero(as_tuple=True)
        source = self.slots(block_table, owner, base[owner] + index[owner, step] - 1)
        target = self.slots(block_table, owner, base[owner] + step - 1)
        self.memory.store[:, :, :, target] = self.memory.store[:, :, :, source]


@dataclass(frozen=True)
class Places:
    """Where rows of a fixed shape lie, counted from their sequence's length."""

    index: Tensor  # [B, R] int64 of a row's key
    position: Tensor  # [B, R] int64
    ancestors: Tensor | None = None  # [B * R, W]; None: rows of text, each of which sees all keys up to its own
    max_depth: int | None = None
    max_nodes: int | None = None
    shift: int = 0  # to be added to index and position


def stage_behind(
    lengths: Tensor,
    block_table: Tensor,
    tokens: Tensor,
    places: Places,
    page_size: int,
    max_positions: int,
    logit_rows: Tensor | None = None,
) -> ForwardBatch:
    """As many rows `tokens` [B, R] for every sequence, around the end of its `lengths` [B] tokens.

    Without `logit_rows`, logits are wanted everywhere.
    """
    size, rows = tokens.shape
    linear = places.ancestors is None
    positions, slots, visible = staged(
        lengths,
        block_table,
        places.index,
        places.position,
        places.shift,
        page_size,
        max_positions - 1,
        linear,
    )
    offsets, every, empty = _constants(size, rows, tokens.device)
    # Kernels on a GPU find out themselves how many keys there are.
    num_keys = lengths if tokens.is_cuda else lengths + places.index[:, -1] + places.shift + 1
    return ForwardBatch(
        tokens=tokens.reshape(-1),
        positions=positions,
        slots=slots,
        visible=visible,
        ancestors=empty if places.ancestors is None else places.ancestors,
        row_offsets=offsets,
        tree_base=num_keys if linear else lengths,
        num_keys=num_keys,
        block_table=block_table,
        logit_rows=every if logit_rows is None else logit_rows,
        max_rows=rows,
        linear=linear,
        max_depth=places.max_depth,
        max_nodes=places.max_nodes,
        logits_in_order=logit_rows is None,
    )


def stage_trees(
    view: DeviceBatchView, tree: TokenTree, page_size: int, max_positions: int, *, chain: bool
) -> ForwardBatch:
    """Whole trees of one shape, root and all, behind what their sequences have committed."""
    size = tree.num_trees
    rows = tree.num_nodes // size
    places = Places(tree.local.view(size, rows), tree.depth.view(size, rows), shift=-1)
    if not chain:  # a chain is a piece of text
        places = replace(places, ancestors=tree.ancestors, max_depth=tree.max_depth, max_nodes=rows - 1)
    tokens = tree.tokens.clamp(min=0).view(size, rows)
    return stage_behind(view.lengths, view.block_table, tokens, places, page_size, max_positions)


@lru_cache(maxsize=1024)
def _constants(size: int, rows: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Row offsets, every row, and no ancestors: the same in every round of a shape."""
    count = size * rows
    offsets = torch.arange(size + 1, device=device) * rows
    empty = torch.zeros(count, 1, dtype=torch.int64, device=device)
    return offsets, torch.arange(count, device=device), empty


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that cost no memory until they are written to, where the system can do that."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    try:
        # A token touches every layer and head: with large pages the first few would claim the whole cache.
        memory = zeroed_memory(num_bytes, large_pages=False)
    except (OSError, OverflowError, ValueError) as error:
        raise InvalidRequest(
            f"A cache of {num_bytes / 2**30:.1f} GiB does not fit into this machine's memory; lower cache_tokens."
        ) from error
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _pending_rows(spans: Sequence[Span], device: torch.device) -> Tensor:
    """Token, index in its sequence, and span of every pending token. [3, N] int64."""
    tokens: list[int] = []
    index: list[int] = []
    owner: list[int] = []
    for i, span in enumerate(spans):
        tokens += span.tokens[span.start : span.end]
        index += range(span.start, span.end)
        owner += [i] * (span.end - span.start)
    return torch.tensor([tokens, index, owner], dtype=torch.int64, device=device)
