"""Every op in plain torch: the definition of correct. Device never changes meaning."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftwood.batch import AttentionShape, ForwardBatch, Pages
from draftwood.links import BITS


def visible_keys(batch: ForwardBatch, num_keys: int, window: int | None) -> Tensor:
    """The mask written out: may row r see key k of its own sequence? [N, num_keys] bool.

    A row sees `visible` linear keys and its ancestors among the staged ones. With a sliding window it sees only keys
    whose position lies less than `window` before its own; the e-th ancestor from the root has depth e.
    """
    counts = batch.row_offsets.diff()
    trees, rows = torch.arange(counts.shape[0], device=counts.device), len(batch.tokens)
    owner = torch.repeat_interleave(trees, counts, output_size=rows)
    base = batch.tree_base[owner, None]
    key = torch.arange(num_keys, device=counts.device)
    linear = key < batch.visible[:, None]
    node = key - base
    word = (node.clamp(min=0) // BITS).clamp(max=batch.ancestors.shape[1] - 1)
    bits = (batch.ancestors.gather(1, word) >> (node.clamp(min=0) % BITS)) & 1
    in_tree = (node >= 0) & (node < batch.ancestors.shape[1] * BITS) & (bits == 1)
    if window is not None:
        oldest = batch.positions[:, None] - window + 1
        linear &= key >= oldest
        in_tree &= base - 1 + in_tree.cumsum(1) >= oldest
    return linear | in_tree


def gather_pages(cache: Tensor, block_table: Tensor, page_size: int) -> Tensor:
    """Keys or values of each sequence in order. [H, slots, D], [S, P] -> [S, H, P * page_size, D]."""
    heads, _, dim = cache.shape
    paged = cache.view(heads, -1, page_size, dim)
    picked = paged[:, block_table.clamp(min=0)]  # [H, S, P, page, D]
    return picked.transpose(0, 1).flatten(2, 3)


@dataclass(frozen=True)
class DenseAttention:
    """Attention that gathers everything and masks everything."""

    batch: ForwardBatch
    cache: Pages
    shape: AttentionShape
    mask: Tensor  # [N, keys] bool
    owner: Tensor  # [N]

    @classmethod
    def plan(cls, batch: ForwardBatch, cache: Pages, shape: AttentionShape) -> DenseAttention:
        """Write the mask out over all pages."""
        counts = batch.row_offsets.diff()
        trees, rows = torch.arange(counts.shape[0], device=counts.device), len(batch.tokens)
        owner = torch.repeat_interleave(trees, counts, output_size=rows)
        num_keys = batch.block_table.shape[1] * cache.page_size
        return cls(batch, cache, shape, visible_keys(batch, num_keys, shape.window), owner)

    def run(self, layer: int, query: Tensor, *, sinks: Tensor | None = None) -> Tensor:
        """[N, heads, D], [heads] -> [N, heads * D]."""
        keys, values = self.cache.store[layer]
        k = gather_pages(keys, self.batch.block_table, self.cache.page_size)[self.owner]  # [N, H, keys, D]
        v = gather_pages(values, self.batch.block_table, self.cache.page_size)[self.owner]
        q = query.unflatten(1, (keys.shape[0], -1))  # [N, H, G, D]
        scores = torch.einsum("nhgd,nhkd->nhgk", q, k) * self.shape.scale
        sinks = None if sinks is None else sinks.view(*scores.shape[1:3], 1)
        weights = weigh(scores, self.mask[:, None, None], self.shape.softcap, sinks)
        return torch.einsum("nhgk,nhkd->nhgd", weights, v).flatten(1)


def weigh(scores: Tensor, mask: Tensor, softcap: float | None, sinks: Tensor | None) -> Tensor:
    """How much of each key a row takes: the softmax of what it sees, capped, beside a sink. [..., keys].

    `mask` [..., keys] and `sinks` [..., 1] are of a shape that spreads over the scores.
    """
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is None:
        return scores.softmax(-1)
    sink = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
