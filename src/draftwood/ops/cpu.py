"""Attention on a CPU: one sequence at a time, reading its pages in place where they lie in one run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwood.model.batch import AttentionShape, ForwardBatch
from draftwood.ops.reference import visible_keys

FEW_ROWS = 32  # up to here two batched products beat the blocked kernel, measured on SmolLM2's shape


@dataclass(frozen=True)
class _Segment:
    """The rows of one sequence, where its keys lie, and what each row may see (None: all of them)."""

    rows: slice
    keys: slice | Tensor  # a run of slots, or their indices
    mask: Tensor | None  # [rows, keys], 0 or -inf

    def gather(self, cache: Tensor) -> Tensor:
        """[H, slots, D] -> [H, keys, D], without a copy where the keys lie in one run."""
        return cache[:, self.keys] if isinstance(self.keys, slice) else cache.index_select(1, self.keys)


@dataclass(frozen=True)
class SegmentedAttention:
    """Attention planned once a forward and run once a layer."""

    segments: tuple[_Segment, ...]
    scale: float

    @classmethod
    def plan(cls, batch: ForwardBatch, shape: AttentionShape) -> SegmentedAttention:
        """Find each sequence's run of slots and write its mask out only where rows differ."""
        offsets = batch.row_offsets.tolist()
        num_keys = batch.num_keys.tolist()
        tables = batch.block_table.tolist()
        single = all(end - start == 1 for start, end in zip(offsets, offsets[1:], strict=False))
        mask = None if single and shape.window is None else visible_keys(batch, max(num_keys), shape.window)
        segments = []
        for i, count in enumerate(num_keys):
            rows = slice(offsets[i], offsets[i + 1])
            own = None if mask is None else _additive(mask[rows, :count], shape.dtype)
            segments.append(_Segment(rows, _slots_of(tables[i], count, shape.page_size), own))
        return cls(tuple(segments), shape.scale)

    def run(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[N, heads, D] and two caches [H, slots, D] -> [N, heads, D]."""
        parts = [
            _attend(query[s.rows], s.gather(keys), s.gather(values), s.mask, self.scale) for s in self.segments
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


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


def _attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """One sequence. [R, heads, D], [H, T, D], [H, T, D], [R, T] -> [R, heads, D]."""
    rows, heads, dim = query.shape
    kv_heads, length, _ = keys.shape
    if rows > FEW_ROWS:
        out = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None], keys[None], values[None], attn_mask=mask, scale=scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)
    group = heads // kv_heads
    # The queries that share a key head become rows of one product: [H, G * R, D].
    grouped = query.view(rows, kv_heads, group, dim).permute(1, 2, 0, 3).reshape(kv_heads, group * rows, dim)
    scores = torch.baddbmm(keys.new_empty(1), grouped, keys.transpose(1, 2), beta=0, alpha=scale)
    if mask is not None:
        scores.view(kv_heads, group, rows, length).add_(mask)
    out = torch.bmm(scores.softmax(-1), values)
    return out.view(kv_heads, group, rows, dim).permute(2, 0, 1, 3).reshape(rows, heads, dim)
