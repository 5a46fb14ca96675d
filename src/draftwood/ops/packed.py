"""Keys and values in 8 bits: each vector of a head is its codes and, behind them, one scale in float32.

Another model than with full precision: a vector is rounded when it is written, and every row, its own too, reads what
was kept. What a vector becomes depends on nothing but itself, so speculation is exact with respect to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from draftwood.batch import Pages

SCALE_BYTES = 4


class Packing(IntEnum):
    """What codes are; the numbers are those of ops/native/model.h."""

    INT8 = 1
    FP8 = 2  # e4m3


PACKINGS = {"int8": Packing.INT8, "fp8": Packing.FP8}
_LARGEST = {Packing.INT8: 127.0, Packing.FP8: 448.0}
_CODES = {Packing.INT8: torch.int8, Packing.FP8: torch.float8_e4m3fn}


def pack(values: Tensor, packing: Packing) -> Tensor:
    """[*, D] -> [*, D + 4] uint8."""
    wide, top = values.float(), _LARGEST[packing]
    largest = wide.abs().amax(-1, keepdim=True)
    scaled = wide * torch.where(largest > 0, top / largest, 0.0)
    codes = scaled.round() if packing == Packing.INT8 else scaled.clamp(-top, top)
    return torch.cat([codes.to(_CODES[packing]).view(torch.uint8), (largest / top).view(torch.uint8)], -1)


def unpack(packed: Tensor, packing: Packing, dtype: torch.dtype) -> Tensor:
    """[*, D + 4] -> [*, D]."""
    codes = packed[..., :-SCALE_BYTES].contiguous().view(_CODES[packing]).float()
    return (codes * packed[..., -SCALE_BYTES:].contiguous().view(torch.float32)).to(dtype)


@dataclass(frozen=True)
class PackedPages(Pages):
    """Pages of such vectors: `store` [L, 2, H, slots, D + 4] uint8."""

    packing: Packing = Packing.INT8
    computed: torch.dtype = torch.float32

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values once they are read."""
        return self.computed

    @property
    def packed_as(self) -> int:
        """The number of its packing."""
        return int(self.packing)

    def write(self, layer: int, slots: Tensor, key_value: Tensor) -> None:
        """Keys and values [N, 2 H, D] to their slots [N]."""
        self.layers[layer].index_copy_(1, slots, pack(key_value, self.packing).transpose(0, 1))

    def read(self, layer: int, slots: slice | Tensor) -> Tensor:
        """[2 H, keys, D]."""
        return unpack(self.layers[layer][:, slots], self.packing, self.computed)
