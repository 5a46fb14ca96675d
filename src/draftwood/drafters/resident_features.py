"""Drafters that read the target's features, as they live on a device: all they keep lies under the target's pages.

What is kept of a feature is written to its position's slot when the target has run it: text in `take_in`, the kept path
of a tree in `learn`. So nothing belongs to a sequence, and what the target shares or caches is shared here too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftwood.cache.kv import Places, stage_behind
from draftwood.cache.seats import SeatedView
from draftwood.drafters.features import FeatureDrafter, PagedAttend, pages_under, write
from draftwood.drafters.resident import LevelTrees, Shape
from draftwood.growers.levels import Levels
from draftwood.model.batch import ForwardBatch
from draftwood.model.runner import ModelRunner
from draftwood.protocols import Features
from draftwood.tree import TokenTree

if TYPE_CHECKING:
    from draftwood.drafters.block import BlockDrafter
    from draftwood.drafters.pointwise import HeadStackDrafter
    from draftwood.drafters.recurrent import RecurrentDrafter


class ResidentFeatures(LevelTrees):
    """Base: keeps what the target makes of its tokens. Subclasses say what of it, and give logits."""

    reads = False

    def __init__(self, drafter: FeatureDrafter, grower: Levels, target: ModelRunner) -> None:
        super().__init__(grower, target.device, drafter.deepest)
        self.drafter, self.target, self.words = drafter, target, drafter.words

    @property
    def needs(self) -> frozenset[int]:
        """The layers its network reads."""
        return self.drafter.needs

    def keep(self, view: SeatedView, tree: TokenTree, index: Tensor, length: Tensor) -> None:
        """Of trees nothing is kept but what the target made of them; see `learn`."""

    def read(self, batch: ForwardBatch) -> None:
        """What the target made of text is all there is to read."""

    def take_in(self, batch: ForwardBatch, features: Features) -> None:
        """Keep what the target made of rows of text."""
        self.store(batch.slots, batch.positions, self._digested(features))

    def learn(self, view: SeatedView, path: Tensor, features: Features) -> None:
        """Keep what it made of a path. What lies behind the accepted part is written over before anybody looks."""
        rows = {layer: part[path.clamp(min=0).reshape(-1)] for layer, part in features.items()}
        steps = torch.arange(-1, path.shape[1] - 1, device=path.device)
        positions = (view.lengths[:, None] + steps).clamp(min=0)
        self.store(self.slots(view, positions).reshape(-1), positions.reshape(-1), self._digested(rows))

    def slots(self, view: SeatedView, positions: Tensor) -> Tensor:
        """Where positions [B, k] of each sequence lie. [B, k]."""
        size = self.target.cache.page_size
        page = view.block_table.gather(1, (positions // size).clamp(max=view.block_table.shape[1] - 1))
        return page * size + positions % size

    def _digested(self, features: Features) -> Tensor:
        joined = torch.cat([features[layer] for layer in self.drafter.net.reads], -1)
        return self.drafter.digest(joined.to(self.words.dtype))

    def stage(self, view: SeatedView, tokens: Tensor, places: Places, logit_rows: Tensor | None = None) -> ForwardBatch:
        """Rows behind all but the last token, which the target has not run."""
        highest, page_size = self.target.model.config.max_positions, self.target.cache.page_size
        lengths = view.lengths - 1
        batch = stage_behind(lengths, view.block_table, tokens, places, page_size, highest, logit_rows)
        there = (lengths[:, None] + places.index).reshape(-1) >= 0  # a short text has fewer rows than are asked for
        slots = torch.where(there, batch.slots, self.target.cache.scratch_page * page_size)
        return replace(batch, slots=slots, num_keys=batch.num_keys.clamp(min=1))

    def store(self, slots: Tensor, positions: Tensor, rows: Tensor) -> None:
        """Keep `rows` [N, width] of positions [N] at their slots [N]."""
        raise NotImplementedError


class _Kept:
    """One vector for every slot of the target's cache."""

    def __init__(self, target: ModelRunner, width: int) -> None:
        slots = target.cache.memory.store.shape[3]
        self._rows = torch.zeros(slots, width, dtype=target.model.dtype, device=target.device)

    def put(self, slots: Tensor, rows: Tensor) -> None:
        self._rows.index_copy_(0, slots, rows.to(self._rows.dtype))

    def at(self, slots: Tensor) -> Tensor:
        return self._rows[slots]


class ResidentRecurrent(ResidentFeatures):
    """Every round begins with the rows that the last one may have added, run on the target's own features."""

    drafter: RecurrentDrafter
    reads = True

    def __init__(self, drafter: RecurrentDrafter, grower: Levels, target: ModelRunner) -> None:
        super().__init__(drafter, grower, target)
        self._kept = _Kept(target, drafter.net.config.hidden_size)
        self._pages = pages_under(target, drafter.net.config)
        self._ends: dict[int, tuple[Places, Tensor]] = {}

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
        self._run(shifted)

    def _run(self, batch: ForwardBatch, features: Tensor | None = None) -> Tensor:
        """Outputs of all rows, on the features kept at their slots unless others are given. [N, hidden]."""
        net = self.drafter.net
        features = self._kept.at(batch.slots) if features is None else features
        attend = PagedAttend(batch, self._pages, net.config)
        return net.run(self.words.embed(batch.tokens), features, batch.positions, attend)

    def begin(self, view: SeatedView) -> tuple[Tensor, Tensor]:
        """[B, 1, V], and outputs [B, 1, hidden]."""
        places, last = self._last(len(view.rows))
        tokens = view.history[view.rows[:, None], (view.lengths[:, None] + places.index).clamp(min=0)]
        output = self._run(self.stage(view, tokens, places))[last][:, None]
        return self._logits(output), output

    def _last(self, size: int) -> tuple[Places, Tensor]:
        """The rows that a round can have added, and which of them are the last."""
        if size not in self._ends:
            count, device = len(self.grower.widths) + 1, self.target.device
            steps = torch.arange(-count, 0, device=device).expand(size, count).contiguous()
            self._ends[size] = Places(steps, steps), torch.arange(count - 1, size * count, count, device=device)
        return self._ends[size]

    def extend(
        self, view: SeatedView, shape: Shape, number: int, tokens: list[Tensor], state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """On the outputs of their parents."""
        level = shape.levels[number]
        parents = shape.parents[number]
        features = state.gather(1, parents[..., None].expand(-1, -1, state.shape[-1]))
        output = self._run(self.stage(view, tokens[-1], level.places), features.flatten(0, 1))
        output = output.view(*tokens[-1].shape, -1)
        return self._logits(output), output

    def _logits(self, output: Tensor) -> Tensor:
        net = self.drafter.net
        return net.head.spread(net.logits(output))


class ResidentBlock(ResidentFeatures):
    """One pass a round, whatever the tree."""

    drafter: BlockDrafter

    def __init__(self, drafter: BlockDrafter, grower: Levels, target: ModelRunner) -> None:
        super().__init__(drafter, grower, target)
        self._pages = pages_under(target, drafter.net.config)
        self._blocks: dict[int, Places] = {}

    def store(self, slots: Tensor, positions: Tensor, rows: Tensor) -> None:
        """Keys and values of every layer."""
        for layer in range(self.drafter.net.config.num_layers):
            write(self._pages, layer, slots, *self.drafter.net.keys_values(layer, rows, positions))

    def begin(self, view: SeatedView) -> tuple[Tensor, Tensor]:
        """[B, 1, V], and outputs and base logits of all slots side by side."""
        net, count = self.drafter.net, len(view.rows)
        tokens, embedded = self.drafter.block(view.roots)
        batch = self.stage(view, tokens, self._places(count))
        output = net.run(embedded.flatten(0, 1), batch.positions, PagedAttend(batch, self._pages, net.config))
        output = output.view(count, net.spec.block_size, -1)[:, net.spec.block_size - net.spec.guesses :]
        state = torch.cat([output, net.head(output).to(output.dtype)], -1)
        return self._logits(state[:, :1], view.roots[:, None]), state

    def _places(self, size: int) -> Places:
        if size not in self._blocks:
            rows, device = self.drafter.net.spec.block_size, self.target.device
            steps = torch.arange(rows, device=device).expand(size, rows).contiguous()
            every = torch.full((size * rows, 1), (1 << rows) - 1, device=device)
            self._blocks[size] = Places(steps, steps, every, rows, rows)
        return self._blocks[size]

    def extend(
        self, view: SeatedView, shape: Shape, number: int, tokens: list[Tensor], state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The slot of their depth, corrected for each of them."""
        return self._logits(state[:, number : number + 1].expand(-1, tokens[-1].shape[1], -1), tokens[-1]), state

    def _logits(self, slot: Tensor, before: Tensor) -> Tensor:
        net = self.drafter.net
        output, base = slot.split_with_sizes((net.config.hidden_size, net.head.size), -1)
        return net.head.spread(net.corrected(output, base, before, self.words.embed(before)))


class ResidentHeads(ResidentFeatures):
    """Heads on the last feature."""

    drafter: HeadStackDrafter

    def __init__(self, drafter: HeadStackDrafter, grower: Levels, target: ModelRunner) -> None:
        super().__init__(drafter, grower, target)
        self._kept = _Kept(target, drafter.net.hidden)

    def store(self, slots: Tensor, positions: Tensor, rows: Tensor) -> None:
        """Normed features."""
        self._kept.put(slots, rows)

    def begin(self, view: SeatedView) -> tuple[Tensor, Tensor]:
        """[B, 1, V], and the feature [B, 1, hidden]."""
        feature = self._kept.at(self.slots(view, (view.lengths - 2).clamp(min=0)[:, None]))
        return self._logits(0, feature, view.roots[:, None, None]), feature

    def extend(
        self, view: SeatedView, shape: Shape, number: int, tokens: list[Tensor], state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Behind the path to each of them."""
        at, path = torch.arange(tokens[-1].shape[1], device=state.device).expand_as(tokens[-1]), [tokens[-1]]
        for depth in range(number, 0, -1):
            at = shape.parents[depth].gather(1, at)
            path.append(tokens[depth - 1].gather(1, at))
        behind = torch.stack(path[::-1], -1)
        return self._logits(number, state.expand(-1, behind.shape[1], -1), behind), state

    def _logits(self, number: int, feature: Tensor, path: Tensor) -> Tensor:
        net = self.drafter.net
        return net.heads[number].spread(net.logits(number, feature, self.words.embed(path)))
