"""A model with its own paged cache: the target, and any draft model; the same class with other weights."""

from __future__ import annotations

import torch

from draftwood.cache.kv import KVCache
from draftwood.model.batch import ForwardBatch, ForwardOutput
from draftwood.model.checkpoint import Checkpoint
from draftwood.model.isa import avoid_broken_amx
from draftwood.model.transformer import Transformer


class ModelRunner:
    """Runs forwards against its cache."""

    def __init__(self, model: Transformer, num_pages: int, page_size: int) -> None:
        self.model = model
        self.cache = KVCache(model.config, num_pages, page_size, model.dtype, model.device)

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, num_pages: int, page_size: int
    ) -> ModelRunner:
        """Read the weights and set the cache up."""
        if dtype == torch.bfloat16 and device.type == "cpu":
            avoid_broken_amx()
        return cls(Transformer(checkpoint, dtype, device), num_pages, page_size)

    @property
    def device(self) -> torch.device:
        """Where weights and cache live."""
        return self.model.device

    def forward(self, batch: ForwardBatch, needs: frozenset[int] = frozenset()) -> ForwardOutput:
        """Run the rows; their keys and values are in the cache afterwards."""
        return self.model.forward(batch, self.cache.memory, needs)
