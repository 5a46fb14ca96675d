"""The order of tokens that `gbv` keeps the greatest path by, on CUDA: see `verifiers/gbv.py`.

Of every node's row: which tokens are the likeliest under q, found digit by digit of their bits; how those are ordered;
and how much of q lies before each slice. From that a program knows of every token of its slice what is below it.
"""
# pyright: reportMissingImports=false, reportIndexIssue=false, reportUnreachable=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwood.ops.cuda.draws import SLICE, Drawn, Weights, last_to_arrive, padded
from draftwood.ops.cuda.overlap import OVERLAPPING, wait_and_make_way

RANKED = 256  # as in `verifiers/gbv.py`
DIGIT = 11  # bits
SHIFTS = (22, 11, 0)


@dataclass(frozen=True)
class Order:
    """What each slice has to know of a node's row, and the ranked tokens in the order of their numbers."""

    bar: Tensor  # [M] int32: the bits of the least likely ranked token
    equal: Tensor  # [M] int32: how many as likely as that are ranked
    likelier: Tensor  # [M, S] int32: tokens above the bar in slices before
    alike: Tensor  # [M, S] int32: tokens at the bar in slices before
    before: Tensor  # [M, S] float64: q of the unranked in slices before
    rank: Tensor  # [M, RANKED] int32: where each ranked token stands
    lower: Tensor  # [M, RANKED] float64: q of all tokens below each

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """As kernels take them."""
        return self.bar, self.equal, self.likelier, self.alike, self.before, self.rank, self.lower

    @classmethod
    def of(cls, draw: Drawn, w: Weights) -> Order:
        """By three launches for the bar, one that counts and one that sorts."""
        nodes, slices, device = draw.tree.num_nodes, triton.cdiv(draw.vocabulary, SLICE), draw.p.device
        bar, equal = torch.empty(2, nodes, dtype=torch.int32, device=device)
        likelier, alike = torch.empty(2, nodes, slices, dtype=torch.int32, device=device)
        before = torch.empty(nodes, slices, dtype=torch.float64, device=device)
        rank = torch.empty(nodes, RANKED, dtype=torch.int32, device=device)
        lower = torch.empty(nodes, RANKED, dtype=torch.float64, device=device)
        order = cls(bar, equal, likelier, alike, before, rank, lower)
        counts = torch.zeros(nodes, 1 << DIGIT, dtype=torch.int32, device=device)
        keys = torch.empty(nodes, RANKED, dtype=torch.int64, device=device)
        row, grid = (draw.q, w.rows, w.extent), (nodes, slices)
        most = min(RANKED, draw.vocabulary)
        for shift in SHIFTS:
            _find_bar[grid](
                *row, counts, bar, equal, w.arrived, shift, shift == SHIFTS[0], most, draw.width, draw.vocabulary,
                SLICE, 1 << DIGIT, num_warps=4, **OVERLAPPING,
            )  # fmt: skip
        fixed = (draw.width, draw.vocabulary, SLICE, padded(slices))
        _count[grid](*row, bar, likelier, alike, w.arrived, *fixed, num_warps=4, **OVERLAPPING)
        _sort[grid](
            draw.p, *row, bar, equal, likelier, alike, before, rank, lower, keys, w.arrived, most, *fixed, RANKED,
            num_warps=4, **OVERLAPPING,
        )  # fmt: skip
        return order


@triton.jit
def _bits(q, row, x, VOCABULARY: tl.constexpr):
    """q of some tokens, and its bits, which are ordered as q is; -1 beyond the row."""
    law = tl.load(q + row * VOCABULARY + x, mask=x < VOCABULARY, other=0.0)
    return law, tl.where(x < VOCABULARY, law.to(tl.int32, bitcast=True), -1)


@triton.jit(do_not_specialize=["shift", "most"])
def _find_bar(
    q, rows, extent, counts, bar, equal, arrived, shift, FIRST: tl.constexpr, most,
    W: tl.constexpr, VOCABULARY: tl.constexpr, SIZE: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """One more digit of the bits of the `most`-th likeliest token, and how many are wanted of those that share it."""
    wait_and_make_way()
    node, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(extent + node) > 0:
        _, bits = _bits(q, tl.load(rows + node * W), piece * SIZE + tl.arange(0, SIZE), VOCABULARY)
        found, wanted = shift * 0, shift * 0 + most
        same = bits >= 0
        if not FIRST:
            found, wanted = tl.load(bar + node), tl.load(equal + node)
            above = shift + 11
            same = same & ((bits >> above) == (found >> above))
        many = tl.histogram((bits >> shift) & (BINS - 1), BINS, mask=same)
        digit = tl.arange(0, BINS)
        tl.atomic_add(counts + node * BINS + digit, many, mask=many > 0, sem="relaxed")
        if last_to_arrive(arrived, node, tl.num_programs(1)):
            all_of = tl.load(counts + node * BINS + digit, cache_modifier=".cg")
            at_least = tl.cumsum(all_of, 0, reverse=True)
            chosen = tl.max(tl.where(at_least >= wanted, digit, 0), 0)
            tl.store(bar + node, found | (chosen << shift))
            tl.store(equal + node, wanted - tl.sum(tl.where(digit > chosen, all_of, 0), 0))
            tl.store(counts + node * BINS + digit, all_of * 0)


@triton.jit
def _before_each(counts, node, slices, SLICES: tl.constexpr):
    """Counts of slices become counts of all slices before."""
    i = tl.arange(0, SLICES)
    of_slice = tl.load(counts + node * slices + i, mask=i < slices, other=0, cache_modifier=".cg")
    tl.store(counts + node * slices + i, tl.cumsum(of_slice, 0) - of_slice, mask=i < slices)


@triton.jit
def _count(
    q, rows, extent, bar, likelier, alike, arrived,
    W: tl.constexpr, VOCABULARY: tl.constexpr, SIZE: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """How many tokens above and at the bar lie before each slice."""
    wait_and_make_way()
    node, piece, slices = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    if tl.load(extent + node) > 0:
        _, bits = _bits(q, tl.load(rows + node * W), piece * SIZE + tl.arange(0, SIZE), VOCABULARY)
        least = tl.load(bar + node)
        tl.store(likelier + node * slices + piece, tl.sum((bits > least).to(tl.int32), 0))
        tl.store(alike + node * slices + piece, tl.sum((bits == least).to(tl.int32), 0))
        if last_to_arrive(arrived, node, slices):
            _before_each(likelier, node, slices, SLICES)
            _before_each(alike, node, slices, SLICES)


@triton.jit
def ranked_of_slice(bits, bar, equal, likelier, alike, node, piece, slices):
    """Which tokens of a slice are ranked, and how many ranked ones have smaller numbers."""
    least, take = tl.load(bar + node), tl.load(equal + node)
    at_bar = (bits == least).to(tl.int32)
    earlier = tl.load(alike + node * slices + piece)
    ranked = (bits > least) | ((at_bar > 0) & (earlier + tl.cumsum(at_bar, 0) <= take))
    first = tl.load(likelier + node * slices + piece) + tl.minimum(earlier, take)
    return ranked, first + tl.cumsum(ranked.to(tl.int32), 0) - 1


@triton.jit(do_not_specialize=["most"])
def _sort(
    p, q, rows, extent, bar, equal, likelier, alike, before, rank, lower, keys, arrived, most,
    W: tl.constexpr, VOCABULARY: tl.constexpr, SIZE: tl.constexpr, SLICES: tl.constexpr, RANKED: tl.constexpr,
):  # fmt: skip
    """The ranked tokens in rising order of p / q, and what lies below each and before each slice."""
    wait_and_make_way()
    node, piece, slices = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    if tl.load(extent + node) > 0:
        x = piece * SIZE + tl.arange(0, SIZE)
        law, bits = _bits(q, tl.load(rows + node * W), x, VOCABULARY)
        ranked, place = ranked_of_slice(bits, bar, equal, likelier, alike, node, piece, slices)
        target = tl.load(p + node * VOCABULARY + x, mask=ranked, other=0.0)
        ratio = target / tl.where(law > 0, law, 1.0)
        # Never negative: its bits are ordered as it is. 0 / 0 is below all: never drawn, wherever it ranks.
        never = tl.where(target > 0, 0x7F800001, 0)
        key = tl.where(law > 0, ratio.to(tl.int32, bitcast=True) + 1, never).to(tl.int64)
        tl.store(keys + node * RANKED + place, (key << 32) | place.to(tl.int64), mask=ranked)
        # Until it is known what is below them, `lower` holds the ranked tokens' own q.
        tl.store(lower + node * RANKED + place, law.to(tl.float64), mask=ranked)
        tl.store(before + node * slices + piece, tl.sum(tl.where(ranked, 0.0, law).to(tl.float64), 0))
        if last_to_arrive(arrived, node, slices):
            i, s = tl.arange(0, RANKED), tl.arange(0, SLICES)
            known = i < most
            largest = tl.full((RANKED,), 0x7FFFFFFFFFFFFFFF, tl.int64)
            found = tl.load(keys + node * RANKED + i, mask=known, other=0, cache_modifier=".cg")
            where = (tl.sort(tl.where(known, found, largest)) & (RANKED - 1)).to(tl.int32)
            own = tl.load(lower + node * RANKED + where, mask=known, other=0.0, cache_modifier=".cg")
            unranked = tl.load(before + node * slices + s, mask=s < slices, other=0.0, cache_modifier=".cg")
            tl.debug_barrier()
            below = tl.sum(unranked, 0) + tl.cumsum(own, 0) - own
            tl.store(lower + node * RANKED + where, below, mask=known)
            tl.store(rank + node * RANKED + where, VOCABULARY - most + i, mask=known)
            tl.store(before + node * slices + s, tl.cumsum(unranked, 0) - unranked, mask=s < slices)


@triton.jit
def order_of_slice(
    q, rows, bar, equal, likelier, alike, before, rank, lower, node, piece, slices,
    W: tl.constexpr, VOCABULARY: tl.constexpr, SIZE: tl.constexpr, RANKED: tl.constexpr,
):  # fmt: skip
    """The tokens of a slice, their q, the q of all tokens below each, and where each stands among all."""
    x = piece * SIZE + tl.arange(0, SIZE)
    law, bits = _bits(q, tl.load(rows + node * W), x, VOCABULARY)
    ranked, place = ranked_of_slice(bits, bar, equal, likelier, alike, node, piece, slices)
    unranked = tl.where(ranked, 0.0, law).to(tl.float64)
    by_number = tl.load(before + node * slices + piece) + tl.cumsum(unranked, 0) - unranked
    by_rank = tl.load(lower + node * RANKED + place, mask=ranked, other=0.0)
    stands = tl.load(rank + node * RANKED + place, mask=ranked, other=0)
    return x, law, tl.where(ranked, by_rank, by_number), tl.where(ranked, stands, x - VOCABULARY)
