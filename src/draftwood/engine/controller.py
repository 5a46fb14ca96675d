"""How much to guess."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from draftwood.cache.resident import round_sizes
from draftwood.costs import StepCosts
from draftwood.protocols import Budget, Load, StepReport


class FixedBudget:
    """The same number of nodes in every step."""

    def __init__(self, max_nodes: int) -> None:
        if max_nodes < 0:
            raise ValueError("a budget cannot be negative")
        self._budget = Budget(max_nodes, why=f"always {_nodes(max_nodes)}")

    def budget(self, load: Load) -> Budget:
        """Always the same."""
        return self._budget

    def observe(self, report: StepReport) -> None:
        """Nothing to learn."""


class Outlook(NamedTuple):
    """What a step is expected to give each sequence, and to take."""

    tokens: float
    seconds: float
    assumed: bool  # of the time: nobody has measured it

    def __str__(self) -> str:
        time = f"{self.seconds:.2f} plain steps (assumed)" if self.assumed else f"{self.seconds * 1000:.2f} ms"
        return f"{self.tokens:.2f} expected tokens in {time}"


@dataclass(frozen=True, slots=True)
class BestRate:
    """Why a step has as many nodes as it has; put into words only where somebody asks."""

    nodes: int
    best: Outlook
    plain: Outlook

    def __str__(self) -> str:
        if self.nodes == 0:
            return f"no nodes pay: {self.plain} without"
        return f"{_nodes(self.nodes)}: {self.best}; none: {self.plain}"


@dataclass(frozen=True, slots=True)
class WorthTheRow:
    """Why a tree may have nodes down to a certain chance."""

    nodes: int
    chance: float

    def __str__(self) -> str:
        return f"up to {_nodes(self.nodes)}: one more row pays from a chance of {self.chance:.2f}"


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


def _best_rate(outlooks: dict[int, Outlook]) -> Budget:
    """The number of nodes with the most tokens a second; the fewer at a tie."""
    best = max(outlooks, key=lambda nodes: outlooks[nodes].tokens / outlooks[nodes].seconds)
    return Budget(best, why=BestRate(best, outlooks[best], outlooks[0]))


def _drafting(report: StepReport, costs: StepCosts) -> float | None:
    """Seconds that guessing took, as far as can be told."""
    if costs.assumed:
        return None
    if report.step_seconds is None:
        return report.draft_seconds
    return max(0.0, report.step_seconds - costs.at(report.num_rows, report.context, max(report.num_sampling, 1)))


def _followed(known: float, seconds: float) -> float:
    """Down quickly, up slowly: a proposal that had to read a prompt first says little about the next."""
    change = seconds - known
    return known + change * (0.3 if change < 0 else 0.05)


class MeasuredBudget:
    """As many nodes of a chain as pay, by what rows cost on this machine and how many guesses have come true lately.

    What it decides with is known before the step's tokens are drawn, so no law's exactness is touched.
    """

    MEMORY = 0.97  # what a proposal's weight becomes with each one after it
    BOREDOM = 0.99  # the same for steps without any: what was given up is tried again some time
    PRIOR = 0.7  # chance that a node behind an accepted one is accepted, before anything is known
    PRIOR_WEIGHT = 2.0

    def __init__(self, costs: StepCosts, max_nodes: int) -> None:
        self._costs = costs
        self._most = max_nodes
        self._hits = [0.0] * (max_nodes + 1)
        self._trials = [0.0] * (max_nodes + 1)
        self._draft_seconds = 0.0  # of one node
        self._proposing = 1.0  # share of sequences that get a proposal

    def budget(self, load: Load) -> Budget:
        """The size with the best ratio of expected tokens to expected time."""
        batch = max(load.num_running, 1)
        share = max(self._proposing, 1 / batch)
        gains, gain = [0.0], 0.0
        for chance in self.survival():
            gain += chance
            gains.append(gain)

        def outlook(nodes: int) -> Outlook:
            rows = round(batch * (1 + (1 if load.padded else share) * nodes))
            drafting = batch * share * nodes * self._draft_seconds
            seconds = self._costs.at(rows, load.context, batch) + drafting
            return Outlook(1 + share * gains[nodes], seconds, self._costs.assumed)

        return _best_rate({nodes: outlook(nodes) for nodes in range(self._most + 1)})

    def survival(self) -> list[float]:
        """The chance that the first, the first two, … nodes of a chain are all accepted."""
        chances, alive, chance = [], 1.0, self.PRIOR
        for hits, trials in zip(self._hits[1:], self._trials[1:], strict=True):
            # What is not known of a depth yet is taken to be as above it, or nobody would ever look deeper.
            chance = (hits + chance * self.PRIOR_WEIGHT) / (trials + self.PRIOR_WEIGHT)
            alive *= chance
            chances.append(alive)
        return chances

    def observe(self, report: StepReport) -> None:
        """Remember how far each proposal came, and forget old ones little by little."""
        if report.drafted == 0:
            self._forget(self.BOREDOM)
            self._draft_seconds *= self.BOREDOM
        else:
            self._learn_cost(report)
        proposed = [(drafted, accepted) for drafted, accepted in report.outcomes if drafted]
        for drafted, accepted in proposed:
            self._forget(self.MEMORY)
            for depth in range(1, min(drafted, accepted + 1, self._most) + 1):
                self._trials[depth] += 1
                self._hits[depth] += accepted >= depth
        if report.num_sampling:
            self._proposing += 0.05 * (len(proposed) / report.num_sampling - self._proposing)

    def _learn_cost(self, report: StepReport) -> None:
        seconds = _drafting(report, self._costs)
        if seconds is not None:
            self._draft_seconds = _followed(self._draft_seconds, seconds / report.drafted)

    def _forget(self, kept: float) -> None:
        self._hits = [kept * hits for hits in self._hits]
        self._trials = [kept * trials for trials in self._trials]


class MeasuredTreeBudget:
    """The same for trees. Where each may have a size of its own, it has nodes down to the chance that pays for a row;
    where all run as many, the size with the best ratio of expected tokens to expected time.
    """

    LEARNING = 0.05
    BOREDOM = 0.01  # how fast hope comes back in steps without guesses
    HOPE = 1.5  # tokens that the largest tree is expected to gain before anything is known
    # Gains grow like this power of the logarithm of a tree's size; beams of the shipped block head and EAGLE-3 with 6,
    # 31 and 63 nodes lie within a tenth of it.
    POWER = 0.6

    def __init__(self, costs: StepCosts, max_nodes: int) -> None:
        self._costs, self._most = costs, max_nodes
        self._gain = self.HOPE  # tokens of one sequence and step, by the largest tree
        self._draft_seconds = 0.0  # of one step
        self._tokens_per_step = 1.0  # of one sequence
        self._sizes = round_sizes(max_nodes)

    def budget(self, load: Load) -> Budget:
        """As the device runs them."""
        batch = max(load.num_running, 1)
        if not load.padded:
            worth = self._worth(load, batch)
            return Budget(self._most, worth, WorthTheRow(self._most, worth))
        return _best_rate({nodes: self._outlook(nodes, load, batch) for nodes in self._sizes})

    def _outlook(self, nodes: int, load: Load, batch: int) -> Outlook:
        seconds = self._costs.at(batch * (1 + nodes), load.context, batch) + (self._draft_seconds if nodes else 0.0)
        return Outlook(1 + self._gain * self._share(nodes), seconds, self._costs.assumed)

    def _share(self, nodes: float) -> float:
        """What a tree of so many nodes gains, of what the largest would."""
        return (math.log1p(nodes) / math.log1p(self._most)) ** self.POWER

    def observe(self, report: StepReport) -> None:
        """Remember what trees gained, by their size, and what they took."""
        proposed = [(drafted, accepted) for drafted, accepted in report.outcomes if drafted]
        if proposed:
            nodes, gain = (sum(side) / len(proposed) for side in zip(*proposed, strict=True))
            self._gain += self.LEARNING * (gain / self._share(nodes) - self._gain)
            self._learn_cost(report)
        else:
            self._gain += self.BOREDOM * max(0.0, self.HOPE - self._gain)
            self._draft_seconds *= 1 - self.BOREDOM
        if report.num_sampling:
            self._tokens_per_step += 0.05 * (report.emitted / report.num_sampling - self._tokens_per_step)

    def _learn_cost(self, report: StepReport) -> None:
        seconds = _drafting(report, self._costs)
        if seconds is not None:
            self._draft_seconds = _followed(self._draft_seconds, seconds)

    def _worth(self, load: Load, batch: int) -> float:
        """The chance of acceptance below which one more row costs more time than its token saves."""
        rows = round(batch * self._tokens_per_step)
        rate = batch * self._tokens_per_step / self._costs.at(rows, load.context, batch)
        return min(0.9, rate * self._costs.slope(rows, load.context, batch))
