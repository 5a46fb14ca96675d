"""Adaptive verification: a drafter's trees, cut before the target sees them (EVICT, Cascade).

A row costs the target time; with a mixture of experts more than elsewhere, for every further token wakes further
experts. So of what was drafted only those nodes are verified whose expected gain pays for their time, by the measured
costs of a step. The batch shares one forward, and its trees compete for the rows.

Which draws are kept must not depend on what they gave, or the laws that trust them are biased. So the growth is
replayed level by level: which draws behind a level stay is decided for the whole level, in all trees, from kept tokens
of this level and above. Known then are the law of the first draw behind each node (how often would two draws from it
agree?), how many draws there are, and earlier steps. Not looked at are the tokens that the draws gave, whether some of
them agree, and anything further down, kept or not. What is left is the tree of a grower that decides before each level
where to draw, and verifies all it drew: admissible. Deciding draw by draw would be exact for `walk` and `traversal`,
but not for K-SEQ and others that weigh the draws behind a node together.
Chosen tokens are no draws. Of trees without draws the best nodes of all levels are kept, wherever they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from draftwood.cache.resident import attach
from draftwood.costs import StepCosts
from draftwood.model.runner import ModelRunner
from draftwood.protocols import BatchView, Budget, Drafter, Features, Randomness, Span
from draftwood.tree import DraftLaw, TokenTree, Verdict

PRIOR = 0.7  # the chance of a chosen token, as long as nothing is known about it
MEMORY = 0.97  # what an observation's weight becomes with each step after it
PRIOR_WEIGHT = 2.0  # draws that a hope counts for against experience
DEPTHS, PLACES, MOODS = 32, 16, 4  # what lies beyond is counted with the last

Times = Callable[[float], float]  # rows -> seconds


class PrunedDrafter:
    """Another drafter's trees, cut to the nodes whose expected gain pays for the time the target spends on them."""

    def __init__(self, drafter: Drafter, costs: StepCosts) -> None:
        self.drafter = drafter
        self.costs = costs
        self._record = _Record()
        self._deepest = 0  # level of the last proposal
        self._cut: _Cut | None = None

    @property
    def law(self) -> DraftLaw:
        """The inner drafter's. Paths whose length depends on what was drawn are not whole, though: `gbv` is biased."""
        return replace(self.drafter.law, paths=False)

    @property
    def max_nodes(self) -> int:
        """The inner drafter's."""
        return self.drafter.max_nodes

    @property
    def needs(self) -> frozenset[int]:
        """The inner drafter's."""
        return self.drafter.needs

    def propose(self, view: BatchView, budget: Budget, rng: Randomness) -> TokenTree:
        """Let the inner drafter propose, and keep what pays."""
        whole = self.drafter.propose(view, budget, rng)
        hopes = _Hopes.of(whole, self._record)
        batch = max(whole.num_trees, 1)
        context = sum(map(len, view.tokens)) / batch
        keep = hopes.paying(lambda rows: self.costs.at(round(rows), context, batch), self._deepest)
        self._cut = _Cut(whole, hopes, keep)
        self._deepest = whole.max_depth
        return whole if bool(keep.all()) else whole.select(keep.to(whole.tokens.device), judged=False)

    def attach(self, target: ModelRunner) -> None:
        """Pass it on, if it is wanted."""
        attach(self.drafter, target)

    def read(self, spans: Sequence[Span], features: Features) -> None:
        """Pass it on."""
        self.drafter.read(spans, features)

    def observe(self, view: BatchView, tree: TokenTree, verdict: Verdict, features: Features) -> None:
        """Tell the inner drafter, in its own tree's numbers, and remember what was worth its time."""
        assert self._cut is not None, "observe() without propose()"
        cut, self._cut = self._cut, None
        verdict = cut.uncut(verdict)
        self._record.learn(cut.hopes, cut.keep, verdict)
        self.drafter.observe(view, cut.whole, verdict, {layer: cut.spread(rows) for layer, rows in features.items()})

    def release(self, seq_id: int) -> None:
        """The inner drafter's to forget."""
        self.drafter.release(seq_id)


@dataclass(frozen=True)
class _Cut:
    """A proposal before and after."""

    whole: TokenTree
    hopes: _Hopes
    keep: Tensor  # [M] bool, on the host

    @property
    def _places(self) -> Tensor:
        """Where each node that was kept is in the whole tree. [m]."""
        return self.keep.nonzero()[:, 0].to(self.whole.tokens.device)

    def uncut(self, verdict: Verdict) -> Verdict:
        """The verdict in the whole tree's numbers."""
        path = torch.where(verdict.path >= 0, self._places[verdict.path.clamp(min=0)], -1)
        missing = self.whole.max_depth + 1 - path.shape[1]
        return replace(verdict, path=torch.nn.functional.pad(path, (0, missing), value=-1))

    def spread(self, rows: Tensor) -> Tensor:
        """Rows of kept nodes [m, H] among those of all nodes, zeros for the others. [M, H]."""
        return rows.new_zeros(self.whole.num_nodes, *rows.shape[1:]).index_copy(0, self._places, rows)


class _Record:
    """How often draws were accepted, by how sure the draft was, by depth, and by place among siblings."""

    def __init__(self) -> None:
        self._hits = torch.zeros(MOODS, DEPTHS, PLACES, dtype=torch.float64)
        self._tried = torch.zeros_like(self._hits)

    def promise(self, agree: Tensor, raw: Tensor, depth: Tensor) -> Tensor:
        """What is to be expected where `raw` is hoped. All [M, W] but `depth` [M]."""
        slots = _slots(agree, depth)
        return (self._hits[slots] + PRIOR_WEIGHT * raw) / (self._tried[slots] + PRIOR_WEIGHT)

    def learn(self, hopes: _Hopes, keep: Tensor, verdict: Verdict) -> None:
        """Count what became of the draws behind accepted nodes, and forget older steps a little."""
        path = verdict.path.cpu()
        path = path.masked_fill(torch.arange(path.shape[1]) > verdict.length.cpu()[:, None], -1)
        after = torch.nn.functional.pad(path[:, 1:], (0, 1), value=-1)[path >= 0]
        nodes = path[path >= 0]
        tries = hopes.tries[nodes]
        tried = (tries >= 0) & keep[tries.clamp(min=0)]
        hit = tried & (tries == after[:, None])
        hit &= hit.cumsum(1) == 1  # a node drawn twice is accepted once
        slots = _slots(hopes.agree[nodes], hopes.depth[nodes])
        self._hits = (MEMORY * self._hits).index_put_(slots, hit.double(), accumulate=True)
        self._tried = (MEMORY * self._tried).index_put_(slots, tried.double(), accumulate=True)


def _slots(agree: Tensor, depth: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    mood = (agree * MOODS).long().clamp(max=MOODS - 1)
    place = torch.arange(agree.shape[1]).clamp(max=PLACES - 1).expand_as(agree)
    return mood, depth.clamp(max=DEPTHS - 1)[:, None].expand_as(place), place


@dataclass(frozen=True)
class _Hopes:
    """What is hoped of the draws behind every node before they are drawn. [M, W] as `TokenTree.tries`, on the host."""

    tries: Tensor
    agree: Tensor  # how often two draws from the law of the first would be the same
    promise: Tensor  # the chance that a draw is accepted if its parent is
    rows: Tensor  # the rows of the target that a draw costs: less than one where it may repeat another
    depth: Tensor  # [M]
    drawn: bool  # whether any node was drawn
    repeats: bool  # whether draws may have given the same node

    @classmethod
    def of(cls, tree: TokenTree, record: _Record) -> _Hopes:
        """Before experience, a draw is hoped to be accepted as often as another from its law would agree with it.

        The law is that of the first draw behind a node; the laws of later ones may know what the first gave.
        """
        tries, depth = tree.tries.cpu(), tree.depth.cpu()
        there = tries >= 0
        row = tree.q_row.cpu()[tries.clamp(min=0)].masked_fill(~there, -1)
        drawn = row >= 0
        agree = torch.full(there.shape, PRIOR, dtype=torch.float64)
        if tree.q is not None:
            agreement = torch.linalg.vector_norm(tree.q, dim=-1).double().square().clamp(max=1).cpu()
            first = row.gather(1, drawn.long().argmax(1, keepdim=True))
            agree = torch.where(drawn, agreement[first.clamp(min=0)], agree)
        rank = torch.where(drawn, drawn.cumsum(1), (there & ~drawn).cumsum(1)) - 1
        needed = (1 - agree) ** rank.clamp(min=0)  # no earlier draw was it
        raw = agree * needed
        promise = record.promise(agree, raw, depth) * there
        # A later draw says what the earlier ones were not: never keep it without them.
        falling = promise.masked_fill(~drawn, 1).cummin(1).values
        promise = torch.where(drawn, falling, promise)
        rows = needed if tree.drawn is not None else torch.ones_like(needed)
        return cls(tries, agree, promise, rows, depth, tree.q is not None, tree.drawn is not None)

    def paying(self, seconds: Times, deepest: int) -> Tensor:
        """The nodes to keep, where a tree may be expected to have `deepest` levels. [M] bool."""
        keep = self.depth == 0
        kept = keep.nonzero()[:, 0].tolist()
        chance = keep.double().tolist()
        draws = list(zip(self.tries.tolist(), self.promise.tolist(), self.rows.tolist(), strict=True))
        level, chosen = kept, []
        while level:
            deepest -= 1
            offers = [offer for node in level for offer in self._behind(*draws[node], node, chance)]
            if self.drawn:
                level = _best(sum(chance[node] for node in kept), len(kept), offers, seconds, deepest)
                kept = kept + level
            else:
                level = [node for offer in offers for node in offer.nodes]
                chosen += offers
        keep[kept + _best(len(kept), len(kept), chosen, seconds)] = True
        return keep

    def _behind(
        self, tries: list[int], promise: list[float], rows: list[float], node: int, chance: list[float]
    ) -> list[_Offer]:
        """What may be kept behind `node`. Sets the chances of its children."""
        offers = [
            _Offer(chance[node] * hope, cost, chance[node] * hope * max(promise), (child,))
            for child, hope, cost in zip(tries, promise, rows, strict=True)
            if child >= 0
        ]
        for offer in offers:
            chance[offer.nodes[0]] += offer.gain
        if not (self.repeats and offers):
            return offers
        # Draws that may agree are kept together: that they did is not for us to know.
        gains, costs, nexts, children = zip(*offers, strict=True)
        return [_Offer(sum(gains), sum(costs), sum(nexts), tuple(dict.fromkeys(child for (child,) in children)))]


class _Offer(NamedTuple):
    """Draws that are kept together or not at all."""

    gain: float
    rows: float
    next: float  # the gain of another level like it
    nodes: tuple[int, ...]


def _best(tokens: float, rows: float, offers: list[_Offer], seconds: Times, ahead: int = 0) -> list[int]:
    """The nodes of the offers to take: the most gain a row first, up to the best ratio of tokens to time.

    At equal gain the earlier offer comes first, so that no node comes before its parent or its earlier siblings.
    """
    order = sorted(offers, key=lambda offer: -offer.gain / offer.rows)
    best, taken, level = tokens / seconds(rows), 0, _Offer(0.0, 0.0, 0.0, ())
    for count, offer in enumerate(order, 1):
        level = _Offer(level.gain + offer.gain, level.rows + offer.rows, level.next + offer.next, ())
        rate = _rate_with(tokens, rows, level, seconds, ahead)
        if rate > best:
            best, taken = rate, count
    return [node for offer in order[:taken] for node in offer.nodes]


def _rate_with(tokens: float, rows: float, level: _Offer, seconds: Times, ahead: int) -> float:
    """Tokens a second with `level`, and with further ones like it if that is more: the first row may be the dearest."""
    best, gain = 0.0, level.gain
    for _ in range(1 + max(ahead, 0)):
        tokens, rows = tokens + gain, rows + level.rows
        best = max(best, tokens / seconds(rows))
        gain *= level.next / level.gain if level.gain > 0 else 0.0
    return best
