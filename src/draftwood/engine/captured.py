"""Captured steps: which are ready, which of them serves a batch, and how they are made: CUDA graphs of `decode_step`.

They are captured at start and while the engine is idle (`capture_next`), never while a request waits.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from draftwood.batch import ForwardBatch
from draftwood.cache.batch_state import BatchState, StepInputs, input_numbers
from draftwood.cache.prefill_buffer import SEQUENCES, PrefillBuffer
from draftwood.engine.decode_step import Parts, decode_step, ingest, propose, score, settle
from draftwood.engine.launched import Batch
from draftwood.engine.shapes import Key, ShapePlan, StepShape
from draftwood.model.runner import ModelRunner
from draftwood.protocols import BatchView, NodeMasks, StepMode

READINGS = (16, 32, 64, 128, 256, 512)  # rows of a captured prefill
WARM_UPS = 24  # steps whose kernels are compiled while weights are read
log = logging.getLogger(__name__)


@dataclass
class StepParts:
    """What the parts of a captured step leave for each other and for the host."""

    proposal: Any = None
    scored: Any = None
    output: Any = None


@dataclass
class CapturedStep:
    """A step of one shape and mode, ready to be replayed: as a whole, or in three parts with masks before the last."""

    inputs: StepInputs
    runs: Sequence[Callable[[], None]]
    made: StepParts
    masks: NodeMasks | None


@dataclass(frozen=True)
class _Replay:
    """A graph with the function it was captured from, which keeps alive the tensors that the graph reads."""

    graph: torch.cuda.CUDAGraph
    run: Callable[[], None]

    def __call__(self) -> None:
        self.graph.replay()


@dataclass
class Graphs:
    """Captures CUDA graphs. They run one at a time and the host copies what they leave before the next one runs, so
    they share a memory pool.
    """

    _pool: Any = None
    _side: torch.cuda.Stream | None = None

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """The same as one graph."""
        if self._side is None:
            self._side = torch.cuda.Stream()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            run()  # libraries set themselves up in the first call on a stream
        torch.cuda.current_stream().wait_stream(self._side)
        graph = torch.cuda.CUDAGraph()
        # "thread_local": what other threads do meanwhile, such as loading files, does not end the capture.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"):
            run()
        return _Replay(graph, run)

    def leave_pool(self) -> None:
        """Use another pool from now on: a capture that failed leaves its pool unusable. Other graphs keep theirs."""
        self._pool = None


@dataclass
class CapturedSteps:
    """Steps and prefills that are ready to be replayed."""

    parts: Parts
    state: BatchState
    shapes: ShapePlan
    captures: bool  # False: everything runs eagerly
    _ready: dict[Key, CapturedStep] = field(default_factory=dict)
    _refused: set[Key] = field(default_factory=set)
    _nearest_known: dict[Key, Key | None] = field(default_factory=dict)  # valid until another step is captured
    _frames: dict[tuple[int, int], PrefillBuffer] = field(default_factory=dict)  # by rows and pages
    _readings: dict[tuple[int, int], Callable[[], None]] = field(default_factory=dict)
    _baked: tuple[object, ...] = ()  # what captured steps were captured with
    _full: bool = False  # there is no memory for more graphs
    _graphs: Graphs = field(default_factory=Graphs)

    @property
    def target(self) -> ModelRunner:
        """The model that is decoded."""
        return self.parts.target

    @property
    def ready(self) -> list[Key]:
        """Shapes and modes of captured steps."""
        return list(self._ready)

    @property
    def steps(self) -> list[CapturedStep]:
        """Captured steps."""
        return list(self._ready.values())

    def tree_size(self, exact: StepShape, mode: StepMode) -> int:
        """Draft nodes for a batch of shape `exact`: none where only plain steps are captured that it fits into."""
        if not self.captures:
            return exact.nodes
        self._drop_outdated()
        fitting = (replace(exact, nodes=nodes, text=0) for nodes in (exact.nodes, 0))
        return next((own.nodes for own in fitting if self._found(self.shapes.wanted(own), mode)), exact.nodes)

    def _nearest(self, batch: Batch) -> Key | None:
        """A captured step that fits: with the batch's prompts if there is one, else without."""
        self._drop_outdated()
        wanted = self.shapes.wanted(batch.shape)
        fits = len(batch.prompts) <= SEQUENCES and self.target.cache.tables is not None
        found = self._found(wanted, batch.mode) if wanted.text and fits else None
        found = found or self._found(replace(wanted, text=0), batch.mode)
        self.shapes.remember(wanted, batch.mode, found)
        return found

    def _found(self, wanted: StepShape, mode: StepMode) -> Key | None:
        """The captured step that serves best, with prompts or without as it is wanted."""
        if (wanted, mode) not in self._nearest_known:
            ready = [key for key in self._ready if bool(key[0].text) == bool(wanted.text)]
            self._nearest_known[wanted, mode] = self.shapes.nearest(wanted, mode, ready)
        return self._nearest_known[wanted, mode]

    def _drop_outdated(self) -> None:
        """Drop captured steps when what they were captured with has changed: edit tables, a drafter that failed."""
        baked = self.state.edits.version, *(health.disabled for health in self.parts.health)
        if self._baked not in ((), baked):
            if self.state.device.type == "cuda":
                torch.cuda.synchronize()  # graphs that are still running are about to be dropped
            for made in (self._ready, self._readings, self._refused, self._nearest_known):
                made.clear()
        self._baked = baked

    def capture_next(self) -> bool:
        """Capture what is missed most, or likely to be asked for; False if there is nothing to capture."""
        if not self.captures or self._full:
            return False
        try:
            return self._capture_next()
        except torch.OutOfMemoryError:
            log.warning("There is no memory for more than %d captured steps.", len(self._ready))
            self._full = True
            return False

    def _capture_next(self) -> bool:
        self._drop_outdated()
        known = [*self._ready, *self._refused]
        size = next((size for size in self._usual_readings() if size not in self._readings), None)
        if size is not None and set(self.shapes.first()) <= set(known):
            self._readings[size] = self._prepare_reading(*size)
            return True
        key = self.shapes.next(known)
        if key is not None:
            self.capture(*key)
        return key is not None

    def capture(self, shape: StepShape, mode: StepMode) -> bool:
        """Capture such a step; False, for good, if part of it turns out to look at values."""
        start = time.perf_counter()
        self._nearest_known.clear()
        try:
            self._ready[shape, mode] = self._prepare(shape, mode)
            log.info("captured %s, %s in %.2f s", shape, mode, time.perf_counter() - start)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            log.warning("%s of %s cannot be captured and runs eagerly: %s", shape, mode, str(error).splitlines()[0])
            self._refused.add((shape, mode))
            self._graphs.leave_pool()
        return (shape, mode) in self._ready

    def _usual_readings(self) -> list[tuple[int, int]]:
        return [(rows, self.shapes.whole_table) for rows in READINGS]

    def _frame(self, rows: int, pages: int) -> PrefillBuffer:
        if (rows, pages) not in self._frames:
            cache, device = self.target.cache, self.state.device
            scratch = cache.scratch_page, device, cache.scratch_state
            self._frames[rows, pages] = PrefillBuffer(rows, pages, cache.page_size, *scratch)
        return self._frames[rows, pages]

    def _as_graph(self, run: Callable[[], None]) -> Callable[[], None]:
        """The same, run once, so that everything is compiled; captured where there are graphs."""
        if self.captures:
            return self._graphs.capture(run)
        run()
        return run

    def _prepare_reading(self, rows: int, pages: int) -> Callable[[], None]:
        frame = self._frame(rows, pages)
        frame.clear()
        return self._as_graph(lambda: self._ingest(frame.batch))  # on the scratch page

    def _ingest(self, batch: ForwardBatch) -> None:
        ingest(self.parts, batch)

    def _prepare(self, shape: StepShape, mode: StepMode) -> CapturedStep:
        """A step of this shape, captured on the padding row."""
        numbers = input_numbers([], [], [], (shape.batch, shape.edited, shape.scored), self.state.padding_row)
        flat = torch.tensor(numbers, dtype=torch.int64).to(self.state.device)
        inputs, made = StepInputs.over(flat, shape.batch, shape.edited), StepParts()
        text = None
        if shape.text:
            frame = self._frame(shape.text, shape.pages)
            frame.clear()
            text = frame.batch
        if not shape.masked:

            def whole() -> None:
                view = self.state.view(inputs, mode, shape.pages)
                made.output = decode_step(self.parts, self.state, view, inputs, shape, text)

            return CapturedStep(inputs, [self._as_graph(whole)], made, None)
        return self._in_parts(shape, mode, inputs, text, made)

    def _in_parts(
        self, shape: StepShape, mode: StepMode, inputs: StepInputs, text: ForwardBatch | None, made: StepParts
    ) -> CapturedStep:
        """The same in three graphs: trees, the target, and what follows once the masks are there."""
        view: list[BatchView] = []

        def first() -> None:
            view[:] = [self.state.view(inputs, mode, shape.pages)]
            made.proposal = propose(self.parts, self.state, view[0], shape)

        def second() -> None:
            made.scored = score(self.parts, view[0], made.proposal, text)

        runs = [self._as_graph(first), self._as_graph(second)]
        rows = shape.masked * made.proposal.tree.widest
        allowed = (rows, self.target.model.config.vocab_size)
        masks = NodeMasks(
            torch.zeros(rows, dtype=torch.int64, device=self.state.device),
            torch.ones(allowed, dtype=torch.bool, device=self.state.device),
        )

        def third() -> None:
            made.output = settle(self.parts, self.state, view[0], inputs, made.scored, shape.alternatives, masks)

        return CapturedStep(inputs, [*runs, self._as_graph(third)], made, masks)

    def warm_ups(self) -> list[Callable[[], object]]:
        """Functions that compile prefills and the usual steps, independent of one another."""
        steps = itertools.islice(self.shapes.usual(), WARM_UPS)
        prefills = (partial(self._prepare_reading, rows, self.shapes.whole_table) for rows in READINGS)
        return [*(partial(self._prepare, *key) for key in steps), *prefills]

    def seconds(self, seq_ids: Sequence[int], nodes: int, mode: StepMode, repeats: int) -> float:
        """Device seconds of such a step, back to back; what the sequences gain is discarded."""
        run = self.step_for(seq_ids, nodes, mode)
        run()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000 / repeats

    def step_for(self, seq_ids: Sequence[int], nodes: int, mode: StepMode) -> Callable[[], None]:
        """A captured step of exactly these sequences."""
        shape = StepShape(len(seq_ids), nodes, self.shapes.pages_for(self.state.most_pages(seq_ids)))
        if (shape, mode) not in self._ready:
            self._ready[shape, mode] = self._prepare(shape, mode)
            self._nearest_known.clear()
        step = self._ready[shape, mode]
        step.inputs.sequences[0].copy_(torch.tensor(self.state.rows(seq_ids)))
        return step.runs[0]
