"""Controllers by name, with settings: `auto`, `fixed:nodes=3`. The only place that names them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from draftwood.costs import StepCosts
from draftwood.engine.baselines import BanditBudget, GammaTuneBudget, GoodputBudget
from draftwood.engine.choice import READING, ChoosingBudget
from draftwood.engine.controller import FixedBudget, MeasuredBudget, MeasuredTreeBudget
from draftwood.entries import Entry, split_spec
from draftwood.errors import InvalidRequest
from draftwood.protocols import Controller, Load

AUTO = "auto"


@dataclass(frozen=True)
class Guessing:
    """What a policy may know of drafter and machine."""

    costs: StepCosts
    max_nodes: int
    depth: Callable[[int], int]  # of a tree of so many nodes
    chain: bool = True
    reads: bool = False  # see `Drafter`
    choice: tuple[str, ...] = ()  # drafters from which one is chosen for each request
    readers: frozenset[str] = frozenset()  # of these, those that read

    def catching_up(self, load: Load, behind: int) -> float:
        """Seconds until a drafter has read what it missed in so many plain steps."""
        if not self.reads or self.costs.assumed:
            return 0.0
        batch = max(load.num_running, 1)
        return READING * self.costs.at(batch * min(behind, max(1, round(load.context))), load.context, batch)


Policy = Callable[[Guessing], Controller]


def _auto(known: Guessing) -> Controller:
    kind = MeasuredBudget if known.chain else MeasuredTreeBudget
    return kind(known.costs, known.max_nodes, reads=known.reads)


def _fixed(nodes: int) -> Policy:
    if nodes < -1:
        raise ValueError("nodes must be at least 0, or -1 for as many as the drafter proposes")
    return lambda known: FixedBudget(known.max_nodes if nodes == -1 else min(nodes, known.max_nodes))


POLICIES: Mapping[str, Entry] = {
    AUTO: Entry(
        lambda: _auto,
        {},
        "the most tokens per second by what steps cost and gain here, promises first; corrects itself",
    ),
    "fixed": Entry(_fixed, {"nodes": -1}, "always so many nodes; -1: as many as the drafter proposes"),
    "off": Entry(lambda: lambda known: FixedBudget(0), {}, "plain decoding"),
    "goodput": Entry(
        lambda: lambda known: GoodputBudget(known.costs, known.max_nodes, known.depth),
        {},
        "SmartSpec's formula: one chance for all nodes, drafting has to win by a tenth",
    ),
    "gammatune": Entry(
        lambda: lambda known: GammaTuneBudget(known.max_nodes, known.depth(known.max_nodes)),
        {},
        "GammaTune: the length follows how many tokens are accepted; never stops",
    ),
    "bandit": Entry(
        lambda seed: lambda known: BanditBudget(known.max_nodes, known.catching_up, seed),
        {"seed": 0},
        "Nightjar's bandit: the size measured fastest at this load, and others by chance",
    ),
}


def find_policy(spec: str) -> Policy:
    """A policy by name; refuses unknown names and settings."""
    name, settings = split_spec(spec)
    if name not in POLICIES:
        raise InvalidRequest(f"Unknown controller '{name}': choose one of {', '.join(POLICIES)}.")
    return POLICIES[name].build("controller", name, settings)


def make_controller(spec: str, known: Guessing) -> Controller:
    """The controller of an engine; a drafter that proposes nothing needs none."""
    policy = find_policy(spec)
    controller = policy(known) if known.max_nodes else FixedBudget(0)
    return ChoosingBudget(controller, known.costs, known.choice, known.readers) if known.choice else controller
