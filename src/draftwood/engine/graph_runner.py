"""Runs decode steps: eagerly in the shape of the batch, or by replaying CUDA graphs of planned shapes.

Both run `decode_step`. What is captured is in `captured.py`; a batch for which no graph is ready runs eagerly. Short
pieces of prompts are prefilled within the step of a running batch, or by graphs of their own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from draftwood.batch import ForwardBatch
from draftwood.cache.batch_state import BatchState, StepInputs, input_numbers, uploaded
from draftwood.cache.prefill_buffer import SEQUENCES
from draftwood.engine.captured import READINGS, CapturedStep, CapturedSteps
from draftwood.engine.decode_step import StepOutput, ingest, propose, score, settle
from draftwood.engine.launched import Batch, Launched
from draftwood.engine.plan import Plan
from draftwood.engine.shapes import StepShape
from draftwood.model.runner import ModelRunner
from draftwood.ops.prefill import LONGEST, STEP
from draftwood.protocols import PREDICTED, HostView, NodeMasks, Span, StepMode
from draftwood.sampling import host_masks
from draftwood.tree import TokenTree

HOST = torch.device("cpu")
NOT_A_SEQUENCE = -1  # holds the pages of prefills that only warm up


def batch_state_for(target: ModelRunner, capacity: int, max_nodes: int) -> BatchState:
    """State for sequences as long as the model and its cache allow."""
    tables = target.cache.tables
    longest = min(target.model.config.max_positions, tables.capacity) + 2 * max_nodes + 2
    config = target.model.config
    kinds = {"has_sources": config.encoder is not None, "has_turns": bool(config.rope.sections)}
    scratch, states = target.cache.scratch_page, target.cache.scratch_state
    return BatchState(capacity, longest, tables.page_size, scratch, target.device, **kinds, scratch_state=states)


class GraphRunner(CapturedSteps):
    """Runs steps and prefills."""

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
        sequences = [
            (row, item.own_nodes, mode.laws.index(item.seq.params.law), mode.drafters.index(item.seq.params.drafter))
            for row, item in zip(self.state.rows(batch.plan.seq_ids), batch.plan.items, strict=True)
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
