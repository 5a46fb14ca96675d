"""Matrix products for few rows: as fast as memory gives the weights, with what stands before and after fused in.

`gemv` is for one row. `skinny` is for any number of rows: the weights are the tensor cores' tall operand, so a tile's
number of rows changes nothing about the order in which an output is summed, and neither does a row's neighbour.
"""
# pyright: reportMissingImports=false, reportIndexIssue=false, reportUnreachable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
from torch import Tensor

from draftwood.model.spec import CLAMPED
from draftwood.ops.cuda.grouped_kernels import grouped_gemv_kernel
from draftwood.ops.cuda.pdl import OVERLAPPING
from draftwood.ops.cuda.prefetch import NOTHING, Beginning
from draftwood.ops.cuda.product_kernels import (
    DENSE,
    FLOAT8,
    GROUP,
    INT4,
    INT8,
    gemv_kernel,
    joined_kernel,
    skinny_kernel,
)

ACTIVATIONS = {None: -1, "silu": 0, "gelu": 1, "gelu_pytorch_tanh": 2, CLAMPED: 3}
SHARES = {INT8.value: 16, INT4.value: 32, FLOAT8.value: 16}  # weights in 16 bytes, which a lane takes at a time
LARGEST_TILE = 128  # rows
MULTIPROCESSORS, MEMORY = 132, 200_000  # of an H200, and what tiles may take of each one's memory in bytes


@dataclass(frozen=True)
class Packed:
    """A matrix as the kernels read it; rows may be padded beyond `inputs` to whole groups."""

    storage: int  # DENSE, INT8, INT4, FLOAT8
    codes: Tensor  # [out, in] floats, float8 or bytes; int4: [out, in / 2] bytes, even inputs in low halves
    inputs: int
    scale: Tensor | None = None  # [out, in / 32] float16; float8: [out] float32
    minimum: Tensor | None = None  # [out, in / 32] float16, int4 alone

    @property
    def outputs(self) -> int:
        """Rows of the matrix."""
        return self.codes.shape[0]

    @property
    def stride(self) -> int:
        """Inputs of a row, padding included."""
        return self.codes.shape[1] * (2 if self.storage == INT4.value else 1)


@dataclass(frozen=True)
class Norm:
    """A root-mean-square norm in front of a product."""

    weight: Tensor  # [in]
    eps: float


@dataclass(frozen=True)
class Around:
    """What is fused around a product: y = residual + act(gate) * up, or residual + x W + b."""

    norm: Norm | None = None
    bias: Tensor | None = None  # [out]
    residual: Tensor | None = None  # [N, out]
    activation: str | None = None  # the matrix is gate rows, then as many up rows
    dtype: torch.dtype | None = None  # of the result; None: of x
    next_norm: Norm | None = None  # of the product that reads the result: given beside it where that costs nothing
    then: Beginning | None = None  # of the product that follows: asked for by a product of one row


@dataclass(frozen=True)
class Tiles:
    """How a product is cut up; chosen by the matrix alone, never by the rows."""

    block_out: int  # outputs of a program: as many as make programs fill the chip evenly
    block_k: int
    split_k: int  # programs that share an output's inputs; their sums are added in their order
    stages: int  # steps whose weights are under way at a time
    warps: int
    beside: int = 1  # programs that a multiprocessor has memory for at a time

    @property
    def padded(self) -> int:
        """Outputs of a tile, a power of two: of those that are not wanted, nothing is read."""
        return triton.next_power_of_2(self.block_out)


@cache
def tiles(outputs: int, inputs: int, storage: int, gated: bool) -> Tiles:
    """For `skinny`; measured on an H200 by benchmarks/gpu_products.py."""
    if inputs < 2048 and outputs < 16384:  # a small model: too few outputs to fill the chip
        narrow = gated or inputs >= 1024
        return Tiles(16 if narrow else 64, 128 if inputs >= 1024 else 64, 1, 4 if inputs >= 1024 else 5, 4)
    if storage != DENSE.value:
        return Tiles(64, 128, 1 if gated or outputs >= 16384 else 2, 3 if gated else 4, 4)
    if gated:
        return Tiles(_even_share(outputs, 64, 2), 64, 1, 4, 4, 2)
    if inputs < 2048:
        return Tiles(128, 64, 1, 4, 4)
    if outputs >= 16384:
        return Tiles(128, 128, 1, 3, 8)
    if inputs >= 8192:
        return Tiles(64, 128, 2, 6, 4)
    return Tiles(64, 128, 1, 6, 4) if outputs >= 6144 else Tiles(64, 128, 2, 4, 4)


def _even_share(outputs: int, most: int, beside: int) -> int:
    """Outputs of a program, in eights and at most so many, so that all that run at a time end together."""
    at_a_time = MULTIPROCESSORS * beside
    turns = triton.cdiv(outputs, most * at_a_time)
    return min(most, 8 * triton.cdiv(outputs, 8 * at_a_time * turns))


@cache
def row_tiles(outputs: int, inputs: int, storage: int, gated: bool) -> Tiles:
    """For `gemv`; measured likewise."""
    if _in_shares(inputs, storage):
        shares = triton.cdiv(inputs, SHARES[storage])
        most = 64 if storage == INT4.value else 128
        lanes = next((lanes for lanes in (most, 64) if shares % lanes == 0), 32)
        return Tiles(4, lanes * SHARES[storage], 1, 1, lanes // 32)
    large = gated or outputs >= 16384
    whole = max(triton.next_power_of_2(inputs), GROUP.value)  # a step need not be wider than a row
    if inputs < 2048:
        return Tiles(max(2 if gated else 4, 1024 // whole), min(whole, 1024), 1, 1 if inputs <= 1024 else 4, 4)
    if storage == FLOAT8.value:
        return Tiles(8, 1024, 1, 1, 4)
    if large:
        return Tiles(4, 2048, 1, 2, 8)
    if inputs >= 8192:
        return Tiles(2, 1024, 1, 4, 4)
    return Tiles(2, 2048, 1, 2, 4) if outputs < 6144 else Tiles(2, 1024, 1, 1, 4)


def _in_shares(inputs: int, storage: int) -> bool:
    """Whether lanes can take 16 bytes at a time: rows of codes are padded to that, of floats not."""
    return storage in SHARES and (storage != FLOAT8.value or inputs % SHARES[storage] == 0)


def gemv(x: Tensor, weight: Packed, around: Around, cut: Tiles | None = None) -> Tensor:
    """One row. [1, in] -> [1, out]."""
    outputs = _outputs(weight, around)
    cut = cut or row_tiles(outputs, weight.inputs, weight.storage, around.activation is not None)
    out = torch.empty(1, outputs, dtype=around.dtype or x.dtype, device=x.device)
    norm, grid = around.norm, (triton.cdiv(outputs, cut.block_out),)
    if _in_shares(weight.inputs, weight.storage):
        codes = weight.codes if weight.storage == FLOAT8.value else weight.codes.view(torch.int32)
        grouped_gemv_kernel[grid](
            x.contiguous(), codes, weight.scale, weight.minimum, norm and norm.weight,
            around.bias, around.residual, out, outputs, weight.inputs, weight.stride, norm.eps if norm else 0.0,
            cut.block_out, cut.block_k // SHARES[weight.storage], weight.storage, ACTIVATIONS[around.activation],
            num_warps=cut.warps, **OVERLAPPING,
        )  # fmt: skip
        return out
    gemv_kernel[grid](
        x.contiguous(), weight.codes, weight.scale, norm and norm.weight, around.bias, around.residual, out, outputs,
        weight.inputs, weight.stride, norm.eps if norm else 0.0,
        *(around.then.arguments if around.then else NOTHING), 32 * cut.warps,
        cut.block_out, cut.block_k, weight.storage, ACTIVATIONS[around.activation], cut.stages, num_warps=cut.warps,
        **OVERLAPPING,
    )  # fmt: skip
    return out


def skinny(x: Tensor, weight: Packed, around: Around, cut: Tiles | None = None) -> Tensor:
    """Any number of rows, normed already. [N, in] -> [N, out]."""
    return skinny_normed(x, weight, around, cut)[0]


def skinny_normed(x: Tensor, weight: Packed, around: Around, cut: Tiles | None = None) -> tuple[Tensor, Tensor | None]:
    """The same, and the result normed for the next product, if it is at hand: a split one ends with whole rows."""
    outputs, (n, inputs) = _outputs(weight, around), x.shape
    gated = around.activation is not None
    cut = cut or tiles(outputs, inputs, weight.storage, gated)
    out = torch.empty(n, outputs, dtype=around.dtype or x.dtype, device=x.device)
    if n == 0:
        return out, None
    rows = rows_of_tile(n)
    cut = fitting(cut, rows, gated)
    width = outputs * 2 if gated else outputs
    split = cut.split_k > 1
    target = torch.empty(cut.split_k, n, width, dtype=torch.float32, device=x.device) if split else out
    skinny_kernel[(triton.cdiv(outputs, cut.block_out) * triton.cdiv(n, rows), cut.split_k)](
        x.contiguous(), weight.codes, weight.scale, weight.minimum, around.bias, around.residual,
        target, n, outputs, inputs, weight.stride, rows, cut.block_out, cut.padded, cut.block_k, cut.split_k,
        weight.storage, ACTIVATIONS[around.activation], num_warps=cut.warps, num_stages=cut.stages, **OVERLAPPING,
    )  # fmt: skip
    if not split:
        return out, None
    norm = around.next_norm
    normed = None if norm is None else torch.empty_like(out)
    block = triton.next_power_of_2(outputs) if norm else min(1024, triton.next_power_of_2(outputs))
    joined_kernel[(n, triton.cdiv(outputs, block))](
        target, weight.scale, around.bias, around.residual, out, norm and norm.weight, normed, n, outputs,
        norm.eps if norm else 0.0, block, cut.split_k, weight.storage, ACTIVATIONS[around.activation],
        num_warps=8 if norm else 4, **OVERLAPPING,
    )  # fmt: skip
    return out, normed


def _outputs(weight: Packed, around: Around) -> int:
    return weight.outputs if around.activation is None else weight.outputs // 2


def rows_of_tile(n: int) -> int:
    """Of a product of `n` rows."""
    return min(max(16, triton.next_power_of_2(n)), LARGEST_TILE)


def fitting(cut: Tiles, rows: int, gated: bool) -> Tiles:
    """More warps and fewer stages where a tile of rows needs the registers and the memory; sums stay as they are."""
    sums = cut.padded * rows * (2 if gated else 1)
    warps = 8 if sums > 64 * 128 and cut.padded >= 64 else cut.warps
    stage = 2 * cut.block_k * (cut.padded * (2 if gated else 1) + rows)
    return replace(cut, warps=warps, stages=max(2, min(cut.stages, MEMORY // cut.beside // stage)))
