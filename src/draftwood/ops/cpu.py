"""Attention on a CPU: one sequence at a time, reading its pages in place where they lie in one run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwood.batch import AttentionShape, ForwardBatch, Pages
from draftwood.ops.reference import visible_keys, weigh

_blocked = F.scaled_dot_product_attention  # torch's blocked kernel, which never writes all scores out


class _Segment:
    """The rows of one sequence, where its keys lie, and what each row may see (None: all of them)."""

    def __init__(self, rows: slice, slots: slice | Tensor, mask: Tensor | None, cache: Pages) -> None:
        self.rows = rows
        self.mask = mask  # [rows, keys], 0 or -inf
        self._slots = slots
        self._cache = cache
        self._in_place = isinstance(slots, slice) and not cache.packed_as
        if self._in_place:
            # All layers' views at once: sixty calls less in a step of thirty layers.
            self._views = cache.store[:, :, None, :, slots].flatten(0, 1).unbind(0)

    def keys_and_values(self, layer: int) -> tuple[Tensor, Tensor]:
        """Each [1, H, keys, D], without a copy where the slots are one run."""
        if self._in_place:
            return self._views[2 * layer], self._views[2 * layer + 1]
        keys, values = self._cache.read(layer, self._slots)[None].chunk(2, 1)
        return keys, values


@dataclass(frozen=True)
class SegmentedAttention:
    """Attention planned once a forward and run once a layer."""

    segments: tuple[_Segment, ...]
    shape: AttentionShape

    @classmethod
    def plan(cls, batch: ForwardBatch, cache: Pages, shape: AttentionShape) -> SegmentedAttention:
        """Find each sequence's run of slots and write its mask out only where rows differ."""
        offsets = batch.row_offsets.tolist()
        num_keys = batch.num_keys.tolist()
        tables = batch.block_table.tolist()
        plain = batch.linear and shape.window is None and offsets == list(range(len(num_keys) + 1))
        mask = None if plain else visible_keys(batch, max(num_keys), shape.window)
        segments = []
        for i, count in enumerate(num_keys):
            rows = slice(offsets[i], offsets[i + 1])
            own = None if mask is None else _additive(mask[rows, :count], cache.dtype)
            segments.append(_Segment(rows, _slots_of(tables[i], count, cache.page_size), own, cache))
        return cls(tuple(segments), shape)

    def run(self, layer: int, query: Tensor, *, sinks: Tensor | None = None) -> Tensor:
        """[N, heads, D], [heads] -> [N, heads * D]."""
        if len(self.segments) == 1:
            return self._attend(self.segments[0], layer, query, sinks)
        return torch.cat([self._attend(segment, layer, query[segment.rows], sinks) for segment in self.segments])

    def _attend(self, segment: _Segment, layer: int, query: Tensor, sinks: Tensor | None) -> Tensor:
        if self.shape.softcap is not None or sinks is not None:
            return self._written_out(segment, layer, query, sinks)
        keys, values = segment.keys_and_values(layer)
        scale = self.shape.scale
        rows, heads, dim = query.shape
        if rows == 1:
            # The queries that share a key head lie side by side: they are the rows of one small product.
            grouped = query.view(1, keys.shape[1], -1, dim)
            return _blocked(grouped, keys, values, attn_mask=segment.mask, scale=scale).view(1, heads * dim)
        mixed = _blocked(
            query.transpose(0, 1)[None], keys, values, attn_mask=segment.mask, scale=scale, enable_gqa=True
        )
        return mixed[0].transpose(0, 1).flatten(1)

    def _written_out(self, segment: _Segment, layer: int, query: Tensor, sinks: Tensor | None) -> Tensor:
        """With what torch's kernel does not know: capped scores, and sinks."""
        (keys,), (values,) = segment.keys_and_values(layer)  # [H, keys, D]
        heads, rows = len(keys), len(query)
        grouped = query.unflatten(1, (heads, -1)).transpose(0, 1).flatten(1, 2)  # [H, N * G, D]: keys are read once
        scores = torch.matmul(grouped, keys.transpose(-1, -2)).unflatten(1, (rows, -1)) * self.shape.scale
        seen = scores.new_zeros(1, 1) if segment.mask is None else segment.mask
        sinks = None if sinks is None else sinks.view(heads, 1, -1, 1)
        weights = weigh(scores, seen[:, None] == 0, self.shape.softcap, sinks)
        mixed = torch.matmul(weights.flatten(1, 2), values).unflatten(1, (rows, -1))
        return mixed.transpose(0, 1).flatten(1)


def _slots_of(pages: list[int], count: int, page_size: int) -> slice | Tensor:
    used = pages[: -(-count // page_size)]
    first = used[0]
    if used == list(range(first, first + len(used))):
        return slice(first * page_size, first * page_size + count)
    slots = torch.tensor(used)[:, None] * page_size + torch.arange(page_size)
    return slots.view(-1)[:count]


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor | None:
    if bool(mask.all()):
        return None
    return torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, float("-inf"))
