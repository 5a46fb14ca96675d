"""Trees that grow where the draft is likeliest: always of one size, without looking at values.

Every level offers the likeliest children of its nodes, and the likeliest of those are the next level. In the end the
likeliest of all that was offered are the tree. Shapes: B sequences · k nodes of a level · C offers in all · N nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from draftwood.ops.choice import ranked
from draftwood.shape import num_words, own_bits

MOST_RANKED = 2048  # offers of a tree that one program of the kernel ranks
WIDEST_RANKED = 16  # nodes of a level, likewise


@dataclass(frozen=True)
class Offers:
    """Every node that may become one of the tree, level by level; each is never likelier than the one above it."""

    scores: Tensor  # [B, C] float32 log-probability of the way to it
    tokens: Tensor  # [B, C] int64
    above: Tensor  # [B, C] int64 the offer it stands behind, -1: the root
    width: int  # children offered of every node, and nodes of a level
    depth: int

    @classmethod
    def room(cls, size: int, width: int, depth: int, device: torch.device, least: int = 0) -> Offers:
        """For all levels, and impossible ones behind them where that would be fewer than `least`."""
        count = width + (depth - 1) * width**2
        scores = torch.empty(size, max(count, least), dtype=torch.float32, device=device)
        tokens, above = torch.empty(2, *scores.shape, dtype=torch.int64, device=device).unbind(0)
        offers = cls(scores, tokens, above, width, depth)
        if count < least:
            offers.end(depth - 1)
        return offers

    @property
    def count(self) -> int:
        """Offers of all levels."""
        return self.start(self.depth)

    @property
    def levels(self) -> Tensor:
        """How deep each offer stands, 1 behind the roots. [C]."""
        return _levels(self.width, self.depth, self.scores.shape[1], self.scores.device)

    def start(self, level: int) -> int:
        """Where the offers of a level begin; level 0 stands behind the roots."""
        return 0 if level == 0 else self.width + (level - 1) * self.width**2

    def end(self, level: int) -> None:
        """Nothing is offered beyond this level."""
        end = self.start(level + 1)
        self.scores[:, end:], self.tokens[:, end:], self.above[:, end:] = -torch.inf, 0, -1

    def within(self, deepest: Tensor) -> Offers:
        """The same with offers beyond the level `deepest` [B] of their sequence impossible."""
        return replace(self, scores=self.scores.masked_fill(self.levels > deepest[:, None], -torch.inf))

    @property
    def fit_kernels(self) -> bool:
        """Whether one program can rank all of them."""
        return self.scores.is_cuda and self.width <= WIDEST_RANKED and self.scores.shape[1] <= MOST_RANKED


@cache
def _levels(width: int, depth: int, count: int, device: torch.device) -> Tensor:
    """See `Offers.levels`; the same in every step. [count]."""
    place = torch.arange(count, device=device)
    return torch.where(place < width, 1, (place - width) // width**2 + 2).clamp(max=depth)


@dataclass(frozen=True)
class Chosen:
    """The nodes of the next level."""

    tokens: Tensor  # [B, k] int64
    scores: Tensor  # [B, k] float32
    offers: Tensor  # [B, k] int64 which offers they are
    parents: Tensor  # [B, k] int64 which node of their level each stands behind


@dataclass(frozen=True)
class Links:
    """Trees of N draft nodes each, likeliest first, so that parents come before children; see `TokenTree`."""

    tokens: Tensor  # [B * (1 + N)]
    parents: Tensor  # [B * (1 + N)]
    depth: Tensor  # [B * (1 + N)]
    ancestors: Tensor  # [B * (1 + N), W]
    tries: Tensor  # [B * (1 + N), width]
    offers: Tensor  # [B, N] which offer each draft node was


def offer(
    into: Offers, level: int, logits: Tensor, temperature: Tensor, known: Tensor | None, above: Chosen | None
) -> Chosen:
    """Offer the likeliest children of the nodes `above` (None: of the roots), by `logits` [B, k, R] of the tokens
    `known` [R] (None: all) at `temperature` [B] (0: as 1), and choose the likeliest of them.
    """
    if into.fit_kernels:
        from draftwood.ops.cuda.beam import offer as launch

        return launch(into, level, logits, temperature, known, above)
    return offer_reference(into, level, logits, temperature, known, above)


def offer_reference(
    into: Offers, level: int, logits: Tensor, temperature: Tensor, known: Tensor | None, above: Chosen | None
) -> Chosen:
    """What it computes."""
    return offered(into, level, *scored_children(logits, into.width, temperature, known), above)


def offered(into: Offers, level: int, score: Tensor, tokens: Tensor, above: Chosen | None) -> Chosen:
    """Offer children `tokens` of the nodes `above` (None: of the roots) with their log-probabilities, and choose the
    likeliest of them. 2 x [B, k, width].
    """
    score = (score if above is None else score + above.scores[..., None]).flatten(1)
    tokens = tokens.flatten(1)
    behind = torch.full_like(tokens[:, :1], -1) if above is None else above.offers
    start, count = into.start(level), score.shape[1]
    into.scores[:, start : start + count] = score
    into.tokens[:, start : start + count] = tokens
    into.above[:, start : start + count] = behind[..., None].expand(-1, -1, into.width).flatten(1)
    best = score.argsort(dim=-1, descending=True, stable=True)[:, : into.width]
    return Chosen(tokens.gather(1, best), score.gather(1, best), best + start, best // into.width)


def scored_children(logits: Tensor, count: int, temperature: Tensor, known: Tensor | None) -> tuple[Tensor, Tensor]:
    """The `count` likeliest tokens after each node and their log-probabilities; see `offer`. 2 x [B, k, count]."""
    scaled = logits.float() / torch.where(temperature > 0, temperature, 1)[:, None, None]
    place = ranked(logits, count)
    score = torch.log_softmax(scaled, -1).gather(-1, place).nan_to_num_(nan=-torch.inf, neginf=-torch.inf)
    return score, place if known is None else known[place]


def likeliest_tree(offers: Offers, roots: Tensor, nodes: int) -> Links:
    """The `nodes` likeliest of everything offered, behind `roots` [B]."""
    if offers.fit_kernels:
        from draftwood.ops.cuda.beam import likeliest_tree as launch

        return launch(offers, roots, nodes)
    return likeliest_tree_reference(offers, roots, nodes)


def likeliest_tree_reference(offers: Offers, roots: Tensor, nodes: int) -> Links:
    """What it computes. At a tie the offer made first comes first, so no node comes before its parent."""
    kept, place = ranked_offers(offers.scores)
    kept = kept[:, :nodes]
    above = offers.above.gather(1, kept)
    parents = torch.where(above >= 0, place.gather(1, above.clamp(min=0)) + 1, 0)
    levels = offers.levels.expand_as(offers.scores).gather(1, kept)
    return linked(roots, offers.tokens.gather(1, kept), parents, levels, kept, offers.width, offers.depth)


def ranked_offers(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Offers in falling order of `scores` [B, C], the first of equal ones first, and where each stands then."""
    order = scores.argsort(dim=-1, descending=True, stable=True)
    places = torch.arange(order.shape[1], device=order.device).expand_as(order)
    return order, torch.empty_like(order).scatter_(1, order, places)


def linked(
    roots: Tensor, tokens: Tensor, parents: Tensor, levels: Tensor, offers: Tensor, children: int, deepest: int
) -> Links:
    """Trees of nodes `tokens` [B, N] behind `roots` [B], each behind the node with the local index `parents` [B, N], at
    the depth `levels` [B, N]; at most so many `children` a node, and levels.
    """
    size, nodes = tokens.shape
    first = torch.arange(size, device=roots.device)[:, None] * (1 + nodes)
    zero = torch.zeros_like(first)
    up = torch.cat([zero, parents], 1)
    return Links(
        torch.cat([roots[:, None], tokens], 1).view(-1),
        torch.cat([zero - 1, first + parents], 1).view(-1),
        torch.cat([zero, levels], 1).view(-1),
        _ancestors(up, deepest).flatten(0, 1),
        _tries(parents, first, children).flatten(0, 1),
        offers,
    )


def _ancestors(parents: Tensor, depth: int) -> Tensor:
    """The draft nodes on the way to each node as bits, the root its own parent. [B, 1 + N] -> [B, 1 + N, W]."""
    own = torch.arange(parents.shape[1], device=parents.device).expand_as(parents)
    bits = own_bits(own, num_words(parents.shape[1]))
    for _ in range((depth - 1).bit_length()):  # twice as many nodes of the way each time
        bits = bits | bits.gather(1, parents[..., None].expand_as(bits))
        parents = parents.gather(1, parents)
    return bits


def _tries(parents: Tensor, first: Tensor, width: int) -> Tensor:
    """The children of each node, in their order, -1 behind the last. [B, N] -> [B, 1 + N, width]."""
    size, count = parents.shape
    ordered, order = parents.sort(dim=-1, stable=True)
    node = torch.arange(count, device=parents.device)
    earlier = node - torch.searchsorted(ordered, ordered)  # siblings before each
    place = torch.where(earlier < width, ordered * width + earlier, (1 + count) * width)
    table = torch.full((size, (1 + count) * width + 1), -1, device=parents.device)
    return table.scatter(1, place, first + 1 + order)[:, :-1].reshape(size, 1 + count, width)
