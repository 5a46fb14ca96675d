"""A second language model as drafter: its own weights, its own KV cache, any grower.

Its cache lies under the target's slots: the target's block table says where it keeps a token. It runs all text that the
target runs (`ingest`), and the nodes that a grower asks about. The last node of an accepted path may be one it has not
run; so a step begins with the last two committed tokens, or with one where the last step accepted nothing.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from draftwood.batch import ForwardBatch
from draftwood.cache.kv import KVCache, Places, behind_last, stage_behind
from draftwood.drafters.grown import GrownDrafter
from draftwood.drafting import Front, Grower, Proposal, State, Vocabulary
from draftwood.errors import IncompatibleParts
from draftwood.model.runner import ModelRunner, ReadsSources
from draftwood.protocols import BatchView, Features, Randomness
from draftwood.tree import Verdict


class CausalDrafter(GrownDrafter):
    """Base of drafters that run a causal language model; they have a `runner` once they are attached."""

    runner: ModelRunner
    reads = True

    def __init__(self, grower: Grower) -> None:
        super().__init__(grower)
        self._shorter = False  # than the target's: the model's longest text

    def attach(self, target: ModelRunner) -> None:
        """Lay the model's cache under the target's slots."""
        if self.runner.model.config.recurrent:
            raise IncompatibleParts(
                "A model with recurrent layers cannot be the draft model: it would run tokens again that its state has "
                "taken in. It can be the target; draft for it with a model without such layers, or with ngram."
            )
        own, theirs = self.runner.cache.tables, target.cache.tables
        if (own.page_size, own.pool.num_pages) != (theirs.page_size, theirs.pool.num_pages):
            model = self.runner.model
            pages = theirs.pool.num_pages, theirs.page_size
            self.runner.cache = KVCache(
                model.config, *pages, model.dtype, model.device, packing=self.runner.cache.packing
            )
        self._shorter = self._max_positions < target.model.config.max_positions
        if isinstance(self.runner.model, ReadsSources):
            self.runner.model.share_encoder(target.model)

    def staged(self, nodes: int) -> int:
        """The nodes that the grower asks about."""
        return self.grower.staged(nodes)

    def propose(self, view: BatchView, nodes: int, rng: Randomness) -> Proposal:
        """Grow a tree for every sequence, as deep as the model's positions reach."""
        if self._shorter:
            depth = self._reach(view)
            if view.may_look and not bool(depth.any()):
                return Proposal.bare(view)
            most = torch.full_like(depth, nodes) if view.max_nodes is None else view.max_nodes
            view = replace(view, max_depth=depth, max_nodes=most)
        if not nodes:
            return Proposal.bare(view)
        return self.grow(view, nodes, rng).within_pages(view, self.runner.cache, self.staged(nodes))

    def grow(self, view: BatchView, nodes: int, rng: Randomness) -> Proposal:
        """A tree of `nodes` draft nodes for every sequence."""
        return self.grower.grow(self, view, nodes, rng)

    def begin(self, view: BatchView) -> tuple[Tensor, State]:
        """Logits at the roots, and in the cache whatever the last step may have left out. [B, 1, R]."""
        places, tokens, last = self.last_tokens(view, 1 if view.gained == 1 else 2)
        return self.run(view, tokens, places, last)[:, None], ()

    def begin_with(self, view: BatchView, tokens: Tensor, places: Places, room: int) -> tuple[Tensor, State]:
        """The same, and in the same forward logits at nodes `tokens` [B, k] behind them. [B, 1 + k, R]."""
        count = 1 if view.gained == 1 else 2
        _, last, _ = self.last_tokens(view, count)
        every, cache = torch.cat([last, tokens], 1), self.runner.cache
        places = behind_last(places, count)
        sizes, sources = (cache.page_size, self._max_positions), view.source_lengths
        batch = stage_behind(view.lengths, view.block_table, every, places, *sizes, source_lengths=sources)
        visible = batch.visible.view_as(every).clone()
        visible[:, 0] = (view.lengths - count + 1).clamp(min=1)  # the token before the last does not see the last
        logits = self.runner.forward(replace(batch, visible=visible.view(-1))).logits
        return logits.view(*every.shape, -1)[:, count - 1 :], ()

    def extend(self, view: BatchView, front: Front, state: State) -> tuple[Tensor, State]:
        """The cache knows their parents. [B, k, R]."""
        return self.run(view, front.tokens, front.places).view(*front.tokens.shape, -1), state

    def vocabulary(self, level: int | None) -> Vocabulary | None:
        """All tokens."""
        return None

    def ingest(self, batch: ForwardBatch, features: Features | None) -> None:
        """Run the same rows, for the cache alone."""
        if len(batch.logit_rows):
            batch = replace(batch, logit_rows=batch.logit_rows[:0])
        if self._shorter:
            batch = replace(batch, positions=batch.positions.clamp(max=self._max_positions - 1))
        self.runner.forward(batch)

    def commit(self, view: BatchView, proposal: Proposal, verdict: Verdict, features: Features) -> None:
        """Move what it has run of the accepted path behind the text; in a chain it is there already."""
        if not self.law.chain and proposal.tree.num_drafted:
            self.keep(view, proposal.columns_of(verdict.path), verdict.length)

    def keep(self, view: BatchView, columns: Tensor, length: Tensor) -> None:
        """Move what it has run of the accepted path, which lies at `columns` [B, D + 1], behind the text."""
        self.runner.cache.keep(view.block_table, view.lengths, columns, length)

    def last_tokens(self, view: BatchView, count: int, masks: int = 0) -> tuple[Places, Tensor, Tensor | None]:
        """The last `count` committed tokens of each sequence, and room for `masks` rows behind them: their places, the
        tokens themselves [B, count], and the rows from the last token on [B * (1 + masks)]; None: all rows.
        """
        places, rows = _around_end(view.size, count, masks, view.roots.device)
        if count == 1:
            return places, view.roots[:, None], rows
        index = (view.lengths[:, None] + places.index[:, :count]).clamp(min=0)
        return places, view.history[view.rows[:, None], index], rows

    def run(self, view: BatchView, tokens: Tensor, places: Places, rows: Tensor | None = None) -> Tensor:
        """Logits of the model for `tokens` [B, n] at their places, of all rows or of some. [K, R]."""
        page_size = self.runner.cache.page_size
        limit = self._max_positions
        sources = view.source_lengths
        batch = stage_behind(view.lengths, view.block_table, tokens, places, page_size, limit, rows, sources)
        return self.runner.forward(batch).logits

    @property
    def _max_positions(self) -> int:
        return self.runner.model.config.max_positions

    def _reach(self, view: BatchView) -> Tensor:
        """How deep a node can be whose parent has a position in the model. [B]."""
        depth = (self._max_positions + 1 - view.lengths).clamp(min=0)
        return depth if view.max_depth is None else torch.minimum(depth, view.max_depth)


@lru_cache(maxsize=1024)
def _around_end(size: int, before: int, behind: int, device: torch.device) -> tuple[Places, Tensor | None]:
    """Places of the last `before` tokens and of `behind` rows after them, and the rows from the last token on."""
    count = before + behind
    steps = torch.arange(-before, behind, device=device).expand(size, count).contiguous()
    rows = torch.arange(size * count, device=device).view(size, count)[:, before - 1 :].reshape(-1)
    return Places(steps, steps), None if before == 1 else rows


class ModelDrafter(CausalDrafter):
    """A small model of the target's vocabulary, and a grower."""

    def __init__(self, runner: ModelRunner, grower: Grower) -> None:
        super().__init__(grower)
        self.runner = runner
