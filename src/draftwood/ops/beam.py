"""Trees that grow where the draft is likeliest, as a device makes them: always of one size, without the host.

Every level offers the likeliest children of its nodes, and the likeliest of those are the next level. In the end the
likeliest of all that was offered are the tree. Shapes: B sequences · k nodes of a level · C offers in all · N nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftwood.ops.choice import ranked
from draftwood.tree import BITS


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
    nodes = logits.shape[1]
    scaled = logits.float() / torch.where(temperature > 0, temperature, 1)[:, None, None]
    place = ranked(logits, into.width)
    score = scaled.gather(-1, place) - scaled.logsumexp(-1, keepdim=True)
    score = (score if above is None else score + above.scores[..., None]).nan_to_num(nan=-torch.inf).flatten(1)
    tokens = (place if known is None else known[place]).flatten(1)
    behind = torch.full_like(place[..., 0], -1) if above is None else above.offers
    start, count = into.start(level), nodes * into.width
    into.scores[:, start : start + count] = score
    into.tokens[:, start : start + count] = tokens
    into.above[:, start : start + count] = behind.repeat_interleave(into.width, 1)
    best = score.argsort(dim=-1, descending=True, stable=True)[:, : into.width]
    return Chosen(tokens.gather(1, best), score.gather(1, best), best + start, best // into.width)


def likeliest_tree(offers: Offers, roots: Tensor, nodes: int) -> Links:
    """The `nodes` likeliest of everything offered, behind `roots` [B]."""
    if roots.is_cuda:
        from draftwood.ops.cuda.beam import likeliest_tree as launch

        return launch(offers, roots, nodes)
    return likeliest_tree_reference(offers, roots, nodes)


def likeliest_tree_reference(offers: Offers, roots: Tensor, nodes: int) -> Links:
    """What it computes. At a tie the offer made first comes first, so no node comes before its parent."""
    size, count = offers.scores.shape
    order = offers.scores.argsort(dim=-1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(1, order, torch.arange(count).expand_as(order))
    kept = order[:, :nodes]
    above = offers.above.gather(1, kept)
    local = torch.where(above >= 0, rank.gather(1, above.clamp(min=0)) + 1, 0)  # [B, N]
    level = torch.where(kept < offers.width, 0, (kept - offers.width) // offers.width**2 + 1)
    first = torch.arange(size)[:, None] * (1 + nodes)
    tokens = torch.cat([roots[:, None], offers.tokens.gather(1, kept)], 1)
    parents = torch.cat([torch.full_like(first, -1), first + local], 1)
    depth = torch.cat([torch.zeros_like(first), level + 1], 1)
    links = torch.cat([torch.zeros_like(first), local], 1)
    return Links(
        tokens.view(-1),
        parents.view(-1),
        depth.view(-1),
        _ancestors(links, offers.depth).flatten(0, 1),
        _tries(links, first, offers.width).flatten(0, 1),
    )


def _ancestors(parents: Tensor, depth: int) -> Tensor:
    """The draft nodes on the way to each node as bits. [B, 1 + N] -> [B, 1 + N, W]."""
    count = parents.shape[1]
    words = torch.zeros(*parents.shape, max(1, -(-(count - 1) // BITS)), dtype=torch.int64)
    at = torch.arange(count).expand_as(parents)
    for _ in range(depth):
        place = (at - 1).clamp(min=0)
        bit = torch.where(at > 0, torch.ones_like(at) << (place % BITS), 0)
        words.scatter_(2, (place // BITS)[..., None], words.gather(2, (place // BITS)[..., None]) | bit[..., None])
        at = parents.gather(1, at)
    return words


def _tries(parents: Tensor, first: Tensor, width: int) -> Tensor:
    """The children of each node, in their order, -1 behind the last. [B, 1 + N] -> [B, 1 + N, width]."""
    size, count = parents.shape
    node = torch.arange(count)
    twins = (parents[:, :, None] == parents[:, None, :]) & (node[None, :] < node[:, None]) & (node > 0)
    earlier = twins.sum(-1)  # siblings before each
    table = torch.full((size, count, width), -1)
    row, column = torch.arange(size)[:, None], node[1:].expand(size, -1)
    table[row, parents[:, 1:], earlier[:, 1:]] = first + column
    return table
