"""The host's half of rounds on the device: it admits, reads prompts, and hears of every round while the next one runs.

A sequence whose end the host learns of has run one round too many by then. That round wrote behind what was committed,
into pages that nobody reads before writing to them, later on the same stream; so it is simply not heard.
"""

from __future__ import annotations

import bisect
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from draftwood.cache.seats import Kind
from draftwood.engine.plan import Plan
from draftwood.engine.rounds import Launched, Rounds, Size
from draftwood.engine.scheduler import Scheduler
from draftwood.engine.scoring import prompt_logprobs
from draftwood.faults import DrafterFailed, attributed
from draftwood.protocols import Controller, Span, StepReport, TimedStep
from draftwood.request import Event
from draftwood.tree import HostVerdict

T = TypeVar("T")
NOTHING = HostVerdict([], [], [], [])  # what prompts earn


@dataclass(frozen=True)
class _InFlight:
    """A round nobody has heard of yet."""

    plan: Plan
    lives: tuple[int, ...]  # how often each sequence had started over
    size: Size
    launched: Launched
    since: float
    alone: bool  # nothing else took the device's time: neither its preparation, nor prompts in it or before it


class Pipeline:
    """Keeps the device one round ahead."""

    def __init__(self, rounds: Rounds, scheduler: Scheduler) -> None:
        self.rounds = rounds
        self.scheduler = scheduler
        self._in_flight: _InFlight | None = None
        self._read: dict[int, int] = {}  # sequence -> tokens its drafter has read, where that is less than all
        self._unheard: list[Event] = []
        self._heard = 0.0
        self._disturbed = False
        self._behind_text = False  # something was read since the last round
        self.last_step: TimedStep | None = None  # the last round that nothing disturbed

    def step(self, controller: Controller) -> list[Event] | None:
        """Start a round, then hear of the one before. None, and nothing done, where the host is needed."""
        events = self._hear(controller) if self.rounds.drafter.waits else []
        reading, ready = self.scheduler.schedule_apart(controller.budget(self.scheduler.load), self._ahead)
        scored, prompts = reading.parted()
        kind = Kind.of([item.seq.params for item in ready.items])
        launched = None
        self._reseat()
        if ready.items:
            launched = None if kind is None else self._plainly_if_need_be(partial(self._launch, ready, kind, prompts))
            if launched is None:
                self._unheard = events
                return None
        if launched is None or not launched.size.text:
            self._read_apart(prompts)
        self.scheduler.commit(prompts, NOTHING)
        self._read_scored(scored)
        events += self._hear(controller)
        self._in_flight = launched
        return events

    def leave(self, controller: Controller) -> list[Event]:
        """Hear of everything, and let the host decode: no seat is right afterwards, and no drafter reads along."""
        events, self._unheard = self._unheard + self._hear(controller), []
        for seq in self.scheduler.running:
            self._fall_behind(seq.id, self.scheduler.tables.num_cached(seq.id))
            self.rounds.seats.leave(seq.id)
        return events

    def was_paused(self) -> None:
        """The host was busy with something else: how long the round in flight took can no longer be told."""
        self._disturbed = True

    def release(self, seq_id: int) -> None:
        """The sequence is gone."""
        self.rounds.seats.leave(seq_id)
        self._read.pop(seq_id, None)

    @property
    def _ahead(self) -> dict[int, int]:
        """How many tokens each sequence may be ahead of what is known here."""
        flight = self._in_flight
        return {} if flight is None else {item.seq.id: flight.size.nodes + 1 for item in flight.plan.items}

    def _reseat(self) -> None:
        """Those who were pushed out have lost their seats."""
        running = {seq.id for seq in self.scheduler.running}
        for seq_id in self.rounds.seats.seated - running:
            self.release(seq_id)

    def _launch(self, ready: Plan, kind: Kind, prompts: Plan) -> _InFlight | None:
        """A round for everybody who is ready, with these prompts if they fit; None if it needs the host."""
        room = min(item.max_nodes for item in ready.items)
        if not self.rounds.can_run(kind):
            return None
        self._seat(ready)
        pages = self.rounds.seats.most_pages([item.seq.id for item in ready.items])
        size = self.rounds.size_for(len(ready.items), room, pages, kind)
        if prompts.items:
            size = self.rounds.with_room_for(prompts.spans, size, kind, self.scheduler.config.max_rows) or size
        fresh = not self.rounds.is_ready(size, kind)
        self._disturbed |= fresh  # the round in flight will be heard of late
        if not self.rounds.prepare(size, kind):
            return None
        self._keep_drafter_reading(ready, size.nodes)
        launched = self.rounds.launch(ready, size, kind, prompts.spans if size.text else ())
        lives = tuple(item.seq.preemptions for item in ready.items)
        alone = not (fresh or size.text or self._behind_text)
        self._behind_text = False
        return _InFlight(ready, lives, size, launched, time.perf_counter(), alone)

    def _seat(self, ready: Plan) -> None:
        seats, tables = self.rounds.seats, self.scheduler.tables
        for item in ready.items:
            if item.seq.id not in seats:
                seats.sit(item.seq.id, item.seq.tokens, item.seq.params, item.seq.seed)
        seats.grant({item.seq.id: tables.pages(item.seq.id) for item in ready.items})

    def _keep_drafter_reading(self, ready: Plan, nodes: int) -> None:
        """A drafter that sits out falls behind, and reads what it missed before it guesses again."""
        if not self.rounds.drafter.reads:
            return
        if nodes == 0:
            for item in ready.items:
                self._fall_behind(item.seq.id, item.end - 1)
            return
        # A round begins with the last two tokens, so what the one in flight adds need not be known here.
        behind = [(item, self._read.pop(item.seq.id, item.end)) for item in ready.items]
        self._read_along([Span(i.seq.id, i.seq.tokens, read, i.end - 1) for i, read in behind if read < i.end - 1])

    def _fall_behind(self, seq_id: int, read: int) -> None:
        self._read[seq_id] = min(read, self._read.get(seq_id, read))

    def _read_along(self, spans: list[Span]) -> None:
        """As many pieces together as a step has rows for."""
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
                self.rounds.drafter.read(self.rounds.target.cache.stage_text(pieces[:count]))
            self._behind_text = True
            pieces = pieces[count:]

    def _read_apart(self, prompts: Plan) -> None:
        if prompts.items:
            self._disturbed = self._behind_text = True  # the round in flight will be heard of late, and the next end so
            self._plainly_if_need_be(partial(self.rounds.read, prompts.spans))

    def _plainly_if_need_be(self, attempt: Callable[[], T]) -> T:
        """Do it; if the drafter fails, do it again without drafts."""
        try:
            return attempt()
        except DrafterFailed as failure:
            self.rounds.go_on_plainly(failure)
            return attempt()

    def _read_scored(self, prompts: Plan) -> None:
        """Prompts whose log-probabilities are wanted: the host waits for their logits."""
        if prompts.items:
            self._disturbed = self._behind_text = True
            logits = self._plainly_if_need_be(partial(self.rounds.read_scored, prompts))
            found = prompt_logprobs(prompts, logits)
            self.scheduler.commit(prompts, NOTHING, prompt_logprobs=found)

    def _seconds(self, flight: _InFlight) -> float | None:
        """How long the round took, unless something else took place meanwhile."""
        now = time.perf_counter()
        seconds = now - max(flight.since, self._heard)
        disturbed, self._heard, self._disturbed = self._disturbed or not flight.alone, now, False
        return None if disturbed else seconds

    def _hear(self, controller: Controller) -> list[Event]:
        """What the round in flight has earned, for those who are still there."""
        flight, self._in_flight = self._in_flight, None
        if flight is None:
            return []
        outcome = flight.launched.wait()
        seconds = self._seconds(flight)
        running = {seq.id: seq for seq in self.scheduler.running}
        heard = [
            b
            for b, (item, lives) in enumerate(zip(flight.plan.items, flight.lives, strict=True))
            if running.get(item.seq.id) is item.seq and item.seq.preemptions == lives
        ]
        plan = Plan(tuple(flight.plan.items[b] for b in heard)).brought_up_to_date()
        outcome = HostVerdict(*([column[b] for b in heard] for column in vars(outcome).values()))
        report = _report(plan, flight.size, outcome, seconds)
        controller.observe(report)
        if seconds is not None and report.num_sampling:
            self.last_step = TimedStep(report, seconds)
        told = zip(plan.items, heard, strict=True)
        traces = [flight.launched.trace(b) if item.seq.params.trace else None for item, b in told]
        return self.scheduler.commit(plan, outcome, traces=traces)


def _report(plan: Plan, size: Size, outcome: HostVerdict, seconds: float | None) -> StepReport:
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
