"""Compile what a model needs on a GPU while its weights are still being read.

Kernels are compiled for the shapes of a model, not for its weights; so one layer of nothing, run once, is enough.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from draftwood.cache.seats import Kind, Seats
from draftwood.config import EngineConfig
from draftwood.drafters.resident import ResidentNone
from draftwood.engine.rounds import Rounds
from draftwood.model.checkpoint import expected_shape
from draftwood.model.config import ModelConfig
from draftwood.model.runner import ModelRunner
from draftwood.rng import KeyedRng
from draftwood.verifiers import LAWS

VOCABULARY = 16384  # tokens: a larger one is cut up alike
PAGES = 16  # enough for several programs to share a sequence's keys, as they will


class _Blank:
    """A checkpoint of the first layer, with whatever lies in memory as weights."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        small = min(config.vocab_size, VOCABULARY)
        self.config = replace(config, num_layers=1, windows=config.windows[:1], vocab_size=small)
        self.name = "blank"
        self._dtype, self._device = dtype, device

    def tensor(self, name: str) -> Tensor:
        shape = expected_shape(name, self.config)
        assert shape is not None, name
        return torch.zeros(shape, dtype=self._dtype, device=self._device)

    def matrix(self, name: str) -> Tensor:
        return self.tensor(name)

    def forget(self) -> None:
        pass


def rehearse(target: ModelConfig, config: EngineConfig) -> None:
    """One plain round and one piece of a prompt, on a stream of their own."""
    device, dtype = config.torch_device(), config.torch_dtype()
    with torch.cuda.stream(torch.cuda.Stream(device)), torch.inference_mode():
        blank = _Blank(target, dtype, device)
        weights = config.weight_format()
        runner = ModelRunner.load(blank, dtype, device, PAGES, config.page_size, weights, strict=config.strict)  # type: ignore[arg-type]
        seats = Seats(1, PAGES * config.page_size, config.page_size, runner.cache.scratch_page, device)
        law = LAWS["match"]()
        rounds = Rounds(runner, ResidentNone(), lambda _: law, KeyedRng(), seats, captures=False)
        rounds.rehearse(Kind(None, greedy=True, truncates=False))


@contextmanager
def rehearsing(target: ModelConfig, config: EngineConfig) -> Iterator[None]:
    """Rehearse beside what is done in the block."""

    def run() -> None:
        try:
            rehearse(target, config)
        except Exception:  # only a head start: whatever is wrong will be told by the engine itself
            return

    thread = threading.Thread(target=run, name="draftwood-rehearsal", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()
