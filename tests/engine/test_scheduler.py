"""The scheduler as a state machine: anything may arrive, be cancelled or be accepted, at any step, in a tiny cache."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from draftwood.cache.blocks import PageTables
from draftwood.engine.plan import Plan
from draftwood.engine.scheduler import Scheduler, SchedulerConfig
from draftwood.engine.sequence import Sequence
from draftwood.engine.text import TextStream
from draftwood.errors import InvalidRequest
from draftwood.protocols import Budget
from draftwood.request import Event, FinishReason, SamplingParams
from draftwood.tree import HostVerdict
from tiny import LetterDecoder

PAGES, PAGE, ROWS, RUNNING, WAITING = 9, 3, 7, 4, 6


class SchedulerMachine(RuleBasedStateMachine):
    """Steps are simulated: every sampling sequence accepts some of the nodes it was given room for."""

    def __init__(self) -> None:
        super().__init__()
        self.released: list[int] = []
        self.tables = PageTables(PAGES, PAGE)
        config = SchedulerConfig(ROWS, RUNNING, WAITING)
        self.scheduler = Scheduler(self.tables, config, self.released.append, clock=lambda: 0.0)
        self.open: dict[int, Sequence] = {}
        self.ended: list[int] = []
        self.next_id = 0

    def sequence(self, request: int, index: int, tokens: list[int], max_tokens: int) -> Sequence:
        self.next_id += 1
        return Sequence(
            id=self.next_id,
            request_id=request,
            index=index,
            tokens=list(tokens),
            params=SamplingParams(temperature=1.0),
            seed=0,
            max_length=min(len(tokens) + max_tokens, self.tables.capacity),
            stop_ids=frozenset({3}),
            bad_words=(),
            text=TextStream(LetterDecoder()),
            arrived=0.0,
        )

    def hear(self, events: list[Event]) -> None:
        for event in events:
            if event.finished:
                seq = next(s for s in self.open.values() if (s.request_id, s.index) == (event.request_id, event.index))
                self.ended.append(seq.id)
                del self.open[seq.id]

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14), max_tokens=st.integers(1, 12), n=st.integers(1, 3)
    )
    def ask(self, tokens: list[int], max_tokens: int, n: int) -> None:
        request = self.next_id + 1000
        sequences = [self.sequence(request, i, tokens, max_tokens) for i in range(n)]
        if len(self.scheduler.waiting) + n > WAITING:
            with pytest.raises(InvalidRequest):
                self.scheduler.add(sequences)
            return
        self.scheduler.add(sequences)
        self.open |= {seq.id: seq for seq in sequences}

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted({seq.request_id for seq in self.open.values()})))
        self.hear(self.scheduler.abort(request, FinishReason.CANCELLED))
        assert all(seq.request_id != request for seq in self.open.values())

    @rule(nodes=st.integers(0, 6), data=st.data())
    def step(self, nodes: int, data: st.DataObject) -> None:
        prompts, plan = self.scheduler.schedule(Budget(nodes))
        self.check_plan(prompts, plan, nodes)
        self.scheduler.commit(prompts, HostVerdict([], [], [], [], []))
        gains = []
        for i in plan.sampling:
            item = plan.items[i]
            room = min(item.max_nodes, item.seq.max_length - item.end - 1)
            accepted = data.draw(st.integers(0, max(0, room)))
            gains.append(
                (data.draw(st.lists(st.integers(0, 3), min_size=accepted + 1, max_size=accepted + 1)), accepted)
            )
        kept, count = [a for _, a in gains], len(gains)
        verdict = HostVerdict([g for g, _ in gains], kept, kept, [0.0] * count, [True] * count)
        self.hear(self.scheduler.commit(plan, verdict))

    def check_plan(self, prompts: Plan, plan: Plan, nodes: int) -> None:
        items = prompts.items + plan.items
        assert sum(item.end - item.start + item.max_nodes for item in items) <= ROWS
        assert all(item.samples for item in plan.items)
        assert not any(item.samples or item.max_nodes for item in prompts.items)
        for item in items:
            assert item.start == self.tables.num_cached(item.seq.id)
            assert item.start < item.end <= len(item.seq.tokens)
            assert 0 <= item.max_nodes <= nodes
            assert item.end + item.max_nodes <= self.tables.room(item.seq.id), "a node without a page"
        assert items or not self.scheduler.has_work, "work is waiting and nobody runs"

    @invariant()
    def nothing_is_lost(self) -> None:
        self.tables.check()
        alive = {seq.id for seq in (*self.scheduler.running, *self.scheduler.waiting)}
        assert alive == set(self.open)
        assert len(self.scheduler.running) <= RUNNING
        assert sorted(self.released) == sorted(self.ended), "the drafter hears of every end, once"
        assert all(len(seq.tokens) <= seq.max_length for seq in self.open.values())

    def teardown(self) -> None:
        for _ in range(2000):
            if not self.scheduler.has_work:
                break
            prompts, plan = self.scheduler.schedule(Budget(2))
            self.scheduler.commit(prompts, HostVerdict([], [], [], [], []))
            count = len(plan.items)
            zeros = [0] * count
            verdict = HostVerdict([[1]] * count, zeros, zeros, [0.0] * count, [True] * count)
            self.hear(self.scheduler.commit(plan, verdict))
        assert not self.open, "somebody starves"
        assert self.tables.pool.num_available == PAGES, "pages leaked"


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


def _answers(tenants: str) -> list[Sequence]:
    """One answer after the other, each for the tenant of that letter."""
    return [
        Sequence(
            id=i,
            request_id=i,
            index=0,
            tokens=[1],
            params=SamplingParams(max_tokens=1),
            seed=0,
            max_length=2,
            stop_ids=frozenset(),
            bad_words=(),
            text=TextStream(LetterDecoder()),
            arrived=0.0,
            tenant=tenant,
        )
        for i, tenant in enumerate(tenants)
    ]


@pytest.mark.parametrize(
    ("prompts", "pieces", "expected"),
    [
        ([3], 4, [2]),  # fewer rows than any step has room for
        ([12], 4, [8, 3]),  # as many as fill a step, and the rest
        ([40], 4, [16, 16, 4, 3]),  # no step takes more than the largest
        ([6, 6, 6], 2, [8, 4, 3]),  # no more pieces than a step takes
    ],
)
def test_prompts_are_cut_to_the_sizes_of_steps_while_others_decode(
    prompts: list[int], pieces: int, expected: list[int]
) -> None:
    config = SchedulerConfig(64, 8, 64, prefill_sizes=(4, 8, 16), max_pieces=pieces)
    scheduler = Scheduler(PageTables(64, 4), config)
    decoding = _answers("a")
    decoding[0].max_length = 100
    scheduler.add(decoding)
    scheduler.schedule(Budget(0))
    waiting = _answers("aaaa")[1 : 1 + len(prompts)]
    for seq, length in zip(waiting, prompts, strict=True):
        seq.tokens, seq.prompt_length, seq.max_length = list(range(1, length + 1)), length, length + 9
    scheduler.add(waiting)
    rows = []
    while True:
        plan, ready = scheduler.schedule(Budget(0))
        assert decoding[0].id in ready.seq_ids, "who decodes never waits"
        if not plan.items:
            break
        rows.append(plan.num_rows)
        scheduler.commit(plan, HostVerdict([], [], [], [], []))
    assert rows == expected


def test_prompts_alone_are_read_in_whole_steps() -> None:
    scheduler = Scheduler(PageTables(64, 4), SchedulerConfig(64, 8, 64, prefill_sizes=(4, 8)))
    (seq,) = _answers("a")
    seq.tokens, seq.max_length = list(range(1, 51)), 60
    scheduler.add([seq])
    plan, _ = scheduler.schedule(Budget(0))
    assert plan.num_rows == 49


def test_groups_decode_by_turns() -> None:
    """None twice in a row while others wait; one that comes or ends moves nobody to the end."""
    scheduler = Scheduler(PageTables(64, 4), SchedulerConfig(64, 8, 64, groups=2))
    answers = _answers("aaaaa")
    for seq in answers:
        seq.max_length = 100
    scheduler.add(answers[:4])
    steps = []
    for step in range(8):
        if step == 3:
            scheduler.add(answers[4:])
        if step == 5:
            scheduler.abort(answers[0].request_id, FinishReason.CANCELLED)
        prompts, plan = scheduler.schedule(Budget(0))
        scheduler.commit(prompts, HostVerdict([], [], [], [], []))
        assert {item.seq.id for item in (*plan.items, *plan.resting)} == {
            seq.id for seq in scheduler.running if scheduler.tables.num_cached(seq.id) == len(seq.tokens) - 1
        }
        steps.append([answers.index(item.seq) for item in plan.items])
        count = len(plan.items)
        scheduler.commit(plan, HostVerdict([[1]] * count, [0] * count, [0] * count, [0.0] * count, [True] * count))
    assert steps == [[0, 1], [2, 3], [0, 1], [2, 3, 4], [0, 1], [2, 3], [1, 4], [2, 3]]


@pytest.mark.parametrize(
    ("places", "arrivals", "served"),
    [
        (1, "aaaa", "aaaa"),
        (1, "aaaab", "abaaa"),  # one place: the tenants take turns
        (1, "aaaabbcc", "abcabcaa"),
        (2, "aaaaaabb", "ababaaaa"),
        (2, "aaabcd", "abcdaa"),
        (4, "aaaaab", "aaabaa"),
    ],
)
def test_tenants_take_turns(places: int, arrivals: str, served: str) -> None:
    """Every answer is one token long, so a step ends all that run."""
    scheduler = Scheduler(PageTables(16, 4), SchedulerConfig(64, places, 64))
    scheduler.add(_answers(arrivals))
    order = ""
    while scheduler.has_work:
        _, plan = scheduler.schedule(Budget(0))
        order += "".join(item.seq.tenant for item in plan.items)
        ended = scheduler.commit(
            plan, HostVerdict([[2]] * len(plan.items), *([[0] * len(plan.items)] * 3), [True] * len(plan.items))
        )
        assert all(event.finished for event in ended)
    assert order == served
