"""The decode step on the device: draft, forward, verify, commit, all from the batch state; on CUDA one captured graph.

A captured step ("round") is the engine's step without the host. The code is the same whether it is captured or run
eagerly. Graphs are captured when first needed, by shape (batch, nodes, pages of the longest sequence, prefill rows) and
sampling mode. Short pieces of prompts are prefilled by graphs too: by their own, or within the step of a running batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from draftwood.cache.batch_state import BatchState, DeviceBatchView, SamplingMode
from draftwood.cache.kv import stage_trees
from draftwood.cache.prefill_buffer import SEQUENCES, PrefillBuffer
from draftwood.cache.resident import ResidentDrafter, round_batch
from draftwood.drafters.resident import ResidentNone
from draftwood.engine.plan import Plan
from draftwood.engine.scoring import stage_prompts
from draftwood.engine.trace import NUM_FACTS, facts, step_trace
from draftwood.faults import DrafterFailed, DrafterHealth, attributed
from draftwood.model.batch import ForwardBatch, with_text
from draftwood.model.runner import ModelRunner
from draftwood.ops.choice import likeliest
from draftwood.protocols import Features, Randomness, Span, Verifier
from draftwood.request import StepTrace
from draftwood.sampling import target_distribution
from draftwood.tree import HostVerdict, TokenTree, Verdict
from draftwood.verifiers.path import keep_chosen

HOST = torch.device("cpu")
CAPTURE_AFTER = 32  # capture a new shape once padding has wasted this many plain steps: a capture takes as long
FREE_ROWS = 256  # rows that take as long as reading all weights; each as many more take as long again
LONG_TABLES = 0.1  # plain steps lost by a block table that is longer than needed
APART = 1.0  # plain steps lost by a separate prefill: weights are read once more
READINGS = (16, 32, 64, 128, 256, 512)  # rows of a captured prefill
MIXED_SIZES = (64, 128, 256, 512)  # prefill rows of a mixed step
MAX_MIXED_SIZES = 48  # mixed steps that are captured: there are many shapes, and each keeps its memory
LENGTHS = (1024, 4096, 16384)  # tokens: kernels are split for the longest possible sequence, not for the present one


def batch_state_for(target: ModelRunner, capacity: int, max_nodes: int) -> BatchState:
    """State for sequences as long as the model and its cache allow."""
    tables = target.cache.tables
    longest = min(target.model.config.max_positions, tables.capacity) + 2 * max_nodes + 2
    return BatchState(capacity, longest, tables.page_size, target.cache.scratch_page, target.device)


@dataclass(frozen=True)
class StepShape:
    """What a captured step has room for."""

    batch: int  # sequences
    nodes: int  # of each one's tree, without the root
    pages: int  # of each sequence
    text: int = 0  # prefill rows

    @property
    def rows(self) -> int:
        """Rows of the target's forward."""
        return self.batch * (1 + self.nodes) + self.text

    def lost_with(self, other: StepShape) -> float:
        """Plain steps lost by running `other` instead: padding rows, tokens that are not drafted."""
        idle = (other.batch - self.batch) * (1 + other.nodes) / FREE_ROWS
        unguessed = (self.nodes - other.nodes) / (1 + self.nodes)
        return idle + unguessed + (LONG_TABLES if other.pages > self.pages else 0.0)


@dataclass
class CapturedStep:
    """A step of one shape and sampling mode, ready to be replayed."""

    rows: Tensor  # [B] rows of the batch state, written before every run
    run: Callable[[], None]
    outcome: Tensor  # [B, 3 + D] what the last run emitted, see `BatchState.advance`
    facts: Tensor | None  # [B * (1 + N), 6] what it drafted, where requests are traced


@dataclass(frozen=True)
class _Replay:
    """A graph with the function it was captured from, which keeps alive the tensors that the graph reads."""

    graph: torch.cuda.CUDAGraph
    run: Callable[[], None]

    def __call__(self) -> None:
        self.graph.replay()


@dataclass
class Launched:
    """A step in flight: where its outcome will be, and when."""

    host: Tensor  # [B, 3 + D]
    arrived: torch.cuda.Event | None
    size: int  # sequences; the rest of the batch is padding
    facts: Tensor | None = None  # [B * (1 + N), 6]

    def wait(self) -> HostVerdict:
        """The outcome, once it is there."""
        if self.arrived is not None:
            self.arrived.synchronize()
        rows = self.host[: self.size].tolist()
        return HostVerdict(
            tokens=[[*row[3 : 3 + row[0]], row[1]] for row in rows],
            accepted=[row[0] for row in rows],
            drafted=[row[2] for row in rows],
            drift=[0.0] * len(rows),
        )

    def trace(self, b: int) -> StepTrace | None:
        """What the step did for its b-th sequence, if it is traced; valid after `wait`."""
        if self.facts is None:
            return None
        tree = self.facts.view(len(self.host), -1, NUM_FACTS)[b].tolist()
        return step_trace(tree, int(self.host[b, 1]), self.size, self.size * len(tree))


@dataclass
class GraphRunner:
    """Captures and replays decode steps."""

    target: ModelRunner
    drafter: ResidentDrafter
    law_of: Callable[[str | None], Verifier]  # by the name a request gives
    rng: Randomness
    batch_state: BatchState
    captures: bool  # False: eager, for debugging and where there are no graphs
    health: DrafterHealth = field(default_factory=lambda: DrafterHealth("drafter"))
    _known: dict[tuple[StepShape, SamplingMode], CapturedStep] = field(default_factory=dict)
    _refused: set[SamplingMode] = field(default_factory=set)
    _roots: dict[int, TokenTree] = field(default_factory=dict)
    _lost: dict[tuple[StepShape, SamplingMode], float] = field(default_factory=dict)  # plain steps, by wanted shape
    _frames: dict[tuple[int, int], PrefillBuffer] = field(default_factory=dict)  # by rows and pages
    _readings: dict[tuple[int, int], Callable[[], None]] = field(default_factory=dict)
    _pool: Any = None
    _side: Any = None

    @property
    def ready(self) -> list[CapturedStep]:
        """Steps that have been captured so far."""
        return list(self._known.values())

    def can_run(self, kind: SamplingMode) -> bool:
        """Whether steps of this mode need nothing from the host."""
        return kind not in self._refused and self.drafter.suits(kind, self.law_of(kind.law))

    def prepare(self, size: StepShape, kind: SamplingMode) -> bool:
        """Capture such a step if need be; False, for good, if its law turns out to read values on the host.

        Raises `DrafterFailed` if the drafter cannot run it; see `go_on_plainly`.
        """
        try:
            self._round(size, kind)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if not self.captures:
                raise
            reason = str(error).splitlines()[0]
            logging.getLogger(__name__).warning("%s cannot be captured and runs eagerly: %s", kind, reason)
            self._refused.add(kind)
        return kind not in self._refused

    def is_ready(self, size: StepShape, kind: SamplingMode) -> bool:
        """Whether such a step has been captured."""
        return (size, kind) in self._known

    def size_for(self, count: int, room: int, pages: int, kind: SamplingMode) -> StepShape:
        """The shape to run `count` sequences with, of at most `pages` pages, with room for so many nodes each.

        A capture takes as long as dozens of steps. So the best captured shape is used until it has wasted as much. A
        shape without nodes is no substitute for one with: a drafter with its own KV cache would fall behind.
        """
        nodes = max(size for size in self.drafter.sizes if size <= room)
        wanted = StepShape(round_batch(count), nodes, self._pages_for(pages))
        if (wanted, kind) in self._known:
            return wanted
        ready = [known for known, its_kind in self._known if its_kind == kind and self._holds(known.pages, pages)]
        fitting = [
            known
            for known in ready
            if count <= known.batch and known.nodes <= nodes and (known.nodes > 0) == (nodes > 0) and not known.text
        ]
        instead = min(fitting, key=wanted.lost_with, default=wanted)
        return wanted if self._missed(wanted, kind, wanted.lost_with(instead)) else instead

    def with_room_for(
        self, spans: Sequence[Span], size: StepShape, kind: SamplingMode, max_rows: int
    ) -> StepShape | None:
        """The shape of a mixed step that also prefills these pieces of prompts. None where they are prefilled
        separately: they do not fit, or no such step is captured and little time has been wasted by that so far.
        """
        rows = sum(span.end - span.start for span in spans)
        rides = [replace(size, text=text) for text in MIXED_SIZES if text >= rows]
        rides = [ride for ride in rides if ride.rows <= max_rows]
        if not rides or len(spans) > SEQUENCES or not self._holds(size.pages, self._most_pages(spans)):
            return None
        wanted = rides[0]
        if (wanted, kind) in self._known:
            return wanted
        lost = {ride: (ride.text - wanted.text) / FREE_ROWS for ride in rides if (ride, kind) in self._known}
        instead = min((ride for ride in lost if lost[ride] < APART), key=lambda ride: ride.text, default=None)
        may_prepare = sum(known.text > 0 for known, _ in self._known) < MAX_MIXED_SIZES
        missed = self._missed(wanted, kind, APART if instead is None else lost[instead])
        return wanted if missed and may_prepare else instead

    def _missed(self, wanted: StepShape, kind: SamplingMode, lost: float) -> bool:
        """Add to the time wasted because this shape is not captured; whether it is time to capture it."""
        self._lost[wanted, kind] = self._lost.get((wanted, kind), 0.0) + lost
        return self._lost[wanted, kind] > CAPTURE_AFTER

    def _most_pages(self, spans: Sequence[Span]) -> int:
        return max(len(self.target.cache.tables.pages(span.seq_id)) for span in spans)

    def _pages_for(self, pages: int) -> int:
        whole = self.batch_state.num_pages
        rounded = (length // self.target.cache.page_size for length in LENGTHS)
        return next((some for some in rounded if some < whole and self._holds(some, pages)), whole)

    def _holds(self, some: int, pages: int) -> bool:
        """The last block-table entry is scratch: a finished sequence still runs one step, and writes there."""
        return pages < some or some == self.batch_state.num_pages

    def launch(self, plan: Plan, size: StepShape, kind: SamplingMode, spans: Sequence[Span] = ()) -> Launched:
        """Launch a step of shape `size` for the plan's sequences and pieces of prompts, without waiting for it."""
        seq_ids = [item.seq.id for item in plan.items]
        todo = self._round(size, kind)
        if spans:
            self._frame(size.text, size.pages).fill(self.target.cache.stage_text(spans, HOST))
        if size.nodes and self.drafter.waits:
            with attributed("prepare"):
                self.drafter.prepare(plan.view(HOST), size.batch, size.nodes)
        todo.rows.copy_(self.batch_state.rows(seq_ids, size.batch))
        todo.run()
        told = None if todo.facts is None else _on_its_way(todo.facts)
        outcome = _on_its_way(todo.outcome)
        if todo.outcome.device.type == "cpu":
            return Launched(outcome, None, len(seq_ids), told)
        arrived = torch.cuda.Event()
        arrived.record()
        return Launched(outcome, arrived, len(seq_ids), told)

    def read(self, spans: Sequence[Span]) -> None:
        """Prefill pieces of prompts in target and drafter: a few short ones by a graph, others eagerly."""
        rows = sum(span.end - span.start for span in spans)
        if not self.captures or len(spans) > SEQUENCES or rows > READINGS[-1]:
            return self._run_text(self.target.cache.stage_text(spans))
        size = next(size for size in READINGS if size >= rows), self._pages_for(self._most_pages(spans))
        if size not in self._readings:
            self._readings[size] = self._prepare_reading(*size)
        self._frame(*size).fill(self.target.cache.stage_text(spans, HOST))
        self._readings[size]()

    def read_scored(self, plan: Plan) -> Tensor:
        """The same, eagerly, with logits at the plan's `scored_rows`. [K, V]."""
        batch = stage_prompts(plan, self.target.cache)
        out = self.target.forward(batch, self.drafter.needs)
        self._hand_on(replace(batch, logit_rows=batch.logit_rows[:0]), out.features)
        return out.logits

    def _frame(self, rows: int, pages: int) -> PrefillBuffer:
        if (rows, pages) not in self._frames:
            cache = self.target.cache
            device = self.batch_state.device
            self._frames[rows, pages] = PrefillBuffer(rows, pages, cache.page_size, cache.scratch_page, device)
        return self._frames[rows, pages]

    def _prepare_reading(self, rows: int, pages: int) -> Callable[[], None]:
        frame = self._frame(rows, pages)
        frame.clear()
        return self._ready(lambda: self._run_text(frame.batch))  # on the scratch page

    def _run_text(self, batch: ForwardBatch) -> None:
        self._hand_on(batch, self.target.forward(batch, self.drafter.needs).features)

    def _hand_on(self, text: ForwardBatch, features: Features) -> None:
        """Give the drafter prefilled text and the target's features of its rows."""
        with attributed("read"):
            if self.drafter.needs:
                self.drafter.take_in(text, features)
            if self.drafter.reads:
                self.drafter.read(text)

    def go_on_plainly(self, failure: DrafterFailed) -> None:
        """Run steps without drafts from now on. A step that failed can be run again: it commits last, and what it wrote
        before lies behind the committed tokens.

        For good: the drafter's state is part of every captured step and cannot be rebuilt.
        """
        self.health.failed(failure.call, failure.error, for_good=True)
        if self.batch_state.device.type == "cuda":
            torch.cuda.synchronize()  # graphs that are still running are about to be dropped
        self.drafter = ResidentNone()
        for made in (self._known, self._readings, self._lost, self._refused):
            made.clear()

    def warm_ups(self, kind: SamplingMode) -> list[Callable[[], object]]:
        """Functions that compile a prefill, a plain step and a step with drafts, independent of one another."""
        sizes = (StepShape(1, nodes, self._pages_for(1)) for nodes in {0, self.drafter.sizes[-1]})
        piece = partial(self._prepare_reading, READINGS[0], self._pages_for(1))
        return [piece, *(partial(self._prepare, size, kind) for size in sizes)]

    def seconds(self, seq_ids: Sequence[int], nodes: int, kind: SamplingMode, repeats: int) -> float:
        """Device seconds of such a step, back to back; what the sequences gain is discarded."""
        todo = self._round_of(seq_ids, nodes, kind)
        todo.run()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            todo.run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000 / repeats

    def _round_of(self, seq_ids: Sequence[int], nodes: int, kind: SamplingMode) -> CapturedStep:
        """A step for exactly these sequences."""
        pages = self._pages_for(self.batch_state.most_pages(seq_ids))
        todo = self._round(StepShape(len(seq_ids), nodes, pages), kind)
        todo.rows.copy_(self.batch_state.rows(seq_ids, len(seq_ids)))
        return todo

    def _round(self, size: StepShape, kind: SamplingMode) -> CapturedStep:
        known = self._known.get((size, kind))
        if known is None:
            known = self._known[size, kind] = self._prepare(size, kind)
        return known

    def _prepare(self, size: StepShape, kind: SamplingMode) -> CapturedStep:
        rows = torch.full((size.batch,), self.batch_state.padding_row, device=self.batch_state.device)
        depth = self.drafter.depth(size.nodes) if size.nodes else 0
        outcome = torch.zeros(size.batch, 3 + depth, dtype=torch.int64, device=self.batch_state.device)
        shape = size.rows - size.text, NUM_FACTS
        told = torch.zeros(shape, dtype=torch.float64, device=self.batch_state.device) if kind.traced else None
        if size.text:
            self._frame(size.text, size.pages).clear()

        def run() -> None:
            self._step(rows, size, kind, outcome, told)

        return CapturedStep(rows, self._ready(run), outcome, told)  # on the padding row

    def _step(self, rows: Tensor, size: StepShape, kind: SamplingMode, outcome: Tensor, told: Tensor | None) -> None:
        """The decode step, from batch state to batch state."""
        view, nodes = self.batch_state.view(rows, kind, size.pages), size.nodes
        with attributed("propose"):
            tree = self.drafter.propose(view, nodes, self.rng) if nodes else self._bare_roots(view)
        memory = self.target.cache
        batch = stage_trees(
            view,
            tree,
            memory.page_size,
            self.target.model.config.max_positions,
            chain=not nodes or self.drafter.law.chain,
        )
        text = self._frame(size.text, size.pages).batch if size.text else None
        out = self.target.forward(batch if text is None else with_text(batch, text), self.drafter.needs)
        verdict = self._verdict(out.logits, tree, view, kind)
        if told is not None:
            told.copy_(facts(out.logits, tree, verdict, view))
        if nodes:
            index = tree.local[verdict.path.clamp(min=0)]
            memory.keep(view.block_table, view.lengths, index, verdict.length, chain=batch.linear)
            with attributed("keep"):
                self.drafter.keep(view, tree, index, verdict.length)
        if self.drafter.needs:
            with attributed("learn"):
                self.drafter.learn(view, verdict.path, out.features)
        if text is not None:
            self._hand_on(text, {layer: rows[len(batch.tokens) :] for layer, rows in out.features.items()})
        self.batch_state.advance(view, tree, verdict, outcome)

    def _verdict(self, logits: Tensor, tree: TokenTree, view: DeviceBatchView, kind: SamplingMode) -> Verdict:
        law = self.law_of(kind.law)
        if kind.greedy and law.lossless:  # greedy: every lossless law keeps the longest match
            choices = likeliest(logits)
            return keep_chosen(tree, choices) if tree.num_drafted else Verdict.of_roots(tree, choices)
        return law.verify(tree, target_distribution(logits, tree, view), view, self.rng)

    def _bare_roots(self, view: DeviceBatchView) -> TokenTree:
        size = len(view.rows)
        if size not in self._roots:
            self._roots[size] = TokenTree.roots(torch.zeros_like(view.rows))
        return self._roots[size].refilled(view.roots)

    def _ready(self, run: Callable[[], None]) -> Callable[[], None]:
        """The same, compiled; captured where there are graphs."""
        if self.captures:
            return self._captured(run)
        run()
        return run

    def _captured(self, run: Callable[[], None]) -> Callable[[], None]:
        """The same as one CUDA graph. Graphs run one at a time and keep only their outcome, so they share a pool."""
        if self._pool is None:
            self._pool, self._side = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            run()  # libraries set themselves up in the first call on a stream
        torch.cuda.current_stream().wait_stream(self._side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._side):
            run()
        return _Replay(graph, run)


def _on_its_way(found: Tensor) -> Tensor:
    """An asynchronous copy for the host."""
    if found.device.type == "cpu":
        return found.clone()
    return torch.empty(found.shape, dtype=found.dtype, pin_memory=True).copy_(found, non_blocking=True)
