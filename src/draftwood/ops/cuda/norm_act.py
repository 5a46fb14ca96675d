"""What stands between products, for many rows: a program a row, so a row's numbers depend on that row alone."""
# pyright: reportMissingImports=false, reportIndexIssue=false, reportUnreachable=false
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwood.ops.cuda.pdl import OVERLAPPING, make_way, wait_for_predecessors
from draftwood.ops.cuda.product_kernels import opened
from draftwood.ops.cuda.products import ACTIVATIONS, Norm

BLOCK = 1024  # outputs of a program that gates


@triton.jit
def _rms_norm(x, gain, out, width, eps, BLOCK: tl.constexpr):
    make_way()
    wait_for_predecessors()
    row = tl.program_id(0).to(tl.int64) * width
    k = tl.arange(0, BLOCK)
    value = tl.load(x + row + k, mask=k < width, other=0.0).to(tl.float32)
    length = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    value = value * length * tl.load(gain + k, mask=k < width, other=0.0).to(tl.float32)
    tl.store(out + row + k, value.to(out.dtype.element_ty), mask=k < width)


@triton.jit
def _gated(x, out, width, KIND: tl.constexpr, BLOCK: tl.constexpr):
    wait_for_predecessors()
    row, k = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x + row * width * 2 + k, mask=k < width, other=0.0).to(tl.float32)
    up = tl.load(x + row * width * 2 + width + k, mask=k < width, other=0.0).to(tl.float32)
    tl.store(out + row * width + k, opened(gate, up, KIND).to(out.dtype.element_ty), mask=k < width)


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """x g / sqrt(mean(x^2) + eps) in float32, rounded once. [N, in] -> [N, in]."""
    out = torch.empty_like(x)
    if len(x):
        block = triton.next_power_of_2(x.shape[1])
        warps = min(max(block // 512, 1), 16)
        _rms_norm[(len(x),)](
            x.contiguous(), norm.weight, out, x.shape[1], norm.eps, block, num_warps=warps, **OVERLAPPING
        )
    return out


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """act(gate) * up in float32, rounded once. [N, 2 n] -> [N, n]."""
    width = gate_up.shape[1] // 2
    out = torch.empty(len(gate_up), width, dtype=gate_up.dtype, device=gate_up.device)
    if len(gate_up):
        grid = (len(gate_up), triton.cdiv(width, BLOCK))
        _gated[grid](gate_up.contiguous(), out, width, ACTIVATIONS[activation], BLOCK, **OVERLAPPING)
    return out
