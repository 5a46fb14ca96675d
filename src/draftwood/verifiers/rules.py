"""Sibling rules: what is accepted of the draws behind one node, and what is left of the target after them.

A rule is given a target of mass at most one for each node; the missing part, `dead`, is a token nobody ever drafts.
That is all the lifts need: top-down, traversal and layer differ in the mass they offer and in what they do with the
answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from draftwood.tree import Draw, TokenTree
from draftwood.verifiers.law import Scope, mass_of, ratio, value_at


@dataclass(frozen=True)
class Weighed:
    """What a rule says about the draws behind n nodes."""

    chance: Tensor  # [n, W] float64: that a draw is accepted, once all before it were rejected
    left: Tensor  # [n, V]: the target less what the draws were accepted for, on the average over draws
    mass: Tensor  # [n] float64: of `left`

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

    def weigh(self, tree: TokenTree, nodes: Tensor, target: Tensor, dead: Tensor) -> Weighed:
        """Weigh the draws behind `nodes` [n] against `target` [n, V], which may be used up; `dead` [n] float64."""
        ...


class Rejection:
    """One draw after the other: x from q is accepted with probability min(1, p(x) / q(x)), target over draft; after a
    rejection p becomes the positive part of p - q.

    One such step maps p to p whatever q is, as long as x was drawn from q *given everything before it*. So this is
    SpecInfer's rule for independent draws, the rule of RSD and Sequoia for draws without replacement, plain target
    sampling for point masses (q = 1 at x), and the optimal rule for the hybrid, whose tail draw comes first.
    `left` is an average over draws only where draws are independent; given the draws it is exact for all.
    """

    scope = Scope()

    def weigh(self, tree: TokenTree, nodes: Tensor, target: Tensor, dead: Tensor) -> Weighed:
        """Try the draws in order. All masses stay unnormalised: what is left, dead included, is what survives."""
        mass = mass_of(target)
        chances = []
        for child in tree.tries[nodes].unbind(1):
            there, child = child >= 0, child.clamp(min=0)
            survives = torch.where(there, mass + dead, 0)
            wanted = value_at(target, tree.tokens[child])
            offered = survives * tree.drawn_probability(child, torch.float64)
            chances.append(torch.where(there, ratio(wanted, offered).clamp(max=1), 0))
            target = spend(tree, child, target, survives)
            mass = mass_of(target)
        return Weighed(torch.stack(chances, 1), target, mass)


def spend(tree: TokenTree, child: Tensor, target: Tensor, survives: Tensor) -> Tensor:
    """The positive part of target - survives q, q being the law of each child. Changes `target` [n, V]."""
    if tree.q is None:
        token = tree.tokens[child][:, None]  # a point mass takes all there is of its token
        return target.scatter_(1, token, torch.where(survives[:, None] > 0, 0, target.gather(1, token)))
    return target.sub_(tree.law_rows(child, target).mul_(survives.to(target.dtype)[:, None])).clamp_(min=0)


class FirstOnly:
    """Only the first draw is weighed; the token drawn from what is left may still hit another child (NaiveTree)."""

    scope = Scope()

    def weigh(self, tree: TokenTree, nodes: Tensor, target: Tensor, dead: Tensor) -> Weighed:
        """As `Rejection`, ending after one draw."""
        child = tree.tries[nodes, 0]
        there, child = child >= 0, child.clamp(min=0)
        survives = torch.where(there, mass_of(target) + dead, 0)
        offered = survives * tree.drawn_probability(child, torch.float64)
        chance = torch.where(there, ratio(value_at(target, tree.tokens[child]), offered).clamp(max=1), 0)
        target = spend(tree, child, target, survives)
        return Weighed(chance[:, None], target, mass_of(target))


class KSeq:
    """SpecTr's rule for k independent draws: accept each with probability min(1, p / (rho q)), no residuals between.

    Any rho with 1 - (1 - beta)^k <= rho beta, beta the sum of min(p / rho, q), is lossless, and the smallest is best;
    `HALVINGS` of [1, k] come close enough to it from the safe side.
    """

    scope = Scope(frozenset({Draw.IID}))
    HALVINGS = 14

    def weigh(self, tree: TokenTree, nodes: Tensor, target: Tensor, dead: Tensor) -> Weighed:
        """All draws at once."""
        tries = tree.tries[nodes]
        there, tries = tries >= 0, tries.clamp(min=0)
        count = there.sum(1)
        q = tree.law_rows(tries[:, 0], target)
        q = torch.where(there[:, :1], q, 0)
        rho = self._smallest_rho(target, q, count)
        share, beta = _share(target, q, rho)
        accepted = 1 - (1 - beta) ** count
        wanted = target.gather(1, tree.tokens[tries]).double()
        offered = rho[:, None] * q.gather(1, tree.tokens[tries]).double()
        chance = torch.where(there, ratio(wanted, offered).clamp(max=1), 0)
        scale = torch.where(beta > 0, accepted / torch.where(beta > 0, beta, 1), 0)
        left = target.sub_(share.mul_(scale.to(target.dtype)[:, None])).clamp_(min=0)
        return Weighed(chance, left, mass_of(left))

    def _smallest_rho(self, target: Tensor, q: Tensor, count: Tensor) -> Tensor:
        low = torch.ones(len(count), dtype=torch.float64, device=target.device)
        high = count.double().clamp(min=1)
        for _ in range(self.HALVINGS if int(count.max()) > 1 else 0):
            middle = (low + high) / 2
            _, beta = _share(target, q, middle)
            valid = 1 - (1 - beta) ** count <= middle * beta
            low, high = torch.where(valid, low, middle), torch.where(valid, middle, high)
        return high


def _share(target: Tensor, q: Tensor, rho: Tensor) -> tuple[Tensor, Tensor]:
    """min(target / rho, q) and its mass."""
    share = torch.minimum(target / rho.to(target.dtype)[:, None], q)
    return share, mass_of(share)


class AveragedRejection(Rejection):
    """`Rejection` where `left` has to be an average over draws: independent ones, or two without replacement."""

    scope = Scope(pairs=True)

    def weigh(self, tree: TokenTree, nodes: Tensor, target: Tensor, dead: Tensor) -> Weighed:
        """Two draws without replacement are averaged in closed form; the rest is as it is."""
        weighed = super().weigh(tree, nodes, target.clone() if tree.q is not None else target, dead)
        first, second = tree.tries[nodes, 0], tree.tries[nodes, min(1, tree.tries.shape[1] - 1)]
        paired = (second != first) & (second >= 0) & (tree.draw[first.clamp(min=0)] == Draw.WITHOUT_REPLACEMENT)
        rows = paired.nonzero().view(-1)
        if rows.numel() == 0:
            return weighed
        q = tree.law_rows(first[rows], target[rows])
        left = weighed.left.index_copy(
            0, rows, _left_of_pair(target[rows].double(), q.double(), dead[rows]).to(q.dtype)
        )
        return Weighed(weighed.chance, left, mass_of(left))


def _left_of_pair(target: Tensor, q: Tensor, dead: Tensor) -> Tensor:
    """What two draws without replacement leave of `target` [n, V] on the average.

    The first is rejected at y with mass (q - target)+(y); then x is accepted for min(second(x), q(x) / (1 - q(y))),
    `second` being the law the second is tried against. Which side is smaller flips where q(y) passes 1 - q(x) /
    second(x), so sorted by q the sum over y is a difference of prefix sums.
    """
    left = (target - q).clamp(min=0)
    survives = left.sum(-1, keepdim=True) + dead[:, None]
    second = torch.where(survives > 0, left / torch.where(survives > 0, survives, 1), 0)
    missed = (q - target).clamp(min=0)
    ranked, order = q.sort(-1)
    weight = missed.gather(1, order)
    low_sum = _before(weight / (1 - ranked).clamp(min=torch.finfo(q.dtype).tiny))
    high_sum = weight.sum(-1, keepdim=True) - _before(weight)
    turn = torch.where(second > 0, 1 - q / torch.where(second > 0, second, 1), 2.0)
    place = torch.searchsorted(ranked, turn.contiguous())
    everyone = q * low_sum.gather(1, place) + second * high_sum.gather(1, place)
    own = missed * torch.minimum(q / (1 - q).clamp(min=torch.finfo(q.dtype).tiny), second)
    return (left - (everyone - own)).clamp(min=0)


def _before(values: Tensor) -> Tensor:
    """Sums of the first 0, 1, …, V values. [n, V] -> [n, V + 1]."""
    return torch.cat([torch.zeros_like(values[:, :1]), values.cumsum(-1)], 1)
