"""Policies of the field, under their own names: to compare with, and for those who know their load."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from draftwood.costs import StepCosts
from draftwood.drafting import padded_batch, tree_sizes
from draftwood.engine.reasons import BestRate, Look, Outlook, count
from draftwood.engine.timing import Mean, StepTiming
from draftwood.protocols import Budget, Load, StepReport


class GoodputBudget:
    """Of all sizes that with the most expected tokens per second, every node being right with the same chance
    (SmartSpec, TurboSpec): no measured modes, no hysteresis. Drafting has to win by a tenth.
    """

    PLAIN = 1.1  # what plain steps count for
    START, MEMORY = 0.7, 200.0  # chance before anything is known, and nodes that it stands for
    PATIENCE = 64  # plain steps before one with drafts, or nothing would ever be learned again

    def __init__(self, costs: StepCosts, max_nodes: int, depth: Callable[[int], int]) -> None:
        self._depth, self._sizes = depth, tree_sizes(max_nodes)
        self._timing = StepTiming(costs, lambda nodes: float(depth(nodes)))
        self._chance, self._plain = Mean(self.START, 10.0), 0

    def budget(self, load: Load) -> Budget:
        """By the formula."""
        batch = max(load.num_running, 1)
        outlooks = {nodes: self._outlook(nodes, load, batch) for nodes in self._sizes}
        best = max(outlooks, key=lambda nodes: outlooks[nodes].rate * (1.0 if nodes else self.PLAIN))
        if best == 0 and self._plain >= self.PATIENCE and len(self._sizes) > 1:
            return Budget(self._sizes[1], why=Look(self._sizes[1]))
        return Budget(best, why=BestRate(best, outlooks[best], outlooks[0]))

    def _outlook(self, nodes: int, load: Load, batch: int) -> Outlook:
        rows = (padded_batch(batch) if load.padded else batch) * (1 + nodes)
        tokens = sum(self._chance.value**depth for depth in range((self._depth(nodes) if nodes else 0) + 1))
        return Outlook(tokens, self._timing.at(rows, load.context, batch, nodes), self._timing.costs.assumed)

    def observe(self, report: StepReport) -> None:
        """What steps took, and which nodes that could be right were."""
        if not report.num_sampling:
            return
        self._timing.learn(report, report.room)
        self._plain = 0 if report.room else self._plain + 1
        for drafted, accepted in report.outcomes:
            depth = self._depth(drafted) if drafted else 0
            tried = min(depth, accepted + 1)
            if tried:
                self._chance = self._chance.learn(min(accepted, depth) / tried, float(tried), self.MEMORY)

    def predicted_seconds(self, report: StepReport) -> float | None:
        """As its formula has it."""
        return self._timing.predicted(report, report.room if report.drafted else 0)


class GammaTuneBudget:
    """A length that follows how many tokens are accepted (GammaTune): longer where whole chains are, else a little more
    than their mean. It measures no time, and never stops drafting.
    """

    GROWTH, MARGIN, MEMORY = 1.5, 1.0, 10.0

    def __init__(self, max_nodes: int, deepest: int) -> None:
        self._most, self._deepest = max_nodes, max(deepest, 1)
        self._length = Mean(self._deepest / 2, 2.0)

    def budget(self, load: Load) -> Budget:
        """The same length for all."""
        length = min(self._deepest, max(1, round(self._length.value)))
        nodes = round(length * self._most / self._deepest)
        return Budget(nodes, why=f"{count(nodes)}: {self._length.value:.1f} tokens deep is a little more than accepted")

    def observe(self, report: StepReport) -> None:
        """How far drafts came."""
        came = [accepted for drafted, accepted in report.outcomes if drafted]
        if not came:
            return
        length = self._length.value
        whole = sum(accepted >= round(length) for accepted in came) > len(came) / 2
        wanted = self.GROWTH * length if whole else sum(came) / len(came) + self.MARGIN
        self._length = self._length.learn(min(max(wanted, 1.0), self._deepest), most=self.MEMORY)


@dataclass
class _Bins:
    """Where a load stands in its blocks of bins: the first block has one bin, each further one twice as many."""

    block: int = 1  # bins of the present block
    bin: int = 0  # of these, the present one, from 1
    left: int = 0  # steps of it
    arm: int = 0

    def next(self) -> int:
        """The number of the next bin in its block."""
        self.bin += 1
        if self.bin > self.block:
            self.block, self.bin = 2 * self.block, 1
        return self.bin


@dataclass
class BanditBudget:
    """Of all sizes the one that was measured to take the least time for a token at this load (Nightjar's contextual
    bandit): a size stays for some steps, and the b-th choice of a block is a random one with chance 1/b.
    """

    max_nodes: int
    catching_up: Callable[[Load, int], float]  # seconds, after so many plain steps
    seed: int = 0
    STEPS = 8  # that a choice stays
    MEMORY = 50.0

    _bins: dict[int, _Bins] = field(default_factory=dict, init=False)  # by bits of the batch
    _times: dict[tuple[int, int], Mean] = field(default_factory=dict, init=False)  # seconds of a token
    _plain: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._sizes, self._random = tree_sizes(self.max_nodes), random.Random(self.seed)

    def budget(self, load: Load) -> Budget:
        """The present choice."""
        bits = max(load.num_running, 1).bit_length()
        bins = self._bins.setdefault(bits, _Bins())
        if bins.left == 0:
            bins.left = self.STEPS
            explores = self._random.random() < 1 / bins.next()
            bins.arm = self._random.choice(self._sizes) if explores else self._best(bits, load)
        bins.left -= 1
        known = self._times.get((bits, bins.arm), Mean())
        told = f"{1e3 * known.value:.2f} ms a token" if known.weight else "not measured yet"
        return Budget(bins.arm, why=f"{count(bins.arm)}: {told}")

    def _best(self, bits: int, load: Load) -> int:
        once = self.catching_up(load, self._plain) / self.STEPS if self._plain else 0.0
        times = {size: self._times.get((bits, size), Mean()).value for size in self._sizes}
        return min(times, key=lambda size: times[size] + (once if size and times[size] else 0.0))

    def observe(self, report: StepReport) -> None:
        """The time of a token; disturbed steps say nothing."""
        self._plain = 0 if report.room else self._plain + 1
        if report.num_sampling and report.step_seconds:
            size = max((own for own in self._sizes if own <= report.room), default=0)
            key = report.num_sampling.bit_length(), size
            time = report.step_seconds * report.num_sampling / report.emitted
            self._times[key] = self._times.get(key, Mean()).learn(time, most=self.MEMORY)
