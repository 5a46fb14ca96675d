"""The ops of laws on CUDA, in Triton."""
# pyright: reportMissingImports=false, reportIndexIssue=false, reportUnreachable=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwood.ops.residual import Draws, Rejected, Residual

BLOCK = 4096
ROW_BLOCK = 8192  # of a program that reads whole rows alone


@triton.jit
def _left(p, q, nodes, weight, rows, tokens, scales, n, x, inside, vocabulary, LAWS: tl.constexpr):
    """U_k of row n at tokens x."""
    left = tl.load(p + tl.load(nodes + n) * vocabulary + x, mask=inside, other=0.0)
    left = left * tl.load(weight + n).to(tl.float32)
    for i in tl.static_range(LAWS):
        row = tl.load(rows + n * LAWS + i)
        law = tl.load(q + row * vocabulary + x, mask=inside & (row >= 0), other=0.0)
        law = tl.where(row >= 0, law, (x == tl.load(tokens + n * LAWS + i)).to(tl.float32))
        left = tl.maximum(left - tl.load(scales + n * LAWS + i).to(tl.float32) * law, 0.0)
    return left


@triton.jit
def _mass(p, q, nodes, weight, rows, tokens, scales, out, vocabulary, LAWS: tl.constexpr, WIDTH: tl.constexpr):
    n, chunk = tl.program_id(0), tl.program_id(1)
    x = chunk * WIDTH + tl.arange(0, WIDTH)
    left = _left(p, q, nodes, weight, rows, tokens, scales, n, x, x < vocabulary, vocabulary, LAWS)
    tl.store(out + n * tl.num_programs(1) + chunk, tl.sum(left.to(tl.float64), 0))


@triton.jit
def _rows(p, q, nodes, weight, rows, tokens, scales, out, vocabulary, LAWS: tl.constexpr, WIDTH: tl.constexpr):
    n, chunk = tl.program_id(0), tl.program_id(1)
    x = chunk * WIDTH + tl.arange(0, WIDTH)
    left = _left(p, q, nodes, weight, rows, tokens, scales, n, x, x < vocabulary, vocabulary, LAWS)
    tl.store(out + n * vocabulary + x, left, mask=x < vocabulary)


def residual_mass(residual: Residual) -> Tensor:
    """`Residual.mass` for float32 rows. [n] float64."""
    chunks = triton.cdiv(residual.p.shape[1], BLOCK)
    partial = torch.empty(len(residual.nodes), chunks, dtype=torch.float64, device=residual.p.device)
    _launch(_mass, residual, partial)
    return partial.sum(1)


def residual_rows(residual: Residual) -> Tensor:
    """`Residual.written_out` for float32 rows. [n, V]."""
    out = torch.empty(len(residual.nodes), residual.p.shape[1], device=residual.p.device)
    _launch(_rows, residual, out)
    return out


def _launch(kernel, residual: Residual, out: Tensor) -> None:  # type: ignore[no-untyped-def]
    p, q = residual.p.contiguous(), residual.p if residual.q is None else residual.q.contiguous()
    parts = (residual.nodes, residual.weight, residual.rows, residual.tokens, residual.scales)
    count, laws = residual.rows.shape
    if count:
        grid = (count, triton.cdiv(p.shape[1], BLOCK))
        kernel[grid](p, q, *(x.contiguous() for x in parts), out, p.shape[1], laws, BLOCK)


@triton.jit
def _reject(
    p, q, nodes, weight, rows, tokens, own, exists, chance, scales, values, mass_out, vocabulary,
    W: tl.constexpr, PADDED: tl.constexpr, TRIED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One node a program: draw after draw against what the draws before it left."""
    n = tl.program_id(0)
    row_p = p + tl.load(nodes + n) * vocabulary
    whole = tl.load(weight + n)
    mass, missing = whole, 1.0 - whole
    place = tl.arange(0, PADDED)
    token = tl.load(tokens + n * W + place, mask=place < W, other=0)
    value = whole * tl.load(row_p + token, mask=place < W, other=0.0).to(tl.float64)
    row = tl.load(rows + n * W + place, mask=place < W, other=-1)
    taken = tl.zeros((PADDED,), tl.float64)
    same = tl.max(tl.where(place < W, row, tl.max(row, 0)), 0) == tl.min(tl.where(place < W, row, tl.max(row, 0)), 0)
    for i in tl.static_range(TRIED):
        there = tl.load(exists + n * W + i)
        mine = tl.load(rows + n * W + i)
        point = tl.load(tokens + n * W + i)
        survives = tl.where(there, mass + missing, 0.0)
        offered = survives * tl.load(own + n * W + i)
        wanted = tl.sum(tl.where(place == i, value, 0.0), 0)
        fair = tl.where(offered > 0, wanted / tl.where(offered > 0, offered, 1.0), 1.0)
        tl.store(chance + n * W + i, tl.where(there, tl.minimum(fair, 1.0), 0.0))
        tl.store(scales + n * W + i, survives)
        taken = tl.where(place == i, survives, taken)
        law = tl.load(q + mine * vocabulary + token, mask=(place < W) & (mine >= 0), other=0.0).to(tl.float64)
        law = tl.where(mine >= 0, law, (token == point).to(tl.float64))
        value = tl.maximum(value - survives * law, 0.0)
        if there:
            sum_all = tl.zeros((1,), tl.float64)
            together = tl.sum(taken, 0).to(tl.float32)
            for begin in range(0, vocabulary, WIDTH):
                x = begin + tl.arange(0, WIDTH)
                inside = x < vocabulary
                left = tl.load(row_p + x, mask=inside, other=0.0) * whole.to(tl.float32)
                if same & (mine >= 0):  # the same law again and again is one law, once
                    left = tl.maximum(left - together * tl.load(q + mine * vocabulary + x, mask=inside, other=0.0), 0.0)
                else:
                    for m in tl.static_range(i + 1):
                        its = tl.load(rows + n * W + m)
                        scale = tl.sum(tl.where(place == m, taken, 0.0), 0).to(tl.float32)
                        other = tl.load(q + its * vocabulary + x, mask=inside & (its >= 0), other=0.0)
                        other = tl.where(its >= 0, other, (x == tl.load(tokens + n * W + m)).to(tl.float32))
                        left = tl.maximum(left - scale * other, 0.0)
                sum_all += tl.sum(left.to(tl.float64), 0)
            mass = tl.sum(sum_all, 0)
    tl.store(mass_out + n, mass)
    tl.store(values + n * W + place, value, mask=place < W)


def reject(p: Tensor, q: Tensor | None, nodes: Tensor, weight: Tensor, draws: Draws, tried: int) -> Rejected:
    """`ops.residual.reject` for float32 rows."""
    count, width = draws.tokens.shape
    chance, scales, values = torch.zeros(3, count, width, dtype=torch.float64, device=p.device)
    mass = torch.empty(count, dtype=torch.float64, device=p.device)
    parts = (nodes, weight, draws.rows, draws.tokens, draws.chance, draws.exists)
    if count:
        _reject[(count,)](
            p.contiguous(), p if q is None else q.contiguous(), *(x.contiguous() for x in parts),
            chance, scales, values, mass, p.shape[1],
            width, triton.next_power_of_2(width), tried, ROW_BLOCK, num_warps=16,
        )  # fmt: skip
    return Rejected(chance, scales, values, mass)


@triton.jit
def _beta(row_p, row_q, whole, bar, vocabulary, WIDTH: tl.constexpr):
    total = tl.zeros((1,), tl.float64)
    scale = (whole * bar).to(tl.float32)
    for begin in range(0, vocabulary, WIDTH):
        x = begin + tl.arange(0, WIDTH)
        mine = tl.load(row_p + x, mask=x < vocabulary, other=0.0) * scale
        total += tl.sum(tl.minimum(mine, tl.load(row_q + x, mask=x < vocabulary, other=0.0)).to(tl.float64), 0)
    return tl.sum(total, 0)


@triton.jit
def _lossless(bar, beta, draws):
    missed = 1.0 - beta
    product = missed * 0.0 + 1.0
    for _ in range(draws):
        product = product * missed
    return bar * (1.0 - product) <= beta + 1e-15


@triton.jit
def _kseq_bar(p, q, nodes, weight, rows, count, out, number, vocabulary, WIDTH: tl.constexpr):
    """K-SEQ's bar for one node a program, as ops/kseq.py says it."""
    n = tl.program_id(0)
    row_p = p + tl.load(nodes + n) * vocabulary
    row_q = q + tl.maximum(tl.load(rows + n), 0) * vocabulary
    whole = tl.load(weight + n)
    draws = tl.load(count + n).to(tl.int32)
    end = whole * 0.0 + 1.0
    end_beta = _beta(row_p, row_q, whole, end, vocabulary, WIDTH)
    low, high = end / tl.maximum(draws, 1).to(tl.float64), end
    low_beta, high_beta = _beta(row_p, row_q, whole, low, vocabulary, WIDTH), end_beta
    for _ in range(8):
        middle = (low + high) / 2
        found = _beta(row_p, row_q, whole, middle, vocabulary, WIDTH)
        valid = _lossless(middle, found, draws)
        low, low_beta = tl.where(valid, middle, low), tl.where(valid, found, low_beta)
        high, high_beta = tl.where(valid, high, middle), tl.where(valid, high_beta, found)
        start, top = low, high
        slope = tl.where(high > low, (high_beta - low_beta) / tl.where(high > low, high - low, 1.0), 0.0)
        for _half in range(50):
            middle = (low + top) / 2
            valid = _lossless(middle, low_beta + (middle - start) * slope, draws)
            low, top = tl.where(valid, middle, low), tl.where(valid, top, middle)
        low_beta = _beta(row_p, row_q, whole, low, vocabulary, WIDTH)
    done = _lossless(end, end_beta, draws)
    tl.store(out + n, tl.where(done, end, low))
    tl.store(out + number + n, tl.where(draws > 0, tl.where(done, end_beta, low_beta), 0.0))


def kseq_bar(p: Tensor, q: Tensor, nodes: Tensor, weight: Tensor, rows: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """`ops.kseq.kseq_bar` for float32 rows."""
    out = torch.empty(2, len(nodes), dtype=torch.float64, device=p.device)
    parts = (x.contiguous() for x in (nodes, weight, rows, count))
    if len(nodes):
        _kseq_bar[(len(nodes),)](
            p.contiguous(), q.contiguous(), *parts, out, len(nodes), p.shape[1], ROW_BLOCK, num_warps=16
        )
    return out[0], out[1]
