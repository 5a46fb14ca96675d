"""Captured steps, and CUDA graphs that share a memory pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from draftwood.cache.batch_state import StepInputs
from draftwood.protocols import NodeMasks


@dataclass
class StepParts:
    """What the parts of a captured step leave for each other and for the host."""

    proposal: Any = None
    scored: Any = None
    output: Any = None


@dataclass
class CapturedStep:
    """A step of one shape and mode, ready to be replayed: as a whole, or in three parts with masks before the last."""

    inputs: StepInputs
    runs: Sequence[Callable[[], None]]
    made: StepParts
    masks: NodeMasks | None


@dataclass(frozen=True)
class _Replay:
    """A graph with the function it was captured from, which keeps alive the tensors that the graph reads."""

    graph: torch.cuda.CUDAGraph
    run: Callable[[], None]

    def __call__(self) -> None:
        self.graph.replay()


@dataclass
class Graphs:
    """Captures CUDA graphs. They run one at a time and the host copies what they leave before the next one runs, so
    they share a memory pool.
    """

    _pool: Any = None
    _side: torch.cuda.Stream | None = None

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """The same as one graph."""
        if self._side is None:
            self._side = torch.cuda.Stream()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            run()  # libraries set themselves up in the first call on a stream
        torch.cuda.current_stream().wait_stream(self._side)
        graph = torch.cuda.CUDAGraph()
        # "thread_local": what other threads do meanwhile, such as loading files, does not end the capture.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"):
            run()
        return _Replay(graph, run)

    def leave_pool(self) -> None:
        """Use another pool from now on: a capture that failed leaves its pool unusable. Other graphs keep theirs."""
        self._pool = None
