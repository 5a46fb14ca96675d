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

import torch
from torch import Tensor

from draftwood.ops.residual import law_at
from draftwood.ops.verdict import kseq_layers, layers, pooled_layers
from draftwood.protocols import BatchView
from draftwood.tree import TokenTree, Turn, Verdict
from draftwood.verifiers.law import NodeLaw, Odds, ratio
from draftwood.verifiers.rules import KSeq, Rejection, SiblingRule, draws_behind, residual

Left = Callable[[Tensor], Tensor]  # nodes [k] -> residual rows [k, V]


class LayerLaw(NodeLaw):
    """The sweep all layer laws share; they differ in how scores are assigned."""

    def odds(self, tree: TokenTree, p: Tensor) -> Odds:
        """Scores from the root down, chances from the deepest layer up."""
        ends, left = self.scores(tree, p)
        stop = torch.zeros_like(ends)
        passed = torch.ones(tree.num_trees, dtype=torch.float64, device=p.device)  # no deeper layer was stopped in
        for nodes in reversed(tree.levels):
            stop[nodes] = passed[tree.owner[nodes]] * ends[nodes]
            passed = passed * (1 - sum_by_tree(tree, nodes, ends)).clamp(min=0)
        return Odds(stop, left)

    def scores(self, tree: TokenTree, p: Tensor) -> tuple[Tensor, Left]:
        """The chance to end at each node once its layer is reached [M], and what gives the residual at some nodes."""
        raise NotImplementedError


class Proportional(LayerLaw):
    """A layer at a time, every node with its share of the layer's mass."""

    def __init__(self, name: str, rule: SiblingRule) -> None:
        self.name = name
        self.rule = rule
        self.scope = rule.scope

    def at_once(self, tree: TokenTree, p: Tensor, view: BatchView) -> Verdict | None:
        """There are kernels for the two rules of production."""
        kernel = {Rejection: layers, KSeq: kseq_layers}.get(type(self.rule))
        return None if kernel is None else kernel(tree, p, view.seeds, view.lengths)

    def scores(self, tree: TokenTree, p: Tensor) -> tuple[Tensor, Left]:
        """Each node's children share what the rule gives them of the layer's mass, scaled to the node's part of it.

        Who comes back up to a layer was rejected behind one of its nodes, in proportion to share and rest.
        """
        weight = root_weights(tree, p)
        ends, layer_mass = torch.zeros_like(weight), torch.ones_like(weight)
        for nodes in tree.levels:
            owner = tree.owner[nodes]
            mass = sum_by_tree(tree, nodes, weight)[owner].clamp(max=1)
            layer_mass[nodes] = mass
            weighed = self.rule.weigh(tree, p, nodes, mass)
            share = torch.where(mass > 0, weight[nodes] / torch.where(mass > 0, mass, 1), 0)
            weight.index_add_(0, tree.tries[nodes].flatten() % len(weight), (share[:, None] * weighed.taken).flatten())
            comes = share * weighed.rest
            comes = ratio(comes, _sum_by(owner, comes, tree.num_trees)[owner])
            ends[nodes] = comes * ratio(weighed.mass, weighed.mass + (1 - mass))

        def left(nodes: Tensor) -> Tensor:
            return self.rule.weigh(tree, p, nodes, layer_mass[nodes]).left()

        return ends[:-1], left


class Pooled(LayerLaw):
    """A layer at a time, all its draws against one common target."""

    def __init__(self, name: str) -> None:
        self.name = name

    def at_once(self, tree: TokenTree, p: Tensor, view: BatchView) -> Verdict | None:
        """There are kernels for it."""
        return pooled_layers(tree, p, view.seeds, view.lengths)

    def scores(self, tree: TokenTree, p: Tensor) -> tuple[Tensor, Left]:
        """Every draw in turn takes what it can of the layer's mass that survived the draws before it."""
        weight = root_weights(tree, p)
        ends = torch.zeros_like(weight)
        survived = torch.zeros(tree.tries.shape, dtype=torch.float64, device=p.device)  # before each draw
        for nodes, turns in zip(tree.levels, tree.turns, strict=True):
            mass, owner = self._share_out(tree, p, nodes, turns, weight, survived), tree.owner[nodes]
            spare = (1 - sum_by_tree(tree, nodes, weight)).clamp(min=0)
            ends[nodes] = ratio(mass, (_sum_by(owner, mass, tree.num_trees) + spare)[owner])

        def left(nodes: Tensor) -> Tensor:
            draws = draws_behind(tree, nodes)
            return residual(tree, p, nodes, weight[nodes], draws, survived[nodes]).written_out()

        return ends[:-1], left

    def _share_out(
        self, tree: TokenTree, p: Tensor, nodes: Tensor, turns: list[Turn], weight: Tensor, survived: Tensor
    ) -> Tensor:
        """Set the weights of the children of a whole layer; returns what is left at each of its `nodes`. [n]."""
        draws, own, owner = draws_behind(tree, nodes), weight[nodes], tree.owner[nodes]
        values, mass = own[:, None] * p[nodes[:, None], draws.tokens].double(), own.clone()
        dead = 1 - _sum_by(owner, own, tree.num_trees)
        reach = torch.ones_like(dead)
        for row, place in turns:
            whose, child = owner[row], draws.child[row, place]
            survives = (_sum_by(owner, mass, tree.num_trees) + dead)[whose].clamp(min=0)
            chance = ratio(values[row, place], survives * draws.chance[row, place]).clamp(max=1)
            weight[child] += reach[whose] * chance
            reach[whose] *= 1 - chance
            survived[nodes[row], place] = survives
            trying = draws_behind(tree, nodes[row])
            law = law_at(tree.q, tree.q_row[child], tree.tokens[child], trying.tokens)
            values[row] = (values[row] - survives[:, None] * law).clamp(min=0)
            mass[row] = residual(tree, p, nodes[row], own[row], trying, survived[nodes[row]]).mass()
        return mass


def root_weights(tree: TokenTree, p: Tensor) -> Tensor:
    """One at the roots, nothing elsewhere; the last one is nobody's. [M + 1] float64."""
    weight = torch.zeros(tree.num_nodes + 1, dtype=torch.float64, device=p.device)
    weight.index_fill_(0, tree.offsets[:-1], 1.0)  # an assignment would fetch the number from the host
    return weight


def sum_by_tree(tree: TokenTree, nodes: Tensor, values: Tensor) -> Tensor:
    """The sum of `values` [M] over those of `nodes` that belong to each tree. [B]."""
    return _sum_by(tree.owner[nodes], values[nodes], tree.num_trees)


def _sum_by(owner: Tensor, values: Tensor, count: int) -> Tensor:
    return torch.zeros(count, dtype=values.dtype, device=values.device).index_add_(0, owner, values)
