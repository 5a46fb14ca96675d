"""Drafters that read the target's features, as they live on a device: all they keep lies under the target's pages.

What is kept of a feature is written to its position's slot when the target has run it: text in `take_in`, the kept path
of a tree in `learn`. So nothing belongs to a sequence, and what the target shares or caches is shared here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftwood.cache.batch_state import DeviceBatchView
from draftwood.cache.kv import Places, stage_behind
from draftwood.drafters.features import FeatureDrafter, pages_under
from draftwood.drafters.growth import Front, GrownTrees, Growth, State
from draftwood.growers.pickers import Guessable
from draftwood.batch import ForwardBatch
from draftwood.model.runner import ModelRunner
from draftwood.ops.staging import staged
from draftwood.protocols import Features
from draftwood.tree import TokenTree

if TYPE_CHECKING:
    from draftwood.drafters.dflash import BlockDrafter
    from draftwood.drafters.eagle import RecurrentDrafter
    from draftwood.drafters.medusa import HeadStackDrafter


class ResidentFeatures(GrownTrees):
    """Base: keeps what the target makes of its tokens. Subclasses say what of it, and give logits."""

    reads = False

    def __init__(self, drafter: FeatureDrafter, growth: Growth, target: ModelRunner) -> None:
        super().__init__(growth)
        self.drafter, self.target, self.words = drafter, target, drafter.words
        self._steps: dict[tuple[int, int, int], Tensor] = {}

    @property
    def needs(self) -> frozenset[int]:
        """The layers its network reads."""
        return self.drafter.needs

    def keep(self, view: DeviceBatchView, tree: TokenTree, index: Tensor, length: Tensor) -> None:
        """Of trees nothing is kept but what the target made of them; see `learn`."""

    def read(self, batch: ForwardBatch) -> None:
        """What the target made of text is all there is to read."""

    def take_in(self, batch: ForwardBatch, features: Features) -> None:
        """Keep what the target made of rows of text."""
        self.store(batch.slots, batch.positions, self.drafter.digest(self.drafter.joined(features)))

    def learn(self, view: DeviceBatchView, path: Tensor, features: Features) -> None:
        """Keep what it made of a path. What lies behind the accepted part is written over before anybody looks."""
        rows = self.drafter.joined(features).index_select(0, path.clamp(min=0).reshape(-1))
        self.store(*self.around_end(view, -1, path.shape[1] - 1), self.drafter.digest(rows))

    def around_end(self, view: DeviceBatchView, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Slots and positions of the tokens `start` … `end` - 1 behind each length. 2 x [B * (end - start)]."""
        key = len(view.rows), start, end
        if key not in self._steps:
            steps = torch.arange(start, end, device=self.target.device)
            self._steps[key] = steps.expand(len(view.rows), -1).contiguous()
        steps, (highest, page_size) = self._steps[key], self._limits
        positions, slots, _ = staged(view.lengths, view.block_table, steps, steps, 0, page_size, highest - 1, True)
        return slots, positions

    @property
    def _limits(self) -> tuple[int, int]:
        """The target's positions, and tokens of its pages."""
        return self.target.model.config.max_positions, self.target.cache.page_size

    def stage(self, view: DeviceBatchView, tokens: Tensor, places: Places) -> ForwardBatch:
        """Rows behind all but the last token, which the target has not run."""
        highest, page_size = self._limits
        return stage_behind(view.num_run, view.block_table, tokens, places, page_size, highest)

    def store(self, slots: Tensor, positions: Tensor, rows: Tensor) -> None:
        """Keep `rows` [N, width] of positions [N] at their slots [N]."""
        raise NotImplementedError


class _Kept:
    """One vector for every slot of the target's cache."""

    def __init__(self, target: ModelRunner, width: int) -> None:
        slots = target.cache.memory.store.shape[3]
        self.rows = torch.zeros(slots, width, dtype=target.model.dtype, device=target.device)

    def put(self, slots: Tensor, rows: Tensor) -> None:
        self.rows.index_copy_(0, slots, rows.to(self.rows.dtype))


class ResidentRecurrent(ResidentFeatures):
    """Every round begins with the rows that the last one may have added, run on the target's own features."""

    drafter: RecurrentDrafter
    reads = True

    def __init__(self, drafter: RecurrentDrafter, growth: Growth, target: ModelRunner) -> None:
        super().__init__(drafter, growth, target)
        self._kept = _Kept(target, drafter.net.config.hidden_size)
        self._pages = pages_under(target, drafter.net.config)
        self._ends: dict[int, tuple[Places, Tensor]] = {}

    @cached_property
    def sizes(self) -> Sequence[int]:
        """What it is asked about needs room as well, even if the tree will be smaller."""
        return [size for size in self.growth.sizes if size == 0 or self.growth.asked(size) <= size]

    def store(self, slots: Tensor, positions: Tensor, rows: Tensor) -> None:
        """Fused features."""
        self._kept.put(slots, rows)

    def read(self, batch: ForwardBatch) -> None:
        """Row i - 1 of the network takes token i and feature i - 1; the first token has no row."""
        before = (batch.positions - 1).clamp(min=0)
        owner = torch.bucketize(
            torch.arange(len(batch.tokens), device=before.device), batch.row_offsets[1:], right=True
        )
        size = self.target.cache.page_size
        page = batch.block_table[owner, before // size].clamp(min=0)
        real = batch.positions > 0
        slots = torch.where(real, page * size + before % size, self.target.cache.scratch_page * size)
        shifted = replace(
            batch,
            positions=before,
            slots=slots,
            visible=(batch.visible - 1).clamp(min=0),
            tree_base=(batch.tree_base - 1).clamp(min=0),
            num_keys=(batch.num_keys - 1).clamp(min=1),
            logit_rows=batch.logit_rows[:0],
        )
        self.drafter.run(shifted, self._pages, self._kept.rows, shifted.slots)

    def among(self, number: int) -> Guessable:
        """What its head knows."""
        return self.drafter.net.head

    def begin(self, view: DeviceBatchView) -> tuple[Tensor, State]:
        """[B, 1, R], and outputs [B, hidden]."""
        places, last = self._last(len(view.rows))
        index = view.lengths[:, None] + places.index
        tokens = view.history[view.rows[:, None], index.clamp(min=0)]
        batch = self.stage(view, tokens, places)
        there = index.view(-1) > 0  # a short text has fewer rows than are asked for
        slots = torch.where(there, batch.slots, self.target.cache.scratch_page * self.target.cache.page_size)
        num_keys = batch.num_keys.clamp(min=1)
        batch = replace(batch, slots=slots, num_keys=num_keys, logit_rows=last)
        output, logits = self.drafter.run(batch, self._pages, self._kept.rows, batch.slots)
        return logits[:, None], (output,)

    def _last(self, size: int) -> tuple[Places, Tensor]:
        """The rows that a round can have added, and which of them are the last."""
        if size not in self._ends:
            count, device = self.growth.levels + 1, self.target.device
            steps = torch.arange(-count, 0, device=device).expand(size, count).contiguous()
            self._ends[size] = Places(steps, steps), torch.arange(count - 1, size * count, count, device=device)
        return self._ends[size]

    def extend(self, view: DeviceBatchView, front: Front, state: State) -> tuple[Tensor, State]:
        """On the outputs of their parents."""
        batch = self.stage(view, front.tokens, front.places)
        output, logits = self.drafter.run(batch, self._pages, state[0], front.sources)
        return logits.view(*front.tokens.shape, -1), (output,)


class ResidentBlock(ResidentFeatures):
    """One pass a round, whatever the tree."""

    drafter: BlockDrafter

    def __init__(self, drafter: BlockDrafter, growth: Growth, target: ModelRunner) -> None:
        super().__init__(drafter, growth, target)
        self._pages = pages_under(target, drafter.net.config)
        self._blocks: dict[int, Places] = {}

    def store(self, slots: Tensor, positions: Tensor, rows: Tensor) -> None:
        """Keys and values of every layer."""
        self.drafter.keep(rows, positions, slots, self._pages)

    def among(self, number: int) -> Guessable:
        """What its head knows."""
        return self.drafter.net.head

    def begin(self, view: DeviceBatchView) -> tuple[Tensor, State]:
        """[B, 1, R], and outputs and base logits of all slots. [B, guesses, hidden], [B, guesses, R]."""
        spec, count = self.drafter.net.spec, len(view.rows)
        tokens, embedded = self.drafter.block(view.roots)
        batch = self.stage(view, tokens, self._places(count))
        found = self.drafter.through(batch, self._pages, embedded.flatten(0, 1))
        state = tuple(part.view(count, spec.block_size, -1)[:, spec.block_size - spec.guesses :] for part in found)
        return self._logits(0, view.roots[:, None], state), state

    def _places(self, size: int) -> Places:
        if size not in self._blocks:
            rows, device = self.drafter.net.spec.block_size, self.target.device
            steps = torch.arange(rows, device=device).expand(size, rows).contiguous()
            every = torch.full((size * rows, 1), (1 << rows) - 1, device=device)
            self._blocks[size] = Places(steps, steps, every, rows, rows)
        return self._blocks[size]

    def extend(self, view: DeviceBatchView, front: Front, state: State) -> tuple[Tensor, State]:
        """The slot of their depth, corrected for each of them."""
        return self._logits(front.number, front.tokens, state), state

    def _logits(self, slot: int, before: Tensor, state: State) -> Tensor:
        output, base = (part[:, slot : slot + 1].expand(-1, before.shape[1], -1) for part in state)
        return self.drafter.net.corrected(output, base, before, self.words.embed(before))


class ResidentHeads(ResidentFeatures):
    """Heads on the last feature."""

    drafter: HeadStackDrafter

    def __init__(self, drafter: HeadStackDrafter, growth: Growth, target: ModelRunner) -> None:
        super().__init__(drafter, growth, target)
        self._kept = _Kept(target, drafter.net.hidden)

    def store(self, slots: Tensor, positions: Tensor, rows: Tensor) -> None:
        """Normed features."""
        self._kept.put(slots, rows)

    def among(self, number: int) -> Guessable:
        """What the head of that depth knows."""
        return self.drafter.net.heads[number]

    def begin(self, view: DeviceBatchView) -> tuple[Tensor, State]:
        """[B, 1, R], and the feature [B, 1, hidden]."""
        slots, _ = self.around_end(view, -2, -1)
        feature = self._kept.rows.index_select(0, slots)[:, None]
        return self._logits(0, feature, view.roots[:, None, None]), (feature,)

    def extend(self, view: DeviceBatchView, front: Front, state: State) -> tuple[Tensor, State]:
        """Behind the path to each of them."""
        (feature,) = state
        roots = view.roots[:, None, None].expand(-1, front.tokens.shape[1], 1)
        behind = torch.cat([roots, front.path], -1)
        return self._logits(front.number, feature.expand(-1, behind.shape[1], -1), behind), state

    def _logits(self, number: int, feature: Tensor, path: Tensor) -> Tensor:
        return self.drafter.net.logits(number, feature, self.words.embed(path))
