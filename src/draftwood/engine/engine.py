"""The decode step, and nothing else: somebody guesses, the target scores, a law keeps a path.

Knows no drafter, no tree shape and no law by name. Plain decoding is this code with bare roots.
"""

from __future__ import annotations

import itertools
import time

import torch
from torch import Tensor

from draftwood.cache.kv import NodeRows
from draftwood.cache.resident import attach
from draftwood.engine.async_step import AsyncStep
from draftwood.engine.graph_runner import GraphRunner
from draftwood.engine.plan import Plan
from draftwood.engine.scheduler import Scheduler
from draftwood.engine.scoring import prompt_logprobs, stage_prompts
from draftwood.engine.trace import step_traces
from draftwood.errors import IncompatibleParts
from draftwood.faults import guarded
from draftwood.model.batch import ForwardBatch, ForwardOutput
from draftwood.model.runner import ModelRunner
from draftwood.protocols import Budget, Controller, Drafter, Features, Randomness, StepReport, TimedStep, Verifier
from draftwood.request import Event
from draftwood.sampling import target_distribution, token_logprobs, unusable
from draftwood.telemetry import Timers
from draftwood.tree import DraftLaw, HostVerdict, TokenTree

LENT = Budget(0, why="no nodes: a request needs the host, and the drafter's memory lies with the device's rounds")
OFF = Budget(0, why="no nodes: the drafter has failed and is switched off")


def check_exact(verifier: Verifier, drafts: DraftLaw) -> None:
    """Refuse a law with drafts it would not be exact for."""
    reason = verifier.refuses(drafts)
    if reason is not None:
        raise IncompatibleParts(f"The law '{verifier.name}' would not be exact here: {reason}.")


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
        rounds: GraphRunner | None = None,
        drafter_name: str | None = None,  # for the log and the metrics
    ) -> None:
        check_exact(verifier, drafter.law)
        self.target = target
        self.drafter = drafter
        self.verifier = verifier
        self.controller = controller
        self.scheduler = scheduler
        self.rng = rng
        self.timers = Timers()
        self.last_step: TimedStep | None = None  # for those who watch, from any thread
        attach(drafter, target)
        self._guarded = guarded(drafter, drafter_name or type(drafter).__name__)
        self.health = self._guarded.health  # of each drafter; requests that name none have the first
        if rounds is not None:
            rounds.health = self.health[0]
        self.pipeline = None if rounds is None else AsyncStep(rounds, scheduler)
        scheduler.on_end = self._release

    def _release(self, seq_id: int) -> None:
        """Drop a finished sequence's state: the drafter may keep some on the host beside captured steps, too."""
        self._guarded.release(seq_id)
        if self.pipeline is not None:
            self.pipeline.release(seq_id)

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """One round for every sequence that has room in it."""
        if self.pipeline is None:
            return self._step(self._budget())
        events = self.pipeline.step(self.controller)
        if events is not None:
            self.last_step = self.pipeline.last_step or self.last_step
            return events
        # A request needs host-side logits. Drafters with their own KV cache are bound to captured steps: draft nothing.
        lent = self.pipeline.runner.drafter.reads
        budget = LENT if lent else self._budget()
        return self.pipeline.fall_back(self.controller) + self._step(budget)

    def _budget(self) -> Budget:
        if all(health.disabled for health in self.health):
            return OFF
        return self.controller.budget(self.scheduler.load)

    def invalidate_timing(self) -> None:
        """Something else had the thread between two steps: what is on its way will be heard of late."""
        if self.pipeline is not None:
            self.pipeline.invalidate_timing()

    def _step(self, budget: Budget) -> list[Event]:
        began = time.perf_counter()
        plan = self.scheduler.schedule(budget)
        if not plan.sampling:
            return self._catch_up(plan)
        view = plan.view(self.target.device)
        drafting = self.timers.seconds.get("draft", 0.0)
        with self.timers.measure("draft"):
            tree = self._guarded.propose(view, budget, self.rng)
        span = torch.tensor(plan.sampling, device=self.target.device)  # [B] which span each tree hangs behind
        batch, out = self._score(plan, tree, span)
        self._let_read(plan, batch, out)
        logits, scored = out.logits[: tree.num_nodes], out.logits[tree.num_nodes :]
        p = target_distribution(logits, tree, view)
        verdict = self.verifier.verify(tree, p, view, self.rng)
        self.target.cache.commit(batch, tree, verdict, span)
        with self.timers.measure("draft"):
            self._guarded.observe(view, tree, verdict, _rows_of(out.features, batch.logit_rows[: tree.num_nodes]))
        outcome = verdict.to_host(tree)
        report = _report(plan, outcome, self.timers.seconds["draft"] - drafting)
        self.controller.observe(report)
        logprobs = token_logprobs(logits, tree, verdict, view)
        traces = step_traces(logits, tree, verdict, view, len(plan.items), report.num_rows)
        scored_prompts, bad = prompt_logprobs(plan, scored), unusable(logits, p, verdict)
        events = self.scheduler.commit(plan, outcome, logprobs, traces, scored_prompts, bad)
        if report.num_rows == report.num_sampling + report.drafted:  # no prompt was read
            self.last_step = TimedStep(report, time.perf_counter() - began)
        return events

    def _score(self, plan: Plan, tree: TokenTree, span: Tensor) -> tuple[ForwardBatch, ForwardOutput]:
        """The target's logits at every tree node, in the tree's order, then at the plan's `scored_rows`."""
        spans = plan.spans
        nodes = NodeRows.of_tree(tree, span)
        # A root is its sequence's last pending token; draft nodes follow all pending tokens.
        ends = list(itertools.accumulate(s.end - s.start for s in spans))
        rows = torch.tensor([ends[i] - 1 for i in plan.sampling], device=span.device)
        if nodes is not None:
            drafted = tree.parents >= 0
            roots, rows = rows, torch.empty_like(tree.tokens)
            rows[~drafted] = roots
            rows[drafted] = torch.arange(ends[-1], ends[-1] + tree.num_drafted, device=span.device)
        if plan.scored:
            rows = torch.cat([rows, torch.tensor(plan.scored_rows, device=span.device)])
        batch = self.target.cache.stage(spans, nodes, rows)
        with self.timers.measure("target"):
            return batch, self.target.forward(batch, self._guarded.needs)

    def _let_read(self, plan: Plan, batch: ForwardBatch, out: ForwardOutput) -> None:
        """Show the drafter what it asked to see of committed tokens."""
        if out.features:
            with self.timers.measure("draft"):
                self._guarded.read(plan.spans, _rows_of(out.features, batch.text_rows))

    def _catch_up(self, plan: Plan) -> list[Event]:
        """A step in which nobody samples: only chunks of prompts, or nothing at all."""
        found = None
        if plan.items:
            batch = stage_prompts(plan, self.target.cache)
            with self.timers.measure("target"):
                out = self.target.forward(batch, self._guarded.needs)
            self._let_read(plan, batch, out)
            found = prompt_logprobs(plan, out.logits)
        return self.scheduler.commit(plan, HostVerdict([], [], [], []), prompt_logprobs=found)


def _rows_of(features: Features, rows: Tensor | None) -> Features:
    return features if rows is None else {layer: part[rows] for layer, part in features.items()}


def _report(plan: Plan, outcome: HostVerdict, draft_seconds: float) -> StepReport:
    return StepReport(
        num_rows=sum(item.end - item.start for item in plan.items) + sum(outcome.drafted),
        num_sampling=len(plan.sampling),
        drafted=sum(outcome.drafted),
        accepted=sum(outcome.accepted),
        emitted=sum(len(tokens) for tokens in outcome.tokens),
        outcomes=tuple(zip(outcome.drafted, outcome.accepted, strict=True)),
        draft_seconds=draft_seconds,
        context=sum(len(plan.items[i].seq.tokens) for i in plan.sampling) / len(plan.sampling),
        room=max(plan.items[i].max_nodes for i in plan.sampling),
    )
