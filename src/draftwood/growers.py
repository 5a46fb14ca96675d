"""Tree shapes. A grower decides which nodes exist and whether their tokens are chosen or drawn; it knows no network.

Whatever looks at drawn tokens to throw nodes away would bias a law that trusts their draws, so a grower that draws
only ever adds: where it grows next may depend on what it drew, what it keeps may not.

Shapes: B sequences · k frontier nodes · V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from draftwood.protocols import BatchView, Budget, FrontierModel, Randomness
from draftwood.rng import Purpose, derive
from draftwood.sampling import draft_distribution
from draftwood.tree import POINT_CHAIN, POINT_TREE, DraftLaw, Draw
from draftwood.treebuilder import TreeBuilder

MAX_NODES = 2048


@dataclass(frozen=True)
class Children:
    """One child for each of k frontier nodes, and how it was chosen."""

    tokens: Tensor  # [B, k]
    exists: Tensor  # [B, k] bool
    draw: Draw
    q: Tensor | None = None  # [B, k, V]


@dataclass(frozen=True)
class Frontier:
    """The nodes whose children are to be chosen."""

    columns: Tensor  # [B, k]
    logits: Tensor  # [B, k, V]
    view: BatchView
    rng: Randomness

    @cached_property
    def q(self) -> Tensor:
        """The draft law after each node. [B, k, V]."""
        temperature = self.view.temperature[:, None].expand_as(self.columns)
        return draft_distribution(self.logits.flatten(0, 1), temperature.reshape(-1)).view_as(self.logits)

    def pick(self, weights: Tensor, trial: int) -> Tensor:
        """A token for each node in proportion to `weights` [B, k, V]; `trial` tells its siblings apart. [B, k]."""
        rounds = derive(self.view.seeds, self.view.lengths, Purpose.DRAFT)
        keys = derive(rounds[:, None].expand_as(self.columns), self.columns, trial)
        return self.rng.pick(weights.flatten(0, 1), keys.reshape(-1)).view_as(self.columns)


class ChildPicker(Protocol):
    """How the children of a node are chosen, in the order a verifier will try them."""

    @property
    def draws(self) -> frozenset[Draw]:
        """All the ways it may choose."""
        ...

    def children(self, frontier: Frontier, width: int) -> Iterator[Children]:
        """Up to `width` children for every frontier node, one at a time."""
        ...


class Best:
    """The likeliest tokens: chosen, not drawn."""

    draws = frozenset({Draw.POINT})

    def children(self, frontier: Frontier, width: int) -> Iterator[Children]:
        """In falling order of likelihood."""
        ranked = frontier.logits.topk(min(width, frontier.logits.shape[-1]), -1).indices
        for token in ranked.unbind(-1):
            yield Children(token, torch.ones_like(token, dtype=torch.bool), Draw.POINT)


class Independent:
    """Independent draws; the same token may come twice."""

    draws = frozenset({Draw.IID})

    def children(self, frontier: Frontier, width: int) -> Iterator[Children]:
        """In the order drawn."""
        for trial in range(width):
            token = frontier.pick(frontier.q, trial)
            yield Children(token, torch.ones_like(token, dtype=torch.bool), Draw.IID, frontier.q)


class WithoutReplacement:
    """Draws that never repeat a sibling: each from what the earlier ones left of q (RSD, Sequoia)."""

    draws = frozenset({Draw.WITHOUT_REPLACEMENT})

    def children(self, frontier: Frontier, width: int) -> Iterator[Children]:
        """In the order drawn, until the support is exhausted."""
        left = frontier.q
        for trial in range(width):
            q, exists = _normalised(left)
            token = frontier.pick(q, trial)
            yield Children(token, exists, Draw.WITHOUT_REPLACEMENT, q)
            left = left.scatter(-1, token[..., None], 0.0)


class Hybrid:
    """The likeliest width - 1 tokens, and one drawn from the rest of q (Hu et al. 2025).

    The drawn one comes first: tried against the whole of p, with the chosen ones catching the residual, the plain
    walk is the optimal rule for this draw.
    """

    draws = frozenset({Draw.POINT, Draw.TAIL})

    def children(self, frontier: Frontier, width: int) -> Iterator[Children]:
        """The tail draw, then the chosen ones in falling order."""
        fixed = frontier.logits.topk(min(width - 1, frontier.logits.shape[-1]), -1).indices
        q, exists = _normalised(frontier.q.scatter(-1, fixed, 0.0))
        yield Children(frontier.pick(q, 0), exists, Draw.TAIL, q)
        for token in fixed.unbind(-1):
            yield Children(token, torch.ones_like(token, dtype=torch.bool), Draw.POINT)


def _normalised(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Rows that sum to one, and whether there was anything to share out."""
    total = weights.sum(-1, keepdim=True)
    exists = total > 0
    return weights / torch.where(exists, total, 1), exists.squeeze(-1)


def _start(view: BatchView) -> TreeBuilder:
    return TreeBuilder(torch.tensor(view.root_tokens, device=view.lengths.device))


def _limits(view: BatchView, budget: Budget) -> Tensor:
    """Draft nodes each tree may have. [B]."""
    return view.max_nodes.clamp(max=budget.max_nodes)


@dataclass(frozen=True)
class Levels:
    """A fixed number of children at every node of a level: `widths[d]` at depth d; (1, 1, 1, 1) is a chain of four."""

    widths: tuple[int, ...]
    picker: ChildPicker

    def __post_init__(self) -> None:
        if not self.widths or min(self.widths) < 1:
            raise ValueError("a tree needs at least one level, and every level at least one child a node")
        if self.max_nodes > MAX_NODES:
            raise ValueError(f"a tree of {self.max_nodes} nodes is over the limit of {MAX_NODES}")

    @property
    def law(self) -> DraftLaw:
        """A chain where no node has two children."""
        return DraftLaw(self.picker.draws, chain=max(self.widths) == 1)

    @property
    def max_nodes(self) -> int:
        """All nodes of all levels."""
        total, level = 0, 1
        for width in self.widths:
            level *= width
            total += level
        return total

    def grow(self, model: FrontierModel, view: BatchView, budget: Budget, rng: Randomness) -> TreeBuilder:
        """Level by level, until the shape, the budget or the room ends."""
        builder = _start(view)
        columns = torch.zeros_like(builder.root_tokens)[:, None]
        for depth, width in enumerate(self.widths):
            parents_alive = builder.alive.gather(1, columns) & (view.max_depth > depth)[:, None]
            room = _limits(view, budget) - builder.sizes
            if not bool((parents_alive.any(1) & (room > 0)).any()):
                break
            logits = model.extend(builder, columns) if depth else model.begin(view)[:, None]
            frontier = Frontier(columns, logits, view, rng)
            columns = self._add_children(builder, frontier, width, parents_alive, _limits(view, budget))
        return builder

    def _add_children(
        self, builder: TreeBuilder, frontier: Frontier, width: int, parents_alive: Tensor, limits: Tensor
    ) -> Tensor:
        added = []
        for child in self.picker.children(frontier, width):
            wanted = child.exists & parents_alive
            # Room is shared out by place, never by what was drawn.
            fits = wanted & (wanted.cumsum(1) <= (limits - builder.sizes)[:, None])
            if child.q is None:
                added.append(builder.add(frontier.columns, child.tokens, fits))
            else:
                added.append(builder.add_drawn(frontier.columns, child.tokens, fits, child.draw, child.q))
        return torch.cat(added, 1)


@dataclass(frozen=True)
class StaticShape:
    """A fixed tree of ranks: node (0, 2) is the third likeliest token after the likeliest one (Medusa, EAGLE-1)."""

    nodes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        known = set(self.nodes)
        if not known or len(known) != len(self.nodes) or len(known) > MAX_NODES:
            raise ValueError(f"a static shape has between 1 and {MAX_NODES} different nodes")
        for node in self.nodes:
            if not node or min(node) < 0 or (len(node) > 1 and node[:-1] not in known):
                raise ValueError(f"node {node} of the static shape has no parent in it, or a negative rank")

    @property
    def law(self) -> DraftLaw:
        """Chosen by rank."""
        return POINT_CHAIN if all(rank == 0 for node in self.nodes for rank in node) else POINT_TREE

    @property
    def max_nodes(self) -> int:
        """As many as are listed."""
        return len(self.nodes)

    def grow(self, model: FrontierModel, view: BatchView, budget: Budget, rng: Randomness) -> TreeBuilder:
        """One level of the shape after the other; siblings in falling order of likelihood."""
        builder = _start(view)
        column: dict[tuple[int, ...], int] = {(): 0}
        for depth in range(max(map(len, self.nodes))):
            level = sorted(node for node in self.nodes if len(node) == depth + 1 and node[:-1] in column)
            parents = sorted({node[:-1] for node in level})
            if not level or not bool(((view.max_depth > depth) & (_limits(view, budget) > builder.sizes)).any()):
                break
            columns = _everywhere(builder, [column[parent] for parent in parents])
            logits = model.extend(builder, columns) if depth else model.begin(view)[:, None]
            ranked = logits.topk(min(1 + max(node[-1] for node in level), logits.shape[-1]), -1).indices
            level = [node for node in level if node[-1] < ranked.shape[-1]]
            if not level:
                break
            tokens = torch.stack([ranked[:, parents.index(node[:-1]), node[-1]] for node in level], 1)
            wanted = (view.max_depth > depth)[:, None].expand_as(tokens)
            fits = wanted & (wanted.cumsum(1) <= (_limits(view, budget) - builder.sizes)[:, None])
            above = _everywhere(builder, [column[node[:-1]] for node in level])
            for node, at in zip(level, builder.add(above, tokens, fits)[0].tolist(), strict=True):
                column[node] = at
        return builder


def _everywhere(builder: TreeBuilder, columns: list[int]) -> Tensor:
    return torch.tensor(columns, device=builder.tokens.device).expand(builder.num_trees, -1)


@dataclass
class _Candidates:
    """Nodes that were scored but are not in the tree yet, and the scores of those that are."""

    builder: TreeBuilder
    view: BatchView
    scores: Tensor  # [B, C] log-probability of the way to each column
    parents: Tensor  # [B, P]
    tokens: Tensor  # [B, P]
    waiting: Tensor  # [B, P] log-probability, -inf once taken
    floor: float  # log-probability below which nobody is offered

    @classmethod
    def none(cls, builder: TreeBuilder, view: BatchView, like: Tensor, worth: float) -> _Candidates:
        empty = builder.tokens[:, :0]
        floor = math.log(worth) if worth > 0 else -math.inf
        scores = like.new_zeros(builder.num_trees, 1)
        return cls(builder, view, scores, empty, empty, like.new_zeros(empty.shape), floor)

    def offer(self, columns: Tensor, logits: Tensor, branches: int) -> None:
        """The `branches` likeliest children of the nodes in `columns` [B, k], after `logits` [B, k, V]."""
        temperature = torch.where(self.view.temperature > 0, self.view.temperature, 1)[:, None, None]
        ranked = torch.log_softmax(logits / temperature.to(logits.dtype), -1).topk(min(branches, logits.shape[-1]), -1)
        score = self.scores.gather(1, columns)[..., None] + ranked.values
        depth = self.builder.depth.gather(1, columns)
        alive = self.builder.alive.gather(1, columns) & (depth < self.view.max_depth[:, None])
        score = score.masked_fill(~alive[..., None] | (score < self.floor), float("-inf"))
        above = columns[..., None].expand_as(ranked.indices)
        self.parents = torch.cat([self.parents, above.flatten(1)], 1)
        self.tokens = torch.cat([self.tokens, ranked.indices.flatten(1)], 1)
        self.waiting = torch.cat([self.waiting, score.flatten(1)], 1)

    def admit(self, count: int, among: slice = slice(None)) -> Tensor:
        """Put the `count` likeliest waiting candidates into the tree; returns their columns. [B, count]."""
        waiting = self.waiting[:, among]
        best = waiting.topk(min(count, waiting.shape[1]), -1)
        chosen = best.indices + (among.start or 0)
        return self._insert(chosen, best.values)

    def _insert(self, chosen: Tensor, score: Tensor) -> Tensor:
        alive = score > float("-inf")
        columns = self.builder.add(self.parents.gather(1, chosen), self.tokens.gather(1, chosen), alive)
        self.scores = torch.cat([self.scores, score], 1)
        self.waiting = self.waiting.scatter(1, chosen, float("-inf"))
        return columns

    def finish(self, limits: Tensor) -> TreeBuilder:
        """Keep the likeliest nodes of all, scored or in the tree: `limits` [B] draft nodes a tree.

        A child is never likelier than its parent, and at a tie the parent comes first, so what is kept is a tree.
        """
        inside = self.scores[:, 1:].masked_fill(~self.builder.alive[:, 1:], float("-inf"))
        everything = torch.cat([inside, self.waiting], 1)
        order = everything.argsort(dim=-1, descending=True, stable=True)
        rank = torch.empty_like(order).scatter_(
            1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
        )
        keep = (rank < limits[:, None]) & (everything > float("-inf"))
        num_inside = inside.shape[1]
        root = torch.ones_like(keep[:, :1])
        self.builder.keep_only(torch.cat([root, keep[:, :num_inside]], 1))
        leaves = keep[:, num_inside:]
        most = int(leaves.sum(1).max()) if leaves.numel() else 0
        if most:
            score = self.waiting.masked_fill(~leaves, float("-inf"))
            best = score.topk(most, -1)
            self._insert(best.indices, best.values)
        return self.builder


Admission = Callable[[_Candidates, int], Tensor]  # (candidates, where the newest begin) -> columns to expand next


def _grow_ranked(
    model: FrontierModel,
    view: BatchView,
    budget: Budget,
    limits: Tensor,
    forwards: int,
    branches: int,
    admit: Admission,
) -> TreeBuilder:
    """Offer `branches` children of every frontier node, expand whom `admit` lets in, and keep the likeliest of all."""
    builder = _start(view)
    if not bool(((limits > 0) & (view.max_depth > 0)).any()):
        return builder
    logits = model.begin(view)[:, None]
    candidates = _Candidates.none(builder, view, logits, budget.worth)
    columns = torch.zeros_like(builder.root_tokens)[:, None]
    for forward in range(forwards):
        newest = candidates.waiting.shape[1]
        candidates.offer(columns, logits, branches)
        if forward + 1 == forwards or not bool((candidates.waiting > float("-inf")).any()):
            break
        columns = admit(candidates, newest)
        logits = model.extend(builder, columns)
    return candidates.finish(limits)


@dataclass(frozen=True)
class Beam:
    """EAGLE-2's tree: each level keeps its `width` likeliest nodes and offers `width` children of each; in the end the
    `nodes` likeliest of everything offered stay."""

    nodes: int
    width: int
    depth: int

    law = POINT_TREE

    def __post_init__(self) -> None:
        _check_sizes(self.nodes, self.width, self.depth)

    @property
    def max_nodes(self) -> int:
        """What is left after the last choice."""
        return self.nodes

    def grow(self, model: FrontierModel, view: BatchView, budget: Budget, rng: Randomness) -> TreeBuilder:
        """Expand level by level, then choose."""
        limits = _limits(view, budget).clamp(max=self.nodes)
        return _grow_ranked(model, view, budget, limits, self.depth, self.width, self._admit)

    def _admit(self, candidates: _Candidates, newest: int) -> Tensor:
        return candidates.admit(self.width, slice(newest, None))


@dataclass(frozen=True)
class BestFirst:
    """Grow where the draft is likeliest, at any depth: every forward expands the `width` likeliest nodes not expanded
    yet; in the end the `nodes` likeliest of all stay (SpecExec, OPT-Tree)."""

    nodes: int
    width: int
    forwards: int

    law = POINT_TREE

    def __post_init__(self) -> None:
        _check_sizes(self.nodes, self.width, self.forwards)

    @property
    def max_nodes(self) -> int:
        """What is left after the last choice."""
        return self.nodes

    def grow(self, model: FrontierModel, view: BatchView, budget: Budget, rng: Randomness) -> TreeBuilder:
        """Expand the likeliest, again and again, then choose; no node can stay that has `nodes` likelier siblings."""
        limits = _limits(view, budget).clamp(max=self.nodes)
        return _grow_ranked(model, view, budget, limits, self.forwards, self.nodes, self._admit)

    def _admit(self, candidates: _Candidates, newest: int) -> Tensor:
        return candidates.admit(self.width)


def _check_sizes(nodes: int, width: int, rounds: int) -> None:
    if not 1 <= nodes <= MAX_NODES:
        raise ValueError(f"a tree has between 1 and {MAX_NODES} draft nodes, not {nodes}")
    if width < 1 or rounds < 1:
        raise ValueError("width and depth of a tree must be at least 1")


def chain(depth: int) -> Levels:
    """The likeliest token, `depth` times."""
    return Levels((1,) * depth, Best())
