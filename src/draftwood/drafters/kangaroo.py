"""The target's own first layers and an adapter as draft model (Kangaroo), with any grower.

The layers are the target's in memory, too. Keys and values are not: a drafter never writes where the target reads, so
what it makes of a text lies in pages of its own, of as many layers as it runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from draftwood.batch import ForwardBatch, ForwardOutput, Pages
from draftwood.drafters.features import PagedAttend
from draftwood.drafters.model import CausalDrafter
from draftwood.drafting import Grower, Vocabulary
from draftwood.errors import IncompatibleParts
from draftwood.model.checkpoint import Checkpoint
from draftwood.model.runner import ModelRunner, Sliceable
from draftwood.nets.embeddings import TargetEmbeddings
from draftwood.nets.kangaroo import Kangaroo


class ShallowModel:
    """The first layers of a model, and an adapter behind them; logits are of the tokens that its head knows."""

    strict = False  # the adapter's products are torch's

    def __init__(self, target: Sliceable, net: Kangaroo) -> None:
        self.trunk, self.net = target.part(range(net.exit_layer)), net
        trunk = self.trunk.config
        windows = trunk.windows + net.config.windows
        self.config = replace(trunk, num_layers=len(windows), windows=windows, layers=())
        self.dtype, self.device = target.dtype, target.device
        self.weights, self.implementation = target.weights, target.implementation

    @property
    def num_bytes(self) -> int:
        """Memory of the adapter: all else is the target's."""
        return sum(weight.nbytes for weight in self.net.parameters())

    def forward(self, batch: ForwardBatch, cache: Pages, needs: frozenset[int] = frozenset()) -> ForwardOutput:
        """Run the rows of `batch`, writing their keys and values to `cache`."""
        depth = self.trunk.config.num_layers
        nowhere = replace(batch, logit_rows=batch.logit_rows[:0])
        features = self.trunk.forward(nowhere, cache, needs | {depth - 1}).features
        paged = PagedAttend(batch, cache, self.net.config)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return paged(depth + layer, query, key, value)

        output = batch.at_logits(self.net.run(features[depth - 1], batch.positions, attend))
        return ForwardOutput(self.net.head(output), features)

    def refresh(self, checkpoint: Checkpoint) -> None:
        """Compute with this adapter from now on."""
        with torch.no_grad():
            for name, weight in self.net.named_parameters():
                weight.copy_(checkpoint.tensor(name))


class ShallowDrafter(CausalDrafter):
    """Drafts with a part of its target."""

    def __init__(self, net: Kangaroo, words: TargetEmbeddings, grower: Grower) -> None:
        super().__init__(grower)
        self.net, self.words = net, words

    def attach(self, target: ModelRunner) -> None:
        """Whose first layers it runs."""
        tables = target.cache.tables
        if not isinstance(target.model, Sliceable):
            raise IncompatibleParts("A target in stages, or on transformers' own modules, has no part that can draft.")
        if target.model.config.cache_shape[1:] != self.net.config.cache_shape[1:]:
            raise IncompatibleParts("The target is split over several ranks, and this drafter needs its whole layers.")
        if target.model.config.recurrent:
            raise IncompatibleParts(
                "This drafter runs first layers of its target with keys of its own; some are recurrent."
            )
        model = ShallowModel(target.model, self.net)
        self.runner = ModelRunner(model, tables.pool.num_pages, tables.page_size)

    def vocabulary(self, level: int | None) -> Vocabulary:
        """What its head knows."""
        return self.net.head

    @property
    def module(self) -> Kangaroo:
        """Its adapter, with the weights it drafts with."""
        return self.net

    def update(self, weights: Mapping[str, Tensor]) -> None:
        """Draft with these weights of the adapter from now on. Only between steps; what was read before stays."""
        with torch.no_grad():
            for name, weight in self.net.named_parameters():
                weight.copy_(weights[name])
