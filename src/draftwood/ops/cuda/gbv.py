"""Greedy multi-path block verification on CUDA: see `verifiers/gbv.py`, which this follows.

Where the kept path stands at a node is a matter of single tokens, so all rows are read at once: first for the order of
their tokens, then for whether the greatest path is worth keeping, last for what is left of them.
"""
# pyright: reportMissingImports=false, reportIndexIssue=false, reportUnreachable=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwood.ops.cuda.gbv_order import RANKED, Order, order_of_slice
from draftwood.ops.cuda.last_block import last_to_arrive
from draftwood.ops.cuda.pdl import OVERLAPPING, wait_and_make_way
from draftwood.ops.cuda.random import block_beyond, first_beyond, uniform
from draftwood.ops.cuda.rejection import SLICE, Drawn, Weights, added_up, padded
from draftwood.ops.cuda.verdict import NODES, WARPS, Ends
from draftwood.ops.cuda.verify_stop import along_path, pick_end, round_key
from draftwood.rng import Purpose
from draftwood.tree import TokenTree, Verdict

RESIDUAL = tl.constexpr(int(Purpose.RESIDUAL))


@dataclass(frozen=True)
class _Standing:
    """Where the kept path stands at every node, seen from the node its part of the tree begins at."""

    below: Tensor  # [M] float64
    joint: Tensor  # [M] float64
    paths: Tensor  # [M] int32: K, 1 where the first path is kept
    weight: Tensor  # [M] float64, as in block verification
    kept: Tensor  # [M] the child on the kept path, -1 at a leaf
    taken: Tensor  # [M] float64
    hits: Tensor  # [M] float64: share of the residual above it that lies on a node off the kept path

    @classmethod
    def of(cls, tree: TokenTree) -> _Standing:
        """Room for it."""
        count, device = tree.num_nodes, tree.tokens.device
        below, joint, weight, taken, hits = torch.empty(5, count, dtype=torch.float64, device=device)
        paths = torch.empty(count, dtype=torch.int32, device=device)
        return cls(below, joint, paths, weight, torch.empty_like(tree.parents), taken, hits)


@triton.jit
def _power_sum(high, low, paths, W: tl.constexpr):
    """The sum over i < paths of high^i low^(paths-1-i): a^K - b^K over a - b, without nearly equal powers."""
    total, power = high * 0.0 + 1.0, high * 0.0 + 1.0
    for i in tl.static_range(1, W):
        power = tl.where(i < paths, power * high, power)
        total = tl.where(i < paths, total * low + power, total)
    return total


@triton.jit
def _law_of_greatest(law, lower, below, joint, paths, W: tl.constexpr):
    """The chance that the kept path goes on with tokens, from the draft's of them and below them; float32 as q is."""
    low = below + joint * lower
    high = low + joint * law.to(tl.float64)
    share = 1.0 / _power_sum(below + joint, below, paths, W)
    return (law.to(tl.float64) * _power_sum(high, low, paths, W) * share).to(tl.float32)


@triton.jit
def _compare(
    p, q, rows, tokens, extent, bar, first, before, rank, lower, partial, arrived, stands, under,
    loses,
    W: tl.constexpr, VOCABULARY: tl.constexpr, SIZE: tl.constexpr, SLICES: tl.constexpr, RANKED: tl.constexpr,
):  # fmt: skip
    """Whether the greatest of all paths behind a node is accepted less often than the first; and how draws stand."""
    wait_and_make_way()
    node, piece, slices = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    paths = tl.load(extent + node)
    if paths > 0:
        x, law, below, standing = order_of_slice(
            q, rows, bar, first, before, rank, lower, node, piece, slices, W, VOCABULARY, SIZE, RANKED
        )
        for j in tl.static_range(W):
            token = tl.load(tokens + node * W + j)
            if (token >= piece * SIZE) & (token < (piece + 1) * SIZE):
                tl.store(stands + node * W + j, tl.sum(tl.where(x == token, standing, 0), 0))
                tl.store(under + node * W + j, tl.sum(tl.where(x == token, below, 0.0), 0))
        target = tl.load(p + node * VOCABULARY + x, mask=x < VOCABULARY, other=0.0)
        nothing = paths.to(tl.float64) * 0.0
        best = _law_of_greatest(law, below, nothing, nothing + 1.0, paths, W)
        gain = tl.minimum(target, best).to(tl.float64) - tl.minimum(target, law).to(tl.float64)
        tl.store(partial + node * slices + piece, tl.sum(gain, 0))
        if last_to_arrive(arrived, node, slices):
            tl.store(loses + node, (added_up(partial + node * slices, slices, SLICES) < 0).to(tl.int32))


@triton.jit
def _keep_child(
    tries, extent, stands, under, wanted, said, loses, below, joint, paths, weight, kept, node, here, W: tl.constexpr
):
    """Choose the kept child of nodes, and say where it stands."""
    many, share = tl.load(paths + node, mask=here, other=1), tl.load(joint + node, mask=here, other=1.0)
    under_all = tl.load(below + node, mask=here, other=0.0)
    fallen = (share == 1.0) & (many > 1) & (tl.load(loses + node, mask=here, other=0) > 0)
    many = tl.where(fallen, 1, many)
    tl.store(paths + node, many, mask=here)
    best = many * 0
    highest = tl.load(stands + node * W, mask=here, other=0)
    for j in tl.static_range(1, W):
        exists = here & (tl.load(tries + node * W + j, mask=here, other=-1) >= 0)
        rank = tl.load(stands + node * W + j, mask=exists, other=0)
        better = exists & (many > 1) & (rank > highest)
        best, highest = tl.where(better, j, best), tl.where(better, rank, highest)
    at = node * W + best
    child = tl.load(tries + at, mask=here, other=0)
    law = tl.load(said + at * W + best, mask=here, other=1.0)
    lower = tl.load(under + at, mask=here, other=0.0)
    of = _law_of_greatest(law.to(tl.float32), lower, under_all, share, many, W).to(tl.float64)
    gain = tl.where(of > 0, tl.load(wanted + at, mask=here, other=1.0) / tl.where(of > 0, of, 1.0), 1.0)
    come = many * 0
    for j in tl.static_range(W):
        come += (here & (tl.load(tries + node * W + j, mask=here, other=-1) == child)).to(tl.int32)
    draws = tl.load(extent + child, mask=here, other=0)
    goes_on = draws == come  # otherwise new paths begin there
    tl.store(kept + node, child, mask=here)
    tl.store(weight + child, tl.minimum(tl.load(weight + node, mask=here, other=1.0) * gain, 1.0), mask=here)
    tl.store(paths + child, tl.where(goes_on, many, draws), mask=here)
    tl.store(below + child, tl.where(goes_on, under_all + share * lower, 0.0), mask=here)
    tl.store(joint + child, tl.where(goes_on, share * law, 1.0), mask=here)


@triton.jit(do_not_specialize=["steps"])
def _stand(
    tries, extent, depth, offsets, stands, under, wanted, said, loses, below, joint, paths, weight, kept, taken, hits,
    steps, W: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The kept paths of all parts of one tree: from every node the path that would be kept from there."""
    wait_and_make_way()
    b = tl.program_id(0)
    begin = tl.load(offsets + b)
    size = (tl.load(offsets + b + 1) - begin).to(tl.int32)
    at = 0
    while at < size:
        x = at + tl.arange(0, LANES)
        node, nothing = begin + x, tl.zeros((LANES,), tl.float64)
        tl.store(below + node, nothing, mask=x < size)
        tl.store(hits + node, nothing, mask=x < size)
        tl.store(joint + node, nothing + 1.0, mask=x < size)
        tl.store(weight + node, nothing + 1.0, mask=x < size)
        tl.store(paths + node, tl.load(extent + node, mask=x < size, other=0), mask=x < size)
        tl.store(kept + node, node * 0 - 1, mask=x < size)
        at += LANES
    tl.debug_barrier()
    layer = 0
    while layer < steps:
        at = 0
        while at < size:
            x = at + tl.arange(0, LANES)
            node = begin + x
            here = (x < size) & (tl.load(depth + node, mask=x < size, other=-1) == layer)
            here = here & (tl.load(extent + node, mask=here, other=0) > 0)
            _keep_child(
                tries, extent, stands, under, wanted, said, loses, below, joint, paths, weight, kept, node, here, W
            )
            at += LANES
        tl.debug_barrier()
        layer += 1
    at = 0
    while at < size:
        x = at + tl.arange(0, LANES)
        tl.store(taken + begin + x, tl.load(weight + begin + x, mask=x < size, other=0.0), mask=x < size)
        at += LANES


@triton.jit
def _leave(
    p, q, rows, tokens, extent, tries, bar, first, before, rank, lower, partial, arrived, under,
    wanted, said, below, joint, paths, weight, kept, taken, hits,
    W: tl.constexpr, VOCABULARY: tl.constexpr, SIZE: tl.constexpr, SLICES: tl.constexpr, RANKED: tl.constexpr,
):  # fmt: skip
    """What is left of p at a node once the law of the kept child was taken from it, and what of it other paths hold."""
    wait_and_make_way()
    node, piece, slices = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    if tl.load(extent + node) > 0:
        left, _, _ = left_of_greatest(
            p, q, rows, bar, first, before, rank, lower, below, joint, paths, weight, node, piece,
            slices, W, VOCABULARY, SIZE, RANKED,
        )  # fmt: skip
        tl.store(partial + node * slices + piece, tl.sum(left.to(tl.float64), 0))
        if last_to_arrive(arrived, node, slices):
            mass, whole = added_up(partial + node * slices, slices, SLICES), tl.load(weight + node)
            survives = mass + (1.0 - whole)
            tl.store(taken + node, tl.where(survives > 0, mass / tl.where(survives > 0, survives, 1.0), 1.0))
            for j in tl.static_range(W):
                child = tl.load(tries + node * W + j)
                if (child >= 0) & (child != tl.load(kept + node)):
                    law = tl.load(said + (node * W + j) * W + j).to(tl.float32)
                    of = _law_of_greatest(
                        law, tl.load(under + node * W + j), tl.load(below + node), tl.load(joint + node),
                        tl.load(paths + node), W,
                    )  # fmt: skip
                    there = tl.maximum(tl.load(wanted + node * W + j).to(tl.float32) * whole.to(tl.float32) - of, 0.0)
                    share = tl.where(mass > 0, there.to(tl.float64) / tl.where(mass > 0, mass, 1.0), 0.0)
                    tl.store(hits + child, share)


@triton.jit
def left_of_greatest(
    p, q, rows, bar, first, before, rank, lower, below, joint, paths, weight, node, piece, slices,
    W: tl.constexpr, VOCABULARY: tl.constexpr, SIZE: tl.constexpr, RANKED: tl.constexpr,
):  # fmt: skip
    """(weight p - law of the kept child)+ of a slice, p itself, and the tokens."""
    x, law, under, _ = order_of_slice(
        q, rows, bar, first, before, rank, lower, node, piece, slices, W, VOCABULARY, SIZE, RANKED
    )
    of = _law_of_greatest(law, under, tl.load(below + node), tl.load(joint + node), tl.load(paths + node), W)
    target = tl.load(p + node * VOCABULARY + x, mask=x < VOCABULARY, other=0.0)
    return tl.maximum(target * tl.load(weight + node).to(tl.float32) - of, 0.0), target, x


@triton.jit
def _deeper_missed(kept, taken, node, inside, steps):
    """The chance that nothing deeper on the kept path is taken."""
    product = tl.full(node.shape, 1.0, tl.float64)
    here = node
    step = 0
    while step < steps:
        down = tl.load(kept + here, mask=inside, other=-1)
        product = product * (1.0 - tl.load(taken + down, mask=inside & (down >= 0), other=0.0))
        here = tl.where(down >= 0, down, here)
        inside = inside & (down >= 0)
        step += 1
    return product


@triton.jit
def _ends_here(tries, kept, taken, hits, parents, node, inside, steps, W: tl.constexpr):
    """The chance that the path kept from here on ends at `node`, and what of that goes on on another path."""
    above = tl.load(parents + node, mask=inside, other=-1)
    head = tl.load(kept + above, mask=inside & (above >= 0), other=-1) != node
    own = tl.where(head, 1.0, tl.load(taken + node, mask=inside, other=0.0))
    ends = own * _deeper_missed(kept, taken, node, inside, steps)
    others = ends * 0.0
    on_path = tl.load(kept + node, mask=inside, other=-1)
    for j in tl.static_range(W):
        child = tl.load(tries + node * W + j, mask=inside, other=-1)
        first = (child >= 0) & (child != on_path)
        for i in tl.static_range(j):
            first = first & (tl.load(tries + node * W + i, mask=inside, other=-1) != child)
        others += tl.load(hits + child, mask=first, other=0.0)
    return ends, others, head


@triton.jit(do_not_specialize=["steps"])
def _end_of_greatest(
    parents, tries, offsets, kept, taken, hits, seeds, lengths, factors, stop, end, path, length, steps,
    W: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Block verification's chances along every kept path, handed on to the paths that begin where others end."""
    wait_and_make_way()
    b = tl.program_id(0)
    begin = tl.load(offsets + b)
    size = (tl.load(offsets + b + 1) - begin).to(tl.int32)
    at = 0
    while at < size:
        x = at + tl.arange(0, LANES)
        inside, node = x < size, begin + x
        above = tl.load(parents + node, mask=inside, other=-1)
        ends, _, _ = _ends_here(tries, kept, taken, hits, parents, above, inside & (above >= 0), steps, W)
        head = tl.load(kept + above, mask=inside & (above >= 0), other=-1) != node
        onward = tl.where(head, ends * tl.load(hits + node, mask=inside, other=0.0), 1.0)
        tl.store(factors + node, onward, mask=inside)
        at += LANES
    tl.debug_barrier()
    at = 0
    while at < size:
        x = at + tl.arange(0, LANES)
        inside, node = x < size, begin + x
        ends, others, _ = _ends_here(tries, kept, taken, hits, parents, node, inside, steps, W)
        enters = along_path(parents, factors, node, inside, steps)
        tl.store(stop + node, enters * tl.maximum(ends - ends * others, 0.0), mask=inside)
        at += LANES
    tl.debug_barrier()
    pick_end(parents, stop, begin, size, seeds, lengths, end, path, length, steps, b, LANES)


@triton.jit
def _left_after(
    p, q, rows, tokens, extent, bar, first, before, rank, lower, below, joint, paths, weight, node,
    piece, slices,
    W: tl.constexpr, VOCABULARY: tl.constexpr, SIZE: tl.constexpr, RANKED: tl.constexpr,
):  # fmt: skip
    """What is left of a slice for the token after a path that ends at `node`: no child's; at a leaf all of p."""
    if tl.load(extent + node) > 0:
        left, target, x = left_of_greatest(
            p, q, rows, bar, first, before, rank, lower, below, joint, paths, weight, node, piece,
            slices, W, VOCABULARY, SIZE, RANKED,
        )  # fmt: skip
        for j in tl.static_range(W):
            left = tl.where(x == tl.load(tokens + node * W + j), 0.0, left)
    else:
        x = piece * SIZE + tl.arange(0, SIZE)
        target = tl.load(p + node * VOCABULARY + x, mask=x < VOCABULARY, other=0.0)
        left = target
    return left.to(tl.float64), target.to(tl.float64)


@triton.jit
def _sum_after(
    p, q, rows, tokens, extent, bar, first, before, rank, lower, below, joint, paths, weight, end,
    sums,
    W: tl.constexpr, VOCABULARY: tl.constexpr, SIZE: tl.constexpr, RANKED: tl.constexpr,
):  # fmt: skip
    wait_and_make_way()
    b, piece, slices = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    left, target = _left_after(
        p, q, rows, tokens, extent, bar, first, before, rank, lower, below, joint, paths, weight,
        tl.load(end + b), piece, slices, W, VOCABULARY, SIZE, RANKED,
    )  # fmt: skip
    tl.store(sums + (b * slices + piece) * 2, tl.sum(left, 0))
    tl.store(sums + (b * slices + piece) * 2 + 1, tl.sum(target, 0))


@triton.jit
def _pick_after(
    p, q, rows, tokens, extent, bar, first, before, rank, lower, below, joint, paths, weight, end,
    sums, seeds, lengths, out, slices,
    W: tl.constexpr, VOCABULARY: tl.constexpr, SIZE: tl.constexpr, RANKED: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    wait_and_make_way()
    b = tl.program_id(0)
    index, inside = tl.arange(0, SLICES), tl.arange(0, SLICES) < slices
    of_left = tl.load(sums + (b * slices + index) * 2, mask=inside, other=0.0)
    of_p = tl.load(sums + (b * slices + index) * 2 + 1, mask=inside, other=0.0)
    some = tl.max(of_left, 0) > 0
    u = uniform(round_key(seeds, lengths, b, RESIDUAL))
    aim, piece, passed, _ = block_beyond(tl.where(some, of_left, of_p), index, u, SLICES)
    left, target = _left_after(
        p, q, rows, tokens, extent, bar, first, before, rank, lower, below, joint, paths, weight,
        tl.load(end + b), piece, slices, W, VOCABULARY, SIZE, RANKED,
    )  # fmt: skip
    w, x = tl.where(some, left, target), tl.arange(0, SIZE)
    tl.store(out + b, (piece * SIZE + first_beyond(passed + tl.cumsum(w, 0), w, x, aim, SIZE)).to(tl.int64))


def greatest_path(tree: TokenTree, p: Tensor, seeds: Tensor, lengths: Tensor) -> Verdict:
    """The greatest of several independent paths as a block."""
    draw, ends, at = Drawn.of(tree, p, seeds, lengths), Ends.of(tree), _Standing.of(tree)
    w = Weights.looked_up(draw)
    order = Order.of(draw, w)
    _settle(draw, w, order, at)
    factors, stop = torch.empty(2, tree.num_nodes, dtype=torch.float64, device=p.device)
    _end_of_greatest[(tree.num_trees,)](
        tree.parents, tree.tries, tree.offsets, at.kept, at.taken, at.hits, draw.seeds, draw.lengths, factors, stop,
        ends.node, ends.path, ends.length, tree.max_depth, draw.width, NODES, num_warps=WARPS, **OVERLAPPING,
    )  # fmt: skip
    return Verdict(ends.path, ends.length, _bonus_after(draw, w, order, at, ends.node))


def _settle(draw: Drawn, w: Weights, order: Order, at: _Standing) -> None:
    """Where the kept paths stand, and how likely each of their nodes is taken."""
    tree, nodes, slices = draw.tree, draw.tree.num_nodes, triton.cdiv(draw.vocabulary, SLICE)
    stands, loses = torch.empty_like(w.tokens, dtype=torch.int32), torch.empty_like(w.extent)
    under, partial = torch.empty_like(w.wanted), torch.empty(nodes, slices, dtype=torch.float64, device=draw.p.device)
    row = (draw.p, draw.q, w.rows, w.tokens, w.extent)
    fixed = (draw.width, draw.vocabulary, SLICE, padded(slices), RANKED)
    _compare[(nodes, slices)](
        *row, *order.parts, partial, w.arrived, stands, under, loses, *fixed, num_warps=4, **OVERLAPPING
    )
    standing = (at.below, at.joint, at.paths, at.weight, at.kept, at.taken, at.hits)
    _stand[(tree.num_trees,)](
        tree.tries, w.extent, tree.depth, tree.offsets, stands, under, w.wanted, w.said, loses, *standing,
        tree.max_depth, draw.width, NODES, num_warps=WARPS, **OVERLAPPING,
    )  # fmt: skip
    _leave[(nodes, slices)](
        *row, tree.tries, *order.parts, partial, w.arrived, under, w.wanted, w.said, *standing, *fixed,
        num_warps=4, **OVERLAPPING,
    )  # fmt: skip


def _bonus_after(draw: Drawn, w: Weights, order: Order, at: _Standing, end: Tensor) -> Tensor:
    """The token after each path."""
    slices = triton.cdiv(draw.vocabulary, SLICE)
    sums = torch.empty(len(end), slices, 2, dtype=torch.float64, device=end.device)
    bonus, standing = torch.empty_like(end), (at.below, at.joint, at.paths, at.weight)
    row = (draw.p, draw.q, w.rows, w.tokens, w.extent, *order.parts, *standing, end, sums)
    fixed = (draw.width, draw.vocabulary, SLICE, RANKED)
    _sum_after[(len(end), slices)](*row, *fixed, **OVERLAPPING)
    _pick_after[(len(end),)](
        *row, draw.seeds, draw.lengths, bonus, slices, *fixed, padded(slices), num_warps=8, **OVERLAPPING
    )
    return bonus
