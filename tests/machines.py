"""A simulated machine for budgets: no model, only what steps cost and how often drafts are right."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from draftwood.costs import LIKE_OTHER_GPUS, StepCosts
from draftwood.drafting import padded_batch, tree_sizes
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
