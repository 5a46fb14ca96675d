"""Networks that guess token by token from the target's features (EAGLE, multi-token prediction), with any grower.

Row i of the network reads token i + 1 and feature i, so to the pages it is a text that lacks its first token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from draftwood.cache.kv import NodeRows
from draftwood.drafters.features import READ_FROM, FeatureDrafter, PagedAttend, Pending, pages_under, text_ends
from draftwood.drafters.growths import growth_of
from draftwood.drafters.resident_features import ResidentRecurrent
from draftwood.batch import ForwardBatch, Pages
from draftwood.model.runner import ModelRunner
from draftwood.nets.eagle import Eagle3, Eagle3Layer, RecurrentNet
from draftwood.nets.native import NativeLayers, native_layers, native_linear
from draftwood.ops.eagle3_input import side_by_side
from draftwood.protocols import BatchView, FrontierModel, Span
from draftwood.treebuilder import TreeBuilder


class RecurrentDrafter(FeatureDrafter):
    """A `RecurrentNet`, and a grower."""

    net: RecurrentNet
    _native: NativeLayers | None

    @cached_property
    def pages(self) -> Pages:
        """Under the target's; in rounds on a device others are used instead."""
        return pages_under(self.target, self.net.config)

    def attach(self, target: ModelRunner) -> None:
        """Its layers run on the target's kernels where they can."""
        super().attach(target)
        net = self.net
        self._native = native_layers(net, net.config, net.head, self.words) if isinstance(net, Eagle3) else None

    def refresh(self) -> None:
        """The kernels have weights of their own."""
        if self._native is not None:
            self._native.refresh()

    def digest(self, features: Tensor) -> Tensor:
        """Fused, in the network's own width."""
        if isinstance(self.net, Eagle3):
            return native_linear(self.net.fc)(self.net.unfused(features))
        return self.net.fuse(self.words.final_norm(features) if self.net.normed else features)

    def settle(self, spans: Sequence[Span]) -> None:
        """Read long texts at once; the last feature waits for its token."""
        due = []
        for span in spans:
            pending = self._pending[span.seq_id]
            end = min(pending.end, len(span.tokens) - 1)
            if end - pending.start >= READ_FROM:
                due.append(Span(span.seq_id, span.tokens, pending.start, end))
        if due:
            with torch.inference_mode():
                self.catch_up(due)

    def catch_up(self, spans: Sequence[Span]) -> tuple[Tensor, Tensor]:
        """Run pending rows [start, end) of each; output and logits of the last row of each. [S, hidden], [S, R]."""
        features = self.take(spans)
        shifted = [Span(span.seq_id, span.tokens[1:], span.start, span.end) for span in spans]
        batch = self.target.cache.stage(shifted, None)
        return self.run(batch, self.pages, features, torch.arange(len(features), device=features.device))

    def run(self, batch: ForwardBatch, pages: Pages, features: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of a forward, on `rows` [N] of `features` [M, hidden]; outputs and logits at its `logit_rows`.

        [K, hidden], [K, R].
        """
        net = self.net
        if self._native is not None and isinstance(net, Eagle3):
            hidden, logits = self._native.run(batch, pages, *self._inputs(net.first, batch.tokens, features, rows))
            return net.handed_on(batch.at_logits(hidden)), logits
        attend = PagedAttend(batch, pages, net.config)
        output = net.run(self.words.embed(batch.tokens), features[rows], batch.positions, attend)
        output = batch.at_logits(output)
        return output, net.logits(output)

    def _inputs(self, layer: Eagle3Layer, tokens: Tensor, features: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        table = self.words.table
        if table is None:
            return layer.inputs(self.words.embed(tokens), features[rows])
        return side_by_side(table, tokens, features, rows, layer.norms)

    def pending(self, seq_id: int) -> Pending:
        """What it has still to read of a sequence."""
        return self._pending[seq_id]

    def resident(self, target: ModelRunner) -> ResidentRecurrent | None:
        """In rounds on the device, if its trees can grow there, in the room that is theirs anyway."""
        growth = growth_of(self.grower, self.deepest)
        if growth is None or growth.asked(self.grower.max_nodes) > self.grower.max_nodes:
            return None
        return ResidentRecurrent(self, growth, target)

    def begin(self, view: BatchView, ready: Sequence[int]) -> FrontierModel:
        """Read up to the roots when the grower asks."""
        return _Growth(self, view, ready)


@dataclass
class _Growth:
    """One round of growing."""

    drafter: RecurrentDrafter
    view: BatchView
    ready: Sequence[int]
    outputs: Tensor = field(init=False)  # [B, C, hidden] of every column so far

    def chain(self, view: BatchView, depth: int) -> Tensor | None:
        """Each guess is the next one's token, its output the next one's feature. [B, depth]."""
        seq_ids, here = [view.seq_ids[b] for b in self.ready], list(self.ready)
        if int(view.max_depth[here].min()) < depth or not all(self._reserve(b, depth) for b in here):
            return None
        output, logits = self._catch_up(view)
        rows = self.drafter.target.cache.stage_ahead(seq_ids, view.lengths[here] - 1, depth - 1)
        known, guesses = self.drafter.net.head.tokens, []
        every = torch.arange(len(seq_ids), device=output.device)
        for batch in (*rows, None):
            best = logits.argmax(-1)
            guesses.append(best if known is None else known[best])
            if batch is not None:
                batch = replace(batch, tokens=guesses[-1])
                output, logits = self.drafter.run(batch, self.drafter.pages, output, every)
        tokens = torch.zeros(len(view.seq_ids), depth, dtype=torch.int64, device=output.device)
        tokens[here] = torch.stack(guesses, 1)
        return tokens

    def _catch_up(self, view: BatchView) -> tuple[Tensor, Tensor]:
        """Output and logits at the roots of those that are ready."""
        ends = [(view.seq_ids[b], view.tokens[b]) for b in self.ready]
        pending = self.drafter.pending
        return self.drafter.catch_up([Span(i, tokens, pending(i).start, len(tokens) - 1) for i, tokens in ends])

    def begin(self, view: BatchView) -> Tensor:
        """Logits at the roots. [B, V]."""
        last, found = self._catch_up(view)
        self.outputs = last.new_zeros(len(view.seq_ids), 1, last.shape[-1])
        self.outputs[list(self.ready), 0] = last
        logits = found.new_zeros(len(view.seq_ids), found.shape[-1])
        logits[list(self.ready)] = found
        return self.drafter.net.head.spread(logits)

    def extend(self, builder: TreeBuilder, columns: Tensor) -> Tensor:
        """Run the living nodes in `columns`. [B, k] -> [B, k, V]."""
        grown = self.outputs.new_zeros(*builder.alive.shape, self.outputs.shape[-1])
        grown[:, : self.outputs.shape[1]] = self.outputs
        self.outputs = grown
        seated = torch.zeros(builder.num_trees, dtype=torch.bool, device=columns.device)
        seated[[b for b in self.ready if self._reserve(b, builder.num_columns)]] = True
        runs = builder.alive.gather(1, columns) & seated[:, None]
        head = self.drafter.net.head
        wide = torch.promote_types(self.outputs.dtype, torch.float32)  # what kernels of narrow networks give
        logits = self.outputs.new_zeros(*columns.shape, head.size, dtype=wide)
        if bool(runs.any()):
            owner, place = runs.nonzero(as_tuple=True)
            output, found = self._run(builder, columns, runs)
            self.outputs[owner, columns[owner, place]], logits[owner, place] = output, found.to(wide)
        return head.spread(logits)

    def _reserve(self, b: int, num_columns: int) -> bool:
        tables = self.drafter.target.cache.tables
        return tables.reserve(self.view.seq_ids[b], len(self.view.tokens[b]) + num_columns - 1)

    def _run(self, builder: TreeBuilder, columns: Tensor, runs: Tensor) -> tuple[Tensor, Tensor]:
        owner, place = runs.nonzero(as_tuple=True)
        column = columns[owner, place]
        features = self.outputs[owner, builder.parents[owner, column]]
        if self.drafter.law.chain:  # a piece of text
            index = self.view.lengths[owner] + builder.depth[owner, column] - 2
            seq_ids = [self.view.seq_ids[b] for b in owner.tolist()]
            tokens = builder.tokens[owner, column]
            return self._through(self.drafter.target.cache.stage_next(seq_ids, index, tokens), features)
        nodes = NodeRows.of_growth(builder, columns, runs, self.ready)
        ended = text_ends(self.view, self.ready)
        batch = self.drafter.target.cache.stage(ended, nodes, torch.arange(len(owner), device=columns.device))
        # Rows come in another order than nodes: sequence by sequence.
        placed = torch.empty_like(features)
        placed[batch.logit_rows] = features
        return self._through(batch, placed)

    def _through(self, batch: ForwardBatch, features: Tensor) -> tuple[Tensor, Tensor]:
        every = torch.arange(len(features), device=features.device)
        return self.drafter.run(batch, self.drafter.pages, features, every)
