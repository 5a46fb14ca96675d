"""`ops.beam` in Triton: two kernels a level, and one for the tree; a program a sequence where it chooses."""
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwood.links import BITS
from draftwood.ops.beam import Chosen, Links, Offers
from draftwood.ops.cuda.choice import PART, next_best
from draftwood.ops.cuda.pdl import OVERLAPPING, wait_for_predecessors

TILE = 64  # offers compared with all others at a time


@triton.jit
def _best_of_part(
    logits, temperature, best, place, highest, total, vocabulary, parts, nodes, COUNT: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """The best of a part of a row, and what its softmax needs to know of the rest."""
    wait_for_predecessors()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heat = tl.load(temperature + row // nodes)
    heat = tl.where(heat > 0, heat, 1.0)
    token = part * WIDTH + tl.arange(0, WIDTH)
    left = token < vocabulary
    value = tl.load(logits + row * vocabulary + token, mask=left, other=float("-inf")).to(tl.float32) / heat
    value = tl.where(value == value, value, float("-inf"))  # a row of nothing but nan still makes offers
    peak = tl.max(value, 0)
    tl.store(highest + row * parts + part, peak)
    tl.store(total + row * parts + part, tl.sum(tl.exp(value - tl.where(peak > float("-inf"), peak, 0.0)), 0))
    for rank in tl.static_range(COUNT):
        top, first = next_best(value, token, left, vocabulary)
        tl.store(best + (row * parts + part) * COUNT + rank, top)
        tl.store(place + (row * parts + part) * COUNT + rank, first)
        left = left & (token != first)


@triton.jit
def _choose(
    best, place, highest, total, known, scores, tokens, above, up_scores, up_offers,
    next_tokens, next_scores, next_offers, next_parents, vocabulary, parts, start, num_offers,
    NODES: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, NEWEST: tl.constexpr,
):  # fmt: skip
    """The best of whole rows become offers, and the best of those the next level."""
    wait_for_predecessors()
    b = tl.program_id(0).to(tl.int64)
    own = b * num_offers + start
    at, part = tl.arange(0, WIDTH), tl.arange(0, PARTS)
    for node in range(NODES):
        row = b * NODES + node
        left = at < parts * COUNT
        value = tl.load(best + row * parts * COUNT + at, mask=left, other=float("-inf"))
        token = tl.load(place + row * parts * COUNT + at, mask=left, other=vocabulary)
        peaks = tl.load(highest + row * parts + part, mask=part < parts, other=float("-inf"))
        sums = tl.load(total + row * parts + part, mask=part < parts, other=0.0)
        peak = tl.max(tl.where(sums > 0, peaks, -3e38), 0)
        mass = peak + tl.log(tl.maximum(tl.sum(sums * tl.exp(tl.where(sums > 0, peaks - peak, 0.0)), 0), 1e-38))
        way, behind = 0.0, tl.full((), -1, tl.int64)
        if up_scores is not None:
            way = tl.load(up_scores + row)
            behind = tl.load(up_offers + row)
        for rank in tl.static_range(COUNT):
            top, first = next_best(value, token, left, vocabulary)
            score = way + (top - mass)
            chosen = tl.minimum(first, vocabulary - 1).to(tl.int64)
            if known is not None:
                chosen = tl.load(known + chosen)
            tl.store(scores + own + node * COUNT + rank, score)
            tl.store(tokens + own + node * COUNT + rank, chosen)
            tl.store(above + own + node * COUNT + rank, behind)
            left = left & (token != first)
    tl.debug_barrier()
    x = tl.arange(0, NEWEST)
    there = x < NODES * COUNT
    score = tl.load(scores + own + x, mask=there, other=float("-inf"))
    before = (score[None, :] > score[:, None]) | ((score[None, :] == score[:, None]) & (x[None, :] < x[:, None]))
    rank = tl.sum((before & there[None, :]).to(tl.int32), 1)
    stays = there & (rank < COUNT)
    out = b * COUNT + rank
    tl.store(next_tokens + out, tl.load(tokens + own + x, mask=stays, other=0), mask=stays)
    tl.store(next_scores + out, score, mask=stays)
    tl.store(next_offers + out, (start + x).to(tl.int64), mask=stays)
    tl.store(next_parents + out, (x // COUNT).to(tl.int64), mask=stays)


def offer(
    into: Offers, level: int, logits: Tensor, temperature: Tensor, known: Tensor | None, above: Chosen | None
) -> Chosen:
    """See `ops.beam.offer`; of equal logits the first token comes first."""
    size, nodes, vocabulary = logits.shape
    parts, width, device = triton.cdiv(vocabulary, PART), into.width, logits.device
    best = torch.empty(size * nodes, parts * width, dtype=torch.float32, device=device)
    place = torch.empty(size * nodes, parts * width, dtype=torch.int32, device=device)
    highest, total = torch.empty(2, size * nodes, parts, dtype=torch.float32, device=device).unbind(0)
    _best_of_part[(size * nodes, parts)](
        logits.contiguous(), temperature, best, place, highest, total, vocabulary, parts, nodes, width, PART,
        **OVERLAPPING,
    )  # fmt: skip
    chosen = torch.empty(3, size, width, dtype=torch.int64, device=device)
    scores = torch.empty(size, width, dtype=torch.float32, device=device)
    _choose[(size,)](
        best, place, highest, total, known, into.scores, into.tokens, into.above,
        None if above is None else above.scores, None if above is None else above.offers,
        chosen[0], scores, chosen[1], chosen[2], vocabulary, parts, into.start(level), into.scores.shape[1],
        nodes, width, max(2, triton.next_power_of_2(parts * width)), max(2, triton.next_power_of_2(parts)),
        max(2, triton.next_power_of_2(nodes * width)), num_warps=1, **OVERLAPPING,
    )  # fmt: skip
    return Chosen(chosen[0], scores, chosen[1], chosen[2])


@triton.jit
def _link(
    scores, offered, above, roots, ranks, tokens, parents, depth, ancestors, tries, chosen,
    BRANCHES: tl.constexpr, DEPTH: tl.constexpr, COUNT: tl.constexpr, NODES: tl.constexpr,
    OFFERS: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """One tree: where each offer ranks, which node that makes it, and how the nodes hang together."""
    wait_for_predecessors()
    b = tl.program_id(0).to(tl.int64)
    first, own = b * (1 + NODES), b * COUNT
    c = tl.arange(0, OFFERS)
    there = c < COUNT
    score = tl.load(scores + own + c, mask=there, other=float("-inf"))
    rank = tl.zeros((OFFERS,), tl.int32)
    for start in range(0, COUNT, TILE):
        other = start + tl.arange(0, TILE)
        rival = tl.load(scores + own + other, mask=other < COUNT, other=float("-inf"))
        before = (rival[None, :] > score[:, None]) | (
            (rival[None, :] == score[:, None]) & (other[None, :] < c[:, None])
        )
        rank += tl.sum((before & (other[None, :] < COUNT)).to(tl.int32), 1)
    tl.store(ranks + own + c, rank, mask=there)
    tl.debug_barrier()
    kept = there & (rank < NODES)
    behind = tl.load(above + own + c, mask=kept, other=-1)
    place = tl.load(ranks + own + behind, mask=kept & (behind >= 0), other=-1) + 1
    node = first + 1 + rank
    level = tl.where(c < BRANCHES, 0, (c - BRANCHES) // (BRANCHES * BRANCHES) + 1)
    level = tl.minimum(level, DEPTH - 1)  # what only fills up stands behind the roots, at any depth
    tl.store(tokens + node, tl.load(offered + own + c, mask=kept, other=0), mask=kept)
    tl.store(parents + node, first + tl.minimum(place, NODES), mask=kept)
    tl.store(depth + node, (level + 1).to(tl.int64), mask=kept)
    tl.store(chosen + b * NODES + rank, c.to(tl.int64), mask=kept)
    tl.store(tokens + first, tl.load(roots + b))
    tl.store(parents + first, tl.full((), -1, tl.int64))
    tl.store(depth + first, tl.full((), 0, tl.int64))
    x = tl.arange(0, ROWS)
    inside = x <= NODES
    for branch in tl.static_range(BRANCHES):
        tl.store(tries + (first + x) * BRANCHES + branch, tl.full((ROWS,), -1, tl.int64), mask=inside)
    tl.debug_barrier()
    up = tl.load(parents + first + x, mask=inside, other=-1)
    siblings = (up[None, :] == up[:, None]) & (x[None, :] < x[:, None]) & (up[:, None] >= 0)
    earlier = tl.sum(siblings.to(tl.int32), 1)
    tl.store(tries + up * BRANCHES + earlier, first + x, mask=inside & (up >= 0) & (earlier < BRANCHES))
    for word in tl.static_range(WORDS):
        at = tl.where(inside, x, 0).to(tl.int64)
        bits = tl.zeros((ROWS,), tl.int64)
        for _ in range(DEPTH):
            bit = at - 1 - word * BITS
            bits |= tl.where((bit >= 0) & (bit < BITS), tl.full((ROWS,), 1, tl.int64) << (bit & (BITS - 1)), 0)
            at = tl.load(parents + first + at, mask=at > 0, other=0) - tl.where(at > 0, first, 0)
        tl.store(ancestors + (first + x) * WORDS + word, bits, mask=inside)


def likeliest_tree(offers: Offers, roots: Tensor, nodes: int) -> Links:
    """See `ops.beam.likeliest_tree`."""
    size, count = offers.scores.shape
    rows, words = size * (1 + nodes), max(1, -(-nodes // BITS))
    ranks = torch.empty(size, count, dtype=torch.int32, device=roots.device)
    tokens, parents, depth = torch.empty(3, rows, dtype=torch.int64, device=roots.device).unbind(0)
    ancestors = torch.empty(rows, words, dtype=torch.int64, device=roots.device)
    tries = torch.empty(rows, offers.width, dtype=torch.int64, device=roots.device)
    chosen = torch.empty(size, nodes, dtype=torch.int64, device=roots.device)
    _link[(size,)](
        offers.scores, offers.tokens, offers.above, roots.contiguous(), ranks, tokens, parents, depth, ancestors, tries,
        chosen, offers.width, offers.depth, count, nodes, max(2, triton.next_power_of_2(count)), TILE,
        triton.next_power_of_2(1 + nodes), words, BITS, num_warps=8, **OVERLAPPING,
    )  # fmt: skip
    return Links(tokens, parents, depth, ancestors, tries, chosen)
