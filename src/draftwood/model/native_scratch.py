"""Working memory of our CPU kernels."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from draftwood.model.packing import padded
from draftwood.model.weights import GROUP
from draftwood.ops.native import Kernels, structs


class Scratch:
    """Working memory, as large as the largest forward so far."""

    def __init__(self, library: Kernels, model: structs.Model) -> None:
        self._library = library
        self._model = model
        self._rows = self._threads = self._scores = 0
        self._buffers: list[Tensor] = []
        self._unpacked = torch.empty(0, 0)
        self._struct = structs.Scratch()

    def fit(self, rows: int, num_keys: int, num_nodes: int) -> structs.Scratch:
        """Enough for a forward of this size."""
        threads = torch.get_num_threads()
        scores = self._library.dw_attention_scores(ctypes.byref(self._model), num_keys, num_nodes)
        if rows > self._rows or scores > self._scores or threads != self._threads:
            self._rows, self._scores = max(rows, self._rows), max(scores, self._scores)
            self._threads = threads
            self._buffers = self._allocate()
            *buffers, mixture = (buffer.data_ptr() for buffer in self._buffers)
            self._struct = structs.Scratch(threads, *buffers, self._scores, mixture)
        return self._struct

    def unpacked(self, num_keys: int) -> Tensor:
        """Room for keys and values of a head, as many for each thread. [threads, numbers]."""
        size, threads = 2 * num_keys * self._model.head_dim, torch.get_num_threads()
        if self._unpacked.shape[0] < threads or self._unpacked.shape[1] < size:
            self._unpacked = torch.empty(threads, 2 * size)
        return self._unpacked

    def _allocate(self) -> list[Tensor]:
        layers = [self._model.layers[i] for i in range(self._model.num_layers)]
        hidden, gated = padded(self._model.hidden), max(layer.down.inputs for layer in layers)
        layer = layers[0]
        widest = max(hidden, layer.qkv.inputs, layer.output.inputs, gated)
        floats = [hidden, hidden, layer.qkv.outputs, layer.output.inputs, gated]
        return [
            *(torch.zeros(self._rows, width) for width in floats),
            torch.zeros(self._rows, widest, dtype=torch.int8),
            *(torch.zeros(self._rows, widest // GROUP) for _ in range(3)),  # the last holds 32-bit whole numbers
            torch.empty(self._threads, self._scores),
            torch.zeros(1 + self._threads, 8, dtype=torch.int64),  # the team's barrier and counters
            torch.empty(self._library.dw_mixture_bytes(ctypes.byref(self._model), self._rows), dtype=torch.uint8),
        ]
