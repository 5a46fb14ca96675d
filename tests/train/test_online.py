"""Drafters that learn while they serve: they really get better, never worse than they were, and nobody waits long."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from draftwood.cli import app
from draftwood.config import EngineConfig
from draftwood.drafters.eagle import RecurrentDrafter
from draftwood.drafters.features import FeatureDrafter
from draftwood.drafters.model import ModelDrafter
from draftwood.drafters.predicted import PredictedDrafter
from draftwood.drafting import Drafter
from draftwood.engine.llm import LLM
from draftwood.engine.worker import ComputeThread
from draftwood.errors import CheckpointError, IncompatibleParts, InvalidRequest
from draftwood.growers import chain
from draftwood.model.checkpoint import open_checkpoint
from draftwood.nets.eagle import Eagle3, Eagle3Spec
from draftwood.nets.embeddings import TargetEmbeddings
from draftwood.nets.export import export
from draftwood.nets.parts import DraftHead
from draftwood.request import FinishReason, SamplingParams
from draftwood.train.online import LEARNT, RUNNING, START, AdaptConfig, Adapter, Contest, TimeShare, adapt
from draftwood.train.optim import OptimConfig
from draftwood.train.recipes import Target, find_recipe
from draftwood.train.traffic import SHORTEST, Traffic, pieces
from draftwood.verifiers import LAWS
from tiny import (
    CPU,
    Ask,
    DraftMaker,
    Harness,
    TinyCheckpoint,
    no_drafter,
    offering,
    randomised,
    tiny_config,
    tiny_folder,
    tiny_runner,
    with_net,
    with_student,
)

F32 = torch.float32  # where our own kernels have packed copies of the weights


def own_head(dtype: torch.dtype) -> Drafter:
    """An EAGLE-3 whose head learns too."""
    words = TargetEmbeddings(TinyCheckpoint(tiny_config()), CPU, dtype)
    config = words.config.with_layers(1)
    head = DraftHead(words.head(), None, config.vocab_size, own=True)
    net = randomised(Eagle3(config, Eagle3Spec((0, 1), config.hidden_size), head).to(dtype), 3)
    return RecurrentDrafter(net, words, chain(3))


MAKERS: dict[str, DraftMaker] = {
    "eagle3": with_net("eagle3", chain(3)),
    "own head": own_head,
    "block": with_net("dspark", chain(3)),
    "medusa": with_net("medusa", chain(3)),
    "hydra": with_net("hydra", chain(3)),
    "kangaroo": with_net("kangaroo", chain(3)),
    "peagle": with_net("peagle", chain(3)),
    "student": with_student(chain(3)),
}
FAST = OptimConfig(lr=5e-3, muon_lr=0.03, weight_decay=0.0)
EAGER = AdaptConfig(share=1.0, length=96, window=2, repeats=6, optimizer=FAST)


def no_time_passes() -> float:
    return 0.0


def adapting(maker: DraftMaker, config: AdaptConfig = EAGER) -> tuple[Harness, Adapter]:
    harness = Harness(tiny_runner(dtype=F32), maker(F32), LAWS["match"]())
    harness.companion = adapter = Adapter(harness.engine, config, clock=no_time_passes)
    return harness, adapter


def serve(harness: Harness, shift: int = 0) -> float:
    """The same few requests; tokens a step."""
    params = SamplingParams(max_tokens=40)
    answers = harness.run([Ask((i, (3 * i + 1) % 13, 5 + shift), params) for i in range(6)])
    return sum(answer.num_generated for answer in answers) / sum(answer.steps for answer in answers)


def finish(adapter: Adapter) -> None:
    while adapter.wants(busy=False) <= 0:
        adapter.work()


def weights_of(drafter: Any) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in drafter.module.named_parameters()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


# --- learning


@pytest.mark.parametrize("kind", list(MAKERS))
def test_repeated_traffic_is_guessed_better_and_better(kind: str) -> None:
    harness, adapter = adapting(MAKERS[kind])
    before = serve(harness)
    for _ in range(5):
        after = serve(harness)
        finish(adapter)
    assert after > 1.25 * before, (before, after)
    progress = adapter.progress
    assert progress.answers == 36
    assert progress.adopted >= 2
    assert progress.scores[RUNNING] > 1.15 * progress.scores[START]


def test_without_an_adapter_nothing_changes() -> None:
    harness, _ = adapting(MAKERS["eagle3"])
    harness.companion = None
    before = weights_of(harness.engine.drafter)
    assert serve(harness) == serve(harness)
    assert same(weights_of(harness.engine.drafter), before)


def changed(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(8)
    return {
        n: w + 0.3 * w.std() * torch.randn(w.shape, generator=generator) for n, w in weights.items() if w.dim() > 1
    } | {n: w for n, w in weights.items() if w.dim() < 2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", list(MAKERS))
def test_new_weights_reach_every_copy(kind: str, dtype: torch.dtype) -> None:
    """A drafter that changed its mind guesses what one would that always thought so."""
    asks = [Ask((i, 7, 2), SamplingParams(max_tokens=60)) for i in range(8)]
    runs = []
    for warmed in (True, False):
        drafter: Any = MAKERS[kind](dtype)
        harness = Harness(tiny_runner(dtype=dtype), drafter, LAWS["match"]())
        if warmed:
            serve(harness)
        weights = changed(weights_of(drafter))
        drafter.update(weights)
        assert same(weights_of(drafter), {name: weight.to(dtype) for name, weight in weights.items()})
        runs.append([(a.steps, a.accepted, a.tokens) for a in harness.run(asks)])
    assert runs[0] == runs[1]
    untouched = Harness(tiny_runner(dtype=dtype), MAKERS[kind](dtype), LAWS["match"]()).run(asks)
    assert runs[0] != [(a.steps, a.accepted, a.tokens) for a in untouched]


def test_it_learns_the_same_every_time() -> None:
    runs = []
    for _ in range(2):
        harness, adapter = adapting(MAKERS["block"])  # whose anchors are drawn
        torch.manual_seed(len(runs))
        serve(harness), finish(adapter)
        runs.append((adapter.progress, weights_of(harness.engine.drafter)))
    assert runs[0][0] == runs[1][0]
    assert same(runs[0][1], runs[1][1])


# --- the guard


def test_a_destructive_learning_rate_never_comes_to_run() -> None:
    harness, teacher = adapting(MAKERS["eagle3"])
    for _ in range(4):
        serve(harness), finish(teacher)
    harness.companion, drafter = None, harness.engine.drafter
    good, start = serve(harness), weights_of(drafter)
    wild = replace(EAGER, optimizer=OptimConfig(lr=1.0, muon_lr=3.0, weight_decay=0.0), repeats=2)
    harness.companion = adapter = Adapter(harness.engine, wild, clock=no_time_passes)
    for _ in range(3):
        assert serve(harness) == good
        finish(adapter)
    progress = adapter.progress
    assert progress.discarded >= 3
    assert progress.adopted == 0
    assert progress.scores[LEARNT] < progress.scores[RUNNING] == progress.scores[START]
    assert same(weights_of(drafter), start)
    assert adapter._factor == 0.5**progress.discarded, "it should have become more careful"


def test_what_turns_out_worse_than_the_start_goes_back_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts = iter([LEARNT, LEARNT, START])
    monkeypatch.setattr(Contest, "enter", lambda self, scores: next(verdicts, None))
    harness, adapter = adapting(MAKERS["eagle3"])
    drafter = harness.engine.drafter
    start = weights_of(drafter)
    serve(harness)
    while adapter.progress.lessons < 3:
        serve(harness)
        if adapter.progress.adopted == 2 and adapter.progress.discarded == 0:
            assert not same(weights_of(drafter), start)
    assert adapter.progress.discarded == 1
    assert same(weights_of(drafter), start)


def test_a_contest_is_decided_by_whole_windows() -> None:
    contest = Contest(2)
    assert contest.enter({RUNNING: 2.0, LEARNT: 9.0, START: 1.0}) is None
    assert contest.enter({RUNNING: 2.0, LEARNT: 1.0, START: 1.0}) == LEARNT
    assert contest.means == {RUNNING: 2.0, LEARNT: 5.0, START: 1.0}
    contest.enter({RUNNING: 2.0, LEARNT: 1.0, START: 2.5})
    assert contest.enter({RUNNING: 2.0, LEARNT: 1.0, START: 2.5}) == START
    contest.enter({RUNNING: 2.0, LEARNT: 2.0, START: 2.0})
    assert contest.enter({RUNNING: 2.0, LEARNT: 2.0, START: 2.0}) == RUNNING, "a draw changes nothing"


# --- time


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("share", [0.05, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("idle_every", [0, 10])
def test_work_stays_within_its_share(share: float, idle_every: int) -> None:
    """Steps of 0.1 s and pieces of 1 s, of ten steps five with nothing to do, or none."""
    clock = Clock()
    pace, spent, when = TimeShare(share, clock), 0.0, {True: 0, False: 0}
    for step in range(20_000):
        busy = not idle_every or step % idle_every < idle_every // 2
        if pace.wait(busy=busy) <= 1e-9:
            clock.now += 1.0
            pace.spend(1.0)
            spent += 1.0
            when[busy] += 1
        clock.now += 0.1
        assert spent <= share * clock.now + 1.0 + 1e-6
    assert spent > 0.9 * min(share, 1 / 1.1) * clock.now, "what it may have, it should use"
    if idle_every and share < 0.5:
        assert when[False] > 50 * when[True]


def test_waiting_as_long_as_it_says_is_enough() -> None:
    clock = Clock()
    pace = TimeShare(0.1, clock)
    for busy in (False, True, False):
        clock.now += pace.wait(busy=busy)
        assert pace.wait(busy=busy) == pytest.approx(0, abs=1e-9)
        clock.now += 2.0
        pace.spend(2.0)
        assert pace.wait(busy=True) > 0


# --- what is learnt from


def test_only_finished_answers_in_the_targets_own_words_count() -> None:
    harness, adapter = adapting(MAKERS["medusa"])
    harness.companion = None
    (answer,) = harness.run([Ask((1, 2), SamplingParams(max_tokens=20))])
    for reason in (FinishReason.CANCELLED, FinishReason.ERROR):
        adapter.hear(answer, reason)
    answer.lossless = False
    adapter.hear(answer, FinishReason.STOP)
    assert adapter.progress.answers == 0
    answer.lossless = True
    adapter.hear(answer, FinishReason.STOP)
    assert adapter.progress.answers == 1
    assert adapter.wants(busy=False) == math.inf, "one answer does not fill a lesson"


def test_lessons_are_full_bounded_and_the_latest() -> None:
    traffic = Traffic(64, lessons=3)
    for i in range(20):
        traffic.add([i] * 10, [i] * 20)
    assert traffic.num_fresh == 3
    lessons = [traffic.take() for _ in range(3)]
    assert [set(lesson.tokens.flatten().tolist()) for lesson in lessons] == [{12, 13}, {14, 15}, {16, 17}]
    assert all(lesson.tokens.shape == (1, 60) and lesson.answer.sum() == 40 for lesson in lessons)
    traffic.add([1], [1] * (SHORTEST - 1))
    assert traffic.num_fresh == 0, "too short to count"
    traffic.add([2] * 40, [2] * 24)
    assert set(traffic.take().tokens.flatten().tolist()) == {18, 19}
    assert traffic.num_fresh == 0
    assert len(traffic.known) == 3
    with pytest.raises(InvalidRequest):
        Traffic(8, 1)


def test_long_texts_come_in_pieces_that_are_all_the_targets() -> None:
    prompt, answer = list(range(1000)), list(range(1000, 1200))
    parts = list(pieces(prompt, answer, 64))
    assert [token for _, part in parts for token in part] == answer[: sum(len(part) for _, part in parts)]
    assert sum(len(part) for _, part in parts) > 200 - SHORTEST
    for given, part in parts:
        assert len(given) + len(part) <= 64
        assert list(given) + list(part) == list(range(given[0], part[-1] + 1)), "what is given comes right before"
    assert parts[0][0] == prompt[-32:]
    assert list(pieces([1], [1] * 7, 64)) == []


def test_nobody_loses_a_page_to_a_lesson() -> None:
    harness, adapter = adapting(MAKERS["eagle3"])
    harness.companion = None
    answers = harness.run([Ask((i, 3), SamplingParams(max_tokens=60)) for i in range(6)])
    pool = harness.engine.scheduler.tables.pool
    before = dict(pool._address)
    for answer in answers:
        adapter.hear(answer, FinishReason.LENGTH)
    finish(adapter)
    assert adapter.progress.steps > 6
    assert pool._address == before, "what was remembered is forgotten"
    harness.check()


@pytest.mark.parametrize(
    "wrong", [{"share": 0.0}, {"share": 1.5}, {"length": 0}, {"window": 0}, {"repeats": 0}, {"clip": -1.0}]
)
def test_impossible_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidRequest):
        AdaptConfig(**wrong)  # type: ignore[arg-type]


# --- a whole LLM


SMALL = EngineConfig(device="cpu", cache_tokens=4096, page_size=16, threads=1, controller="fixed")
SETTINGS = {"eagle3": {"reads": 2}, "student": {"layers": 1}}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_folder(tmp_path_factory.mktemp("models") / "tiny", layers=3))


@pytest.fixture(scope="module")
def untrained(target: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Drafters as a recipe begins them."""
    checkpoint, folder = open_checkpoint(target), tmp_path_factory.mktemp("drafters")

    def make(method: str) -> str:
        if not (folder / method).exists():
            torch.manual_seed(5)
            words = TargetEmbeddings(checkpoint, CPU, F32)
            net = find_recipe(method)[1].build(Target(checkpoint.config, words, None), SETTINGS[method])
            export(net, folder / method, "tiny", {})
        return str(folder / method)

    return make


def ask_all(llm: LLM, prompts: Sequence[str] = ("abc", "hello", "The sky")) -> tuple[list[tuple[int, ...]], float]:
    """One after the other, so that every run is the same."""
    results = [llm.generate(prompt, SamplingParams(max_tokens=48, ignore_eos=True)) for prompt in prompts]
    return [r.token_ids for r in results], sum(r.stats.num_tokens for r in results) / sum(
        r.stats.steps for r in results
    )


@pytest.mark.parametrize("method", ["eagle3", "student"])
def test_an_llm_learns_keeps_its_words_and_the_drafter_can_be_saved(
    method: str, target: str, untrained: Callable[[str], str], tmp_path: Path
) -> None:
    with LLM(target, config=SMALL) as plain:
        wanted, _ = ask_all(plain)
    with LLM(target, drafter=untrained(method), config=SMALL) as llm:
        adapter = adapt(llm, EAGER)
        first = ask_all(llm)
        for _ in range(7):
            last = ask_all(llm)
            adapter.catch_up()
        assert first[0] == last[0] == wanted
        assert last[1] > 1.3 * first[1]
        folder = adapter.save(tmp_path / "adapted")
        llm.accompany(None)
        served = ask_all(llm)
        steps = adapter.progress.steps
    assert adapter.progress.steps == steps
    with LLM(target, drafter=str(folder), config=SMALL) as again:
        assert again.engine.drafter.max_nodes > 0
        tokens, rate = ask_all(again)
    assert tokens == wanted
    assert rate == pytest.approx(served[1], rel=0.1), "it was written in bfloat16"


def test_idle_time_is_used_without_being_asked(target: str, untrained: Callable[[str], str]) -> None:
    with LLM(target, drafter=untrained("eagle3"), config=SMALL) as llm:
        adapter = adapt(llm, replace(EAGER, share=0.9))
        ask_all(llm)
        deadline = time.monotonic() + 60
        while adapter.wants(busy=False) != math.inf and time.monotonic() < deadline:
            time.sleep(0.05)
        assert adapter.progress.lessons >= 1
        assert adapter.progress.steps == EAGER.repeats * adapter.progress.lessons


def test_cancelled_requests_do_no_harm(target: str, untrained: Callable[[str], str]) -> None:
    with LLM(target, config=SMALL) as plain:
        wanted, _ = ask_all(plain)
    with LLM(target, drafter=untrained("eagle3"), config=SMALL) as llm:
        adapter = adapt(llm, EAGER)
        for prompt in ("abc", "xyz"):
            stream = llm.stream(prompt, SamplingParams(max_tokens=400, ignore_eos=True))
            next(stream)
            stream.close()
        assert ask_all(llm)[0] == wanted
        assert ComputeThread.shared().call(lambda: adapter.progress.answers) == 3
        llm.engine.scheduler.tables.check()


def test_a_companion_that_fails_is_left_behind(target: str, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def hear(self, answer: object, reason: FinishReason) -> None:
            pass

        def wants(self, *, busy: bool) -> float:
            return 0.0

        def work(self) -> None:
            raise RuntimeError

    with LLM(target, config=SMALL) as llm, caplog.at_level(logging.ERROR):
        wanted = ask_all(llm)
        llm.accompany(Broken())
        assert ask_all(llm) == wanted
    assert caplog.text.count("has failed, and is left behind") == 1


@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_what_has_no_weights_is_refused(target: str, drafter: str) -> None:
    with LLM(target, drafter=drafter, config=SMALL) as llm:
        with pytest.raises(IncompatibleParts, match="Only trained drafters can be adapted"):
            adapt(llm)
        assert ask_all(llm, ["abc"])[1] >= 1


def test_a_second_model_is_refused_and_whoever_passes_guesses_on_is_asked_for_the_learner() -> None:
    with pytest.raises(IncompatibleParts, match="Only trained"):
        Adapter(Harness(tiny_runner(), ModelDrafter(tiny_runner(), chain(2)), LAWS["match"]()).engine)
    harness = Harness(tiny_runner(dtype=F32), PredictedDrafter(MAKERS["eagle3"](F32)), LAWS["match"]())
    assert isinstance(Adapter(harness.engine, EAGER)._drafter, FeatureDrafter)
    offered = offering(no_drafter, MAKERS["eagle3"])(F32)
    harness = Harness(tiny_runner(dtype=F32), offered, LAWS["match"]())
    assert isinstance(Adapter(harness.engine, EAGER)._drafter, FeatureDrafter)


# --- the command line


def chat(*arguments: str, lines: Sequence[str]) -> Any:
    result = CliRunner().invoke(app, ["chat", *arguments], input="\n".join(lines) + "\n")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_chat_adapts_and_saves_on_request(target: str, untrained: Callable[[str], str], tmp_path: Path) -> None:
    flags = ("-m", target, "-n", "8", "--drafter", untrained("eagle3"))
    plain = chat(*flags, lines=["Hello", "Again"])
    result = chat(*flags, "--adapt", lines=["Hello", "Again", f"/save {tmp_path / 'kept'}"])
    assert result.exit_code == 0, result.stderr
    assert result.stdout == plain.stdout
    assert "after 2 answers" in result.stderr
    assert (
        chat("-m", target, "-n", "8", "--drafter", str(tmp_path / "kept"), lines=["Hello", "Again"]).stdout
        == plain.stdout
    )


def test_chat_explains_what_cannot_be(target: str, untrained: Callable[[str], str], tmp_path: Path) -> None:
    drafter = ("--drafter", untrained("eagle3"))
    for arguments, line, words in (
        (("--adapt",), "Hello", "'suffix' cannot learn"),
        (("--adapt", "--drafter", f"model:{target}"), "Hello", "cannot learn"),
        (drafter, f"/save {tmp_path}", "start with --adapt"),
        ((*drafter, "--adapt"), "/save", "Say where to"),
        ((*drafter, "--adapt"), f"/save {target}", "choose another"),
    ):
        result = chat("-m", target, *arguments, lines=[line])
        assert result.exit_code == 1
        assert words in result.stderr.replace("\n", " ")


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    _, adapter = adapting(MAKERS["medusa"])
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError):
        adapter.save(tmp_path / "file" / "deeper")
