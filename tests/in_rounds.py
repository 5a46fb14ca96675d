"""The harness with rounds: captured on a GPU, call by call elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import torch

from draftwood.cache.batch_state import BatchState
from draftwood.engine.controller import FixedBudget
from draftwood.engine.engine import Engine
from draftwood.engine.graph_runner import GraphRunner
from draftwood.engine.scheduler import Scheduler, SchedulerConfig
from draftwood.model.runner import ModelRunner
from draftwood.protocols import Budget, Load, StepReport
from draftwood.rng import KeyedRng
from draftwood.verifiers import LAWS
from tiny import EASY, Harness, Regime, tiny_config, tiny_runner

GPU = torch.cuda.is_available()  # there the same rounds are captured, and computed by the GPU's own kernels
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


class Replayed(GraphRunner):
    """Where there are no graphs: the same preparations, run again call by call."""

    def _captured(self, run: Callable[[], None]) -> Callable[[], None]:
        run()  # as graphs are before they are captured
        return run


class RoundHarness(Harness):
    """The harness with rounds."""

    def __init__(self, drafter, law: str, regime: Regime = EASY, moody: bool = False) -> None:
        target = runner(num_pages=regime.num_pages, page_size=regime.page_size)
        scheduler = Scheduler(
            target.cache.tables, SchedulerConfig(regime.max_rows, regime.max_running, rounds_ahead=True)
        )
        resident = drafter.resident(target)
        assert resident is not None
        length = min(512, target.cache.tables.capacity) + 64
        batch_state = BatchState(regime.max_running, length, target.cache.page_size, target.cache.scratch_page, DEVICE)
        verifier = LAWS[law]()
        kind = GraphRunner if GPU else Replayed
        rounds = kind(target, resident, lambda _: verifier, KeyedRng(), batch_state, captures=True)
        budget = Moody(drafter.max_nodes) if moody else FixedBudget(drafter.max_nodes)
        self.engine = Engine(target, drafter, verifier, budget, scheduler, KeyedRng(), rounds)
        self.events = []
        self.companion = None
        self.resident, self.batch_state = resident, batch_state

    def check(self) -> None:
        self.engine.target.cache.tables.check()
