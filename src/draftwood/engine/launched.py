"""A batch that is to run, and a step in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from draftwood.engine.decode_step import StepOutput
from draftwood.engine.plan import Plan
from draftwood.engine.shapes import StepShape
from draftwood.engine.trace import NUM_FACTS, step_trace
from draftwood.protocols import Budget, Span, StepMode
from draftwood.request import StepTrace, TokenLogprob
from draftwood.tree import HostVerdict


@dataclass(frozen=True)
class Batch:
    """What a step is to run: sequences that sample, and pieces of prompts beside them."""

    plan: Plan
    mode: StepMode
    shape: StepShape  # exactly as large as it has to be
    edited: Sequence[int]  # sequences of the plan, by index
    masked: Sequence[int]
    scored: Sequence[int]
    prompts: Sequence[Span]
    gained: int | None  # no sequence has gained more tokens in the last step; None: unknown
    min_accept_prob: float
    alone: bool = False  # no other sequence runs


@dataclass(frozen=True)
class Launched:
    """A step in flight: where its output will be, and when."""

    batch: Batch
    output: (
        StepOutput | Callable[[], StepOutput | None] | None
    )  # on the host, or what ends a step that later stages run
    arrived: torch.cuda.Event | None
    rows: int  # that the target ran
    nodes: int  # draft nodes that each sequence could have had
    depth: int  # the most draft tokens that one can have gained
    with_prompts: bool
    captured: bool  # as one graph, not kernel by kernel

    def ended(self) -> Launched:
        """The same with its output, once what is left of it is done; None where no sequence has gained anything."""
        return replace(self, output=self.output()) if callable(self.output) else self

    @property
    def _found(self) -> StepOutput:
        assert isinstance(self.output, StepOutput)
        return self.output

    def wait(self) -> HostVerdict:
        """What each sequence gained, once it is known."""
        if self.arrived is not None:
            self.arrived.synchronize()
        count = len(self.batch.plan.items)
        rows, drift = self._found.outcome[:count].tolist(), self._found.drift
        return HostVerdict(
            tokens=[[*row[4 : 4 + row[0]], row[1]] for row in rows],
            accepted=[row[0] for row in rows],
            drafted=[row[2] for row in rows],
            drift=[0.0] * count if drift is None else drift[:count].tolist(),
            usable=[bool(row[3]) for row in rows],
            members=[] if self._found.members is None else self._found.members[:count].tolist(),
        )

    def logprobs(self, b: int, gained: Sequence[int]) -> list[TokenLogprob]:
        """Of the tokens that the b-th sequence gained; [] if it does not ask. Valid after `wait`."""
        asked = self.batch.plan.items[b].seq.params.logprobs
        if asked is None or self._found.logprobs is None:
            return []
        return self._found.logprobs.to_host(self.batch.scored.index(b), gained, asked)

    def trace(self, b: int) -> StepTrace | None:
        """What the step did for its b-th sequence, if that asks. Valid after `wait`."""
        seq = self.batch.plan.items[b].seq
        if self._found.facts is None or not seq.params.trace:
            return None
        first, end = self._found.offsets[b : b + 2].tolist()
        rows = self._found.facts[first:end, :NUM_FACTS].tolist()
        return step_trace(rows, int(self._found.outcome[b, 1]), len(self.batch.plan.items), self.rows, seq.members)


@dataclass(frozen=True)
class InFlight:
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
        """The work it was launched with."""
        return self.launched.batch.plan

    def trace(self, b: int, seconds: float) -> StepTrace | None:
        """What it did for its b-th sequence, if that asks, what was decided for it and what it took."""
        trace, budget = self.launched.trace(b), self.budget
        if trace is None:
            return None
        why, gain, drafter = str(budget.why), budget.gain.expected, self.plan.items[b].drafter
        return replace(trace, why=why, expected_gain=gain, seconds=seconds, drafter=drafter)
