"""Runs decode steps: eagerly in the shape of the batch, or by replaying CUDA graphs of planned shapes.

Both run `decode_step`. Graphs are captured at start and while the engine is idle (`capture_next`), never while a
request waits; a batch for which no graph is ready runs eagerly. Short pieces of prompts are prefilled within the step
of a running batch, or by graphs of their own.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from draftwood.batch import ForwardBatch
from draftwood.cache.batch_state import BatchState, StepInputs, input_numbers, uploaded
from draftwood.cache.prefill_buffer import SEQUENCES, PrefillBuffer
from draftwood.engine.captured import CapturedStep, Graphs, StepParts
from draftwood.engine.decode_step import Parts, StepOutput, decode_step, ingest, propose, score, settle
from draftwood.engine.launched import Batch, Launched
from draftwood.engine.plan import Plan
from draftwood.engine.shapes import Key, ShapePlan, StepShape
from draftwood.model.runner import ModelRunner
from draftwood.ops.prefill import LONGEST, STEP
from draftwood.protocols import PREDICTED, BatchView, HostView, NodeMasks, Span, StepMode
from draftwood.sampling import host_masks
from draftwood.tree import TokenTree

HOST = torch.device("cpu")
READINGS = (16, 32, 64, 128, 256, 512)  # rows of a captured prefill
NOT_A_SEQUENCE = -1  # holds the pages of prefills that only warm up
WARM_UPS = 24  # steps whose kernels are compiled while weights are read
log = logging.getLogger(__name__)


def batch_state_for(target: ModelRunner, capacity: int, max_nodes: int) -> BatchState:
    """State for sequences as long as the model and its cache allow."""
    tables = target.cache.tables
    longest = min(target.model.config.max_positions, tables.capacity) + 2 * max_nodes + 2
    config = target.model.config
    kinds = {"has_sources": config.encoder is not None, "has_turns": bool(config.rope.sections)}
    scratch, states = target.cache.scratch_page, target.cache.scratch_state
    return BatchState(capacity, longest, tables.page_size, scratch, target.device, **kinds, scratch_state=states)


@dataclass
class GraphRunner:
    """Runs steps and prefills."""

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

    def launch(self, batch: Batch) -> Launched:
        """Run a step without waiting for its output; with its prompts, where they fit."""
        key = self._nearest(batch) if self.captures else None
        if key is None:
            return self._run_eagerly(batch)
        shape, step = key[0], self._ready[key]
        if shape.text:
            self._frame(shape.text, shape.pages).fill(self.target.cache.stage_text(batch.prompts, device=HOST))
        view = batch.plan.view()
        self._prepare_host_trees(view, shape.batch, shape.proposed, key[1])
        step.inputs.flat.copy_(self._numbers(batch, shape, key[1]), non_blocking=True)
        step.runs[0]()
        if step.masks is not None:
            self._fill_masks(step, view, batch)
        launched = self._launched(batch, step.made.output, shape.rows, shape, bool(shape.text))
        return replace(launched, captured=True)

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

    def _run_eagerly(self, batch: Batch) -> Launched:
        shape, device, cache = batch.shape, self.state.device, self.target.cache
        inputs = StepInputs.over(
            self._numbers(batch, shape, batch.mode).to(device, non_blocking=True), shape.batch, shape.edited
        )
        view = replace(
            self.state.view(inputs, batch.mode, shape.pages),
            gained=batch.gained,
            min_accept_prob=batch.min_accept_prob,
            may_look=device.type == "cpu" and not self.captures,
        )
        text = _as_wide(cache.stage_text(batch.prompts), shape.pages, cache.scratch_page) if batch.prompts else None
        host = batch.plan.view()
        self._prepare_host_trees(host, shape.batch, shape.proposed, batch.mode)
        scored = score(self.parts, view, propose(self.parts, self.state, view, shape), text)
        masks = None
        if batch.masked:
            tree = scored.proposal.tree
            found = host_masks(_on_host(tree), host, batch.masked, self.target.model.config.vocab_size)
            masks = NodeMasks(found.nodes.to(device), found.allowed.to(device))
        output = settle(self.parts, self.state, view, inputs, scored, shape.alternatives, masks)
        rows = scored.proposal.tree.num_nodes + shape.text
        return self._launched(batch, output, rows, shape, bool(batch.prompts))

    def _prepare_host_trees(self, view: HostView, size: int, nodes: int, mode: StepMode) -> None:
        if self.parts.drafter.waits or mode.predicted:
            with self.parts.timers.measure("draft"):
                self.parts.drafter.prepare(view, size, nodes)

    def _numbers(self, batch: Batch, shape: StepShape, mode: StepMode) -> Tensor:
        """What a step of this shape and mode is told about the batch."""
        laws, drafters, items = mode.laws, mode.drafters, batch.plan.items
        sequences = [
            (row, i.own_nodes, laws.index(i.seq.params.law), drafters.index(i.drafter), round(1000 * i.need))
            for row, i in zip(self.state.rows(batch.plan.seq_ids), items, strict=True)
        ]
        room = (shape.batch, shape.edited, shape.scored)
        numbers = input_numbers(sequences, batch.edited, batch.scored, room, self.state.padding_row)
        flat = torch.tensor(numbers, dtype=torch.int64)
        return flat.pin_memory() if self.state.device.type == "cuda" else flat

    def _fill_masks(self, step: CapturedStep, view: HostView, batch: Batch) -> None:
        """The host's part of a step with masks: it reads the trees while the target runs, and says what may follow."""
        assert step.masks is not None
        tree = _on_host(step.made.proposal.tree)  # waits for the drafter, not for the target
        step.runs[1]()
        found = host_masks(tree, view, batch.masked, step.masks.allowed.shape[1])
        count, room = len(found.nodes), len(step.masks.nodes)
        index = torch.arange(room).clamp(max=count - 1)
        for buffer, part in ((step.masks.nodes, found.nodes), (step.masks.allowed, found.allowed)):
            buffer.copy_(uploaded(part[index], self.state.device), non_blocking=True)
        step.runs[2]()

    def _launched(self, batch: Batch, output: StepOutput, rows: int, shape: StepShape, with_prompts: bool) -> Launched:
        arrived = None
        host = output.over([_on_its_way(part) for part in output.tensors])
        if self.state.device.type == "cuda":
            arrived = torch.cuda.Event()
            arrived.record()
        depth = self.parts.drafter.depth(shape.proposed) + (PREDICTED if batch.mode.predicted else 0)
        return Launched(batch, host, arrived, rows, shape.nodes, depth, with_prompts, captured=False)

    def read(self, spans: Sequence[Span]) -> None:
        """Prefill pieces of prompts in target and drafter: a few short ones by a graph, others eagerly."""
        rows = sum(span.end - span.start for span in spans)
        size = next((size for size in READINGS if size >= rows), rows), self.shapes.whole_table
        if len(spans) > SEQUENCES or size not in self._readings:
            ingest(self.parts, self.target.cache.stage_text(spans))
            return
        self._frame(*size).fill(self.target.cache.stage_text(spans, device=HOST))
        self._readings[size]()

    def read_scored(self, plan: Plan) -> Tensor:
        """The same, eagerly, with logits at the plan's `scored_rows`. [K, V]."""
        rows = torch.tensor(plan.scored_rows, device=self.target.device)
        return ingest(self.parts, self.target.cache.stage_text(plan.spans, rows))

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

    def warm_long_prefills(self, until: float) -> None:
        """Prefill long prompts of every size that attention plans by, each for the first time, before there are
        requests: planning takes longer than running. Ends at `until` (`time.perf_counter`).
        """
        if not self.captures or self.state.device.type != "cuda":
            return
        tables, own = self.target.cache.tables, self.target.model.config
        longest = min(LONGEST, self.shapes.max_rows, own.max_positions)
        for rows in range(STEP, longest + 1, STEP):
            if time.perf_counter() > until:
                return
            tables.open(NOT_A_SEQUENCE, [])
            if tables.reserve(NOT_A_SEQUENCE, rows):
                self.read([Span(NOT_A_SEQUENCE, [0] * rows, 0, rows)])
                torch.cuda.synchronize()
            tables.close(NOT_A_SEQUENCE)

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


def _on_its_way(found: Tensor) -> Tensor:
    """An asynchronous copy for the host."""
    if found.device.type == "cpu":
        return found
    return torch.empty(found.shape, dtype=found.dtype, pin_memory=True).copy_(found, non_blocking=True)


def _on_host(tree: TokenTree) -> TokenTree:
    """Tokens and parents of a tree where the host can read them."""
    if tree.tokens.device.type == "cpu":
        return tree
    shape = replace(tree.shape, parents=tree.parents.cpu(), offsets=tree.offsets.cpu())
    return replace(tree, tokens=tree.tokens.cpu(), shape=shape)


def _as_wide(text: ForwardBatch, pages: int, scratch_page: int) -> ForwardBatch:
    """The same with block tables of `pages` entries."""
    missing = pages - text.block_table.shape[1]
    return replace(text, block_table=torch.nn.functional.pad(text.block_table, (0, missing), value=scratch_page))
