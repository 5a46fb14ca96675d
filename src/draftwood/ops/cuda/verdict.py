"""Verdicts on CUDA, in Triton: which launches a law takes, and the token after the accepted path.

Rows are read a slice a program (`rejection.py`), where a path ends is found by one program a tree (`verify_stop.py`).
Everything a tree's shape decides is a number of launches here, nothing waits for the host once that shape is known,
and no sum depends on how many trees there are or how large the others in the batch are.
"""
# pyright: reportMissingImports=false, reportIndexIssue=false, reportUnreachable=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwood.ops.cuda.distinct import distinct
from draftwood.ops.cuda.kseq import left_of_bar, narrow_bars, settle_bars
from draftwood.ops.cuda.pdl import OVERLAPPING, wait_and_make_way
from draftwood.ops.cuda.pooled import end_of_pooled
from draftwood.ops.cuda.random import block_beyond, first_beyond, uniform
from draftwood.ops.cuda.rejection import (
    SLICE,
    Drawn,
    Weights,
    left_of_draws,
    padded,
    reject_all,
    take_draws,
)
from draftwood.ops.cuda.verify_stop import (
    end_of_layers,
    end_of_search,
    end_of_walk,
    follow_choices,
    hand_down,
    round_key,
)
from draftwood.rng import Purpose
from draftwood.tree import TokenTree, Verdict

RESIDUAL = tl.constexpr(int(Purpose.RESIDUAL))
NODES = 128  # of a tree looked at together: the root and 64 guesses, once
WARPS = 4  # of the program that does


def follow(tree: TokenTree, choices: Tensor) -> Verdict:
    """Down every tree along `choices` [M], the token chosen after each node."""
    path = torch.empty(tree.num_trees, tree.max_depth + 1, dtype=torch.int64, device=choices.device)
    ends = torch.empty(2, tree.num_trees, dtype=torch.int64, device=choices.device)
    width = tree.tries.shape[1]
    if tree.num_trees:
        follow_choices[(tree.num_trees,)](
            tree.tokens.contiguous(), tree.tries.contiguous(), tree.offsets.contiguous(), choices.contiguous(),
            path, ends[0], ends[1], tree.max_depth, width, max(2, triton.next_power_of_2(width)), num_warps=1,
            **OVERLAPPING,
        )  # fmt: skip
    return Verdict(path, ends[0], ends[1])


@triton.jit
def _chain_weights(p, q, tokens, parents, q_row, offsets, weight, VOCABULARY: tl.constexpr, LANES: tl.constexpr):
    """What the target affords each node of one path: w_i = min(1, w_(i-1) p(x_i) / q(x_i))."""
    wait_and_make_way()
    b = tl.program_id(0)
    begin = tl.load(offsets + b)
    size = (tl.load(offsets + b + 1) - begin).to(tl.int32)
    at = 0
    while at < size:
        x = at + tl.arange(0, LANES)
        inside, node = x < size, begin + x
        above = tl.load(parents + node, mask=inside, other=-1)
        token, row = tl.load(tokens + node, mask=inside, other=-1), tl.load(q_row + node, mask=inside, other=-1)
        drafted = (above >= 0) & (token >= 0)
        wanted = tl.load(p + above * VOCABULARY + token, mask=drafted, other=1.0).to(tl.float64)
        offered = tl.load(q + row * VOCABULARY + token, mask=drafted & (row >= 0), other=1.0).to(tl.float64)
        gain = tl.where(offered > 0, wanted / tl.where(offered > 0, offered, 1.0), 1.0)
        tl.store(weight + node, tl.where(token >= 0, gain, 0.0), mask=inside)  # absent nodes are at the end
        at += LANES
    tl.debug_barrier()
    affords = tl.load(weight + begin) * 0.0 + 1.0
    at = 0
    while at < size:
        affords = tl.minimum(affords * tl.load(weight + begin + at), 1.0)
        tl.store(weight + begin + at, affords)
        at += 1


@triton.jit
def _left_at(
    p, q, rows, tokens, weight, scales, bars, scale, node, x,
    KSEQ: tl.constexpr, CHILDREN: tl.constexpr, W: tl.constexpr, VOCABULARY: tl.constexpr,
):  # fmt: skip
    """What is left at `node` for tokens x, and p itself; CHILDREN: whether children's tokens may follow."""
    if KSEQ:
        left, target = left_of_bar(p, q, rows, weight, bars, scale, node, x, W, VOCABULARY)
    else:
        left, target = left_of_draws(p, q, rows, tokens, weight, scales, node, x, node * 0 + W, W, VOCABULARY)
    if not CHILDREN:
        for j in tl.static_range(W):
            left = tl.where(x == tl.load(tokens + node * W + j), 0.0, left)
    return left.to(tl.float64), target.to(tl.float64)


@triton.jit
def _bonus_sums(
    p, q, rows, tokens, weight, scales, bars, scale, end, sums,
    KSEQ: tl.constexpr, CHILDREN: tl.constexpr, W: tl.constexpr, VOCABULARY: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The mass of what is left at the node each tree's path ends at, and of p there, slice by slice."""
    wait_and_make_way()
    b, block = tl.program_id(0), tl.program_id(1)
    x = block * SIZE + tl.arange(0, SIZE)
    left, target = _left_at(
        p, q, rows, tokens, weight, scales, bars, scale, tl.load(end + b), x, KSEQ, CHILDREN, W, VOCABULARY
    )
    at = sums + (b * tl.num_programs(1) + block) * 2
    tl.store(at, tl.sum(left, 0))
    tl.store(at + 1, tl.sum(target, 0))


@triton.jit
def _bonus(
    p, q, rows, tokens, weight, scales, bars, scale, end, sums, seeds, lengths, out, blocks,
    KSEQ: tl.constexpr, CHILDREN: tl.constexpr, W: tl.constexpr, VOCABULARY: tl.constexpr, SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """The token after each path, drawn from what is left; from p where that is nothing: no mass is invented."""
    wait_and_make_way()
    b = tl.program_id(0)
    index, inside = tl.arange(0, BLOCKS), tl.arange(0, BLOCKS) < blocks
    of_left = tl.load(sums + (b * blocks + index) * 2, mask=inside, other=0.0)
    of_p = tl.load(sums + (b * blocks + index) * 2 + 1, mask=inside, other=0.0)
    some = tl.max(of_left, 0) > 0
    u = uniform(round_key(seeds, lengths, b, RESIDUAL))
    aim, block, before, _ = block_beyond(tl.where(some, of_left, of_p), index, u, BLOCKS)
    x = tl.arange(0, SIZE)
    left, target = _left_at(
        p, q, rows, tokens, weight, scales, bars, scale, tl.load(end + b), block * SIZE + x,
        KSEQ, CHILDREN, W, VOCABULARY,
    )  # fmt: skip
    w = tl.where(some, left, target)
    tl.store(out + b, (block * SIZE + first_beyond(before + tl.cumsum(w, 0), w, x, aim, SIZE)).to(tl.int64))


@dataclass(frozen=True)
class Ends:
    """Where the paths end."""

    node: Tensor  # [B]
    length: Tensor  # [B]
    path: Tensor  # [B, D + 1]

    @classmethod
    def of(cls, tree: TokenTree) -> Ends:
        """Room for them."""
        node, length = torch.empty(2, tree.num_trees, dtype=torch.int64, device=tree.tokens.device)
        return cls(node, length, torch.empty(tree.num_trees, tree.max_depth + 1, dtype=torch.int64, device=node.device))


def bonus_after(draw: Drawn, w: Weights, ends: Ends, *, children: bool, kseq: bool = False) -> Verdict:
    """The verdict, with the token after each path."""
    count, vocabulary = draw.tree.num_trees, draw.vocabulary
    blocks = triton.cdiv(vocabulary, SLICE)
    sums = torch.empty(count, blocks, 2, dtype=torch.float64, device=draw.p.device)
    bonus = torch.empty(count, dtype=torch.int64, device=draw.p.device)
    row = (draw.p, draw.q, w.rows, w.tokens, w.weight, w.scales, w.bars, w.scale, ends.node, sums)
    fixed = (kseq, children, draw.width, vocabulary, SLICE)
    _bonus_sums[(count, blocks)](*row, *fixed, **OVERLAPPING)
    _bonus[(count,)](
        *row, draw.seeds, draw.lengths, bonus, blocks, *fixed, padded(blocks), num_warps=8, **OVERLAPPING
    )  # fmt: skip
    return Verdict(ends.path, ends.length, bonus)


def walk(
    tree: TokenTree, p: Tensor, seeds: Tensor, lengths: Tensor, tried: int, lenience: float | None = None
) -> Verdict:
    """Recursive rejection: down while one of the first `tried` draws, or what is left after them, is a child.

    `lenience`: what chances are divided by, where the law is not lossless.
    """
    draw = Drawn.of(tree, p, seeds, lengths)
    w = Weights.looked_up(draw)
    reject_all(draw, w, tried)
    if lenience is not None:
        w.chance.div_(lenience).clamp_(max=1)
    return bonus_after(draw, w, walked(draw, w), children=False)


def kseq_walk(tree: TokenTree, p: Tensor, seeds: Tensor, lengths: Tensor) -> Verdict:
    """Down while one of the draws at their lowered bar, or what is left of the target, is a child."""
    draw = Drawn.of(tree, p, seeds, lengths)
    w = Weights.looked_up(draw)
    narrow_bars(draw, w, None)
    settle_bars(draw, w)
    return bonus_after(draw, w, walked(draw, w), children=False, kseq=True)


def walked(draw: Drawn, w: Weights) -> Ends:
    """Where walks down end once all draws were weighed."""
    tree, ends = draw.tree, Ends.of(draw.tree)
    passes, stop = torch.empty(2, tree.num_nodes, dtype=torch.float64, device=draw.p.device)
    end_of_walk[(tree.num_trees,)](
        tree.tokens, tree.parents, tree.tries, tree.offsets, w.chance, w.values, w.mass, draw.seeds, draw.lengths,
        passes, stop, ends.node, ends.path, ends.length, tree.max_depth, draw.width, NODES, num_warps=WARPS,
        **OVERLAPPING,
    )  # fmt: skip
    return ends


def search(tree: TokenTree, p: Tensor, seeds: Tensor, lengths: Tensor) -> Verdict:
    """Traversal verification; of chains it is block verification."""
    if tree.shape.repeats and tree.q is not None:
        tree = distinct(tree, tree.q)
    draw, ends = Drawn.of(tree, p, seeds, lengths), Ends.of(tree)
    w = Weights.looked_up(draw)
    if draw.width == 1:
        _chain_weights[(tree.num_trees,)](
            draw.p, draw.q, tree.tokens, tree.parents, tree.q_row, tree.offsets, w.weight, p.shape[1], NODES,
            num_warps=WARPS, **OVERLAPPING,
        )  # fmt: skip
    else:
        _go_down(draw, w, w.weight, shared=False, kseq=False)
    take_draws(draw, w, None, draw.width, draw.width)
    fails, before, stop = torch.empty(3, tree.num_nodes, dtype=torch.float64, device=p.device)
    end_of_search[(tree.num_trees,)](
        tree.parents, tree.tries, tree.offsets, w.weight, w.mass, draw.seeds, draw.lengths, fails, before, stop,
        ends.node, ends.path, ends.length, tree.max_depth, draw.width, NODES, num_warps=WARPS, **OVERLAPPING,
    )  # fmt: skip
    return bonus_after(draw, w, ends, children=True)


def _go_down(draw: Drawn, w: Weights, score: Tensor, *, shared: bool, kseq: bool) -> None:
    """What nodes are offered, level by level. Only where several draws follow a node are rows needed on the way."""
    tree, widths = draw.tree, draw.tree.shape.widths
    starts = [level for level in range(tree.max_depth) if level == 0 or widths[level] > 1]
    for first, after in pairwise([*starts, tree.max_depth]):
        nodes, width = tree.levels[first], widths[first]
        if kseq and width > 1:
            narrow_bars(draw, w, nodes)
        for place in range(1, 1 if kseq else width):
            take_draws(draw, w, nodes, place, draw.width)
        hand_down[(tree.num_trees,)](
            tree.parents, tree.depth, tree.tries, tree.offsets, w.tokens, w.wanted, w.said, w.weight, w.scales, w.bars,
            score, first, after - 1, width, shared, kseq, draw.width, NODES, num_warps=WARPS, **OVERLAPPING,
        )  # fmt: skip


def layers(tree: TokenTree, p: Tensor, seeds: Tensor, lengths: Tensor, *, kseq: bool) -> Verdict:
    """A layer at a time, every node with its share of the layer's mass; `kseq`: all draws at one lowered bar."""
    draw, ends = Drawn.of(tree, p, seeds, lengths), Ends.of(tree)
    w = Weights.looked_up(draw)
    _go_down(draw, w, w.score, shared=True, kseq=kseq)
    if kseq:
        settle_bars(draw, w)
    else:
        take_draws(draw, w, None, draw.width, draw.width)
    stop = torch.empty_like(w.score)
    end_of_layers[(tree.num_trees,)](
        tree.parents, tree.depth, tree.offsets, w.chance, w.mass, w.weight, w.score, draw.seeds, draw.lengths, stop,
        ends.node, ends.path, ends.length, tree.max_depth, draw.width, NODES, num_warps=WARPS, **OVERLAPPING,
    )  # fmt: skip
    return bonus_after(draw, w, ends, children=True, kseq=kseq)


def pooled_layers(tree: TokenTree, p: Tensor, seeds: Tensor, lengths: Tensor) -> Verdict:
    """A layer at a time, all its draws against one common target."""
    draw, ends = Drawn.of(tree, p, seeds, lengths), Ends.of(tree)
    w = Weights.looked_up(draw)
    end_of_pooled(draw, w, ends.node, ends.path, ends.length)
    return bonus_after(draw, w, ends, children=True)
