"""Verdicts of laws that are not lossless on CUDA, in Triton: see `verifiers/lossy.py`."""
# pyright: reportMissingImports=false, reportIndexIssue=false, reportUnreachable=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwood.ops.cuda.rejection import Drawn, Weights, reject_all
from draftwood.ops.cuda.residual import PADDED, ROW_BLOCK
from draftwood.ops.cuda.verdict import NODES, WARPS, Ends, bonus_after, walked
from draftwood.ops.cuda.verify_stop import along_path, write_path
from draftwood.ops.verdict import Rule
from draftwood.tree import TokenTree, Verdict

JUDGED = 1024  # tokens looked at together where all children are compared with each


def _number(value: float, like: Tensor) -> Tensor:
    """A setting where kernels find it in float64: as an argument it would be float32. Filling can be captured."""
    return torch.full((1,), value, dtype=torch.float64, device=like.device)


def _unknown(tree: TokenTree) -> Tensor:
    """Unknown drift wherever there was something to judge. [B]."""
    drift = torch.zeros(tree.num_trees, dtype=torch.float64, device=tree.offsets.device)
    return drift.masked_fill_(tree.tries[tree.offsets[:-1], 0] >= 0, torch.nan)


def lenient_walk(tree: TokenTree, p: Tensor, seeds: Tensor, lengths: Tensor, lenience: float) -> Verdict:
    """Recursive rejection with its bar lowered."""
    draw = Drawn.of(tree, p, seeds, lengths)
    w = Weights.looked_up(draw)
    reject_all(draw, w, draw.width)
    w.chance.div_(lenience).clamp_(max=1)
    return replace(bonus_after(draw, w, walked(draw, w), children=False), drift=_unknown(tree))


@triton.jit
def _lower_bars(p, tries, tokens, single, total, chance, mass, W: tl.constexpr, VOCABULARY: tl.constexpr):
    """One coin for all children of a node, one node a program."""
    node = tl.program_id(0).to(tl.int64)
    bar, whole = tl.load(single), tl.load(total)
    seen, before = bar * 0.0, bar * 0.0 + 1.0
    likely = node < 0
    for j in tl.static_range(W):
        child = tl.load(tries + node * W + j)
        token = tl.load(tokens + tl.maximum(child, 0))
        first = child >= 0
        for i in tl.static_range(j):
            first = first & (tl.load(tokens + tl.maximum(tl.load(tries + node * W + i), 0)) != token)
        wanted = tl.where(first, tl.load(p + node * VOCABULARY + token).to(tl.float64), 0.0)
        seen += wanted
        likely = likely | (wanted >= bar)
        missed = tl.where(likely, 0.0, tl.maximum(1.0 - seen / whole, 0.0))
        fair = tl.where(before > 0, 1.0 - missed / tl.where(before > 0, before, 1.0), 1.0)
        asked = tl.load(tries + node * W) >= 0  # at a leaf nothing is
        tl.store(chance + node * W + j, tl.where(asked, fair, 0.0))
        before = missed
    tl.store(mass + node, tl.maximum(1.0 - seen, 0.0))


def lowered_walk(tree: TokenTree, p: Tensor, seeds: Tensor, lengths: Tensor, single: float, total: float) -> Verdict:
    """Plain target sampling with lowered bars."""
    draw = Drawn.of(tree, p, seeds, lengths)
    w = Weights.looked_up(draw)
    w.scales.zero_()
    w.values.zero_()
    tries, tokens, _ = draw.links
    _lower_bars[(tree.num_nodes,)](
        draw.p, tries, tokens, _number(single, p), _number(total, p), w.chance, w.mass,
        tries.shape[1], p.shape[1], num_warps=1,
    )  # fmt: skip
    return replace(bonus_after(draw, w, walked(draw, w), children=False), drift=_unknown(tree))


@triton.jit
def _mix(
    p, q, tries, tokens, q_row, weight, mixed, away, W: tl.constexpr, VOCABULARY: tl.constexpr, WIDTH: tl.constexpr
):
    """One node's row mixed with the law of the first draw behind it, and how far from p that is."""
    node = tl.program_id(0).to(tl.int64)
    first = tl.load(tries + node * W)
    token, row = tl.load(tokens + tl.maximum(first, 0)), tl.load(q_row + tl.maximum(first, 0))
    share = tl.load(weight)
    part, near_p = share.to(tl.float32), share.to(tl.float32) >= 0.5
    total = tl.zeros((WIDTH,), tl.float64)
    for begin in range(0, VOCABULARY, WIDTH):
        x = begin + tl.arange(0, WIDTH)
        inside = x < VOCABULARY
        target = tl.load(p + node * VOCABULARY + x, mask=inside, other=0.0)
        law = tl.load(q + row * VOCABULARY + x, mask=inside & (row >= 0), other=0.0)
        law = tl.where(row >= 0, law, (x == token).to(tl.float32))
        law = tl.where(first >= 0, law, target)
        gap = target - law
        between = tl.where(near_p, target - gap * (1.0 - part), law + gap * part)
        tl.store(mixed + node * VOCABULARY + x, between, mask=inside)
        total += tl.where(inside, tl.abs(gap), 0.0).to(tl.float64)
    tl.store(away + node, (1.0 - share) * tl.sum(total, 0) / 2.0)


@triton.jit
def _add_up(parents, away, end, drift):
    """How far the nodes of one path are away, all together."""
    b = tl.program_id(0)
    node = tl.load(end + b)
    total = tl.load(away + node)
    up = tl.load(parents + node)
    while up >= 0:
        total += tl.load(away + up)
        up = tl.load(parents + up)
    tl.store(drift + b, total)


def mixture_walk(tree: TokenTree, p: Tensor, seeds: Tensor, lengths: Tensor, weight: float) -> Verdict:
    """Recursive rejection against a mixture of target and draft."""
    given, mixed = Drawn.of(tree, p, seeds, lengths), torch.empty_like(p, memory_format=torch.contiguous_format)
    away = torch.empty(tree.num_nodes, dtype=torch.float64, device=p.device)
    width = tree.tries.shape[1]
    _mix[(tree.num_nodes,)](
        given.p, given.q, *given.links, _number(weight, p), mixed, away, width, p.shape[1], ROW_BLOCK, num_warps=16
    )
    draw = replace(given, p=mixed)
    w = Weights.looked_up(draw)
    reject_all(draw, w, width)
    ends, drift = walked(draw, w), torch.empty(tree.num_trees, dtype=torch.float64, device=p.device)
    _add_up[(tree.num_trees,)](tree.parents.contiguous(), away, ends.node, drift, num_warps=1)
    return replace(bonus_after(draw, w, ends, children=False), drift=drift)


@triton.jit
def _judge_typical(
    p, tries, tokens, threshold, alpha, good,
    W: tl.constexpr, LANES: tl.constexpr, VOCABULARY: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Which children of one node are good enough, the surer the target the fewer."""
    node = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, LANES)
    child = tl.load(tries + node * W + place, mask=place < W, other=-1)
    if tl.max(child, 0) >= 0:
        total = tl.zeros((WIDTH,), tl.float64)
        for begin in range(0, VOCABULARY, WIDTH):
            x = begin + tl.arange(0, WIDTH)
            row = tl.load(p + node * VOCABULARY + x, mask=x < VOCABULARY, other=0.0)
            total -= tl.where(row > 0, row * tl.log(tl.where(row > 0, row, 1.0)), 0.0).to(tl.float64)
        bar = tl.minimum(tl.load(alpha) * tl.exp(-tl.sum(total, 0)), tl.load(threshold))
        token = tl.load(tokens + child, mask=child >= 0, other=0)
        wanted = tl.load(p + node * VOCABULARY + token, mask=child >= 0, other=0.0).to(tl.float64)
        tl.store(good + child, (wanted > bar).to(tl.float64), mask=child >= 0)


@triton.jit
def _judge_relaxed(
    p, tries, tokens, k, margin, good,
    W: tl.constexpr, LANES: tl.constexpr, VOCABULARY: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Which children of one node are among its row's likeliest, and not far below the best."""
    node = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, LANES)
    child = tl.load(tries + node * W + place, mask=place < W, other=-1)
    if tl.max(child, 0) >= 0:
        token = tl.load(tokens + child, mask=child >= 0, other=0)
        wanted = tl.load(p + node * VOCABULARY + token, mask=child >= 0, other=0.0)
        most, above = tl.zeros((WIDTH,), tl.float32), tl.zeros((WIDTH, LANES), tl.int32)
        for begin in range(0, VOCABULARY, WIDTH):
            x = begin + tl.arange(0, WIDTH)
            row = tl.load(p + node * VOCABULARY + x, mask=x < VOCABULARY, other=0.0)
            most = tl.maximum(most, row)
            above += (row[:, None] > wanted[None, :]).to(tl.int32)
        few = tl.sum(above, 0).to(tl.float64) < tl.load(k)
        some = wanted > 0
        gap = tl.log(tl.max(most, 0).to(tl.float64)) - tl.log(tl.where(some, wanted, 1.0).to(tl.float64))
        tl.store(good + child, (some & few & (gap <= tl.load(margin))).to(tl.float64), mask=child >= 0)


@triton.jit(do_not_specialize=["steps"])
def _end_of_longest(parents, depth, offsets, good, end, path, length, steps, LANES: tl.constexpr):
    """The deepest node of one tree to which all is good enough; the first of several."""
    b = tl.program_id(0)
    begin = tl.load(offsets + b)
    size = tl.load(offsets + b + 1) - begin
    best, chosen = begin * 0, begin
    at = begin * 0
    while at < size:
        x = at + tl.arange(0, LANES)
        inside, node = x < size, begin + x
        there = inside & (tl.load(parents + node, mask=inside, other=-1) != node)  # absent nodes are their own parents
        reached = there & (along_path(parents, good, node, inside, steps) > 0)
        rank = tl.where(reached, tl.load(depth + node, mask=inside, other=0) * size - x, -1)
        highest = tl.max(rank, 0)
        chosen = tl.where(highest > best, tl.sum(tl.where(rank == highest, node, 0), 0), chosen)
        best = tl.maximum(best, highest)
        at += LANES
    tl.store(end + b, chosen)
    write_path(parents, chosen, path + b * (steps + 1), length + b, steps)


def typical_path(tree: TokenTree, p: Tensor, seeds: Tensor, lengths: Tensor, threshold: float, alpha: float) -> Verdict:
    """The longest path of typical tokens."""
    return _longest(_judge_typical, ROW_BLOCK, Drawn.of(tree, p, seeds, lengths), threshold, alpha)


def relaxed_path(tree: TokenTree, p: Tensor, seeds: Tensor, lengths: Tensor, k: float, margin: float) -> Verdict:
    """The longest path of tokens near the top."""
    return _longest(_judge_relaxed, JUDGED, Drawn.of(tree, p, seeds, lengths), k, margin)


def _longest(judge, block: int, draw: Drawn, *settings: float) -> Verdict:  # type: ignore[no-untyped-def]
    tree, ends, w = draw.tree, Ends.of(draw.tree), Weights.looked_up(draw)
    w.scales.zero_()
    good = torch.ones(tree.num_nodes, dtype=torch.float64, device=draw.p.device)
    tries, tokens, _ = draw.links
    numbers = (_number(value, draw.p) for value in settings)
    judge[(tree.num_nodes,)](
        draw.p, tries, tokens, *numbers, good, tries.shape[1], PADDED, draw.p.shape[1], block, num_warps=8
    )
    _end_of_longest[(tree.num_trees,)](
        tree.parents.contiguous(), tree.depth.contiguous(), tree.offsets.contiguous(), good,
        ends.node, ends.path, ends.length, tree.max_depth, NODES, num_warps=WARPS,
    )  # fmt: skip
    return replace(bonus_after(draw, w, ends, children=True), drift=_unknown(tree))


VERDICTS = {
    Rule.LENIENT: lenient_walk,
    Rule.LOWERED_BARS: lowered_walk,
    Rule.MIXTURE: mixture_walk,
    Rule.TYPICAL: typical_path,
    Rule.RELAXED: relaxed_path,
}
