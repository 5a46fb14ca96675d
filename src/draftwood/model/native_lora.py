"""Adapters for our CPU kernels: factors of every layer's products, packed as the kernels' matrices are."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwood.model.config import ModelConfig
from draftwood.model.lora import Adapter, LowRank
from draftwood.model.lora_layers import sites
from draftwood.model.weights import as_numbers, join_rows
from draftwood.ops.native import structs

Columns = tuple[int | None, int | None, int, int, int | None, int | None]  # the last fields of `structs.Batch`
NO_ADAPTERS: Columns = (None, None, 0, 0, None, None)


class NativeAdapters:
    """Some adapters of one model, and the working memory they need."""

    def __init__(self, adapters: Sequence[Adapter], config: ModelConfig, model: structs.Model) -> None:
        self._kept: list[Tensor] = []  # the kernels know addresses only
        layers = [model.layers[i] for i in range(config.num_layers)]
        self._table = (structs.LowRank * (len(adapters) * len(layers) * 4))()
        self._most = 1
        for a, adapter in enumerate(adapters):
            for i, layer in enumerate(layers):
                matrices = (layer.qkv, layer.output, layer.gate_up, layer.down)
                for site, (part, matrix) in enumerate(zip(self._parts(adapter, config, i), matrices, strict=True)):
                    self._table[(a * len(layers) + i) * 4 + site] = self._packed(part, matrix)
        self._layers = len(layers)
        self._widest = max(max(one.qkv.outputs, one.output.outputs, one.gate_up.outputs) for one in layers)
        self._widest = max(self._widest, *(one.down.outputs for one in layers))
        self._shrunk, self._added = torch.empty(0), torch.empty(0)

    def of(self, which: Tensor | None) -> Columns:
        """What the kernels are told of rows that have these adapters [N], -1: none."""
        if which is None:
            return NO_ADAPTERS
        if len(which) * self._widest > self._added.numel():
            self._shrunk = torch.zeros(len(which) * self._most)
            self._added = torch.zeros(len(which) * self._widest)
        self._which = which.contiguous()
        return (
            self._which.data_ptr(), ctypes.addressof(self._table), self._layers, self._most, self._shrunk.data_ptr(),
            self._added.data_ptr(),
        )  # fmt: skip

    def _parts(self, adapter: Adapter, config: ModelConfig, layer: int) -> list[LowRank | None]:
        return [
            site.low_rank(adapter, layer, lambda rows, panel=panel: as_numbers(join_rows(rows, panel)))
            for site, panel in zip(sites(config, layer), (None, None, structs.PANEL // 2, None), strict=True)
        ]

    def _packed(self, part: LowRank | None, matrix: structs.Matrix) -> structs.LowRank:
        if part is None:
            return structs.LowRank(0, None, None)
        down = F.pad(part.down, (0, matrix.inputs - part.down.shape[1])).contiguous()
        up = F.pad(part.up, (0, 0, 0, matrix.outputs - part.up.shape[0])).t().contiguous()
        self._kept += [down, up]
        self._most = max(self._most, len(down))
        return structs.LowRank(len(down), down.data_ptr(), up.data_ptr())
