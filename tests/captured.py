"""The harness with captured steps: as graphs on a GPU, call by call elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from draftwood import links
from draftwood.engine.captured import Graphs
from draftwood.engine.controller import FixedBudget
from draftwood.engine.engine import Engine
from draftwood.engine.graph_runner import GraphRunner
from draftwood.engine.launched import Batch
from draftwood.engine.scheduler import Scheduler, SchedulerConfig
from draftwood.engine.shapes import Key, StepShape
from draftwood.model.runner import ModelRunner
from draftwood.protocols import Budget, Load, StepMode, StepReport
from draftwood.rng import KeyedRng
from draftwood.verifiers import LAWS
from tiny import EASY, Harness, Regime, tiny_config, tiny_runner

GPU = torch.cuda.is_available()  # there the same steps are captured, and computed by the GPU's own kernels
DEVICE = torch.device("cuda" if GPU else "cpu")


def runner(noise: float = 0.0, num_pages: int = 200, page_size: int = 4) -> ModelRunner:
    if not GPU:
        return tiny_runner(noise=noise, num_pages=num_pages, page_size=page_size)
    config = tiny_config(head_dim=64)
    return tiny_runner(config, 0, noise, torch.bfloat16, num_pages, 4 * page_size, DEVICE, strict=True)


class Moody:
    """Another budget every few steps, so that drafters fall behind and catch up."""

    def __init__(self, most: int) -> None:
        self.most, self.steps = most, 0

    def budget(self, load: Load) -> Budget:
        self.steps += 1
        return Budget((self.most, 0, 2, self.most)[self.steps // 3 % 4])

    def observe(self, report: StepReport) -> None:
        assert report.emitted >= report.num_sampling


class Calls(Graphs):
    """Where there are no graphs: the same preparations, run again call by call, without a look at values."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        def blind() -> None:
            seen, links.LOOKED_AT = links.LOOKED_AT, frozenset()
            try:
                run()
            finally:
                links.LOOKED_AT = seen

        blind()  # as graphs are before they are captured
        return blind


@dataclass
class Replayed(GraphRunner):
    _graphs: Graphs = field(default_factory=Calls)


LAZY: type[GraphRunner] = GraphRunner if GPU else Replayed


class Prepared(LAZY):
    """Whatever a batch wants is ready."""

    def tree_size(self, exact: StepShape, mode: StepMode) -> int:
        return exact.nodes

    def _nearest(self, batch: Batch) -> Key | None:
        self._drop_outdated()
        wanted = self.shapes.wanted(batch.shape)
        for shape in {wanted, replace(wanted, text=0)}:
            if not {(shape, batch.mode)} & {*self._ready, *self._refused}:
                self.capture(shape, batch.mode)
        return super()._nearest(batch)


class CapturedHarness(Harness):
    """The harness with captured steps; a batch for which none is ready gets one if `eagerly` is not asked for."""

    def __init__(self, drafter, law: str, regime: Regime = EASY, moody: bool = False, eagerly: bool = False) -> None:
        target = runner(num_pages=regime.num_pages, page_size=regime.page_size)
        limits = SchedulerConfig(regime.max_rows, regime.max_running, asynchronous=True)
        budget = Moody(drafter.max_nodes) if moody else FixedBudget(drafter.max_nodes)
        scheduler = Scheduler(target.cache.tables, limits)
        self.engine = Engine(target, drafter, LAWS[law](), budget, scheduler, KeyedRng(), captures=True)
        made = self.engine.runner
        self.engine.runner = (LAZY if eagerly else Prepared)(made.parts, made.state, made.shapes, captures=True)
        self.events = []
        self.companion = None
        self.eager: list[Batch] = []  # batches that ran in steps that were not captured
        run = self.runner._run_eagerly
        self.runner._run_eagerly = lambda batch: self.eager.append(batch) or run(batch)  # type: ignore[method-assign]

    @property
    def runner(self) -> GraphRunner:
        return self.engine.runner

    def check(self) -> None:
        self.engine.target.cache.tables.check()
