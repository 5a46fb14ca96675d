"""The draws behind all nodes of a batch on CUDA: what is known of them at once, and rejection, a slice a program.

Whatever a law asks of single tokens is looked up once for all nodes. What it asks of whole rows are sums, and a sum is
shared by as many programs as a row has slices, a number that only the vocabulary decides: who of them comes last adds
the slices up, in order, and goes on from there. So a step that all draws before it have to be known for is one launch.
"""
# pyright: reportMissingImports=false, reportIndexIssue=false, reportUnreachable=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwood.ops.cuda.last_block import last_to_arrive
from draftwood.ops.cuda.pdl import OVERLAPPING, wait_and_make_way
from draftwood.ops.residual import WIDEST_ON_CUDA
from draftwood.tree import TokenTree

SLICE = 2048  # tokens a program
PADDED = WIDEST_ON_CUDA  # always the same, so that no sum over draws depends on how wide other trees are


@dataclass(frozen=True)
class Drawn:
    """A batch of trees and what a verdict on it is drawn with, all contiguous."""

    tree: TokenTree
    p: Tensor  # [M, V] float32
    q: Tensor  # [R, V] float32; any where no node was drawn
    seeds: Tensor  # [B]
    lengths: Tensor  # [B]

    @classmethod
    def of(cls, tree: TokenTree, p: Tensor, seeds: Tensor, lengths: Tensor) -> Drawn:
        """With everything where the kernels look for it."""
        p = p.contiguous()
        q = p if tree.q is None else tree.q.contiguous()
        return cls(tree, p, q, seeds.contiguous(), lengths.contiguous())

    @property
    def links(self) -> tuple[Tensor, Tensor, Tensor]:
        """The draws behind nodes, the nodes' tokens, and the rows they were drawn from."""
        return self.tree.tries.contiguous(), self.tree.tokens.contiguous(), self.tree.q_row.contiguous()

    @property
    def width(self) -> int:
        """The most draws behind a node."""
        return self.tree.tries.shape[1]

    @property
    def vocabulary(self) -> int:
        """Tokens of a row."""
        return self.p.shape[1]


@dataclass(frozen=True)
class Weights:
    """What is known of the draws behind every node, and what became of them."""

    rows: Tensor  # [M, W] of q, -1: a point mass
    tokens: Tensor  # [M, W], -1: no draw
    extent: Tensor  # [M] places up to the last draw
    wanted: Tensor  # [M, W] float64: p of the tokens
    said: Tensor  # [M, W, W] float64: what the law of the first says of the token of the second
    weight: Tensor  # [M] float64: what the node is offered of p; nothing of it where the node is absent
    score: Tensor  # [M] float64: what becomes of a weight of one on the way down
    chance: Tensor  # [M, W] float64
    scales: Tensor  # [M, W] float64
    values: Tensor  # [M, W] float64
    mass: Tensor  # [M] float64
    bars: Tensor  # [M, 2] float64, of K-SEQ: the lossless one, and what none can be above
    scale: Tensor  # [M] float64, of K-SEQ
    arrived: Tensor  # [M] int32: programs that are done with their slices of a node's row

    @classmethod
    def looked_up(cls, draw: Drawn) -> Weights:
        """Everything that single tokens tell, with every node offered all of p."""
        shape, device = draw.tree.tries.shape, draw.p.device
        rows, tokens = torch.empty(2, *shape, dtype=torch.int64, device=device)
        wanted, chance, scales, values = torch.empty(4, *shape, dtype=torch.float64, device=device)
        said = torch.empty(*shape, shape[1], dtype=torch.float64, device=device)
        weight, score, mass, scale = torch.empty(4, shape[0], dtype=torch.float64, device=device)
        bars = torch.empty(shape[0], 2, dtype=torch.float64, device=device)
        extent, arrived = torch.empty(2, shape[0], dtype=torch.int32, device=device)
        w = cls(rows, tokens, extent, wanted, said, weight, score, chance, scales, values, mass, bars, scale, arrived)
        _look_up[(shape[0],)](
            draw.p, draw.q, *draw.links, rows, tokens, extent, wanted, said, weight, score, chance, scales, values,
            bars, scale, arrived, shape[1], PADDED, draw.vocabulary, num_warps=1, **OVERLAPPING,
        )  # fmt: skip
        return w


@triton.jit
def _look_up(
    p, q, tries, tokens, q_row, rows_out, tokens_out, extent, wanted_out, said_out, weight, score, chance, scales,
    values, bars, scale, arrived, W: tl.constexpr, LANES: tl.constexpr, VOCABULARY: tl.constexpr,
):  # fmt: skip
    """One node a program."""
    wait_and_make_way()
    node = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, LANES)
    inside, at = j < W, node * W + j
    child = tl.load(tries + at, mask=inside, other=-1)
    there = child >= 0
    token = tl.load(tokens + child, mask=there, other=0)
    row = tl.load(q_row + child, mask=there, other=-1)
    wanted = tl.load(p + node * VOCABULARY + token, mask=there, other=0.0).to(tl.float64)
    both = there[:, None] & there[None, :]
    law = tl.load(q + row[:, None] * VOCABULARY + token[None, :], mask=both & (row >= 0)[:, None], other=0.0)
    same = (both & (token[:, None] == token[None, :])).to(tl.float64)
    said = tl.where((row >= 0)[:, None], law.to(tl.float64), same)
    nothing = wanted * 0.0
    tl.store(rows_out + at, row, mask=inside)
    tl.store(tokens_out + at, tl.where(there, token, -1), mask=inside)
    tl.store(wanted_out + at, wanted, mask=inside)
    tl.store(said_out + at[:, None] * W + j[None, :], said, mask=inside[:, None] & inside[None, :])
    tl.store(chance + at, nothing, mask=inside)
    tl.store(values + at, nothing, mask=inside)
    tl.store(scales + at, tl.where((j == 0) & there, 1.0, nothing), mask=inside)  # nothing was taken before the first
    draws = tl.max(tl.where(there, j + 1, 0), 0)
    tl.store(extent + node, draws)
    tl.store(weight + node, tl.where(tl.load(tokens + node) >= 0, 1.0, 0.0).to(tl.float64))
    tl.store(score + node, 1.0)
    tl.store(bars + 2 * node, 1.0 / tl.maximum(draws, 1).to(tl.float64))
    tl.store(bars + 2 * node + 1, 1.0)
    tl.store(scale + node, 0.0)
    tl.store(arrived + node, 0)


@triton.jit
def added_up(partial, slices, SLICES: tl.constexpr):
    """What the slices of a row say, in order; not from a cache that others' answers pass by."""
    i = tl.arange(0, SLICES)
    return tl.sum(tl.load(partial + i, mask=i < slices, other=0.0, cache_modifier=".cg"), 0)


@triton.jit
def left_of_draws(p, q, rows, tokens, weight, scales, node, x, laws, W: tl.constexpr, VOCABULARY: tl.constexpr):
    """weight · p of one node less its first `laws` laws, at tokens x; and p itself."""
    inside = x < VOCABULARY
    target = tl.load(p + node * VOCABULARY + x, mask=inside, other=0.0)
    left = target * tl.load(weight + node).to(tl.float32)
    for i in tl.static_range(W):
        row, scale = tl.load(rows + node * W + i), tl.load(scales + node * W + i)
        takes = (i < laws) & (scale > 0)
        scale = tl.where(takes, scale, 0.0).to(tl.float32)
        law = tl.load(q + row * VOCABULARY + x, mask=inside & takes & (row >= 0), other=0.0)
        law = tl.where(row >= 0, law, (x == tl.load(tokens + node * W + i)).to(tl.float32))
        left = tl.maximum(left - scale * law, 0.0)
    return left, target


@triton.jit
def left_at_draws(wanted, said, weight, scales, node, place, there, before, W: tl.constexpr):
    """What is left of weight · p at the tokens of draws `place` after those before place `before`."""
    left = tl.load(weight + node, mask=there, other=0.0) * tl.load(wanted + node * W + place, mask=there, other=0.0)
    for m in tl.static_range(W):
        takes = there & (m < before)
        law = tl.load(said + (node * W + m) * W + place, mask=takes, other=0.0)
        left -= tl.load(scales + node * W + m, mask=takes, other=0.0) * law
    return tl.maximum(left, 0.0)


@triton.jit
def fair_chance(wanted, said, weight, scales, node, place, there, W: tl.constexpr):
    """That draws `place` behind `node`, which are `there`, are accepted once those before them were rejected."""
    left = left_at_draws(wanted, said, weight, scales, node, place, there, place, W)
    own = tl.load(said + (node * W + place) * W + place, mask=there, other=0.0)
    offered = own * tl.load(scales + node * W + place, mask=there, other=0.0)
    # Nothing wanted and nothing offered: there is nothing to lose, so the draw is taken.
    fair = tl.where(offered > 0, tl.minimum(left / tl.where(offered > 0, offered, 1.0), 1.0), 1.0)
    return tl.where(there, fair, 0.0)


@triton.jit(do_not_specialize=["place", "tried"])
def _take_draws(
    p, q, listed, rows, tokens, extent, wanted, said, weight, scales, partial, arrived, chance, values, mass,
    place, tried,
    LISTED: tl.constexpr, W: tl.constexpr, LANES: tl.constexpr, SLICES: tl.constexpr, VOCABULARY: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """What the first `place` draws behind a node leave: what survives before the next, or all there is to say."""
    wait_and_make_way()
    node, piece, slices = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    if LISTED:
        node = tl.load(listed + node)  # -1: none
    draws = tl.minimum(tl.load(extent + node, mask=node >= 0, other=0), tried)
    whole = tl.load(weight + node, mask=node >= 0, other=0.0)
    if (draws > place) | ((place == tried) & (draws > 0)):
        x = piece * SIZE + tl.arange(0, SIZE)
        left, _ = left_of_draws(p, q, rows, tokens, weight, scales, node, x, place, W, VOCABULARY)
        tl.store(partial + node * slices + piece, tl.sum(left.to(tl.float64), 0))
        if last_to_arrive(arrived, node, slices):
            survives = added_up(partial + node * slices, slices, SLICES)
            if draws > place:
                exists = tl.load(tokens + node * W + place) >= 0
                tl.store(scales + node * W + place, tl.where(exists, survives + (1.0 - whole), 0.0))
            else:
                j = tl.arange(0, LANES)
                there = tl.load(tokens + node * W + j, mask=j < W, other=-1) >= 0
                fair = fair_chance(wanted, said, weight, scales, node + 0 * j, j, there & (j < tried), W)
                kept = left_at_draws(wanted, said, weight, scales, node + 0 * j, j, there, 0 * j + W, W)
                tl.store(chance + node * W + j, fair, mask=j < W)
                tl.store(values + node * W + j, kept, mask=j < W)
                tl.store(mass + node, survives)
    elif (draws == 0) & (piece == 0):
        tl.store(mass + node, whole, mask=node >= 0)


def take_draws(draw: Drawn, w: Weights, nodes: Tensor | None, place: int, tried: int) -> None:
    """Of some nodes or all: what survives the draws before `place`, or after all `tried` their chances and masses."""
    count = draw.tree.num_nodes if nodes is None else len(nodes)
    slices = triton.cdiv(draw.vocabulary, SLICE)
    partial = torch.empty(draw.tree.num_nodes, slices, dtype=torch.float64, device=draw.p.device)
    _take_draws[(count, slices)](
        draw.p, draw.q, w.tokens if nodes is None else nodes, w.rows, w.tokens, w.extent, w.wanted, w.said, w.weight,
        w.scales, partial, w.arrived, w.chance, w.values, w.mass, place, tried,
        nodes is not None, draw.width, PADDED, padded(slices), draw.vocabulary, SLICE, num_warps=4, **OVERLAPPING,
    )  # fmt: skip


def reject_all(draw: Drawn, w: Weights, tried: int) -> None:
    """The first `tried` draws behind all nodes at once, one after the other."""
    for place in range(1, tried + 1):
        take_draws(draw, w, None, place, tried)


def padded(count: int) -> int:
    """Lanes for so many numbers: a power of two, at least two."""
    return 1 << max(1, (count - 1).bit_length())
