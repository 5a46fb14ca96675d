"""A drafter that raises costs its requests their drafts, never their answers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from captured import GPU, CapturedHarness, runner
from draftwood import LLM
from draftwood.drafters.by_request import OfferedDrafters
from draftwood.drafters.lookup import LookupDrafter
from draftwood.drafters.ngram import NgramDrafter
from draftwood.drafters.none import NoDrafter
from draftwood.drafters.scripted import ScriptedDrafter
from draftwood.drafting import Drafter, Proposal
from draftwood.faults import MOST_IN_A_ROW, QUIET_SECONDS, DrafterHealth
from draftwood.growers import Best, Independent, Levels, chain
from draftwood.protocols import BatchView
from draftwood.request import FinishReason, SamplingParams
from draftwood.tree import TokenTree
from draftwood.verifiers import LAWS
from serving import SMALL, serving
from tiny import Ask, Harness, Regime, generated, ngram, tiny_folder, tiny_runner, with_arrivals, with_model, with_net

pytestmark = pytest.mark.usefixtures("drafters_may_fail")
CALLS = ("prepare", "propose", "ingest", "commit", "release")


@dataclass
class Faulty:
    """Another drafter, of whose calls some raise: before they do anything, or once they have done it."""

    drafter: Drafter
    fails: Callable[[str, int, object], bool]  # by the call's name, how often it was made, its first argument
    late: bool = False
    error: type[Exception] = LookupError
    calls: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CALLS, 0))

    @property
    def law(self):
        return self.drafter.law

    @property
    def max_nodes(self) -> int:
        return self.drafter.max_nodes

    @property
    def sizes(self):
        return self.drafter.sizes

    @property
    def surplus(self) -> int:
        return self.drafter.surplus

    @property
    def needs(self) -> frozenset[int]:
        return self.drafter.needs

    @property
    def reads(self) -> bool:
        return self.drafter.reads

    @property
    def waits(self) -> bool:
        return self.drafter.waits

    @property
    def remembers(self) -> bool:
        return self.drafter.remembers

    def attach(self, target) -> None:
        self.drafter.attach(target)

    def depth(self, nodes: int) -> int:
        return self.drafter.depth(nodes)

    def staged(self, nodes: int) -> int:
        return self.drafter.staged(nodes)

    def _call(self, name: str, *arguments):
        self.calls[name] += 1
        failing = self.fails(name, self.calls[name], arguments[0])
        if failing and not self.late:
            raise self.error(f"{name} went wrong")
        done = getattr(self.drafter, name)(*arguments)
        if failing:
            raise self.error(f"{name} went wrong")
        return done

    def prepare(self, *arguments) -> None:
        self._call("prepare", *arguments)

    def propose(self, *arguments) -> Proposal:
        return self._call("propose", *arguments)

    def ingest(self, *arguments) -> None:
        self._call("ingest", *arguments)

    def commit(self, *arguments) -> None:
        self._call("commit", *arguments)

    def release(self, *arguments) -> None:
        self._call("release", *arguments)


def asks(temperature: float = 1.0) -> list[Ask]:
    prompts = [(1, 2, 3, 1, 2), (5,), (7, 7, 8, 7, 7), tuple(range(1, 12)) * 2, (4, 4), (9, 1, 9, 1, 9)]
    return [
        Ask(prompt, SamplingParams(temperature=temperature, seed=i, max_tokens=10 + 5 * i))
        for i, prompt in enumerate(prompts)
    ]


def plain(temperature: float = 1.0) -> list[list[int]]:
    return generated(Harness(tiny_runner(), NoDrafter(), LAWS["match"]()).run(asks(temperature)))


def health_of(harness: Harness) -> DrafterHealth:
    return harness.engine.health[0]


DRAFTERS = {
    "ngram": ngram(nodes=4, longest=3, shortest=1),
    "model": with_model(Levels((3, 2, 1), Best())),
    "sampled": with_model(Levels((1, 1, 1), Independent())),
    "eagle3": with_net("eagle3", Levels((2, 2), Best())),
    "medusa": with_net("medusa", Levels((2, 1, 1), Best())),
}
WAYS: dict[str, Callable[[str, int, object], bool]] = {
    "propose once": lambda name, count, _: name == "propose" and count == 3,
    "propose now and then": lambda name, count, _: name == "propose" and count % 3 == 0,
    "commit once": lambda name, count, _: name == "commit" and count == 2,
    "commit now and then": lambda name, count, _: name == "commit" and count % 2 == 0,
    "ingest now and then": lambda name, count, _: name == "ingest" and count % 3 == 2,
    "prepare now and then": lambda name, count, _: name == "prepare" and count % 3 == 2,
    "release": lambda name, count, _: name == "release" and count % 2 == 0,
    "one request": lambda name, _, view: (
        name == "propose" and isinstance(view, BatchView) and 3 in view.rows and int(view.lengths[-1]) % 4 == 0
    ),
    "always": lambda name, *_: name == "propose",
    "always commit": lambda name, *_: name == "commit",
    "everything": lambda *_: True,
}


EARLY = [(way, False) for way in WAYS]
LATE = [(way, True) for way in ("propose now and then", "commit now and then", "ingest now and then", "everything")]


@pytest.mark.parametrize(("way", "late"), EARLY + LATE)
@pytest.mark.parametrize("name", DRAFTERS)
def test_answers_are_those_of_plain_decoding(name: str, way: str, late: bool) -> None:
    """In batches, in chunks and under preemption."""
    faulty = Faulty(DRAFTERS[name](torch.float64), WAYS[way], late)
    harness = Harness(tiny_runner(num_pages=24), faulty, LAWS["match"](), Regime(max_rows=16, num_pages=24))
    answers = harness.run(asks())
    assert generated(answers) == plain()
    assert all(event.error is None for event in harness.events)
    health = health_of(harness)
    if way != "prepare now and then" or faulty.waits:
        assert health.failures > 0
        assert "LookupError" in (health.last_error or "")
    assert health.disabled == (way in ("always", "always commit", "everything"))
    if way.endswith("once") and name in ("model", "sampled"):
        assert sum(answer.accepted for answer in answers) > 0, "the drafter was not asked again"


def test_a_drafter_is_switched_off_after_some_failures_in_a_row() -> None:
    faulty = Faulty(ngram(nodes=4, longest=3, shortest=1)(torch.float64), WAYS["always"])
    harness = Harness(tiny_runner(), faulty, LAWS["match"]())
    harness.run(asks())
    assert faulty.calls["propose"] == MOST_IN_A_ROW
    assert health_of(harness).failures == MOST_IN_A_ROW
    assert harness.engine.scheduler.budget.max_nodes == 0
    assert "switched off" in str(harness.engine.scheduler.budget.why)
    assert faulty.calls["release"] >= len(asks()), "what it holds would never be freed"


def test_failures_with_success_in_between_never_switch_it_off() -> None:
    faulty = Faulty(ngram(nodes=4, longest=3, shortest=1)(torch.float64), WAYS["propose now and then"])
    harness = Harness(tiny_runner(), faulty, LAWS["match"]())
    answers = harness.run(asks())
    assert health_of(harness).failures > MOST_IN_A_ROW
    assert not health_of(harness).disabled
    assert any(answer.drafted for answer in answers)


def test_trees_for_other_sequences_than_asked_are_a_failure() -> None:
    class TooFew(NgramDrafter):
        def propose(self, view: BatchView, nodes: int, rng) -> Proposal:
            return Proposal(TokenTree.roots(view.roots[:-1]))

    harness = Harness(tiny_runner(), TooFew(nodes=4), LAWS["match"]())
    assert generated(harness.run(asks())) == plain()
    assert "5 trees were proposed for 6 sequences" in (health_of(harness).last_error or "")


@pytest.mark.parametrize("call", ["propose", "commit"])
def test_only_the_requests_of_the_failing_drafter_lose_their_drafts(call: str) -> None:
    faulty = Faulty(with_model(chain(3))(torch.float64), lambda name, *_: name == call)
    offered = OfferedDrafters(with_model(chain(3))(torch.float64), {"good": NgramDrafter(nodes=4), "bad": faulty})
    wanted = [
        replace(ask, params=replace(ask.params, drafter="bad" if i % 2 else None)) for i, ask in enumerate(asks(0.0))
    ]
    harness = Harness(tiny_runner(), offered, LAWS["match"]())
    answers = harness.run(wanted)
    assert generated(answers) == plain(0.0)
    by_name = {health.name: health for health in harness.engine.health}
    assert {name: health.failures for name, health in by_name.items()} == {
        "default": 0,
        "good": 0,
        "bad": MOST_IN_A_ROW,
    }
    assert [health.disabled for health in by_name.values()] == [name == "bad" for name in by_name]
    drafted = [sum(answer.drafted for answer in answers[i::2]) for i in range(2)]
    assert drafted[0] > 10 * (drafted[1] if call == "propose" else 1)


CAPTURED: dict[str, tuple[Callable[[int], Drafter], str]] = {
    "ngram propose": (lambda _: LookupDrafter(nodes=6, longest=3, shortest=1), "propose"),
    "hosted prepare": (lambda _: ScriptedDrafter(lambda tokens: [[1, 2], [5, 5]], 7), "prepare"),
    "hosted propose": (lambda _: ScriptedDrafter(lambda tokens: [[1, 2], [5, 5]], 7), "propose"),
    "model propose": (lambda pages: with_model(chain(3), num_pages=pages)(torch.float64), "propose"),
    "model ingest": (lambda pages: with_model(chain(3), num_pages=pages)(torch.float64), "ingest"),
    "model commit": (lambda pages: with_model(chain(3), num_pages=pages)(torch.float64), "commit"),
    "eagle3 ingest": (lambda _: with_net("eagle3", chain(3))(torch.float64), "ingest"),
    "eagle3 commit": (lambda _: with_net("eagle3", chain(3))(torch.float64), "commit"),
}


@pytest.mark.skipif(GPU, reason="the drafters are the CPU's")
@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("regime", [Regime(), Regime(max_rows=7, num_pages=24, max_running=3)], ids=["easy", "hard"])
@pytest.mark.parametrize("name", CAPTURED)
def test_captured_steps_go_on_plainly(name: str, regime: Regime, after: int) -> None:
    """When it fails as a step is captured, and when it fails in the middle of answers."""
    make, call = CAPTURED[name]
    faulty = Faulty(make(regime.num_pages), lambda c, count, _: c == call and count > after, error=RuntimeError)
    harness = CapturedHarness(faulty, "match", regime)
    answers = harness.run(with_arrivals(asks(), every=2))
    assert generated(answers) == generated(Harness(runner(), NoDrafter(), LAWS["match"]()).run(asks()))
    health = health_of(harness)
    # The host makes trees for every step anew, and text may be read by a step that is not captured.
    assert health.failures in {"prepare": [MOST_IN_A_ROW], "ingest": range(1, 1 + MOST_IN_A_ROW)}.get(call, [1])
    assert health.disabled
    assert "went wrong" in (health.last_error or "")
    assert {shape.nodes for shape, _ in harness.runner.ready} == {0}
    pool = harness.engine.scheduler.tables.pool
    assert pool.num_available == pool.num_pages


def test_the_log_names_the_drafter_and_does_not_repeat_itself(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    health = DrafterHealth("ngram", clock=lambda: now[0])
    with caplog.at_level(logging.ERROR, "draftwood.faults"):
        for second in range(int(QUIET_SECONDS) + 1):
            now[0] = second
            health.failed("propose", ValueError(f"step {second}"))
            health.worked()
        health.failed("propose", KeyError("other"))
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "The drafter 'ngram' failed: ValueError in propose: step 0",
        "The drafter 'ngram' failed: ValueError in propose: step 60",
        "The drafter 'ngram' failed: KeyError in propose: 'other'",
    ]
    assert health.failures == QUIET_SECONDS + 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    faulty = Faulty(NgramDrafter(nodes=4, longest=3, shortest=1), WAYS["always"])
    with LLM(folder, drafter=faulty, config=SMALL) as made:
        yield made


def test_the_engine_and_the_metrics_tell_of_it(llm: LLM, folder: Path) -> None:
    with LLM(folder, config=SMALL) as other:
        wanted = other.generate(["abc", "abcabc"], SamplingParams(max_tokens=20))
    with serving(llm) as served:
        results = llm.generate(["abc", "abcabc"], SamplingParams(max_tokens=20))
        assert [r.token_ids for r in results] == [r.token_ids for r in wanted]
        assert {r.finish_reason for r in results} <= {FinishReason.LENGTH, FinishReason.STOP}
        assert llm.pulse.failures == 0
        assert llm.pulse.failure is None
        assert [(h.name, h.failures, h.disabled) for h in llm.drafter_health] == [("Faulty", MOST_IN_A_ROW, True)]
        with served.http() as http:
            page = http.get("/metrics").text
            assert http.get("/health").status_code == 200
    assert f'draftwood:drafter_failures_total{{drafter="Faulty",model_name="tiny"}} {float(MOST_IN_A_ROW)}' in page
    assert 'draftwood:drafter_disabled{drafter="Faulty",model_name="tiny"} 1.0' in page
