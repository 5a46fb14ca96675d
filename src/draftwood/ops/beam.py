"""Trees that grow where the draft is likeliest, as a device makes them: always of one size, without the host.

Every level offers the likeliest children of its nodes, and the likeliest of those are the next level. In the end the
likeliest of all that was offered are the tree. Shapes: B sequences · k nodes of a level · C offers in all · N nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftwood.ops.choice import ranked
from draftwood.tree import num_words, own_bits


@dataclass(frozen=True)
class Offers:
    """Every node that may become one of the tree, level by level; each is never likelier than the one above it."""

    scores: Tensor  # [B, C] float32 log-probability of the way to it
    tokens: Tensor  # [B, C] int64
    above: Tensor  # [B, C] int64 the offer it stands behind, -1: the root
    width: int  # children offered of every node, and nodes of a level
    depth: int

    @classmethod
    def room(cls, size: int, width: int, depth: int, device: torch.device) -> Offers:
        """For all levels; nothing is written yet."""
        count = width + (depth - 1) * width * width
        scores = torch.empty(size, count, dtype=torch.float32, device=device)
        tokens, above = torch.empty(2, size, count, dtype=torch.int64, device=device).unbind(0)
        return cls(scores, tokens, above, width, depth)

    @property
    def levels(self) -> Tensor:
        """How deep each offer stands, 1 behind the roots. [C]."""
        place = torch.arange(self.scores.shape[1], device=self.scores.device)
        return torch.where(place < self.width, 1, (place - self.width) // self.width**2 + 2)

    def start(self, level: int) -> int:
        """Where the offers of a level begin; level 0 stands behind the roots."""
        return 0 if level == 0 else self.width + (level - 1) * self.width**2


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
    if logits.is_cuda:
        from draftwood.ops.cuda.beam import offer as launch

        return launch(into, level, logits, temperature, known, above)
    return offer_reference(into, level, logits, temperature, known, above)


def offer_reference(
    into: Offers, level: int, logits: Tensor, temperature: Tensor, known: Tensor | None, above: Chosen | None
) -> Chosen:
    """What it computes."""
    score, tokens = scored_children(logits, into.width, temperature, known)
    score = (score if above is None else score + above.scores[..., None]).flatten(1)
    tokens = tokens.flatten(1)
    behind = torch.full_like(tokens[:, :1], -1) if above is None else above.offers
    start, count = into.start(level), score.shape[1]
    into.scores[:, start : start + count] = score
    into.tokens[:, start : start + count] = tokens
    into.above[:, start : start + count] = behind.repeat_interleave(into.width, 1)
    best = score.argsort(dim=-1, descending=True, stable=True)[:, : into.width]
    return Chosen(tokens.gather(1, best), score.gather(1, best), best + start, best // into.width)


def scored_children(
    logits: Tensor, count: int, temperature: Tensor, known: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The `count` likeliest tokens after each node and their log-probabilities; see `offer`. 2 x [B, k, count]."""
    scaled = logits.float() / torch.where(temperature > 0, temperature, 1)[:, None, None]
    place = ranked(logits, count)
    score = scaled.gather(-1, place) - scaled.logsumexp(-1, keepdim=True)
    return score.nan_to_num(nan=-torch.inf), place if known is None else known[place]


def likeliest_tree(offers: Offers, roots: Tensor, nodes: int) -> Links:
    """The `nodes` likeliest of everything offered, behind `roots` [B]."""
    if roots.is_cuda:
        from draftwood.ops.cuda.beam import likeliest_tree as launch

        return launch(offers, roots, nodes)
    return likeliest_tree_reference(offers, roots, nodes)


def likeliest_tree_reference(offers: Offers, roots: Tensor, nodes: int) -> Links:
    """What it computes."""
    levels = offers.levels.expand_as(offers.scores)
    return linked(offers.scores, offers.tokens, offers.above, levels, roots, nodes, (offers.width, offers.depth))


def linked(
    scores: Tensor, tokens: Tensor, above: Tensor, levels: Tensor, roots: Tensor, nodes: int, most: tuple[int, int]
) -> Links:
    """The `nodes` likeliest of some offers [B, C] as trees with at most so many children a node, and levels.

    At a tie the offer made first comes first, so no node comes before its parent.
    """
    size, count = scores.shape
    order = scores.argsort(dim=-1, descending=True, stable=True)
    places = torch.arange(count, device=scores.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(1, order, places)
    kept = order[:, :nodes]
    behind = above.gather(1, kept)
    local = torch.where(behind >= 0, rank.gather(1, behind.clamp(min=0)) + 1, 0)  # [B, N]
    first = torch.arange(size, device=scores.device)[:, None] * (1 + nodes)
    parents = torch.cat([torch.full_like(first, -1), first + local], 1)
    depth = torch.cat([torch.zeros_like(first), levels.gather(1, kept)], 1)
    links = torch.cat([torch.zeros_like(first), local], 1)
    return Links(
        torch.cat([roots[:, None], tokens.gather(1, kept)], 1).view(-1),
        parents.view(-1),
        depth.view(-1),
        _ancestors(links, most[1]).flatten(0, 1),
        _tries(links, first, most[0]).flatten(0, 1),
        kept,
    )


def _ancestors(parents: Tensor, depth: int) -> Tensor:
    """The draft nodes on the way to each node as bits. [B, 1 + N] -> [B, 1 + N, W]."""
    at = torch.arange(parents.shape[1], device=parents.device).expand_as(parents)
    words = num_words(parents.shape[1])
    bits = own_bits(at, words)
    for _ in range(depth - 1):
        at = parents.gather(1, at)
        bits = bits | own_bits(at, words)
    return bits


def _tries(parents: Tensor, first: Tensor, width: int) -> Tensor:
    """The children of each node, in their order, -1 behind the last. [B, 1 + N] -> [B, 1 + N, width]."""
    size, count = parents.shape
    node = torch.arange(count, device=parents.device)
    twins = (parents[:, :, None] == parents[:, None, :]) & (node[None, :] < node[:, None]) & (node > 0)
    earlier = twins.sum(-1)  # siblings before each
    place = (parents * width + earlier)[:, 1:]
    table = torch.full((size, count * width), -1, device=parents.device)
    return table.scatter(1, place, first + node[1:]).view(size, count, width)
