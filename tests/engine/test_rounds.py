"""Rounds on the device, the host one behind: the same tokens as plain decoding, whatever the schedule."""

from __future__ import annotations

import pytest
import torch

from draftwood.cache.seats import Seats
from draftwood.drafters.model import ModelDrafter
from draftwood.drafters.ngram import NgramDrafter
from draftwood.drafters.none import NoDrafter
from draftwood.drafters.scripted import ScriptedDrafter
from draftwood.engine.controller import FixedBudget
from draftwood.engine.engine import Engine
from draftwood.engine.rounds import Rounds
from draftwood.engine.scheduler import Scheduler, SchedulerConfig
from draftwood.growers import Coupled, Independent, Levels, chain
from draftwood.growers.pickers import Best
from draftwood.protocols import Budget, Load, StepReport
from draftwood.request import SamplingParams
from draftwood.rng import KeyedRng
from draftwood.verifiers import LAWS
from tiny import Ask, Harness, Regime, generated, tiny_runner, with_arrivals

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Moody:
    """Another budget every few steps, so that drafters fall behind and catch up."""

    def __init__(self, most: int) -> None:
        self.most, self.steps = most, 0

    def budget(self, load: Load) -> Budget:
        self.steps += 1
        return Budget((self.most, 0, 2, self.most)[self.steps // 3 % 4])

    def observe(self, report: StepReport) -> None:
        assert report.emitted >= report.num_sampling


class RoundHarness(Harness):
    """The harness with rounds."""

    def __init__(self, drafter, law: str, regime: Regime = Regime(), moody: bool = False) -> None:  # noqa: B008
        target = tiny_runner(num_pages=regime.num_pages, page_size=regime.page_size, device=DEVICE)
        scheduler = Scheduler(
            target.cache.tables, SchedulerConfig(regime.max_rows, regime.max_running, rounds_ahead=True)
        )
        resident = drafter.resident(target)
        assert resident is not None
        length = min(512, target.cache.tables.capacity) + 64
        seats = Seats(regime.max_running, length, regime.page_size, target.cache.scratch_page, DEVICE)
        verifier = LAWS[law]()
        rounds = Rounds(target, resident, lambda _: verifier, KeyedRng(), seats, captures=False)
        budget = Moody(drafter.max_nodes) if moody else FixedBudget(drafter.max_nodes)
        self.engine = Engine(target, drafter, verifier, budget, scheduler, KeyedRng(), rounds)
        self.events = []

    def check(self) -> None:
        self.engine.target.cache.tables.check()


def plain(asks: list[Ask]) -> list[list[int]]:
    return generated(Harness(tiny_runner(), NoDrafter(), LAWS["match"]()).run(asks))


def asks(temperature: float, count: int = 5, **more) -> list[Ask]:
    prompts = [(1, 2, 3, 1, 2), (5,), (7, 7, 8, 7, 7), tuple(range(1, 12)) * 3, (4, 4), (9, 1, 9, 1, 9)]
    return [
        Ask(p, SamplingParams(temperature=temperature, seed=i, max_tokens=10 + 7 * i, **more))
        for i, p in enumerate(prompts[:count])
    ]


def draft(grower, page_size: int = 4, num_pages: int = 200) -> ModelDrafter:
    return ModelDrafter(tiny_runner(noise=0.2, device=DEVICE, page_size=page_size, num_pages=num_pages), grower)


DRAFTERS = {
    "none": lambda **_: NoDrafter(),
    "ngram": lambda **_: NgramDrafter(nodes=6, longest=3, shortest=1),
    "branches": lambda **_: NgramDrafter(nodes=6, longest=3, shortest=1, branches=3),
    "scripted": lambda **_: ScriptedDrafter(lambda tokens: [[1, 2, 3], [5, tokens[-1] % 13], [5, 5]], 7),
    "scripted chain": lambda **_: ScriptedDrafter(lambda tokens: [[t % 13 for t in tokens[-3:]]], 4, chain=True),
    "chain": lambda **kw: draft(chain(5), **kw),
    "tree": lambda **kw: draft(Levels((2, 2, 1), Best()), **kw),
    "coupled": lambda **kw: draft(Levels((2, 1, 1), Coupled()), **kw),
    "sampled": lambda **kw: draft(Levels((1, 1, 1), Independent()), **kw),
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", DRAFTERS)
def test_rounds_give_the_tokens_of_plain_decoding(name: str, temperature: float) -> None:
    wanted = asks(temperature)
    assert generated(RoundHarness(DRAFTERS[name](), "match").run(wanted)) == plain(wanted)


REGIMES = {
    "small chunks": Regime(max_rows=7),
    "few seats": Regime(max_running=2),
    "preemption": Regime(num_pages=24, max_running=6),
}


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("name", DRAFTERS)
def test_whatever_the_schedule(name: str, regime: str) -> None:
    hard = REGIMES[regime]
    wanted = with_arrivals(asks(1.0, 6), 2)
    drafter = DRAFTERS[name](num_pages=hard.num_pages)
    harness = RoundHarness(drafter, "match", hard, moody=True)
    assert generated(harness.run(wanted)) == plain(wanted)
    if regime == "preemption":
        assert harness.engine.scheduler.num_preemptions > 0
