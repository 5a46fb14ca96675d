"""Keys and values in pages: stage a forward's rows to slots, and keep the accepted path.

A sequence of length n (root included) with a tree of three draft nodes, before and after the path root, a, c:

    index    0 … n-1        n    n+1   n+2            0 … n-1     n    n+1
    holds    committed      a     b     c      ->     committed   a     c        (b is overwritten)

A chain is already in place, so nothing moves.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from draftwood.batch import ForwardBatch, Pages
from draftwood.cache.blocks import PageTables
from draftwood.cache.recurrent import RecurrentStates, new_stores
from draftwood.cache.tier import HostTier, Slotted
from draftwood.errors import InvalidRequest
from draftwood.links import may_look
from draftwood.machine import zeroed_memory
from draftwood.model.config import ModelConfig
from draftwood.ops.packed import SCALE_BYTES, PackedPages, Packing
from draftwood.ops.staging import staged
from draftwood.protocols import BatchView, Span
from draftwood.states import StagedTrees
from draftwood.tree import TokenTree, Verdict

STATES = 64  # sequences that may be open at a time, where the model has recurrent layers


class KVCache:
    """The pages' tensors and the tables that say who owns them."""

    def __init__(
        self,
        config: ModelConfig,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        num_states: int = STATES,
        packing: Packing | None = None,
    ) -> None:
        # One page more than sequences can own: rows that only fill a batch up write there.
        layers, heads, dim = config.cache_shape
        shape = (layers, 2, heads, (num_pages + 1) * page_size)
        places = num_states if config.recurrent else 0
        self.states = RecurrentStates(new_stores(config.recurrent, places, dtype, device))
        if packing is None:
            self.memory = Pages(_zeros((*shape, dim), dtype, device), page_size, self.states.stores)
        else:
            store = _zeros((*shape, dim + SCALE_BYTES), torch.uint8, device)
            self.memory = PackedPages(store, page_size, self.states.stores, packing, dtype)
        self.packing = packing
        self.tables = PageTables(num_pages, page_size, places)
        self.device = device
        self._parts = [Slotted(self.memory.store, 3)]
        self._before_moves: list[Callable[[], None]] = []

    @property
    def page_size(self) -> int:
        """Tokens a page holds."""
        return self.tables.page_size

    @property
    def num_bytes(self) -> int:
        """Memory of all pages and states."""
        return self.memory.store.numel() * self.memory.store.element_size() + self.states.num_bytes

    def keep_evicted(self, num_pages: int) -> None:
        """Keep so many pages that had to make room in host memory."""
        if self.tables.states is not None:
            raise InvalidRequest("Models with recurrent layers keep no evicted pages: leave cache_host_tokens at 0.")
        self.tables.pool.tier = HostTier(self._parts, self._before_moves, self.page_size, num_pages)

    def lay_beside(self, memory: Tensor, dim: int) -> None:
        """Other memory under the same slots, counted by `dim`: it leaves the device with a page, and comes back."""
        self._parts.append(Slotted(memory, dim))

    def before_moves(self, write: Callable[[], None]) -> None:
        """Call this before a page leaves or comes back: it writes what waits to be written under its slots."""
        self._before_moves.append(write)

    @property
    def scratch_page(self) -> int:
        """A page that no sequence owns."""
        return self.tables.pool.num_pages

    @property
    def scratch_state(self) -> int | None:
        """A place of states that no sequence owns; None where the model keeps none."""
        return None if self.tables.states is None else self.tables.states.count

    def state_places(self, spans: Sequence[Span], device: torch.device) -> Tensor | None:
        """Where the spans' states lie. [S]."""
        places = [self.tables.state(span.seq_id) for span in spans] if self.tables.states else []
        return torch.tensor(places, device=device) if places else None

    def copy_states(self) -> None:
        """Save and restore what prefix sharing has asked for, before anything runs."""
        if self.tables.states is not None:
            self.states.copy(self.tables.states.copies())

    def block_table(self, spans: Sequence[Span], device: torch.device | None = None) -> Tensor:
        """The pages of each span's sequence, there or on another device. [S, P], -1 padded."""
        pages = [self.tables.pages(span.seq_id) for span in spans]
        widest = max(len(own) for own in pages)
        return torch.tensor([own + [-1] * (widest - len(own)) for own in pages], device=device or self.device)

    def slots(self, block_table: Tensor, span: Tensor, index: Tensor) -> Tensor:
        """Slots of key number `index` of spans `span`; [S, P], [K], [K] -> [K]."""
        page = block_table[span, index // self.page_size]
        return page * self.page_size + index % self.page_size

    def stage_text(
        self, spans: Sequence[Span], logit_rows: Tensor | None = None, device: torch.device | None = None
    ) -> ForwardBatch:
        """Rows for every pending token of `spans`, there or on another device; logits only at `logit_rows` [K]."""
        device = device or self.device
        tokens, index, owner = _pending_rows(spans, device)
        table = self.block_table(spans, device)
        base = torch.tensor([span.end for span in spans], device=device)
        ends = [0, *itertools.accumulate(span.end - span.start for span in spans)]
        embed_rows, embeds = _given_embeddings(spans, ends, device)
        return ForwardBatch(
            tokens=tokens,
            positions=index,
            slots=self.slots(table, owner, index),
            visible=_visible(spans, index, ends),
            ancestors=torch.zeros(len(tokens), 1, dtype=torch.int64, device=device),
            row_offsets=torch.tensor(ends, device=device),
            tree_base=base,
            num_keys=base,
            block_table=table,
            logit_rows=torch.empty(0, dtype=torch.int64, device=device) if logit_rows is None else logit_rows,
            max_rows=max((span.end - span.start for span in spans), default=0),
            linear=True,
            pieces=tuple((span.start, span.end) for span in spans),
            states=self.state_places(spans, device),
            is_text=True,
            adapters=_adapters(spans, owner),
            source_lengths=_source_lengths(spans, device),
            unread=tuple(
                (i, s.source) for i, s in enumerate(spans) if s.source is not None and s.start < len(s.source)
            ),
            turns=_turns(spans, device),
            embed_rows=embed_rows,
            embeds=embeds,
        )

    def keep_path(self, view: BatchView, tree: TokenTree, verdict: Verdict, staged: StagedTrees | None) -> None:
        """Keep each tree's accepted path, in the pages and in the states."""
        index = tree.local[verdict.path.clamp(min=0)]
        if tree.num_drafted:
            self.keep(view.block_table, view.lengths, index, verdict.length, chain=tree.tries.shape[1] == 1)
        if staged is not None:
            self.states.keep(staged, index.gather(1, verdict.length[:, None])[:, 0])

    def keep(self, block_table: Tensor, base: Tensor, index: Tensor, length: Tensor, *, chain: bool = False) -> None:
        """Move staged nodes `index` [B, D + 1] (root first, `length` of the others count) right behind `base` [B].

        In a `chain` they are there already.
        """
        if chain or not self.memory.store.numel():  # no layer has attention
            return
        if self.device.type == "cuda":
            from draftwood.ops.cuda.commit import keep_path

            return keep_path(self.memory.store, block_table, base, index, length, self.page_size)
        steps = torch.arange(index.shape[1], device=self.device).expand_as(index)
        moves = (steps <= length[:, None]) & (index > steps)  # a node that lies nowhere has the number 0
        look = may_look(moves)
        if look and not bool(moves.any()):
            return
        source, target = (self._behind(block_table, base, number, moves) for number in (index, steps))
        if look:
            source, target = source[moves], target[moves]
        self.memory.store[:, :, :, target.view(-1)] = self.memory.store[:, :, :, source.view(-1)]

    def _behind(self, block_table: Tensor, base: Tensor, number: Tensor, wanted: Tensor) -> Tensor:
        """Slots of the keys `number` [B, n], counted from 1 at `base` [B]; of the scratch page where not wanted."""
        at = base[:, None] + number - 1
        page = block_table.gather(1, (at // self.page_size).clamp(max=block_table.shape[1] - 1))
        return torch.where(wanted, page * self.page_size + at % self.page_size, self.scratch_page * self.page_size)


@dataclass(frozen=True)
class Places:
    """Where rows of a fixed shape lie, counted from their sequence's length."""

    index: Tensor  # [B, R] int64 of a row's key
    position: Tensor  # [B, R] int64
    ancestors: Tensor | None = None  # [B * R, W]; None: rows of text, each of which sees all keys up to its own
    max_depth: int | None = None
    max_nodes: int | None = None
    shift: int = 0  # to be added to index and position


def behind_last(places: Places, count: int) -> Places:
    """Places of the text's last `count` tokens, and of nodes behind it."""
    size, rows = places.index.shape
    assert places.ancestors is not None
    steps = torch.arange(-count, 0, device=places.index.device).expand(size, -1)
    words = places.ancestors.shape[1]
    bits = torch.nn.functional.pad(places.ancestors.view(size, rows, words), (0, 0, count, 0))
    index, position = (torch.cat([steps, own], 1) for own in (places.index, places.position))
    return replace(places, index=index, position=position, ancestors=bits.flatten(0, 1))


def stage_behind(
    lengths: Tensor,
    block_table: Tensor,
    tokens: Tensor,
    places: Places,
    page_size: int,
    max_positions: int,
    logit_rows: Tensor | None = None,
    source_lengths: Tensor | None = None,
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
        source_lengths=source_lengths,
    )


def stage_trees(view: BatchView, tree: TokenTree, page_size: int, max_positions: int, *, chain: bool) -> ForwardBatch:
    """Whole trees, root and all, behind what their sequences have committed; logits at every node."""
    batch = _stage_trees(view, tree, page_size, max_positions, chain)
    if view.turn_shifts is None:
        return batch
    return replace(batch, turns=(batch.positions + view.turn_shifts[tree.owner]).expand(3, -1))


def _stage_trees(view: BatchView, tree: TokenTree, page_size: int, max_positions: int, chain: bool) -> ForwardBatch:
    size, rows = tree.num_trees, tree.widest
    if tree.num_nodes != size * rows:
        return replace(_stage_ragged(view, tree, page_size, max_positions, chain), states=view.states)
    places = Places(tree.local.view(size, rows), tree.depth.view(size, rows), shift=-1)
    if not chain:  # a chain is a piece of text
        places = replace(places, ancestors=tree.shape.ancestors, max_depth=tree.max_depth, max_nodes=rows - 1)
    tokens = tree.tokens.clamp(min=0).view(size, rows)
    staged = stage_behind(
        view.lengths, view.block_table, tokens, places, page_size, max_positions, source_lengths=view.source_lengths
    )
    if view.adapters is not None:
        staged = replace(staged, adapters=view.adapters[:, None].expand(size, rows).reshape(-1))
    return staged if view.states is None else replace(staged, states=view.states)


def _stage_ragged(view: BatchView, tree: TokenTree, page_size: int, max_positions: int, chain: bool) -> ForwardBatch:
    """The same for trees of different sizes."""
    owner, before = tree.owner, view.lengths[tree.owner]
    key = before - 1 + tree.local
    num_keys = view.lengths + tree.sizes - 1
    return ForwardBatch(
        tokens=tree.tokens,
        positions=(before - 1 + tree.depth).clamp(max=max_positions - 1),
        slots=view.block_table[owner, key // page_size] * page_size + key % page_size,
        visible=key + 1 if chain else before,
        ancestors=torch.zeros_like(key)[:, None] if chain else tree.shape.ancestors,
        row_offsets=tree.offsets,
        tree_base=num_keys if chain else view.lengths,
        num_keys=num_keys,
        block_table=view.block_table,
        logit_rows=torch.arange(tree.num_nodes, device=key.device),
        max_rows=tree.widest,
        linear=chain,
        max_depth=None if chain else tree.max_depth,
        max_nodes=None if chain else tree.widest - 1,
        logits_in_order=True,
        adapters=None if view.adapters is None else view.adapters[owner],
        source_lengths=view.source_lengths,
    )


@lru_cache(maxsize=1024)
def _constants(size: int, rows: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Row offsets, every row, and no ancestors: the same in every step of a shape."""
    count = size * rows
    offsets = torch.arange(size + 1, device=device) * rows
    empty = torch.zeros(count, 1, dtype=torch.int64, device=device)
    return offsets, torch.arange(count, device=device), empty


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that cost no memory until they are written to, where the system can do that."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    if not num_bytes:  # no layer has attention
        return torch.zeros(shape, dtype=dtype)
    try:
        # A token touches every layer and head: with large pages the first few would claim the whole cache.
        memory = zeroed_memory(num_bytes, large_pages=False)
    except (OSError, OverflowError, ValueError) as error:
        raise InvalidRequest(
            f"A cache of {num_bytes / 2**30:.1f} GiB does not fit into this machine's memory; lower cache_tokens."
        ) from error
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _adapters(spans: Sequence[Span], owner: Tensor) -> Tensor | None:
    """Each row's, where any has one. [N]."""
    if all(span.adapter < 0 for span in spans):
        return None
    return torch.tensor([span.adapter for span in spans], device=owner.device)[owner]


def _turns(spans: Sequence[Span], device: torch.device) -> Tensor | None:
    """What rotation goes by, where it is not positions. [3, N]."""
    if all(span.images is None or span.images.turns is None for span in spans):
        return None
    return torch.cat([_turns_of(span) for span in spans], 1).to(device)


def _turns_of(span: Span) -> Tensor:
    index = torch.arange(span.start, span.end)
    if span.images is None or span.images.turns is None:
        return index.expand(3, -1)
    turns, behind = span.images.turns, index + span.images.shift
    known = index < turns.shape[1]
    return torch.where(known, turns[:, index.clamp(max=turns.shape[1] - 1)], behind)


def _given_embeddings(
    spans: Sequence[Span], begins: Sequence[int], device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Rows of the batch that are image tokens, and what they begin with."""
    rows, embeds = [], []
    for span, begin in zip(spans, begins, strict=False):
        if span.images is not None:
            here = (span.images.rows >= span.start) & (span.images.rows < span.end)
            rows.append(span.images.rows[here] - span.start + begin)
            embeds.append(span.images.embeds[here])
    if not rows:
        return None, None
    return torch.cat(rows).to(device), torch.cat(embeds).to(device)


def _visible(spans: Sequence[Span], index: Tensor, begins: Sequence[int]) -> Tensor:
    """Keys that each row sees: all up to its own, and in images that it belongs to those behind it. [N]."""
    visible = index + 1
    for span, begin in zip(spans, begins, strict=False):
        for start, end in span.images.blocks if span.images is not None else ():
            if start < span.end and span.start < end:
                visible[begin + max(start, span.start) - span.start : begin + end - span.start] = end
    return visible


def _source_lengths(spans: Sequence[Span], device: torch.device) -> Tensor | None:
    """Tokens of each span's source; None where there are no sources. [S]."""
    if all(span.source is None for span in spans):
        return None
    return torch.tensor([0 if span.source is None else len(span.source) for span in spans], device=device)


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
