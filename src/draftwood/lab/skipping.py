"""Finds attention and MLPs that drafts of a model can leave out: policies propose sets, and what each is worth is
measured.

A set is worth the tokens a second that chains drafted without it would give, over plain decoding's: how often drafts at
places in the model's own answers are right, and how long forwards take here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftwood.drafters.skips import SkipSet
from draftwood.errors import InvalidRequest
from draftwood.lab.probe import Costs, Probe

Skipped = tuple[int, ...]
Say = Callable[[float, str], None]  # how much is done, 0 … 1, and the best so far
LEAST_COSINE = 0.5  # streams that are less alike are not followed
UNITS = 5  # of the saved time of the cheapest layer that the dearest may count for
FINALISTS = 3


@dataclass(frozen=True)
class Found:
    """A set and what it is worth."""

    skipped: Skipped
    sets: tuple[tuple[int, ...], ...]  # see `Probe.sets`
    survival: tuple[float, ...]
    ratio: float
    depth: int


@dataclass
class Judge:
    """Measures what sets are worth, each once: roughly by the first draft alone, or whole chains."""

    probe: Probe
    costs: Costs
    _rough: dict[Skipped, float] = field(default_factory=dict)

    def roughly(self, skipped: Skipped) -> float:
        """As if every further draft were as often right as the first."""
        if skipped not in self._rough:
            first = self.probe.survival(skipped, 1)[0]
            survival = [first ** (k + 1) for k in range(self.probe.depth)]
            self._rough[skipped] = self.costs.ratio(survival, self.costs.draft(skipped))[0]
        return self._rough[skipped]

    def exactly(self, skipped: Skipped) -> Found:
        """Whole chains, and the time of a draft."""
        survival = self.probe.survival(skipped)
        draft = self.probe.draft_share(skipped) * self.costs.plain
        return Found(skipped, self.probe.sets(skipped), tuple(survival), *self.costs.ratio(survival, draft))

    @property
    def best(self) -> list[Skipped]:
        """The best so far, best first."""
        return sorted(self._rough, key=lambda skipped: -self._rough[skipped])


def by_cosine(judge: Judge, effort: int) -> Iterator[tuple[float, Skipped]]:
    """CLaSp: of all sets that leave out so many items, the one whose stream stays most like the whole model's."""
    yield from _dynamic(judge.probe, [1] * judge.probe.num_items)


def by_knapsack(judge: Judge, effort: int) -> Iterator[tuple[float, Skipped]]:
    """KnapSpec: the same of all sets that save so much time, by the measured time of each item."""
    items = judge.costs.items
    yield from _dynamic(judge.probe, [min(round(own / min(items)), UNITS) for own in items])


def by_fisher(judge: Judge, effort: int) -> Iterator[tuple[float, Skipped]]:
    """SDFP: first what matters least for its time, by the next token's Fisher information along what leaving an item
    out changes. That is twice the divergence that it causes, which is measured: no gradients.
    """
    probe, items = judge.probe, judge.costs.items
    order = sorted(range(1, probe.num_items), key=lambda i: probe.divergence((i,)) / items[i])
    for count in range(1, len(order) // 2 + 2):
        yield count / len(order), tuple(sorted(order[:count]))


def by_search(judge: Judge, effort: int) -> Iterator[tuple[float, Skipped]]:
    """Draft & Verify: change an item or two of the best set so far, at random; begins with sets that are spread out."""
    chance, count = random.Random(0), judge.probe.num_items
    for share in (0.15, 0.3, 0.45):
        judge.roughly(_spread(count, max(1, int(share * count))))
    for number in range(effort):
        changed = set(judge.best[0])
        for item in chance.sample(range(1, count), min(chance.choice((1, 1, 2)), count - 1)):
            changed ^= {item}
        if changed:
            judge.roughly(tuple(sorted(changed)))
        yield number / effort, judge.best[0]


def by_both(judge: Judge, effort: int) -> Iterator[tuple[float, Skipped]]:
    """The knapsack first, then changes to the best of it."""
    for done, skipped in by_knapsack(judge, effort):
        yield done / 2, skipped
    for done, skipped in by_search(judge, effort):
        yield 0.5 + done / 2, skipped


POLICIES: Mapping[str, Callable[[Judge, int], Iterator[tuple[float, Skipped]]]] = {
    "auto": by_both,
    "cosine": by_cosine,
    "fisher": by_fisher,
    "knapsack": by_knapsack,
    "search": by_search,
}


def search(probe: Probe, policy: str, effort: int, say: Say) -> tuple[Found, Costs]:
    """The best set that a policy finds; `effort`: sets that are tried at random."""
    if probe.num_layers < 2:
        raise InvalidRequest("The model has one layer, which a draft cannot leave out.")
    judge = Judge(probe, probe.costs())
    for done, skipped in POLICIES[policy](judge, effort):
        if skipped:
            judge.roughly(skipped)
            say(done, _told(probe, judge.best[0], judge.roughly(judge.best[0])))
    if not judge.best:
        raise InvalidRequest(
            f"The policy '{policy}' finds no layers that leave the model like itself; try another one."
        )
    found = max((judge.exactly(skipped) for skipped in judge.best[:FINALISTS]), key=lambda one: one.ratio)
    say(1.0, _told(probe, found.skipped, found.ratio))
    return found, judge.costs


def _told(probe: Probe, skipped: Skipped, ratio: float) -> str:
    return f"{ratio:.2f}× without {len(skipped) * probe.num_layers / probe.num_items:g} layers"


def as_skips(found: Found, policy: str, weights: str) -> SkipSet:
    """To be kept."""
    whole, attention, mlp = found.sets
    return SkipSet(whole, found.depth, found.ratio, found.survival[0], policy, weights, attention, mlp)


def _dynamic(probe: Probe, units: Sequence[int]) -> Iterator[tuple[float, Skipped]]:
    """For every saved time, in units of each item's, up to half of all: items left out behind which the stream is
    most like the whole model's. Grown item by item; the first is always run.
    """
    true = probe.streams()
    kept: dict[int, tuple[Tensor, Skipped]] = {0: (true[0], ())}
    for i in range(1, probe.num_items):
        grown: dict[int, tuple[float, Tensor, Skipped]] = {}
        for saved, (stream, skipped) in kept.items():
            _keep(grown, saved, probe.item(i, stream), skipped, true[i])
            if 2 * (saved + units[i]) <= sum(units):
                _keep(grown, saved + units[i], stream, (*skipped, i), true[i])
        kept = {saved: (stream, skipped) for saved, (_, stream, skipped) in grown.items()}
        yield i / probe.num_items, kept[0][1]
    for _, skipped in kept.values():
        if skipped:
            yield 1.0, skipped


def _keep(
    grown: dict[int, tuple[float, Tensor, Skipped]], saved: int, stream: Tensor, skipped: Skipped, true: Tensor
) -> None:
    cosine = float(torch.nn.functional.cosine_similarity(stream.float(), true.float(), dim=-1).mean())
    if not skipped or (cosine >= LEAST_COSINE and cosine > grown.get(saved, (-1.0,))[0]):
        grown[saved] = cosine, stream, skipped


def _spread(count: int, skipped: int) -> Skipped:
    """So many items, as far apart as they can be, not the first."""
    return tuple(sorted({1 + i * (count - 1) // skipped for i in range(skipped)}))
