"""K-SEQ's bar on CUDA, in Triton: see `ops/kseq.py`. A pass over two rows asks for several bars at once.

beta is concave: between two bars it lies above its chord and below the tangents at both. What is lossless on the chord
is lossless, what is not on the tangents is not; so the second time all bars lie between the two, and the chord between
neighbours there is beta as far as can be told.
"""
# pyright: reportMissingImports=false, reportIndexIssue=false, reportUnreachable=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwood.ops.cuda.pdl import OVERLAPPING, wait_and_make_way
from draftwood.ops.cuda.rejection import PADDED, SLICE, Drawn, Weights, added_up, last_to_arrive, padded

ROUNDS = tl.constexpr(4)  # each makes the bracket seven times smaller; along its chord the rest is rounding
POINTS = tl.constexpr(8)
KSEQ_BLOCK = 2048
BARS = 16  # asked for together in a verdict
NARROWINGS = 2
BAR_SLICE = 1024  # tokens a program
BAR_BLOCK = 256  # of them at once, for every bar


@triton.jit
def at_place(values, place, i):
    """One of a few numbers."""
    return tl.sum(tl.where(place == i, values, 0), 0)


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
def _highest(low, high, at_low, slope, at_high, slope_high, draws, LANES: tl.constexpr):
    """The highest lossless bar in a bracket if beta were the lower of two lines, one through either end."""
    lane = tl.arange(0, LANES)
    left, right = low, high
    for _turn in range(6):
        bars = left + (right - left) * (lane.to(tl.float64) / (LANES - 1))
        bars = tl.where(lane == LANES - 1, right, bars)
        betas = tl.minimum(at_low + (bars - low) * slope, at_high - (high - bars) * slope_high)
        last = tl.max(tl.where(_lossless(bars, betas, draws), lane, 0), 0)
        left, right = at_place(bars, lane, last), at_place(bars, lane, tl.minimum(last + 1, LANES - 1))
    return left


@triton.jit
def _narrowed(bars, betas, slopes, draws, point, POINTS: tl.constexpr):
    """The highest bar known to be lossless, and the lowest that none can be above; beta and its slope are given."""
    # The lowest is lossless whatever the rows are.
    last = tl.max(tl.where(_lossless(bars, betas, draws), point, 0), 0)
    after = tl.minimum(last + 1, POINTS - 1)
    low, high = at_place(bars, point, last), at_place(bars, point, after)
    at_low, at_high = at_place(betas, point, last), at_place(betas, point, after)
    chord = tl.where(high > low, (at_high - at_low) / tl.where(high > low, high - low, 1.0), 0.0)
    surely = _highest(low, high, at_low, chord, at_low + (high - low) * chord, chord, draws, 32)
    rising, falling = at_place(slopes, point, last), at_place(slopes, point, after)
    at_most = _highest(low, high, at_low, rising, at_high, falling, draws, 32)
    return surely, tl.maximum(at_most, surely)


@triton.jit
def _sums_of_bars(
    row_p, row_q, bars, begin,
    POINTS: tl.constexpr, VOCABULARY: tl.constexpr, SIZE: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """beta of a slice at every bar, times weight each, and how fast it grows. [POINTS], [POINTS] float64."""
    total, slope = tl.zeros((POINTS, AT_ONCE), tl.float64), tl.zeros((POINTS, AT_ONCE), tl.float32)
    scale = bars.to(tl.float32)[:, None]
    for block in tl.static_range(SIZE // AT_ONCE):
        x = begin + block * AT_ONCE + tl.arange(0, AT_ONCE)
        target = tl.load(row_p + x, mask=x < VOCABULARY, other=0.0)[None, :]
        law = tl.load(row_q + x, mask=x < VOCABULARY, other=0.0)[None, :]
        total += tl.minimum(target * scale, law).to(tl.float64)
        slope += tl.where(target * scale < law, target, 0.0)
    return tl.sum(total, 1), tl.sum(slope.to(tl.float64), 1)


@triton.jit
def _narrow_bars(
    p, q, listed, rows, extent, weight, bars_of, partial, arrived,
    LISTED: tl.constexpr, W: tl.constexpr, POINTS: tl.constexpr, SLICES: tl.constexpr, VOCABULARY: tl.constexpr,
    SIZE: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """A slice of one node's rows a program: between which bars the best lies. One draw alone needs no lower bar."""
    wait_and_make_way()
    node, piece, slices = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    if LISTED:
        node = tl.load(listed + node)  # -1: none
    draws, whole = tl.load(extent + node, mask=node >= 0, other=0), tl.load(weight + node, mask=node >= 0, other=0.0)
    low = tl.load(bars_of + 2 * node, mask=node >= 0, other=0.0)
    high = tl.load(bars_of + 2 * node + 1, mask=node >= 0, other=0.0)
    if (draws > 1) & (high > low):
        point = tl.arange(0, POINTS)
        bars = low + (high - low) * (point.to(tl.float64) / (POINTS - 1))
        bars = tl.where(point == POINTS - 1, high, bars)
        row_q = q + tl.maximum(tl.load(rows + node * W), 0) * VOCABULARY  # any where nothing was drawn
        betas, slopes = _sums_of_bars(
            p + node * VOCABULARY, row_q, bars * whole, piece * SIZE, POINTS, VOCABULARY, SIZE, AT_ONCE
        )  # fmt: skip
        at = (node * slices + piece) * 2 * POINTS
        tl.store(partial + at + point, betas)
        tl.store(partial + at + POINTS + point, slopes)
        if last_to_arrive(arrived, node, slices):
            i = tl.arange(0, SLICES)
            every = partial + (node * slices + i)[None, :] * 2 * POINTS + point[:, None]
            there = (i < slices)[None, :]
            betas = tl.sum(tl.load(every, mask=there, other=0.0, cache_modifier=".cg"), 1)
            slopes = tl.sum(tl.load(every + POINTS, mask=there, other=0.0, cache_modifier=".cg"), 1) * whole
            low, high = _narrowed(bars, betas, slopes, draws, point, POINTS)
            tl.store(bars_of + 2 * node, low)
            tl.store(bars_of + 2 * node + 1, high)


def narrow_bars(draw: Drawn, w: Weights, nodes: Tensor | None) -> None:
    """The bars of some nodes or all, as good as they get."""
    count = draw.tree.num_nodes if nodes is None else len(nodes)
    slices = triton.cdiv(draw.vocabulary, BAR_SLICE)
    partial = torch.empty(draw.tree.num_nodes, slices, 2, BARS, dtype=torch.float64, device=draw.p.device)
    for _ in range(NARROWINGS):
        _narrow_bars[(count, slices)](
            draw.p, draw.q, w.tokens if nodes is None else nodes, w.rows, w.extent, w.weight, w.bars, partial,
            w.arrived, nodes is not None, draw.width, BARS, padded(slices), draw.vocabulary, BAR_SLICE,
            min(BAR_SLICE, BAR_BLOCK), num_warps=4, **OVERLAPPING,
        )  # fmt: skip


@triton.jit
def left_of_bar(p, q, rows, weight, bars, scale, node, x, W: tl.constexpr, VOCABULARY: tl.constexpr):
    """What draws at the bar they share leave of weight · p at tokens x; and p itself."""
    inside = x < VOCABULARY
    target = tl.load(p + node * VOCABULARY + x, mask=inside, other=0.0)
    left = target * tl.load(weight + node).to(tl.float32)
    row = tl.load(rows + node * W)
    law = tl.load(q + row * VOCABULARY + x, mask=inside & (row >= 0), other=0.0)
    share = tl.minimum(left * tl.load(bars + 2 * node).to(tl.float32), law)
    return tl.maximum(left - tl.load(scale + node).to(tl.float32) * share, 0.0), target


@triton.jit
def chance_at_bar(wanted, said, weight, bars, node, place, there, W: tl.constexpr):
    """That draws `place` behind `node`, which are `there`, are accepted at the bar they share."""
    own = tl.load(said + (node * W + place) * W + place, mask=there, other=0.0)
    asked = tl.load(bars + 2 * node, mask=there, other=0.0) * tl.load(weight + node, mask=there, other=0.0)
    asked = asked * tl.load(wanted + node * W + place, mask=there, other=0.0)
    fair = tl.where(own > 0, tl.minimum(asked / tl.where(own > 0, own, 1.0), 1.0), 1.0)
    return tl.where(there, fair, 0.0)


@triton.jit
def _settle_bars(
    p, q, rows, tokens, extent, wanted, said, weight, bars, partial, arrived, chance, values, mass, scale_out,
    W: tl.constexpr, LANES: tl.constexpr, SLICES: tl.constexpr, VOCABULARY: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """All draws behind a node at their bar, as `KSeq.weigh` says; a slice of its rows a program."""
    wait_and_make_way()
    node, piece, slices = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    draws, whole = tl.load(extent + node), tl.load(weight + node)
    if draws > 0:
        x = piece * SIZE + tl.arange(0, SIZE)
        bar, row = tl.load(bars + 2 * node), tl.maximum(tl.load(rows + node * W), 0)  # any where nothing was drawn
        target = tl.load(p + node * VOCABULARY + x, mask=x < VOCABULARY, other=0.0)
        law = tl.load(q + row * VOCABULARY + x, mask=x < VOCABULARY, other=0.0)
        common = tl.minimum(target * (bar * whole).to(tl.float32), law)
        tl.store(partial + node * slices + piece, tl.sum(common.to(tl.float64), 0))
        if last_to_arrive(arrived, node, slices):
            beta = added_up(partial + node * slices, slices, SLICES)
            accepted = 1.0 - missed_by_all(beta, draws)
            scale = tl.where(beta > 0, accepted / tl.where(beta > 0, beta, 1.0), 0.0)
            j = tl.arange(0, LANES)
            there = tl.load(tokens + node * W + j, mask=j < W, other=-1) >= 0
            hopes = whole * tl.load(wanted + node * W + j, mask=there, other=0.0)
            own = tl.load(said + (node * W + j) * W + j, mask=there, other=0.0)
            kept = tl.maximum(hopes - scale * tl.minimum(bar * hopes, own), 0.0)
            fair = chance_at_bar(wanted, said, weight, bars, node + 0 * j, j, there, W)
            tl.store(chance + node * W + j, fair, mask=j < W)
            tl.store(values + node * W + j, kept, mask=j < W)
            tl.store(mass + node, tl.maximum(whole - accepted, 0.0))
            tl.store(scale_out + node, scale)
    elif piece == 0:
        tl.store(mass + node, whole)


def settle_bars(draw: Drawn, w: Weights) -> None:
    """What all draws at their bars come to, all nodes at once."""
    slices = triton.cdiv(draw.vocabulary, SLICE)
    partial = torch.empty(draw.tree.num_nodes, slices, dtype=torch.float64, device=draw.p.device)
    _settle_bars[(draw.tree.num_nodes, slices)](
        draw.p, draw.q, w.rows, w.tokens, w.extent, w.wanted, w.said, w.weight, w.bars, partial, w.arrived, w.chance,
        w.values, w.mass, w.scale, draw.width, PADDED, padded(slices), draw.vocabulary, SLICE, num_warps=4,
        **OVERLAPPING,
    )  # fmt: skip
