"""Trees that grow where the draft is likeliest, and keep the likeliest nodes of all.

Every forward of the network offers the likeliest children of the nodes it was asked about. Some of the offers are asked
about next; in the end the likeliest of all offers are the tree. Where a network with a cache of its own keeps a node
follows from when it was asked about it, not from the tree: `Proposal.columns`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from draftwood.cache.kv import Places
from draftwood.drafting import Front, FrontierModel, Proposal, Vocabulary
from draftwood.growers.fixed import MAX_NODES
from draftwood.ops.beam import Chosen, Links, Offers, likeliest_tree, linked, offer, ranked_offers, scored_children
from draftwood.protocols import BatchView, Randomness
from draftwood.shape import TreeShape, num_words, own_bits
from draftwood.tree import POINT_TREE, TokenTree

LEAST = torch.finfo(torch.float32).min  # of log-probabilities: only what is impossible has less


# What follows from sizes alone is made once, and stays: captured steps read it where it was when they were captured.
@cache
def packed(size: int, rows: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Offsets [B + 1], owner and local index [B * rows] of trees of one size."""
    owner, local = torch.arange(size, device=device), torch.arange(rows, device=device)
    return torch.arange(size + 1, device=device) * rows, owner.repeat_interleave(rows), local.repeat(size)


@cache
def asked_in(size: int, width: int, forward: int, words: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The columns of the nodes that forward number `forward` (from 1) is about, and their bits. [B, k], [B, k, W]."""
    columns = torch.arange(1 + (forward - 1) * width, 1 + forward * width, device=device).expand(size, -1).contiguous()
    return columns, own_bits(columns, words)


def _enough(logits: Tensor, vocabulary: Vocabulary | None, count: int) -> tuple[Tensor, Tensor | None]:
    """Logits of at least `count` tokens where there are so many, and which tokens these are (None: all)."""
    if vocabulary is None:
        return logits, None
    if logits.shape[-1] < count:
        return vocabulary.spread(logits), None
    return logits, vocabulary.tokens


def _floor(view: BatchView) -> float:
    """The log-probability below which a node is not wanted."""
    return math.log(view.min_accept_prob) if view.min_accept_prob > 0 else -math.inf


def linked_proposal(
    links: Links, scores: Tensor, columns: Tensor, view: BatchView, max_depth: int, *, certain: bool
) -> Proposal:
    """Trees of linked offers. `scores` and `columns` [B, N] of their nodes; not `certain`: some may not exist."""
    size, nodes = scores.shape
    if view.may_look:
        certain, max_depth = bool((scores > -torch.inf).all()), int(links.depth.max())
    offsets, owner, local = packed(size, 1 + nodes, scores.device)
    shape = TreeShape(
        links.parents, offsets, owner, local, links.depth, links.ancestors, links.tries, max_depth, 1 + nodes
    )
    behind_root = torch.nn.functional.pad
    tree, survival = TokenTree.chosen(links.tokens, shape), behind_root(scores.exp(), (1, 0), value=1.0).view(-1)
    least = view.min_accept_prob
    if least > 0 or not certain:
        tree = tree.without(survival < least if least > 0 else survival <= 0)
    return Proposal(tree, behind_root(columns, (1, 0)).view(-1), survival).limited(view)


@dataclass(frozen=True)
class _Ranked:
    """What both growers have in common."""

    nodes: int
    width: int

    law = POINT_TREE
    surplus = 2

    def _check(self, forwards: int) -> None:
        if not 1 <= self.nodes <= MAX_NODES:
            raise ValueError(f"a tree has between 1 and {MAX_NODES} draft nodes, not {self.nodes}")
        if self.width < 1 or forwards < 1:
            raise ValueError("width and depth of a tree must be at least 1")

    @property
    def max_nodes(self) -> int:
        """What is left after the last choice."""
        return self.nodes

    @property
    def sizes(self) -> range:
        """Any."""
        return range(self.max_nodes + 1)


@dataclass(frozen=True)
class Beam(_Ranked):
    """EAGLE-2's tree: each level keeps its `width` likeliest nodes and offers `width` children of each; in the end the
    `nodes` likeliest of everything offered stay."""

    depth: int

    def __post_init__(self) -> None:
        self._check(self.depth)

    @property
    def max_nodes(self) -> int:
        """What is left after the last choice, or offered at all."""
        return min(self.nodes, self.width + (self.depth - 1) * self.width**2)

    @property
    def levels(self) -> int:
        """As many as are offered."""
        return self.depth

    def depth_of(self, nodes: int) -> int:
        """The likeliest may all lie on one path; a small tree is not worth a forward for every node of it."""
        return min(nodes, self.depth, 1 + nodes.bit_length())

    def staged(self, nodes: int) -> int:
        """The likeliest of every level but the last, whatever is kept of them."""
        return self.width * max(0, self.depth_of(nodes) - 1)

    def within_depth(self, deepest: int) -> Beam:
        """Fewer levels."""
        return replace(self, depth=min(self.depth, deepest))

    def grow(self, model: FrontierModel, view: BatchView, nodes: int, rng: Randomness) -> Proposal:
        """Offer level by level, then choose."""
        if not nodes:
            return Proposal.bare(view)
        depth, device = self.depth_of(nodes), view.roots.device
        logits, state = model.begin(view)
        logits, known = _enough(logits, model.vocabulary(0), self.width)
        width = min(self.width, logits.shape[-1])
        offers = Offers.room(view.size, width, depth, device, nodes)
        columns = torch.zeros(offers.tokens.shape, dtype=torch.int64, device=device)
        fronts: tuple[Front, ...] = ()
        chosen, bits = None, None
        for level in range(depth):
            if level:
                logits, known = _enough(logits, model.vocabulary(level), width)
            chosen = offer(offers, level, logits, view.temperature, known, chosen)
            if level + 1 == depth:
                break
            if view.may_look and not _goes_on(chosen, level + 1, view):
                offers.end(level)
                break
            own, own_bit = asked_in(view.size, width, level + 1, num_words(1 + width * (depth - 1)), device)
            bits = own_bit if bits is None else own_bit | bits.gather(1, chosen.parents[..., None].expand_as(own_bit))
            columns = columns.scatter(1, chosen.offers, own)
            front = _front_of_level(chosen, own, bits, fronts)
            logits, state = model.extend(view, front, state)
            fronts += (front,)
        if view.max_depth is not None:
            offers = offers.within(view.max_depth)
        links = likeliest_tree(offers, view.roots, nodes)
        certain = view.max_depth is None and offers.count >= nodes
        scores, columns = offers.scores.gather(1, links.offers), columns.gather(1, links.offers)
        return linked_proposal(links, scores, columns, view, depth, certain=certain)


def _goes_on(chosen: Chosen, level: int, view: BatchView) -> bool:
    """Whether any child of the nodes chosen at `level` could be in a tree; looks at values."""
    wanted = chosen.scores > max(_floor(view), LEAST)
    return bool((wanted if view.max_depth is None else wanted & (view.max_depth > level)[:, None]).any())


def _front_of_level(chosen: Chosen, columns: Tensor, bits: Tensor, earlier: tuple[Front, ...]) -> Front:
    """The likeliest nodes of the next level. `columns` [B, k], `bits` [B, k, W] of the columns on the way to each."""
    level = len(earlier) + 1
    position = torch.full_like(columns, level - 1)
    places = Places(columns - 1, position, bits.flatten(0, 1), level + 1, level * columns.shape[1])
    return Front(chosen.tokens, position + 1, level, chosen.parents, None, earlier, places)


@dataclass(frozen=True)
class BestFirst(_Ranked):
    """Grow where the draft is likeliest, at any depth: every forward expands the `width` likeliest nodes not expanded
    yet; in the end the `nodes` likeliest of all stay (SpecExec, OPT-Tree)."""

    forwards: int
    deepest: int | None = None  # so many tokens ahead the network can draft; None: any number

    def __post_init__(self) -> None:
        self._check(self.levels)

    @property
    def levels(self) -> int:
        """Every forward may go one deeper."""
        return self.forwards if self.deepest is None else min(self.forwards, self.deepest)

    def depth_of(self, nodes: int) -> int:
        """The likeliest may all lie on one path."""
        return min(nodes, self.levels)

    def staged(self, nodes: int) -> int:
        """All nodes that are expanded, whatever is kept of them."""
        return min(self.width, nodes) * max(0, self._forwards(nodes) - 1)

    def _forwards(self, nodes: int) -> int:
        """As many as can matter: each makes sure of one more of the likeliest nodes."""
        return 1 if self.deepest == 1 else min(nodes, self.forwards)

    def within_depth(self, deepest: int) -> BestFirst:
        """As many forwards, but none about nodes so deep."""
        return replace(self, deepest=deepest if self.deepest is None else min(self.deepest, deepest))

    def grow(self, model: FrontierModel, view: BatchView, nodes: int, rng: Randomness) -> Proposal:
        """Expand the likeliest, again and again."""
        if not nodes:
            return Proposal.bare(view)
        room = self._room(view, nodes)
        logits, state = model.begin(view)
        above, pool = _Above.roots(view, room), _Pool.empty(view.size, nodes, view.roots.device)
        asked = _Asked.nothing(view, min(self.width, nodes), num_words(1 + self.staged(nodes)))
        pool = pool.with_children(above, logits, view, model.vocabulary(0))
        for _ in range(1, self._forwards(nodes)):
            wanted = pool.unexpanded(room, _floor(view))
            if view.may_look and not bool(wanted.any()):
                break
            above, pool, asked = asked.about(pool, wanted, self.deepest)
            front = asked.fronts[-1]
            logits, state = model.extend(view, front, state)
            pool = pool.with_children(above, logits, view, model.vocabulary(front.level))
        links = pool.linked(view, self.depth_of(nodes))
        return linked_proposal(links, pool.scores, pool.columns, view, self.depth_of(nodes), certain=False)

    def _room(self, view: BatchView, nodes: int) -> Tensor:
        """Levels that have room. [B, 1]."""
        most = nodes if self.deepest is None else min(nodes, self.deepest)
        if view.max_depth is None:
            return torch.full_like(view.lengths, most)[:, None]
        return view.max_depth.clamp(max=most)[:, None]


@dataclass(frozen=True)
class _Above:
    """Nodes whose children are offered."""

    local: Tensor  # [B, k] their local index in the tree
    scores: Tensor  # [B, k] log-probability of the way to each, -inf: it may have no children
    levels: Tensor  # [B, k]

    @classmethod
    def roots(cls, view: BatchView, room: Tensor) -> _Above:
        """The roots, where there is any room."""
        zero = torch.zeros_like(room)
        return cls(zero, torch.zeros_like(room, dtype=torch.float32).masked_fill(room < 1, -torch.inf), zero)


@dataclass(frozen=True)
class _Pool:
    """The N likeliest nodes offered so far, likeliest first, so that parents come before children; impossible ones fill
    it up. What has fallen out can never be in the tree, and neither can its children: they are no likelier.
    """

    tokens: Tensor  # [B, N] int64
    scores: Tensor  # [B, N] float32 log-probability of the way to each, -inf: impossible
    parents: Tensor  # [B, N] int64 local index in the tree: 0 the root, 1 the first of the pool, …
    levels: Tensor  # [B, N] int64
    columns: Tensor  # [B, N] int64 where a network keeps each, 0: it has not been expanded

    @classmethod
    def empty(cls, size: int, nodes: int, device: torch.device) -> _Pool:
        """Nothing has been offered."""
        none = torch.zeros(size, nodes, dtype=torch.int64, device=device)
        return cls(none, torch.full_like(none, -torch.inf, dtype=torch.float32), none, none + 1, none)

    def with_children(self, above: _Above, logits: Tensor, view: BatchView, vocabulary: Vocabulary | None) -> _Pool:
        """Offer children of nodes [B, k], whose logits these are [B, k, R]; no more of each than the pool has room for.

        At a tie the node offered first comes first.
        """
        nodes = self.tokens.shape[1]
        known = None if vocabulary is None else vocabulary.tokens
        scores, tokens = scored_children(logits, min(nodes, logits.shape[-1]), view.temperature, known)
        scores = torch.cat([self.scores, (scores + above.scores[..., None]).flatten(1)], 1)
        children = [part.expand_as(tokens) for part in (above.local[..., None], above.levels[..., None] + 1)]
        new = torch.stack([tokens, *children, torch.zeros_like(tokens)], 1).flatten(2)
        own = torch.stack([self.tokens, self.parents, self.levels, self.columns], 1)
        ranks, place = ranked_offers(scores)
        kept = ranks[:, :nodes]
        tokens, parents, levels, columns = (
            torch.cat([own, new], 2).gather(2, kept[:, None].expand(-1, own.shape[1], -1)).unbind(1)
        )
        parents = torch.nn.functional.pad(place + 1, (1, 0)).gather(1, parents)  # the root stays where it is
        return _Pool(tokens, scores.gather(1, kept), parents, levels, columns)

    def unexpanded(self, room: Tensor, floor: float) -> Tensor:
        """Nodes whose children could be in the tree. [B, N] bool."""
        return (self.columns == 0) & (self.levels < room) & (self.scores > max(floor, LEAST))

    def linked(self, view: BatchView, deepest: int) -> Links:
        """The pool as trees; their tables are as small as values tell, if these may be looked at."""
        children = self.tokens.shape[1]
        if view.may_look:
            counts = torch.zeros(view.size, 1 + children, dtype=torch.int64)
            counts.scatter_add_(1, self.parents, (self.scores > -torch.inf).long())
            children, deepest = max(1, int(counts.max())), int(self.levels.max())
        every = torch.arange(self.tokens.shape[1], device=view.roots.device).expand_as(self.tokens)
        return linked(view.roots, self.tokens, self.parents, self.levels, every, children, deepest)


@dataclass(frozen=True)
class _Asked:
    """What a network was asked about so far, k nodes at a time; a node's column is 1 plus its number among them."""

    fronts: tuple[Front, ...]
    bits: Tensor  # [B, 1 + k * forwards, W] the columns on the way to each, the root first
    width: int  # k

    @classmethod
    def nothing(cls, view: BatchView, width: int, words: int) -> _Asked:
        """Only the roots."""
        return cls((), view.lengths.new_zeros(view.size, 1, words), width)

    def about(self, pool: _Pool, wanted: Tensor, deepest: int | None) -> tuple[_Above, _Pool, _Asked]:
        """The likeliest k of the nodes `wanted` [B, N]; where there are fewer, others that get no children."""
        number, (size, _, words) = len(self.fronts) + 1, self.bits.shape
        place = torch.argsort(~wanted, dim=1, stable=True)[:, : self.width]
        own, own_bit = asked_in(size, self.width, number, words, place.device)
        there, tokens, levels = wanted.gather(1, place), pool.tokens.gather(1, place), pool.levels.gather(1, place)
        parent = torch.nn.functional.pad(pool.columns, (1, 0)).gather(1, pool.parents.gather(1, place))
        bits = own_bit | self.bits.gather(1, parent[..., None].expand_as(own_bit))
        depth = levels if deepest is None else levels.clamp(max=deepest - 1)
        places = Places(own - 1, depth - 1, bits.flatten(0, 1), number + 1, number * self.width)
        if number == 1:
            front = Front(tokens, depth, 1, parent, None, (), places)
        else:
            forward, row = (parent + self.width - 1) // self.width, (parent - 1).clamp(min=0) % self.width
            front = Front(tokens, depth, None, row, forward, self.fronts, places)
        columns = pool.columns.scatter(1, place, torch.where(there, own, pool.columns.gather(1, place)))
        scores = pool.scores.gather(1, place).masked_fill(~there, -torch.inf)
        asked = _Asked((*self.fronts, front), torch.cat([self.bits, bits], 1), self.width)
        return _Above(place + 1, scores, levels), replace(pool, columns=columns), asked
