"""What the guesses of `pooled.py` would leave, summed up on CUDA.

Of each node: the target and each law of its draws over the tokens that the first k of them leave something of.
"""
# pyright: reportMissingImports=false, reportIndexIssue=false, reportUnreachable=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from draftwood.ops.cuda.draws import PADDED, last_to_arrive
from draftwood.ops.cuda.overlap import wait_and_make_way

WIDE = tl.constexpr(4)  # times the tokens at a time where there is but one law to sum up
LANES = tl.constexpr(PADDED)
SUMS = tl.constexpr((1 + PADDED) * PADDED)  # of a node: of P, then of each Q, after each of its draws
FEW = tl.constexpr(4)  # draws


@triton.jit
def _draws_of(rows, scales, depth, node, turn, W: tl.constexpr):
    """The rows of a node's laws, and how much of each is taken; what is guessed first depends on no row."""
    row, scale = (), ()
    most = tl.where(tl.load(depth + node) > 0, 2.0, 1.0)  # below the root there is less of p to take from
    for i in tl.static_range(W):
        row += (tl.load(rows + node * W + i),)
        scale += (tl.where(turn > 0, tl.load(scales + node * W + i).to(tl.float32), most / (1 + i)),)
    return row, scale


@triton.jit
def _law(q, row, token, x, inside, VOCABULARY: tl.constexpr):
    """The law of one draw at tokens x; nothing where there is no draw."""
    law = tl.load(q + row * VOCABULARY + x, mask=inside & (row >= 0), other=0.0)
    return tl.where(row >= 0, law, (x == tl.load(token)).to(tl.float32))


@triton.jit
def _sum_slice(
    p, q, row, token, scale, whole, node, piece, slices, partial,
    PLACES: tl.constexpr, VOCABULARY: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """What of p and of the laws of the first draws lies where these leave something of a slice, after each draw."""
    x = piece * SIZE + tl.arange(0, SIZE)
    inside = x < VOCABULARY
    target = tl.load(p + node * VOCABULARY + x, mask=inside, other=0.0)
    left = whole * target
    laws = ()
    for k in tl.static_range(PLACES):
        laws += (_law(q, row[k], token + k, x, inside, VOCABULARY),)
    out = partial + node * SUMS * slices + piece
    for k in tl.static_range(PLACES):
        left -= scale[k] * laws[k]
        tl.store(out + k * slices, tl.sum(tl.where(left > 0, target, 0.0), 0).to(tl.float64))
        for i in tl.static_range(k + 1):
            at = out + ((1 + i) * LANES + k) * slices
            tl.store(at, tl.sum(tl.where(left > 0, laws[i], 0.0), 0).to(tl.float64))


@triton.jit
def _add_slices(partial, sums, node, pieces, slices, nodes, PLACES: tl.constexpr, SLICES: tl.constexpr):
    """The sums of one node's pieces, in order, all at once; not from a cache that others' answers pass by. There is
    room for `slices` of them.
    """
    each, i = tl.arange(0, LANES * (2 if PLACES == 1 else 8 if PLACES <= FEW else 16)), tl.arange(0, SLICES)
    law, k = each // LANES, each % LANES
    known = (law <= PLACES) & (k < PLACES) & (k >= law - 1)  # a draw takes nothing before its turn
    every = partial + (node * SUMS + each)[:, None] * slices + i[None, :]
    those = tl.load(every, mask=known[:, None] & (i < pieces)[None, :], other=0.0, cache_modifier=".cg")
    tl.store(sums + each * nodes + node, tl.sum(those, 1), mask=known)


@triton.jit
def _sum_node(
    p, q, row, token, scale, whole, node, draws, piece, slices, partial,
    W: tl.constexpr, VOCABULARY: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """One slice of a node, with no more work than its own draws need."""
    if draws == 1:
        _sum_slice(p, q, row, token, scale, whole, node, piece, slices, partial, 1, VOCABULARY, WIDE * SIZE)
    elif draws <= FEW:
        _sum_slice(p, q, row, token, scale, whole, node, piece, slices, partial, min(FEW, W), VOCABULARY, SIZE)
    elif W > FEW:
        _sum_slice(p, q, row, token, scale, whole, node, piece, slices, partial, W, VOCABULARY, SIZE)


@triton.jit
def _add_node(
    partial, sums, weight, summed, node, draws, pieces, slices, nodes, W: tl.constexpr, SLICES: tl.constexpr
):  # fmt: skip
    """All slices of a node, and the weight they were summed up with."""
    tl.store(summed + node, tl.load(weight + node))
    if draws == 1:
        _add_slices(partial, sums, node, pieces, slices, nodes, 1, SLICES)
    elif draws <= FEW:
        _add_slices(partial, sums, node, pieces, slices, nodes, min(FEW, W), SLICES)
    elif W > FEW:
        _add_slices(partial, sums, node, pieces, slices, nodes, W, SLICES)


@triton.jit
def _look_behind(extent, tries, behind, node, W: tl.constexpr):
    """The most draws behind a child of a node."""
    k = tl.arange(0, LANES)
    child = tl.load(tries + node * W + k, mask=k < W, other=-1)
    tl.store(behind + node, tl.max(tl.load(extent + child, mask=child >= 0, other=0), 0))


@triton.jit(do_not_specialize=["turn", "nodes"])
def sum_all(
    p, q, rows, tokens, extent, behind, tries, weight, summed, scales, depth, owner, partial, sums, arrived, change,
    restless, turn, nodes,
    W: tl.constexpr, SLICES: tl.constexpr, VOCABULARY: tl.constexpr, SIZE: tl.constexpr, TOLERANCE: tl.constexpr,
):  # fmt: skip
    """The sums of all nodes of trees that have not settled: first slices of all nodes, then second ones, and so on."""
    wait_and_make_way()
    slices: tl.constexpr = (VOCABULARY + SIZE - 1) // SIZE
    task = tl.program_id(0)
    if task == 0:
        tl.store(restless + turn, 0)
    if turn > 0:  # noqa: SIM102 (before that, nobody has counted)
        if tl.load(restless + turn - 1) == 0:
            return
    while task < nodes * slices:
        node, piece = (task % nodes).to(tl.int64), task // nodes
        draws, whole = tl.load(extent + node), tl.load(weight + node).to(tl.float32)
        row, scale = _draws_of(rows, scales, depth, node, turn, W)
        if (turn == 0) & (piece == 0):
            _look_behind(extent, tries, behind, node, W)
        pieces = tl.where(draws == 1, (slices + WIDE - 1) // WIDE, slices)
        wanted = (turn == 0) | (tl.load(change + tl.load(owner + node)) > TOLERANCE)
        if (draws > 0) & (piece < pieces) & wanted:
            _sum_node(
                p, q, row, tokens + node * W, scale, whole, node, draws, piece, slices, partial, W, VOCABULARY, SIZE
            )
            if last_to_arrive(arrived, node, pieces):
                _add_node(partial, sums, weight, summed, node, draws, pieces, slices, nodes, W, SLICES)
        task += tl.num_programs(0)


@triton.jit
def sum_alone(
    p, q, rows, tokens, extent, weight, summed, scales, depth, partial, sums, begin, size, slices, nodes,
    W: tl.constexpr, SLICES: tl.constexpr, VOCABULARY: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """All sums of one tree by one program."""
    node = begin
    while node < begin + size:
        draws, whole = tl.load(extent + node), tl.load(weight + node).to(tl.float32)
        row, scale = _draws_of(rows, scales, depth, node, 1, W)
        if draws > 0:
            piece = 0
            while piece < slices:
                _sum_slice(
                    p, q, row, tokens + node * W, scale, whole, node, piece, slices, partial, W, VOCABULARY, SIZE
                )
                piece += 1
            tl.debug_barrier()
            tl.store(summed + node, tl.load(weight + node))
            _add_slices(partial, sums, node, slices, slices, nodes, W, SLICES)
        node += 1
    tl.debug_barrier()
