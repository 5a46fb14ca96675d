"""K-SEQ's bar on CUDA, in Triton: see `ops/kseq.py`. A pass over two rows asks for several bars at once."""
# pyright: reportMissingImports=false, reportIndexIssue=false, reportUnreachable=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwood.ops.cuda.residual import at_place

ROUNDS = tl.constexpr(4)  # each makes the bracket seven times smaller; along its chord the rest is rounding
POINTS = tl.constexpr(8)
KSEQ_BLOCK = 2048


@triton.jit
def _betas(row_p, row_q, whole, bars, VOCABULARY: tl.constexpr, WIDTH: tl.constexpr):
    """The sums of min(bar whole p, q). [bars] -> [bars] float64."""
    total = tl.zeros((POINTS, WIDTH), tl.float64)  # added up at the end: threads need not meet at every block
    scale = (whole * bars).to(tl.float32)[:, None]
    for begin in range(0, VOCABULARY, WIDTH):
        x = begin + tl.arange(0, WIDTH)
        mine = tl.load(row_p + x, mask=x < VOCABULARY, other=0.0)[None, :] * scale
        law = tl.load(row_q + x, mask=x < VOCABULARY, other=0.0)[None, :]
        total += tl.minimum(mine, law).to(tl.float64)
    return tl.sum(total, 1)


@triton.jit
def missed_by_all(beta, draws):
    """The chance that none of `draws` draws is accepted."""
    product = beta * 0.0 + 1.0
    i = draws * 0
    while i < draws:
        product = product * (1.0 - beta)
        i += 1
    return product


@triton.jit
def _lossless(bar, beta, draws):
    return bar * (1.0 - missed_by_all(beta, draws)) <= beta + 1e-15


@triton.jit
def best_bar(row_p, row_q, whole, draws, VOCABULARY: tl.constexpr, WIDTH: tl.constexpr):
    """The bar for `draws` draws from one row against whole · p, and beta there."""
    point = tl.arange(0, POINTS)
    high = whole * 0.0 + 1.0
    low = high / tl.maximum(draws, 1).to(tl.float64)
    low_beta, high_beta = whole * 0.0, whole * 0.0
    for turn in range(ROUNDS):
        if (turn == 0) | (high > low):
            bars = tl.where(point == POINTS - 1, high, low + (high - low) * (point.to(tl.float64) / (POINTS - 1)))
            betas = _betas(row_p, row_q, whole, bars, VOCABULARY, WIDTH)
            # The lowest is lossless whatever the rows are.
            last = tl.max(tl.where(_lossless(bars, betas, draws), point, 0), 0)
            after = tl.minimum(last + 1, POINTS - 1)
            low, low_beta = at_place(bars, point, last), at_place(betas, point, last)
            high, high_beta = at_place(bars, point, after), at_place(betas, point, after)
    if high > low:
        start, slope = low, (high_beta - low_beta) / (high - low)
        for _half in range(50):
            middle = (low + high) / 2
            valid = _lossless(middle, low_beta + (middle - start) * slope, draws)
            low, high = tl.where(valid, middle, low), tl.where(valid, high, middle)
        low_beta = at_place(_betas(row_p, row_q, whole, low + point * 0.0, VOCABULARY, WIDTH), point, 0)
    return low, low_beta


@triton.jit
def _kseq_bar(p, q, nodes, weight, rows, count, out, number, VOCABULARY: tl.constexpr, WIDTH: tl.constexpr):
    """One node a program."""
    n = tl.program_id(0)
    row_p = p + tl.load(nodes + n) * VOCABULARY
    row_q = q + tl.maximum(tl.load(rows + n), 0) * VOCABULARY
    draws = tl.load(count + n).to(tl.int32)
    bar, beta = best_bar(row_p, row_q, tl.load(weight + n), draws, VOCABULARY, WIDTH)
    tl.store(out + n, bar)
    tl.store(out + number + n, tl.where(draws > 0, beta, 0.0))


def kseq_bar(p: Tensor, q: Tensor, nodes: Tensor, weight: Tensor, rows: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """`ops.kseq.kseq_bar` for float32 rows."""
    out = torch.empty(2, len(nodes), dtype=torch.float64, device=p.device)
    parts = (x.contiguous() for x in (nodes, weight, rows, count))
    if len(nodes):
        _kseq_bar[(len(nodes),)](
            p.contiguous(), q.contiguous(), *parts, out, len(nodes), p.shape[1], KSEQ_BLOCK, num_warps=16
        )
    return out[0], out[1]


@triton.jit
def weigh_kseq(
    p, q, nodes, tries, tokens, q_row, weight, chance_out, bar_out, values_out, mass_out, scale_out,
    LISTED: tl.constexpr, W: tl.constexpr, LANES: tl.constexpr, VOCABULARY: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """All draws behind one node a program, at the bar they share: as `KSeq.weigh` says."""
    node = tl.program_id(0).to(tl.int64)
    if LISTED:
        node = tl.load(nodes + node)
    place = tl.arange(0, LANES)
    inside, at = place < W, node * W + place
    child = tl.load(tries + at, mask=inside, other=-1)
    exists = child >= 0
    token = tl.load(tokens + child, mask=exists, other=0)
    row = tl.load(q_row + child, mask=exists, other=0)
    own = tl.load(q + row * VOCABULARY + token, mask=exists, other=1.0).to(tl.float64)
    whole = tl.load(weight + node)
    draws = tl.sum(exists.to(tl.int32), 0)
    bar, beta = whole * 0.0 + 1.0, whole * 0.0
    if draws > 0:
        row_q = q + at_place(row, place, 0) * VOCABULARY
        bar, beta = best_bar(p + node * VOCABULARY, row_q, whole, draws, VOCABULARY, WIDTH)
    accepted = 1.0 - missed_by_all(beta, draws)
    scale = tl.where(beta > 0, accepted / tl.where(beta > 0, beta, 1.0), 0.0)
    wanted = whole * tl.load(p + node * VOCABULARY + token, mask=exists, other=0.0).to(tl.float64)
    lowered = bar * wanted
    fair = tl.where(own > 0, tl.minimum(lowered / tl.where(own > 0, own, 1.0), 1.0), 1.0)
    tl.store(chance_out + at, tl.where(exists, fair, 0.0), mask=inside)
    tl.store(values_out + at, tl.maximum(wanted - scale * tl.minimum(lowered, own), 0.0), mask=inside)
    tl.store(mass_out + node, tl.maximum(whole - accepted, 0.0))
    tl.store(bar_out + node, bar)
    tl.store(scale_out + node, scale)
