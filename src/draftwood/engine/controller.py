"""How much to guess."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from draftwood.costs import StepCosts
from draftwood.drafting import padded_batch, tree_sizes
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

    tokens: float  # on average
    least: float  # the one that gains least
    seconds: float
    assumed: bool  # of the time: nobody has measured it

    @property
    def rate(self) -> float:
        """Tokens a second, or a plain step, of the one that gains least."""
        return self.least / self.seconds

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
class Look:
    """Why a step has nodes though they do not seem to pay."""

    nodes: int

    def __str__(self) -> str:
        return f"{_nodes(self.nodes)}, to see who has something to propose by now"


@dataclass(frozen=True, slots=True)
class WorthTheRow:
    """Why a tree may have nodes down to a certain chance."""

    nodes: int
    chance: float

    def __str__(self) -> str:
        return f"up to {_nodes(self.nodes)}: one more row pays from a chance of {self.chance:.2f}"


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


def _of_the_last(batch: int) -> float:
    """The power of a guess's chance that is its chance for the sequence which gains least of a batch, or near it.

    That one pays for everybody's rows like the others, and a batch is done when it is. By an H200's costs, n-grams in
    128 chats took up to 4 % longer than none by averages until the last was done; by this power half a percent.
    """
    return 2 - 1 / batch


ALWAYS = 0.99  # share of sequences that get proposals from a drafter which never has none
STAY = 1.02  # how much faster something else has to be: another size wants a round of its own, a pause reading up


def _best_rate(outlooks: dict[int, Outlook], last: int | None) -> Budget:
    """The number of nodes with the most tokens a second for the sequence that gains least; the fewer at a tie, and as
    many as in the `last` step unless others are clearly better.
    """
    best = max(outlooks, key=lambda nodes: outlooks[nodes].rate)
    if last is not None and outlooks[best].rate < STAY * outlooks[last].rate:
        best = last
    return Budget(best, why=BestRate(best, outlooks[best], outlooks[0]))


def _tokens(share: float, chances: Sequence[float]) -> list[float]:
    """Of a step by how many are guessed: a share of sequences guesses, and is right with such chances."""
    return list(itertools.accumulate((share * chance for chance in chances), initial=1.0))


class DraftingTime:
    """What guessing adds to a step, learned from steps, by how many sequences guess together.

    A draft model takes hardly longer for eight sequences than for one, a search in the text eight times as long: so
    nothing is said about other batches, except where nobody knows better.
    """

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        # Bits of the number of sequences -> seconds of each part. Replaced, never changed: other threads may read it.
        self._known: dict[int, float] = {}

    def of(self, batch: int) -> float:
        """Seconds of one part, for so many sequences or the nearest number that has been seen."""
        bits, times = batch.bit_length(), self._known
        return times[min(times, key=lambda known: abs(known - bits))] if times else 0.0

    def learn(self, report: StepReport, parts: int = 1) -> None:
        """Of a step that guessed, in so many parts of which each takes as long."""
        seconds = self._beside_the_target(report)
        if seconds is None:
            return
        known = self.of(report.num_sampling)
        change = seconds / parts - known
        # Down quickly, up slowly: a proposal that had to read a prompt first says little about the next.
        learned = known + change * (0.3 if change < 0 else 0.05)
        self._known = self._known | {report.num_sampling.bit_length(): learned}

    def with_target(self, report: StepReport, parts: int) -> float | None:
        """Seconds of a whole step with so many parts of drafting; None where the target's were never measured."""
        if self._costs.assumed:
            return None
        target = self._costs.at(report.num_rows, report.context, report.num_sampling)
        return target + parts * self.of(report.num_sampling)

    def forget(self, kept: float) -> None:
        """Hope for better times."""
        self._known = {bits: kept * seconds for bits, seconds in self._known.items()}

    def _beside_the_target(self, report: StepReport) -> float | None:
        """As far as can be told."""
        if self._costs.assumed:
            return None
        if report.step_seconds is None:
            return report.draft_seconds
        target = self._costs.at(report.num_rows, report.context, report.num_sampling)
        return max(0.0, report.step_seconds - target)


class MeasuredBudget:
    """As many nodes of a chain as pay, by what rows cost on this machine and how many guesses have come true lately.

    What it decides with is known before the step's tokens are drawn, so no law's exactness is touched.
    """

    MEMORY = 0.97  # what a step's weight becomes with each one after it
    BOREDOM = 0.997  # the same for steps without guesses: what was given up is tried again some time
    LOOKING = 0.003  # share of such steps' time that may go into seeing who has something to propose by now
    PRIOR = 0.7  # chance that a node behind an accepted one is accepted, before anything is known
    PRIOR_WEIGHT = 2.0

    def __init__(self, costs: StepCosts, max_nodes: int) -> None:
        self._costs = costs
        self._most = max_nodes
        self._sizes = tree_sizes(max_nodes)
        self._hits = [0.0] * (max_nodes + 1)
        self._trials = [0.0] * (max_nodes + 1)
        self._last: int | None = None  # nodes of the last round
        self._drafting = DraftingTime(costs)  # in parts of one token of every sequence
        self._proposing = 1.0  # share of sequences that get a proposal
        self._saved = 0.0  # plain steps that may go into a look

    def budget(self, load: Load) -> Budget:
        """The size with the best ratio of expected tokens to expected time."""
        batch = max(load.num_running, 1)
        share, chances = max(self._proposing, 1 / batch), self.survival()
        tokens = _tokens(share, chances)
        least = _tokens(share, [chance ** _of_the_last(batch) for chance in chances])
        drafting = self._drafting.of(batch)

        def outlook(nodes: int) -> Outlook:
            rows = padded_batch(batch) * (1 + nodes) if load.padded else round(batch * (1 + share * nodes))
            seconds = self._costs.at(rows, load.context, batch) + nodes * drafting
            return Outlook(tokens[nodes], least[nodes], seconds, self._costs.assumed)

        if not load.padded:
            return _best_rate({nodes: outlook(nodes) for nodes in range(self._most + 1)}, None)
        outlooks = {nodes: outlook(nodes) for nodes in self._sizes}
        budget = _best_rate(outlooks, self._last)
        self._last = budget.max_nodes
        return budget if budget.max_nodes else self._look(outlooks) or budget

    def _look(self, outlooks: dict[int, Outlook]) -> Budget | None:
        """Now and then, where everybody runs the rows of those who propose: who does cannot be told without asking."""
        some = max(filter(None, outlooks), key=lambda nodes: outlooks[nodes].rate, default=0)
        price = outlooks[some].seconds / outlooks[0].seconds - 1
        if self._proposing > ALWAYS or self._saved <= price:
            return None
        self._saved = 0.0
        return Budget(some, why=Look(some))

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
        if not report.num_sampling:
            return  # all of them had ended already
        if not report.room:
            return self._hope()
        proposed = [(drafted, accepted) for drafted, accepted in report.outcomes if drafted]
        if proposed:
            self._forget(self.MEMORY)
            self._drafting.learn(report, parts=max(drafted for drafted, _ in proposed))
        for drafted, accepted in proposed:
            for depth in range(1, min(drafted, accepted + 1, self._most) + 1):
                self._trials[depth] += 1
                self._hits[depth] += accepted >= depth
        self._proposing += 0.05 * (len(proposed) / report.num_sampling - self._proposing)

    def predicted_seconds(self, report: StepReport) -> float | None:
        """The target's rows by the cost table, and what drafting has taken lately; any thread may ask."""
        parts = max((drafted for drafted, _ in report.outcomes), default=0)
        return self._drafting.with_target(report, parts)

    def _hope(self) -> None:
        """Nobody was allowed to guess: what was against it counts for a little less than before."""
        self._forget(self.BOREDOM)
        self._drafting.forget(self.BOREDOM)
        self._saved += self.LOOKING

    def _forget(self, kept: float) -> None:
        self._hits = [kept * hits for hits in self._hits]
        self._trials = [kept * trials for trials in self._trials]


class MeasuredTreeBudget:
    """The same for trees. Where each may have a size of its own, it has nodes down to the chance that pays for a row;
    where all run as many, the size with the best ratio of expected tokens to expected time.
    """

    LEARNING = 0.05
    BOREDOM = 0.005  # how fast hope comes back in steps without guesses
    HOPE = 3.0  # tokens that the largest tree is expected to gain before anything is known
    # Gains grow like this power of the logarithm of a tree's size; beams of the shipped block head and EAGLE-3 with 6,
    # 31 and 63 nodes lie within a tenth of it.
    POWER = 0.6

    def __init__(self, costs: StepCosts, max_nodes: int) -> None:
        self._costs, self._most = costs, max_nodes
        self._gain = self.HOPE  # tokens of one sequence and step, by the largest tree
        self._last: int | None = None  # nodes of the last round
        self._drafting = DraftingTime(costs)
        self._tokens_per_step = 1.0  # of one sequence
        self._sizes = tree_sizes(max_nodes)

    def budget(self, load: Load) -> Budget:
        """As the device runs them."""
        batch = max(load.num_running, 1)
        if not load.padded:
            least = self._least_prob(load, batch)
            return Budget(self._most, least, WorthTheRow(self._most, least))
        budget = _best_rate({nodes: self._outlook(nodes, load, batch) for nodes in self._sizes}, self._last)
        self._last = budget.max_nodes
        return budget

    def _outlook(self, nodes: int, load: Load, batch: int) -> Outlook:
        rows = padded_batch(batch) * (1 + nodes)
        drafting = self._drafting.of(batch) if nodes else 0.0
        seconds = self._costs.at(rows, load.context, batch) + drafting
        gain = self._gain * self._share(nodes)
        last = (gain / (1 + gain)) ** _of_the_last(batch)  # one guess behind the other, each with the same chance
        return Outlook(1 + gain, 1 / (1 - last), seconds, self._costs.assumed)

    def _share(self, nodes: float) -> float:
        """What a tree of so many nodes gains, of what the largest would."""
        return (math.log1p(nodes) / math.log1p(self._most)) ** self.POWER

    def observe(self, report: StepReport) -> None:
        """Remember what trees gained, by their size, and what they took."""
        if not report.num_sampling:
            return
        if report.room:
            trees = [drafted for drafted, _ in report.outcomes if drafted] or [report.room]
            gain = report.accepted / report.num_sampling  # those without a tree wait for the others all the same
            self._gain += self.LEARNING * (gain / self._share(sum(trees) / len(trees)) - self._gain)
            self._drafting.learn(report)
        else:
            self._gain += self.BOREDOM * max(0.0, self.HOPE - self._gain)
            self._drafting.forget(1 - self.BOREDOM)
        self._tokens_per_step += 0.05 * (report.emitted / report.num_sampling - self._tokens_per_step)

    def predicted_seconds(self, report: StepReport) -> float | None:
        """The target's rows by the cost table, and what drafting has taken lately; any thread may ask."""
        return self._drafting.with_target(report, parts=1 if report.drafted else 0)

    def _least_prob(self, load: Load, batch: int) -> float:
        """The chance of acceptance below which one more row costs more time than its token saves."""
        rows = round(batch * self._tokens_per_step)
        rate = batch * self._tokens_per_step / self._costs.at(rows, load.context, batch)
        return min(0.9, rate * self._costs.slope(rows, load.context, batch))
