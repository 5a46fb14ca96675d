"""Steps of a model that runs in stages: every rank drafts the same trees, the last one rules, and all do as it says.

A launched step leaves its rows with the next stage; what is ruled is waited for when the step is collected. Meanwhile
this stage runs steps of other sequences, or, where there is but one, the next nodes of its tree (`ahead.py`). All ranks
launch and collect the same steps in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from draftwood.batch import ForwardBatch
from draftwood.cache.batch_state import BatchState, StepInputs
from draftwood.drafting import Proposal
from draftwood.engine.ahead import TreeAhead
from draftwood.engine.decode_step import Parts, Ruling, StepOutput, keep, rule, scored_by, staged_rows
from draftwood.engine.graph_runner import GraphRunner
from draftwood.engine.launched import Batch, Launched
from draftwood.engine.plan import Plan
from draftwood.engine.shapes import ShapePlan
from draftwood.model.stages import Begun, StageModel
from draftwood.protocols import BatchView, NodeMasks
from draftwood.states import KeptPath


@dataclass
class _Following:
    """The sequence whose tree is in flight."""

    seq_id: int
    tree: TreeAhead
    end: int | None = None  # the text ends with this node of the tree now, so another one is to be proposed


class PipelineRunner(GraphRunner):
    """Runs this rank's part of steps."""

    def __init__(self, parts: Parts, state: BatchState, shapes: ShapePlan, stage: StageModel) -> None:
        super().__init__(parts, state, shapes, captures=False)
        self._stage = stage
        self._following: _Following | None = None

    def launch(self, batch: Batch) -> Launched:
        """Run this stage's layers; what is left to do is the step's output."""
        if self._may_run_ahead(batch):
            return self._launch_ahead(batch)
        self._following = None
        inputs, view = self.eager_view(batch)
        proposal = self.eager_proposal(batch, view)
        masks = self.masks(batch, proposal.tree)
        rows = staged_rows(self.parts, view, proposal, None)
        begun, ruled = self._run(rows, view, inputs, proposal, batch.shape.alternatives, masks)

        def rest() -> StepOutput:
            scored = scored_by(begun.whole(), proposal, None)
            return _on_host(keep(self.parts, self.state, view, scored, ruled()))

        return self.launched(batch, rest, proposal.tree.num_nodes, batch.shape, with_prompts=False)

    def _run(
        self,
        rows: ForwardBatch,
        view: BatchView,
        inputs: StepInputs,
        proposal: Proposal,
        alternatives: int = 0,
        masks: NodeMasks | None = None,
    ) -> tuple[Begun, Callable[[], Ruling]]:
        """This stage's part of a forward, and what the last one rules, which is waited for."""
        parts, stage = self.parts, self._stage
        with parts.timers.measure("target"):
            begun = stage.begin(rows, parts.target.cache.memory, parts.drafter.needs)
        if not stage.is_last:
            return begun, lambda: Ruling.of(begun.told(), self.state.device)
        ruling = rule(parts, view, inputs, scored_by(begun.own, proposal, None), alternatives, masks)
        begun.tell(ruling.tensors)
        return begun, lambda: ruling

    def goes_on(self, seq_id: int) -> bool:
        """Whether more of a sequence can be launched while a step of it is in flight."""
        own = self._following
        return own is not None and own.seq_id == seq_id and (own.end is not None or not own.tree.is_launched)

    def forget(self, seq_id: int) -> None:
        """What is in flight of a sequence is of no use any more."""
        if self._following is not None and self._following.seq_id == seq_id:
            self._following = None

    def _may_run_ahead(self, batch: Batch) -> bool:
        """Where seed, prompt and model decide the tokens, and nothing but these has to be known of a node."""
        mode, drafter = batch.mode, self.parts.drafter
        decided = mode.greedy or (self.parts.law.reproducible and mode.laws == (None,))
        plain = not (mode.masked or mode.predicted or mode.traced or batch.edited or batch.scored)
        ready = batch.alone and not (drafter.needs or drafter.remembers)
        return bool(
            ready and decided and plain and self._several_steps(batch.shape.proposed) > batch.shape.proposed > 0
        )

    def _several_steps(self, nodes: int) -> int:
        """The largest tree that the drafter can propose for as many steps as are in flight."""
        return max(size for size in self.parts.drafter.sizes if size <= nodes * self._stage.ranks.size)

    def _launch_ahead(self, batch: Batch) -> Launched:
        """Some levels more of the tree in flight, or of a new one."""
        (item,) = batch.plan.items
        each, wanted = batch.shape.proposed, self._several_steps(batch.shape.proposed)
        own = self._following
        room = self._room(item.seq.id, item.end + max(2 * wanted, self.parts.drafter.staged(wanted)))
        pages = max(batch.shape.pages, -(-room // self._page_size))
        plan = Plan((replace(item, max_nodes=wanted),))
        batch = replace(batch, plan=plan, shape=replace(batch.shape, nodes=wanted, proposed=wanted, pages=pages))
        inputs, view = self.eager_view(batch)
        if own is None or own.seq_id != item.seq.id or own.end is not None:
            tree = TreeAhead(view, self.eager_proposal(batch, view).packed(), room)
            if own is not None and own.seq_id == item.seq.id and own.end is not None:
                tree.adopt(own.tree, own.end)
                own.tree, own.end = tree, None
            else:
                own = self._following = _Following(item.seq.id, tree)
        nodes = own.tree.launch(-(-own.tree.proposal.tree.max_depth * each // wanted))
        if not nodes:  # what the drafter proposes is on its way already
            return self.launched(batch, lambda: None, 0, batch.shape, with_prompts=False)
        return self.launched(batch, self._begin_ahead(own, nodes, inputs), len(nodes), batch.shape, with_prompts=False)

    def _begin_ahead(
        self, own: _Following, nodes: Sequence[int], inputs: StepInputs
    ) -> Callable[[], StepOutput | None]:
        """Run some nodes, each as a sequence of its own that ends there."""
        tree, rows = own.tree, own.tree.rows(nodes)
        first = torch.zeros(len(nodes), dtype=torch.int64, device=self.state.device)
        lengths = torch.tensor(tree.lengths(nodes), device=self.state.device)
        view = replace(tree.view.take(first), lengths=lengths)
        staged = tree.staged(nodes, self._page_size, self.target.model.config.max_positions)
        _, ruled = self._run(staged, view, inputs, Proposal.bare(view))

        def rest() -> StepOutput | None:
            ruling = ruled()
            for row, token, known in zip(rows, ruling.verdict.bonus.tolist(), ruling.usable.tolist(), strict=True):
                row.taken = (token, known)
            if self._following is not own:
                return None
            if own.end is not None:  # it was not launched again since: what is in flight is let go
                self._following = None
                return None
            return self._go_on(own)

        return rest

    def _go_on(self, own: _Following) -> StepOutput | None:
        """Let the text go on as far as is known."""
        tree, parts, device = own.tree, self.parts, self.state.device
        found = tree.step()
        if found is None:
            return None
        view, proposal, verdict = tree.view, tree.proposal, found.verdict
        index, steps = torch.tensor([found.index], device=device), torch.full_like(view.lengths, len(found.index) - 1)
        parts.target.cache.commit(KeptPath(view.block_table, view.lengths, index, steps))
        with parts.timers.measure("draft"):
            parts.drafter.commit(view, proposal, verdict, {})
        outcome = self.state.advance(view, proposal.tree, verdict, torch.tensor([found.usable], device=device))
        outcome[:, 2] = tree.drafted
        own.end = found.end
        if found.end is None:
            self._following = None
        return _on_host(StepOutput(outcome, None, None, None, proposal.tree.offsets))

    @property
    def _page_size(self) -> int:
        return self.target.cache.page_size

    def _room(self, seq_id: int, wanted: int) -> int:
        """Tokens that a sequence has pages for: as many as `wanted`, if there are pages."""
        tables = self.target.cache.tables
        tables.reserve(seq_id, min(wanted, self._page_size * self.state.num_pages))
        self.state.update_block_tables({seq_id: tables.pages(seq_id)})
        return min(wanted, tables.room(seq_id))


def _on_host(output: StepOutput) -> StepOutput:
    return output.over([part.cpu() for part in output.tensors])
