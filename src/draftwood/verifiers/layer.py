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

from draftwood.ops.residual import law_at
from draftwood.ops.verdict import kseq_layers, layers, pooled_layers
from draftwood.protocols import BatchView
from draftwood.tree import DraftLaw, TokenTree, Verdict
from draftwood.verifiers.law import NodeLaw, Odds, ratio
from draftwood.verifiers.rules import KSeq, Rejection, SiblingRule, draws_behind, residual

Left = Callable[[Tensor], Tensor]  # nodes [k] -> residual rows [k, V]


class LayerLaw(NodeLaw):
    """The sweep all layer laws share; they differ in how scores are assigned."""

    def refuses(self, law: DraftLaw) -> str | None:
        """A layer is judged as a whole, so what is in it may not follow from what was drawn."""
        if law.grown:
            return "it judges whole layers, and where this drafter draws follows from what it drew before"
        return super().refuses(law)

    def odds(self, tree: TokenTree, p: Tensor) -> Odds:
        """Scores from the root down, chances from the deepest layer up."""
        ends, left = self.scores(tree, p)
        ends = ends.masked_fill(tree.tokens < 0, 0)
        goes_up = (1 - layer_sums(tree, ends)).clamp(min=0)
        comes = torch.cat([goes_up[:, 1:], torch.ones_like(goes_up[:, :1])], 1).flip(1).cumprod(1).flip(1)
        return Odds(comes[tree.owner, tree.depth] * ends, left)

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

        What comes back up to a layer was rejected behind one of its nodes, in proportion to share and rest.
        """
        weight, layer_mass = root_weights(tree, p), torch.ones_like(root_weights(tree, p))
        comes, taken = torch.zeros_like(weight), torch.zeros_like(weight)
        for nodes in tree.levels:
            mass = self._layer_mass(tree, nodes, weight)
            layer_mass[nodes] = mass
            weighed = self.rule.weigh(tree, p, nodes, mass)
            share = torch.where(mass > 0, weight[nodes] / torch.where(mass > 0, mass, 1), 0)
            weight.index_add_(0, tree.tries[nodes].flatten() % len(weight), (share[:, None] * weighed.taken).flatten())
            comes[nodes] = share * weighed.rest
            taken[nodes] = ratio(weighed.mass, weighed.mass + (1 - mass))

        def left(nodes: Tensor) -> Tensor:
            return self.rule.weigh(tree, p, nodes, layer_mass[nodes]).left()

        return ratio(comes[:-1], of_layer(tree, comes[:-1])) * taken[:-1], left

    def _layer_mass(self, tree: TokenTree, nodes: Tensor, weight: Tensor) -> Tensor:
        """What all nodes of the layers of `nodes` [n] are given together. [n]."""
        return of_layer(tree, weight[:-1])[nodes].clamp(max=1)


class Pooled(LayerLaw):
    """A layer at a time, all its draws against one common target."""

    def __init__(self, name: str) -> None:
        self.name = name

    def at_once(self, tree: TokenTree, p: Tensor, view: BatchView) -> Verdict | None:
        """There are kernels for it."""
        return pooled_layers(tree, p, view.seeds, view.lengths)

    def scores(self, tree: TokenTree, p: Tensor) -> tuple[Tensor, Left]:
        """Every draw in turn takes what it can of the layer's mass that survived the draws before it."""
        shared = _Shared.of(tree, p)
        for turn in tree.shape.turns:
            shared.take(tree, p, turn)
        weight = shared.weight[:-1]
        mass = torch.where(tree.tries[:, 0] >= 0, shared.mass[:-1], weight)
        spare = (1 - of_layer(tree, weight)).clamp(min=0)

        def left(nodes: Tensor) -> Tensor:
            draws = draws_behind(tree, nodes)
            return residual(tree, p, nodes, weight[nodes], draws, shared.scales[nodes]).written_out()

        return ratio(mass, of_layer(tree, mass) + spare), left


@dataclass(frozen=True)
class _Shared:
    """What the draws so far were given, and what they left. The last row is of no node."""

    weight: Tensor  # [M + 1] float64
    mass: Tensor  # [M + 1] float64: what is left at nodes some draw was tried behind
    values: Tensor  # [M + 1, C] float64: what is left there of the tokens drawn
    scales: Tensor  # [M + 1, C] float64: what survived of the layer before each draw
    spent: Tensor  # [B, D + 1] float64: what draws took of each layer
    reach: Tensor  # [B, D + 1] float64: that all draws behind a layer were rejected

    @classmethod
    def of(cls, tree: TokenTree, p: Tensor) -> _Shared:
        """Before the first draw."""
        weight = root_weights(tree, p)
        table = torch.zeros(len(weight), tree.tries.shape[1], dtype=torch.float64, device=p.device)
        spent = torch.zeros(tree.num_trees, tree.max_depth + 1, dtype=torch.float64, device=p.device)
        return cls(weight, torch.zeros_like(weight), table, table.clone(), spent, torch.ones_like(spent))

    def take(self, tree: TokenTree, p: Tensor, turn: Tensor) -> None:
        """One draw of each tree, by its place in the flattened tries [n]; nothing where there is none."""
        width = tree.tries.shape[1]
        child = torch.where(turn >= 0, tree.tries.view(-1)[turn], -1)
        node, place, there = turn.clamp(min=0) // width, turn.clamp(min=0) % width, child >= 0
        written = torch.where(there, node, -1)
        layer, draws = (tree.owner[node], tree.depth[node]), draws_behind(tree, node)
        own, here = self.weight[node], place[:, None]
        first = place == 0
        mass = torch.where(first, own, self.mass[node])
        values = torch.where(first[:, None], own[:, None] * p[node[:, None], draws.tokens].double(), self.values[node])
        survives = torch.where(there, (1 - self.spent[layer]).clamp(min=0), 0)
        chance = ratio(values.gather(1, here)[:, 0], survives * draws.chance.gather(1, here)[:, 0]).clamp(max=1)
        chance = torch.where(there, chance, 0)
        self.weight[child] += self.reach[layer] * chance
        self.scales[written, place] = survives
        law = law_at(tree.q, tree.q_row[child], tree.tokens[child], draws.tokens)
        self.values[written] = (values - survives[:, None] * law).clamp(min=0)
        self.mass[written] = residual(tree, p, node, own, draws, self.scales[node]).mass()
        self.reach[layer] *= 1 - chance
        self.spent[layer] += torch.where(there, mass - self.mass[node], 0)


def root_weights(tree: TokenTree, p: Tensor) -> Tensor:
    """One at the roots, nothing elsewhere; the last one is of no node. [M + 1] float64."""
    weight = torch.zeros(tree.num_nodes + 1, dtype=torch.float64, device=p.device)
    return weight.index_fill_(0, tree.offsets[:-1], 1.0)  # an assignment would fetch the number from the host


def layer_sums(tree: TokenTree, values: Tensor) -> Tensor:
    """The sums of `values` [M] over the nodes of each layer of each tree. [B, D + 1]."""
    zeros = torch.zeros(tree.num_trees * (tree.max_depth + 1), dtype=values.dtype, device=values.device)
    sums = zeros.index_add_(0, tree.owner * (tree.max_depth + 1) + tree.depth, values)
    return sums.view(tree.num_trees, tree.max_depth + 1)


def of_layer(tree: TokenTree, values: Tensor) -> Tensor:
    """The sum of `values` [M] over the layer of each node. [M]."""
    return layer_sums(tree, values)[tree.owner, tree.depth]
