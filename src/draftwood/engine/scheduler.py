"""Who runs next, with how many tokens and how much room to guess. Imports no torch.

There is no prefill phase and no decode phase: every sequence catches up with its own tokens, a chunk at a time, and
samples when it has caught up. When pages run out the one with the latest turn gives its own back and starts over later;
draft nodes never preempt a sequence.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from draftwood.cache.blocks import PageTables
from draftwood.engine.plan import Plan, PlanItem
from draftwood.engine.reasons import kind_of
from draftwood.engine.sequence import Sequence
from draftwood.errors import DraftwoodError, QueueFull
from draftwood.protocols import Budget, Load, Pace
from draftwood.request import Event, FinishReason, StepTrace, TokenLogprob
from draftwood.tree import HostVerdict

NO_DISTRIBUTION = (
    "The model gave logits that are not finite, so there is no next token. Its weights may be damaged, or its numbers "
    "too large for the type it computes in: try dtype float32."
)


LEAST_PIECE = 16  # rows of a prompt that a step reads, whatever was promised to others


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of admission and of a step."""

    max_rows: int = 512  # pending tokens and draft nodes a step
    max_running: int = 64
    max_waiting: int = 4096
    asynchronous: bool = False  # steps are launched before the last one is known: pages for draft nodes are kept
    # Rows of prompts that a step of running sequences has room for, ascending, and pieces of how many prompts; (): any.
    prefill_sizes: tuple[int, ...] = ()
    max_pieces: int = 16

    def __post_init__(self) -> None:
        if min(self.max_rows, self.max_running, self.max_waiting) < 1:
            raise ValueError("max_rows, max_running and max_waiting must be at least 1")


class Scheduler:
    """Owns the sequences; `commit` and `abort` are the only places that change or end them."""

    def __init__(
        self,
        tables: PageTables,
        config: SchedulerConfig,
        on_end: Callable[[int], None] = lambda seq_id: None,
        staged: Callable[[int], int] = lambda nodes: nodes,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if tables.states is not None and tables.states.count < config.max_running:
            raise ValueError(f"{config.max_running} sequences may run, and there are {tables.states.count} states")
        self.tables = tables
        self.config = config
        self.on_end = on_end
        self.staged = staged  # places behind the text that a drafter writes to for a tree of so many nodes
        self.clock = clock
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._turns = itertools.count(1)
        self._last_served: Counter[str] = Counter()  # tenant -> the turn in which it last got a place
        self.budget = Budget(0, why="no step has run yet")  # of the last step
        self.decisions: Counter[str] = Counter()  # by the kind of their reason

    @property
    def load(self) -> Load:
        """How busy it is."""
        lengths = [len(seq.tokens) for seq in self.running]
        context = sum(lengths) / max(len(lengths), 1)
        return Load(len(lengths), len(self.waiting), context, self.config.asynchronous, self._paces())

    def _paces(self) -> tuple[Pace, ...]:
        if all(seq.params.slo is None for seq in self.running):
            return ()
        now, gain = self.clock(), sum(seq.gain for seq in self.running) / len(self.running)
        return tuple(pace for seq in self.running if (pace := seq.pace(now, gain)) is not None)

    @property
    def has_work(self) -> bool:
        """Whether anything is left to do."""
        return bool(self.running or self.waiting)

    def add(self, sequences: list[Sequence]) -> None:
        """Queue all answers of one request, or none of them."""
        if len(self.waiting) + len(sequences) > self.config.max_waiting:
            raise QueueFull(
                f"The queue is full: {len(self.waiting)} answers are waiting and the limit is "
                f"{self.config.max_waiting}. Try again later or raise max_waiting."
            )
        self.waiting.extend(sequences)

    def abort(self, request_id: int, reason: FinishReason, error: str | None = None) -> list[Event]:
        """End every unfinished answer of a request now, whatever state it is in."""
        events = []
        for seq in [s for s in (*self.running, *self.waiting) if s.request_id == request_id]:
            self._end(seq)
            events.append(seq.event(0, 0, reason, self.clock(), error=error))
        return events

    def schedule(
        self, budget: Budget, ahead: Mapping[int, int] = MappingProxyType({}), most: int | None = None
    ) -> tuple[Plan, Plan]:
        """What the next step runs: chunks of prompts, which leave the last token of each prompt pending, and the
        sequences that have nothing else pending, with room for draft nodes.

        `ahead`: the most tokens a sequence may have gained on the device that the host does not know of; at least one.
        `most`: draft nodes of one tree, where those of a step are shared unevenly; None: as many as the budget says.
        """
        self.decisions[kind_of(budget.why)] += 1
        self.budget, most = budget, budget.max_nodes if most is None else most
        self._admit()
        share = self._node_rows(max((seq.wanted_nodes(most) for seq in self.running), default=0))
        items: dict[int, PlanItem] = {}
        text, pieces = self._prefill_room()
        for seq in sorted(self.running, key=lambda s: (self._pending(s) > 1, s.turn, s.id)):
            rows = self.config.max_rows - sum(item.end - item.start + item.max_nodes for item in items.values())
            prefills = [item for item in items.values() if not item.samples]
            if self._pending(seq) > 1:
                rows = min(rows, text - sum(item.end - item.start for item in prefills))
                rows = 0 if len(prefills) >= pieces else rows
            start, length = self.tables.num_cached(seq.id), len(seq.tokens)
            if rows < 1 or seq.id not in self.tables or (seq.id in ahead and length + 1 >= seq.max_length):
                continue  # no room, preempted, or certain to end with what it has gained already
            ready = start == length - 1
            last = seq.piece_end(min(start + rows, length - 1))
            end = length if ready else self.tables.piece_end(seq.id, last)
            room = min(end + ahead.get(seq.id, 0) + (seq.id in ahead), seq.max_length)
            if end > start and self._make_room(seq, room, items):
                nodes = min(share, rows - 1, seq.wanted_nodes(most)) if ready else 0
                items[seq.id] = PlanItem(seq, start, end, nodes)
        prompts = Plan(tuple(item for item in items.values() if not item.samples))
        # Draft nodes get their pages last: no sequence is preempted for a guess.
        return prompts, Plan(tuple(self._with_pages(item, ahead) for item in items.values() if item.samples))

    def _prefill_room(self) -> tuple[int, int]:
        """Rows and pieces of prompts that the next step takes. While sequences decode, as many rows as a step has room
        for: the largest size that the pending rows fill, or the smallest that holds them; no more than the budget says,
        but always some, or prompts would starve.
        """
        pending = [self._pending(seq) - 1 for seq in self.running]
        sizes, rows, most = self.config.prefill_sizes, sum(pending), self.budget.max_prompt_rows
        if all(pending) or (not sizes and most is None):
            return self.config.max_rows, len(pending)
        if not sizes:
            return min(self.config.max_rows, max(LEAST_PIECE, most or 0)), len(pending)
        filled = [size for size in sizes if size <= rows and (most is None or size <= most)]
        return max(filled, default=sizes[0]), self.config.max_pieces

    def _node_rows(self, wanted: int) -> int:
        """Rows for one sequence's draft nodes: an even share, and half of the step while prompts are read."""
        ready = sum(self._pending(seq) == 1 for seq in self.running)
        spare = max(0, self.config.max_rows - ready)
        shared = spare if ready == len(self.running) else spare // 2
        return min(wanted, shared // max(ready, 1))

    def commit(
        self,
        plan: Plan,
        outcome: HostVerdict,
        logprobs: list[list[TokenLogprob]] | None = None,
        traces: list[StepTrace | None] | None = None,
        prompt_logprobs: Mapping[int, list[TokenLogprob]] | None = None,
    ) -> list[Event]:
        """Give every sequence what it gained; the one place where sequences change. One whose next token the model gave
        no distribution for ends with an error.

        `prompt_logprobs`: of the tokens behind `plan.scored`, by the item's index.
        """
        gains = {i: b for b, i in enumerate(plan.sampling)}
        events = []
        for i, item in enumerate(plan.items):
            if prompt_logprobs and i in prompt_logprobs:
                item.seq.prompt_logprobs += prompt_logprobs[i]
            b = gains.get(i)
            if b is None:
                self.tables.advance(item.seq.id, item.end, item.seq.tokens)
            elif not outcome.usable[b]:
                events.append(self._end_with_error(item.seq, NO_DISTRIBUTION))
            else:
                event = self._give(item, outcome, b, logprobs[b] if logprobs else [])
                events.append(_traced(event, traces[b]) if traces else event)
        return events

    def _give(self, item: PlanItem, outcome: HostVerdict, b: int, logprobs: list[TokenLogprob]) -> Event:
        seq, accepted, now = item.seq, outcome.accepted[b], self.clock()
        before = len(seq.tokens)
        try:
            reason = seq.receive(outcome.tokens[b], accepted, outcome.drafted[b], now, outcome.drift[b])
            event = seq.event(len(seq.tokens) - before, accepted, reason, now, logprobs)
        except Exception as failure:  # one answer's text must not take its neighbours down
            if isinstance(failure, DraftwoodError):
                return self._end_with_error(seq, str(failure), failure.code)
            return self._end_with_error(seq, f"{type(failure).__name__}: {failure}")
        # What ended the answer cut accepted tokens off, and there may be no pages behind it.
        # A drafter has run the text that was there before the step; what is new can be shared after the next one.
        self.tables.advance(seq.id, min(item.end + accepted, len(seq.tokens)), seq.tokens[: item.end])
        if event.finished:
            self._end(seq)
        elif not self.config.asynchronous:
            self.tables.trim(seq.id)
        return event

    def _end_with_error(self, seq: Sequence, error: str, code: str | None = None) -> Event:
        self._end(seq)
        stats = seq.stats(self.clock())
        ended = FinishReason.ERROR
        return Event(seq.request_id, seq.index, (), (), "", ended, stats, error=error, error_code=code)

    def _pending(self, seq: Sequence) -> int:
        return len(seq.tokens) - self.tables.num_cached(seq.id)

    def _with_pages(self, item: PlanItem, ahead: Mapping[int, int]) -> PlanItem:
        """Pages for its draft nodes, or a tree that fits into what its own last page has left."""
        if item.seq.max_length - item.end < 2:
            return replace(item, max_nodes=0)
        # Where the host is behind, the tree hangs behind an unknown number of tokens, at most so many.
        base = item.end + ahead.get(item.seq.id, 0) + (item.seq.id in ahead)
        places = max(item.max_nodes, self.staged(item.max_nodes)) if item.max_nodes else 0
        if self.tables.reserve(item.seq.id, base + places):
            return item
        # A drafter that finds no page for its own copy of a node writes to the scratch page.
        return replace(item, max_nodes=max(0, min(item.max_nodes, self.tables.room(item.seq.id) - base)))

    def _admit(self) -> None:
        held: list[Sequence] = []
        while self.waiting and len(self.running) < self.config.max_running:
            self._bring_next_forward()
            seq = self.waiting[0]
            if self._sibling_will_share(seq):
                held.append(self.waiting.popleft())
                continue
            cached = self.tables.open(seq.id, seq.reusable_tokens, seq.prefix_salt)
            missing = -(-(len(seq.tokens) - cached) // self.tables.page_size)
            if self.running and missing > self.tables.pool.num_available:
                self.tables.close(seq.id)
                break
            if seq.num_generated == 0:
                seq.cached_prompt_tokens = cached
                seq.admitted = seq.admitted or self.clock()
            self.running.append(self.waiting.popleft())
            self._last_served[seq.tenant] = next(self._turns)
        self.waiting.extendleft(reversed(held))

    def _bring_next_forward(self) -> None:
        """Fair queuing: the tenant with the fewest running answers is next; of several, the one served longest ago; of
        its answers that with the earliest turn. A preempted answer goes before all others, whatever its tenant, but
        those of a more urgent priority with an earlier turn.
        """
        first = self.waiting[0]
        if first.preemptions:
            urgency, turn = first.params.priority, first.turn
            sooner = [seq for seq in self.waiting if seq.params.priority < urgency and seq.turn < turn]
            chosen = min(sooner, key=lambda seq: seq.turn, default=first)
        else:
            running = Counter(seq.tenant for seq in self.running)
            chosen = min(self.waiting, key=lambda seq: (running[seq.tenant], self._last_served[seq.tenant], seq.turn))
        if chosen is not first:
            self.waiting.remove(chosen)
            self.waiting.appendleft(chosen)

    def _sibling_will_share(self, seq: Sequence) -> bool:
        """Another answer of the same request is reading the same prompt right now: wait for its pages."""
        return any(
            other.request_id == seq.request_id and other.num_generated == 0 and other.id < seq.id
            for other in self.running
        )

    def _make_room(self, seq: Sequence, length: int, items: dict[int, PlanItem]) -> bool:
        """Pages for `length` tokens, taken from whom has the latest turn if need be; False if that is the sequence
        itself.
        """
        while not self.tables.reserve(seq.id, length):
            victim = max(self.running, key=lambda s: (s.turn, s.id))
            self._preempt(victim)
            items.pop(victim.id, None)
            if victim is seq:
                return False
        return True

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.tables.close(seq.id)
        self.waiting.appendleft(seq)
        seq.preemptions += 1
        self.num_preemptions += 1

    def _end(self, seq: Sequence) -> None:
        if seq in self.running:
            self.running.remove(seq)
            self.tables.close(seq.id)
        else:
            self.waiting.remove(seq)
        self.on_end(seq.id)


def _traced(event: Event, trace: StepTrace | None) -> Event:
    """What the event tells of its step: nothing that was cut off."""
    if trace is None or not event.token_ids:
        return event
    return replace(event, step=replace(trace, emitted=trace.emitted[: len(event.token_ids)]))
