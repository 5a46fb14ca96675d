"""Budgets: a fixed one, and one that reads what rows cost and remembers what came true."""

from __future__ import annotations

from dataclasses import replace

import pytest

from draftwood.costs import LIKE_OTHER_GPUS, StepCosts
from draftwood.engine.controller import FixedBudget, MeasuredBudget, MeasuredTreeBudget
from draftwood.engine.reasons import RULE, BestRate, kind_of
from draftwood.engine.timing import CorrectedCosts
from draftwood.protocols import Budget, Load, StepReport

FLAT = StepCosts((1, 64), (64,), ((1.0, 1.2),), 0.0)
STEEP = StepCosts((1, 64), (64,), ((1.0, 64.0),), 0.0)
UP_TO_FOUR = StepCosts((1, 4, 5, 64), (64,), ((1.0, 1.05, 3.0, 40.0),), 0.0)
ALONE = Load(num_running=1, num_waiting=0, context=64)


def report(*outcomes: tuple[int, int], draft_seconds: float = 0.0) -> StepReport:
    drafted, accepted = (sum(side) for side in zip(*outcomes, strict=True))
    rows, room = len(outcomes) + drafted, max(nodes for nodes, _ in outcomes)
    emitted = len(outcomes) + accepted
    return StepReport(rows, len(outcomes), drafted, accepted, emitted, outcomes, draft_seconds, room=room)


def test_a_fixed_budget_learns_nothing() -> None:
    controller = FixedBudget(3)
    controller.observe(report((0, 0)))
    assert controller.budget(Load(num_running=9, num_waiting=9)).max_nodes == 3


def test_decisions_are_explained_when_somebody_asks() -> None:
    assert str(FixedBudget(1).budget(ALONE).why) == "always 1 node"
    controller = MeasuredBudget(UP_TO_FOUR, 8)
    for _ in range(50):
        controller.observe(report((3, 3)))
    assert str(controller.budget(ALONE).why).startswith("3 nodes: 3.")
    assert str(controller.budget(ALONE).why).endswith(" ms; none: 1.00 expected tokens in 1000.00 ms")
    given_up = MeasuredBudget(STEEP, 8).budget(ALONE)
    assert (given_up.max_nodes, str(given_up.why)) == (0, "no nodes pay: 1.00 expected tokens in 1000.00 ms without")
    tree = MeasuredTreeBudget(FLAT, 8).budget(ALONE)
    assert str(tree.why) == f"up to 8 nodes: one more row pays from a chance of {tree.min_accept_prob:.2f}"


def test_a_decision_says_what_it_expects_and_what_was_measured() -> None:
    controller = MeasuredBudget(FLAT, 8)
    for _ in range(30):
        controller.observe(replace(report((8, 3)), step_seconds=FLAT.at(9)))
        controller.observe(replace(report((0, 0)), step_seconds=FLAT.at(1)))
    budget = controller.budget(ALONE)
    assert kind_of(budget.why) == "best rate"
    assert budget.gain.expected == pytest.approx(4 / FLAT.at(9), rel=0.05)
    assert budget.gain.measured == pytest.approx(4 / FLAT.at(9), rel=0.05)
    assert kind_of(FixedBudget(3).budget(ALONE).why) == RULE


@pytest.mark.parametrize("kind", [MeasuredBudget, MeasuredTreeBudget])
def test_a_step_is_predicted_from_its_rows_and_recent_drafting(kind: type[MeasuredBudget | MeasuredTreeBudget]) -> None:
    controller = kind(FLAT, 8)
    plain, guessing = report((0, 0)), report((3, 1))
    assert controller.predicted_seconds(plain) == pytest.approx(FLAT.at(1, 0, 1))
    assert controller.predicted_seconds(guessing) == pytest.approx(FLAT.at(4, 0, 1))
    for _ in range(200):
        controller.observe(report((3, 1), draft_seconds=0.6))
    assert controller.predicted_seconds(plain) == pytest.approx(FLAT.at(1, 0, 1))
    assert controller.predicted_seconds(guessing) == pytest.approx(FLAT.at(4, 0, 1) + 0.6, rel=0.01)
    assert kind(LIKE_OTHER_GPUS, 8).predicted_seconds(guessing) is None, "costs of another machine are no prediction"


def test_a_budget_cannot_be_negative() -> None:
    with pytest.raises(ValueError, match="negative"):
        FixedBudget(-1)


def test_rows_that_cost_nothing_are_used() -> None:
    assert MeasuredBudget(FLAT, 8).budget(ALONE).max_nodes == 8


def test_rows_that_cost_a_step_each_are_not() -> None:
    assert MeasuredBudget(STEEP, 8).budget(ALONE).max_nodes == 0


def test_the_step_of_the_table_is_the_size_of_the_tree() -> None:
    controller = MeasuredBudget(UP_TO_FOUR, 8)
    for _ in range(50):
        controller.observe(report((3, 3)))
    assert controller.budget(ALONE).max_nodes == 3


def test_guesses_that_fail_are_given_up_and_tried_again() -> None:
    gentle = StepCosts((1, 9), (64,), ((1.0, 2.2),), 0.0)
    controller = MeasuredBudget(gentle, 8)
    assert controller.budget(ALONE).max_nodes > 0
    for _ in range(60):
        controller.observe(report((8, 0)))
    assert controller.budget(ALONE).max_nodes == 0
    for _ in range(1200):
        controller.observe(report((0, 0)))
    assert controller.budget(ALONE).max_nodes > 0


def test_survival_is_learnt_by_depth() -> None:
    controller = MeasuredBudget(FLAT, 4)
    for _ in range(300):
        controller.observe(report((4, 2)))
    first, second, third, fourth = controller.survival()
    assert first > second > 0.9
    assert 0.1 > third > fourth


def test_a_slow_drafter_is_asked_for_less() -> None:
    quick, slow = (MeasuredBudget(FLAT, 8) for _ in range(2))
    for _ in range(60):
        quick.observe(report((8, 4)))
        slow.observe(report((8, 4), draft_seconds=8.0))
    assert slow.budget(ALONE).max_nodes < quick.budget(ALONE).max_nodes


def test_one_slow_proposal_is_no_verdict() -> None:
    controller = MeasuredBudget(FLAT, 8)
    controller.observe(report((8, 4), draft_seconds=8.0))
    assert controller.budget(ALONE).max_nodes > 0
    for _ in range(40):
        controller.observe(report((8, 4), draft_seconds=80.0))
    assert controller.budget(ALONE).max_nodes == 0
    for _ in range(1800):
        controller.observe(report((0, 0)))
    assert controller.budget(ALONE).max_nodes > 0


def test_a_batch_fills_the_rows_by_itself() -> None:
    crowded = Load(num_running=32, num_waiting=0, context=64)
    knee = StepCosts((1, 32, 64), (64,), ((1.0, 1.1, 4.0),), 0.0)
    controller = MeasuredBudget(knee, 4)
    assert controller.budget(ALONE).max_nodes == 4
    assert controller.budget(crowded).max_nodes == 0


def test_a_tree_is_told_what_a_node_must_be_worth() -> None:
    cheap = MeasuredTreeBudget(FLAT, 16).budget(ALONE)
    dear = MeasuredTreeBudget(STEEP, 16).budget(ALONE)
    assert cheap.max_nodes == dear.max_nodes == 16
    assert 0 < cheap.min_accept_prob < 0.01
    assert dear.min_accept_prob == 0.9


def test_where_everybody_runs_all_nodes_few_proposals_are_not_worth_them() -> None:
    costs = StepCosts((1, 10, 90), (64,), ((1.0, 1.1, 3.0),), 0.0)
    controller = MeasuredBudget(costs, 8)
    for _ in range(200):
        controller.observe(report((8, 8), *[(0, 0)] * 9))
    ten = Load(num_running=10, num_waiting=0, context=64)
    assert controller.budget(ten).max_nodes == 8
    assert controller.budget(replace(ten, padded=True)).max_nodes == 0


def test_now_and_then_somebody_looks_who_has_proposals() -> None:
    costs = StepCosts((1, 10, 90), (64,), ((1.0, 1.1, 3.0),), 0.0)
    ten = Load(num_running=10, num_waiting=0, context=64, padded=True)
    controller = MeasuredBudget(costs, 8)
    nobody, few, everybody = report(*[(0, 0)] * 10), report((8, 8), *[(0, 0)] * 9), report(*[(8, 8)] * 10)
    for _ in range(200):
        controller.observe(few)

    def run(steps: int, found: StepReport) -> list[Budget]:
        budgets = []
        for _ in range(steps):
            budgets.append(controller.budget(ten))
            controller.observe(found if budgets[-1].max_nodes else nobody)
        return [budget for budget in budgets if budget.max_nodes]

    looks = run(2000, few)
    prices = [costs.at(16 * (1 + look.max_nodes)) / costs.at(16) - 1 for look in looks]  # ten run as sixteen
    assert sum(prices) == pytest.approx(2000 * MeasuredBudget.LOOKING, rel=0.1), "no more time than it may take"
    assert str(looks[0].why) == "1 node, to see who has something to propose by now"
    assert len(run(4000, everybody)) > 1000, "it saw, and guesses again"


def test_drafters_that_always_propose_are_not_looked_at() -> None:
    steep = StepCosts((1, 10, 90), (64,), ((1.0, 2.0, 30.0),), 0.0)
    ten = Load(num_running=10, num_waiting=0, context=64, padded=True)
    controller = MeasuredBudget(steep, 8)
    for _ in range(500):
        controller.observe(report(*[(8, 0)] * 10))
    for _ in range(500):
        assert controller.budget(ten).max_nodes == 0
        controller.observe(report(*[(0, 0)] * 10))


def test_a_step_that_was_disturbed_says_nothing_about_drafting() -> None:
    controllers = [MeasuredBudget(FLAT, 8) for _ in range(3)]
    for _ in range(60):
        for controller, seconds in zip(controllers, (FLAT.at(9), None, 9.0), strict=True):
            controller.observe(replace(report((8, 4)), draft_seconds=None, step_seconds=seconds))
    quick, unknown, slow = (controller.budget(ALONE).max_nodes for controller in controllers)
    assert quick == unknown > slow


ROUNDS = replace(ALONE, padded=True)
GPU = StepCosts((1, 32, 64, 128, 512, 2048), (64,), ((3.8, 4.5, 4.6, 5.2, 10.5, 40.0),), 0.0)


def test_trees_of_one_size_for_all_get_the_size_that_pays() -> None:
    controller = MeasuredTreeBudget(GPU, 63)
    for _ in range(100):
        controller.observe(report((63, 3)))
    assert controller.budget(ROUNDS).max_nodes == 63
    crowded = controller.budget(replace(ROUNDS, num_running=32)).max_nodes
    assert 0 < crowded < 16  # 2,048 rows would take ten times as long as 32
    assert "expected tokens" in str(controller.budget(ROUNDS).why)


def test_trees_that_gain_nothing_are_given_up_and_tried_again() -> None:
    controller = MeasuredTreeBudget(GPU, 63)
    assert controller.budget(ROUNDS).max_nodes > 0
    for _ in range(200):
        controller.observe(report((63, 0)))
    assert controller.budget(ROUNDS).max_nodes == 0
    for _ in range(400):
        controller.observe(report((0, 0)))
    assert controller.budget(ROUNDS).max_nodes > 0


def test_trees_that_take_long_to_guess_are_not_worth_it() -> None:
    controller = MeasuredTreeBudget(GPU, 63)
    for _ in range(200):
        controller.observe(report((63, 1), draft_seconds=9.0))
    assert controller.budget(ROUNDS).max_nodes == 0


@pytest.mark.parametrize("kind", [MeasuredBudget, MeasuredTreeBudget])
def test_what_a_long_context_takes_is_not_laid_to_guesses(kind: type[MeasuredBudget | MeasuredTreeBudget]) -> None:
    costs = StepCosts((1, 8), (64, 1024), ((1.0, 1.1), (5.0, 5.5)), 0.0)
    controller, load = kind(costs, 5), replace(ROUNDS, context=1024)
    for _ in range(50):
        controller.observe(replace(report((5, 5)), step_seconds=costs.at(6, 1024), context=1024))
    why = controller.budget(load).why
    assert isinstance(why, BestRate)
    assert (why.nodes, why.best.seconds) == (5, pytest.approx(costs.at(6, 1024)))


def test_what_rows_cost_is_assumed_where_nobody_has_measured_it() -> None:
    """What is right half the time pays until a batch fills the chip, what is always right still then, wrong never."""
    for outcomes, wanted in ((((5, 0), (5, 1)), (2, 1, 0)), (((5, 5),), (5, 5, 5)), (((5, 0),), (0, 0, 0))):
        controller = MeasuredBudget(LIKE_OTHER_GPUS, 5)
        for _ in range(100):
            controller.observe(report(*outcomes))
        loads = [replace(ROUNDS, num_running=batch) for batch in (1, 32, 256)]
        assert tuple(controller.budget(load).max_nodes for load in loads) == wanted


def test_assumed_costs_do_not_tell_what_drafting_takes() -> None:
    """A slower chip than the one they are of is not a slow drafter."""
    controller = MeasuredBudget(LIKE_OTHER_GPUS, 5)
    for _ in range(50):
        controller.observe(replace(report((5, 5)), draft_seconds=None, step_seconds=9e9))
    budget = controller.budget(ROUNDS)
    assert budget.max_nodes == 5
    assert str(budget.why).endswith("none: 1.00 expected tokens in 1.00 plain steps (assumed)")


def test_what_drafting_takes_is_not_multiplied_by_the_batch() -> None:
    """A draft model reads its weights once for everybody: dear for one, it is cheap for thirty."""
    costs = StepCosts((1, 512), (64,), ((4.0, 10.4),), 0.0)
    controller = MeasuredBudget(costs, 12)
    for _ in range(60):
        controller.observe(replace(report((12, 12)), step_seconds=costs.at(13) + 5.4))
    many = replace(ROUNDS, num_running=32)
    assert controller.budget(many).max_nodes == 12
    for _ in range(60):  # and if it is not, that is said of this batch only
        controller.observe(replace(report(*[(12, 12)] * 32), step_seconds=costs.at(32 * 13) + 900))
    assert controller.budget(many).max_nodes == 0
    assert controller.budget(ROUNDS).max_nodes == 12


def test_steps_without_room_do_not_say_that_nobody_has_a_guess() -> None:
    controller = MeasuredBudget(GPU, 4)
    for _ in range(50):
        controller.observe(report(*[(4, 4)] * 8))
    eight = replace(ROUNDS, num_running=8)
    before = controller.budget(eight)
    for _ in range(20):
        controller.observe(report(*[(0, 0)] * 8))
    assert controller.budget(eight).max_nodes == before.max_nodes == 4


@pytest.mark.parametrize("kind", [MeasuredBudget, MeasuredTreeBudget])
def test_room_that_nobody_uses_is_given_up(kind: type[MeasuredBudget | MeasuredTreeBudget]) -> None:
    controller, crowd = kind(GPU, 4), replace(ROUNDS, num_running=64)
    assert controller.budget(crowd).max_nodes > 0
    for _ in range(200):
        controller.observe(replace(report(*[(0, 0)] * 64), room=4))
    assert controller.budget(crowd).max_nodes == 0


def test_drafts_have_to_pay_for_all_that_run_together() -> None:
    """A second row takes a tenth of a step more: worth it where one draft of five is right, whichever sequences gain
    by it, and not where one of sixteen is.
    """
    costs = StepCosts((1, 32, 64), (64,), ((1.0, 1.0, 1.1),), 0.0)
    controllers = MeasuredBudget(costs, 1), MeasuredBudget(costs, 1), MeasuredTreeBudget(costs, 1)
    for _ in range(200):
        controllers[0].observe(report(*[(1, 1)] * 2, *[(1, 0)] * 30))
        controllers[1].observe(report(*[(1, 1)] * 6, *[(1, 0)] * 26))
        controllers[2].observe(report(*[(1, 1)] * 6, *[(1, 0)] * 26))
    crowd = replace(ROUNDS, num_running=32)
    assert [controller.budget(crowd).max_nodes for controller in controllers] == [0, 1, 1]
    why = controllers[1].budget(crowd).why
    assert isinstance(why, BestRate)
    assert why.best.rate == pytest.approx((1 + 6 / 32) / 1.1, rel=0.01)
    assert why.best.rate > why.plain.rate


def test_rounds_are_budgeted_by_the_rows_they_run() -> None:
    """Seventeen sequences run in a round of 24, and nobody can have a size that no round has."""
    costs = StepCosts((1, 40, 41, 512), (64,), ((1.0, 1.0, 9.0, 90.0),), 0.0)
    controller = MeasuredBudget(costs, 9)
    for _ in range(50):
        controller.observe(report((9, 9)))
    crowd = Load(num_running=17, num_waiting=0, context=64)
    assert controller.budget(crowd).max_nodes == 1
    assert controller.budget(replace(crowd, padded=True)).max_nodes == 0
    sizes = [controller.budget(replace(ROUNDS, num_running=batch)).max_nodes for batch in (4, 5)]
    assert sizes == [9, 3], "of 0, 1, 2, 3, 5, 7 and 9: five sequences run in rounds of eight"


@pytest.mark.parametrize("kind", [MeasuredBudget, MeasuredTreeBudget])
def test_a_round_that_nobody_is_left_to_hear_of_says_nothing(kind: type[MeasuredBudget | MeasuredTreeBudget]) -> None:
    controller = kind(GPU, 4)
    before = controller.budget(ROUNDS)
    controller.observe(StepReport(5, 0, 0, 0, 0, room=4, step_seconds=9e9))
    assert controller.budget(ROUNDS) == before


def test_another_size_has_to_be_clearly_better_than_the_last() -> None:
    """1.7 tokens by one guess, 2.19 by two: by these tables two are 1 % better, and 1 % worse."""
    one_or_two = [StepCosts((1, 2, 3), (64,), ((1.0, 1.0, 2.19 / 1.7 / share),), 0.0) for share in (1.01, 0.99)]
    for costs, first in zip(one_or_two, (2, 1), strict=True):
        controller = MeasuredBudget(costs, 2)
        assert controller.budget(ROUNDS).max_nodes == first
        controller._timing.costs = CorrectedCosts(one_or_two[first - 1])
        assert controller.budget(ROUNDS).max_nodes == first
        controller._timing.costs = CorrectedCosts(STEEP)
        assert controller.budget(ROUNDS).max_nodes == 0
