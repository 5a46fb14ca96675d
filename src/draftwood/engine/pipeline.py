"""Steps of a model that runs in stages: every rank drafts the same trees, the last one rules, and all do as it says.

A launched step leaves its rows with the next stage; what is ruled is waited for when the step is collected. Meanwhile
this stage runs steps of other sequences. All ranks launch and collect the same steps in the same order.
"""

from __future__ import annotations

from draftwood.cache.batch_state import BatchState
from draftwood.engine.decode_step import Parts, Ruling, StepOutput, keep, rule, scored_by, staged_rows
from draftwood.engine.graph_runner import GraphRunner
from draftwood.engine.launched import Batch, Launched
from draftwood.engine.shapes import ShapePlan
from draftwood.model.stages import StageModel


class PipelineRunner(GraphRunner):
    """Runs this rank's part of steps."""

    def __init__(self, parts: Parts, state: BatchState, shapes: ShapePlan, stage: StageModel) -> None:
        super().__init__(parts, state, shapes, captures=False)
        self._stage = stage

    def launch(self, batch: Batch) -> Launched:
        """Run this stage's layers; what is left to do is the step's output."""
        parts, stage = self.parts, self._stage
        inputs, view = self.eager_view(batch)
        proposal = self.eager_proposal(batch, view)
        rows = staged_rows(parts, view, proposal, None)
        with parts.timers.measure("target"):
            begun = stage.begin(rows, parts.target.cache.memory, parts.drafter.needs)
        masks, ruling = self.masks(batch, proposal.tree), None
        if stage.is_last:
            own = scored_by(begun.own, proposal, None)
            ruling = rule(parts, view, inputs, own, batch.shape.alternatives, masks)
            begun.tell(ruling.tensors)

        def rest() -> StepOutput:
            scored = scored_by(begun.whole(), proposal, None)
            ruled = ruling or Ruling.of(begun.told(), self.state.device)
            output = keep(parts, self.state, view, scored, ruled)
            return output.over([part.cpu() for part in output.tensors])

        return self.launched(batch, rest, proposal.tree.num_nodes, batch.shape, with_prompts=False)
