"""Our rows, pages and masks in transformers' modules: what they ask for keys, values and masks is answered here.

Three interfaces of transformers are used, none of which knows a family:

- `AttentionInterface`: every layer calls `_attend` with its queries, keys and values;
- `AttentionMaskInterface`: `_law_of` is given the *law* of a mask, a predicate on positions, instead of making one.
  It is evaluated at (row's position, key's position) where the row's tree sees the key, so that windows and chunks are
  right in trees;
- `Cache`: `RowsCache` stores nothing and tells each row's own position; `PagesCache` hands out gathered keys to layers
  that do not know the first interface.

Shapes: N rows of S sequences · H heads · K key heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from draftwood.batch import AttentionShape, ForwardBatch, Pages
from draftwood.errors import CheckpointError
from draftwood.links import may_look
from draftwood.model.reading import SIZES
from draftwood.ops import Attention, plan_attention
from draftwood.ops.reference import DenseAttention, visible_keys

Law = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class LayerShape:
    """Keys and values of one call of attention, and the module that called."""

    kv_heads: int
    key_dim: int
    value_dim: int
    module: nn.Module | None = None
    plain: bool = False  # a row sees all tokens up to its own, or the last `window` of them
    window: int | None = None


@dataclass(frozen=True)
class Layout:
    """Where each call's keys and values lie: in planes of `plane` numbers a token, as many as their heads take."""

    shapes: tuple[LayerShape, ...]
    plane: int
    starts: tuple[int, ...]  # of each call's keys; its values are behind them
    total: int

    @property
    def uniform(self) -> bool:
        """Whether all calls have as many heads of the same size, for keys and values: as our own decoder's layers."""
        heads = self.shapes[0].kv_heads
        return all((s.kv_heads, s.key_dim, s.value_dim) == (heads, self.plane, self.plane) for s in self.shapes)

    @classmethod
    def of(cls, shapes: tuple[LayerShape, ...], plane: int | None = None) -> Layout:
        """Planes as wide as divides every head's size, or of a given width."""
        sizes = {dim for shape in shapes for dim in (shape.key_dim, shape.value_dim)}
        plane = plane or max(width for width in range(1, min(sizes) + 1) if all(size % width == 0 for size in sizes))
        starts, total = [], 0
        for shape in shapes:
            starts.append(total)
            total += shape.kv_heads * (shape.key_dim + shape.value_dim) // plane
        return cls(shapes, plane, tuple(starts), total + total % 2)  # the cache halves them


@dataclass
class Step:
    """One forward: the rows, where their keys lie, and what they see. Where the host may look, at sizes and offsets."""

    batch: ForwardBatch
    pages: Pages | None  # None: only the shapes of keys and values are asked for
    layout: Layout | None
    found: list[LayerShape] = field(default_factory=list)  # by a forward without pages
    calls: int = 0
    masks: dict[int, tuple[Tensor, MaskLaw | None]] = field(default_factory=dict)
    plans: dict[AttentionShape, Attention] = field(default_factory=dict)
    parts: dict[tuple[int, int], Tensor | None] = field(default_factory=dict)  # of masks, by mask and sequence
    longest: int = 0  # positions that windows are looked for in, by a forward without pages
    windows: dict[int, tuple[bool, int | None, object]] = field(default_factory=dict)  # that were found

    @cached_property
    def looks(self) -> bool:
        """Whether the host may look at values."""
        return may_look(self.batch.tokens)

    @cached_property
    def owner(self) -> Tensor:
        """Whose each row is. [N]."""
        counts = self.batch.row_offsets.diff()
        every = torch.arange(len(counts), device=counts.device)
        return every.repeat_interleave(counts, output_size=len(self.batch.tokens))

    @cached_property
    def every_slot(self) -> Tensor:
        """Where all keys lie that the sequences have pages for, in order. [S * keys]."""
        assert self.pages is not None
        size, tables = self.pages.page_size, self.batch.block_table.clamp(min=0)
        return (tables[..., None] * size + torch.arange(size, device=tables.device)).flatten()

    def planned(self, shape: AttentionShape) -> Attention:
        """Our own decoder's attention over pages whose layers are alike."""
        assert self.pages is not None
        assert self.layout is not None
        if shape not in self.plans:
            planes, one = self.pages.store.flatten(0, 2), self.layout.shapes[0]
            count = len(self.layout.shapes)
            store = planes[: 2 * count * one.kv_heads].view(count, 2, one.kv_heads, *planes.shape[1:])
            plan = DenseAttention.plan if store.device.type == "cpu" else plan_attention  # a CPU's own looks at sizes
            self.plans[shape] = plan(self.batch, Pages(store, self.pages.page_size), shape)
        return self.plans[shape]

    @cached_property
    def offsets(self) -> list[int]:
        """First row of each sequence, and the number of rows."""
        return self.batch.row_offsets.tolist()

    @cached_property
    def num_keys(self) -> list[int]:
        """Keys of each sequence."""
        return self.batch.num_keys.tolist()

    @cached_property
    def slots(self) -> list[Tensor]:
        """Where each sequence's keys lie, in order. S x [keys]."""
        if self.pages is None:
            return [self.batch.slots]
        size = self.pages.page_size
        within = torch.arange(size, device=self.batch.slots.device)
        tables = self.batch.block_table.clamp(min=0)
        return [(table[:, None] * size + within).view(-1)[:n] for table, n in zip(tables, self.num_keys, strict=True)]

    @cached_property
    def runs(self) -> list[slice | Tensor]:
        """The same, as slices where keys lie in a row."""
        return [as_run(own) for own in self.slots]

    @cached_property
    def seen(self) -> Tensor:
        """Which keys of its sequence a row may see, whatever the model says. [N, keys] bool."""
        if self.looks or self.pages is None:
            return visible_keys(self.batch, max(self.num_keys), None)
        return visible_keys(self.batch, self.batch.block_table.shape[1] * self.pages.page_size, None)

    @cached_property
    def key_positions(self) -> Tensor:
        """The position of each key for a row that sees it: a node's ancestors lie behind each other. [N, keys]."""
        batch, keys = self.batch, self.seen.shape[1]
        base, key = batch.tree_base[self.owner, None], torch.arange(keys, device=batch.tokens.device)
        in_tree = self.seen & (key >= base) & (key >= batch.visible[:, None])
        return torch.where(in_tree, base - 1 + in_tree.cumsum(1), key)

    def mask(self, law: MaskLaw | None) -> Tensor:
        """What rows see by a law of the model's and by their trees. [N, keys] bool."""
        key = 0 if law is None else id(law)
        if key not in self.masks:
            seen = self.seen
            if law is not None:
                seen = seen & law(self.batch.positions[:, None], self.key_positions)
            self.masks[key] = seen, law  # which stays, and so does its id
        return self.masks[key][0]

    def part(self, law: MaskLaw | None, i: int) -> Tensor | None:
        """Of that, what the rows of one sequence see of its keys; None where they see all of them. [n, keys] bool."""
        key = 0 if law is None else id(law), i
        if key not in self.parts:
            own = self.mask(law)[self.offsets[i] : self.offsets[i + 1], : self.num_keys[i]]
            self.parts[key] = None if bool(own.all()) else own
        return self.parts[key]

    def write(self, call: int, key: Tensor, value: Tensor) -> None:
        """Put the rows' keys and values [K, N, D] to their slots."""
        planes, shape, start = self._planes(call)
        middle = start + shape.kv_heads * key.shape[-1] // self.width
        for first, numbers in ((start, key), (middle, value)):
            cut = numbers.unflatten(2, (-1, self.width)).transpose(1, 2).flatten(0, 1)
            planes[first : first + len(cut)].index_copy_(1, self.batch.slots, cut)

    def read(self, call: int, slots: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values at some slots, of slices in place where planes are as wide as heads. 2 x [K, n, D]."""
        planes, shape, start = self._planes(call)
        parts = []
        for dim in (shape.key_dim, shape.value_dim):
            count = shape.kv_heads * dim // self.width
            own = planes[start : start + count]
            cut = own[:, slots] if isinstance(slots, slice) else own.index_select(1, slots)
            if dim != self.width:
                cut = cut.unflatten(0, (shape.kv_heads, -1)).transpose(1, 2).flatten(2)
            parts.append(cut)
            start += count
        return parts[0], parts[1]

    @property
    def width(self) -> int:
        """Of a plane."""
        assert self.layout is not None
        return self.layout.plane

    def _planes(self, call: int) -> tuple[Tensor, LayerShape, int]:
        assert self.pages is not None
        assert self.layout is not None
        return self.pages.store.flatten(0, 2), self.layout.shapes[call], self.layout.starts[call]

    def beside(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor | None:
        """What a layer gets that asks for something else than attention over the rows' own text. [1, N, H, Dv]."""
        return None

    def next_call(self, module: nn.Module) -> int:
        """The number of this call of attention; layers are known by their order."""
        assert self.layout is not None
        call = self.calls
        self.calls += 1
        if call >= len(self.layout.shapes) or self.layout.shapes[call].module is not module:
            raise CheckpointError("The model's layers attend in another order than when it was loaded.")
        return call


def as_run(slots: Tensor) -> slice | Tensor:
    """Slots that lie in a row as a slice: what is there is then read without a copy."""
    if not len(slots) or bool((slots.diff() != 1).any()):
        return slots
    return slice(int(slots[0]), int(slots[-1]) + 1)


_STEP: ContextVar[Step] = ContextVar("draftwood_step")


def current() -> Step | None:
    """The forward that modules run in; None: they run by themselves."""
    return _STEP.get(None)


def here() -> Step:
    """The forward that modules run in."""
    return _STEP.get()


@contextmanager
def running(step: Step) -> Iterator[None]:
    """What transformers asks for is of this forward."""
    token = _STEP.set(step)
    try:
        yield
    finally:
        _STEP.reset(token)


class MaskLaw:
    """What a model masks, as a predicate; its modules pass it on as they would a mask."""

    ndim = 4  # which is asked for

    def __init__(self, law: Law) -> None:
        self._law = law

    def __call__(self, row: Tensor, key: Tensor) -> Tensor:
        """Whether a row at a position sees a key at a position."""
        zero = torch.zeros((), dtype=torch.int64, device=row.device)
        return self._law(zero, zero, row, key)


class RowsCache(Cache):
    """Stores nothing: `_attend` does."""

    def __init__(self, step: Step) -> None:
        self.step, self.layers = step, []

    @property
    def is_compileable(self) -> bool:
        """It is not."""
        return False

    @property
    def is_initialized(self) -> bool:
        """There is nothing to set up."""
        return True

    @property
    def is_sliding(self) -> list[bool]:
        """No layer, however many there are: masks are ours."""
        return [False] * SIZES["num_layers"]

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """How many tokens came before: what, added to a row's number, is its position. [N]."""
        positions = self.step.batch.positions
        return positions - torch.arange(len(positions), device=positions.device)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """None: laws are evaluated at positions of ours."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Nothing that counts."""
        return query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """No limit."""
        return -1

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """There is none."""
        return False

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        """The rows' own."""
        return key_states, value_states


class PagesCache(RowsCache):
    """Writes the rows' keys and values, and gives back those of all sequences, side by side."""

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """All keys but the rows'."""
        return sum(self.step.num_keys) - len(self.step.batch.tokens)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """All keys."""
        return sum(self.step.num_keys), 0

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        """[1, K, N, D] -> [1, K, keys of all, D], twice."""
        step = self.step
        if step.pages is None:
            require_order(layer_idx, len(step.found))
            step.found.append(LayerShape(key_states.shape[1], key_states.shape[-1], value_states.shape[-1]))
            return key_states, value_states
        step.write(layer_idx, key_states[0], value_states[0])
        keys, values = step.read(layer_idx, torch.cat(step.slots))
        return keys[None], values[None]


def require_order(layer: int, expected: int) -> None:
    """Refuse layers that do not count upwards."""
    if layer != expected:
        raise CheckpointError(f"layer {layer} keeps its keys where layer {expected} is expected")
