"""A weight matrix on a GPU and the products with it, by whichever way is fastest for the number of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwood.model.weights import Float8, Matrix, Quantised, Storage
from draftwood.ops.cuda import norm_act
from draftwood.ops.cuda.prefetch import Beginning
from draftwood.ops.cuda.product_kernels import DENSE, FLOAT8, INT4, INT8
from draftwood.ops.cuda.products import Around, Norm, Packed, gemv, skinny, skinny_normed, tiles
from draftwood.ops.cuda.rotary import Turning, multiply_and_turn, rotate_and_store

FAST_ROWS = 128  # above, the vendor's products do as well as ours


@dataclass(frozen=True)
class Stream:
    """The residual stream between two products, and the norm through which the next one reads it."""

    hidden: Tensor  # [N, width]
    norm: Norm | None = None  # None: as it is
    normed: Tensor | None = None  # [N, width], where the kernel that wrote the stream had it at hand

    def each(self, change: Callable[[Tensor], Tensor]) -> Stream:
        """The same choice of rows made of all its parts."""
        normed = None if self.normed is None else change(self.normed)
        return Stream(change(self.hidden), self.norm, normed)

    def read(self) -> Tensor:
        """As the next product reads it. [N, width]."""
        if self.norm is None:
            return self.hidden
        return norm_act.rms_norm(self.hidden, self.norm) if self.normed is None else self.normed


@dataclass(frozen=True)
class CudaLinear:
    """x W + b; with `strict`, a row's result is the same, bit for bit, whatever rows are computed with it."""

    weight: Packed
    bias: Tensor | None = None  # [out]
    strict: bool = False

    def __call__(self, x: Stream, dtype: torch.dtype | None = None, then: Beginning | None = None) -> Tensor:
        """The product of a stream, rounded to `dtype`. [N, in] -> [N, out]."""
        return self._of_stream(x, Around(x.norm, self.bias, dtype=dtype, then=then))

    def turned(self, x: Stream, turning: Turning, then: Beginning | None = None) -> Tensor:
        """Queries of a stream; its keys and values are written. [N, in] -> [N, H, D]."""
        cut = tiles(self.weight.outputs, self.weight.inputs, self.weight.storage, False)
        if (self.strict or self._few(x.hidden)) and turning.fits(cut):
            return multiply_and_turn(x.read(), self.weight, self.bias, turning, cut)
        return rotate_and_store(self(x, then=then), turning)

    def gated(self, x: Stream, activation: str, then: Beginning | None = None) -> Tensor:
        """act(gate) * up, where W has gate's outputs and then up's. [N, in] -> [N, out / 2]."""
        return self._of_stream(x, Around(x.norm, self.bias, None, activation, then=then))

    def add_to(self, residual: Tensor, x: Tensor, norm: Norm | None, then: Beginning | None = None) -> Stream:
        """residual + (x W + b), to be read through `norm`; may be written over the residual. [N, out], [N, in]."""
        around = Around(None, self.bias, residual, next_norm=norm, then=then)
        if self.strict or self._few(x):
            hidden, normed = skinny_normed(x, self.weight, around)
            return Stream(hidden, norm, normed)
        return Stream(self._other_ways(x, around), norm)

    def beginning(self, size: int, gated: bool = False) -> Beginning | None:
        """About `size` bytes that a product with one row will read first; None where they cannot be asked for."""
        dense = self.weight.storage == DENSE.value
        return Beginning.of(self.weight.codes, size, 2 if gated else 1) if dense and size else None

    def outputs_from(self, start: int) -> CudaLinear:
        """The product with the outputs from `start` on alone, in the same memory."""
        weight = self.weight
        parts = {name: getattr(weight, name) for name in ("codes", "scale", "minimum")}
        behind = {name: None if part is None else part[start:] for name, part in parts.items()}
        bias = None if self.bias is None else self.bias[start:]
        return CudaLinear(replace(weight, **behind), bias, self.strict)

    def _few(self, x: Tensor) -> bool:
        """Rows that our product of several rows is best for."""
        return len(x) != 1 and (len(x) <= FAST_ROWS or self.weight.storage != DENSE.value)

    def _of_stream(self, x: Stream, around: Around) -> Tensor:
        if not self.strict and len(x.hidden) == 1:
            return gemv(x.hidden, self.weight, around)  # which norms while it reads
        normed, around = x.read(), replace(around, norm=None)
        return (
            skinny(normed, self.weight, around)
            if self.strict or self._few(normed)
            else self._other_ways(normed, around)
        )

    def _other_ways(self, x: Tensor, around: Around) -> Tensor:
        return gemv(x, self.weight, around) if len(x) == 1 else _by_vendor(x, self.weight.codes, around)


def _by_vendor(x: Tensor, weight: Tensor, around: Around) -> Tensor:
    if around.dtype not in (None, x.dtype):
        return _widened(torch.mm(x, weight.t(), out_dtype=around.dtype), around)
    if around.residual is not None:
        return _widened(around.residual.addmm_(x, weight.t()), around)
    out = F.linear(x, weight, around.bias)
    return out if around.activation is None else norm_act.gated(out, around.activation)


def _widened(out: Tensor, around: Around) -> Tensor:
    return out if around.bias is None else out.add_(around.bias)


def pack(parts: Sequence[Matrix | Float8], inputs: int) -> Packed:
    """Matrices of one kind with the same inputs, one below the other, in the layout of the kernels."""
    dense = [part for part in parts if isinstance(part, Tensor)]
    if dense:
        return Packed(DENSE.value, dense[0].contiguous() if len(dense) == 1 else torch.cat(dense), inputs)
    eights = [part for part in parts if isinstance(part, Float8)]
    if eights:
        return Packed(FLOAT8.value, _cat([e.codes for e in eights]), inputs, _cat([e.scale for e in eights]))
    groups = [part for part in parts if isinstance(part, Quantised)]
    scale = torch.cat([part.scale for part in groups])
    if groups[0].storage == Storage.INT8:
        return Packed(INT8.value, torch.cat([part.codes for part in groups]), inputs, scale)
    codes = torch.cat([part.codes[:, ::2] | part.codes[:, 1::2] << 4 for part in groups])
    return Packed(INT4.value, codes, inputs, scale, torch.cat([p.minimum for p in groups if p.minimum is not None]))


def _cat(parts: Sequence[Tensor]) -> Tensor:
    """torch.cat, also for 8-bit floats."""
    if parts[0].dtype != torch.float8_e4m3fn:
        return torch.cat(list(parts))
    return torch.cat([part.view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn)
