"""The one place that chooses an implementation of an op by device. `reference.py` says what each must compute."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from draftwood.batch import AttentionShape, ForwardBatch, Pages
from draftwood.ops.cpu import SegmentedAttention
from draftwood.ops.reference import DenseAttention


class Attention(Protocol):
    """Attention planned for one forward; `run` is called once a layer, after its keys and values were written."""

    def run(self, layer: int, query: Tensor, *, sinks: Tensor | None = None) -> Tensor:
        """[N, heads, D] -> [N, heads * D]; `sinks` [heads], where the shape has announced them."""
        ...


def plan_attention(batch: ForwardBatch, cache: Pages, shape: AttentionShape) -> Attention:
    """The fastest attention there is for the batch's device."""
    if batch.tokens.device.type == "cpu":
        return SegmentedAttention.plan(batch, cache, shape)
    if batch.tokens.device.type == "cuda" and cache.dtype != torch.float64:
        from draftwood.ops.cuda.attention import TreeAttention  # Triton is there where CUDA is

        return TreeAttention.plan(
            batch, cache, shape, linear=batch.linear, max_rows=batch.max_rows, max_depth=batch.max_depth,
            max_nodes=batch.max_nodes, exact=False,
        )  # fmt: skip
    return DenseAttention.plan(batch, cache, shape)
