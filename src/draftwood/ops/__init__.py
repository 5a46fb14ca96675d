"""The one place that chooses an implementation of an op by device. `reference.py` says what each must compute."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from draftwood.model.batch import AttentionShape, ForwardBatch
from draftwood.ops.cpu import SegmentedAttention
from draftwood.ops.reference import DenseAttention


class Attention(Protocol):
    """Attention planned for one forward; `run` is called once a layer."""

    def run(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[N, heads, D] and two caches [H, slots, D] -> [N, heads, D]."""
        ...


def plan_attention(batch: ForwardBatch, shape: AttentionShape) -> Attention:
    """The fastest attention there is for the batch's device."""
    if batch.tokens.device.type == "cpu":
        return SegmentedAttention.plan(batch, shape)
    return DenseAttention.plan(batch, shape)
