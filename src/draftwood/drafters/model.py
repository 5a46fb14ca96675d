"""A second language model as drafter: its own weights, its own KV cache, any grower.

Its cache lies under the target's slots: the target's block table says where it keeps a token. It runs all text that the
target runs (`ingest`), and the nodes that a grower asks about. The last node of an accepted path may be one it has not
run; so a step begins with the last two committed tokens, or with one where the last step accepted nothing.

States of recurrent layers lie in the places of the target's sequences and stay at the committed text while a tree is
grown: each forward of a tree runs all of its nodes so far. They take in what has been run of the accepted path.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from draftwood.batch import ForwardBatch
from draftwood.cache.kv import KVCache, Places, behind_last, stage_behind
from draftwood.cache.recurrent import FollowingStates
from draftwood.drafters.grown import GrownDrafter
from draftwood.drafting import Front, Grower, Proposal, State, Vocabulary
from draftwood.model.runner import ModelRunner, ReadsSources
from draftwood.protocols import BatchView, Features, Randomness
from draftwood.states import KeptPath, StagedTrees
from draftwood.tree import Verdict


class CausalDrafter(GrownDrafter):
    """Base of drafters that run a causal language model; they have a `runner` once they are attached."""

    runner: ModelRunner
    reads = True

    def __init__(self, grower: Grower) -> None:
        super().__init__(grower)
        self._shorter = False  # than the target's: the model's longest text
        self._states: FollowingStates | None = None  # where the model has recurrent layers
        self._staged: StagedTrees | None = None  # what these have made of the present tree

    def attach(self, target: ModelRunner) -> None:
        """Lay the model's cache under the target's slots."""
        own, theirs = self.runner.cache, target.cache
        sizes, model = [(c.tables.pool.num_pages, c.page_size, c.num_states) for c in (own, theirs)], self.runner.model
        if sizes[0] != sizes[1]:
            num_pages, page_size, num_states = sizes[1]
            place = model.dtype, model.device
            own = self.runner.cache = KVCache(model.config, num_pages, page_size, *place, num_states, own.packing)
        self._states = own.follow(theirs)
        self.remembers = self._states is not None
        self._shorter = self._max_positions < target.model.config.max_positions
        if isinstance(self.runner.model, ReadsSources):
            self.runner.model.share_encoder(target.model)

    def staged(self, nodes: int) -> int:
        """The nodes that the grower asks about."""
        return self.grower.staged(nodes)

    def propose(self, view: BatchView, nodes: int, rng: Randomness) -> Proposal:
        """Grow a tree for every sequence, as deep as the model's positions reach."""
        self._staged = None
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
        places, tokens, last = self.last_tokens(view, _again(view))
        return self.run(view, tokens, places, last)[:, None], ()

    def begin_with(self, view: BatchView, tokens: Tensor, places: Places, room: int) -> tuple[Tensor, State]:
        """The same, and in the same forward logits at nodes `tokens` [B, k] behind them. [B, 1 + k, R]."""
        return self._whole(view, tokens, behind_last([places], _again(view)), 1 + tokens.shape[1]), ()

    def extend(self, view: BatchView, front: Front, state: State) -> tuple[Tensor, State]:
        """The cache knows their parents; states do not. [B, k, R]."""
        if self._states is not None:
            return self._whole(view, front.asked, front.behind_last(_again(view)), front.tokens.shape[1]), state
        return self.run(view, front.tokens, front.places).view(*front.tokens.shape, -1), state

    def _whole(self, view: BatchView, tokens: Tensor, places: Places, wanted: int) -> Tensor:
        """Run the last tokens, and nodes `tokens` [B, n] behind them; logits of the last `wanted`. [B, wanted, R]."""
        every = torch.cat([self.last_tokens(view, _again(view))[1], tokens], 1)
        rows = torch.arange(every.numel(), device=every.device).view_as(every)[:, -wanted:].reshape(-1)
        return self.run(view, every, places, rows).view(view.size, wanted, -1)

    def vocabulary(self, level: int | None) -> Vocabulary | None:
        """All tokens."""
        return None

    def ingest(self, batch: ForwardBatch, features: Features | None) -> None:
        """Run the same rows, for the cache alone."""
        if len(batch.logit_rows):
            batch = replace(batch, logit_rows=batch.logit_rows[:0])
        if self._shorter:
            batch = replace(batch, positions=batch.positions.clamp(max=self._max_positions - 1))
        self.runner.forward(batch if self._states is None else self._states.reading(batch))

    def commit(self, view: BatchView, proposal: Proposal, verdict: Verdict, features: Features) -> None:
        """Keep what it has run of the accepted path."""
        self.keep(view, proposal.columns_of(verdict.path), verdict.length, chain=self.law.chain)

    def keep(self, view: BatchView, columns: Tensor, length: Tensor, *, chain: bool = False) -> None:
        """Keep what it has run of the accepted path, which lies at `columns` [B, D + 1]."""
        staged, self._staged = self._staged, None
        path = KeptPath(view.block_table, view.lengths, columns, length, chain, staged)
        if staged is not None and view.states is not None and len(staged.places) != view.size:  # asked for some alone
            path = path.of((staged.places[:, None] == view.states).to(torch.int8).argmax(1))
        self.runner.cache.commit(path)

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
        if self._states is None:
            return self.runner.forward(batch).logits
        assert view.states is not None
        taken_in = self._states.behind(view.lengths, view.states, places.index)
        columns = places.index.reshape(-1)
        out = self.runner.forward(replace(batch, states=view.states, columns=columns, taken_in=taken_in))
        self._staged = out.staged
        return out.logits

    @property
    def _max_positions(self) -> int:
        return self.runner.model.config.max_positions

    def _reach(self, view: BatchView) -> Tensor:
        """How deep a node can be whose parent has a position in the model. [B]."""
        depth = (self._max_positions + 1 - view.lengths).clamp(min=0)
        return depth if view.max_depth is None else torch.minimum(depth, view.max_depth)


def _again(view: BatchView) -> int:
    """Committed tokens that a step begins with."""
    return 1 if view.gained == 1 else 2


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
