"""Sibling rules: what is accepted of the draws behind one node, and what is left of the target after them.

A rule is offered weight · p at each node, weight at most one; the missing part is a token that is never drafted.
That is all the lifts need: top-down, traversal and layer differ in the weight they offer and in what they do with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from draftwood.ops.kseq import kseq_bar
from draftwood.ops.residual import Draws, Residual, reject
from draftwood.tree import Draw, TokenTree
from draftwood.verifiers.law import Scope, ratio


def draws_behind(tree: TokenTree, nodes: Tensor) -> Draws:
    """All draws behind `nodes` [n], in the order they are tried."""
    tries = tree.tries[nodes]
    child = tries.clamp(min=0)
    chance = tree.drawn_probability(child.view(-1), torch.float64).view_as(child)
    return Draws(tries >= 0, child, tree.tokens[child], tree.q_row[child], chance)


@dataclass(frozen=True)
class Weighed:
    """What a rule says about the draws behind n nodes."""

    chance: Tensor  # [n, W] float64: that a draw is accepted, once all before it were rejected
    mass: Tensor  # [n] float64: what is left of weight · p, on the average over draws
    values: Tensor  # [n, W] float64: what is left at the tokens that were drawn
    left: Callable[[], Tensor]  # all of what is left. [n, V]

    @property
    def taken(self) -> Tensor:
        """The chance that each draw is the accepted one. [n, W]."""
        return self.chance * torch.cat([torch.ones_like(self.chance[:, :1]), self._missed[:, :-1]], 1)

    @property
    def rest(self) -> Tensor:
        """The chance that none is. [n]."""
        return self._missed[:, -1]

    @property
    def _missed(self) -> Tensor:
        return (1 - self.chance).cumprod(1)


class SiblingRule(Protocol):
    """How the draws behind a node share out the target's mass."""

    scope: Scope

    def weigh(self, tree: TokenTree, p: Tensor, nodes: Tensor, weight: Tensor) -> Weighed:
        """Weigh the draws behind `nodes` [n] against weight · p there; `p` [M, V], `weight` [n] float64."""
        ...


@dataclass(frozen=True)
class Rejection:
    """One draw after the other: x from q is accepted with probability min(1, p(x) / q(x)), target over draft; after a
    rejection p becomes the positive part of p - q.

    One such step maps p to p whatever q is, as long as x was drawn from q *given everything before it*. So this is
    SpecInfer's rule for independent draws, the rule of RSD and Sequoia for draws without replacement, plain target
    sampling for point masses (q = 1 at x), and the optimal rule for the hybrid, whose tail draw comes first.
    """

    tried: int | None = None  # None: all draws; 1: only the first, the residual may still hit the others (NaiveTree)
    scope = Scope()

    def weigh(self, tree: TokenTree, p: Tensor, nodes: Tensor, weight: Tensor) -> Weighed:
        """Try the draws in order."""
        draws = draws_behind(tree, nodes)
        tried = reject(p, tree.q, nodes, weight, draws, self.tried or draws.tokens.shape[1])
        left = residual(tree, p, nodes, weight, draws, tried.scales)
        return Weighed(tried.chance, tried.mass, tried.values, left.written_out)


def residual(tree: TokenTree, p: Tensor, nodes: Tensor, weight: Tensor, draws: Draws, scales: Tensor) -> Residual:
    """weight · p less the laws of the first draws, each scaled by what survived before it."""
    count = scales.shape[1]
    return Residual(p, nodes, weight, tree.q, draws.rows[:, :count], draws.tokens[:, :count], scales)


class KSeq:
    """SpecTr's rule for k independent draws: accept each with probability min(1, p / (rho q)), no residuals between.

    Any rho with 1 - (1 - beta)^k <= rho beta, beta the sum of min(p / rho, q), is lossless, and the smallest is best.
    """

    scope = Scope(frozenset({Draw.IID}))

    def weigh(self, tree: TokenTree, p: Tensor, nodes: Tensor, weight: Tensor) -> Weighed:
        """All draws at once."""
        draws = draws_behind(tree, nodes)
        count = draws.exists.sum(1)
        part, beta = kseq_bar(p, tree.q, nodes, weight, draws.rows[:, 0], count)
        accepted = 1 - (1 - beta) ** count
        scale = torch.where(beta > 0, accepted / torch.where(beta > 0, beta, 1), 0)
        wanted = weight[:, None] * p[nodes[:, None], draws.tokens].double()
        chance = torch.where(draws.exists, ratio(part[:, None] * wanted, draws.chance).clamp(max=1), 0)
        values = (wanted - scale[:, None] * torch.minimum(part[:, None] * wanted, draws.chance)).clamp(min=0)

        def left() -> Tensor:
            rows = p[nodes].mul_(weight.to(p.dtype)[:, None])
            q = tree.law_rows(draws.child[:, 0], rows)
            share = torch.minimum(rows * part.to(p.dtype)[:, None], q)
            return rows.sub_(share.mul_(scale.to(p.dtype)[:, None])).clamp_(min=0)

        return Weighed(chance, (weight - accepted).clamp(min=0), values, left)
