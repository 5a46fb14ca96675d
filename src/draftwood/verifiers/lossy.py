"""Laws that are not lossless. They change what the model says; none is ever a default, and every answer says so.

`mixture` is the only one with a certificate: what it emits at a step follows w p + (1 - w) q exactly, so it is at most
(1 - w) TV(p, q) away from the model, and the sum of that over a text is reported with it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftwood.ops.verdict import Rule, loosened, walk
from draftwood.protocols import BatchView
from draftwood.tree import TokenTree, Verdict
from draftwood.verifiers.law import NodeLaw, Odds, Scope
from draftwood.verifiers.rules import Rejection, Weighed
from draftwood.verifiers.walk import TopDown, first_of_its_token, without_children


class LossyLaw(NodeLaw):
    """A law that moves the model's distribution by an unknown amount."""

    lossless = False

    def odds(self, tree: TokenTree, p: Tensor) -> Odds:
        """Unknown drift wherever there was something to judge."""
        odds = self.lossy_odds(tree, p)
        return Odds(odds.stop, odds.left, _unknown(tree)[tree.owner])

    def lossy_odds(self, tree: TokenTree, p: Tensor) -> Odds:
        """Where the path ends."""
        raise NotImplementedError


class DeepestGoodEnough(LossyLaw):
    """Keep the longest path all of whose tokens are good enough; the first of several."""

    def good_enough(self, tree: TokenTree, p: Tensor) -> Tensor:
        """Which nodes pass, whatever is above them. [M] bool; roots do not matter."""
        raise NotImplementedError

    def lossy_odds(self, tree: TokenTree, p: Tensor) -> Odds:
        """All on one node."""
        good = (tree.tokens >= 0) & (self.good_enough(tree, p) | (tree.parents < 0))
        for nodes in tree.levels[1:]:
            good[nodes] &= good[tree.parents[nodes]]
        rank = torch.where(good, tree.depth * tree.num_nodes - tree.local, -1)
        best = torch.full((tree.num_trees,), -1, device=p.device).scatter_reduce(0, tree.owner, rank, "amax")
        return Odds((rank == best[tree.owner]).double(), lambda nodes: p[nodes])


class Typical(DeepestGoodEnough):
    """Typical acceptance (Medusa): p(x) > min(threshold, alpha exp(-entropy of p))."""

    name = "typical"

    def __init__(self, threshold: float = 0.3, alpha: float = 0.09) -> None:
        _check("threshold", threshold, 0, 1)
        _check("alpha", alpha, 0, 1)
        self.threshold, self.alpha = threshold, alpha

    def good_enough(self, tree: TokenTree, p: Tensor) -> Tensor:
        """The surer the target, the more it asks of a token."""
        entropy = torch.special.entr(p).sum(-1, dtype=torch.float64)
        bar = (self.alpha * torch.exp(-entropy)).clamp(max=self.threshold)
        return _wanted(tree, p) > bar[tree.parents.clamp(min=0)]

    def at_once(self, tree: TokenTree, p: Tensor, view: BatchView) -> Verdict | None:
        """There are kernels for it."""
        return loosened(tree, p, view.seeds, view.lengths, Rule.TYPICAL, self.threshold, self.alpha)


class Relaxed(DeepestGoodEnough):
    """Relaxed acceptance: among the `k` likeliest and at most `margin` below the best in log-probability."""

    name = "relaxed"

    def __init__(self, k: int = 3, margin: float = 0.5) -> None:
        if k < 1:
            raise ValueError("k must be at least 1")
        _check("margin", margin, 0, float("inf"))
        self.k, self.margin = k, margin

    def good_enough(self, tree: TokenTree, p: Tensor) -> Tensor:
        """Near the top of the parent's row."""
        best = p.topk(min(self.k, p.shape[1]), -1).values.double()[tree.parents.clamp(min=0)]
        wanted = _wanted(tree, p)
        return (wanted > 0) & (wanted >= best[:, -1]) & (best[:, 0].log() - wanted.log() <= self.margin)

    def at_once(self, tree: TokenTree, p: Tensor, view: BatchView) -> Verdict | None:
        """There are kernels for it."""
        return loosened(tree, p, view.seeds, view.lengths, Rule.RELAXED, self.k, self.margin)


class Threshold(LossyLaw):
    """Plain target sampling with lowered bars: a child of probability `single` is accepted, others too if total < 1.

    With single = 1 and total = 1 nothing is lost.
    """

    name = "threshold"

    def __init__(self, single: float = 0.9, total: float = 1.0) -> None:
        _check("single", single, 0, 1)
        _check("total", total, 1e-6, 1)
        self.single, self.total = single, total
        self._walk = TopDown(self.name, _LoweredBars(single, total))

    def lossy_odds(self, tree: TokenTree, p: Tensor) -> Odds:
        """Top down."""
        return self._walk.odds(tree, p)

    def at_once(self, tree: TokenTree, p: Tensor, view: BatchView) -> Verdict | None:
        """There are kernels for it."""
        return loosened(tree, p, view.seeds, view.lengths, Rule.LOWERED_BARS, self.single, self.total)


class _LoweredBars:
    scope = Scope()

    def __init__(self, single: float, total: float) -> None:
        self.single, self.total = single, total

    def weigh(self, tree: TokenTree, p: Tensor, nodes: Tensor, weight: Tensor) -> Weighed:
        """One coin for all children, against what they have in common with the target so far."""
        tries = tree.tries[nodes]
        tokens = tree.tokens[tries.clamp(min=0)]
        wanted = weight[:, None] * p[nodes[:, None], tokens].double() * first_of_its_token(tree, tries)
        missed = (1 - wanted.cumsum(1) / self.total).clamp(min=0)
        missed = missed * (wanted < self.single).long().cumprod(1)
        before = torch.cat([torch.ones_like(missed[:, :1]), missed[:, :-1]], 1)
        chance = torch.where(before > 0, 1 - missed / torch.where(before > 0, before, 1), 1)
        mass = (weight - wanted.sum(1)).clamp(min=0)
        return Weighed(chance, mass, torch.zeros_like(wanted), lambda: without_children(tree, nodes, p[nodes]))


class Lenient(LossyLaw):
    """Rejection sampling with its bar lowered: min(1, p / (lenience q)), the residual as if it were not."""

    name = "lenient"

    def __init__(self, lenience: float = 0.7) -> None:
        _check("lenience", lenience, 1e-6, 1)
        self.lenience = lenience
        self._walk = TopDown(self.name, _LowerBar(lenience=lenience))

    def lossy_odds(self, tree: TokenTree, p: Tensor) -> Odds:
        """Top down."""
        return self._walk.odds(tree, p)

    def at_once(self, tree: TokenTree, p: Tensor, view: BatchView) -> Verdict | None:
        """There are kernels for it."""
        verdict = walk(tree, p, view.seeds, view.lengths, lenience=self.lenience)
        return None if verdict is None else replace(verdict, drift=_unknown(tree))


@dataclass(frozen=True)
class _LowerBar(Rejection):
    lenience: float = 1.0

    def weigh(self, tree: TokenTree, p: Tensor, nodes: Tensor, weight: Tensor) -> Weighed:
        """Higher chances, nothing else."""
        weighed = super().weigh(tree, p, nodes, weight)
        return replace(weighed, chance=(weighed.chance / self.lenience).clamp(max=1))


class Mixture(NodeLaw):
    """Verify against weight p + (1 - weight) q instead of p: the only lossy law with a certificate."""

    name = "mixture"
    lossless = False

    def __init__(self, weight: float = 0.9) -> None:
        _check("weight", weight, 0, 1)
        self.weight = weight
        self._walk = TopDown(self.name, Rejection())

    def odds(self, tree: TokenTree, p: Tensor) -> Odds:
        """Lossless with respect to the mixture; how far that is from p is added up along the path."""
        mixed, drift = self.mixed(tree, p)
        odds = self._walk.odds(tree, mixed)
        return Odds(odds.stop, odds.left, drift)

    def mixed(self, tree: TokenTree, p: Tensor) -> tuple[Tensor, Tensor]:
        """The rows that are verified against [M, V], and how far from p the way to each node is [M]."""
        first = tree.tries[:, 0]
        q = tree.law_rows(first.clamp(min=0), p)
        step = torch.where(first >= 0, (1 - self.weight) * (p - q).abs().sum(-1, dtype=torch.float64) / 2, 0)
        mixed = torch.where(first[:, None] >= 0, torch.lerp(q, p, self.weight), p)
        return mixed, torch.where(tree.paths >= 0, step[tree.paths.clamp(min=0)], 0).sum(1)

    def at_once(self, tree: TokenTree, p: Tensor, view: BatchView) -> Verdict | None:
        """On a CPU as one kernel; else the walk's, on rows that were mixed before."""
        verdict = loosened(tree, p, view.seeds, view.lengths, Rule.MIXTURE, self.weight)
        if verdict is not None or not p.is_cuda:
            return verdict
        mixed, drift = self.mixed(tree, p)
        verdict = walk(tree, mixed, view.seeds, view.lengths)
        return None if verdict is None else replace(verdict, drift=drift[verdict.ends])


def _unknown(tree: TokenTree) -> Tensor:
    """[B] float64."""
    drift = torch.zeros(tree.num_trees, dtype=torch.float64, device=tree.tokens.device)
    return drift.masked_fill_(tree.tries[tree.offsets[:-1], 0] >= 0, torch.nan)


def _wanted(tree: TokenTree, p: Tensor) -> Tensor:
    """p of every node's own token; anything at roots. [M] float64."""
    return p[tree.parents.clamp(min=0), tree.tokens].double()


def _check(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise ValueError(f"{name} must lie between {least:g} and {most:g}, not {value:g}")
