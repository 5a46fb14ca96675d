"""What the guesses of `pooled.py` would leave, summed up on CUDA.

Of each node: the target and each law of its draws over the tokens that the first k of them leave something of.
"""
# pyright: reportMissingImports=false, reportIndexIssue=false, reportUnreachable=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl

from draftwood.ops.cuda.last_block import last_to_arrive
from draftwood.ops.cuda.pdl import wait_and_make_way
from draftwood.ops.cuda.rejection import PADDED

WIDE = tl.constexpr(4)  # times the tokens at a time where there is but one law to sum up
LANES = tl.constexpr(PADDED)
SUMS = tl.constexpr((1 + PADDED) * PADDED)  # of a node: of P, then of each Q, after each of its draws
FEW = tl.constexpr(4)  # draws
TOGETHER = tl.constexpr(8)  # slices added up side by side


@triton.constexpr_function
def _places(width):
    """Of a tile that holds so many draws."""
    return next(size for size in (1, 2, 4, 8) if size >= width)


@triton.jit
def _scales_of(scales, depth, node, k, drawn, turn, W: tl.constexpr):
    """How much of each law is taken; what is guessed first depends on no row."""
    most = tl.where(tl.load(depth + node) > 0, 2.0, 1.0)  # below the root there is less of p to take from
    known = tl.load(scales + node * W + k, mask=drawn & (turn > 0), other=0.0).to(tl.float32)
    return tl.where(turn > 0, known, most / (1 + k))


@triton.jit
def _laws(q, rows, tokens, at, drawn, x, VOCABULARY: tl.constexpr):
    """The laws of draws `at` for tokens x; nothing where there is no draw."""
    row, token = tl.load(rows + at, mask=drawn, other=-1), tl.load(tokens + at, mask=drawn, other=-1)
    law = tl.load(q + row * VOCABULARY + x, mask=(x < VOCABULARY) & (row >= 0), other=0.0)
    return tl.where(row >= 0, law, (x == token).to(tl.float32))


@triton.jit
def _sum_slice(
    given, node, draws, piece, slices, partial, turn,
    PLACES: tl.constexpr, ONE: tl.constexpr, W: tl.constexpr, VOCABULARY: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """What of p and of the laws of the first draws lies where these leave something of a slice, after each draw. All
    draws meet once for a law, in a loop, which keeps the program short; once in all where ONE law is that of all draws.
    """
    p, q, rows, tokens, scales, weight, depth = given
    k, x = tl.arange(0, PLACES), piece * SIZE + tl.arange(0, SIZE)
    target = tl.load(p + node * VOCABULARY + x, mask=x < VOCABULARY, other=0.0)
    if ONE:
        each = _laws(q, rows, tokens, node * W, True, x, VOCABULARY)[None, :]
    else:
        each = _laws(q, rows, tokens, (node * W + k)[:, None], (k < W)[:, None], x[None, :], VOCABULARY)
    taken = tl.cumsum(each * _scales_of(scales, depth, node, k, k < W, turn, W)[:, None], 0)
    stays = tl.load(weight + node).to(tl.float32) * target[None, :] > taken
    out = partial + (node * SUMS + k) * slices + piece
    tl.store(out, tl.sum(tl.where(stays, target[None, :], 0.0), 1).to(tl.float64))
    if ONE:
        tl.store(out + LANES * slices, tl.sum(tl.where(stays, each, 0.0), 1).to(tl.float64))
    else:
        i = 0
        while i < draws:
            law = _laws(q, rows, tokens, node * W + i, True, x, VOCABULARY)
            i += 1
            tl.store(out + i * LANES * slices, tl.sum(tl.where(stays, law[None, :], 0.0), 1).to(tl.float64))


@triton.jit
def _add_slices(
    partial, sums, weight, scales, node, draws, pieces, slices, nodes,
    W: tl.constexpr, PLACES: tl.constexpr, ONE: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """The sums of one node's pieces, in order, all at once; not from a cache that others' answers pass by. There is
    room for `slices` of them. Returns by how much, at most, the sums so far were wrong about what the draws leave.
    """
    ROWS: tl.constexpr = 2 if PLACES == 1 else 8 if PLACES <= FEW else 16
    each, i = tl.arange(0, LANES * ROWS), tl.arange(0, TOGETHER)
    law, k = each // LANES, each % LANES
    known = (k < draws) & (k >= law - 1)  # a draw takes nothing before its turn
    given = tl.minimum(each, LANES + k) if ONE else each  # one law's are those of all
    every = partial + (node * SUMS + given)[:, None] * slices + i[None, :]
    total = tl.zeros((LANES * ROWS, TOGETHER), tl.float64)
    for first in tl.static_range(0, SLICES, TOGETHER):
        there = known[:, None] & (first + i < pieces)[None, :]
        total += tl.load(every + first, mask=there, other=0.0, cache_modifier=".cg")
    before, now = tl.load(sums + each * nodes + node, mask=known, other=0.0), tl.sum(total, 1)
    tl.store(sums + each * nodes + node, now, mask=known)
    taken = tl.load(scales + node * W + law - 1, mask=known & (law > 0), other=0.0)
    wrong = (now - before) * tl.where(law > 0, -taken, tl.load(weight + node))
    return tl.max(tl.abs(tl.sum(tl.where(known, wrong, 0.0).reshape(ROWS, LANES), 0)), 0)


@triton.jit
def _sum_piece(
    given, found, node, draws, piece, pieces, slices, nodes, turn,
    PLACES: tl.constexpr, ONE: tl.constexpr, W: tl.constexpr, SLICES: tl.constexpr, VOCABULARY: tl.constexpr,
    SIZE: tl.constexpr, TOLERANCE: tl.constexpr,
):  # fmt: skip
    """One piece of a node; the program that is last adds all up, and says so if the sums so far were wrong."""
    partial, sums, arrived, moved, restless = found
    _, _, _, _, scales, weight, _ = given
    _sum_slice(given, node, draws, piece, slices, partial, turn, PLACES, ONE, W, VOCABULARY, SIZE)
    if last_to_arrive(arrived, node, pieces):
        wrong = _add_slices(partial, sums, weight, scales, node, draws, pieces, slices, nodes, W, PLACES, ONE, SLICES)
        if (turn > 0) & (wrong > TOLERANCE):
            tl.atomic_add(moved, 1)
            tl.atomic_add(restless, 1)


@triton.jit
def _one_law(given, node, draws, W: tl.constexpr):
    """Whether all draws behind a node are from the same law, as independent ones are."""
    _, _, rows, _, _, _, _ = given
    k = tl.arange(0, LANES)
    row, first = tl.load(rows + node * W + k, mask=k < draws, other=-1), tl.load(rows + node * W)
    return (first >= 0) & (tl.sum(((k < draws) & (row != first)).to(tl.int32), 0) == 0)


@triton.jit
def _sum_node(
    given, found, node, draws, piece, pieces, slices, nodes, turn,
    W: tl.constexpr, MOST: tl.constexpr, SLICES: tl.constexpr, VOCABULARY: tl.constexpr, SIZE: tl.constexpr,
    TOLERANCE: tl.constexpr,
):  # fmt: skip
    """The same, with no more work than the node's own draws need."""
    if draws == 1:
        _sum_piece(
            given, found, node, draws, piece, pieces, slices, nodes, turn,
            1, True, W, SLICES, VOCABULARY, WIDE * SIZE, TOLERANCE,
        )  # fmt: skip
    elif _one_law(given, node, draws, W):
        _sum_piece(
            given, found, node, draws, piece, pieces, slices, nodes, turn,
            MOST, True, W, SLICES, VOCABULARY, SIZE, TOLERANCE,
        )  # fmt: skip
    elif draws <= FEW:
        _sum_piece(
            given, found, node, draws, piece, pieces, slices, nodes, turn,
            min(FEW, MOST), False, W, SLICES, VOCABULARY, SIZE, TOLERANCE,
        )  # fmt: skip
    elif W > FEW:
        _sum_piece(
            given, found, node, draws, piece, pieces, slices, nodes, turn,
            MOST, False, W, SLICES, VOCABULARY, SIZE, TOLERANCE,
        )  # fmt: skip


@triton.jit
def _look_behind(extent, tries, behind, node, W: tl.constexpr):
    """The most draws behind a child of a node."""
    k = tl.arange(0, LANES)
    child = tl.load(tries + node * W + k, mask=k < W, other=-1)
    tl.store(behind + node, tl.max(tl.load(extent + child, mask=child >= 0, other=0), 0))


@triton.jit(do_not_specialize=["turn", "nodes", "trees"])
def sum_all(
    p, q, rows, tokens, extent, behind, tries, weight, scales, depth, owner, partial, sums, arrived, moved, restless,
    turn, nodes, trees,
    W: tl.constexpr, SLICES: tl.constexpr, VOCABULARY: tl.constexpr, SIZE: tl.constexpr, TOLERANCE: tl.constexpr,
):  # fmt: skip
    """The sums of all nodes of trees that have not settled: first slices of all nodes, then second ones, and so on.
    Counts, by turn, the nodes whose sums were wrong: `moved` for each tree, `restless` for all.
    """
    wait_and_make_way()
    slices: tl.constexpr = (VOCABULARY + SIZE - 1) // SIZE
    MOST: tl.constexpr = _places(W)
    given = (p, q, rows, tokens, scales, weight, depth)
    task = tl.program_id(0)
    if task == 0:
        tl.store(restless + turn + 1, 0)
    if turn > 1:  # noqa: SIM102 (before that, nothing was counted)
        if tl.load(restless + turn - 1) == 0:
            return
    while task < nodes * slices:  # most of them need not be done, and to see that must not take long
        node, piece = (task % nodes).to(tl.int64), task // nodes
        draws = tl.load(extent + node)
        if (turn == 0) & (piece == 0):
            _look_behind(extent, tries, behind, node, W)
        pieces = tl.where(draws == 1, (slices + WIDE - 1) // WIDE, tl.where(draws > 0, slices, 0))
        if piece < pieces:
            tree, wanted = tl.load(owner + node), turn <= 1
            if turn > 1:
                wanted = tl.load(moved + (turn - 1) * trees + tree) > 0
            if wanted:
                found = (partial, sums, arrived, moved + turn * trees + tree, restless + turn)
                _sum_node(
                    given, found, node, draws, piece, pieces, slices, nodes, turn,
                    W, MOST, SLICES, VOCABULARY, SIZE, TOLERANCE,
                )  # fmt: skip
        task += tl.num_programs(0)


@triton.jit
def sum_alone(
    p, q, rows, tokens, extent, weight, scales, depth, partial, sums, begin, size, slices, nodes,
    W: tl.constexpr, SLICES: tl.constexpr, VOCABULARY: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """All sums of one tree by one program. Returns by how much those so far were wrong about what draws leave."""
    MOST: tl.constexpr = _places(W)
    given = (p, q, rows, tokens, scales, weight, depth)
    node, wrong = begin, begin.to(tl.float64) * 0.0
    while node < begin + size:
        draws = tl.load(extent + node)
        if draws > 0:
            piece = 0
            while piece < slices:
                _sum_slice(given, node, draws, piece, slices, partial, 1, MOST, False, W, VOCABULARY, SIZE)
                piece += 1
            tl.debug_barrier()
            more = _add_slices(
                partial, sums, weight, scales, node, draws, slices, slices, nodes, W, MOST, False, SLICES
            )
            wrong = tl.maximum(wrong, more)
        node += 1
    tl.debug_barrier()
    return wrong
