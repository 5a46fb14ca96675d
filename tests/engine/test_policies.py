"""Controllers by name, and those of the field against a simulated machine."""

from __future__ import annotations

import pytest

from draftwood.config import EngineConfig
from draftwood.costs import LIKE_OTHER_GPUS
from draftwood.engine.baselines import BanditBudget, GammaTuneBudget, GoodputBudget
from draftwood.engine.controller import FixedBudget, MeasuredBudget, MeasuredTreeBudget
from draftwood.engine.llm import LLM
from draftwood.engine.policies import POLICIES, Guessing, find_policy, make_controller
from draftwood.errors import InvalidRequest
from draftwood.protocols import Load, StepReport
from machines import Chain, Machine

KNOWN = Guessing(LIKE_OTHER_GPUS, 7, lambda nodes: nodes)
KINDS = {
    "auto": MeasuredBudget,
    "fixed": FixedBudget,
    "off": FixedBudget,
    "goodput": GoodputBudget,
    "gammatune": GammaTuneBudget,
    "bandit": BanditBudget,
}


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_has_a_name(name: str) -> None:
    assert type(make_controller(name, KNOWN)) is KINDS[name]
    nothing = make_controller(name, Guessing(LIKE_OTHER_GPUS, 0, lambda nodes: nodes))
    assert nothing.budget(Load(1, 0)).max_nodes == 0
    assert EngineConfig(controller=name).controller == name


def test_settings_go_behind_the_name() -> None:
    def nodes(spec: str) -> int:
        return make_controller(spec, KNOWN).budget(Load(1, 0)).max_nodes

    assert [nodes(spec) for spec in ("off", "fixed", "fixed:nodes=3", "fixed:nodes=99")] == [0, 7, 3, 7]
    assert type(make_controller("auto", Guessing(LIKE_OTHER_GPUS, 7, lambda n: n, chain=False))) is MeasuredTreeBudget


@pytest.mark.parametrize("spec", ["best", "fixed:depth=3", "fixed:nodes=few", "fixed:nodes=-2", "auto:x=1"])
def test_unknown_policies_are_refused_before_anything_is_read(spec: str) -> None:
    with pytest.raises(InvalidRequest, match="controller"):
        find_policy(spec)
    with pytest.raises(InvalidRequest, match="controller"):
        LLM("a model that is nowhere", config=EngineConfig(controller=spec))


# Of the best size, after some hundred steps. None of the field's policies is as good everywhere as ours has to be.
LEARNT = {
    ("goodput", 1, 0.8): 0.9, ("goodput", 128, 0.0): 0.97,
    ("gammatune", 1, 0.8): 0.85,
    ("bandit", 1, 0.8): 0.9, ("bandit", 128, 0.0): 0.9, ("bandit", 32, 0.4): 0.85,
}  # fmt: skip


@pytest.mark.parametrize(("name", "batch", "chance"), LEARNT)
def test_the_fields_policies_find_good_sizes(name: str, batch: int, chance: float) -> None:
    machine, drafts = Machine(make_controller(name, KNOWN), batch), Chain(chance)
    machine.run(400, drafts)
    assert machine.run(400, drafts) >= LEARNT[name, batch, chance] * machine.best(7, drafts)


def test_gammatune_never_stops_and_goodput_does() -> None:
    sizes = {}
    for name in ("gammatune", "goodput"):
        machine = Machine(make_controller(name, KNOWN), 128)
        machine.run(300, Chain(0.0))
        sizes[name] = machine.sizes[200:]
    assert set(sizes["gammatune"]) == {1}
    assert sum(nodes > 0 for nodes in sizes["goodput"]) <= 2


def test_goodput_looks_again_after_a_while() -> None:
    machine = Machine(make_controller("goodput", KNOWN), 32)
    machine.run(300, Chain(0.0))
    machine.sizes.clear()
    machine.run(1500, Chain(0.9))
    assert machine.sizes[-1] > 0


def test_a_bandit_pays_for_catching_up() -> None:
    """Off is the best choice unless it would be drafted for long enough to make up for what was not read."""
    late: list[int] = []
    bandit = BanditBudget(1, lambda load, behind: late.append(behind) or 1.0)
    quick = StepReport(2, 1, 1, 1, 2, ((1, 1),), step_seconds=0.010, room=1)
    plain = StepReport(1, 1, 0, 0, 1, ((0, 0),), step_seconds=0.006)
    for report in (quick, plain):
        bandit.observe(report)
    assert bandit._best(1, Load(1, 0)) == 0
    assert late == [1]
    bandit.observe(quick)
    assert bandit._best(1, Load(1, 0)) == 1
