"""A layer of a tree at a time, all its draws against one common target, on CUDA: see `verifiers/layer.py`.

Each draw needs to know what all draws before it left, and each layer what the one above it gave, but not one after the
other. What the first k draws behind a node leave, (w p - s_1 q_1 - … - s_k q_k)+ summed, is w P - s_1 Q_1 - … - s_k Q_k
with the sums P and Q over the tokens they leave something of: linear as long as these are the same. So the weights w
and scales s of a whole tree are guessed, one launch sums up P and Q, and another solves for all weights and scales as
if it were linear, from the root down: Newton's method, which is exact once the right tokens are left, and takes as long
for deep trees as for flat ones. A tree has settled when new sums say the same of it as those it was solved with: mostly
the third ones do. For others there are more times, which settled trees leave at once, and what has not settled by then
is done by one program, however long it takes.
"""
# pyright: reportMissingImports=false, reportIndexIssue=false, reportUnreachable=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwood.ops.cuda.layer_pooled_sums import FEW, LANES, SUMS, sum_all, sum_alone
from draftwood.ops.cuda.pdl import OVERLAPPING, wait_and_make_way
from draftwood.ops.cuda.rejection import Drawn, Weights, padded
from draftwood.ops.cuda.verify_stop import pick_end, stop_by_layers

POOL_SLICE = 1024  # tokens a program sums up at a time
SUM_PROGRAMS = 396  # share all slices of all nodes: as many as find room at once, three for each multiprocessor
SUM_WARPS, SUM_REGISTERS = 8, 80  # of each
NODES = 32  # of a layer solved together: one for each thread of a warp, which need not wait for others
TIMES = 7  # a tree is solved at most before one program is left alone with it: one of several hundred is
SETTLED = 1e-6  # of what draws leave, a difference that is nothing: where the same tokens are left, there is none
NOWHERE = tl.constexpr(1 << 30)


@triton.jit
def _then(a, b, c, d):
    """x -> a x + b, then x -> c x + d."""
    return c * a, c * b + d


@triton.jit
def _as_lines(stays, lost, draws, whole, PLACES: tl.constexpr):
    """The scales of the draws behind nodes as lines a S + b, S what survives before the first; and so what survives
    the last.
    """
    a, b = (whole * 0.0 + 1.0,), (whole * 0.0,)
    for k in tl.static_range(PLACES):
        takes = k < draws  # elsewhere nothing was summed up
        next_a, next_b = whole * 0.0 + 1.0, (tl.where(takes, stays[k], 1.0) - 1.0) * whole
        for i in tl.static_range(k + 1):
            of_law = tl.where(takes, lost[k * (k + 1) // 2 + i], 0.0)
            next_a, next_b = next_a - of_law * a[i], next_b - of_law * b[i]
        a += (tl.where(takes, next_a, a[k]),)
        b += (tl.where(takes, next_b, b[k]),)
    return a, b


@triton.jit
def _shifted(values, before, lane):
    """Each the value of the one before."""
    return tl.where(lane > 0, tl.gather(values, tl.maximum(lane - 1, 0), 0), before)


@triton.jit
def _last(values, lane, NODES: tl.constexpr):
    """The value of the last."""
    return tl.sum(tl.where(lane == NODES - 1, values, 0.0), 0)


@triton.jit
def _known_of(sums, tries, wanted, said, node, near, nodes, W: tl.constexpr, PLACES: tl.constexpr):
    """Of each draw behind nodes: its child, what of p stays after it, and what p says of its token; and the same of the
    laws up to its own. One draw after the other, so that what the first needs is asked for at once.
    """
    child, stays, of_p, lost, of_laws = (), (), (), (), ()
    for k in tl.static_range(PLACES):
        child += (tl.load(tries + node * W + k, mask=near, other=-1),)
        stays += (tl.load(sums + k * nodes + node, mask=near, other=0.0),)
        of_p += (tl.load(wanted + node * W + k, mask=near, other=0.0),)
        for i in tl.static_range(k + 1):
            lost += (tl.load(sums + ((1 + i) * LANES + k) * nodes + node, mask=near, other=0.0),)
            of_laws += (tl.load(said + (node * W + i) * W + k, mask=near, other=0.0),)
    return child, stays, of_p, lost, of_laws


@triton.jit
def _fair_chances(of_p, of_laws, whole, scale, exists, PLACES: tl.constexpr):
    """That each draw is accepted once those before it were rejected; as `fair_chance` of `draws.py`."""
    chance = ()
    for k in tl.static_range(PLACES):
        left = whole * of_p[k]
        for m in tl.static_range(k):
            left -= scale[m] * of_laws[k * (k + 1) // 2 + m]
        offered = scale[k] * of_laws[k * (k + 1) // 2 + k]
        fair = tl.where(offered > 0, tl.minimum(tl.maximum(left, 0.0) / tl.where(offered > 0, offered, 1.0), 1.0), 1.0)
        chance += (tl.where(exists[k], fair, 0.0),)
    return chance


@triton.jit
def _hand_on(weight, child, exists, chance, reach, PLACES: tl.constexpr):
    """What children are offered: the chance that a draw that gave them is the first accepted."""
    given = ()
    for k in tl.static_range(PLACES):
        given += (reach * chance[k],)
        reach = reach * (1.0 - chance[k])
    for k in tl.static_range(PLACES):
        offered = reach * 0.0
        for m in tl.static_range(PLACES):
            offered += tl.where(child[m] == child[k], given[m], 0.0)
        tl.store(weight + child[k], offered, mask=exists[k])  # the same again where a child was drawn twice


@triton.jit
def _solve_nodes(
    known, begin, at, last, layer, nodes, survives, rejected,
    W: tl.constexpr, PLACES: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
    """New scales for some nodes of a layer with at most PLACES draws each, what they leave, and the weights of their
    children. Returns what survives them, the chance that all draws up to them are rejected, what is left at them, from
    where to where their children are, and how many draws are behind one of those at most.
    """
    sums, extent, behind, tries, wanted, said, weight, scales, mass, depth = known
    lane = tl.arange(0, NODES)
    node, near = begin + at + lane, at + lane <= last
    level, draws = tl.load(depth + node, mask=near, other=-1), tl.load(extent + node, mask=near, other=0)
    whole, widest = tl.load(weight + node, mask=near, other=0.0), tl.load(behind + node, mask=near, other=0)
    child, stays, of_p, lost, of_laws = _known_of(sums, tries, wanted, said, node, near, nodes, W, PLACES)
    here = near & (level == layer)
    draws, whole = tl.where(here, draws, 0), tl.where(here, whole, 0.0)
    a, b = _as_lines(stays, lost, draws, whole, PLACES)
    steep, offset = tl.associative_scan((a[PLACES], b[PLACES]), 0, _then)
    after = steep * survives + offset
    before = _shifted(after, survives, lane)
    left = tl.where(here, tl.maximum(whole + (after - before), 0.0), 0.0)
    tl.store(mass + node, left, mask=here)
    scale, exists = (), ()
    first, until = lane * 0 + NOWHERE, lane * 0 - 1
    for k in tl.static_range(PLACES):
        exists += (here & (child[k] >= 0),)
        scale += (tl.where(exists[k], tl.minimum(tl.maximum(a[k] * before + b[k], 0.0), 1.0), 0.0),)
        tl.store(scales + node * W + k, scale[k], mask=exists[k])
        first = tl.minimum(first, tl.where(exists[k], (child[k] - begin).to(tl.int32), NOWHERE))
        until = tl.maximum(until, tl.where(exists[k], (child[k] - begin).to(tl.int32), -1))
    chance = _fair_chances(of_p, of_laws, whole, scale, exists, PLACES)
    missed = whole * 0.0 + 1.0
    for k in tl.static_range(PLACES):
        missed = missed * (1.0 - chance[k])
    so_far = rejected * tl.cumprod(missed, 0)
    _hand_on(weight, child, exists, chance, _shifted(so_far, rejected, lane), PLACES)
    return (
        _last(after, lane, NODES), _last(so_far, lane, NODES), tl.sum(left, 0),
        tl.min(first, 0), tl.max(until, 0), tl.max(tl.where(draws > 0, widest, 0), 0),
    )  # fmt: skip


@triton.jit
def _solve_tree(
    known, extent, left, spare, begin, steps, nodes, W: tl.constexpr, NODES: tl.constexpr, SHORT: tl.constexpr
):  # fmt: skip
    """One tree from the root down; what is `left` of each layer, and what the layer above it did not give away. SHORT:
    code for the most draws alone, which takes a third of the time to compile.
    """
    one = begin.to(tl.float64) * 0.0 + 1.0
    kept = one * 0.0
    first = begin.to(tl.int32) * 0
    last, most = first, tl.load(extent + begin)
    layer = steps * 0
    while layer < steps:
        survives, rejected, remains = one, one, one * 0.0
        at, next_first, next_last, next_most = first, first * 0 + NOWHERE, first * 0 - 1, first * 0
        while at <= last:
            if SHORT:
                survives, rejected, more, low, high, wide = _solve_nodes(
                    known, begin, at, last, layer, nodes, survives, rejected, W, W, NODES
                )
            elif most <= 1:
                survives, rejected, more, low, high, wide = _solve_nodes(
                    known, begin, at, last, layer, nodes, survives, rejected, W, 1, NODES
                )
            elif most <= FEW:
                survives, rejected, more, low, high, wide = _solve_nodes(
                    known, begin, at, last, layer, nodes, survives, rejected, W, min(FEW, W), NODES
                )
            else:
                survives, rejected, more, low, high, wide = _solve_nodes(
                    known, begin, at, last, layer, nodes, survives, rejected, W, W, NODES
                )
            remains = remains + more
            next_first, next_last = tl.minimum(next_first, low), tl.maximum(next_last, high)
            next_most = tl.maximum(next_most, wide)
            at += NODES
        tl.store(left + layer, remains)
        tl.store(spare + layer, kept)
        kept, first, last, most = rejected, next_first, next_last, next_most
        tl.debug_barrier()
        layer += 1
    tl.store(left + layer, 1.0 - kept)
    tl.store(spare + layer, kept)


@triton.jit(do_not_specialize=["turn", "steps", "nodes"])
def _solve(
    sums, extent, behind, tries, wanted, said, weight, scales, mass, depth, offsets, left, spare, moved, turn,
    steps, nodes, W: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
    """All layers of one tree once, if its sums are new."""
    wait_and_make_way()
    b, trees = tl.program_id(0), tl.num_programs(0)
    begin = tl.load(offsets + b)
    tl.store(moved + (turn + 1) * trees + b, 0)
    if (turn == 0) | (tl.load(moved + turn * trees + b) > 0):
        layers = b * (steps + 1)
        known = (sums, extent, behind, tries, wanted, said, weight, scales, mass, depth)
        _solve_tree(known, extent, left + layers, spare + layers, begin, steps, nodes, W, NODES, False)


@triton.jit(do_not_specialize=["slices", "steps", "nodes"])
def _end(
    p, q, rows, tokens, extent, behind, tries, wanted, said, weight, scales, mass, depth, parents, offsets,
    partial, sums, left, spare, moved, seeds, lengths, passed, stop, end, path, length, slices, steps, nodes, times,
    W: tl.constexpr, NODES: tl.constexpr, SLICES: tl.constexpr, VOCABULARY: tl.constexpr, SIZE: tl.constexpr,
    TOLERANCE: tl.constexpr, LEVELS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Where one tree's path ends; before that, a tree that has not settled does. A draw is right one time after all
    before it are.
    """
    wait_and_make_way()
    b = tl.program_id(0)
    begin = tl.load(offsets + b)
    size = (tl.load(offsets + b + 1) - begin).to(tl.int32)
    layers = b * (steps + 1)
    moved_last = tl.load(moved + (times - 1) * tl.num_programs(0) + b)
    turns = tl.where(moved_last > 0, size * W + 1, 0)
    while turns > 0:
        wrong = sum_alone(
            p, q, rows, tokens, extent, weight, scales, depth, partial, sums, begin, size, slices, nodes,
            W, SLICES, VOCABULARY, SIZE,
        )  # fmt: skip
        turns = tl.where(wrong > TOLERANCE, turns - 1, 0)
        if turns > 0:
            known = (sums, extent, behind, tries, wanted, said, weight, scales, mass, depth)
            _solve_tree(known, extent, left + layers, spare + layers, begin, steps, nodes, W, NODES, True)
            tl.debug_barrier()
    stop_by_layers(
        extent, weight, mass, depth, parents, left + layers, spare + layers, passed + layers, stop, begin, size, steps,
        LEVELS, TOGETHER,
    )  # fmt: skip
    pick_end(parents, stop, begin, size, seeds, lengths, end, path, length, steps, b, TOGETHER)


def end_of_pooled(draw: Drawn, w: Weights, end: Tensor, path: Tensor, length: Tensor) -> None:
    """The weights of all nodes, the scales of all draws, and where paths end."""
    tree, count, steps = draw.tree, draw.tree.num_nodes, draw.tree.max_depth
    slices, like = triton.cdiv(draw.vocabulary, POOL_SLICE), {"dtype": torch.float64, "device": draw.p.device}
    partial, sums = torch.empty(count, SUMS.value, slices, **like), torch.empty(SUMS.value, count, **like)
    left, spare, passed = torch.empty(3, tree.num_trees, steps + 1, **like)
    stop = torch.empty(count, **like)
    tries, behind = tree.tries.contiguous(), torch.empty_like(w.extent)
    moved = torch.empty(TIMES + 1, tree.num_trees, dtype=torch.int32, device=draw.p.device)
    restless = torch.empty(TIMES + 1, dtype=torch.int32, device=draw.p.device)
    drawn = (draw.p, draw.q, w.rows, w.tokens, w.extent, behind, tries)
    known = (w.extent, behind, tries, w.wanted, w.said, w.weight, w.scales, w.mass, tree.depth)
    rows = (padded(slices), draw.vocabulary, POOL_SLICE, SETTLED)
    for turn in range(TIMES):
        sum_all[(min(count * slices, SUM_PROGRAMS),)](
            *drawn, w.weight, w.scales, tree.depth, tree.owner, partial, sums, w.arrived, moved, restless,
            turn, count, tree.num_trees, draw.width, *rows, num_warps=SUM_WARPS, maxnreg=SUM_REGISTERS, **OVERLAPPING,
        )  # fmt: skip
        _solve[(tree.num_trees,)](
            sums, *known, tree.offsets, left, spare, moved, turn, steps, count, draw.width, NODES,
            num_warps=1, **OVERLAPPING,
        )  # fmt: skip
    _end[(tree.num_trees,)](
        *drawn[:4], *known, tree.parents, tree.offsets, partial, sums, left, spare, moved, draw.seeds, draw.lengths,
        passed, stop, end, path, length, slices, steps, count, TIMES, draw.width, NODES, *rows, padded(steps + 1),
        4 * NODES, num_warps=4, **OVERLAPPING,
    )  # fmt: skip
