"""What steps take: a cost table, corrected by the steps that run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from draftwood.costs import StepCosts
from draftwood.protocols import StepReport

MOST_PROMPT_ROWS = 1 << 16  # that a step is asked about


class Mean(NamedTuple):
    """An average that forgets. Replaced, never changed: other threads may read it."""

    value: float = 0.0
    weight: float = 0.0  # samples that it stands for

    def learn(self, sample: float, of: float = 1.0, most: float = 20.0) -> Mean:
        """With one more sample, of this weight; the average stands for `most` at most."""
        weight = min(self.weight, most - of) + of
        return Mean(self.value + (sample - self.value) * of / weight, weight)

    def fade(self, kept: float, least: float = 0.0) -> Mean:
        """The same value, easier to change."""
        return Mean(self.value, max(kept * self.weight, min(self.weight, least)))


class CorrectedCosts:
    """A cost table, and for each size of step how much longer steps take here than it says.

    Sizes are half powers of two of rows. One that was never run is corrected as its neighbours are. An assumed table
    is in plain steps of another machine; the first step that is measured says what one takes here.
    """

    SHARED = 0.5  # what a correction counts for a bucket one further, relative to the one it was measured in
    SURPRISE = math.log(1.25)  # a single step changes a known correction as if it were off by no more than this

    def __init__(self, table: StepCosts) -> None:
        self.table = table
        self._logs: dict[int, Mean] = {}  # bucket -> logarithm of measured / table

    @property
    def known(self) -> bool:
        """Whether any step was measured."""
        return bool(self._logs)

    @property
    def assumed(self) -> bool:
        """Whether no time was ever measured on this machine, neither beforehand nor since."""
        return self.table.assumed and not self._logs

    def observe(self, rows: int, context: float, batch: int, seconds: float) -> None:
        """What the target took for a step."""
        if rows < 1 or seconds <= 0:
            return
        bucket, sample = _bucket(rows), math.log(seconds / self.table.at(rows, context, batch))
        known = self._logs.get(bucket, Mean())
        if known.weight >= 3:
            sample = min(max(sample, known.value - self.SURPRISE), known.value + self.SURPRISE)
        elif known.weight:  # nothing makes a step faster: of the first few, the fastest
            sample = min(sample, known.value)
            known = Mean(sample, known.weight)
        self._logs = self._logs | {bucket: known.learn(sample)}

    def at(self, rows: int, context: float = 0, batch: int = 1) -> float:
        """Seconds of a step; in plain steps while all of it is assumed."""
        return self.table.at(rows, context, batch) * self.ratio(rows)

    def slope(self, rows: int, context: float, batch: int) -> float:
        """Seconds that one more row costs, on average over the next few."""
        over = max(8, rows)  # over a whole bucket: their corrections are noisy
        return max(0.0, self.at(rows + over, context, batch) - self.at(rows, context, batch)) / over

    def ratio(self, rows: float) -> float:
        """Measured / table."""
        if not self._logs:
            return 1.0
        bucket = _bucket(rows)
        own = self._logs.get(bucket, Mean())
        total, weight = 0.0, 0.0 if self.table.assumed else 1.0
        for other, mean in self._logs.items():
            if other != bucket or own.weight < 1:
                share = mean.weight * self.SHARED ** abs(other - bucket)
                total, weight = total + share * mean.value, weight + share
        shared = total / weight if weight else own.value
        return math.exp((own.weight * own.value + shared) / (own.weight + 1))


def _bucket(rows: float) -> int:
    return round(2 * math.log2(max(rows, 1)))


class _Drafting(NamedTuple):
    """Steps of one batch that drafted so many parts."""

    seconds: Mean = Mean()  # of drafting, or where it cannot be told apart of the whole step
    table: Mean = Mean()  # what the table says of the target's share in them
    rows: float = 0.0

    def extra(self, ratio: float) -> float:
        """What is not the target's."""
        return self.seconds.value - ratio * self.table.value


class StepTiming:
    """The target's rows by corrected costs, and what drafting adds to them, by batch and size.

    Where a step's time is only known as a whole, what a size adds is what it took beyond the target's costs, so an
    error of the table at that size is in it, and the sum is right.
    """

    SURE = 5.0  # steps after which a size is judged by its own times alone

    def __init__(self, table: StepCosts, forwards: Callable[[int], float]) -> None:
        self.costs = CorrectedCosts(table)
        self._mixed = CorrectedCosts(table)  # of steps with rows of prompts
        self._forwards = forwards  # of a drafter for each size: what a size takes that never ran is told by it
        self._known: dict[int, dict[int, _Drafting]] = {}  # bits of the batch -> size -> times
        self._beside: dict[int, Mean] = {}  # bits of the batch -> what drafters keep up with in plain steps

    def learn(self, report: StepReport, size: int) -> None:
        """A step that ran undisturbed; `size`: what was drafted for each sequence, 0 for a plain step."""
        seconds, drafting = report.step_seconds, report.draft_seconds
        told = (report.num_rows, report.context, report.num_sampling)
        if drafting is not None:
            if size:
                self._learn_drafting(report, size, drafting, 0.0)
            elif seconds is not None:
                bits = report.num_sampling.bit_length()
                self._beside = self._beside | {bits: self._beside.get(bits, Mean()).learn(drafting)}
            if seconds is not None:
                self.costs.observe(*told, seconds - drafting)
        elif seconds is not None and size:
            self._learn_drafting(report, size, seconds, self.costs.table.at(*told))
        elif seconds is not None:
            self.costs.observe(*told, seconds)

    def learn_prompts(self, report: StepReport, size: int) -> None:
        """A step with rows of prompts beside those that decode."""
        rows, seconds = report.num_rows + report.prompt_rows, report.whole_seconds
        if report.prompt_rows and seconds is not None:
            drafting = self.drafting(report.num_sampling, size)
            self._mixed.observe(rows, report.context, report.num_sampling, seconds - drafting)

    def prompt_rows(self, rows: int, context: float, batch: int, seconds: float) -> int:
        """Rows of prompts beside `rows` of others with which the target takes no more than so long; 0 if it takes
        longer even without.
        """
        mixed = self._mixed if self._mixed.known else self.costs
        least, most = 0, MOST_PROMPT_ROWS
        while least < most:
            middle = (least + most + 1) // 2
            fits = mixed.at(rows + middle, context, batch) <= seconds
            least, most = (middle, most) if fits else (least, middle - 1)
        return least

    def _learn_drafting(self, report: StepReport, size: int, seconds: float, table: float) -> None:
        bits = report.num_sampling.bit_length()
        sizes = self._known.get(bits, {})
        known = sizes.get(size, _Drafting())
        if known.seconds.weight >= 3:
            seconds = min(seconds, max((1.25 if table else 2) * known.seconds.value, 1e-4))
        elif known.seconds.weight:  # of the first few, the fastest: drafters read prompts at first
            seconds = min(seconds, known.seconds.value)
            known = known._replace(seconds=Mean(seconds, known.seconds.weight))
        learned = _Drafting(known.seconds.learn(seconds), known.table.learn(table), report.num_rows)
        self._known = self._known | {bits: sizes | {size: learned}}

    def at(self, rows: int, context: float, batch: int, size: int) -> float:
        """Seconds of a whole step."""
        return self.costs.at(rows, context, batch) + self.drafting(batch, size)

    def drafting(self, batch: int, size: int, *, by_table: bool = False) -> float:
        """Seconds that drafting adds; `by_table`: to what the table says as it was given."""
        bits = batch.bit_length()
        if not size:
            return self._beside.get(bits, Mean()).value
        if not self._known:
            return 0.0
        sizes = self._known.get(bits) or self._known[min(self._known, key=lambda known: abs(known - bits))]
        own = sizes.get(size, _Drafting())
        sure = min(1.0, own.seconds.weight / self.SURE)
        others = [known for known in sizes if known != size]
        shared = 0.0
        if sure < 1 and others:
            nearest = min(others, key=lambda known: abs(math.log(known / size)))
            scale = self._forwards(size) / self._forwards(nearest)
            weight = min(1.0, sizes[nearest].seconds.weight / self.SURE)
            shared = scale * weight * self._extra(sizes[nearest], by_table)
        return sure * self._extra(own, by_table) + (1 - sure) * shared

    def _extra(self, known: _Drafting, by_table: bool) -> float:
        if known.table.value and self.costs.assumed:
            return 0.0  # seconds and plain steps cannot be compared
        return known.extra(1.0 if by_table else self.costs.ratio(known.rows))

    def predicted(self, report: StepReport, size: int) -> float | None:
        """By the table as it was given, and what drafting adds; None where nothing was measured to tell by."""
        table = self.costs.table
        if table.assumed:
            return None
        by_table = table.at(report.num_rows, report.context, report.num_sampling)
        return by_table + self.drafting(report.num_sampling, size, by_table=True)

    def steps(self, batch: int, size: int) -> float:
        """How many steps of a size are known with about so many sequences."""
        return self._known.get(batch.bit_length(), {}).get(size, _Drafting()).seconds.weight

    def fade(self, kept: float) -> None:
        """What drafting took is believed a little less than before."""
        self._known = {
            bits: {size: known._replace(seconds=known.seconds.fade(kept)) for size, known in sizes.items()}
            for bits, sizes in self._known.items()
        }
