"""A model's cache: pages of keys and values, states of recurrent layers; forwards' rows are staged to its slots."""

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
from draftwood.cache.key_pages import KeyPages
from draftwood.cache.recurrent import FollowingStates, RecurrentStates, new_stores
from draftwood.cache.tier import HostTier, Slotted
from draftwood.errors import InvalidRequest
from draftwood.machine import zeroed_memory
from draftwood.model.config import ModelConfig
from draftwood.ops.packed import SCALE_BYTES, PackedPages, Packing
from draftwood.ops.staging import staged
from draftwood.protocols import BatchView, Span
from draftwood.states import KeptPath, LayerState, PlacedState
from draftwood.tree import TokenTree

STATES = 64  # sequences that may be open at a time, where a model has recurrent layers
_NO_TIER = "Models with recurrent layers, drafters too, keep no evicted pages: leave cache_host_tokens at 0."


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
        self.num_states = num_states
        self.device = device
        self.layer_states: list[LayerState] = [KeyPages(self.memory, num_pages), self.states]
        self._placed: list[PlacedState] = [self.states]  # under the places of this cache's sequences
        self._parts = [Slotted(self.memory.store, 3)]
        self._before_moves: list[Callable[[], None]] = []

    @property
    def page_size(self) -> int:
        """Tokens a page holds."""
        return self.tables.page_size

    @property
    def num_bytes(self) -> int:
        """Memory of all pages and states."""
        return sum(state.num_bytes for state in self.layer_states)

    def commit(self, path: KeptPath) -> None:
        """Every layer state keeps its path."""
        for state in self.layer_states:
            state.commit(path)

    def follow(self, target: KVCache) -> FollowingStates | None:
        """Lay the states of recurrent layers, if there are any, in the places of the target's sequences: they are saved
        and restored with the target's.
        """
        if not self.states.stores:
            return None
        if target.tables.states is None:
            if target.tables.pool.tier is not None:
                raise InvalidRequest(_NO_TIER)
            target.tables.keep_states(target.num_states)
        following = FollowingStates.of(self.states)
        self.layer_states[1:] = [following]
        target._placed.append(following)
        return following

    def keep_evicted(self, num_pages: int) -> None:
        """Keep so many pages that had to make room in host memory."""
        if self.tables.states is not None:
            raise InvalidRequest(_NO_TIER)
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
            copies = self.tables.states.copies()
            for state in self._placed:
                state.copy(copies)

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


@dataclass(frozen=True)
class Places:
    """Where rows of a fixed shape lie, counted from their sequence's length."""

    index: Tensor  # [B, R] int64 of a row's key
    position: Tensor  # [B, R] int64
    ancestors: Tensor | None = None  # [B * R, W]; None: rows of text, each of which sees all keys up to its own
    max_depth: int | None = None
    max_nodes: int | None = None
    shift: int = 0  # to be added to index and position
    text: int = 0  # first rows that are the text's last tokens, not nodes, although others have ancestors


def behind_last(places: Sequence[Places], count: int) -> Places:
    """Places of the text's last `count` tokens, and of nodes behind it: those of some forwards, the last one's last."""
    size, last = len(places[-1].index), places[-1]
    steps = torch.arange(-count, 0, device=last.index.device).expand(size, -1)
    index = torch.cat([steps, *(own.index for own in places)], 1)
    position = torch.cat([steps, *(own.position for own in places)], 1)
    bits = [own.ancestors.unflatten(0, own.index.shape) for own in places if own.ancestors is not None]
    ancestors = torch.nn.functional.pad(torch.cat(bits, 1), (0, 0, count, 0)).flatten(0, 1) if bits else None
    return replace(last, index=index, position=position, ancestors=ancestors, text=count)


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
    if places.text > 1 and not linear:  # a token of the text does not see those behind it
        own = (lengths[:, None] + places.index + 1).clamp(min=1)
        visible = torch.minimum(own, lengths[:, None]).view(-1)
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
