"""`block` and `traversal`: whole paths are weighed, not single tokens.

A path carries the weight w that the target still affords it: w_0 = 1, and w_i = min(1, w_{i-1} p(x_i) / q(x_i)) for
the first child. It may end after any of its tokens: node i is taken with probability S_i / (S_i + 1 - w_i), S_i the
mass of the residual (w_i p - q)+, and the *deepest* node taken counts: a rejection in the middle ends nothing.

On one path this is block verification, the best any lossless law can do (Sun et al. 2024). On a tree it is traversal
verification (Weng et al. 2025): when the whole subtree of a child is rejected, the parent's target becomes the
residual, its weight S / (S + 1 - w), and the next child is tried. A subtree entered with weight w fails with
probability 1 - w whatever its shape, so nothing is learnt about later siblings, and the law is lossless for every tree
that only grows.
The weights depend on the tokens alone, not on the coins; so all of them are computed first, level by level, and the
depth-first search is left to arithmetic.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from draftwood.ops.verdict import search
from draftwood.protocols import BatchView
from draftwood.shape import packed_left
from draftwood.tree import Draw, TokenTree, Verdict
from draftwood.verifiers.law import NodeLaw, Odds, Scope, by_tree, ratio
from draftwood.verifiers.rules import Rejection


class Traversal(NodeLaw):
    """Keep the first node that is taken in a depth-first search from the leaves up."""

    name = "traversal"

    def odds(self, tree: TokenTree, p: Tensor) -> Odds:
        """The weight of every node, then the order of search."""
        tree = distinct(tree)
        weight, taken = self._weights(tree, p)
        # The root has nothing above it to fall back to; an absent node is never taken.
        taken = torch.where(tree.parents < 0, 1, taken).masked_fill(tree.tokens < 0, 0)
        return Odds(self._first_taken(tree, taken), lambda nodes: self._left(tree, p, nodes, weight[nodes]))

    def at_once(self, tree: TokenTree, p: Tensor, view: BatchView) -> Verdict | None:
        """There are kernels for it."""
        return search(tree, p, view.seeds, view.lengths)

    def _weights(self, tree: TokenTree, p: Tensor) -> tuple[Tensor, Tensor]:
        """Of every node: the weight it is entered with, and the chance it is taken if no child is. [M], [M]."""
        weight = torch.ones(tree.num_nodes + 1, dtype=torch.float64, device=p.device)  # the last one: no node
        taken = torch.ones_like(weight)
        for nodes in tree.levels:
            weight[tree.tries[nodes]], taken[nodes] = _weigh(tree, p, nodes, weight[nodes])
        return weight[:-1], taken[:-1]

    def _first_taken(self, tree: TokenTree, taken: Tensor) -> Tensor:
        """The chance that each node is the first taken, children before parents, siblings in order. [M]."""
        fails = taken.new_ones(tree.num_nodes + 1)  # the whole subtree, once entered
        enters, below = torch.ones_like(fails), torch.ones_like(fails)
        for nodes in reversed(tree.levels):
            below[nodes] = _children(tree, nodes, fails).prod(1)
            fails[nodes] = (1 - taken[nodes]) * below[nodes]
        for nodes in tree.levels[:-1]:
            before = _children(tree, nodes, fails).cumprod(1)
            before = torch.cat([torch.ones_like(before[:, :1]), before[:, :-1]], 1)
            enters[tree.tries[nodes]] = before * enters[nodes][:, None]
        return (enters * below)[:-1] * taken

    def _left(self, tree: TokenTree, p: Tensor, nodes: Tensor, weight: Tensor) -> Tensor:
        return Rejection().weigh(tree, p, nodes, weight).left()


class Block(Traversal):
    """Verify one path as a whole."""

    name = "block"
    scope = Scope(chain=True)

    def _weights(self, tree: TokenTree, p: Tensor) -> tuple[Tensor, Tensor]:
        """On one path the weights are a scan, log w = s - the largest s so far, and the rows are needed only once."""
        index = torch.arange(tree.num_nodes, device=p.device)
        guessed = (tree.parents >= 0) & (tree.tokens >= 0)
        gain = p[tree.parents.clamp(min=0), tree.tokens].double() / tree.drawn_probability(index, torch.float64)
        s = by_tree(tree, torch.where(guessed, gain, 1).log()).cumsum(1)
        weight = (s - s.cummax(1).values).exp()[tree.owner, tree.local]
        return weight, _weigh(tree, p, index, weight)[1]

    def _first_taken(self, tree: TokenTree, taken: Tensor) -> Tensor:
        """From the end of the path."""
        missed = (1 - by_tree(tree, taken)).flip(1).cumprod(1).flip(1)
        deeper = torch.cat([missed[:, 1:], torch.ones_like(missed[:, :1])], 1)
        return taken * deeper[tree.owner, tree.local]


def _weigh(tree: TokenTree, p: Tensor, nodes: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The weights of the children of `nodes`, and how likely each node is taken after them. [n, W], [n]."""
    weighed = Rejection().weigh(tree, p, nodes, weight)
    return weighed.chance, ratio(weighed.mass, weighed.mass + (1 - weight))


def _children(tree: TokenTree, nodes: Tensor, values: Tensor) -> Tensor:
    """The values of the children of `nodes`, one where there is none. [n, W]."""
    tries = tree.tries[nodes]
    return torch.where(tries >= 0, values[tries], 1.0)


def distinct(tree: TokenTree) -> TokenTree:
    """Every node tried once: what is left of repeated independent draws are draws without replacement.

    Whether another different token comes at all depends only on the draws before it, so this is admissible.
    """
    if not tree.shape.repeats or tree.q is None:
        return tree
    rows = torch.where(tree.q_row[:, None] >= 0, tree.q[tree.q_row.clamp(min=0)], 0)  # [M, V] a law of its own each
    merged, first = _merged_siblings(tree), tree.first_tries
    for place, child in enumerate(tree.tries.unbind(1)):
        token = torch.where(child >= 0, tree.tokens[child.clamp(min=0)], 0)
        for later in first[:, place + 1 :].unbind(1):
            at = (later.clamp(min=0), token)  # no node twice, but for the first root, whose row is empty
            rows[at] = torch.where((later >= 0) & merged[at[0]], 0, rows[at])
    rows = rows / rows.sum(-1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)
    draw = torch.where(merged, int(Draw.WITHOUT_REPLACEMENT), tree.draw)
    own = torch.arange(tree.num_nodes, device=tree.tokens.device)
    shape = replace(tree.shape.linked(packed_left(first), tree.parents), repeats=False)
    return TokenTree(tree.tokens, shape, draw, torch.where(tree.q_row >= 0, own, -1), rows)


def _merged_siblings(tree: TokenTree) -> Tensor:
    """Independently drawn nodes no sibling of which holds their token: repeats were merged. [M] bool."""
    tokens = torch.where(tree.tries >= 0, tree.tokens[tree.tries.clamp(min=0)], -1)
    twins = (tokens[:, :, None] == tokens[:, None, :]) & (tree.tries[:, :, None] != tree.tries[:, None, :])
    apart = (twins & (tree.tries >= 0)[:, :, None]).any(-1).any(-1)  # [M] has children with the same token
    siblings = (tree.draw == Draw.IID) & ~apart[tree.parents.clamp(min=0)]
    return siblings if tree.shape.merged is None else siblings & tree.shape.merged[tree.owner]
