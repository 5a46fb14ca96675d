"""Serving without a model: the engine's own scheduler and controller, a clock that is told what steps take.

Simulated is what a machine does (`Recording`): how long a step takes, and how many of its guesses are right. What
decides is the real thing. The host is not behind the device here, and every size has its captured step.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from draftwood.cache.blocks import PageTables
from draftwood.drafting import padded_batch
from draftwood.engine.plan import Plan, PlanItem
from draftwood.engine.policies import Guessing, make_controller
from draftwood.engine.scheduler import Scheduler, SchedulerConfig
from draftwood.engine.sequence import Sequence as Answer
from draftwood.engine.text import TextStream
from draftwood.lab.recording import Recording
from draftwood.protocols import Budget, Controller, StepReport
from draftwood.request import Event, SamplingParams, Slo, SpeculationStats
from draftwood.tree import HostVerdict

NOTHING = HostVerdict([], [], [], [], [])
PAGE = 64


class _Silence:
    """A decoder of nothing."""

    def push(self, ids: Sequence[int]) -> str:
        """No text."""
        return ""

    def flush(self) -> str:
        """No text."""
        return ""


@dataclass(frozen=True)
class Workload:
    """Requests of some kind of text; so many at a time, or arriving at random."""

    at: int = 8  # under way at any time; 0: as they arrive
    rate: float = 0.0  # arrivals a second
    requests: int = 64
    prompt: tuple[int, int] = (64, 256)  # least and most tokens
    answer: tuple[int, int] = (64, 256)
    texts: tuple[str, ...] = ()  # taken in turn; (): all that were recorded
    slo: Slo | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.at < 1) == (self.rate <= 0):
            raise ValueError("a workload has either requests at a time or a rate of arrivals")
        if self.requests < 1 or min(self.prompt) < 1 or min(self.answer) < 1:
            raise ValueError("a workload needs requests with prompts and answers")


@dataclass(frozen=True)
class Limits:
    """Of the engine that is simulated."""

    max_running: int = 256
    max_rows: int = 8192
    cache_tokens: int = 1 << 20


@dataclass
class Outcome:
    """What a simulation came to."""

    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    sizes: Counter[int] = field(default_factory=Counter)  # steps by nodes
    ended: list[SpeculationStats] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tokens a second of everything."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def percentile(self, share: float, *, first: bool) -> float:
        """Seconds to the first token, or for each behind it."""
        found = [own.first_token_seconds if first else own.seconds_per_token for own in self.ended]
        values = sorted(value for value in found if value is not None)
        return values[min(len(values) - 1, int(share * len(values)))] if values else 0.0

    @property
    def violated(self) -> float:
        """Share of promises that were broken."""
        kept = [kept for own in self.ended for kept in own.promises_kept.values()]
        return 1 - statistics.mean(kept) if kept else 0.0


class Simulation:
    """An engine of which only the deciding parts are there."""

    def __init__(
        self, recording: Recording, policy: str | Controller = "auto", limits: Limits | None = None, seed: int = 0
    ) -> None:
        limits = limits or Limits()
        self.recording, self.draw = recording, random.Random(seed)
        known = Guessing(
            recording.costs, recording.max_nodes, recording.depth, chain=recording.chain, reads=recording.reads
        )
        self.controller = make_controller(policy, known) if isinstance(policy, str) else policy
        self.now, self.outcome = 0.0, Outcome()
        self.scheduler = Scheduler(
            PageTables(-(-limits.cache_tokens // PAGE), PAGE),
            SchedulerConfig(limits.max_rows, limits.max_running, 1 << 20),
            clock=lambda: self.now,
        )
        self.texts: dict[int, str] = {}  # by request
        self._count = 0

    def ask(self, text: str, prompt: int, answer: int, slo: Slo | None = None, priority: int = 0) -> int:
        """A request arrives now; the number it has."""
        self._count += 1
        number = self._count
        params = SamplingParams(max_tokens=answer, slo=slo, priority=priority, ignore_eos=True)
        tokens = [number % 50000 + 1, *([0] * (prompt - 1))]  # no two prompts share a page
        made = Answer(
            id=number, request_id=number, index=0, tokens=tokens, params=params, seed=0, max_length=prompt + answer,
            stop_ids=frozenset(), bad_words=(), text=TextStream(_Silence(), ()), arrived=self.now,
        )  # fmt: skip
        self.texts[number] = text
        self.scheduler.add([made])
        return number

    def step(self) -> list[Event]:
        """Schedule, let the clock go on, and tell the controller."""
        load = replace(self.scheduler.load, padded=self.recording.padded)
        budget = self.controller.budget(load)
        prompts, ready = self.scheduler.schedule(budget)
        self.scheduler.commit(prompts, NOTHING)
        drafts = [self._drafted(item) for item in ready.items]
        nodes = max((item.max_nodes for item in ready.items), default=0)
        report = self._report(prompts, ready, drafts, nodes, budget)
        self.now += report.whole_seconds or report.step_seconds or 0.0
        if ready.items:
            self.controller.observe(report)
            self.outcome.sizes[nodes] += 1
        self.outcome.steps += 1
        accepted, drafted = [own for _, own in drafts], [own for own, _ in drafts]
        gained = [[0] * (own + 1) for own in accepted]
        usable = [True] * len(drafts)
        events = self.scheduler.commit(ready, HostVerdict(gained, accepted, drafted, [0.0] * len(drafts), usable))
        for event in events:
            self.outcome.tokens += len(event.token_ids)
            if event.finished:
                self.outcome.ended.append(event.stats)
                del self.texts[event.request_id]
        self.outcome.seconds = self.now
        return events

    def _drafted(self, item: PlanItem) -> tuple[int, int]:
        """Nodes of one sequence, and how many of them are right."""
        text = self.texts[item.seq.request_id]
        if item.max_nodes and self.draw.random() < self.recording.silent.get(text, 0.0):
            return 0, 0
        return item.max_nodes, min(self.recording.accepted(text, item.max_nodes, self.draw), item.max_depth)

    def _report(
        self, prompts: Plan, ready: Plan, drafts: list[tuple[int, int]], nodes: int, budget: Budget
    ) -> StepReport:
        batch, drafted = len(ready.items), sum(own for own, _ in drafts)
        accepted = sum(own for _, own in drafts)
        rows = padded_batch(batch) * (1 + nodes) if self.recording.padded and batch else batch + drafted
        context = sum(len(item.seq.tokens) for item in (*ready.items, *prompts.items))
        context /= max(batch + len(prompts.items), 1)
        drafting = self.recording.drafting(nodes, batch)
        seconds = self.recording.costs.at(rows + prompts.num_rows, context, max(batch, 1)) + drafting
        mixed = prompts.num_rows > 0
        return StepReport(
            rows, batch, drafted, accepted, batch + accepted, tuple(drafts),
            draft_seconds=None if self.recording.padded else drafting,
            step_seconds=None if mixed else seconds,
            context=context, room=nodes, prompt_rows=prompts.num_rows, whole_seconds=seconds if mixed else None,
        )  # fmt: skip

    def run(self, workload: Workload) -> Outcome:
        """All requests of a workload, to their ends."""
        draw = random.Random(workload.seed)
        asked = self._requests(workload, draw)
        due = self.now + (draw.expovariate(workload.rate) if workload.rate else 0.0)
        left = workload.requests
        while left or self.scheduler.has_work:
            if workload.rate and left and not self.scheduler.has_work:
                self.now = max(self.now, due)
            while left and (due <= self.now if workload.rate else len(self.texts) < workload.at):
                self.ask(*next(asked))
                left -= 1
                due += draw.expovariate(workload.rate) if workload.rate else 0.0
            self.step()
        return self.outcome

    def _requests(self, workload: Workload, draw: random.Random) -> Iterator[tuple[str, int, int, Slo | None]]:
        texts = workload.texts or tuple(self.recording.texts)
        for number in range(workload.requests):
            lengths = draw.randint(*workload.prompt), draw.randint(*workload.answer)
            yield texts[number % len(texts)], *lengths, workload.slo
