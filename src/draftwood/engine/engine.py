"""The host's half of decoding: it schedules, launches a step, and collects what the step before gained.

On a GPU the host is one step behind: while step n + 1 runs it collects step n. When it learns that a sequence has
ended, the sequence has already run one step more; that step wrote behind the committed tokens, into pages that are
written again on the same stream before they are read, so it is simply dropped. On a CPU a step is collected at once.

Knows no drafter, no tree shape and no law by name. Plain decoding is this code with bare roots.
"""

from __future__ import annotations

import bisect
import itertools
import time
from dataclasses import dataclass, replace

import torch

from draftwood.cache.row_settings import edits_on_device
from draftwood.drafting import Drafter, padded_batch
from draftwood.engine.decode_step import Parts
from draftwood.engine.graph_runner import GraphRunner, batch_state_for
from draftwood.engine.launched import Batch, Launched
from draftwood.engine.plan import Plan
from draftwood.engine.scheduler import Scheduler
from draftwood.engine.scoring import prompt_logprobs
from draftwood.engine.sequence import Sequence
from draftwood.engine.shapes import ShapePlan, StepShape
from draftwood.errors import IncompatibleParts
from draftwood.faults import guarded
from draftwood.model.runner import ModelRunner
from draftwood.protocols import Budget, Controller, Randomness, Span, StepMode, StepReport, TimedStep, Verifier
from draftwood.request import Event, FinishReason, StepTrace
from draftwood.telemetry import Timers
from draftwood.tree import DraftLaw, HostVerdict

OFF = Budget(0, why="no nodes: the drafter has failed and is switched off")
NOTHING = HostVerdict([], [], [], [], [])  # the outcome of a prefill


def check_exact(verifier: Verifier, drafts: DraftLaw) -> None:
    """Refuse a law with drafts it would not be exact for."""
    reason = verifier.refuses(drafts)
    if reason is not None:
        raise IncompatibleParts(f"The law '{verifier.name}' would not be exact here: {reason}.")


@dataclass(frozen=True)
class _InFlight:
    """A launched step whose outcome has not been collected."""

    launched: Launched
    lives: tuple[int, ...]  # preemptions of each sequence at the launch
    since: float
    draft_seconds: float  # spent on drafting before the launch
    alone: bool  # nothing else took device time: no prefill in it or before it
    prompt_rows: int  # that were prefilled with it, or before it
    budget: Budget

    @property
    def plan(self) -> Plan:
        return self.launched.batch.plan


class Engine:
    """One target model, one drafter, one law."""

    def __init__(
        self,
        target: ModelRunner,
        drafter: Drafter,
        verifier: Verifier,
        controller: Controller,
        scheduler: Scheduler,
        rng: Randomness,
        *,
        captures: bool = False,
        drafter_name: str | None = None,  # for the log and the metrics
    ) -> None:
        check_exact(verifier, drafter.law)
        drafter.attach(target)
        self.target, self.drafter, self.verifier = target, drafter, verifier
        self.controller, self.scheduler = controller, scheduler
        self._guarded = guarded(drafter, drafter_name or type(drafter).__name__)
        self.health = self._guarded.health  # of each drafter; requests that name none have the first
        self.timers = Timers()
        self.last_step: TimedStep | None = None  # the last step with a valid timing, for those who watch
        parts = Parts(target, self._guarded, verifier, rng, self.health, self.timers)
        behind = max(drafter.max_nodes, drafter.staged(drafter.max_nodes))
        state = batch_state_for(target, scheduler.config.max_running, behind)
        rows, page_size = scheduler.config.max_rows, target.cache.page_size
        surplus = drafter.surplus if captures else 1
        shapes = ShapePlan.for_trees(drafter.sizes, state.capacity, rows, state.num_pages, page_size, surplus)
        self.runner = GraphRunner(parts, state, shapes, captures)
        self._in_flight: _InFlight | None = None
        self._read: dict[int, int] = {}  # sequence -> tokens in the drafter's KV cache, where that is less than all
        self._unread: set[int] = set()  # pages that the drafter has not read to their end: others may share them
        self._gained: dict[int, int] = {}  # sequence -> tokens of its last step, where that drafted
        self._collected_at = 0.0
        self._timing_invalid = False
        self._behind_text = False  # a prefill was launched since the last step
        self._prefilled = 0  # rows of it
        scheduler.on_end, scheduler.staged = self._release, self._guarded.staged

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Launch step n + 1, collect step n; where nothing is asynchronous, launch and collect the same one."""
        events = self._collect() if self._must_know_the_last_step else []
        budget = self._budget()
        room = self.runner.shapes.proposed(2, budget.max_nodes)  # for the tree of any sequence of several
        prompts, ready = self.scheduler.schedule(budget, self._ahead, room)
        self._unread.update(self.scheduler.tables.pool.restored())
        scored, prompts = prompts.parted()
        self._release_preempted()
        self.target.cache.copy_states()
        for item in prompts.items + scored.items:
            self._unread.difference_update(self._pages_from(item.seq.id, item.start))
        launched = self._launch(ready, prompts, budget) if ready.items else None
        if prompts.items and (launched is None or not launched.launched.with_prompts):
            self._timing_invalid = self._behind_text = True
            self._prefilled += prompts.num_rows
            self.runner.read(prompts.spans)
        self.scheduler.commit(prompts, NOTHING)
        self._read_scored(scored)
        events += self._collect()
        self._in_flight = launched
        return events if self.scheduler.config.asynchronous else events + self._collect()

    def add(self, sequences: list[Sequence]) -> None:
        """Queue all answers of one request, or none of them."""
        self.scheduler.add(sequences)

    def abort(self, request_id: int, reason: FinishReason, error: str | None = None) -> list[Event]:
        """End every unfinished answer of a request now."""
        return self.scheduler.abort(request_id, reason, error)

    def prepare_next(self) -> bool:
        """Capture one more step while there is nothing else to do; False if there is nothing left to capture."""
        with torch.inference_mode():
            return self.runner.capture_next()

    def prepare(self, seconds: float) -> int:
        """Capture steps for so long, before there are requests; returns how many are ready."""
        until, first = time.perf_counter() + seconds, len(self.runner.shapes.first())
        while time.perf_counter() < until and len(self.runner.ready) < first and self.prepare_next():
            pass
        with torch.inference_mode():
            self.runner.warm_long_prefills(until)
        while time.perf_counter() < until and self.prepare_next():
            pass
        return len(self.runner.ready)

    def invalidate_timing(self) -> None:
        """The host was busy with something else: the step in flight cannot be timed any more."""
        self._timing_invalid = True

    @property
    def _must_know_the_last_step(self) -> bool:
        """The host makes trees or masks for the next step from what the last one gained."""
        return self._guarded.waits or any(_masked(seq) or seq.prediction for seq in self.scheduler.running)

    def _budget(self) -> Budget:
        if all(health.disabled for health in self.health):
            return OFF
        return self.controller.budget(self.scheduler.load)

    @property
    def _ahead(self) -> dict[int, int]:
        """The most tokens each sequence may be ahead of the host."""
        flight = self._in_flight
        return {} if flight is None else dict.fromkeys(flight.plan.seq_ids, flight.launched.depth + 1)

    def _release(self, seq_id: int) -> None:
        """The sequence has ended."""
        self._guarded.release(seq_id)
        self._forget(seq_id)

    def _forget(self, seq_id: int) -> None:
        self.runner.state.remove(seq_id)
        self._read.pop(seq_id, None)
        self._gained.pop(seq_id, None)

    def _release_preempted(self) -> None:
        """Remove preempted sequences from the batch state."""
        for seq_id in self.runner.state.sequences - {seq.id for seq in self.scheduler.running}:
            self._forget(seq_id)

    def _launch(self, ready: Plan, prompts: Plan, budget: Budget) -> _InFlight:
        """Launch a step for all that are ready, with these prompts if they fit."""
        drafting = self.timers.seconds.get("draft", 0.0)
        since = time.perf_counter()
        self._add_to_batch(ready)
        batch = self._batch(ready, prompts, budget)
        self._keep_drafter_reading(ready, batch.shape.nodes)
        launched = self.runner.launch(batch)
        lives = tuple(item.seq.preemptions for item in ready.items)
        alone = not (launched.with_prompts or self._behind_text)
        alone = alone and launched.captured == self.runner.captures  # else it took what its shape will not take again
        self._behind_text = False
        rows, self._prefilled = self._prefilled + prompts.num_rows * launched.with_prompts, 0
        return _InFlight(launched, lives, since, drafting, alone, rows, budget)

    def _add_to_batch(self, ready: Plan) -> None:
        state, tables = self.runner.state, self.scheduler.tables
        vocabulary = self.target.model.config.vocab_size
        for seq in (item.seq for item in ready.items):
            if seq.id not in state:
                state.add(seq.id, seq.tokens, seq.row_settings(vocabulary), tables.state(seq.id))
                self._begin_reading(seq.id)
        state.update_block_tables({seq_id: tables.pages(seq_id) for seq_id in ready.seq_ids})

    def _batch(self, ready: Plan, prompts: Plan, budget: Budget) -> Batch:
        """The step to run: what its requests ask for, and how large it has to be."""
        seqs = [item.seq for item in ready.items]
        rooms = [item.own_nodes for item in ready.items]
        eager, plan = not self.runner.captures, self.runner.shapes
        nodes = self._tree_size(min(budget.max_nodes, max(rooms)), whole=not eager)
        limited = eager or len(set(rooms)) > 1 or max(rooms) < plan.proposed(padded_batch(len(seqs)), nodes)
        limited = limited or any(seq.params.max_depth is not None for seq in seqs)
        mode = StepMode(
            laws=_names(seq.params.law for seq in seqs),
            drafters=_names(seq.params.drafter for seq in seqs),
            greedy=all(seq.params.greedy and self._lossless(seq) for seq in seqs),
            truncates=any(seq.params.truncates for seq in seqs),
            limited=limited,
            predicted=any(seq.prediction for seq in seqs),
            masked=any(map(_masked, seqs)),
            traced=any(seq.params.trace for seq in seqs),
            adapted=any(seq.adapter >= 0 for seq in seqs),
        )
        edited, masked, scored = (
            [b for b, seq in enumerate(seqs) if asks(seq)]
            for asks in (lambda s: edits_on_device(s.params), _masked, lambda s: s.params.logprobs is not None)
        )
        tables = [len(self.scheduler.tables.pages(seq_id)) for seq_id in (*ready.seq_ids, *prompts.seq_ids)]
        exact = StepShape(
            batch=len(seqs),
            nodes=nodes,
            pages=min(max(*tables, self._pages_behind(ready, max(rooms))) + 1, self.runner.state.num_pages),
            text=prompts.num_rows,
            edited=len(edited),
            masked=len(masked),
            scored=len(scored),
            alternatives=max((seq.params.logprobs or 0 for seq in seqs), default=0),
        )
        shape = replace(exact, nodes=self.runner.tree_size(exact, mode), proposed=0)
        known = eager and self._in_flight is None
        gained = max(self._gained.get(seq.id, 1) for seq in seqs) if known else None
        return Batch(ready, mode, shape, edited, masked, scored, prompts.spans, gained, budget.min_accept_prob)

    def _tree_size(self, room: int, *, whole: bool) -> int:
        """The largest tree that fits; where absent nodes cost nothing (not `whole`), the smallest that fills it."""
        sizes = self.drafter.sizes
        fitting = max(size for size in sizes if size <= room)
        return fitting if whole or room == 0 else min((size for size in sizes if size >= room), default=fitting)

    def _pages_behind(self, ready: Plan, nodes: int) -> int:
        """Pages that the longest sequence takes with everything that is written behind it, reserved or not."""
        longest = max(item.end for item in ready.items) + max(nodes, self._guarded.staged(nodes))
        return -(-longest // self.target.cache.page_size)

    def _lossless(self, seq: Sequence) -> bool:
        return self.verifier.lossless if seq.params.law is None else seq.lossless

    def _keep_drafter_reading(self, ready: Plan, nodes: int) -> None:
        """A drafter that was not used falls behind, and reads what it missed before it drafts again."""
        if not self._guarded.reads:
            return
        if nodes == 0:
            for item in ready.items:  # what the last step gained, it would read at the beginning of the next one
                read = item.end - self._gained.pop(item.seq.id, 1)
                self._read[item.seq.id] = min(read, self._read.get(item.seq.id, read))
                self._unread.update(self._pages_from(item.seq.id, read))
            return
        for item in ready.items:
            self._unread.difference_update(self._pages_from(item.seq.id, self._read.get(item.seq.id, item.start)))
        # A step begins with the last two tokens, so what the step in flight adds need not be known here.
        behind = [(item, self._read.pop(item.seq.id, item.end)) for item in ready.items]
        missed = [(i.seq, read, i.end - 1) for i, read in behind if read < i.end - 1]
        self._read_along([Span(seq.id, seq.tokens, read, end, seq.source, seq.images) for seq, read, end in missed])

    def _pages_from(self, seq_id: int, token: int) -> list[int]:
        return self.scheduler.tables.pages(seq_id)[token // self.target.cache.page_size :]

    def _begin_reading(self, seq_id: int) -> None:
        """A new sequence may share pages that the drafter has not read: it is behind from the first of them on."""
        size = self.target.cache.page_size
        shared = enumerate(self.scheduler.tables.pages(seq_id))
        unread = next((number * size for number, page in shared if page in self._unread), None)
        if unread is not None:
            self._read[seq_id] = unread

    def _read_along(self, spans: list[Span]) -> None:
        """Let the drafter read, with as many pieces together as a step has rows for."""
        rows = self.scheduler.config.max_rows
        pieces = [
            replace(span, start=start, end=min(span.end, start + rows))
            for span in spans
            for start in range(span.start, span.end, rows)
        ]
        while pieces:
            total = list(itertools.accumulate(piece.end - piece.start for piece in pieces))
            count = max(1, bisect.bisect_right(total, rows))
            with self.timers.measure("draft"):
                self._guarded.ingest(self.target.cache.stage_text(pieces[:count]), None)
            self._behind_text = True
            pieces = pieces[count:]

    def _read_scored(self, prompts: Plan) -> None:
        """Prefill prompts whose log-probabilities are wanted: the host waits for their logits."""
        if prompts.items:
            self._timing_invalid = self._behind_text = True
            found = prompt_logprobs(prompts, self.runner.read_scored(prompts))
            self.scheduler.commit(prompts, NOTHING, prompt_logprobs=found)

    def _collect(self) -> list[Event]:
        """Collect the step in flight; drop sequences that were finished or preempted since."""
        flight, self._in_flight = self._in_flight, None
        if flight is None:
            return []
        outcome = flight.launched.wait()
        whole, seconds = self._seconds(flight)
        running = {seq.id: seq for seq in self.scheduler.running}
        kept = [
            b
            for b, (item, lives) in enumerate(zip(flight.plan.items, flight.lives, strict=True))
            if running.get(item.seq.id) is item.seq and item.seq.preemptions == lives
        ]
        plan = Plan(tuple(flight.plan.items[b] for b in kept)).brought_up_to_date()
        outcome = outcome.take(kept)
        report = self._report(plan, flight, outcome, seconds, whole)
        self.controller.observe(report)
        if seconds is not None and report.num_sampling:
            self.last_step = TimedStep(report, seconds)
        if flight.launched.nodes:
            self._gained |= {i.seq.id: len(t) for i, t in zip(plan.items, outcome.tokens, strict=True)}
        logprobs = [flight.launched.logprobs(b, tokens) for b, tokens in zip(kept, outcome.tokens, strict=True)]
        traces = [_explained(flight.launched.trace(b), flight.budget, whole) for b in kept]
        return self.scheduler.commit(plan, outcome, logprobs, traces)

    def _seconds(self, flight: _InFlight) -> tuple[float, float | None]:
        """Seconds since the step before was known, and those of the step, unless something else took time meanwhile."""
        now = time.perf_counter()
        seconds = now - max(flight.since, self._collected_at)
        disturbed, self._collected_at, self._timing_invalid = self._timing_invalid or not flight.alone, now, False
        return seconds, None if disturbed else seconds

    def _report(
        self, plan: Plan, flight: _InFlight, outcome: HostVerdict, seconds: float | None, whole: float
    ) -> StepReport:
        told_apart = not self.scheduler.config.asynchronous
        rows = flight.prompt_rows
        if told_apart:  # what is read behind a step is waited for together with it
            rows, self._prefilled = rows + self._prefilled, 0
        return StepReport(
            num_rows=flight.launched.rows,
            num_sampling=len(outcome.tokens),
            drafted=sum(outcome.drafted),
            accepted=sum(outcome.accepted),
            emitted=sum(len(tokens) for tokens in outcome.tokens),
            outcomes=tuple(zip(outcome.drafted, outcome.accepted, strict=True)),
            draft_seconds=self.timers.seconds.get("draft", 0.0) - flight.draft_seconds if told_apart else None,
            step_seconds=seconds,
            context=sum(len(item.seq.tokens) for item in plan.items) / max(len(plan.items), 1),
            room=flight.launched.nodes,
            prompt_rows=rows,
            whole_seconds=whole if rows and seconds is None else None,
        )


def _explained(trace: StepTrace | None, budget: Budget, seconds: float) -> StepTrace | None:
    """With what the controller decided for the step, and what it took."""
    if trace is None:
        return None
    return replace(trace, why=str(budget.why), expected_gain=budget.gain.expected, seconds=seconds)


def _masked(seq: Sequence) -> bool:
    """Whether the host says what may follow: a grammar, or bad words."""
    return seq.constraint is not None or bool(seq.bad_words)


def _names(values: object) -> tuple[str | None, ...]:
    """Different names, that of the engine's own part first."""
    return tuple(sorted(set(values), key=lambda name: (name is not None, name or "")))  # type: ignore[call-overload]
