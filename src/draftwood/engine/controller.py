"""How much to guess."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

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

    def __str__(self) -> str:
        return f"{self.tokens:.2f} expected tokens in {self.seconds * 1000:.2f} ms"


@dataclass(frozen=True, slots=True)
class BestRate:
    """Why a chain has as many nodes as it has; put into words only where somebody asks."""

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


class MeasuredBudget:
    """As many nodes as pay, by what rows cost on this machine and how many guesses have come true lately.

    What it decides with is known before the step's tokens are drawn, so no law's exactness is touched.
    """

    MEMORY = 0.97  # what a proposal's weight becomes with each one after it
    BOREDOM = 0.99  # the same for steps without any: what was given up is tried again some time
    PRIOR = 0.7  # chance that a node behind an accepted one is accepted, before anything is known
    PRIOR_WEIGHT = 2.0

    def __init__(self, costs: StepCosts, max_nodes: int, *, chain: bool) -> None:
        self._costs = costs
        self._most = max_nodes
        self._chain = chain
        self._hits = [0.0] * (max_nodes + 1)
        self._trials = [0.0] * (max_nodes + 1)
        self._draft_seconds = 0.0  # of one node
        self._proposing = 1.0  # share of sequences that get a proposal
        self._tokens_per_step = 1.0  # of one sequence

    def budget(self, load: Load) -> Budget:
        """The size with the best ratio of expected tokens to expected time."""
        batch = max(load.num_running, 1)
        if not self._chain:
            worth = self._worth(load, batch)
            return Budget(self._most, worth, WorthTheRow(self._most, worth))
        share = max(self._proposing, 1 / batch)
        gains, gain = [0.0], 0.0
        for chance in self.survival():
            gain += chance
            gains.append(gain)

        def outlook(nodes: int) -> Outlook:
            rows = round(batch * (1 + (1 if load.padded else share) * nodes))
            drafting = batch * share * nodes * self._draft_seconds
            return Outlook(1 + share * gains[nodes], self._costs.at(rows, load.context, batch) + drafting)

        outlooks = [outlook(nodes) for nodes in range(self._most + 1)]
        best = max(range(self._most + 1), key=lambda nodes: outlooks[nodes].tokens / outlooks[nodes].seconds)
        return Budget(best, why=BestRate(best, outlooks[best], outlooks[0]))

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
            self._tokens_per_step += 0.05 * (report.emitted / report.num_sampling - self._tokens_per_step)

    def _learn_cost(self, report: StepReport) -> None:
        seconds = report.draft_seconds
        if report.step_seconds is not None:
            seconds = max(0.0, report.step_seconds - self._costs.at(report.num_rows, 0, max(report.num_sampling, 1)))
        if seconds is None:
            return
        # Down quickly, up slowly: a proposal that had to read a prompt first says little about the next.
        change = seconds / report.drafted - self._draft_seconds
        self._draft_seconds += change * (0.3 if change < 0 else 0.05)

    def _forget(self, kept: float) -> None:
        self._hits = [kept * hits for hits in self._hits]
        self._trials = [kept * trials for trials in self._trials]

    def _worth(self, load: Load, batch: int) -> float:
        """The chance of acceptance below which one more row costs more time than its token saves."""
        rows = round(batch * self._tokens_per_step)
        rate = batch * self._tokens_per_step / self._costs.at(rows, load.context, batch)
        return min(0.9, rate * self._costs.slope(rows, load.context, batch))
