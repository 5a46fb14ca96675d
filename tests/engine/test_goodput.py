"""Budgets against a simulated machine: no model, only what steps cost and how often drafts are right."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from draftwood.costs import LIKE_OTHER_GPUS, StepCosts
from draftwood.drafting import padded_batch, tree_sizes
from draftwood.engine.controller import MeasuredBudget, MeasuredTreeBudget
from draftwood.engine.timing import Mean
from draftwood.protocols import Controller, Load, StepReport

PLAIN = 4e-3  # seconds of a plain step of one sequence


@dataclass(frozen=True)
class Chain:
    """Each node is right with the same chance."""

    chance: float

    def tokens(self, nodes: int) -> float:
        return 1 + sum(self.chance**depth for depth in range(1, nodes + 1))

    def accepted(self, nodes: int, rng: random.Random) -> int:
        return next((depth for depth in range(nodes) if rng.random() >= self.chance), nodes)


@dataclass(frozen=True)
class Beam:
    """A beam of 63 nodes gains so many tokens, smaller ones less: three nodes of EAGLE-3 1.1 where 63 gain 2.6."""

    largest: float
    power: float = 0.75

    def tokens(self, nodes: int) -> float:
        return 1 + self.largest * (math.log1p(nodes) / math.log(64)) ** self.power

    def accepted(self, nodes: int, rng: random.Random) -> int:
        gain = self.tokens(nodes) - 1
        return int(gain) + (rng.random() < gain % 1) if nodes else 0


Drafts = Chain | Beam


@dataclass
class Machine:
    """What steps take on it, and a controller that is told of each step as an engine on a GPU would tell it."""

    controller: Controller
    batch: int
    truth: StepCosts = LIKE_OTHER_GPUS
    forward: float = 0.04  # of a plain step, for each forward of the drafter
    noise: float = 0.02
    spikes: float = 0.01  # share of steps that take three times as long
    seed: int = 0
    sizes: list[int] = field(default_factory=list)  # of the steps that ran

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def seconds(self, nodes: int, drafts: Drafts) -> float:
        depth = nodes if isinstance(drafts, Chain) else (nodes + 1).bit_length() - 1
        rows = padded_batch(self.batch) * (1 + nodes)
        return PLAIN * (self.truth.at(rows, 64, self.batch) + self.forward * depth)

    def rate(self, nodes: int, drafts: Drafts) -> float:
        return drafts.tokens(nodes) / self.seconds(nodes, drafts)

    def best(self, most: int, drafts: Drafts) -> float:
        return max(self.rate(nodes, drafts) for nodes in tree_sizes(most))

    def run(self, steps: int, drafts: Drafts) -> float:
        """Expected tokens of a sequence per second, over all of these steps."""
        tokens = seconds = 0.0
        for _ in range(steps):
            nodes = self.controller.budget(Load(self.batch, 0, 64, padded=True)).max_nodes
            self.sizes.append(nodes)
            took = self.seconds(nodes, drafts)
            tokens, seconds = tokens + drafts.tokens(nodes), seconds + took
            accepted = [drafts.accepted(nodes, self.rng) for _ in range(self.batch)]
            rows = padded_batch(self.batch) * (1 + nodes)
            measured = took * (3.0 if self.rng.random() < self.spikes else 1 + self.noise * self.rng.random())
            self.controller.observe(
                StepReport(
                    rows, self.batch, nodes * self.batch, sum(accepted), self.batch + sum(accepted),
                    tuple((nodes, count) for count in accepted), None, measured, 64, nodes,
                )
            )  # fmt: skip
        return tokens / seconds


KINDS: dict[str, tuple[Callable[..., Controller], int, dict[str, Drafts]]] = {
    "chain": (MeasuredBudget, 7, {"high": Chain(0.8), "low": Chain(0.4), "zero": Chain(0.0)}),
    "beam": (MeasuredTreeBudget, 63, {"high": Beam(5.0), "low": Beam(1.5), "zero": Beam(0.0)}),
}
BATCHES = (1, 8, 32, 128, 256)
# Of the best size, soon after a change: a tree tells of its own size only, a chain of all that are shorter.
AFTER_A_CHANGE = {"chain": 0.97, "beam": 0.9}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("profile", ["high", "low", "zero"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_budget_finds_the_best_size_for_every_load(kind: str, profile: str, batch: int) -> None:
    """From an assumed table, within a hundred steps."""
    make, most, profiles = KINDS[kind]
    machine, drafts = Machine(make(LIKE_OTHER_GPUS, most), batch), profiles[profile]
    machine.run(100, drafts)
    rate = machine.run(600, drafts)
    assert rate >= 0.97 * machine.best(most, drafts)
    assert rate >= 0.99 * machine.rate(0, drafts)


@pytest.mark.parametrize("batch", [32, 64, 128])
def test_a_large_beam_comes_down_to_small_trees_in_a_crowd(batch: int) -> None:
    """EAGLE-3 on chats: 63 nodes gain 2.6 tokens, three 1.1. It is never given up while that pays."""
    machine, drafts = Machine(MeasuredTreeBudget(LIKE_OTHER_GPUS, 63), batch), Beam(2.6)
    assert machine.best(63, drafts) > 1.02 * machine.rate(0, drafts)
    machine.run(100, drafts)
    rate = machine.run(300, drafts)
    sizes = machine.sizes[100:]
    assert sum(1 <= nodes <= 3 for nodes in sizes) >= 0.9 * len(sizes)
    assert rate >= 0.97 * machine.best(63, drafts)
    if batch == 32:
        assert rate >= 1.5 * machine.rate(0, drafts)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("batch", [8, 64])
def test_a_wrong_table_corrects_itself(batch: int, seed: int) -> None:
    """Each time of the table is off by a factor between 0.5 and 2."""
    rng = random.Random(seed)
    wrong = [PLAIN * seconds * 2 ** rng.uniform(-1, 1) for seconds in LIKE_OTHER_GPUS.seconds[0]]
    table = StepCosts(LIKE_OTHER_GPUS.rows, (64,), (tuple(wrong),), 0.0)
    machine, drafts = Machine(MeasuredTreeBudget(table, 63), batch, seed=seed), Beam(2.6)
    machine.run(100, drafts)
    rate = machine.run(300, drafts)
    assert rate >= 0.93 * machine.best(63, drafts)
    assert rate >= 0.99 * machine.rate(0, drafts)


@pytest.mark.parametrize("batch", [8, 32])
@pytest.mark.parametrize("kind", KINDS)
def test_traffic_may_change_from_code_to_chat_and_back(kind: str, batch: int) -> None:
    """Fifty steps after each change it runs at the new rate."""
    make, most, profiles = KINDS[kind]
    machine = Machine(make(LIKE_OTHER_GPUS, most), batch)
    for name in ("high", "low", "high"):
        machine.run(50, profiles[name])
        rate = machine.run(200, profiles[name])
        assert rate >= AFTER_A_CHANGE[kind] * machine.best(most, profiles[name]), name
        assert rate >= 0.99 * machine.rate(0, profiles[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_given_up_is_taken_up_again(kind: str) -> None:
    """At most a hundred steps after drafts have begun to be right."""
    make, most, profiles = KINDS[kind]
    machine = Machine(make(LIKE_OTHER_GPUS, most), 32)
    machine.run(400, profiles["zero"])
    assert sum(nodes > 0 for nodes in machine.sizes[20:]) <= 0.06 * 380
    machine.run(100, profiles["high"])
    rate = machine.run(200, profiles["high"])
    assert rate >= AFTER_A_CHANGE[kind] * machine.best(most, profiles["high"])


def test_a_mode_that_was_measured_faster_is_not_left_for_a_ratio() -> None:
    """A table says that steps with drafts take four times as long; the clock says otherwise."""
    crowd = Load(32, 0, 64, padded=True)
    slow = StepCosts((1, 32, 33, 64, 2048), (64,), ((1.0, 1.1, 4.0, 4.1, 90.0),), 0.0)
    controller = MeasuredTreeBudget(slow, 63)
    assert controller.budget(crowd).max_nodes == 0
    controller._last = 1
    controller._rates._known = {(6, False): Mean(1.0, 5.0), (6, True): Mean(1.4, 10.0)}
    budget = controller.budget(crowd)
    assert budget.max_nodes == 1
    assert str(budget.why) == "1 node: measured 1.40 times as fast as without"


def test_a_drafter_that_has_to_catch_up_is_taken_up_later() -> None:
    """After a pause it reads what it missed; one that keeps nothing of its own does not."""
    starts = []
    for reads in (False, True):
        machine = Machine(MeasuredBudget(LIKE_OTHER_GPUS, 7, reads=reads), 8)
        machine.run(400, Chain(0.0))
        machine.sizes.clear()
        machine.run(400, Chain(0.8))
        starts.append(next(step for step, nodes in enumerate(machine.sizes) if nodes > 2))
    assert starts[0] < starts[1]
