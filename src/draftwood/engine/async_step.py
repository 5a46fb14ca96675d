"""The host's half of captured steps: it admits, prefills, and collects each step's outcome while the next one runs.

When the host learns that a sequence has ended, the sequence has already run one step more. That step wrote behind the
committed tokens, into pages that are written again on the same stream before they are read, so it is simply dropped.
"""

from __future__ import annotations

import bisect
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from draftwood.cache.batch_state import SamplingMode
from draftwood.engine.graph_runner import GraphRunner, Launched, StepShape
from draftwood.engine.plan import Plan
from draftwood.engine.scheduler import Scheduler
from draftwood.engine.scoring import prompt_logprobs
from draftwood.faults import DrafterFailed, attributed
from draftwood.protocols import Controller, Span, StepReport, TimedStep
from draftwood.request import Event
from draftwood.tree import HostVerdict

T = TypeVar("T")
NOTHING = HostVerdict([], [], [], [])  # the outcome of a prefill


@dataclass(frozen=True)
class _InFlight:
    """A launched step whose outcome has not been collected."""

    plan: Plan
    lives: tuple[int, ...]  # preemptions of each sequence at the launch
    size: StepShape
    launched: Launched
    since: float
    alone: bool  # nothing else took device time: no capture, no prefill in it or before it


class AsyncStep:
    """Keeps the device one step ahead of the host."""

    def __init__(self, runner: GraphRunner, scheduler: Scheduler) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self._in_flight: _InFlight | None = None
        self._read: dict[int, int] = {}  # sequence -> tokens in the drafter's KV cache, where that is less than all
        self._uncollected: list[Event] = []
        self._collected_at = 0.0
        self._timing_invalid = False
        self._behind_text = False  # a prefill was launched since the last step
        self.last_step: TimedStep | None = None  # the last step with a valid timing

    def step(self, controller: Controller) -> list[Event] | None:
        """Launch step n + 1, collect step n. None, and nothing launched, if the batch cannot be captured."""
        events = self._collect(controller) if self.runner.drafter.waits else []
        reading, ready = self.scheduler.schedule_apart(controller.budget(self.scheduler.load), self._ahead)
        scored, prompts = reading.parted()
        kind = SamplingMode.of([item.seq.params for item in ready.items])
        launched = None
        self._release_preempted()
        if ready.items:
            launched = None if kind is None else self._or_without_drafts(partial(self._launch, ready, kind, prompts))
            if launched is None:
                self._uncollected = events
                return None
        if launched is None or not launched.size.text:
            self._read_apart(prompts)
        self.scheduler.commit(prompts, NOTHING)
        self._read_scored(scored)
        events += self._collect(controller)
        self._in_flight = launched
        return events

    def fall_back(self, controller: Controller) -> list[Event]:
        """Collect everything and let the host decode: the batch state and the drafter's KV cache go stale."""
        events, self._uncollected = self._uncollected + self._collect(controller), []
        for seq in self.scheduler.running:
            self._fall_behind(seq.id, self.scheduler.tables.num_cached(seq.id))
            self.runner.batch_state.remove(seq.id)
        return events

    def invalidate_timing(self) -> None:
        """The host was busy with something else: the step in flight cannot be timed any more."""
        self._timing_invalid = True

    def release(self, seq_id: int) -> None:
        """The sequence is gone."""
        self.runner.batch_state.remove(seq_id)
        self._read.pop(seq_id, None)

    @property
    def _ahead(self) -> dict[int, int]:
        """The most tokens each sequence may be ahead of the host."""
        flight = self._in_flight
        return {} if flight is None else {item.seq.id: flight.size.nodes + 1 for item in flight.plan.items}

    def _release_preempted(self) -> None:
        """Remove preempted sequences from the batch state."""
        running = {seq.id for seq in self.scheduler.running}
        for seq_id in self.runner.batch_state.sequences - running:
            self.release(seq_id)

    def _launch(self, ready: Plan, kind: SamplingMode, prompts: Plan) -> _InFlight | None:
        """Launch a step for all that are ready, with these prompts if they fit; None if it needs the host."""
        room = min(item.max_nodes for item in ready.items)
        if not self.runner.can_run(kind):
            return None
        self._add_to_batch(ready)
        pages = self.runner.batch_state.most_pages([item.seq.id for item in ready.items])
        size = self.runner.size_for(len(ready.items), room, pages, kind)
        if prompts.items:
            size = self.runner.with_room_for(prompts.spans, size, kind, self.scheduler.config.max_rows) or size
        fresh = not self.runner.is_ready(size, kind)
        self._timing_invalid |= fresh  # the step in flight will be collected late
        if not self.runner.prepare(size, kind):
            return None
        self._keep_drafter_reading(ready, size.nodes)
        launched = self.runner.launch(ready, size, kind, prompts.spans if size.text else ())
        lives = tuple(item.seq.preemptions for item in ready.items)
        alone = not (fresh or size.text or self._behind_text)
        self._behind_text = False
        return _InFlight(ready, lives, size, launched, time.perf_counter(), alone)

    def _add_to_batch(self, ready: Plan) -> None:
        batch_state, tables = self.runner.batch_state, self.scheduler.tables
        for item in ready.items:
            if item.seq.id not in batch_state:
                batch_state.add(item.seq.id, item.seq.tokens, item.seq.params, item.seq.seed)
        batch_state.update_block_tables({item.seq.id: tables.pages(item.seq.id) for item in ready.items})

    def _keep_drafter_reading(self, ready: Plan, nodes: int) -> None:
        """A drafter that was not used falls behind, and reads what it missed before it drafts again."""
        if not self.runner.drafter.reads:
            return
        if nodes == 0:
            for item in ready.items:
                self._fall_behind(item.seq.id, item.end - 1)
            return
        # A step begins with the last two tokens, so what the step in flight adds need not be known here.
        behind = [(item, self._read.pop(item.seq.id, item.end)) for item in ready.items]
        self._read_along([Span(i.seq.id, i.seq.tokens, read, i.end - 1) for i, read in behind if read < i.end - 1])

    def _fall_behind(self, seq_id: int, read: int) -> None:
        self._read[seq_id] = min(read, self._read.get(seq_id, read))

    def _read_along(self, spans: list[Span]) -> None:
        """Prefill the drafter, with as many pieces together as a step has rows for."""
        rows = self.scheduler.config.max_rows
        pieces = [
            Span(span.seq_id, span.tokens, start, min(span.end, start + rows))
            for span in spans
            for start in range(span.start, span.end, rows)
        ]
        while pieces:
            total = list(itertools.accumulate(piece.end - piece.start for piece in pieces))
            count = max(1, bisect.bisect_right(total, rows))
            with attributed("read"):
                self.runner.drafter.read(self.runner.target.cache.stage_text(pieces[:count]))
            self._behind_text = True
            pieces = pieces[count:]

    def _read_apart(self, prompts: Plan) -> None:
        if prompts.items:
            self._timing_invalid = self._behind_text = (
                True  # the step in flight will be collected late, and the next end so
            )
            self._or_without_drafts(partial(self.runner.read, prompts.spans))

    def _or_without_drafts(self, attempt: Callable[[], T]) -> T:
        """Try; if the drafter fails, try again without drafts."""
        try:
            return attempt()
        except DrafterFailed as failure:
            self.runner.go_on_plainly(failure)
            return attempt()

    def _read_scored(self, prompts: Plan) -> None:
        """Prefill prompts whose log-probabilities are wanted: the host waits for their logits."""
        if prompts.items:
            self._timing_invalid = self._behind_text = True
            logits = self._or_without_drafts(partial(self.runner.read_scored, prompts))
            found = prompt_logprobs(prompts, logits)
            self.scheduler.commit(prompts, NOTHING, prompt_logprobs=found)

    def _seconds(self, flight: _InFlight) -> float | None:
        """Seconds of the step, unless something else took time meanwhile."""
        now = time.perf_counter()
        seconds = now - max(flight.since, self._collected_at)
        disturbed, self._collected_at, self._timing_invalid = self._timing_invalid or not flight.alone, now, False
        return None if disturbed else seconds

    def _collect(self, controller: Controller) -> list[Event]:
        """Collect the step in flight; drop sequences that were finished or preempted since."""
        flight, self._in_flight = self._in_flight, None
        if flight is None:
            return []
        outcome = flight.launched.wait()
        seconds = self._seconds(flight)
        running = {seq.id: seq for seq in self.scheduler.running}
        kept = [
            b
            for b, (item, lives) in enumerate(zip(flight.plan.items, flight.lives, strict=True))
            if running.get(item.seq.id) is item.seq and item.seq.preemptions == lives
        ]
        plan = Plan(tuple(flight.plan.items[b] for b in kept)).brought_up_to_date()
        outcome = HostVerdict(*([column[b] for b in kept] for column in vars(outcome).values()))
        report = _report(plan, flight.size, outcome, seconds)
        controller.observe(report)
        if seconds is not None and report.num_sampling:
            self.last_step = TimedStep(report, seconds)
        told = zip(plan.items, kept, strict=True)
        traces = [flight.launched.trace(b) if item.seq.params.trace else None for item, b in told]
        return self.scheduler.commit(plan, outcome, traces=traces)


def _report(plan: Plan, size: StepShape, outcome: HostVerdict, seconds: float | None) -> StepReport:
    return StepReport(
        num_rows=size.rows,
        num_sampling=len(outcome.tokens),
        drafted=sum(outcome.drafted),
        accepted=sum(outcome.accepted),
        emitted=sum(len(tokens) for tokens in outcome.tokens),
        outcomes=tuple(zip(outcome.drafted, outcome.accepted, strict=True)),
        draft_seconds=None,
        step_seconds=seconds,
        context=sum(len(item.seq.tokens) for item in plan.items) / max(len(plan.items), 1),
        room=size.nodes,
    )
