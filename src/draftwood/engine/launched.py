"""A batch that is to run, and a step in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draftwood.engine.decode_step import StepOutput
from draftwood.engine.plan import Plan
from draftwood.engine.shapes import StepShape
from draftwood.engine.trace import NUM_FACTS, step_trace
from draftwood.protocols import Span, StepMode
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


@dataclass(frozen=True)
class Launched:
    """A step in flight: where its output will be, and when."""

    batch: Batch
    output: StepOutput  # on the host
    arrived: torch.cuda.Event | None
    rows: int  # that the target ran
    nodes: int  # draft nodes that each sequence could have had
    depth: int  # the most draft tokens that one can have gained
    with_prompts: bool
    captured: bool  # as one graph, not kernel by kernel

    def wait(self) -> HostVerdict:
        """What each sequence gained, once it is known."""
        if self.arrived is not None:
            self.arrived.synchronize()
        count = len(self.batch.plan.items)
        rows, drift = self.output.outcome[:count].tolist(), self.output.drift
        return HostVerdict(
            tokens=[[*row[4 : 4 + row[0]], row[1]] for row in rows],
            accepted=[row[0] for row in rows],
            drafted=[row[2] for row in rows],
            drift=[0.0] * count if drift is None else drift[:count].tolist(),
            usable=[bool(row[3]) for row in rows],
            members=[] if self.output.members is None else self.output.members[:count].tolist(),
        )

    def logprobs(self, b: int, gained: Sequence[int]) -> list[TokenLogprob]:
        """Of the tokens that the b-th sequence gained; [] if it does not ask. Valid after `wait`."""
        asked = self.batch.plan.items[b].seq.params.logprobs
        if asked is None or self.output.logprobs is None:
            return []
        return self.output.logprobs.to_host(self.batch.scored.index(b), gained, asked)

    def trace(self, b: int) -> StepTrace | None:
        """What the step did for its b-th sequence, if that asks. Valid after `wait`."""
        seq = self.batch.plan.items[b].seq
        if self.output.facts is None or not seq.params.trace:
            return None
        first, end = self.output.offsets[b : b + 2].tolist()
        rows = self.output.facts[first:end, :NUM_FACTS].tolist()
        return step_trace(rows, int(self.output.outcome[b, 1]), len(self.batch.plan.items), self.rows, seq.members)
