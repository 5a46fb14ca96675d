"""Networks that draft token by token from the target's features (EAGLE, multi-token prediction), with any grower.

Row i of the network reads token i + 1 and feature i, so to the pages it is a text that lacks its first token. A step
begins with the rows that the last one may have added: nodes ran on the network's own outputs, not on features.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from draftwood.batch import ForwardBatch, Pages
from draftwood.cache.kv import Places
from draftwood.drafters.features import FeatureDrafter, PagedAttend, pages_under, vectors_under
from draftwood.drafting import Front, State, Vocabulary
from draftwood.model.runner import ModelRunner
from draftwood.nets.eagle import Eagle3, Eagle3Layer, RecurrentNet
from draftwood.nets.native import NativeLayers, native_layers, native_linear
from draftwood.ops.eagle3_input import side_by_side
from draftwood.protocols import BatchView


class RecurrentDrafter(FeatureDrafter):
    """A `RecurrentNet`, and a grower."""

    net: RecurrentNet
    reads = True
    _native: NativeLayers | None
    _pages: Pages
    _kept: Tensor  # [slots + 1, hidden] fused features; the last is of no token

    def attach(self, target: ModelRunner) -> None:
        """Its layers run on the target's kernels where they can."""
        super().attach(target)
        net = self.net
        self._native = native_layers(net, net.config, net.head, self.words) if isinstance(net, Eagle3) else None
        self._pages = pages_under(target, net.config)
        self._kept = vectors_under(target, net.config.hidden_size)

    def refresh(self) -> None:
        """The kernels have weights of their own."""
        if self._native is not None:
            self._native.refresh()

    def staged(self, nodes: int) -> int:
        """What the grower asks about."""
        return self.grower.staged(nodes)

    def digest(self, features: Tensor) -> Tensor:
        """Fused, in the network's own width. [N, len(reads) * hidden] -> [N, hidden]."""
        if isinstance(self.net, Eagle3):
            return native_linear(self.net.fc)(self.net.unfused(features))
        return self.net.fuse(self.words.final_norm(features) if self.net.normed else features)

    def store(self, slots: Tensor, positions: Tensor, features: Tensor) -> None:
        """Fused features."""
        self._kept.index_copy_(0, slots, self.digest(features).to(self._kept.dtype))

    def read(self, batch: ForwardBatch) -> None:
        """Row i - 1 of the network takes token i and feature i - 1; the first token has no row."""
        before = (batch.positions - 1).clamp(min=0)
        rows = torch.arange(len(batch.tokens), device=before.device)
        owner = torch.bucketize(rows, batch.row_offsets[1:], right=True)
        size = self.target.cache.page_size
        slots = batch.block_table[owner, before // size].clamp(min=0) * size + before % size
        shifted = replace(
            batch,
            positions=before,
            slots=torch.where(batch.positions > 0, slots, self._scratch_slot),
            visible=(batch.visible - 1).clamp(min=1),
            tree_base=(batch.tree_base - 1).clamp(min=0),
            num_keys=(batch.num_keys - 1).clamp(min=1),
            logit_rows=batch.logit_rows[:0],
        )
        self.run(shifted, self._kept, shifted.slots)

    def begin(self, view: BatchView) -> tuple[Tensor, State]:
        """Also the outputs [B, hidden]."""
        batch, rows = self.last_rows(view)
        output, logits = self.run(batch, self._kept, rows)
        return logits[:, None], (output,)

    def extend(self, view: BatchView, front: Front, state: State) -> tuple[Tensor, State]:
        """On the outputs of their parents; also the outputs of all forwards so far."""
        features, parents = front.of_parents(state)
        output, logits = self.run(self.stage(view, front.tokens, front.places), features, parents)
        logits = logits.view(*front.tokens.shape, -1)
        return logits if front.level is not None else self.net.head.spread(logits), (*state, output)

    def vocabulary(self, level: int | None) -> Vocabulary | None:
        """What its head knows."""
        return None if level is None else self.net.head

    def last_rows(self, view: BatchView, masks: int = 0, mask: int = 0) -> tuple[ForwardBatch, Tensor]:
        """The rows that the last step may have added, the root's last, and so many of the token `mask` behind them,
        with logits at the roots and the masks; and which of the kept features each row takes.
        """
        count = self.grower.levels + 1 if view.gained is None else view.gained
        ends = _ends(view.size, count, masks, mask, view.lengths.device)
        index = view.lengths[:, None] + ends.places.index
        tokens = view.roots[:, None]
        if count > 1:
            tokens = view.history[view.rows[:, None], index[:, :count].clamp(min=0)]
        if masks:
            tokens = torch.cat([tokens, ends.masks], 1)
        batch = self.stage(view, tokens, ends.places, ends.logit_rows)
        there = index.view(-1) > 0  # a short text has fewer rows than are asked for
        slots = torch.where(there, batch.slots, self._scratch_slot)
        batch = replace(batch, slots=slots, num_keys=batch.num_keys.clamp(min=1))
        return batch, slots if not masks else torch.where(ends.masked, len(self._kept) - 1, slots)

    def run(self, batch: ForwardBatch, features: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of a forward, on `rows` [N] of `features` [M, hidden]; outputs and logits at its `logit_rows`.

        [K, hidden], [K, R].
        """
        net = self.net
        if self._native is not None and isinstance(net, Eagle3):
            inputs = self._inputs(net.first, batch.tokens, features, rows)
            hidden, logits = self._native.run(batch, self._pages, *inputs)
            return net.handed_on(batch.at_logits(hidden)), logits
        attend = PagedAttend(batch, self._pages, net.config)
        output = net.run(self.words.embed(batch.tokens), features[rows], batch.positions, attend)
        output = batch.at_logits(output)
        return output, net.logits(output)

    def _inputs(self, layer: Eagle3Layer, tokens: Tensor, features: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        table = self.words.table
        if table is None:
            return layer.inputs(self.words.embed(tokens), features[rows])
        return side_by_side(table, tokens, features, rows, layer.norms)

    @property
    def _scratch_slot(self) -> int:
        """For rows that only fill a forward up."""
        return self.target.cache.scratch_page * self.target.cache.page_size


@dataclass(frozen=True)
class _Ends:
    """Rows around the ends of texts: the same in every step of a shape."""

    places: Places
    masks: Tensor  # [B, masks]
    masked: Tensor  # [B * (count + masks)] bool
    logit_rows: Tensor  # [B * (1 + masks)]


@lru_cache(maxsize=1024)
def _ends(size: int, count: int, masks: int, mask: int, device: torch.device) -> _Ends:
    """The last `count` rows of each of `size` texts, and masks behind them."""
    steps = torch.arange(-count, masks, device=device).expand(size, -1).contiguous()
    rows = torch.arange(size * (count + masks), device=device).view(size, -1)
    behind = torch.full((size, masks), mask, device=device)
    return _Ends(Places(steps, steps), behind, (steps >= 0).view(-1), rows[:, count - 1 :].reshape(-1))
