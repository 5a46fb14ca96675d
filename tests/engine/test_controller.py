import pytest

from draftwood.engine.controller import FixedBudget
from draftwood.protocols import Load, StepReport


def test_a_fixed_budget_learns_nothing() -> None:
    controller = FixedBudget(3)
    controller.observe(StepReport(num_rows=1, num_sampling=1, drafted=0, accepted=0, emitted=1))
    assert controller.budget(Load(num_running=9, num_waiting=9)).max_nodes == 3


def test_a_budget_cannot_be_negative() -> None:
    with pytest.raises(ValueError, match="negative"):
        FixedBudget(-1)
