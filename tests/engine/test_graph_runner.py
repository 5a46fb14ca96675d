"""Rounds on the device, the host one behind: the same tokens as plain decoding, whatever the schedule."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from draftwood.assembly import offer
from draftwood.cache.batch_state import SamplingMode
from draftwood.drafters.model import ModelDrafter
from draftwood.drafters.ngram import NgramDrafter
from draftwood.drafters.none import NoDrafter
from draftwood.drafters.scripted import ScriptedDrafter
from draftwood.engine import graph_runner
from draftwood.engine.graph_runner import APART, CAPTURE_AFTER, LONG_TABLES, StepShape
from draftwood.growers import Beam, Coupled, Independent, Levels, chain
from draftwood.growers.pickers import Best
from draftwood.protocols import Span, TimedStep
from draftwood.request import SamplingParams
from draftwood.train.online import AdaptConfig, Adapter
from draftwood.train.optim import OptimConfig
from draftwood.verifiers import LAWS
from in_rounds import DEVICE, GPU, RoundHarness, runner
from tiny import Ask, Harness, Regime, TinyCheckpoint, generated, with_arrivals, with_net


def plain(asks: list[Ask]) -> list[list[int]]:
    return generated(Harness(runner(), NoDrafter(), LAWS["match"]()).run(asks))


def asks(temperature: float, count: int = 5, **more) -> list[Ask]:
    prompts = [(1, 2, 3, 1, 2), (5,), (7, 7, 8, 7, 7), tuple(range(1, 12)) * 3, (4, 4), (9, 1, 9, 1, 9)]
    return [
        Ask(p, SamplingParams(temperature=temperature, seed=i, max_tokens=10 + 7 * i, **more))
        for i, p in enumerate(prompts[:count])
    ]


def draft(grower, page_size: int = 4, num_pages: int = 200) -> ModelDrafter:
    return ModelDrafter(runner(0.2, num_pages, page_size), grower)


def feature_drafter(kind: str, grower):  # type: ignore[no-untyped-def]
    target = runner()
    return with_net(kind, grower, TinyCheckpoint(target.model.config), DEVICE)(target.model.dtype)


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
    "eagle3": lambda **_: feature_drafter("eagle3", chain(4)),
    "eagle3 tree": lambda **_: feature_drafter("eagle31", Levels((2, 2, 1), Best())),
    "block": lambda **_: feature_drafter("dspark", chain(4)),
    "block tree": lambda **_: feature_drafter("dflash", Levels((2, 2), Best())),
    "medusa": lambda **_: feature_drafter("medusa", Levels((2, 1, 1), Best())),
    "hydra": lambda **_: feature_drafter("hydra", Levels((2, 2, 1), Best())),
    "eagle3 beam": lambda **_: feature_drafter("eagle31", Beam(9, 3, 4)),
    "block beam": lambda **_: feature_drafter("dspark", Beam(7, 3, 3)),
    "hydra beam": lambda **_: feature_drafter("hydra", Beam(6, 2, 3)),
    "kangaroo": lambda **_: feature_drafter("kangaroo", Levels((2, 2, 1), Best())),
    "eagle1 sampled": lambda **_: feature_drafter("eagle1", Levels((1, 1, 1), Independent())),
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", DRAFTERS)
def test_rounds_give_the_tokens_of_plain_decoding(name: str, temperature: float) -> None:
    wanted = asks(temperature)
    assert generated(RoundHarness(DRAFTERS[name](), "match").run(wanted)) == plain(wanted)


REGIMES = {
    "small chunks": Regime(max_rows=7),
    "few seats": Regime(max_running=2),
    "preemption": Regime(num_pages=8 if GPU else 24, max_running=6),
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


@pytest.mark.parametrize("regime", ["few seats", "preemption"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_prompts_may_be_read_in_rounds_of_others(name: str, regime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_runner, "CAPTURE_AFTER", -1)  # as if that had been missed for long
    hard = REGIMES[regime]
    wanted = with_arrivals(asks(1.0, 6), 2)
    harness = RoundHarness(DRAFTERS[name](num_pages=hard.num_pages), "match", hard, moody=True)
    assert generated(harness.run(wanted)) == plain(wanted)
    assert any(size.text for size, _ in harness.engine.pipeline.runner._known)


def test_only_what_fits_is_read_in_rounds() -> None:
    """And only once a round for it is worth its preparation."""
    harness = RoundHarness(DRAFTERS["none"](), "match")
    running, kind = harness.engine.pipeline.runner, SamplingMode(None, greedy=True, truncates=False)
    size, tables = StepShape(4, 0, running.batch_state.num_pages), harness.engine.target.cache.tables
    for seq_id in range(17):
        tables.open(seq_id, [1])
        assert tables.reserve(seq_id, 4)
    spans = [Span(i, [1, 2, 3], 0, 3) for i in range(17)]
    found = [running.with_room_for(spans[:16], size, kind, 512) for _ in range(int(CAPTURE_AFTER / APART) + 1)]
    assert found == [None] * int(CAPTURE_AFTER / APART) + [replace(size, text=64)]
    assert running.with_room_for(spans, size, kind, 512) is None
    assert running.with_room_for(spans[:16], size, kind, 67) is None
    assert running.with_room_for(spans[:16], size, kind, 68) == replace(size, text=64)
    assert running.with_room_for(spans[:1], replace(size, pages=1), kind, 512) is None
    long = Span(0, list(range(600)), 0, 513)
    assert running.with_room_for([long], size, kind, 4096) is None


def test_a_larger_round_will_do_unless_its_empty_rows_take_longer_than_reading_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = RoundHarness(DRAFTERS["none"](), "match")
    running, kind = harness.engine.pipeline.runner, SamplingMode(None, greedy=True, truncates=False)
    size, tables = StepShape(4, 0, running.batch_state.num_pages), harness.engine.target.cache.tables
    tables.open(0, [1])
    span = Span(0, [1, 2, 3], 0, 3)
    with torch.inference_mode():
        assert running.prepare(replace(size, text=512), kind)
        assert running.with_room_for([span], size, kind, 4096) is None
        assert running.prepare(replace(size, text=128), kind)
    often = int((CAPTURE_AFTER - APART) / (64 / graph_runner.FREE_ROWS))
    found = [running.with_room_for([span], size, kind, 4096) for _ in range(often + 1)]
    assert found == [replace(size, text=128)] * often + [replace(size, text=64)]
    monkeypatch.setattr(graph_runner, "MAX_MIXED_SIZES", 2)
    assert running.with_room_for([span], size, kind, 4096) == replace(size, text=128)
    assert running.with_room_for([span], replace(size, batch=8), kind, 4096) is None


@pytest.mark.parametrize("rides", [False, True])
def test_rounds_that_did_not_have_the_device_for_themselves_say_nothing_of_their_time(
    rides: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_runner, "CAPTURE_AFTER", -1 if rides else 1000)
    harness, heard = RoundHarness(DRAFTERS["none"](), "match"), []
    late = [Ask((1, 2, 3), SamplingParams(max_tokens=30)), Ask((4, 5, 6), SamplingParams(max_tokens=5), arrives=10)]
    harness.run(late)
    harness.events.clear()
    monkeypatch.setattr(harness.engine.controller, "observe", heard.append)
    harness.run(late)
    silent = [i for i, report in enumerate(heard) if report.step_seconds is None]
    text = [i for i, report in enumerate(heard) if report.num_rows > 2]
    assert (len(text) == 1) == rides
    behind = [i for i in silent if i > 2]  # the first ones come behind the first prompt
    assert behind == text if rides else len(behind) == 2


LAWFUL = [
    ("sampled", "block"),
    ("sampled", "walk"),
    ("sampled", "token"),
    ("chain", "walk"),
    ("tree", "walk"),
    ("tree", "traversal"),
]


@pytest.mark.parametrize(("name", "law"), LAWFUL)
def test_other_laws_in_rounds_keep_what_they_keep_step_by_step(name: str, law: str) -> None:
    """The same draws and the same odds: a drafter in its own pages and one in the target's say the same."""
    params = [SamplingParams(temperature=0.8, top_p=0.9, seed=i, max_tokens=40) for i in range(5)]
    wanted = [Ask((i,), own) for i, own in enumerate(params)]  # longer prompts guess one step earlier in rounds
    step_by_step = generated(Harness(runner(), DRAFTERS[name](), LAWS[law]()).run(wanted))
    in_rounds = generated(RoundHarness(DRAFTERS[name](), law).run(wanted))
    # At an answer's end a step has a smaller tree, which draws other numbers.
    assert [answer[:-7] for answer in in_rounds] == [answer[:-7] for answer in step_by_step]


@pytest.mark.parametrize("name", ["eagle3 beam", "block beam", "hydra beam"])
def test_beams_in_rounds_are_those_of_the_host(name: str) -> None:
    wanted = [Ask((i, 3), SamplingParams(temperature=0.7 * (i % 2), seed=i, max_tokens=40)) for i in range(4)]
    hosted = Harness(runner(), DRAFTERS[name](), LAWS["match"]()).run(wanted)
    harness = RoundHarness(DRAFTERS[name](), "match")
    answers = harness.run(wanted)
    assert generated(answers) == generated(hosted) == plain(wanted)
    assert harness.engine.pipeline.runner.ready
    guessed = [(answer.accepted, answer.steps) for answer in answers]
    assert sum(accepted for accepted, _ in guessed) > 0
    # The host's last trees are cut to what is still wanted, and its first one is a step later.
    assert all(
        abs(accepted - answer.accepted) <= 4 and abs(steps - answer.steps) <= 3
        for (accepted, steps), answer in zip(guessed, hosted, strict=True)
    )


def test_requests_that_need_the_host_share_the_engine() -> None:
    """While one of them runs nothing is guessed, and everybody's tokens stay what they are."""
    wanted = with_arrivals(asks(1.0, 4), 3)
    wanted[1] = Ask((5,), SamplingParams(temperature=1.0, seed=9, max_tokens=8, repetition_penalty=1.3), arrives=4)
    wanted[2] = Ask((7, 8), SamplingParams(temperature=1.0, seed=3, max_tokens=8, logprobs=2), arrives=9)
    harness = RoundHarness(DRAFTERS["chain"](), "match")
    assert generated(harness.run(wanted)) == plain(wanted)
    assert sum(answer.drafted for answer in harness.engine.scheduler.running) == 0
    assert any(event.logprobs for event in harness.events)


@pytest.mark.parametrize("name", ["ngram", "chain", "eagle3"])
def test_requests_with_wishes_about_guesses_share_the_engine(name: str) -> None:
    """Another drafter, fewer nodes, a prediction, a grammar: step by step while they run, in rounds otherwise."""
    drafter = DRAFTERS[name]()
    offered = offer(drafter, {"own": drafter, "none": NoDrafter(), "other": NgramDrafter(nodes=3, shortest=1)})
    wishes = [{}, {"max_nodes": 2}, {"prediction": "abcabc"}, {"drafter": "other", "max_depth": 1}, {"grammar": "13"}]
    wanted = [replace(a, params=replace(a.params, **w)) for a, w in zip(asks(1.0), wishes, strict=True)]
    mixed = with_arrivals([asks(1.0)[4], *wanted], every=4)
    assert generated(RoundHarness(offered, "match").run(mixed)) == plain(mixed)


def test_cancelled_answers_leave_their_neighbours_alone() -> None:
    wanted = asks(1.0, 5)
    wanted[2] = Ask(wanted[2].prompt, wanted[2].params, cancelled=4)
    harness = RoundHarness(DRAFTERS["chain"](), "match")
    kept = [i for i in range(5) if i != 2]
    got, want = generated(harness.run(wanted)), plain(asks(1.0, 5))
    assert [got[i] for i in kept] == [want[i] for i in kept]
    assert want[2][: len(got[2])] == got[2]
    assert not harness.engine.pipeline.runner.batch_state.sequences


@pytest.mark.parametrize("name", ["eagle3", "block", "medusa", "hydra"])
def test_new_weights_reach_rounds_that_are_ready(name: str) -> None:
    """Captured graphs read weights in place: who changed its mind guesses like one that always thought so."""
    first = [Ask((3, i), SamplingParams(max_tokens=30)) for i in range(4)]
    then = [Ask((i, 7), SamplingParams(max_tokens=60)) for i in range(5)]
    runs = []
    for warmed in (True, False):
        drafter = DRAFTERS[name]()
        harness = RoundHarness(drafter, "match")
        if warmed:
            harness.run(first)
            harness.events.clear()
        generator = torch.Generator().manual_seed(8)
        drafter.update(
            {
                name: weight + 0.3 * weight.std() * torch.randn(weight.shape, generator=generator).to(weight)
                for name, weight in drafter.module.named_parameters()
            }
        )
        answers = harness.run(then)
        assert generated(answers) == plain(then)
        runs.append([(answer.steps, answer.accepted) for answer in answers])
    assert runs[0] == runs[1]
    untouched = RoundHarness(DRAFTERS[name](), "match").run(then)
    assert runs[0] != [(answer.steps, answer.accepted) for answer in untouched]


def test_a_round_too_many_is_not_heard_by_who_comes_later() -> None:
    """Even if later answers go by the same numbers, as they do in this harness."""
    harness, wanted = RoundHarness(DRAFTERS["none"](), "match"), asks(0.0)
    surprise = [
        replace(ask, params=replace(ask.params, stop_token_ids=(tokens[3],)))
        for ask, tokens in zip(wanted, plain(wanted), strict=True)
    ]
    harness.run(surprise)
    assert harness.engine.pipeline is not None
    assert harness.engine.pipeline._in_flight is not None
    harness.events.clear()
    assert generated(harness.run(wanted)) == plain(wanted)


def test_a_drafter_learns_between_rounds() -> None:
    wanted = [Ask((i, (3 * i + 1) % 13, 5), SamplingParams(max_tokens=40)) for i in range(6)]
    harness, rates = RoundHarness(DRAFTERS["eagle3"](), "match"), []
    fast = OptimConfig(lr=5e-3, muon_lr=0.03, weight_decay=0.0)
    config = AdaptConfig(share=1.0, length=96, window=2, repeats=6, optimizer=fast)
    harness.companion = adapter = Adapter(harness.engine, config, clock=lambda: 0.0)
    for _ in range(5):
        answers = harness.run(wanted)
        assert generated(answers) == plain(wanted)
        rates.append(sum(a.num_generated for a in answers) / sum(a.steps for a in answers))
        while adapter.wants(busy=False) <= 0:
            adapter.work()
    assert rates[-1] > 1.25 * rates[0], rates


def test_a_round_is_reported_with_the_length_of_its_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of prompt and answer as it was before the round: what longer ones cost is not the guesses' fault."""
    harness, heard = RoundHarness(DRAFTERS["ngram"](), "match"), []
    monkeypatch.setattr(harness.engine.controller, "observe", heard.append)
    harness.run([Ask((1, 2, 3), SamplingParams(max_tokens=12))])
    assert len(heard) > 1
    lengths = [report.context for report in heard]
    assert lengths[0] >= 3
    assert [b - a for a, b in itertools.pairwise(lengths)] == [report.emitted for report in heard[:-1]]


def test_the_last_round_that_nothing_disturbed_is_kept_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    harness, heard = RoundHarness(DRAFTERS["ngram"](), "match"), []
    monkeypatch.setattr(harness.engine.controller, "observe", heard.append)
    assert harness.engine.last_step is None
    harness.run([Ask((1, 2, 3), SamplingParams(max_tokens=12))])
    timed = [report for report in heard if report.step_seconds is not None and report.num_sampling]
    assert harness.engine.last_step == TimedStep(timed[-1], timed[-1].step_seconds)


def test_rounds_without_graphs_are_the_same() -> None:
    wanted = asks(1.0)
    harness = RoundHarness(DRAFTERS["chain"](), "match")
    harness.engine.pipeline.runner.captures = False
    assert generated(harness.run(wanted)) == plain(wanted)


def test_a_round_that_is_ready_is_taken_until_another_is_wanted_often() -> None:
    harness = RoundHarness(DRAFTERS["chain"](), "match")
    runner, kind = harness.engine.pipeline.runner, SamplingMode(None, True, False)
    whole = runner.batch_state.num_pages

    def size_for(count: int, nodes: int, kind: SamplingMode = kind) -> tuple[int, int]:
        size = runner.size_for(count, nodes, 1, kind)
        assert size.pages == whole, "so short a table is not cut"
        return size.batch, size.nodes

    assert size_for(7, 5) == (8, 5), "nothing is ready"
    with torch.inference_mode():
        runner._round(StepShape(8, 5, whole), kind)
        runner._round(StepShape(4, 1, whole), kind)
    assert size_for(8, 5) == (8, 5)
    assert size_for(3, 5) == (8, 5), "as many nodes count for more than a batch that fits"
    assert size_for(3, 2) == (4, 1), "not more nodes than there is room for"
    assert size_for(1, 5) == (8, 5), "even for one: making another would take longer"
    assert size_for(3, 0) == (4, 0), "no nodes is another thing than some"
    assert size_for(8, 5, SamplingMode(None, False, False)) == (8, 5)
    lost = StepShape(4, 5, whole).lost_with(StepShape(8, 5, whole))
    sizes = [size_for(4, 5) for _ in range(int(2 * CAPTURE_AFTER / lost))]
    assert sizes.index((4, 5)) == pytest.approx(CAPTURE_AFTER / lost, abs=3), (
        "when as much is lost as one takes to make"
    )
    assert set(sizes) == {(8, 5), (4, 5)}


def test_rows_for_nobody_are_a_smaller_loss_than_tokens_not_guessed() -> None:
    plain, some = StepShape(8, 0, 9), StepShape(8, 3, 9)
    assert plain.lost_with(plain) == some.lost_with(some) == 0
    assert 0 < plain.lost_with(StepShape(16, 0, 9)) < plain.lost_with(StepShape(32, 0, 9)) < 0.1
    assert some.lost_with(StepShape(8, 1, 9)) == 0.5
    assert some.lost_with(StepShape(256, 3, 9)) > 3, "a round for many takes several times as long as one for few"
    assert plain.lost_with(StepShape(8, 0, 10)) > plain.lost_with(StepShape(16, 0, 9))


def test_a_round_has_room_for_the_longest_of_its_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = RoundHarness(DRAFTERS["chain"](), "match")
    runner, kind = harness.engine.pipeline.runner, SamplingMode(None, True, False)
    page = runner.target.cache.page_size
    monkeypatch.setattr("draftwood.engine.graph_runner.LENGTHS", (2 * page, 4 * page))

    def pages_for(pages: int) -> int:
        return runner.size_for(8, 5, pages, kind).pages

    whole = runner.batch_state.num_pages
    assert [pages_for(pages) for pages in (1, 2, 3, 4, 5)] == [2, 4, 4, whole, whole], "one is always nobody's"
    with torch.inference_mode():
        runner._round(StepShape(8, 5, 4), kind)
    assert [pages_for(pages) for pages in (1, 3, 4)] == [4, 4, whole], "a longer one will do for now"
    sizes = [pages_for(1) for _ in range(int(2 * CAPTURE_AFTER / LONG_TABLES))]
    assert sizes.index(2) == pytest.approx(CAPTURE_AFTER / LONG_TABLES, abs=3)


@pytest.mark.parametrize("drafter", ["none", "chain", "ngram"])
def test_sequences_that_outgrow_a_round_go_on_in_another(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = asks(1.0)
    harness = RoundHarness(DRAFTERS[drafter](), "match")
    runner = harness.engine.pipeline.runner
    page = runner.target.cache.page_size
    monkeypatch.setattr("draftwood.engine.graph_runner.LENGTHS", tuple(page * pages for pages in range(1, 9)))
    assert generated(harness.run(wanted)) == plain(wanted)
    assert len({size.pages for size, _ in runner._known}) > 1


def test_a_law_that_cannot_be_captured_goes_step_by_step(caplog: pytest.LogCaptureFixture) -> None:
    harness = RoundHarness(DRAFTERS["ngram"](), "match")
    runner, tried = harness.engine.pipeline.runner, []

    def refuse(run: Callable[[], None]) -> Callable[[], None]:
        tried.append(run)
        raise RuntimeError("operation not permitted when stream is capturing")

    runner._captured = refuse  # type: ignore[method-assign]
    wanted = [Ask(ask.prompt[-1:], ask.params) for ask in asks(1.0)]
    assert generated(harness.run(wanted)) == plain(wanted)
    assert len(tried) == 1, "once is enough to know"
    assert "not permitted" in caplog.text


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafters_forget_sequences_that_have_ended(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees that the host makes, and steps on the host between captured ones, leave state there."""
    harness, released = RoundHarness(DRAFTERS[name](), "match"), []
    forget = harness.engine.drafter.release
    monkeypatch.setattr(harness.engine.drafter, "release", lambda seq_id: (released.append(seq_id), forget(seq_id)))
    answers = harness.run(asks(1.0))
    assert sorted(released) == sorted(answer.id for answer in answers)
