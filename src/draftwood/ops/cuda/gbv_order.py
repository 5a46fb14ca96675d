"""The order of tokens that `gbv` keeps the greatest path by, on CUDA: see `verifiers/gbv.py`.

Of every node's row: which tokens are likely under q, how those are ordered, and how much of q lies before each slice.
From that a program knows of every token of its slice what is below it.
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
from draftwood.ops.cuda.rejection import SLICE, Drawn, Weights, padded

RANKED = 256  # all as in `verifiers/gbv.py`
_NUM_BINS, _BIN_SHIFT, _LOWEST_BIN = tl.constexpr(256), tl.constexpr(20), tl.constexpr((127 - 24) << 3)
_PLACES = tl.constexpr(1 << 10)  # room for one in a key; in front of it the token, in front of that the ratio


@dataclass(frozen=True)
class Order:
    """What each slice has to know of a node's row, and the ranked tokens, those of a slice side by side."""

    bar: Tensor  # [M] int32: the lowest bin whose tokens are ranked
    first: Tensor  # [M, S] int32: the place of a slice's first ranked token
    before: Tensor  # [M, S] float64: q of the unranked in slices before
    rank: Tensor  # [M, RANKED] int32: where each ranked token stands
    lower: Tensor  # [M, RANKED] float64: q of all tokens below each

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """As kernels take them."""
        return self.bar, self.first, self.before, self.rank, self.lower

    @classmethod
    def of(cls, draw: Drawn, w: Weights) -> Order:
        """By one launch for the bar and one that sorts."""
        nodes, slices, device = draw.tree.num_nodes, triton.cdiv(draw.vocabulary, SLICE), draw.p.device
        first = torch.empty(nodes, slices, dtype=torch.int32, device=device)
        before = torch.empty(nodes, slices, dtype=torch.float64, device=device)
        rank = torch.empty(nodes, RANKED, dtype=torch.int32, device=device)
        lower = torch.empty(nodes, RANKED, dtype=torch.float64, device=device)
        keys = torch.empty(nodes, RANKED, dtype=torch.int64, device=device)
        counts = torch.zeros(nodes, _NUM_BINS.value, dtype=torch.int32, device=device)
        bar, met = torch.empty(2, nodes, dtype=torch.int32, device=device)
        row, grid = (draw.q, w.rows, w.extent), (nodes, slices)
        _find_bar[grid](
            *row, counts, bar, met, w.arrived, draw.width, draw.vocabulary, SLICE, RANKED, num_warps=4,
            **OVERLAPPING,
        )  # fmt: skip
        _rank[grid](
            draw.p, *row, bar, first, before, rank, lower, keys, met, w.arrived,
            draw.width, draw.vocabulary, SLICE, padded(slices), RANKED, num_warps=4, **OVERLAPPING,
        )  # fmt: skip
        return cls(bar, first, before, rank, lower)


@triton.jit
def _bins(q, row, x, VOCABULARY: tl.constexpr):
    """q of some tokens, and the bin each is in."""
    law = tl.load(q + tl.maximum(row, 0) * VOCABULARY + x, mask=x < VOCABULARY, other=0.0)  # any where none was drawn
    bins = (law.to(tl.int32, bitcast=True) >> _BIN_SHIFT) - _LOWEST_BIN
    return law, tl.minimum(tl.maximum(bins, 0), _NUM_BINS - 1)


@triton.jit
def _find_bar(
    q, rows, extent, counts, bar, met, arrived,
    W: tl.constexpr, VOCABULARY: tl.constexpr, SIZE: tl.constexpr, RANKED: tl.constexpr,
):  # fmt: skip
    """The lowest bin of a row above which at most RANKED tokens lie, itself included."""
    wait_and_make_way()
    node, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(extent + node) > 0:
        law, bins = _bins(q, tl.load(rows + node * W), piece * SIZE + tl.arange(0, SIZE), VOCABULARY)
        many, each = tl.histogram(bins, _NUM_BINS, mask=law > 0), tl.arange(0, _NUM_BINS)
        tl.atomic_add(counts + node * _NUM_BINS + each, many, mask=many > 0, sem="relaxed")
        if last_to_arrive(arrived, node, tl.num_programs(1)):
            at_least = tl.cumsum(tl.load(counts + node * _NUM_BINS + each, cache_modifier=".cg"), 0, reverse=True)
            tl.store(bar + node, tl.sum((at_least > RANKED).to(tl.int32), 0))
            tl.store(met + node, 0)


@triton.jit
def _likely(q, row, bar, x, VOCABULARY: tl.constexpr):
    """q of the tokens x of a slice, which of them are ranked, and how many ranked ones of the slice come before."""
    law, bins = _bins(q, row, x, VOCABULARY)
    ranked = (law > 0) & (bins >= bar)
    one = ranked.to(tl.int32)
    return law, ranked, tl.cumsum(one, 0) - one


@triton.jit
def _rank(
    p, q, rows, extent, bar, first, before, rank, lower, keys, met, arrived,
    W: tl.constexpr, VOCABULARY: tl.constexpr, SIZE: tl.constexpr, SLICES: tl.constexpr, RANKED: tl.constexpr,
):  # fmt: skip
    """The ranked tokens in rising order of p / q, and what lies below each and before each slice."""
    wait_and_make_way()
    node, piece, slices = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    if tl.load(extent + node) > 0:
        x = piece * SIZE + tl.arange(0, SIZE)
        law, ranked, place = _likely(q, tl.load(rows + node * W), tl.load(bar + node), x, VOCABULARY)
        # Slices come in any order, so places are any; ranks are not: keys have tokens in front of places.
        start = tl.atomic_add(met + node, tl.sum(ranked.to(tl.int32), 0))
        tl.store(first + node * slices + piece, start)
        place = start + place
        target = tl.load(p + node * VOCABULARY + x, mask=ranked, other=0.0)
        ratio = (target / tl.where(ranked, law, 1.0)).to(tl.int32, bitcast=True)  # never negative: ordered as it is
        key = (ratio.to(tl.int64) << 32) | (x.to(tl.int64) * _PLACES) | place.to(tl.int64)
        tl.store(keys + node * RANKED + place, key, mask=ranked)
        # Until it is known what is below them, `lower` holds the ranked tokens' own q.
        tl.store(lower + node * RANKED + place, law.to(tl.float64), mask=ranked)
        tl.store(before + node * slices + piece, tl.sum(tl.where(ranked, 0.0, law).to(tl.float64), 0))
        if last_to_arrive(arrived, node, slices):
            i, s = tl.arange(0, RANKED), tl.arange(0, SLICES)
            known = i < tl.atomic_add(met + node, 0)
            largest = tl.full((RANKED,), 0x7FFFFFFFFFFFFFFF, tl.int64)
            found = tl.load(keys + node * RANKED + i, mask=known, other=0, cache_modifier=".cg")
            where = (tl.sort(tl.where(known, found, largest)) & (_PLACES - 1)).to(tl.int32)
            own = tl.load(lower + node * RANKED + where, mask=known, other=0.0, cache_modifier=".cg")
            unranked = tl.load(before + node * slices + s, mask=s < slices, other=0.0, cache_modifier=".cg")
            tl.debug_barrier()
            below = tl.sum(unranked, 0) + tl.cumsum(own, 0) - own
            tl.store(lower + node * RANKED + where, below, mask=known)
            tl.store(rank + node * RANKED + where, i, mask=known)
            tl.store(before + node * slices + s, tl.cumsum(unranked, 0) - unranked, mask=s < slices)


@triton.jit
def order_of_slice(
    q, rows, bar, first, before, rank, lower, node, piece, slices,
    W: tl.constexpr, VOCABULARY: tl.constexpr, SIZE: tl.constexpr, RANKED: tl.constexpr,
):  # fmt: skip
    """The tokens of a slice, their q, the q of all tokens below each, and where each stands among all."""
    x = piece * SIZE + tl.arange(0, SIZE)
    law, ranked, place = _likely(q, tl.load(rows + node * W), tl.load(bar + node), x, VOCABULARY)
    at = node * RANKED + tl.load(first + node * slices + piece) + place
    unranked = tl.where(ranked, 0.0, law).to(tl.float64)
    by_number = tl.load(before + node * slices + piece) + tl.cumsum(unranked, 0) - unranked
    by_rank = tl.load(lower + at, mask=ranked, other=0.0)
    stands = tl.load(rank + at, mask=ranked, other=0)
    return x, law, tl.where(ranked, by_rank, by_number), tl.where(ranked, stands, x - VOCABULARY)
