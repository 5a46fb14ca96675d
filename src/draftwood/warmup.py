"""Compile a model's GPU kernels while its weights are still being read.

Kernels are compiled for the shapes of a model, not for its weights: running one layer of zeros once is enough.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from draftwood.assembly import build_lookup, is_lookup
from draftwood.config import EngineConfig
from draftwood.drafters.lookup import LookupDrafter
from draftwood.drafters.none import NoDrafter
from draftwood.drafting import Drafter
from draftwood.engine.decode_step import Parts
from draftwood.engine.graph_runner import GraphRunner, batch_state_for
from draftwood.engine.shapes import ShapePlan
from draftwood.model.checkpoint import expected_shape
from draftwood.model.config import ModelConfig
from draftwood.model.runner import ModelRunner
from draftwood.rng import KeyedRng
from draftwood.verifiers import LAWS

LARGEST = 63  # nodes of the trees that networks grow by default
VOCABULARY = 16384  # tokens: a larger one is cut up alike
THREADS = 8
PAGES = 16  # enough for several programs to share a sequence's keys, as they will


class _Blank:
    """A checkpoint of the first layer, with whatever lies in memory as weights."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        small = min(config.vocab_size, VOCABULARY)
        self.config = replace(config.first(1), vocab_size=small)
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


def warm_up(target: ModelConfig, config: EngineConfig, drafter: str | Drafter) -> None:
    """Run prefills and the usual steps in several threads: compiling waits for child processes half of the time."""
    device, dtype = config.torch_device(), config.torch_dtype()
    with _apart(device):
        blank = _Blank(target, dtype, device)
        weights = config.weight_format()
        runner = ModelRunner.load(blank, dtype, device, PAGES, config.page_size, weights, strict=config.strict)  # type: ignore[arg-type]
        known = _known_already(drafter, device)
        known.attach(runner)
        running = config.max_running
        state = batch_state_for(runner, running, known.max_nodes)
        shapes = ShapePlan.for_trees(known.sizes, running, config.max_rows, state.num_pages, config.page_size)
        steps = GraphRunner(Parts(runner, known, LAWS["match"](), KeyedRng()), state, shapes, captures=False)
    parts = steps.warm_ups()

    def run(part: Callable[[], object]) -> None:
        with _apart(device):
            part()

    with ThreadPoolExecutor(THREADS, "draftwood-warmup") as pool:
        list(pool.map(run, parts))


def _known_already(drafter: str | Drafter, device: torch.device) -> Drafter:
    """A drafter without weights: kernels of networks are compiled when those are loaded, but trees as large as theirs
    can be scored.
    """
    if isinstance(drafter, str):
        return build_lookup(drafter, device) if is_lookup(drafter) else LookupDrafter(LARGEST)
    return NoDrafter()


@contextmanager
def _apart(device: torch.device) -> Iterator[None]:
    """On a separate stream, synchronised at the end."""
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream), torch.inference_mode():
        yield
    stream.synchronize()


@contextmanager
def warming_up(target: ModelConfig, config: EngineConfig, drafter: str | Drafter) -> Iterator[None]:
    """Warm up in the background of the block."""

    def run() -> None:
        try:
            warm_up(target, config, drafter)
        except Exception:  # only a head start: the engine itself will report what is wrong
            return

    thread = threading.Thread(target=run, name="draftwood-warmup", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()
