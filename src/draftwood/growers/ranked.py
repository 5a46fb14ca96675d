"""Trees that grow where the draft is likeliest, and keep the likeliest nodes of all.

Every forward of the network offers the likeliest children of the nodes it was asked about. Some of the offers are asked
about next; in the end the likeliest of all offers are the tree. Where a network with a cache of its own keeps a node
follows from when it was asked about it, not from the tree: `Proposal.columns`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from draftwood.cache.kv import Places
from draftwood.drafting import Front, FrontierModel, Proposal, Vocabulary
from draftwood.growers.fixed import MAX_NODES
from draftwood.ops.beam import Links, Offers, likeliest_tree, linked, offer, scored_children
from draftwood.protocols import BatchView, Randomness
from draftwood.tree import POINT_TREE, TokenTree, TreeShape, num_words, own_bits

MOST_RANKED = 2048  # offers of a tree that the device's kernels rank together


@lru_cache(maxsize=1024)
def _packed(size: int, rows: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Offsets [B + 1], owner and local index [B * rows] of trees of one size."""
    owner, local = torch.arange(size, device=device), torch.arange(rows, device=device)
    return torch.arange(size + 1, device=device) * rows, owner.repeat_interleave(rows), local.repeat(size)


@lru_cache(maxsize=1024)
def _asked_in(size: int, width: int, forward: int, words: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The columns of the nodes that forward number `forward` (from 1) is about, and their bits. [B, k], [B, k, W]."""
    columns = torch.arange(1 + (forward - 1) * width, 1 + forward * width, device=device).expand(size, -1).contiguous()
    return columns, own_bits(columns, words)


def _usable(logits: Tensor, vocabulary: Vocabulary | None, count: int) -> tuple[Tensor, Tensor | None]:
    """Logits of at least `count` tokens where there are so many, and which tokens these are (None: all)."""
    if vocabulary is None:
        return logits, None
    if logits.shape[-1] < count:
        return vocabulary.spread(logits), None
    return logits, vocabulary.tokens


def _proposal(
    links: Links, scores: Tensor, columns: Tensor | None, view: BatchView, max_depth: int, *, certain: bool
) -> Proposal:
    """Trees of linked offers. `scores` [B, N] of their nodes; not `certain`: some offers may not exist."""
    size, nodes = scores.shape
    offsets, owner, local = _packed(size, 1 + nodes, scores.device)
    shape = TreeShape(
        links.parents, offsets, owner, local, links.depth, links.ancestors, links.tries, max_depth, 1 + nodes
    )
    root = torch.nn.functional.pad
    tree, survival = TokenTree.chosen(links.tokens, shape), root(scores.exp(), (1, 0), value=1.0).view(-1)
    least = view.min_accept_prob
    if least > 0 or not certain:
        likely = survival >= least if least > 0 else survival > 0
        tree = tree.without(~likely)
    own = None if columns is None else root(columns, (1, 0)).view(-1)
    return Proposal(tree, own, survival).limited(view)


@dataclass(frozen=True)
class _Ranked:
    """What both growers have in common."""

    nodes: int
    width: int

    law = POINT_TREE

    def _check(self, rounds: int) -> None:
        if not 1 <= self.nodes <= MAX_NODES:
            raise ValueError(f"a tree has between 1 and {MAX_NODES} draft nodes, not {self.nodes}")
        if self.width < 1 or rounds < 1:
            raise ValueError("width and depth of a tree must be at least 1")

    @property
    def max_nodes(self) -> int:
        """What is left after the last choice."""
        return self.nodes

    @property
    def sizes(self) -> range:
        """Any."""
        return range(self.nodes + 1)


@dataclass(frozen=True)
class Beam(_Ranked):
    """EAGLE-2's tree: each level keeps its `width` likeliest nodes and offers `width` children of each; in the end the
    `nodes` likeliest of everything offered stay."""

    depth: int

    def __post_init__(self) -> None:
        self._check(self.depth)

    @property
    def levels(self) -> int:
        """As many as are offered."""
        return self.depth

    def depth_of(self, nodes: int) -> int:
        """The likeliest may all lie on one path."""
        return min(nodes, self.depth)

    def staged(self, nodes: int) -> int:
        """The likeliest of every level but the last, whatever is kept of them."""
        return self.width * (self.depth_of(nodes) - 1)

    def within_depth(self, deepest: int) -> Beam:
        """Fewer levels."""
        return replace(self, depth=min(self.depth, deepest))

    def grow(self, model: FrontierModel, view: BatchView, nodes: int, rng: Randomness) -> Proposal:
        """Offer level by level, then choose."""
        depth, device = self.depth_of(nodes), view.roots.device
        logits, state = model.begin(view)
        logits, known = _usable(logits, model.vocabulary(0), self.width)
        width = min(self.width, logits.shape[-1])
        if not nodes <= width + (depth - 1) * width**2 <= MOST_RANKED:
            return BestFirst(self.nodes, width, depth, depth, by_level=True).grow_from(model, view, nodes, logits, known, state)
        words = num_words(1 + width * max(depth - 1, 1))
        offers, fronts = Offers.room(view.size, width, depth, device), ()
        columns = torch.zeros(view.size, offers.scores.shape[1], dtype=torch.int64, device=device)
        bits, chosen = None, None
        for level in range(depth):
            if level:
                logits, known = _usable(logits, model.vocabulary(level), width)
            chosen = offer(offers, level, logits, view.temperature, known, chosen)
            if level + 1 == depth:
                break
            own, own_bit = _asked_in(view.size, width, level + 1, words, device)
            above = chosen.parents[..., None].expand_as(own_bit)
            bits = own_bit if bits is None else own_bit | bits.gather(1, above)
            columns = columns.scatter(1, chosen.offers, own)
            places = Places(own - 1, torch.full_like(own, level), bits.flatten(0, 1), level + 2, (level + 1) * width)
            front = Front(chosen.tokens, torch.full_like(own, level + 1), level + 1, chosen.parents, None, fronts, places)
            logits, state = model.extend(view, front, state)
            fronts += (front,)
        links = likeliest_tree(offers, view.roots, nodes)
        scores = offers.scores.gather(1, links.offers)
        return _proposal(links, scores, columns.gather(1, links.offers), view, depth, certain=True)


@dataclass(frozen=True)
class BestFirst(_Ranked):
    """Grow where the draft is likeliest, at any depth: every forward expands the `width` likeliest nodes not expanded
    yet; in the end the `nodes` likeliest of all stay (SpecExec, OPT-Tree)."""

    forwards: int
    deepest: int | None = None  # no node is deeper; None: any depth

    def __post_init__(self) -> None:
        self._check(self.forwards)
