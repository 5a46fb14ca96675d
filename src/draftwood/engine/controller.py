"""How much to draft: policies behind the `Controller` protocol.

What they decide with is known before the step's tokens are drawn, so no law's exactness is touched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from draftwood.costs import StepCosts
from draftwood.drafting import padded_batch, tree_sizes
from draftwood.engine.acceptance import ChainAcceptance, TreeAcceptance
from draftwood.engine.choice import READING
from draftwood.engine.promises import keeping, prompt_rows
from draftwood.engine.reasons import BestRate, KeepsPromises, Look, MeasuredFaster, Outlook, WorthTheRow, count
from draftwood.engine.timing import Mean, StepTiming
from draftwood.protocols import Budget, Gain, Load, StepReport


class FixedBudget:
    """The same number of nodes in every step."""

    def __init__(self, max_nodes: int) -> None:
        if max_nodes < 0:
            raise ValueError("a budget cannot be negative")
        self._budget = Budget(max_nodes, why=f"always {count(max_nodes)}")

    def budget(self, load: Load) -> Budget:
        """Always the same."""
        return self._budget

    def observe(self, report: StepReport) -> None:
        """Nothing to learn."""


class _Rates:
    """Measured tokens per second with drafting and without, by how many sequences run.

    In units of what the cost table says of a plain step at that load, so that the fill of a batch and the length of
    its contexts do not look like a difference between the modes.
    """

    MEMORY = 10.0  # steps that a rate stands for
    OLD = 0.98  # what a mode's rate counts after a step of the other
    ENOUGH = 1.0, 5.0  # steps from which on the rate without and with drafting is believed; tokens vary, times hardly

    def __init__(self, table: StepCosts) -> None:
        self._table = table
        self._known: dict[tuple[int, bool], Mean] = {}

    def observe(self, report: StepReport) -> None:
        """A step; one that was disturbed says nothing."""
        mode, other = ((report.num_sampling.bit_length(), drafts) for drafts in (report.room > 0, not report.room))
        if other in self._known:
            self._known[other] = self._known[other].fade(self.OLD)
        if report.step_seconds:
            plain = self._table.at(padded_batch(report.num_sampling), report.context, report.num_sampling)
            rate = report.emitted / report.num_sampling * plain / report.step_seconds
            known = self._known.get(mode, Mean())
            if known.weight and not report.room:  # all plain steps give as much: a slow one was disturbed
                rate = max(rate, 0.9 * known.value)
                known = Mean(max(rate, known.value), known.weight) if known.weight < 3 else known
            self._known[mode] = known.learn(rate, most=self.MEMORY)

    def join(self, batch: int, share: float) -> None:
        """Such a share of the sequences is new: what drafts gained the others says nothing of them."""
        mode = batch.bit_length(), True
        if mode in self._known:
            self._known[mode] = self._known[mode].fade(1 - share)

    def better(self, batch: int, *, drafting: bool) -> float | None:
        """How many times as fast the one mode was as the other; None where one was not measured lately."""
        bits = batch.bit_length()
        rates = [self._known.get((bits, mode), Mean()) for mode in (False, True)]
        if any(rate.weight < enough or not rate.value for rate, enough in zip(rates, self.ENOUGH, strict=True)):
            return None
        return rates[drafting].value / rates[not drafting].value

    def steps(self, batch: int, *, drafting: bool) -> float:
        """How many steps are known, fewer the older they are."""
        return self._known.get((batch.bit_length(), drafting), Mean()).weight


class _Probes:
    """Short looks at the mode that is not in use, in a bounded share of time."""

    STEPS = 2  # of one look
    PRICE = 0.1  # of one step at least, in steps: what a look takes beyond what can be foreseen

    def __init__(self, share: float) -> None:
        self._share = share
        self._saved = 0.0  # steps' time that may go into looks
        self._left = 0  # steps of the look under way

    def begin_free(self) -> None:
        """A look that has not to be saved for: the mode was never measured."""
        self._left = self.STEPS

    def save(self) -> None:
        """For a step that was no look."""
        self._saved += self._share

    @property
    def under_way(self) -> bool:
        """Whether a look is not over yet."""
        return self._left > 0

    def step(self, price: float, once: float = 0.0) -> bool:
        """Whether the next step is one of a look; of the `price` of each of its steps, and `once` for all of them."""
        if self._left == 0 and self._saved > self.STEPS * max(price, self.PRICE) + once:
            self._left, self._saved = self.STEPS, self._saved - once
        if self._left == 0:
            return False
        self._left -= 1
        self._saved = max(0.0, self._saved - max(price, self.PRICE))
        return True


class _Acceptance(Protocol):
    """What a policy knows of a drafter."""

    def observe(self, report: StepReport) -> None:
        """A step that had room for drafts."""
        ...

    def fade(self) -> None:
        """A step that had none."""
        ...

    def join(self, share: float) -> None:
        """Such a share of the sequences is new."""
        ...


class _Goodput:
    """The size with the most expected tokens per second of everything that runs.

    Estimates choose among sizes; between drafting and not drafting the clock has the last word where it knows both.
    What is not in use is tried now and then, for a bounded share of the time.
    """

    STAY = 1.02  # how much faster something else has to be: another size wants a captured step of its own
    LOOKING = 0.005  # share of time that may go into looks
    BESIDE = 0.003  # and into looks at other sizes
    TRIES = 4  # steps of a size that was never timed
    EARLY = 8  # steps with drafts after which plain steps are measured, where they never were
    BOREDOM = 0.997  # what times of drafting count after a step without
    HORIZON = 50  # steps within which it has to be worth it that a drafter reads what it missed

    def __init__(
        self,
        costs: StepCosts,
        max_nodes: int,
        acceptance: _Acceptance,
        forwards: Callable[[int], float],
        *,
        reads: bool,
    ) -> None:
        self._most, self._reads = max_nodes, reads
        self._timing, self._guesses = StepTiming(costs, forwards), costs.assumed
        self._rates, self._probes = _Rates(costs), _Probes(self.LOOKING)
        self._size_probes, self._other = _Probes(self.BESIDE), 0
        self._tried: Counter[tuple[int, int]] = Counter()  # looks by bits of the batch and size
        self._learned: _Acceptance = acceptance
        self._sizes = tree_sizes(max_nodes)
        self._last: int | None = None  # nodes of the last step, looks not counted
        self._behind = 0  # plain steps since the last draft
        self._drafted = 0  # budgets in a row with nodes
        self._running: frozenset[int] = frozenset()
        self._tried_at: set[int] = set()  # bits of the batches at which drafts were tried though they seemed not to pay
        self._compared: set[int] = set()  # bits of the batches for which a plain step was measured beside drafting

    def observe(self, report: StepReport) -> None:
        """Remember what drafts gained and what steps took, and forget old steps little by little."""
        if not report.num_sampling:
            return  # all of them had ended already
        size = self._size(report) if report.room else 0
        # Where nothing is captured, the first draft after a while digests what it missed: its time is that of no other.
        first = report.room > 0 and report.draft_seconds is not None and (self._behind > 0 or report.prompt_rows > 0)
        self._rates.observe(report)
        if (size or not report.room) and not (first and self._timing.steps(report.num_sampling, size)):
            self._timing.learn(report, size)
        self._timing.learn_prompts(report, size)
        if report.room:
            self._learned.observe(report)
            self._behind = 0
        else:
            self._learned.fade()
            self._timing.fade(self.BOREDOM)
            self._behind += 1
            self._probes.save()

    def predicted_seconds(self, report: StepReport) -> float | None:
        """The target's rows by the cost table, and what drafting has taken lately; any thread may ask."""
        return self._timing.predicted(report, self._size(report) if report.drafted else 0)

    def _size(self, report: StepReport) -> int:
        """What was drafted, as drafting's time depends on it; 0: nothing."""
        raise NotImplementedError

    def _seconds(self, rows: int, load: Load, batch: int, size: int) -> float:
        return self._timing.at(rows, load.context, batch, size)

    def _decide(self, outlooks: dict[int, Outlook], load: Load, *, sticks: bool) -> Budget:
        """Of what each size promises."""
        batch, plain = max(load.num_running, 1), outlooks[0]
        rates = {nodes: outlook.rate for nodes, outlook in outlooks.items()}
        catching_up = self._catching_up(load, batch)
        if catching_up:
            once = catching_up / self.HORIZON
            rates |= {n: outlook.tokens / (outlook.seconds + once) for n, outlook in outlooks.items() if n}
        sizes, kept = keeping(outlooks, load.paces)
        pressed = len(sizes) < len(rates)
        rates = {n: rate for n, rate in rates.items() if n in sizes}
        best = max(rates, key=lambda nodes: rates[nodes])
        if sticks and self._last in rates and rates[best] < self.STAY * rates[self._last]:
            best = self._last
        why = KeepsPromises(best, outlooks[best], len(load.paces), kept) if pressed else None
        budget = self._by_the_clock(Budget(best, why=why or BestRate(best, outlooks[best], plain)), rates, batch)
        self._last = budget.max_nodes
        look = None if pressed else self._look(budget.max_nodes, outlooks, catching_up, batch)
        chosen = budget if look is None else look
        outlook = outlooks[chosen.max_nodes]
        gain = Gain(outlook.rate / plain.rate, self._rates.better(batch, drafting=True))
        return replace(chosen, gain=gain, seconds=None if outlook.assumed else outlook.seconds)

    def _meet(self, load: Load) -> None:
        """A new request has a text of its own."""
        running = frozenset(load.sequences)
        if new := len(running - self._running):
            self._learned.join(new / len(running))
            self._rates.join(len(running), new / len(running))
        self._running = running

    def _with_prompts(self, budget: Budget, load: Load) -> Budget:
        """The same with room for prompts that leaves others the time they were promised."""
        if not load.paces:
            return budget
        rows = max(load.num_running, 1) * (1 + budget.max_nodes)
        return replace(budget, max_prompt_rows=prompt_rows(self._timing, load, budget.max_nodes, rows))

    def _catching_up(self, load: Load, batch: int) -> float:
        """Seconds until a drafter has read what it missed."""
        if not (self._reads and self._behind):
            return 0.0
        rows = batch * min(self._behind, max(1, round(load.context)))
        return READING * self._timing.costs.at(rows, load.context, batch)

    def _by_the_clock(self, budget: Budget, rates: dict[int, float], batch: int) -> Budget:
        """Stay in a mode that was measured faster than the other."""
        if self._last is None or (self._last > 0) == (budget.max_nodes > 0):
            return budget
        better = self._rates.better(batch, drafting=self._last > 0)
        if better is None or better < 1:
            return budget
        same = [n for n in rates if (n > 0) == (self._last > 0)]
        if not same:
            return budget
        kept = max(same, key=lambda nodes: rates[nodes])
        return Budget(kept, why=MeasuredFaster(kept, better))

    def _look(self, nodes: int, outlooks: dict[int, Outlook], catching_up: float, batch: int) -> Budget | None:
        """At the other mode, if it is time."""
        plain = outlooks[0]
        if nodes == 0:
            self._drafted = 0
            other = max(filter(None, outlooks), key=lambda size: outlooks[size].rate, default=0)
            price = outlooks[other].seconds / plain.seconds - 1
            bits = batch.bit_length()
            if other and self._guesses and not plain.assumed and bits not in self._tried_at:
                self._tried_at.add(bits)
                self._probes.begin_free()
            looks = other > 0 and self._probes.step(price, catching_up / plain.seconds)
            return Budget(other, why=Look(other)) if looks else None
        self._drafted += 1
        if not self._rates.steps(batch, drafting=True):
            return None  # nothing to compare with
        self._probes.save()
        bits = batch.bit_length()
        if self._drafted >= self.EARLY and bits not in self._compared:
            self._compared.add(bits)
            self._probes.begin_free()
        if self._probes.step(1 - plain.rate / outlooks[nodes].rate):
            return Budget(0, why=Look(0))
        return self._look_beside(nodes, outlooks, bits)

    def _look_beside(self, nodes: int, outlooks: dict[int, Outlook], bits: int) -> Budget | None:
        """At the next smaller or larger tree, the one that was timed less. One that cannot be timed, because nothing
        is captured for it, is not tried often.
        """
        self._size_probes.save()
        if not self._size_probes.under_way:
            sizes = sorted(filter(None, outlooks))
            at = sizes.index(nodes)
            beside = [*sizes[max(0, at - 1) : at], *sizes[at + 1 : at + 2]]
            known = {size: self._timing.steps(1 << (bits - 1), size) for size in beside}
            asked = [size for size in beside if known[size] or self._tried[bits, size] < self.TRIES]
            self._other = min(asked, key=lambda size: (known[size], self._tried[bits, size]), default=0)
        other = self._other
        if other == 0 or other not in outlooks:
            return None
        if not self._size_probes.step(1 - outlooks[other].rate / outlooks[nodes].rate):
            return None
        self._tried[bits, other] += 1
        return Budget(other, why=Look(other))


def _levels(nodes: int) -> float:
    """About how long trees of a size take to draft: the first forward, and one for each level."""
    return 1.0 + nodes.bit_length()


class MeasuredBudget(_Goodput):
    """As many nodes of a chain as pay, by what rows cost on this machine and how many have been accepted lately."""

    def __init__(self, costs: StepCosts, max_nodes: int, *, reads: bool = False) -> None:
        self._acceptance = ChainAcceptance(max_nodes)
        super().__init__(costs, max_nodes, self._acceptance, float, reads=reads)

    def budget(self, load: Load) -> Budget:
        """The size with the best ratio of expected tokens to expected time."""
        self._meet(load)
        batch = max(load.num_running, 1)
        share, tokens = max(self._acceptance.proposing.value, 1 / batch), self._acceptance.tokens(batch)
        assumed = self._timing.costs.assumed

        def outlook(nodes: int) -> Outlook:
            rows = padded_batch(batch) * (1 + nodes) if load.padded else round(batch * (1 + share * nodes))
            return Outlook(tokens[nodes], self._seconds(rows, load, batch, nodes), assumed)

        sizes = self._sizes if load.padded else range(self._most + 1)
        budget = self._decide({nodes: outlook(nodes) for nodes in sizes}, load, sticks=load.padded)
        return self._with_prompts(budget, load)

    def survival(self) -> list[float]:
        """The chance that the first, the first two, … nodes of a chain are all accepted."""
        return self._acceptance.survival()

    def _size(self, report: StepReport) -> int:
        if report.draft_seconds is None:  # padded: as large as it could be, whatever was found
            return report.room
        return max((drafted for drafted, _ in report.outcomes), default=0)


class MeasuredTreeBudget(_Goodput):
    """The same for trees. Where all run as many nodes, the size with the best ratio of expected tokens to expected
    time. Where each may have a size of its own, nodes down to the chance that pays for a row, or none at all.
    """

    def __init__(self, costs: StepCosts, max_nodes: int, *, reads: bool = False) -> None:
        self._acceptance = TreeAcceptance(max_nodes)
        super().__init__(costs, max_nodes, self._acceptance, _levels, reads=reads)
        self._tokens_per_step = 1.0  # of one sequence
        self._grown = Mean()  # nodes of one sequence, where each has a size of its own

    def budget(self, load: Load) -> Budget:
        """As the device runs them."""
        self._meet(load)
        return self._with_prompts(self._sized(load), load)

    def _sized(self, load: Load) -> Budget:
        batch = max(load.num_running, 1)
        if load.padded:
            sizes = self._sizes
            return self._decide({nodes: self._outlook(nodes, load, batch) for nodes in sizes}, load, sticks=True)
        least = self._least_prob(load, batch)
        grows = Budget(self._most, least, WorthTheRow(self._most, least))
        if self._grown.weight < 1:
            return grows
        outlooks = {nodes: self._outlook(nodes, load, batch) for nodes in (0, self._most)}
        decided = self._decide(outlooks, load, sticks=True)
        return replace(grows, gain=decided.gain, seconds=decided.seconds) if decided.max_nodes else decided

    def _outlook(self, nodes: int, load: Load, batch: int) -> Outlook:
        rows = padded_batch(batch) * (1 + nodes) if load.padded else round(batch * (1 + min(nodes, self._grown.value)))
        tokens = 1 + self._acceptance.gain(nodes)
        return Outlook(tokens, self._seconds(rows, load, batch, nodes), self._timing.costs.assumed)

    def observe(self, report: StepReport) -> None:
        """Also how large trees were, and what steps gave."""
        super().observe(report)
        if report.num_sampling:
            self._tokens_per_step += 0.05 * (report.emitted / report.num_sampling - self._tokens_per_step)
        if report.num_sampling and report.room:
            self._grown = self._grown.learn(report.drafted / report.num_sampling)

    def _size(self, report: StepReport) -> int:
        return report.room

    def _least_prob(self, load: Load, batch: int) -> float:
        """The chance of acceptance below which one more row costs more time than its token saves."""
        rows = round(batch * self._tokens_per_step)
        rate = batch * self._tokens_per_step / self._timing.costs.at(rows, load.context, batch)
        return min(0.9, rate * self._timing.costs.slope(rows, load.context, batch))
