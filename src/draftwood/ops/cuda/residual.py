"""The ops of laws over whole vocabularies on CUDA, in Triton: see `ops/residual.py` and `ops/kseq.py`."""
# pyright: reportMissingImports=false, reportIndexIssue=false, reportUnreachable=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwood.ops.residual import WIDEST_ON_CUDA, Draws, Rejected, Residual

BLOCK = 4096
ROW_BLOCK = 4096  # of a program that reads whole rows alone
PADDED = WIDEST_ON_CUDA  # always the same, so that no sum over draws depends on how wide other trees are


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
def at_place(values, place, i):
    """One of a few numbers."""
    return tl.sum(tl.where(place == i, values, 0), 0)


@triton.jit
def _mass_after(
    row_p, q, whole, token, row, taken, place, together,
    LAWS: tl.constexpr, VOCABULARY: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The sum of what the first LAWS draws leave; `together`: they all name one row, which is one law, once."""
    total = tl.zeros((WIDTH,), tl.float64)  # added up at the end: threads need not meet at every block
    mine = at_place(row, place, LAWS - 1)
    scale_of_all = tl.sum(taken, 0).to(tl.float32)
    for begin in range(0, VOCABULARY, WIDTH):
        x = begin + tl.arange(0, WIDTH)
        inside = x < VOCABULARY
        left = tl.load(row_p + x, mask=inside, other=0.0) * whole.to(tl.float32)
        if together:
            law = tl.load(q + mine * VOCABULARY + x, mask=inside, other=0.0)
            left = tl.maximum(left - scale_of_all * law, 0.0)
        else:
            for m in tl.static_range(LAWS):
                its = at_place(row, place, m)
                law = tl.load(q + its * VOCABULARY + x, mask=inside & (its >= 0), other=0.0)
                law = tl.where(its >= 0, law, (x == at_place(token, place, m)).to(tl.float32))
                left = tl.maximum(left - at_place(taken, place, m).to(tl.float32) * law, 0.0)
        total += left.to(tl.float64)
    return tl.sum(total, 0)


@triton.jit
def reject_draws(
    row_p, q, whole, exists, token, row, own, place,
    TRIED: tl.constexpr, VOCABULARY: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Draw after draw of one node against what the draws before it left: chances, scales, values and mass."""
    mass, missing = whole, 1.0 - whole
    value = tl.where(exists, whole * tl.load(row_p + token, mask=exists, other=0.0).to(tl.float64), 0.0)
    taken = tl.zeros(place.shape, tl.float64)
    chance = tl.zeros(place.shape, tl.float64)
    highest = tl.max(tl.where(exists, row, -1), 0)
    together = (highest >= 0) & (tl.min(tl.where(exists, row, highest), 0) == highest)
    for i in tl.static_range(TRIED):
        there = at_place(exists.to(tl.int32), place, i) > 0
        mine = at_place(row, place, i)
        survives = tl.where(there, mass + missing, 0.0)
        offered = survives * at_place(own, place, i)
        fair = tl.where(offered > 0, at_place(value, place, i) / tl.where(offered > 0, offered, 1.0), 1.0)
        chance = tl.where((place == i) & there, tl.minimum(fair, 1.0), chance)
        taken = tl.where(place == i, survives, taken)
        law = tl.load(q + mine * VOCABULARY + token, mask=exists & (mine >= 0), other=0.0).to(tl.float64)
        law = tl.where(mine >= 0, law, (token == at_place(token, place, i)).to(tl.float64))
        value = tl.where(exists, tl.maximum(value - survives * law, 0.0), 0.0)
        if there:
            mass = _mass_after(row_p, q, whole, token, row, taken, place, together, i + 1, VOCABULARY, WIDTH)
    return chance, taken, value, mass


@triton.jit
def _reject(
    p, q, nodes, weight, rows, tokens, own, exists, chance_out, scales_out, values_out, mass_out,
    W: tl.constexpr, LANES: tl.constexpr, TRIED: tl.constexpr, VOCABULARY: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One node a program."""
    n = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, LANES)
    inside, at = place < W, n * W + place
    there = tl.load(exists + at, mask=inside, other=0) != 0
    token = tl.load(tokens + at, mask=inside, other=0)
    row = tl.load(rows + at, mask=inside, other=-1)
    alone = tl.load(own + at, mask=inside, other=0.0)
    row_p = p + tl.load(nodes + n) * VOCABULARY
    whole = tl.load(weight + n)
    chance, taken, value, mass = reject_draws(
        row_p, q, whole, there, token, row, alone, place, TRIED, VOCABULARY, WIDTH
    )
    tl.store(chance_out + at, chance, mask=inside)
    tl.store(scales_out + at, taken, mask=inside)
    tl.store(values_out + at, value, mask=inside)
    tl.store(mass_out + n, mass)


def reject(p: Tensor, q: Tensor | None, nodes: Tensor, weight: Tensor, draws: Draws, tried: int) -> Rejected:
    """`ops.residual.reject` for float32 rows."""
    count, width = draws.tokens.shape
    chance, scales, values = torch.empty(3, count, width, dtype=torch.float64, device=p.device)
    mass = torch.empty(count, dtype=torch.float64, device=p.device)
    parts = (nodes, weight, draws.rows, draws.tokens, draws.chance, draws.exists)
    if count:
        _reject[(count,)](
            p.contiguous(), p if q is None else q.contiguous(), *(x.contiguous() for x in parts),
            chance, scales, values, mass, width, PADDED, tried, p.shape[1], ROW_BLOCK, num_warps=16,
        )  # fmt: skip
    return Rejected(chance, scales, values, mass)
