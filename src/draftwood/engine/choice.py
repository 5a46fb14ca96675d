"""Which of several drafters drafts for each request: the one with the most tokens for its time, by what became of
earlier drafts of that request and of all.

It follows from past steps and the clock alone, before a step's tokens are drawn, so no law's exactness is touched.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from draftwood.costs import StepCosts
from draftwood.engine.timing import Mean
from draftwood.protocols import Budget, Controller, Load, PredictsSeconds, StepReport

NONE = "none"  # where others of a batch are drafted for
READING = 0.1  # what a drafter takes to read rows that it missed, of what the target would take for them


@dataclass
class _Request:
    """What is known of one."""

    gains: dict[str, Mean] = field(default_factory=dict)  # accepted tokens of a step, by drafter
    behind: int = 0  # tokens since a drafter that reads texts has drafted for it


class ChoosingBudget:
    """As much as another controller says, and who drafts for whom."""

    FIRST = 6  # steps of each drafter before any is chosen
    OWN, ALL = 16.0, 300.0  # steps that what a request gains stands for, and what all of them gain
    PRIOR = 6.0  # steps of its own that what all requests gain is worth to one
    FADE, OLD, LEAST = 0.97, 0.98, 0.5  # what a request's gain counts after a step of another drafter, and that of all
    SPREAD = 1.5  # deviation of what steps gain
    LOOKING = 0.03  # share of steps in which a request may have a drafter that does not seem best
    HORIZON = 50  # steps within which it has to be worth it that a drafter reads what it missed

    def __init__(
        self, inner: Controller, costs: StepCosts, names: Sequence[str], reads: frozenset[str] = frozenset()
    ) -> None:
        self.inner, self.names = inner, tuple(names)
        self._costs, self._reads = costs, reads
        self._all: dict[str, Mean] = {}
        self._steps = Counter[str]()
        self._times: dict[tuple[int, str], Mean] = {}  # of a step by bits of the batch; 1: a plain one, by the table
        self._requests: dict[int, _Request] = {}
        self._rate, self._saved = 1.0, 0.0

    def budget(self, load: Load) -> Budget:
        """With a drafter for every request that names none."""
        budget = self.inner.budget(load)
        self._requests = {seq: self._requests.get(seq) or _Request() for seq in load.sequences}
        if not (budget.max_nodes and load.sequences):
            return budget
        new = next((name for name in self.names if self._steps[name] < self.FIRST), None)
        chosen = self._chosen(load) if new is None else dict.fromkeys(load.sequences, new)
        return replace(budget, drafters=chosen)

    def predicted_seconds(self, report: StepReport) -> float | None:
        """As the other controller has it."""
        return self.inner.predicted_seconds(report) if isinstance(self.inner, PredictsSeconds) else None

    def observe(self, report: StepReport) -> None:
        """What drafts gained by drafter and request, and what steps took."""
        self.inner.observe(report)
        if not report.num_sampling:
            return
        outcomes = zip(report.sequences, report.drafters, report.outcomes, strict=True)
        users = Counter(name or NONE for name in report.drafters) if report.room else Counter({NONE: 1})
        self._steps.update(users.keys())
        for name in self._all.keys() - users.keys():
            self._all[name] = self._all[name].fade(self.OLD, self.LEAST)
        for seq, name, (_, accepted) in outcomes:
            request = self._requests.get(seq, _Request())
            request.behind = 0 if report.room and name in self._reads else request.behind + accepted + 1
            if report.room and name is not None and name != NONE:
                self._learn_gain(request, name, accepted)
        if report.step_seconds and not users.keys() - {NONE, *self.names}:
            self._learn_time(report, users, report.step_seconds)

    def _learn_gain(self, request: _Request, name: str, accepted: int) -> None:
        self._all[name] = self._all.get(name, Mean()).learn(accepted, most=self.ALL)
        for other, known in request.gains.items():
            request.gains[other] = known.fade(self.FADE)
        request.gains[name] = request.gains.get(name, Mean()).learn(accepted, most=self.OWN)

    def _learn_time(self, report: StepReport, users: Counter[str], seconds: float) -> None:
        """Of the drafters that a step had; what it took otherwise than expected is laid to each by its share."""
        bits, shared = report.num_sampling.bit_length(), report.draft_seconds is None
        took = seconds / self._costs.at(report.num_sampling, report.context, report.num_sampling)
        total = sum(users.values())
        shares = {name: count / total for name, count in users.items()}
        wrong = took - self._time(shares, self._known_times(bits), shared)
        for name, share in shares.items():
            known = self._times.get((bits, name), Mean())
            sample = known.value + wrong if known.weight else took
            if known.weight >= 3:  # one slow step is no verdict
                sample = min(sample, 1.25 * known.value)
            self._times[bits, name] = known.learn(max(sample, 0.0), share)

    def _known_times(self, bits: int) -> dict[str, float]:
        """Of each drafter alone with about so many sequences; of one that is not known the least of all."""
        nearest: dict[str, tuple[int, float]] = {}
        for (other, name), known in self._times.items():
            far = abs(other - bits)
            if known.weight and far <= nearest.get(name, (far, 0.0))[0]:
                nearest[name] = far, known.value
        least = min((value for _, value in nearest.values()), default=1.0)
        return {name: nearest.get(name, (0, least))[1] for name in (NONE, *self.names)}

    @staticmethod
    def _time(shares: Mapping[str, float], times: Mapping[str, float], shared: bool) -> float:
        """Of a step in which such shares of the sequences have each drafter; where rows are `shared` a drafter runs for
        all if it runs for any.
        """
        if not shared:
            return sum(share * times[name] for name, share in shares.items())
        return times[NONE] + sum(max(0.0, times[name] - times[NONE]) for name in shares)

    def _chosen(self, load: Load) -> dict[int, str]:
        """The drafters with the most tokens per second of everything that runs."""
        times = self._known_times(load.num_running.bit_length())
        alone = len(load.sequences) == 1  # then whether to draft at all is what the budget says
        sets = [self.names if alone else (*self.names, NONE)]
        if load.padded:
            sets = [own for n in range(1, len(self.names) + 1) for own in itertools.combinations(self.names, n)]
        best, rate = {}, 0.0
        for names in sets:
            chosen = {seq: self._best(request, names, times, load) for seq, request in self._requests.items()}
            tokens = sum(1 + self._gain(self._requests[seq], name).value for seq, name in chosen.items())
            shares = {name: count / len(chosen) for name, count in Counter(chosen.values()).items()}
            own = tokens / len(chosen) / max(self._time(shares, times, load.padded), 1e-9)
            if own > rate:
                best, rate = chosen, own
        self._rate = rate
        return self._with_looks(best, times, load)

    def _with_looks(self, chosen: dict[int, str], times: Mapping[str, float], load: Load) -> dict[int, str]:
        """Also what may be better than it seems, in a bounded share of steps."""
        self._saved = min(self._saved + self.LOOKING * len(chosen), 2.0 * len(chosen))
        for seq, request in self._requests.items():
            other = self._best(request, self.names, times, load, hoping=True)
            price = float(len(chosen)) if load.padded and other not in chosen.values() else 1.0
            price += self.HORIZON * self._catching_up(request, other, load)
            if other != chosen[seq] and self._saved >= price:
                self._saved -= price
                chosen[seq] = other
        return chosen

    def _best(
        self,
        request: _Request,
        names: Sequence[str],
        times: Mapping[str, float],
        load: Load,
        *,
        hoping: bool = False,
    ) -> str:
        """What a drafter gains a request, less what others would gain in the time that it takes."""

        def worth(name: str) -> float:
            own = 0.0 if load.padded else self._rate * times[name]
            gain, weight = self._gain(request, name)
            hope = self.SPREAD / math.sqrt(weight) if hoping else 0.0
            return gain + hope - own - self._rate * self._catching_up(request, name, load)

        return max(names, key=worth)

    def _gain(self, request: _Request, name: str) -> Mean:
        """Accepted tokens of a step: its own, and what all requests had lately while there are few."""
        own, every = request.gains.get(name, Mean()), self._all.get(name, Mean())
        others = min(self.PRIOR, max(every.weight, self.LEAST))
        weight = own.weight + others
        return Mean((own.weight * own.value + others * every.value) / weight, weight)

    def _catching_up(self, request: _Request, name: str, load: Load) -> float:
        """Until a drafter has read what it missed, in plain steps of the table and for each step of the horizon."""
        if name not in self._reads or not request.behind:
            return 0.0
        rows = self._costs.at(request.behind, load.context) / self._costs.at(1, load.context)
        return READING * rows / self.HORIZON
