"""Trees that grow where the draft is likeliest, and keep the likeliest nodes of all."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from draftwood.growers.levels import MAX_NODES, limits_of, start
from draftwood.protocols import BatchView, Budget, FrontierModel, Randomness
from draftwood.tree import POINT_TREE
from draftwood.treebuilder import TreeBuilder


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
    builder = start(view)
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

    @property
    def num_offers(self) -> int:
        """What it is chosen from."""
        return self.width + (self.depth - 1) * self.width**2

    def grow(self, model: FrontierModel, view: BatchView, budget: Budget, rng: Randomness) -> TreeBuilder:
        """Expand level by level, then choose."""
        limits = limits_of(view, budget).clamp(max=self.nodes)
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
        limits = limits_of(view, budget).clamp(max=self.nodes)
        return _grow_ranked(model, view, budget, limits, self.forwards, self.nodes, self._admit)

    def _admit(self, candidates: _Candidates, newest: int) -> Tensor:
        return candidates.admit(self.width)


def _check_sizes(nodes: int, width: int, rounds: int) -> None:
    if not 1 <= nodes <= MAX_NODES:
        raise ValueError(f"a tree has between 1 and {MAX_NODES} draft nodes, not {nodes}")
    if width < 1 or rounds < 1:
        raise ValueError("width and depth of a tree must be at least 1")
