"""Verdicts on CUDA, in Triton: what is left to do once the target's rows were looked at, one program a tree.

Everything a tree's shape decides is a number of steps here, nothing waits for the host, and no sum depends on how many
trees there are or how large the others in the batch are.
"""
# pyright: reportMissingImports=false, reportIndexIssue=false, reportUnreachable=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwood.ops.cuda.distinct import distinct
from draftwood.ops.cuda.ends import end_of_layers, end_of_search, end_of_walk, follow_choices, next_layer, round_key
from draftwood.ops.cuda.kseq import KSEQ_BLOCK, weigh_kseq
from draftwood.ops.cuda.pooled import end_of_pooled, start_layer, try_draw
from draftwood.ops.cuda.random import block_beyond, first_beyond, uniform
from draftwood.ops.cuda.residual import BLOCK, PADDED, ROW_BLOCK, reject_draws
from draftwood.rng import Purpose
from draftwood.tree import TokenTree, Verdict

RESIDUAL = tl.constexpr(int(Purpose.RESIDUAL))
NODES = 64  # of a tree looked at together


def follow(tree: TokenTree, choices: Tensor) -> Verdict:
    """Down every tree along `choices` [M], the token chosen after each node."""
    path = torch.empty(tree.num_trees, tree.max_depth + 1, dtype=torch.int64, device=choices.device)
    ends = torch.empty(2, tree.num_trees, dtype=torch.int64, device=choices.device)
    width = tree.tries.shape[1]
    if tree.num_trees:
        follow_choices[(tree.num_trees,)](
            tree.tokens.contiguous(), tree.tries.contiguous(), tree.offsets.contiguous(), choices.contiguous(),
            path, ends[0], ends[1], tree.max_depth, width, max(2, triton.next_power_of_2(width)), num_warps=1,
        )  # fmt: skip
    return Verdict(path, ends[0], ends[1])


@dataclass(frozen=True)
class _Weights:
    """What became of the draws behind every node."""

    weight: Tensor  # [M] float64: what the node was offered of p
    chance: Tensor  # [M, W] float64
    scales: Tensor  # [M, W] float64
    values: Tensor  # [M, W] float64
    mass: Tensor  # [M] float64
    bar: Tensor  # [M] float64, of K-SEQ
    scale: Tensor  # [M] float64, of K-SEQ


@dataclass(frozen=True)
class _Draw:
    """A batch of trees and what a verdict on it is drawn with, all contiguous."""

    tree: TokenTree
    p: Tensor  # [M, V] float32
    q: Tensor  # [R, V] float32; any where no node was drawn
    seeds: Tensor  # [B]
    lengths: Tensor  # [B]

    @classmethod
    def of(cls, tree: TokenTree, p: Tensor, seeds: Tensor, lengths: Tensor) -> _Draw:
        """With everything where the kernels look for it."""
        p = p.contiguous()
        q = p if tree.q is None else tree.q.contiguous()
        return cls(tree, p, q, seeds.contiguous(), lengths.contiguous())

    @property
    def links(self) -> tuple[Tensor, Tensor, Tensor]:
        """The draws behind nodes, the nodes' tokens, and the rows they were drawn from."""
        return self.tree.tries.contiguous(), self.tree.tokens.contiguous(), self.tree.q_row.contiguous()

    def nothing_weighed(self) -> _Weights:
        """Room for the answers, every node offered all of p."""
        tries, like = self.tree.tries, {"dtype": torch.float64, "device": self.p.device}
        chance, scales, values = torch.empty(3, *tries.shape, **like)
        mass, bar, scale = torch.empty(3, len(tries), **like)
        return _Weights(torch.ones(len(tries), **like), chance, scales, values, mass, bar, scale)


@triton.jit
def _weigh(
    p, q, nodes, tries, tokens, q_row, weight, chance_out, scales_out, values_out, mass_out,
    LISTED: tl.constexpr, PASS_ON: tl.constexpr, W: tl.constexpr, LANES: tl.constexpr, TRIED: tl.constexpr,
    VOCABULARY: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The draws behind one node a program: all nodes, or those listed. PASS_ON: chances are the children's weights."""
    node = tl.program_id(0).to(tl.int64)
    if LISTED:
        node = tl.load(nodes + node)
    place = tl.arange(0, LANES)
    inside, at = place < W, node * W + place
    child = tl.load(tries + at, mask=inside, other=-1)
    exists = child >= 0
    token = tl.load(tokens + child, mask=exists, other=0)
    row = tl.load(q_row + child, mask=exists, other=-1)
    own = tl.load(q + row * VOCABULARY + token, mask=exists & (row >= 0), other=1.0).to(tl.float64)
    whole = tl.load(weight + node)
    chance, taken, value, mass = reject_draws(
        p + node * VOCABULARY, q, whole, exists, token, row, own, place, TRIED, VOCABULARY, WIDTH
    )
    tl.store(chance_out + at, chance, mask=inside)
    tl.store(scales_out + at, taken, mask=inside)
    tl.store(values_out + at, value, mask=inside)
    tl.store(mass_out + node, mass)
    if PASS_ON:
        tl.store(weight + child, chance, mask=exists)


def _weigh_nodes(draw: _Draw, w: _Weights, nodes: Tensor | None, tried: int, *, pass_on: bool) -> None:
    count = draw.tree.num_nodes if nodes is None else len(nodes)
    listed = draw.tree.tokens if nodes is None else nodes
    _weigh[(count,)](
        draw.p, draw.q, listed, *draw.links, w.weight, w.chance, w.scales, w.values, w.mass,
        nodes is not None, pass_on, draw.tree.tries.shape[1], PADDED, tried, draw.p.shape[1], ROW_BLOCK, num_warps=16,
    )  # fmt: skip


def _weigh_kseq(draw: _Draw, w: _Weights, nodes: Tensor | None) -> None:
    count = draw.tree.num_nodes if nodes is None else len(nodes)
    listed = draw.tree.tokens if nodes is None else nodes
    weigh_kseq[(count,)](
        draw.p, draw.q, listed, *draw.links, w.weight, w.chance, w.bar, w.values, w.mass, w.scale,
        nodes is not None, draw.tree.tries.shape[1], PADDED, draw.p.shape[1], KSEQ_BLOCK, num_warps=16,
    )  # fmt: skip


@triton.jit
def _chain_weights(p, q, tokens, parents, q_row, offsets, weight, VOCABULARY: tl.constexpr, LANES: tl.constexpr):
    """What the target affords each node of one path: w_i = min(1, w_(i-1) p(x_i) / q(x_i))."""
    b = tl.program_id(0)
    begin = tl.load(offsets + b)
    size = (tl.load(offsets + b + 1) - begin).to(tl.int32)
    at = 0
    while at < size:
        x = at + tl.arange(0, LANES)
        inside, node = x < size, begin + x
        above = tl.load(parents + node, mask=inside, other=-1)
        token, row = tl.load(tokens + node, mask=inside, other=0), tl.load(q_row + node, mask=inside, other=-1)
        wanted = tl.load(p + above * VOCABULARY + token, mask=above >= 0, other=1.0).to(tl.float64)
        offered = tl.load(q + row * VOCABULARY + token, mask=(above >= 0) & (row >= 0), other=1.0).to(tl.float64)
        gain = tl.where(offered > 0, wanted / tl.where(offered > 0, offered, 1.0), 1.0)
        tl.store(weight + node, gain, mask=inside)
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
    p, q, tries, tokens, q_row, weight, scales, bar, scale_of_all, node, x,
    KSEQ: tl.constexpr, CHILDREN: tl.constexpr, W: tl.constexpr, VOCABULARY: tl.constexpr,
):  # fmt: skip
    """What is left at `node` for tokens x, and p itself; CHILDREN: whether children's tokens may follow."""
    inside = x < VOCABULARY
    target = tl.load(p + node * VOCABULARY + x, mask=inside, other=0.0)
    left = target * tl.load(weight + node).to(tl.float32)
    if KSEQ:
        first = tl.load(tries + node * W)
        row = tl.load(q_row + tl.maximum(first, 0))
        law = tl.load(q + row * VOCABULARY + x, mask=inside & (first >= 0), other=0.0)
        share = tl.minimum(left * tl.load(bar + node).to(tl.float32), law)
        left = tl.maximum(left - tl.load(scale_of_all + node).to(tl.float32) * share, 0.0)
    for j in tl.static_range(W):
        child = tl.load(tries + node * W + j)
        token, row = tl.load(tokens + tl.maximum(child, 0)), tl.load(q_row + tl.maximum(child, 0))
        if not KSEQ:
            scale = tl.where(child >= 0, tl.load(scales + node * W + j), 0.0).to(tl.float32)
            if scale > 0:
                law = tl.load(q + row * VOCABULARY + x, mask=inside & (row >= 0), other=0.0)
                law = tl.where(row >= 0, law, (x == token).to(tl.float32))
                left = tl.maximum(left - scale * law, 0.0)
        if not CHILDREN:
            left = tl.where((child >= 0) & (x == token), 0.0, left)
    return left.to(tl.float64), target.to(tl.float64)


@triton.jit
def _bonus_sums(
    p, q, tries, tokens, q_row, weight, scales, bar, scale, end, sums,
    KSEQ: tl.constexpr, CHILDREN: tl.constexpr, W: tl.constexpr, VOCABULARY: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The mass of what is left at the node each tree's path ends at, and of p there, block by block."""
    b, block = tl.program_id(0), tl.program_id(1)
    x = block * SIZE + tl.arange(0, SIZE)
    left, target = _left_at(
        p, q, tries, tokens, q_row, weight, scales, bar, scale, tl.load(end + b), x, KSEQ, CHILDREN, W, VOCABULARY
    )
    at = sums + (b * tl.num_programs(1) + block) * 2
    tl.store(at, tl.sum(left, 0))
    tl.store(at + 1, tl.sum(target, 0))


@triton.jit
def _bonus(
    p, q, tries, tokens, q_row, weight, scales, bar, scale, end, sums, seeds, lengths, out, blocks,
    KSEQ: tl.constexpr, CHILDREN: tl.constexpr, W: tl.constexpr, VOCABULARY: tl.constexpr, SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """The token after each path, drawn from what is left; from p where that is nothing: no mass is invented."""
    b = tl.program_id(0)
    index, inside = tl.arange(0, BLOCKS), tl.arange(0, BLOCKS) < blocks
    of_left = tl.load(sums + (b * blocks + index) * 2, mask=inside, other=0.0)
    of_p = tl.load(sums + (b * blocks + index) * 2 + 1, mask=inside, other=0.0)
    some = tl.max(of_left, 0) > 0
    u = uniform(round_key(seeds, lengths, b, RESIDUAL))
    aim, block, before, _ = block_beyond(tl.where(some, of_left, of_p), index, u, BLOCKS)
    x = tl.arange(0, SIZE)
    left, target = _left_at(
        p, q, tries, tokens, q_row, weight, scales, bar, scale, tl.load(end + b), block * SIZE + x,
        KSEQ, CHILDREN, W, VOCABULARY,
    )  # fmt: skip
    w = tl.where(some, left, target)
    tl.store(out + b, (block * SIZE + first_beyond(before + tl.cumsum(w, 0), w, x, aim, SIZE)).to(tl.int64))


@dataclass(frozen=True)
class _Ends:
    """Where the paths end."""

    node: Tensor  # [B]
    length: Tensor  # [B]
    path: Tensor  # [B, D + 1]

    @classmethod
    def of(cls, tree: TokenTree) -> _Ends:
        """Room for them."""
        node, length = torch.empty(2, tree.num_trees, dtype=torch.int64, device=tree.tokens.device)
        return cls(node, length, torch.empty(tree.num_trees, tree.max_depth + 1, dtype=torch.int64, device=node.device))


def _verdict(draw: _Draw, w: _Weights, ends: _Ends, *, children: bool, kseq: bool = False) -> Verdict:
    """With the token after each path."""
    count, vocabulary = draw.tree.num_trees, draw.p.shape[1]
    blocks = triton.cdiv(vocabulary, BLOCK)
    sums = torch.empty(count, blocks, 2, dtype=torch.float64, device=draw.p.device)
    bonus = torch.empty(count, dtype=torch.int64, device=draw.p.device)
    row = (draw.p, draw.q, *draw.links, w.weight, w.scales, w.bar, w.scale, ends.node, sums)
    fixed = (kseq, children, draw.tree.tries.shape[1], vocabulary, BLOCK)
    _bonus_sums[(count, blocks)](*row, *fixed)
    padded = max(2, triton.next_power_of_2(blocks))
    _bonus[(count,)](*row, draw.seeds, draw.lengths, bonus, blocks, *fixed, padded, num_warps=8)
    return Verdict(ends.path, ends.length, bonus)


def walk(tree: TokenTree, p: Tensor, seeds: Tensor, lengths: Tensor, tried: int) -> Verdict:
    """Recursive rejection: down while one of the first `tried` draws, or what is left after them, is a child."""
    draw = _Draw.of(tree, p, seeds, lengths)
    w = draw.nothing_weighed()
    _weigh_nodes(draw, w, None, tried, pass_on=False)
    return _verdict(draw, w, _walked(draw, w), children=False)


def kseq_walk(tree: TokenTree, p: Tensor, seeds: Tensor, lengths: Tensor) -> Verdict:
    """Down while one of the draws at their lowered bar, or what is left of the target, is a child."""
    draw = _Draw.of(tree, p, seeds, lengths)
    w = draw.nothing_weighed()
    _weigh_kseq(draw, w, None)
    return _verdict(draw, w, _walked(draw, w), children=False, kseq=True)


def _walked(draw: _Draw, w: _Weights) -> _Ends:
    tree, ends = draw.tree, _Ends.of(draw.tree)
    passes, stop = torch.empty(2, tree.num_nodes, dtype=torch.float64, device=draw.p.device)
    end_of_walk[(tree.num_trees,)](
        tree.tokens, tree.parents, tree.tries, tree.offsets, w.chance, w.values, w.mass, draw.seeds, draw.lengths,
        passes, stop, ends.node, ends.path, ends.length, tree.max_depth, tree.tries.shape[1], NODES, num_warps=2,
    )  # fmt: skip
    return ends


def search(tree: TokenTree, p: Tensor, seeds: Tensor, lengths: Tensor) -> Verdict:
    """Traversal verification; of chains it is block verification."""
    if tree.drawn is not None and tree.q is not None:
        tree = distinct(tree, tree.q)
    draw, ends = _Draw.of(tree, p, seeds, lengths), _Ends.of(tree)
    w, width = draw.nothing_weighed(), tree.tries.shape[1]
    if width == 1:
        _chain_weights[(tree.num_trees,)](
            draw.p, draw.q, tree.tokens, tree.parents, tree.q_row, tree.offsets, w.weight, p.shape[1], NODES,
            num_warps=2,
        )  # fmt: skip
        _weigh_nodes(draw, w, None, width, pass_on=False)
    else:
        for nodes in tree.levels:
            _weigh_nodes(draw, w, nodes, width, pass_on=True)
    fails, before, stop = torch.empty(3, tree.num_nodes, dtype=torch.float64, device=p.device)
    end_of_search[(tree.num_trees,)](
        tree.parents, tree.tries, tree.offsets, w.weight, w.mass, draw.seeds, draw.lengths, fails, before, stop,
        ends.node, ends.path, ends.length, tree.max_depth, width, NODES, num_warps=2,
    )  # fmt: skip
    return _verdict(draw, w, ends, children=True)


def layers(tree: TokenTree, p: Tensor, seeds: Tensor, lengths: Tensor, *, kseq: bool) -> Verdict:
    """A layer at a time, every node with its share of the layer's mass; `kseq`: all draws at one lowered bar."""
    draw, ends = _Draw.of(tree, p, seeds, lengths), _Ends.of(tree)
    w, width = draw.nothing_weighed(), tree.tries.shape[1]
    score = torch.ones_like(w.weight)
    ending, stop = torch.empty(2, tree.num_nodes, dtype=torch.float64, device=p.device)
    for layer, nodes in enumerate(tree.levels):
        if kseq:
            _weigh_kseq(draw, w, nodes)
        else:
            _weigh_nodes(draw, w, nodes, width, pass_on=False)
        next_layer[(tree.num_trees,)](
            tree.parents, tree.depth, tree.tries, tree.offsets, w.chance, w.mass, w.weight, score, ending, layer,
            width, NODES, num_warps=2,
        )  # fmt: skip
    end_of_layers[(tree.num_trees,)](
        tree.parents, tree.depth, tree.offsets, ending, draw.seeds, draw.lengths, stop,
        ends.node, ends.path, ends.length, tree.max_depth, NODES, num_warps=2,
    )  # fmt: skip
    return _verdict(draw, w, ends, children=True, kseq=kseq)


def pooled_layers(tree: TokenTree, p: Tensor, seeds: Tensor, lengths: Tensor) -> Verdict:
    """A layer at a time, all its draws against one common target, one launch a draw."""
    draw, ends = _Draw.of(tree, p, seeds, lengths), _Ends.of(tree)
    like = {"dtype": torch.float64, "device": p.device}
    slices, width, count = triton.cdiv(p.shape[1], BLOCK), tree.tries.shape[1], tree.num_trees
    w = replace(
        draw.nothing_weighed(), weight=(tree.parents < 0).double(), scales=torch.zeros(tree.tries.shape, **like)
    )
    partial = torch.zeros(2, tree.num_nodes, slices, **like)
    (reach, dead), stop = torch.empty(2, count, **like), torch.empty(tree.num_nodes, **like)
    padded = max(2, triton.next_power_of_2(slices))
    for layer, (nodes, turns) in enumerate(zip(tree.levels, tree.turns, strict=True)):
        start_layer[(count,)](
            tree.depth, tree.offsets, w.weight, partial, reach, dead, slices, layer, NODES, num_warps=2
        )
        for row, place in turns:
            try_draw[(len(row), slices)](
                draw.p, draw.q, *draw.links, tree.depth, tree.offsets, tree.owner, nodes, row, place,
                w.weight, w.scales, partial, reach, dead, tree.num_nodes, layer,
                width, padded, NODES, p.shape[1], BLOCK, num_warps=8,
            )  # fmt: skip
    end_of_pooled[(count,)](
        tree.tries, tree.parents, tree.depth, tree.offsets, w.weight, partial, tree.num_nodes, slices,
        draw.seeds, draw.lengths, stop, ends.node, ends.path, ends.length, tree.max_depth,
        width, padded, NODES, num_warps=4,
    )  # fmt: skip
    return _verdict(draw, w, ends, children=True)
