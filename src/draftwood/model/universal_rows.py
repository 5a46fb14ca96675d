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
from transformers import AttentionInterface
from transformers.cache_utils import Cache
from transformers.masking_utils import AttentionMaskInterface

from draftwood.batch import ForwardBatch, Pages
from draftwood.errors import CheckpointError
from draftwood.model.reading import SIZES
from draftwood.ops.reference import visible_keys, weigh

CALLED = "draftwood_rows"  # as attention implementation: layers call `_attend`
GATHERED = "draftwood_pages"  # layers compute by themselves, from gathered keys and a mask
Law = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class LayerShape:
    """Keys and values of one call of attention, and the module that called."""

    kv_heads: int
    key_dim: int
    value_dim: int
    module: nn.Module | None = None


@dataclass(frozen=True)
class Layout:
    """Where each call's keys and values lie: in planes of `plane` numbers a token, as many as their heads take."""

    shapes: tuple[LayerShape, ...]
    plane: int
    starts: tuple[int, ...]  # of each call's keys; its values are behind them
    total: int

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
    """One forward: the rows, where their keys lie, and what they see. On the CPU: it looks at sizes and offsets."""

    batch: ForwardBatch
    pages: Pages | None  # None: only the shapes of keys and values are asked for
    layout: Layout | None
    found: list[LayerShape] = field(default_factory=list)  # by a forward without pages
    calls: int = 0
    masks: dict[int, tuple[Tensor, MaskLaw | None]] = field(default_factory=dict)

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
        return visible_keys(self.batch, max(self.num_keys), None)

    @cached_property
    def key_positions(self) -> Tensor:
        """The position of each key for a row that sees it: a node's ancestors lie behind each other. [N, keys]."""
        batch, (rows, keys) = self.batch, self.seen.shape
        counts = batch.row_offsets.diff()
        owner = torch.arange(len(counts)).repeat_interleave(counts, output_size=rows)
        base, key = batch.tree_base[owner, None], torch.arange(keys)
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
            cut = cut.unflatten(0, (shape.kv_heads, -1))
            parts.append(cut.transpose(1, 2).flatten(2))
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


def _law_of(*_: Any, mask_function: Law, **__: Any) -> MaskLaw:
    return MaskLaw(mask_function)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: MaskLaw | Tensor | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """[1, H, N, D], [1, K, N, D], [1, K, N, Dv] -> [1, N, H, Dv]."""
    step = _STEP.get()
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    other = step.beside(module, query, key, value, scale)
    if other is not None:
        return other, None
    if step.pages is None:
        require_window(attention_mask, sliding_window)
        step.found.append(LayerShape(key.shape[1], key.shape[-1], value.shape[-1], module))
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None
    if isinstance(attention_mask, Tensor):
        raise CheckpointError("a layer is given a mask that is not made of a law")
    call = step.next_call(module)
    step.write(call, key[0], value[0])
    mask = step.mask(attention_mask)
    bias = None if position_bias is None else position_bias[0]
    if bias is not None and bias.shape[-1] != mask.shape[1]:
        raise CheckpointError("a layer adds a bias to its scores that was not made for our keys")
    rows = [_attend_one(step, call, i, query[0], mask, scale, softcap, s_aux, bias) for i in range(len(step.slots))]
    return torch.cat(rows, 1).transpose(0, 1)[None].contiguous(), None


def require_window(mask: MaskLaw | Tensor | None, window: int | None) -> None:
    """Refuse a window that the mask's law does not have: texts of the self-check may be too short to show it."""
    if window is None:
        return
    row = torch.tensor(window)
    if not isinstance(mask, MaskLaw) or bool(mask(row, torch.zeros_like(row))):
        raise CheckpointError(f"a layer has a window of {window}, and its mask does not")


def _attend_one(
    step: Step,
    call: int,
    i: int,
    query: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """The rows of one sequence; a bias [H, N, keys] is added to their scores. [H, n, Dv]."""
    low, high = step.offsets[i], step.offsets[i + 1]
    keys, values = step.read(call, step.runs[i])
    grouped = query[:, low:high].unflatten(0, (len(keys), -1))  # [K, H / K, n, D]
    scores = grouped @ keys[:, None].transpose(2, 3) * scale
    if bias is not None:
        scores = scores + bias[:, low:high, : keys.shape[1]].unflatten(0, (len(keys), -1))
    sink = None if sinks is None else sinks.view(*grouped.shape[:2], 1, 1)
    weights = weigh(scores, mask[low:high, : keys.shape[1]], softcap, sink)
    return (weights @ values[:, None]).flatten(0, 1)


def _gathered_mask(*_: Any, mask_function: Law, dtype: torch.dtype = torch.float32, **__: Any) -> Tensor:
    """A mask that is added to the scores of all sequences' keys, side by side. [1, 1, N, keys of all]."""
    step = _STEP.get()
    own = step.mask(MaskLaw(mask_function))
    seen = own.new_zeros(len(own), sum(step.num_keys))
    first = 0
    for i, count in enumerate(step.num_keys):
        low, high = step.offsets[i], step.offsets[i + 1]
        seen[low:high, first : first + count] = own[low:high, :count]
        first += count
    added = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)
    return added[None, None]


AttentionInterface.register(CALLED, _attend)
AttentionMaskInterface.register(CALLED, _law_of)
AttentionMaskInterface.register(GATHERED, _gathered_mask)


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
