"""Promises and priorities: who comes first, what steps are sized for, and that no request starves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from draftwood.cache.blocks import PageTables
from draftwood.costs import LIKE_OTHER_GPUS, StepCosts
from draftwood.engine.controller import MeasuredBudget, MeasuredTreeBudget
from draftwood.engine.scheduler import LEAST_PIECE, Scheduler, SchedulerConfig
from draftwood.engine.sequence import HEAD_START, Sequence
from draftwood.engine.text import TextStream
from draftwood.errors import InvalidRequest
from draftwood.protocols import Budget, Load, Pace, StepReport
from draftwood.request import SamplingParams, Slo, SpeculationStats
from draftwood.tree import HostVerdict
from tiny import LetterDecoder

MS = 1e-3


def answer(number: int, arrived: float = 0.0, prompt: int = 1, tokens: int = 1, tenant: str = "", **asked) -> Sequence:
    return Sequence(
        id=number,
        request_id=number,
        index=0,
        tokens=[1] * prompt,
        params=SamplingParams(max_tokens=tokens, **asked),
        seed=0,
        max_length=prompt + tokens,
        stop_ids=frozenset(),
        bad_words=(),
        text=TextStream(LetterDecoder(), ()),
        arrived=arrived,
        tenant=tenant,
    )


class Clocked:
    """A scheduler whose time is ours: a step takes a second and gives a token to all that run."""

    def __init__(self, places: int = 1, pages: int = 64) -> None:
        self.now = 0.0
        self.scheduler = Scheduler(PageTables(pages, 4), SchedulerConfig(64, places, 1000), clock=lambda: self.now)
        self.served: list[int] = []

    def step(self, budget: Budget | None = None) -> None:
        prompts, ready = self.scheduler.schedule(budget or Budget(0))
        self.scheduler.commit(prompts, HostVerdict([], [], [], [], []))
        self.now += 1.0
        count = len(ready.items)
        nothing = [0] * count
        self.served += ready.seq_ids
        self.scheduler.commit(ready, HostVerdict([[2]] * count, nothing, nothing, [0.0] * count, [True] * count))


@pytest.mark.parametrize(
    ("asked", "served"),
    [
        ([{}, {}, {}], [0, 1, 2]),
        ([{}, {"priority": 1}, {"priority": -1}], [2, 0, 1]),
        ([{}, {"slo": Slo(ttft_ms=200)}, {"slo": Slo(ttft_ms=100)}], [2, 1, 0]),
        ([{"slo": Slo(ttft_ms=100)}, {"priority": -1}], [1, 0]),
        ([{"slo": Slo(tpot_ms=1)}, {}], [0, 1]),  # how fast it goes on says nothing about when it begins
    ],
)
def test_waiting_requests_take_turns(asked: list[dict], served: list[int]) -> None:
    run = Clocked()
    run.scheduler.add([answer(i, **own) for i, own in enumerate(asked)])
    while run.scheduler.has_work:
        run.step()
    assert run.served == served


def test_no_request_starves_behind_urgent_ones() -> None:
    """An urgent request arrives every second, as many as there are places; the patient one waits for the head start of
    two levels and no longer.
    """
    run = Clocked()
    run.scheduler.add([answer(0, priority=1)])
    for number in range(1, 200):
        run.scheduler.add([answer(number, arrived=run.now, priority=-1)])
        run.step()
    assert 2 * HEAD_START <= run.served.index(0) <= 2 * HEAD_START + 1


def test_tenants_come_before_priorities() -> None:
    """A priority decides among the requests of one tenant: it takes nothing from others."""
    run = Clocked()
    run.scheduler.add([answer(i, tenant="a", priority=-100) for i in range(3)])
    run.scheduler.add([answer(3, tenant="b", priority=100)])
    while run.scheduler.has_work:
        run.step()
    assert run.served == [0, 3, 1, 2]


def test_preemption_takes_from_low_priorities_first() -> None:
    run = Clocked(places=3, pages=6)
    last, middle, first = (answer(i, prompt=4, tokens=16, priority=2 - i) for i in range(3))
    run.scheduler.add([last, middle, first])
    while first in run.scheduler.running or first in run.scheduler.waiting:
        run.step()
        run.scheduler.tables.check()
    assert first.preemptions == 0
    assert last.preemptions >= 1
    while run.scheduler.has_work:
        run.step()
    assert [seq.num_generated for seq in (last, middle, first)] == [16, 16, 16]


def test_an_urgent_request_goes_before_one_that_was_preempted() -> None:
    run = Clocked()
    preempted, plain, urgent = answer(0, tokens=4), answer(1), answer(2, priority=-5)
    run.scheduler.add([preempted])
    run.step()
    run.scheduler._preempt(preempted)
    run.scheduler.add([plain, urgent])
    while run.scheduler.has_work:
        run.step()
    assert run.served == [0, 2, 0, 0, 0, 1]


COSTS = StepCosts((1, 1001), (64,), ((10 * MS, 110 * MS),), 0.0)  # 10 ms, and 0.1 ms for each further row


def test_long_prompts_are_cut_to_what_others_were_promised() -> None:
    """A step with 90 rows of prompts takes 19 ms. No rows are left where the next token is late already, but a prompt
    is still read, and a promise that no step can keep cuts nothing.
    """
    controller = MeasuredBudget(COSTS, 0)

    def rows(*paces: Pace) -> int | None:
        return controller.budget(Load(1, 1, 64, paces=paces)).max_prompt_rows

    assert rows() is None
    assert rows(Pace(20 * MS, 20 * MS)) == pytest.approx(80, abs=1)  # a tenth of the time is kept
    assert rows(Pace(20 * MS, 2.0)) == pytest.approx(80, abs=1), "ahead or not, the next token comes in time"
    assert rows(Pace(90 * MS, 90 * MS), Pace(20 * MS, 20 * MS)) == pytest.approx(80, abs=1)
    assert rows(Pace(20 * MS, -1.0)) == 0
    assert rows(Pace(5 * MS, 5 * MS)) is None
    mixed = StepReport(1, 1, 0, 0, 1, ((0, 0),), step_seconds=None, prompt_rows=89, whole_seconds=36 * MS)
    for _ in range(20):
        controller.observe(mixed)
    assert rows(Pace(20 * MS, 20 * MS)) < 40, "prompts take twice as long here as the table says"


@pytest.mark.parametrize(("most", "expected"), [(None, 49), (40, 40), (3, LEAST_PIECE)])
def test_the_scheduler_reads_no_more_of_a_prompt_than_it_may(most: int | None, expected: int) -> None:
    run = Clocked(places=4)
    run.scheduler.add([answer(0, tokens=50, slo=Slo(tpot_ms=20))])
    run.step()
    run.scheduler.add([answer(1, prompt=50)])
    prompts, ready = run.scheduler.schedule(Budget(0, max_prompt_rows=most))
    assert prompts.num_rows == expected
    assert ready.seq_ids == [0]


def test_a_pace_is_what_is_left_until_the_next_token() -> None:
    run = Clocked(places=2)
    run.scheduler.add([answer(0, tokens=9, slo=Slo(tpot_ms=1500)), answer(1, tokens=9)])
    assert run.scheduler.load.paces == (), "the first token is another promise"
    run.step()
    run.step()
    assert run.scheduler.load.paces == (Pace(1.5, 2.0),)


@pytest.mark.parametrize(
    ("took", "seconds", "gain", "need"),
    [
        (0.0, 1.2, 1.0, 0.0),  # in time with the target's own token
        (0.0, 1.5, 1.0, 0.0),
        (0.0, 3.0, 1.0, 1.0),
        (1.0, 3.0, 1.0, 1.1 * 2 - 1),  # late: bit by bit
        (0.0, 9.0, 1.0, 0.0),  # six tokens a step are more than it will ever have
        (0.0, 9.0, 4.0, 5.0),
    ],
)
def test_what_a_promise_needs_of_a_step(took: float, seconds: float, gain: float, need: float) -> None:
    seq = answer(0, tokens=9, slo=Slo(tpot_ms=1500))
    assert seq.need(1.0, 3.0) == 0, "the first token is another promise"
    seq.first_token, seq.gain = 0.0, gain
    seq.tokens.append(1)
    assert seq.need(took, seconds) == pytest.approx(need)


def told(controller: MeasuredBudget, nodes: int, batch: int, accepted: int, seconds: float) -> None:
    outcomes = ((nodes, accepted),) * batch
    rows = batch * (1 + nodes)
    controller.observe(
        StepReport(
            rows, batch, nodes * batch, accepted * batch, batch * (1 + accepted), outcomes, None, seconds, 64, nodes
        )
    )


def test_steps_are_sized_for_promises_first() -> None:
    """The chains of others gain so much that long steps are best for all together. One sequence whose guesses are never
    right has been promised a token every 25 ms: it gets short steps, as long as that can be kept.
    """
    controller = MeasuredBudget(COSTS, 7)
    for nodes, accepted in ((7, 5), (5, 5), (3, 3), (0, 0)) * 40:
        told(controller, nodes, 32, accepted, COSTS.at(32 * (1 + nodes)))
    load = Load(32, 0, 64, padded=True)
    free = controller.budget(load).max_nodes
    assert free == 5
    pace = Pace(25 * MS, 25 * MS, gain=0.0)
    pressed = controller.budget(replace(load, paces=(pace,)))
    assert 0 < pressed.max_nodes < free
    assert COSTS.at(32 * (1 + pressed.max_nodes)) <= 25 * MS
    assert str(pressed.why).startswith(f"{pressed.max_nodes} nodes: keeps what 1 of the sequences were promised; ")
    ahead = replace(load, paces=(replace(pace, left=1.0),))
    assert controller.budget(ahead).max_nodes == free, "it has a second to spare"
    late = replace(load, paces=(replace(pace, left=-1.0),))
    assert controller.budget(late).max_nodes <= pressed.max_nodes, "what it is behind has to be made good"
    hopeless = replace(load, paces=(Pace(5 * MS, -1.0, gain=0.0),))
    assert controller.budget(hopeless).max_nodes == free, "it cannot be kept, so it costs others nothing"


def test_costs_of_another_machine_are_no_reason_to_break_or_keep_a_promise() -> None:
    controller = MeasuredTreeBudget(LIKE_OTHER_GPUS, 15)
    paces = (Pace(1 * MS, 1 * MS),)
    assert controller.budget(Load(4, 0, 64, True)) == controller.budget(Load(4, 0, 64, True, paces))


@pytest.mark.parametrize(
    ("slo", "kept"),
    [
        (None, {}),
        (Slo(ttft_ms=300), {"ttft": True}),
        (Slo(ttft_ms=100, tpot_ms=90), {"ttft": False, "tpot": False}),
        (Slo(tpot_ms=110), {"tpot": True}),
    ],
)
def test_an_answer_knows_which_promises_were_kept(slo: Slo | None, kept: dict[str, bool]) -> None:
    stats = SpeculationStats(num_tokens=11, seconds=1.2, first_token_seconds=0.2, slo=slo)
    assert stats.promises_kept == kept


@pytest.mark.parametrize("wrong", [{"priority": 101}, {"priority": True}, {"priority": 0.5}, {"slo": {"tpot_ms": 3}}])
def test_wrong_promises_are_refused(wrong: dict) -> None:
    with pytest.raises(InvalidRequest, match=r"priority must be|slo must be"):
        SamplingParams(**wrong)
    for value in (0, -1, float("nan"), "5", True):
        with pytest.raises(InvalidRequest, match="milliseconds"):
            Slo(tpot_ms=value)
