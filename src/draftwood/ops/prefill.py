"""Attention of whole long prompts: torch's fused kernel over keys gathered from their pages.

It reads keys once for many rows, where the paged kernels are made for few. Its sums depend on how a prompt is cut, so
strict mode does not use it; nor can a captured step, whose pieces are not known when it is captured. The fused kernel
is planned for each number of rows anew, which takes longer than it runs: rows are padded to few sizes, and all of them
are run once before there are requests (`GraphRunner.warm_long_prefills`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from draftwood.batch import AttentionShape, ForwardBatch, Pages

STEP = 1024  # rows are padded to multiples of it
LONGEST = 8192  # rows for which the fused kernel is planned


@dataclass(frozen=True)
class PrefillAttention:
    """Attention planned for whole prompts, one after the other."""

    batch: ForwardBatch
    cache: Pages
    scale: float
    slots: tuple[Tensor, ...]  # of each prompt's keys, in order and padded; each [multiple of STEP]

    @classmethod
    def suits(cls, batch: ForwardBatch, shape: AttentionShape) -> bool:
        """Whether it can compute this, and is likely to be faster: prompts from their first token on, and long ones."""
        if not batch.pieces or shape.softcap is not None or shape.sinks:
            return False
        longest = LONGEST if shape.window is None else min(LONGEST, shape.window)
        return all(start == 0 and STEP <= end <= longest for start, end in batch.pieces)

    @classmethod
    def plan(cls, batch: ForwardBatch, cache: Pages, shape: AttentionShape) -> PrefillAttention:
        """Find the keys of every prompt."""
        within = torch.arange(cache.page_size, device=batch.block_table.device)
        every = (batch.block_table.clamp(min=0)[..., None] * cache.page_size + within).flatten(1)
        slots = tuple(
            pad(own[:end], (0, -end % STEP)) for own, (_, end) in zip(every.unbind(0), batch.pieces, strict=True)
        )
        return cls(batch, cache, shape.scale, slots)

    def run(self, layer: int, query: Tensor, out: Tensor | None = None, *, sinks: Tensor | None = None) -> Tensor:
        """[N, heads, D] -> [N, heads * D]. There are no sinks: it does not suit them."""
        keys, values = self.cache.store[layer]  # each [H, slots, D]
        out = query.new_empty(len(query), query[0].numel()) if out is None else out
        first = 0
        for (_, length), slots in zip(self.batch.pieces, self.slots, strict=True):
            rows = slice(first, first + length)
            q = pad(query[rows], (0, 0, 0, 0, 0, len(slots) - length)).transpose(0, 1)
            mixed = _causal(q, keys.index_select(1, slots), values.index_select(1, slots), self.scale)
            out[rows] = mixed[:, :length].transpose(0, 1).flatten(1)
            first = rows.stop
        return out


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Every row sees the keys up to its own: not those of padding, which lie behind all others. [H, n, D]."""
    return scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, scale=scale, enable_gqa=True)[0]
