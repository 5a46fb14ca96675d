"""The decode step: a drafter proposes trees, the target scores them, a law keeps a path of each.

One function for every device, drafter, tree, law and request. It runs from batch state to batch state and takes from
the host only which sequences run (`StepInputs`), rows of prompts to prefill along with them, and, for requests with a
grammar, masks that the host computes while the target runs; `propose`, `score` and `settle` are the parts between
which that happens. Eagerly, trees have the sizes they have. Captured, every tree has the step's size and nothing looks
at values; that is the only difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from draftwood.batch import ForwardBatch, ForwardOutput, with_text
from draftwood.cache.batch_state import BatchState, StepInputs
from draftwood.cache.kv import stage_trees
from draftwood.drafting import Drafter, Proposal
from draftwood.engine.shapes import StepShape
from draftwood.engine.survival import SurvivalCalibration
from draftwood.engine.trace import facts, members_told
from draftwood.faults import DrafterHealth
from draftwood.model.runner import ModelRunner
from draftwood.ops.choice import likeliest
from draftwood.ops.path import keep_chosen
from draftwood.protocols import LOGITS, BatchView, Features, NodeMasks, Randomness, Verifier
from draftwood.sampling import PathLogprobs, edited_logits, path_logprobs, target_distribution, usable
from draftwood.states import KeptPath, StagedTrees
from draftwood.telemetry import Timers
from draftwood.tree import Verdict


@dataclass(frozen=True)
class Parts:
    """What takes part in every step."""

    target: ModelRunner
    drafter: Drafter
    law: Verifier
    rng: Randomness
    health: Sequence[DrafterHealth] = ()
    timers: Timers = field(default_factory=Timers)
    survival: SurvivalCalibration = field(default_factory=SurvivalCalibration)
    combines: bool = False  # trees may have nodes of several drafters


@dataclass(frozen=True)
class Scored:
    """Trees and what the target makes of them."""

    proposal: Proposal
    logits: Tensor  # [M, V]
    features: Features  # of the trees' nodes
    text: ForwardBatch | None  # rows of prompts that were run with them
    text_features: Features
    staged: StagedTrees | None = None  # what recurrent layers have made of the trees

    def kept(self, view: BatchView, verdict: Verdict) -> KeptPath:
        """The path of each tree, as the target has staged it."""
        tree = self.proposal.tree
        columns, chain = tree.local[verdict.path.clamp(min=0)], tree.tries.shape[1] == 1
        return KeptPath(view.block_table, view.lengths, columns, verdict.length, chain, self.staged)


@dataclass(frozen=True)
class Ruling:
    """What the law has decided."""

    verdict: Verdict
    usable: Tensor  # [B] whether the bonus token had a distribution
    logprobs: PathLogprobs | None
    facts: Tensor | None

    @property
    def tensors(self) -> list[Tensor]:
        """All of it; what is not there has no dimension."""
        verdict, own = self.verdict, self.logprobs
        optional = (verdict.drift, self.facts, *((own.own, own.best, own.tokens) if own else ()))
        nothing = torch.empty(())
        told = (nothing if part is None else part for part in optional)
        return [verdict.path, verdict.length, verdict.bonus, self.usable, *told]

    @classmethod
    def of(cls, tensors: Sequence[Tensor], device: torch.device) -> Ruling:
        """The ruling whose tensors these are."""
        path, length, bonus, known, drift, told, *logprobs = (tensor.to(device) for tensor in tensors)
        verdict = Verdict(path, length, bonus, drift if drift.dim() else None)
        return cls(verdict, known, PathLogprobs(*logprobs) if logprobs else None, told if told.dim() else None)


@dataclass(frozen=True)
class StepOutput:
    """What a step gained, on the device."""

    outcome: Tensor  # [B, 4 + D] see `BatchState.advance`
    drift: Tensor | None  # [B] see `Verdict`
    logprobs: PathLogprobs | None  # of the sequences that ask
    facts: Tensor | None  # [M, 6] of every node, where requests are traced
    offsets: Tensor  # [B + 1] where each tree begins
    members: Tensor | None = None  # [B, 2 * MOST_MEMBERS] nodes of each drafter of a combination, and accepted ones

    @property
    def tensors(self) -> list[Tensor]:
        """All of them that are there."""
        logprobs = self.logprobs
        scored = [] if logprobs is None else [logprobs.own, logprobs.best, logprobs.tokens]
        every = self.outcome, self.drift, *scored, self.facts, self.members, self.offsets
        return [part for part in every if part is not None]

    def over(self, tensors: list[Tensor]) -> StepOutput:
        """The same with other tensors in their places."""
        left = iter(tensors)
        outcome = next(left)
        drift = None if self.drift is None else next(left)
        logprobs = None if self.logprobs is None else PathLogprobs(next(left), next(left), next(left))
        told = None if self.facts is None else next(left)
        members = None if self.members is None else next(left)
        return StepOutput(outcome, drift, logprobs, told, next(left), members)


def decode_step(
    parts: Parts,
    state: BatchState,
    view: BatchView,
    inputs: StepInputs,
    shape: StepShape,
    text: ForwardBatch | None,
) -> StepOutput:
    """One step for every sequence of the view, and rows of prompts beside them, in a step of this shape."""
    scored = score(parts, view, propose(parts, state, view, shape), text)
    return settle(parts, state, view, inputs, scored, shape.alternatives)


def propose(parts: Parts, state: BatchState, view: BatchView, shape: StepShape) -> Proposal:
    """The drafter's trees, or of all their nodes the likeliest; bare roots where there is no room for any."""
    with parts.timers.measure("draft"):
        drafts = shape.proposed or view.mode.predicted
        proposal = parts.drafter.propose(view, shape.proposed, parts.rng) if drafts else Proposal.bare(view)
        if view.may_look:
            return proposal.packed()
        if shape.proposed == shape.nodes or view.mode.predicted:  # what callers predict has rows of its own
            return proposal
        chances = None if proposal.tree.q is not None else parts.survival.chances(proposal, view)
        return proposal.likeliest(shape.batch * shape.nodes, view.rows != state.padding_row, chances, view.need)


def score(parts: Parts, view: BatchView, proposal: Proposal, text: ForwardBatch | None) -> Scored:
    """Run every node of the trees, and rows of prompts, through the target in one forward."""
    batch = staged_rows(parts, view, proposal, text)
    with parts.timers.measure("target"):
        out = parts.target.forward(batch, parts.drafter.needs - {LOGITS})
    return scored_by(out, proposal, text)


def staged_rows(parts: Parts, view: BatchView, proposal: Proposal, text: ForwardBatch | None) -> ForwardBatch:
    """Rows of every node of the trees, and those of prompts."""
    target, tree = parts.target, proposal.tree
    chain = tree.tries.shape[1] == 1
    batch = stage_trees(view, tree, target.cache.page_size, target.model.config.max_positions, chain=chain)
    return batch if text is None else with_text(batch, text)


def scored_by(out: ForwardOutput, proposal: Proposal, text: ForwardBatch | None) -> Scored:
    """Trees and what a forward of their rows, and those of prompts behind them, has given."""
    count = proposal.tree.num_nodes
    of_nodes = {layer: rows[:count] for layer, rows in out.features.items()} | {LOGITS: out.logits}
    of_text = {layer: rows[count:] for layer, rows in out.features.items()}
    return Scored(proposal, out.logits, of_nodes, text, of_text, out.staged)


def settle(
    parts: Parts,
    state: BatchState,
    view: BatchView,
    inputs: StepInputs,
    scored: Scored,
    alternatives: int,
    masks: NodeMasks | None = None,
) -> StepOutput:
    """Keep a path of every tree: in the target's cache, in the drafter's, and in the batch state."""
    return keep(parts, state, view, scored, rule(parts, view, inputs, scored, alternatives, masks))


def rule(
    parts: Parts,
    view: BatchView,
    inputs: StepInputs,
    scored: Scored,
    alternatives: int,
    masks: NodeMasks | None = None,
) -> Ruling:
    """Which path of every tree is kept, and what is told of it."""
    tree, asked = scored.proposal.tree, inputs.scored
    logits = edited_logits(scored.logits, tree, view, masks)
    verdict, p = verify(parts, view, scored.proposal, logits)
    return Ruling(
        verdict,
        usable(logits, p, tree, verdict),
        path_logprobs(scored.logits, tree, verdict, asked, alternatives) if len(asked) else None,
        facts(logits, scored.proposal, verdict, view) if view.mode.traced else None,
    )


def keep(parts: Parts, state: BatchState, view: BatchView, scored: Scored, ruling: Ruling) -> StepOutput:
    """Do what was ruled: in the target's cache, in the drafter's, and in the batch state."""
    tree, verdict = scored.proposal.tree, ruling.verdict
    parts.target.cache.commit(scored.kept(view, verdict))
    if tree.num_drafted and not (view.may_look or view.mode.predicted):  # where rows are shared by chances
        parts.survival.learn(scored.proposal, view, verdict, view.rows != state.padding_row)
    with parts.timers.measure("draft"):
        parts.drafter.commit(view, scored.proposal, verdict, scored.features)
        if scored.text is not None:
            parts.drafter.ingest(scored.text, scored.text_features)
    outcome = state.advance(view, tree, verdict, ruling.usable)
    members = members_told(scored.proposal, verdict) if parts.combines else None
    return StepOutput(outcome, verdict.drift, ruling.logprobs, ruling.facts, tree.offsets, members)


def verify(parts: Parts, view: BatchView, proposal: Proposal, logits: Tensor) -> tuple[Verdict, Tensor | None]:
    """What the law keeps, and the distributions it went by; None where the likeliest tokens decide."""
    tree = proposal.tree
    if view.mode.greedy:  # without chance every lossless law keeps the longest match
        choices = likeliest(logits)
        return (keep_chosen(tree, choices) if tree.num_drafted else Verdict.of_roots(tree, choices)), None
    p = target_distribution(logits, tree, view)
    return parts.law.verify(tree, p, view, parts.rng), p


def ingest(parts: Parts, text: ForwardBatch) -> Tensor:
    """Prefill rows of prompts in target and drafter; logits where the batch wants them. [K, V]."""
    with parts.timers.measure("target"):
        out = parts.target.forward(text, parts.drafter.needs - {LOGITS})
    with parts.timers.measure("draft"):
        parts.drafter.ingest(replace(text, logit_rows=text.logit_rows[:0]), out.features)
    return out.logits
