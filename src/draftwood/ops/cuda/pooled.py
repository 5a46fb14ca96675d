"""A layer of a tree at a time, all its draws against one common target, on CUDA: see `verifiers/layer.py`.

Each draw needs to know what all draws before it left, but not one after the other. What the draws behind a node leave,
(w p - s_1 q_1 - … - s_j q_j)+ summed, is convex in the scales s, and linear as long as the same tokens are left. So all
scales of a layer are guessed, one launch sums up what would be left and how that grows with every scale, and the scales
are solved for as if it were linear: Newton's method, which is exact once the right tokens are left. Three times do, and
while a layer is solved the next one already begins. What has not settled by then is done by one program, however long
it takes.
"""
# pyright: reportMissingImports=false, reportIndexIssue=false, reportUnreachable=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from draftwood.ops.cuda.draws import PADDED, Drawn, Weights, fair_chance, last_to_arrive, padded
from draftwood.ops.cuda.ends import pick_end
from draftwood.ops.cuda.overlap import OVERLAPPING, wait_and_make_way

POOL_SLICE = 1024  # tokens a program
TIMES = 3  # each layer is solved
SETTLED = 1e-5  # a change of scales and weights whose square is nothing


@triton.jit
def _law(q, rows, tokens, at, x, inside, VOCABULARY: tl.constexpr):
    """The law of one draw at tokens x; nothing where there is no draw."""
    row, token = tl.load(rows + at), tl.load(tokens + at)
    law = tl.load(q + row * VOCABULARY + x, mask=inside & (row >= 0), other=0.0)
    return tl.where(row >= 0, law, (x == token).to(tl.float32))


@triton.jit
def _sum_slice(
    p, q, rows, tokens, weight, scales, node, draws, piece, out,
    W: tl.constexpr, LANES: tl.constexpr, VOCABULARY: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """What the first j draws leave of a slice, and what of the law of each lies where they leave something."""
    j, x = tl.arange(0, LANES), piece * SIZE + tl.arange(0, SIZE)
    inside = x < VOCABULARY
    target = tl.load(p + node * VOCABULARY + x, mask=inside, other=0.0) * tl.load(weight + node).to(tl.float32)
    left = target[None, :] + tl.zeros((LANES, SIZE), tl.float32)
    for i in tl.static_range(W):
        if i < draws:
            scale = tl.where(i <= j, tl.load(scales + node * W + i), 0.0).to(tl.float32)
            left -= scale[:, None] * _law(q, rows, tokens, node * W + i, x, inside, VOCABULARY)[None, :]
    tl.store(out + j, tl.sum(tl.maximum(left, 0.0), 1).to(tl.float64), mask=j < W)
    for i in tl.static_range(W):
        if i < draws:
            law = _law(q, rows, tokens, node * W + i, x, inside, VOCABULARY)[None, :]
            tl.store(out + (1 + i) * W + j, tl.sum(tl.where(left > 0, law, 0.0), 1).to(tl.float64), mask=j < W)


@triton.jit
def _add_slices(partial, sums, node, draws, slices, W: tl.constexpr, LANES: tl.constexpr, SLICES: tl.constexpr):
    """The sums of one node's slices, in order. [1 + W, W]."""
    j, i = tl.arange(0, LANES), tl.arange(0, SLICES)
    size = (1 + W) * W
    for r in tl.static_range(1 + W):
        if r <= draws:
            every = partial + (node * slices + i)[None, :] * size + r * W + j[:, None]
            there = (i < slices)[None, :] & (j < W)[:, None]
            total = tl.sum(tl.load(every, mask=there, other=0.0, cache_modifier=".cg"), 1)
            tl.store(sums + node * size + r * W + j, total, mask=j < W)


@triton.jit
def _then(a, b, c, d):
    """x -> a x + b, then x -> c x + d."""
    return c * a, c * b + d


@triton.jit
def _as_lines(sums, extent, weight, node, here, guess, j, W: tl.constexpr):
    """The scales of the draws behind nodes as lines a S + b, S what survives before the first; and so what survives
    the last. Everything not `here` leaves S as it is.
    """
    draws, whole = tl.load(extent + node, mask=here, other=0), tl.load(weight + node, mask=here, other=0.0)
    a, b = guess * 0.0 + 1.0, guess * 0.0
    out_a, out_b = whole * 0.0 + 1.0, whole * 0.0
    most = tl.max(draws, 0)
    for k in tl.static_range(W):
        if k < most:
            at = sums + node * ((1 + W) * W) + k
            left = tl.load(at, mask=here & (k < draws), other=0.0, cache_modifier=".cg")
            takes = (here & (k < draws))[:, None] & (j <= k)[None, :]
            grows = tl.load(at[:, None] + (1 + j)[None, :] * W, mask=takes, other=0.0, cache_modifier=".cg")
            next_a = 1.0 - tl.sum(grows * a, 1)
            next_b = left - tl.sum(grows * (b - guess), 1) - whole
            a = tl.where((j == k + 1)[None, :], next_a[:, None], a)
            b = tl.where((j == k + 1)[None, :], next_b[:, None], b)
            out_a, out_b = tl.where(draws == k + 1, next_a, out_a), tl.where(draws == k + 1, next_b, out_b)
    return a, b, out_a, out_b


@triton.jit
def _solve_scales(
    sums, extent, tokens, wanted, said, weight, scales, chance, depth, passed, begin, size, layer,
    W: tl.constexpr, LANES: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
    """New scales for a layer of one tree, the chances of its draws, and the chance that all up to a node are rejected;
    returns how much changed.
    """
    j = tl.arange(0, LANES)
    survives, rejected = begin.to(tl.float64) * 0.0 + 1.0, begin.to(tl.float64) * 0.0 + 1.0
    change = begin.to(tl.float64) * 0.0
    at = 0
    while at < size:
        lane = tl.arange(0, NODES)
        node = begin + at + lane
        here = (at + lane < size) & (tl.load(depth + node, mask=at + lane < size, other=-1) == layer)
        place = node[:, None] * W + j[None, :]
        there = tl.load(tokens + place, mask=here[:, None] & (j < W)[None, :], other=-1) >= 0
        guess = tl.load(scales + place, mask=there, other=0.0)
        a, b, out_a, out_b = _as_lines(sums, extent, weight, node, here, guess, j, W)
        steep, offset = tl.associative_scan((out_a, out_b), 0, _then)
        after = steep * survives + offset
        tl.store(passed + node, after, mask=at + lane < size)
        tl.debug_barrier()
        before = tl.load(passed + node - 1, mask=(lane > 0) & (at + lane < size), other=0.0)
        before = tl.where(lane > 0, before, survives)
        found = tl.minimum(tl.maximum(a * before[:, None] + b, 0.0), 1.0)
        change = tl.maximum(change, tl.max(tl.max(tl.where(there, tl.abs(found - guess), 0.0), 1), 0))
        tl.store(scales + place, found, mask=there)
        tl.debug_barrier()
        each, which = node[:, None] + 0 * j[None, :], 0 * place + j[None, :]
        fair = fair_chance(wanted, said, weight, scales, each, which, there, W)
        tl.store(chance + place, fair, mask=there)
        missed = out_a * 0.0 + 1.0
        for k in tl.static_range(W):
            missed = missed * (1.0 - tl.sum(tl.where((j == k)[None, :], fair, 0.0), 1))
        so_far = rejected * tl.cumprod(missed, 0)
        tl.store(passed + node, so_far, mask=at + lane < size)
        survives = tl.sum(tl.where(lane == NODES - 1, after, 0.0), 0)
        rejected = tl.sum(tl.where(lane == NODES - 1, so_far, 0.0), 0)
        at += NODES
    tl.debug_barrier()
    return change


@triton.jit
def _hand_on(
    parents, depth, tries, chance, passed, weight, weight_out, settled, begin, size, layer,
    W: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
    """What the children of a layer of one tree are offered; returns how much changed."""
    change = begin.to(tl.float64) * 0.0
    at = 0
    while at < size:
        x = at + tl.arange(0, NODES)
        node = begin + x
        below = (x < size) & (tl.load(depth + node, mask=x < size, other=-1) == layer + 1)
        above = tl.load(parents + node, mask=below, other=0)
        missed = tl.load(passed + above - 1, mask=below & (above > begin), other=1.0)
        given = missed * 0.0
        for k in tl.static_range(W):
            fair = tl.load(chance + above * W + k, mask=below, other=0.0)
            given += tl.where(tl.load(tries + above * W + k, mask=below, other=-1) == node, fair * missed, 0.0)
            missed = missed * (1.0 - fair)
        old = tl.load(weight + node, mask=below, other=0.0)
        change = tl.maximum(change, tl.max(tl.where(below, tl.abs(given - old), 0.0), 0))
        tl.store(weight_out + node, given, mask=below)
        tl.store(settled + node, given, mask=below)
        at += NODES
    tl.debug_barrier()
    return change


@triton.jit(do_not_specialize=["nodes", "levels"])
def _start(
    extent, parents, depth, offsets, guesses, settled, scales, tokens, expected, met, nodes, levels,
    W: tl.constexpr, LANES: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
    """The first guesses of one tree: draws take all there is, and nothing comes down to anybody but the root."""
    wait_and_make_way()
    b = tl.program_id(0)
    begin = tl.load(offsets + b)
    size = (tl.load(offsets + b + 1) - begin).to(tl.int32)
    j = tl.arange(0, LANES)
    at = 0
    while at < size:
        x = at + tl.arange(0, NODES)
        node, inside = begin + x, x < size
        root = (tl.load(parents + node, mask=inside, other=0) < 0).to(tl.float64)
        tl.store(guesses + node, root, mask=inside)
        tl.store(guesses + nodes + node, root, mask=inside)
        tl.store(settled + node, root, mask=inside)
        place = node[:, None] * W + j[None, :]
        known = inside[:, None] & (j < W)[None, :]
        exists = tl.load(tokens + place, mask=known, other=-1) >= 0
        tl.store(scales + place, exists.to(tl.float64), mask=known)
        at += NODES
    layer = 0
    while layer < levels:
        count = 0
        at = 0
        while at < size:
            x = at + tl.arange(0, NODES)
            here = (x < size) & (tl.load(depth + begin + x, mask=x < size, other=-1) == layer)
            count += tl.sum((tl.load(extent + begin + x, mask=here, other=0) > 0).to(tl.int32), 0)
            at += NODES
        tl.store(expected + b * levels + layer, count)
        tl.store(met + b * levels + layer, 0)
        layer += 1


@triton.jit
def _solve_layer(
    sums, extent, tokens, wanted, said, weight, scales, chance, parents, depth, tries, passed, weight_out, settled,
    begin, size, layer, W: tl.constexpr, LANES: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
    change = _solve_scales(
        sums, extent, tokens, wanted, said, weight, scales, chance, depth, passed, begin, size, layer, W, LANES, NODES
    )
    return tl.maximum(
        change,
        _hand_on(parents, depth, tries, chance, passed, weight, weight_out, settled, begin, size, layer, W, NODES),
    )


@triton.jit(do_not_specialize=["turn", "first", "last", "nodes", "levels"])
def _improve(
    p, q, rows, tokens, extent, wanted, said, guesses, scales, chance, settled, parents, depth, tries, owner, offsets,
    partial, sums, passed, change, arrived, expected, met, turn, first, last, nodes, levels,
    W: tl.constexpr, LANES: tl.constexpr, NODES: tl.constexpr, SLICES: tl.constexpr, VOCABULARY: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """All layers from `first` to `last` once, a slice of a row a program; the last of a layer solves it."""
    wait_and_make_way()
    node, piece, slices = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    layer, draws = tl.load(depth + node), tl.load(extent + node)
    if (draws > 0) & (layer >= first) & (layer <= last):
        weight, weight_out = guesses + (turn % 2) * nodes, guesses + ((turn + 1) % 2) * nodes
        out = partial + (node * slices + piece) * ((1 + W) * W)
        _sum_slice(p, q, rows, tokens, weight, scales, node, draws, piece, out, W, LANES, VOCABULARY, SIZE)
        if last_to_arrive(arrived, node, slices):
            _add_slices(partial, sums, node, draws, slices, W, LANES, SLICES)
            b = tl.load(owner + node)
            begin = tl.load(offsets + b)
            size = (tl.load(offsets + b + 1) - begin).to(tl.int32)
            if last_to_arrive(met, b * levels + layer, tl.load(expected + b * levels + layer)):
                changed = _solve_layer(
                    sums, extent, tokens, wanted, said, weight, scales, chance, parents, depth, tries,
                    passed + layer * nodes, weight_out, settled, begin, size, layer, W, LANES, NODES,
                )  # fmt: skip
                tl.store(change + b * levels + layer, changed)


@triton.jit(do_not_specialize=["nodes", "levels", "slices"])
def _finish(
    p, q, rows, tokens, extent, wanted, said, settled, scales, chance, parents, depth, tries, offsets, partial, sums,
    passed, change, expected, nodes, levels, slices,
    W: tl.constexpr, LANES: tl.constexpr, NODES: tl.constexpr, SLICES: tl.constexpr, VOCABULARY: tl.constexpr,
    SIZE: tl.constexpr, TOLERANCE: tl.constexpr,
):  # fmt: skip
    """Layers of one tree that have not settled, one after the other. A draw is right once all before it are."""
    wait_and_make_way()
    b = tl.program_id(0)
    begin = tl.load(offsets + b)
    size = (tl.load(offsets + b + 1) - begin).to(tl.int32)
    restless = begin < 0
    layer = 0
    while layer < levels:
        inner = tl.load(expected + b * levels + layer)
        changed = tl.where(inner > 0, tl.load(change + b * levels + layer), 0.0)
        restless = restless | (changed > TOLERANCE)
        turns = tl.where(restless, inner * W + 1, 0)
        while turns > 0:
            at = begin
            while at < begin + size:
                draws = tl.load(extent + at)
                if (tl.load(depth + at) == layer) & (draws > 0):
                    piece = 0
                    while piece < slices:
                        out = partial + (at * slices + piece) * ((1 + W) * W)
                        _sum_slice(
                            p, q, rows, tokens, settled, scales, at, draws, piece, out, W, LANES, VOCABULARY, SIZE
                        )
                        piece += 1
                    tl.debug_barrier()
                    _add_slices(partial, sums, at, draws, slices, W, LANES, SLICES)
                at += 1
            tl.debug_barrier()
            changed = _solve_layer(
                sums, extent, tokens, wanted, said, settled, scales, chance, parents, depth, tries,
                passed, settled, settled, begin, size, layer, W, LANES, NODES,
            )  # fmt: skip
            turns = tl.where(changed > TOLERANCE, turns - 1, 0)
        layer += 1


def solve_layers(draw: Drawn, w: Weights, nodes_together: int) -> None:
    """The weights of all nodes and the scales of all draws."""
    tree, count, levels = draw.tree, draw.tree.num_nodes, len(draw.tree.levels)
    like, slices = {"dtype": torch.float64, "device": draw.p.device}, triton.cdiv(draw.vocabulary, POOL_SLICE)
    guesses, passed = torch.empty(2, count, **like), torch.empty(levels, count, **like)
    partial = torch.empty(count, slices, 1 + draw.width, draw.width, **like)
    sums, change = torch.empty(count, 1 + draw.width, draw.width, **like), torch.empty(tree.num_trees, levels, **like)
    expected, met = torch.empty(2, tree.num_trees, levels, dtype=torch.int32, device=draw.p.device)
    known = (w.rows, w.tokens, w.extent, w.wanted, w.said)
    links = (tree.parents, tree.depth, tree.tries)
    fixed = (draw.width, PADDED, nodes_together, padded(slices), draw.vocabulary, POOL_SLICE)
    _start[(tree.num_trees,)](
        w.extent, tree.parents, tree.depth, tree.offsets, guesses, w.weight, w.scales, w.tokens, expected, met, count,
        levels, *fixed[:3], num_warps=2, **OVERLAPPING,
    )  # fmt: skip
    for turn in range(levels + TIMES - 2 if levels > 1 else 0):
        _improve[(count, slices)](
            draw.p, draw.q, *known, guesses, w.scales, w.chance, w.weight, *links, tree.owner, tree.offsets, partial,
            sums, passed, change, w.arrived, expected, met, turn, turn - TIMES + 1, turn, count, levels, *fixed,
            num_warps=4, **OVERLAPPING,
        )  # fmt: skip
    _finish[(tree.num_trees,)](
        draw.p, draw.q, *known, w.weight, w.scales, w.chance, *links, tree.offsets, partial, sums, passed, change,
        expected, count, levels, slices, *fixed, SETTLED, num_warps=4, **OVERLAPPING,
    )  # fmt: skip


@triton.jit
def _layer_sums(depth, weight, mass, begin, size, layer, LANES: tl.constexpr):
    """What is left of a layer, the spare part of the target included."""
    left, everything = begin.to(tl.float64) * 0.0, begin.to(tl.float64) * 0.0
    at = 0
    while at < size:
        x = at + tl.arange(0, LANES)
        node = begin + x
        here = (x < size) & (tl.load(depth + node, mask=x < size, other=-1) == layer)
        left += tl.sum(tl.load(mass + node, mask=here, other=0.0), 0)
        everything += tl.sum(tl.load(weight + node, mask=here, other=0.0), 0)
        at += LANES
    return left + tl.maximum(1.0 - everything, 0.0)


@triton.jit(do_not_specialize=["steps"])
def end_of_pooled(
    parents, depth, offsets, weight, mass, seeds, lengths, stop, end, path, length, steps, LANES: tl.constexpr
):
    """Where one tree's path ends, from the deepest layer up."""
    wait_and_make_way()
    b = tl.program_id(0)
    begin = tl.load(offsets + b)
    size = (tl.load(offsets + b + 1) - begin).to(tl.int32)
    passed = begin.to(tl.float64) * 0.0 + 1.0
    layer = steps
    while layer >= 0:
        whole = _layer_sums(depth, weight, mass, begin, size, layer, LANES)
        everybody = passed * 0.0
        at = 0
        while at < size:
            x = at + tl.arange(0, LANES)
            node = begin + x
            here = (x < size) & (tl.load(depth + node, mask=x < size, other=-1) == layer)
            left = tl.load(mass + node, mask=here, other=0.0)
            ending = tl.where(here, tl.where(whole > 0, left / tl.where(whole > 0, whole, 1.0), 1.0), 0.0)
            tl.store(stop + node, ending * passed, mask=here)
            everybody += tl.sum(ending, 0)
            at += LANES
        passed = passed * tl.maximum(1.0 - everybody, 0.0)
        layer -= 1
    tl.debug_barrier()
    pick_end(parents, stop, begin, size, seeds, lengths, end, path, length, steps, b, LANES)
