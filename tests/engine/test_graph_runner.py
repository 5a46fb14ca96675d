"""Captured steps, the host one behind: the same tokens as plain decoding, whatever the schedule and the requests."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from captured import DEVICE, GPU, CapturedHarness, runner
from draftwood.assembly import offer
from draftwood.cache.row_settings import BIASES, STOPS
from draftwood.drafters.cascade import CascadeDrafter
from draftwood.drafters.combined import CombinedDrafter
from draftwood.drafters.intersection import Bridge, IntersectionDrafter
from draftwood.drafters.lookahead import LookaheadDrafter
from draftwood.drafters.lookup import LookupDrafter
from draftwood.drafters.model import ModelDrafter
from draftwood.drafters.ngram import NgramDrafter
from draftwood.drafters.none import NoDrafter
from draftwood.drafters.pard import ParallelDrafter
from draftwood.drafters.recycling import RecyclingDrafter
from draftwood.drafters.scripted import ScriptedDrafter
from draftwood.drafters.suffix import SuffixDrafter
from draftwood.drafters.view import View, ViewDrafter, Window, without_layers
from draftwood.drafting import padded_batch
from draftwood.engine import shapes
from draftwood.engine.controller import FixedBudget
from draftwood.engine.shapes import EVERYTHING, LONG_TABLES, ShapePlan, StepShape
from draftwood.growers import (
    Beam,
    BestFirst,
    Coupled,
    Greedy,
    Hybrid,
    Independent,
    Levels,
    Paths,
    WithoutReplacement,
    chain,
    sequoia,
)
from draftwood.growers.pickers import Best
from draftwood.protocols import StepMode, TimedStep
from draftwood.request import FinishReason, SamplingParams
from draftwood.train.online import AdaptConfig, Adapter
from draftwood.train.optim import OptimConfig
from draftwood.verifiers import LAWS
from tiny import Ask, Harness, Regime, TinyCheckpoint, generated, rest, with_arrivals, with_net

GREEDY = StepMode(greedy=True)


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
    "lookup": lambda **_: LookupDrafter(nodes=6, longest=3, shortest=1),
    "ngram": lambda **_: NgramDrafter(nodes=6, longest=3, shortest=1),
    "branches": lambda **_: NgramDrafter(nodes=6, longest=3, shortest=1, branches=3),
    "suffix": lambda **_: SuffixDrafter(nodes=7, longest=6, shortest=1, least=0.01, shared=400),
    "recycling": lambda **_: RecyclingDrafter(nodes=7, width=3, depth=4, least=0.01),
    "lookahead": lambda **_: LookaheadDrafter(width=3, length=3, guesses=3),
    "rest": lambda **_: rest(torch.float64),
    "combined": lambda **_: CombinedDrafter(
        [SuffixDrafter(6, shortest=1, least=0.0), RecyclingDrafter(6, width=3, depth=4, least=0.0)], 6, 0.01
    ),
    "combined models": lambda **kw: CombinedDrafter(
        [draft(chain(3), **kw), draft(Beam(7, 2, 3), **kw), LookupDrafter(nodes=4, longest=3)], 9, 0.01
    ),
    "combined nets": lambda **_: CombinedDrafter(
        [feature_drafter("eagle31", Beam(7, 2, 3)), feature_drafter("kangaroo", chain(3)), NgramDrafter(4, 3, 1, 2)],
        9,
        0.01,
    ),
    "combined drawn": lambda **kw: CombinedDrafter(
        [RecyclingDrafter(6, width=3, depth=4, least=0.0), draft(Levels((2, 1), Independent()), **kw)], 7, 0.01
    ),
    "scripted": lambda **_: ScriptedDrafter(lambda tokens: [[1, 2, 3], [5, tokens[-1] % 13], [5, 5]], 7),
    "scripted chain": lambda **_: ScriptedDrafter(lambda tokens: [[t % 13 for t in tokens[-3:]]], 4, chain=True),
    "chain": lambda **kw: draft(chain(5), **kw),
    "tree": lambda **kw: draft(Levels((2, 2, 1), Best()), **kw),
    "beam": lambda **kw: draft(Beam(9, 3, 3), **kw),
    "best-first": lambda **kw: draft(BestFirst(9, 3, 3), **kw),
    "coupled": lambda **kw: draft(Levels((2, 1, 1), Coupled()), **kw),
    "sampled": lambda **kw: draft(Levels((1, 1, 1), Independent()), **kw),
    "independent": lambda **kw: draft(Levels((2, 2), Independent()), **kw),
    "without replacement": lambda **kw: draft(Levels((3, 2), WithoutReplacement()), **kw),
    "sequoia": lambda **kw: draft(sequoia(4, 2, (50, 20)), **kw),
    "greedy": lambda **kw: draft(Greedy(7, 3), **kw),
    "hybrid": lambda **kw: draft(Levels((3, 2), Hybrid()), **kw),
    "paths": lambda **kw: draft(Paths(3, 2, trunk=1), **kw),
    "view": lambda **_: ViewDrafter(View(without_layers((0,))), chain(4)),
    "view window beam": lambda **_: ViewDrafter(View(window=Window(4, 4)), Beam(9, 3, 3)),
    "cascade": lambda **_: CascadeDrafter(
        RecyclingDrafter(4, 2, 2, 0.0), ViewDrafter(View(without_layers((0,))), chain(1)), nodes=6, rounds=2, ahead=3
    ),
    "cascade of host trees": lambda **kw: CascadeDrafter(
        SuffixDrafter(5, shortest=1, least=0.0), draft(chain(1), **kw), nodes=5, rounds=2, ahead=4
    ),
    "pard": lambda num_pages=200: ParallelDrafter(runner(0.2, num_pages), chain(4), mask=5, guesses=4),
    "other vocabulary": lambda num_pages=200: IntersectionDrafter(
        runner(0.2, num_pages),
        Beam(7, 2, 3),
        Bridge(torch.arange(11), torch.arange(11), torch.arange(13).clamp(max=10)),
    ),
    "eagle3": lambda **_: feature_drafter("eagle3", chain(4)),
    "eagle3 tree": lambda **_: feature_drafter("eagle31", Levels((2, 2, 1), Best())),
    "eagle3 hybrid": lambda **_: feature_drafter("eagle3", Levels((2, 2, 1), Hybrid())),
    "peagle": lambda **_: feature_drafter("peagle", Levels((2, 2), Best())),
    "block": lambda **_: feature_drafter("dspark", chain(4)),
    "block tree": lambda **_: feature_drafter("dflash", Levels((2, 2), Best())),
    "block drawn": lambda **_: feature_drafter("dspark", Levels((2, 2), WithoutReplacement())),
    "medusa": lambda **_: feature_drafter("medusa", Levels((2, 1, 1), Best())),
    "hydra": lambda **_: feature_drafter("hydra", Levels((2, 2, 1), Best())),
    "eagle3 beam": lambda **_: feature_drafter("eagle31", Beam(9, 3, 4)),
    "eagle1 best-first": lambda **_: feature_drafter("eagle1", BestFirst(9, 3, 3)),
    "block beam": lambda **_: feature_drafter("dspark", Beam(7, 3, 3)),
    "hydra beam": lambda **_: feature_drafter("hydra", Beam(6, 2, 3)),
    "kangaroo": lambda **_: feature_drafter("kangaroo", Levels((2, 2, 1), Best())),
    "eagle1 sampled": lambda **_: feature_drafter("eagle1", Levels((1, 1, 1), Independent())),
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", DRAFTERS)
def test_captured_steps_give_the_tokens_of_plain_decoding(name: str, temperature: float) -> None:
    wanted = asks(temperature)
    harness = CapturedHarness(DRAFTERS[name](), "match")
    assert generated(harness.run(wanted)) == plain(wanted)
    assert harness.runner.ready, "nothing was captured"
    assert not harness.runner._refused


REGIMES = {
    "small chunks": Regime(max_rows=7),
    "few places": Regime(max_running=2),
    "preemption": Regime(num_pages=8 if GPU else 24, max_running=6),
}


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("name", DRAFTERS)
def test_whatever_the_schedule(name: str, regime: str) -> None:
    hard = REGIMES[regime]
    wanted = with_arrivals(asks(1.0, 6), 2)
    drafter = DRAFTERS[name](num_pages=hard.num_pages)
    harness = CapturedHarness(drafter, "match", hard, moody=True)
    assert generated(harness.run(wanted)) == plain(wanted)
    if regime == "preemption":
        assert harness.engine.scheduler.num_preemptions > 0
    if regime == "few places":
        assert any(shape.text for shape, _ in harness.runner.ready), "no prompt was read in a step of others"


# --- requests that ask for more

WISHES: dict[str, dict[str, object]] = {
    "logprobs": {"logprobs": 3},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    "bias": {"logit_bias": {3: 2.0, 7: -4.0}},
    "bad words": {"bad_words": ("ab", "c")},
    "min-p": {"min_p": 0.05},
    "top-k and top-p": {"top_k": 5, "top_p": 0.9},
    "minimum length": {"min_tokens": 6, "stop_token_ids": (1, 2, 4)},
    "grammar": {"grammar": "13"},
    "trace": {"trace": True},
    "fewer nodes": {"max_nodes": 2},
    "less deep": {"max_depth": 1},
}


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("name", ["none", "ngram", "chain", "tree", "eagle3", "block beam"])
@pytest.mark.parametrize("wish", WISHES)
def test_one_request_that_asks_for_more_changes_no_other(wish: str, name: str, temperature: float) -> None:
    """Neither tokens nor acceptance nor the kind of step: it is another captured step, not another way."""
    others = asks(temperature)
    odd = Ask((3, 1, 3, 1), SamplingParams(temperature=temperature, seed=9, max_tokens=12, **WISHES[wish]), arrives=3)  # type: ignore[arg-type]
    calm, mixed = CapturedHarness(DRAFTERS[name](), "match"), CapturedHarness(DRAFTERS[name](), "match")
    alone, among = calm.run(others), mixed.run([*others, odd])
    assert generated(among) == plain([*others, odd])
    assert not mixed.eager, "a step left the captured path"
    # Where limits differ within a batch, trees at an answer's end are cut to what can still be used.
    assert all(0 <= b.steps - a.steps <= 1 for a, b in zip(among, alone, strict=False))
    assert all(abs(a.accepted - b.accepted) <= 1 for a, b in zip(among, alone, strict=False))
    assert all(a.drafted > 0 for a in among[:5]) == (name != "none")


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_logprobs_are_those_of_steps_that_are_not_captured(temperature: float) -> None:
    wanted = [replace(a, params=replace(a.params, logprobs=i)) for i, a in enumerate(asks(temperature, 4))]
    eager, fast = Harness(runner(), DRAFTERS["tree"](), LAWS["match"]()), CapturedHarness(DRAFTERS["tree"](), "match")
    told = []
    for harness in (eager, fast):
        harness.run(wanted)
        told.append([[x for e in harness.events if e.request_id == i for x in e.logprobs] for i in range(4)])
    for i, (ours, theirs) in enumerate(zip(*told, strict=True)):
        assert [x.token for x in ours] == [x.token for x in theirs]
        assert all(len(x.top) == i for x in ours)
        pairs = zip(ours, theirs, strict=True)
        assert all(x.logprob == pytest.approx(y.logprob, abs=0.05 if GPU else 1e-9) for x, y in pairs)


def test_all_requests_may_ask_for_everything() -> None:
    more = {"logprobs": 2, "repetition_penalty": 1.2, "logit_bias": {2: 1.5}, "min_p": 0.02, "trace": True}
    wanted = asks(0.8, 6, **more)
    harness = CapturedHarness(DRAFTERS["eagle3"](), "match")
    assert generated(harness.run(wanted)) == plain(wanted)
    assert not harness.eager
    assert all(event.logprobs for event in harness.events if event.token_ids)


@pytest.mark.parametrize("name", ["ngram", "chain", "eagle3"])
def test_requests_with_wishes_about_drafts_share_the_steps(name: str) -> None:
    """Another drafter, fewer nodes, a prediction, a grammar."""
    drafter = DRAFTERS[name]()
    offered = offer(drafter, {"own": drafter, "none": NoDrafter(), "other": NgramDrafter(nodes=3, shortest=1)})
    wishes = [{}, {"max_nodes": 2}, {"prediction": "abcabc"}, {"drafter": "other", "max_depth": 1}, {"grammar": "13"}]
    wanted = [replace(a, params=replace(a.params, **w)) for a, w in zip(asks(1.0), wishes, strict=True)]
    mixed = with_arrivals([asks(1.0)[4], *wanted], every=4)
    harness = CapturedHarness(offered, "match")
    assert generated(harness.run(mixed)) == plain(mixed)
    assert not harness.eager


# --- nothing is captured while a request waits


@pytest.mark.parametrize("name", ["none", "chain", "eagle3", "branches"])
def test_nothing_is_captured_while_requests_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = CapturedHarness(DRAFTERS[name](), "match", eagerly=True)
    wanted = asks(1.0)
    assert generated(harness.run(wanted)) == plain(wanted)
    assert harness.eager
    assert not harness.runner.ready, "a step was captured while requests ran"
    missed = dict(harness.runner.shapes.missed)
    assert missed
    for _ in range(len(missed) + 8):  # some prefills are captured in between
        assert harness.engine.prepare_next()
    assert set(missed) <= set(harness.runner.ready), "what was missed is captured while the engine is idle"
    harness.events.clear()
    harness.eager.clear()
    assert generated(harness.run(wanted)) == plain(wanted)
    assert not harness.eager


def test_preparing_ends_when_the_time_is_up_or_all_is_captured() -> None:
    harness = CapturedHarness(NoDrafter(), "match", Regime(max_running=2), eagerly=True)
    assert harness.engine.prepare(0.0) == 0
    count = harness.engine.prepare(600.0)
    assert count == len(harness.runner.ready) > 4
    assert not harness.engine.prepare_next()


def test_a_step_that_does_everything_serves_any_batch() -> None:
    """Before the best shape is captured."""
    harness = CapturedHarness(DRAFTERS["chain"](), "match", Regime(max_running=8), eagerly=True)
    whole = harness.engine.runner.state.num_pages
    with torch.inference_mode():
        for nodes in (0, 5):
            shape = StepShape(8, nodes, whole, edited=8, scored=8, alternatives=20)
            assert harness.runner.capture(shape, EVERYTHING)
    scored = replace(asks(0.0)[4], params=replace(asks(0.0)[4].params, logprobs=4, presence_penalty=0.5))
    wanted = [*asks(1.0, 4), scored]
    assert generated(harness.run(wanted)) == plain(wanted)
    assert not harness.eager


def test_what_the_server_takes_moves_no_table() -> None:
    """Captured steps know addresses: all of them would end."""
    schemas = pytest.importorskip("draftwood.server.schemas")  # a GPU machine may not have the server's dependencies
    harness = CapturedHarness(NoDrafter(), "match")
    bias = {token: 0.01 * token for token in range(13)}
    harness.run(asks(1.0, 2, logit_bias=bias, min_tokens=2, stop_token_ids=(3, 4)))
    assert harness.engine.runner.state.edits.version == 0
    assert BIASES >= schemas.MAX_KEYS
    assert STOPS > 64


def plan_of(sizes=(0, 1, 2, 5), max_batch: int = 8, max_rows: int = 512, whole: int = 9) -> ShapePlan:
    return ShapePlan.for_trees(sizes, max_batch, max_rows, whole, page_size=4)


def test_the_nearest_shape_that_is_ready_runs() -> None:
    plan, whole = plan_of(), 9
    ready = [(StepShape(8, 5, whole), GREEDY), (StepShape(4, 1, whole), GREEDY), (StepShape(4, 0, whole), GREEDY)]

    def shape_for(count: int, nodes: int, mode: StepMode = GREEDY) -> tuple[int, int] | None:
        found = plan.nearest(plan.wanted(StepShape(count, nodes, 1)), mode, ready)
        return None if found is None else (found[0].batch, found[0].nodes)

    assert shape_for(8, 5) == (8, 5)
    assert shape_for(3, 5) == (8, 5), "as many nodes count for more than a batch that fits"
    assert shape_for(3, 2) == (4, 1), "not more nodes than there is room for"
    assert shape_for(1, 5) == (8, 5)
    assert shape_for(3, 0) == (4, 0), "no nodes is another thing than some"
    assert shape_for(5, 0) is None, "a drafter with a cache of its own would fall behind or draft for nothing"
    assert shape_for(8, 5, StepMode()) is None, "a greedy step draws nothing"


def test_a_shape_that_wastes_more_than_its_capture_saves_is_not_taken() -> None:
    plan = plan_of(max_batch=256, max_rows=1 << 20)
    ready = [(StepShape(256, 5, 9), GREEDY)]
    assert plan.nearest(StepShape(1, 5, 9), GREEDY, ready) == ready[0]
    plan = plan_of(sizes=(0, 63), max_batch=256, max_rows=1 << 20)
    assert plan.nearest(StepShape(1, 63, 9), GREEDY, [(StepShape(256, 63, 9), GREEDY)]) is None


def test_what_is_missed_most_is_captured_first() -> None:
    plan, mode = plan_of(), StepMode(truncates=True)
    rare, often = StepShape(4, 2, 9), StepShape(8, 5, 9, scored=8, alternatives=20)
    plan.remember(rare, mode, plan.nearest(rare, mode, []))
    for _ in range(3):
        plan.remember(often, mode, plan.nearest(often, mode, []))
    assert plan.next([]) == (often, mode)
    assert plan.next([(often, mode)]) == (rare, mode)
    third = plan.next([(often, mode), (rare, mode)])
    assert third == next(plan.usual())


def test_usual_shapes_fit_into_a_steps_rows() -> None:
    plan = ShapePlan.for_trees(range(64), 256, 4096, 100, 64)
    usual = list(plan.usual())
    assert len(plan.sizes) < 16
    assert all(shape.batch * (1 + shape.nodes) <= 4096 for shape, _ in usual)
    first = plan.first()
    assert usual[: len(first)] == first
    assert [shape.batch for shape, _ in first] == [1, 256, 8, 32, 128] * 2
    assert [shape.nodes for shape, _ in first] == [0] * 5 + [63, 1, 15, 3, 1], (
        "plain steps, then the largest cheap trees"
    )
    assert any(shape.pages == 100 and shape.scored == shape.batch for shape, _ in usual[:30])


def test_what_is_captured_first_holds_every_batch() -> None:
    plan = ShapePlan.for_trees(range(64), 256, 4096, 100, 64)
    first = list(itertools.islice(plan.usual(), 48))
    for count, nodes in itertools.product((1, 3, 8, 20, 32, 100, 256), (0, 1, 3, 7, 63)):
        for mode in (StepMode(greedy=True), StepMode(truncates=True), StepMode()):
            fitting = [size for size in (0, 1, 3, 7, 63) if size <= nodes]
            wanted = [plan.wanted(StepShape(count, size, 70)) for size in fitting]
            assert any(plan.nearest(shape, mode, first) for shape in wanted), (count, nodes, mode)
            if nodes and count <= 128:
                assert any(plan.nearest(shape, mode, first) for shape in wanted if shape.nodes), (count, nodes, mode)


def test_a_plain_step_that_is_captured_is_better_than_a_tree_that_is_not() -> None:
    runner = CapturedHarness(draft(chain(7)), "match", eagerly=True).runner
    exact, drawn = StepShape(1, 7, 4), StepMode(truncates=True)
    assert runner.tree_size(exact, GREEDY) == 7, "nothing is captured: it runs eagerly"
    runner.capture(StepShape(1, 0, runner.state.num_pages), drawn)
    assert runner.tree_size(exact, drawn) == 0
    runner.capture(StepShape(1, 3, runner.state.num_pages), drawn)
    assert runner.tree_size(exact, drawn) == 7, "some nodes are captured, of more that there is room for"
    assert runner.tree_size(exact, StepMode(traced=True)) == 7


def test_padding_rows_are_a_smaller_loss_than_tokens_not_drafted() -> None:
    plain, some = StepShape(8, 0, 9), StepShape(8, 3, 9)
    assert plain.lost_with(plain) == some.lost_with(some) == 0
    assert 0 < plain.lost_with(StepShape(16, 0, 9)) < plain.lost_with(StepShape(32, 0, 9)) < 0.1
    assert some.lost_with(StepShape(8, 1, 9)) == 0.5
    assert some.lost_with(StepShape(256, 3, 9)) > 3, "a step for many takes several times as long as one for few"
    assert plain.lost_with(StepShape(8, 0, 10)) > plain.lost_with(StepShape(16, 0, 9))
    assert plain.lost_with(StepShape(8, 0, 10)) == LONG_TABLES


def test_a_step_has_room_for_the_longest_of_its_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(whole=30)
    monkeypatch.setattr(shapes, "LENGTHS", (8, 16))
    assert [plan.pages_for(pages) for pages in (1, 2, 3, 4, 5)] == [2, 4, 4, 30, 30], "the last one is scratch"


@pytest.mark.parametrize("drafter", ["none", "chain", "ngram"])
def test_sequences_that_outgrow_a_step_go_on_in_another(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = asks(1.0)
    harness = CapturedHarness(DRAFTERS[drafter](), "match")
    page = harness.runner.target.cache.page_size
    monkeypatch.setattr(shapes, "LENGTHS", tuple(page * pages for pages in range(1, 33)))
    assert generated(harness.run(wanted)) == plain(wanted)
    assert len({shape.pages for shape, _ in harness.runner.ready}) > 1


def test_a_part_that_cannot_be_captured_runs_launch_by_launch(caplog: pytest.LogCaptureFixture) -> None:
    harness = CapturedHarness(DRAFTERS["ngram"](), "match", eagerly=True)
    tried = []

    def refuse(run: Callable[[], None]) -> Callable[[], None]:
        tried.append(run)
        raise RuntimeError("operation not permitted when stream is capturing")

    harness.runner._graphs.capture = refuse  # type: ignore[method-assign]
    with torch.inference_mode():
        assert not harness.runner.capture(StepShape(1, 6, 9), StepMode())
    assert "not permitted" in caplog.text
    wanted = asks(1.0)
    assert generated(harness.run(wanted)) == plain(wanted)
    assert len(tried) == 1, "once is enough to know"


# --- rows of a step go where guesses are likeliest


SHARED = [name for name, make in DRAFTERS.items() if make().surplus > 1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", SHARED)
def test_sequences_share_the_rows_of_a_step(name: str, temperature: float) -> None:
    wanted = asks(temperature)
    harness = CapturedHarness(DRAFTERS[name](), "match")
    harness.engine.controller = FixedBudget(2)
    answers = harness.run(wanted)
    assert generated(answers) == plain(wanted)
    uneven = [shape for shape, _ in harness.runner.ready if shape.proposed > shape.nodes]
    assert uneven
    assert not harness.eager
    assert not harness.runner._refused
    assert all(shape.batch > 1 for shape in uneven), "one sequence has all rows anyway"
    drafted = [answer.drafted / answer.steps for answer in answers]
    assert sum(drafted) <= 2 * padded_batch(len(answers)), "rows of absent sequences are theirs, too"
    assert max(drafted) > min(drafted)


@pytest.mark.parametrize("name", ["eagle3 beam", "beam"])
def test_corrected_chances_change_no_token(name: str) -> None:
    """The answers stay those of plain decoding while corrections are learnt; and they are learnt."""
    wanted = asks(1.0)
    harness = CapturedHarness(DRAFTERS[name](), "match")
    harness.engine.controller = FixedBudget(2)
    for _ in range(2):
        assert generated(harness.run(wanted)) == plain(wanted)
    learnt = harness.runner.parts.survival._counts
    assert sum(float(counts[0].sum()) for counts in learnt.values()) > 10


def test_whose_text_cannot_be_guessed_gives_its_rows_to_others() -> None:
    guessed, strange = (1, 2, 3), (5, 6, 7)

    def script(tokens):  # type: ignore[no-untyped-def]
        return [[4, 4, 4, 4]] if tokens[0] == guessed[0] else []

    harness = CapturedHarness(ScriptedDrafter(script, 4), "match")
    harness.engine.controller = FixedBudget(2)
    wanted = [Ask(prompt, SamplingParams(max_tokens=20, ignore_eos=True)) for prompt in (guessed, strange)]
    lucky, other = harness.run(wanted)
    assert generated([lucky, other]) == plain(wanted)
    assert other.drafted == 0
    assert lucky.drafted / lucky.steps > 2.5, "twice two rows are there, and nobody else wants them"


# --- laws, and what else must hold

DRAWN = (
    "sampled",
    "greedy",
    "independent",
    "without replacement",
    "hybrid",
    "paths",
    "tree",
    "coupled",
    "eagle3 hybrid",
)


def lawful() -> list[tuple[str, str]]:
    """Every law with every kind of draw it takes. The linear programs of `optimal` run on the host, and only there."""
    laws = [name for name in LAWS if name not in ("optimal", "match")]
    return [(name, law) for name in DRAWN for law in laws if LAWS[law]().refuses(DRAFTERS[name]().law) is None]


@pytest.mark.parametrize(("name", "law"), lawful())
def test_captured_laws_keep_what_they_keep_where_nothing_is_captured(name: str, law: str) -> None:
    """The same draws and the same odds, in trees with absent nodes and without a look at values."""
    params = [SamplingParams(temperature=0.8, top_p=0.9, seed=i, max_tokens=24) for i in range(3)]
    wanted = [Ask((i, 5, i), own) for i, own in enumerate(params)]
    eager = generated(Harness(runner(), DRAFTERS[name](), LAWS[law]()).run(wanted))
    harness = CapturedHarness(DRAFTERS[name](), law)
    captured = generated(harness.run(wanted))
    assert harness.runner.ready
    assert not harness.runner._refused
    # At an answer's end a step has a smaller tree, which draws other numbers.
    assert [answer[:-7] for answer in captured] == [answer[:-7] for answer in eager]


@pytest.mark.parametrize("name", ["eagle3 beam", "block beam", "hydra beam"])
def test_beams_are_those_of_steps_that_are_not_captured(name: str) -> None:
    wanted = [Ask((i, 3), SamplingParams(temperature=0.7 * (i % 2), seed=i, max_tokens=40)) for i in range(4)]
    hosted = Harness(runner(), DRAFTERS[name](), LAWS["match"]()).run(wanted)
    harness = CapturedHarness(DRAFTERS[name](), "match")
    answers = harness.run(wanted)
    assert generated(answers) == generated(hosted) == plain(wanted)
    assert harness.runner.ready
    guessed = [(answer.accepted, answer.steps) for answer in answers]
    assert sum(accepted for accepted, _ in guessed) > 0
    # The host's last trees are cut to what is still wanted, and its first one is a step later.
    assert all(
        abs(accepted - answer.accepted) <= 4 and abs(steps - answer.steps) <= 3
        for (accepted, steps), answer in zip(guessed, hosted, strict=True)
    )


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("name", ["none", "chain", "eagle3"])
def test_logits_that_are_no_numbers_end_their_own_request(name: str, temperature: float) -> None:
    """A text that holds token 11 gets rows of NaN; all others go on."""
    wanted = asks(temperature)
    harness = CapturedHarness(DRAFTERS[name](), "match")
    model, forward = harness.engine.target.model, harness.engine.target.model.forward

    def damaged(batch, cache, needs=frozenset()):  # type: ignore[no-untyped-def]
        out = forward(batch, cache, needs)
        bad = (batch.at_logits(batch.tokens) == 11)[:, None]
        return replace(out, logits=out.logits.masked_fill(bad, float("nan")))

    model.forward = damaged  # type: ignore[method-assign]
    harness.run(wanted)
    for i, said in enumerate(plain(wanted)):
        ends_with_error = 11 in said[:-1] or wanted[i].prompt[-1] == 11
        assert (harness.finish_reason(i) == FinishReason.ERROR) == ends_with_error
    assert {harness.finish_reason(i) for i in range(5)} == {FinishReason.ERROR, FinishReason.LENGTH}


def test_cancelled_answers_leave_their_neighbours_alone() -> None:
    wanted = asks(1.0, 5)
    wanted[2] = Ask(wanted[2].prompt, wanted[2].params, cancelled=4)
    harness = CapturedHarness(DRAFTERS["chain"](), "match")
    kept = [i for i in range(5) if i != 2]
    got, want = generated(harness.run(wanted)), plain(asks(1.0, 5))
    assert [got[i] for i in kept] == [want[i] for i in kept]
    assert want[2][: len(got[2])] == got[2]
    assert not harness.runner.state.sequences


@pytest.mark.parametrize("name", ["eagle3", "block", "medusa", "hydra"])
def test_new_weights_reach_steps_that_are_captured(name: str) -> None:
    """Captured graphs read weights in place: who changed its mind guesses like one that always thought so."""
    first = [Ask((3, i), SamplingParams(max_tokens=30)) for i in range(4)]
    then = [Ask((i, 7), SamplingParams(max_tokens=60)) for i in range(5)]
    runs = []
    for warmed in (True, False):
        drafter = DRAFTERS[name]()
        harness = CapturedHarness(drafter, "match")
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
    untouched = CapturedHarness(DRAFTERS[name](), "match").run(then)
    assert runs[0] != [(answer.steps, answer.accepted) for answer in untouched]


def test_the_outcome_of_a_step_too_many_is_dropped() -> None:
    """Even if later answers go by the same numbers, as they do in this harness."""
    harness, wanted = CapturedHarness(DRAFTERS["none"](), "match"), asks(0.0)
    surprise = [
        replace(ask, params=replace(ask.params, stop_token_ids=(tokens[3],)))
        for ask, tokens in zip(wanted, plain(wanted), strict=True)
    ]
    harness.run(surprise)
    assert harness.engine._in_flight is not None
    harness.events.clear()
    assert generated(harness.run(wanted)) == plain(wanted)


def test_a_drafter_learns_between_steps() -> None:
    wanted = [Ask((i, (3 * i + 1) % 13, 5), SamplingParams(max_tokens=40)) for i in range(6)]
    harness, rates = CapturedHarness(DRAFTERS["eagle3"](), "match"), []
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


def test_a_step_is_reported_with_the_length_of_its_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of prompt and answer as it was before the round: what longer ones cost is not the guesses' fault."""
    harness, heard = CapturedHarness(DRAFTERS["ngram"](), "match"), []
    monkeypatch.setattr(harness.engine.controller, "observe", heard.append)
    harness.run([Ask((1, 2, 3), SamplingParams(max_tokens=12))])
    assert len(heard) > 1
    lengths = [report.context for report in heard]
    assert lengths[0] >= 3
    assert [b - a for a, b in itertools.pairwise(lengths)] == [report.emitted for report in heard[:-1]]


def test_the_last_step_that_nothing_disturbed_is_kept_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    harness, heard = CapturedHarness(DRAFTERS["ngram"](), "match"), []
    monkeypatch.setattr(harness.engine.controller, "observe", heard.append)
    assert harness.engine.last_step is None
    harness.run([Ask((1, 2, 3), SamplingParams(max_tokens=12))])
    timed = [report for report in heard if report.step_seconds is not None and report.num_sampling]
    assert harness.engine.last_step == TimedStep(timed[-1], timed[-1].step_seconds)


def test_steps_that_are_launched_one_by_one_are_the_same() -> None:
    wanted = asks(1.0)
    harness = CapturedHarness(DRAFTERS["chain"](), "match")
    harness.runner.captures = False
    assert generated(harness.run(wanted)) == plain(wanted)


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafters_forget_sequences_that_have_ended(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees that the host makes, and steps on the host between captured ones, leave state there."""
    harness, released = CapturedHarness(DRAFTERS[name](), "match"), []
    forget = harness.engine.drafter.release
    monkeypatch.setattr(harness.engine.drafter, "release", lambda seq_id: (released.append(seq_id), forget(seq_id)))
    answers = harness.run(asks(1.0))
    assert sorted(released) == sorted(answer.id for answer in answers)
