"""`layer`: one layer of the tree is verified at a time, as a single problem of transport, from the deepest up.

Nodes carry scores w with w(root) = 1. If for every tree (i) the scores S of a layer sum to at most one, and (ii) the
score of a child, averaged over its draw, is at most w p of its token, then with the residuals R = w p - average and r
their mass in a layer, this is lossless: from the deepest layer up, stop in it with probability r / (r + 1 - S), at a
node in proportion to its residual mass, and draw the next token from R there. Expected acceptance is the sum of all S.

How scores are shared out among children is a sibling rule's business (the family of layer verification, Cha et al.
2026, and UniVer, Weng et al. 2026):
- proportional: each node of a layer gets the layer's whole mass S as its problem, and its share w / S of the outcome;
- pooled: all draws of a layer are tried one after the other against one common target on (node, token).
On one path both are block verification.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from draftwood.tree import TokenTree
from draftwood.verifiers.law import INDEPENDENT_DRAWS, NodeLaw, Odds, Scope, mass_of, ratio, scaled, value_at
from draftwood.verifiers.rules import SiblingRule, spend

Left = Callable[[Tensor], Tensor]  # nodes [k] -> residual rows [k, V]


@dataclass(frozen=True)
class Scores:
    """What a layer law needs to know of every node."""

    weight: Tensor  # [M] w
    residual: Tensor  # [M] the mass of R


class LayerLaw(NodeLaw):
    """The sampler all layer laws share; they differ in how scores are assigned."""

    def odds(self, tree: TokenTree, p: Tensor) -> Odds:
        """Scores from the root down, chances from the deepest layer up."""
        scores, left = self.scores(tree, p)
        stop = torch.zeros_like(scores.weight)
        passed = torch.ones(tree.num_trees, dtype=torch.float64, device=p.device)  # no deeper layer was stopped in
        for depth in reversed(range(tree.max_depth + 1)):
            nodes = tree.levels[depth]
            total, spare = sum_by_tree(tree, nodes, scores.residual), 1 - sum_by_tree(tree, nodes, scores.weight)
            chance = total / (total + spare.clamp(min=0)) if depth else torch.ones_like(total)
            chance = torch.where(total > 0, chance, 0 if depth else 1)
            share = ratio(scores.residual[nodes], total[tree.owner[nodes]])
            stop[nodes] = (passed * chance)[tree.owner[nodes]] * share
            passed = passed * (1 - chance)
        return Odds(stop, left)

    def scores(self, tree: TokenTree, p: Tensor) -> tuple[Scores, Left]:
        """Scores of all nodes, and what gives the residual at some of them."""
        raise NotImplementedError


class Proportional(LayerLaw):
    """A layer at a time, every node with its share of the layer's mass."""

    def __init__(self, name: str, rule: SiblingRule) -> None:
        self.name = name
        self.rule = rule
        self.scope = rule.scope

    def scores(self, tree: TokenTree, p: Tensor) -> tuple[Scores, Left]:
        """Each node's children share what the rule gives them of the layer's mass, scaled to the node's part of it."""
        weight = root_weights(tree, p)
        residual, layer_mass = torch.zeros_like(weight), torch.ones_like(weight)
        for nodes in tree.levels:
            mass = sum_by_tree(tree, nodes, weight)[tree.owner[nodes]].clamp(max=1)
            layer_mass[nodes] = mass
            weighed = self.rule.weigh(tree, nodes, scaled(p[nodes], mass), 1 - mass)
            share = torch.where(mass > 0, weight[nodes] / torch.where(mass > 0, mass, 1), 0)
            tries = tree.tries[nodes][:, : weighed.taken.shape[1]]
            weight.index_add_(0, tries[tries >= 0], (share[:, None] * weighed.taken)[tries >= 0])
            residual[nodes] = share * weighed.mass

        def left(nodes: Tensor) -> Tensor:
            mass = layer_mass[nodes]
            return self.rule.weigh(tree, nodes, scaled(p[nodes], mass), 1 - mass).left

        return Scores(weight, residual), left


class Pooled(LayerLaw):
    """A layer at a time, all its draws against one common target."""

    scope = Scope(INDEPENDENT_DRAWS)

    def __init__(self, name: str) -> None:
        self.name = name

    def scores(self, tree: TokenTree, p: Tensor) -> tuple[Scores, Left]:
        """Every draw in turn takes what it can of the layer's mass that survived the draws before it."""
        weight = root_weights(tree, p)
        residual = torch.zeros_like(weight)
        survived = torch.zeros(tree.tries.shape, dtype=torch.float64, device=p.device)  # before each draw
        for nodes in tree.levels:
            residual[nodes] = self._share_out(tree, p, nodes, weight, survived)

        def left(nodes: Tensor) -> Tensor:
            rows = scaled(p[nodes], weight[nodes])
            for child, survives in zip(tree.tries[nodes].unbind(1), survived[nodes].unbind(1), strict=True):
                rows = spend(tree, child.clamp(min=0), rows, survives)
            return rows

        return Scores(weight, residual), left

    def _share_out(self, tree: TokenTree, p: Tensor, nodes: Tensor, weight: Tensor, survived: Tensor) -> Tensor:
        """Set the weights of the children of a whole layer; returns what is left at each of its `nodes`. [n]."""
        rows = scaled(p[nodes], weight[nodes])
        mass = mass_of(rows)
        owner = tree.owner[nodes]
        dead = 1 - _sum_by(owner, weight[nodes], tree.num_trees)
        reach = torch.ones_like(dead)
        for row, place in _in_turn(tree, nodes):
            child, whose = tree.tries[nodes[row], place], owner[row]
            survives = (_sum_by(owner, mass, tree.num_trees) + dead)[whose].clamp(min=0)
            offered = survives * tree.drawn_probability(child, torch.float64)
            chance = ratio(value_at(rows[row], tree.tokens[child]), offered).clamp(max=1)
            weight[child] += reach[whose] * chance
            reach[whose] *= 1 - chance
            rows[row] = spend(tree, child, rows[row], survives)
            mass[row] = mass_of(rows[row])
            survived[nodes[row], place] = survives
        return mass


def _in_turn(tree: TokenTree, nodes: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The draws behind a layer's `nodes`, one a tree at a time: (which node, which of its draws) of each turn."""
    row, place = (tree.tries[nodes] >= 0).nonzero(as_tuple=True)
    whose = tree.owner[nodes[row]]
    counts = torch.bincount(whose, minlength=tree.num_trees)
    turn = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[whose]
    return [(row[turn == i], place[turn == i]) for i in range(int(counts.max()) if len(row) else 0)]


def root_weights(tree: TokenTree, p: Tensor) -> Tensor:
    """One at the roots, nothing elsewhere. [M] float64."""
    return (tree.parents < 0).to(device=p.device, dtype=torch.float64)


def sum_by_tree(tree: TokenTree, nodes: Tensor, values: Tensor) -> Tensor:
    """The sum of `values` [M] over those of `nodes` that belong to each tree. [B]."""
    return _sum_by(tree.owner[nodes], values[nodes], tree.num_trees)


def _sum_by(owner: Tensor, values: Tensor, count: int) -> Tensor:
    return torch.zeros(count, dtype=values.dtype, device=values.device).index_add_(0, owner, values)
