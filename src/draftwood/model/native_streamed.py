"""The decoder on our own CPU kernels with layers that need not be in memory: the last ones lie in mapped files.

The resident layers run in one call, each of the others in one of its own, while the system reads the next one. The
kernels are the same, and so is every bit.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from draftwood.batch import ForwardBatch, ForwardOutput, GivenRows, Pages
from draftwood.errors import InvalidRequest
from draftwood.model.checkpoint import Checkpoint
from draftwood.model.native import NativeTransformer, pack_layer
from draftwood.model.packing import Arena, Packer, Progress
from draftwood.model.spec import NONE, Sublayers
from draftwood.model.streaming import require_resident, spilled
from draftwood.model.weights import WeightFormat
from draftwood.ops.native import Kernels, structs

_SMALLEST = 1 << 20  # bytes of a mapped file


class StreamedNative(NativeTransformer):
    """`offload` of the layers, a share or bytes, lie in mapped files."""

    def __init__(
        self,
        library: Kernels,
        checkpoint: Checkpoint,
        weights: WeightFormat,
        progress: Progress = lambda *_: None,
        offload: float = 1.0,
    ) -> None:
        self._offload = offload
        self._away: list[Arena] = []  # of the last layers, one each
        super().__init__(library, checkpoint, weights, progress)

    def _pack_each(self, packer: Packer, checkpoint: Checkpoint, progress: Progress) -> list[structs.Layer]:
        """The last layers first, each in memory of its own, until enough of them are away."""
        count, storage = self.config.num_layers, self.weights.layers
        wanted = max(1, round(self._offload * count)) if self._offload <= 1 else count
        away: list[structs.Layer] = []
        while len(away) < wanted and (self._offload <= 1 or self._bytes_away < self._offload):
            arena = Arena(spilled, _SMALLEST)
            other = Packer(self._library, checkpoint, arena, progress, packer.packed)
            away.insert(0, pack_layer(other, self.config, storage, count - 1 - len(away)))
            self._away.insert(0, arena)
            packer.packed = other.packed
        resident = [pack_layer(packer, self.config, storage, i) for i in range(count - len(away))]
        return [*resident, *away]

    @property
    def _bytes_away(self) -> int:
        return sum(arena.num_bytes for arena in self._away)

    @property
    def num_resident(self) -> int:
        """Layers that are always in memory: the first ones."""
        return self.config.num_layers - len(self._away)

    def part(self, layers: Sequence[int], without: Sublayers = NONE) -> NativeTransformer:
        """Some of its layers as a model, if they are in memory."""
        require_resident(layers, self.num_resident)
        return self._plain(super().part(layers, without))

    def substituted(self, checkpoint: Checkpoint, weights: WeightFormat) -> NativeTransformer:
        """The same with layers in another format in place of those in files."""
        arena = Arena()
        packer = Packer(self._library, checkpoint, arena, lambda *_: None)
        others = (
            pack_layer(packer, self.config, weights.layers, i) for i in range(self.num_resident, len(self._layers))
        )
        part = copy.copy(self)
        part._layers = (structs.Layer * len(self._layers))(*self._layers[: self.num_resident], *others)
        part._model = structs.Model.from_buffer_copy(self._model)
        part._model.layers = part._layers
        part._arenas = (*self._arenas, arena)
        return self._plain(part)

    def refresh(self, checkpoint: Checkpoint) -> None:
        """Refused: only draft models are refreshed, and those are in memory."""
        raise InvalidRequest("A model with layers in files cannot be replaced layer by layer.")

    @staticmethod
    def _plain(part: NativeTransformer) -> NativeTransformer:
        part.__class__ = NativeTransformer
        return part

    def forward(
        self, batch: ForwardBatch, cache: Pages, needs: frozenset[int] = frozenset(), given: GivenRows | None = None
    ) -> ForwardOutput:
        """Run the rows of `batch`, writing their keys and values to `cache`."""
        count, features = self.config.num_layers, {}
        borders = sorted({0, *range(self.num_resident, count + 1)})
        nowhere = replace(batch, logit_rows=batch.logit_rows[:0])
        for start, end in pairwise(borders):
            self._away[max(0, end - self.num_resident) % len(self._away)].will_need()
            asked = frozenset(i - start for i in needs if start <= i < end)
            part = self._part(start, end)
            if end == count:
                out = NativeTransformer.forward(part, batch, cache, asked, given)
                return ForwardOutput(out.logits, features | _from(start, out, asked))
            out = NativeTransformer.forward(part, nowhere, cache, asked | {end - 1 - start}, given)
            features |= _from(start, out, asked)
            given = GivenRows(out.features[end - 1 - start].clone())
        raise AssertionError("a model has a last layer")

    def _part(self, start: int, end: int) -> NativeTransformer:
        """Layers [start, end) alone."""
        part = copy.copy(self)
        part._model = structs.Model.from_buffer_copy(self._model)
        part._model.layers = ctypes.cast(ctypes.byref(self._layers, start * ctypes.sizeof(structs.Layer)), _LAYERS)
        part._model.num_layers = end - start
        return part


_LAYERS = ctypes.POINTER(structs.Layer)


def _from(start: int, out: ForwardOutput, asked: frozenset[int]) -> dict[int, torch.Tensor]:
    return {start + i: out.features[i] for i in asked}
