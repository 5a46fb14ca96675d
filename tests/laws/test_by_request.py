"""Requests that bring their own law: each gets what an engine of that law gives it alone, and nobody else notices."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draftwood import LLM, EngineConfig, FinishReason, Result, SamplingParams
from draftwood.assembly import build_verifier, choose_law
from draftwood.engine.controller import FixedBudget
from draftwood.errors import IncompatibleParts, InvalidRequest
from draftwood.growers import Best, Independent, Levels
from draftwood.protocols import BatchView, Budget, Load, StepMode, StepReport, Verifier
from draftwood.tree import POINT_CHAIN, POINT_TREE, DraftLaw, Draw, TokenTree, Verdict
from draftwood.verifiers import LAWS, ByRequest
from enumeration import law_of, random_rows, target_rows, view_of
from tiny import EASY, Ask, Harness, Regime, generated, tiny_folder, tiny_runner, with_model
from trees import gained, tree_of

SAMPLED = SamplingParams(temperature=1.0, max_tokens=20)
CHAIN = with_model(Levels((1, 1, 1), Independent()))
NAMED = [
    "match",
    "block",
    "walk",
    "mixture",
    None,
    "typical:threshold=0.2,alpha=0.05",
    "layer",
    None,
    "mixture:weight=0.5",
]


def requests(laws: list[str | None]) -> list[Ask]:
    return [Ask((i % 13, 3, (5 * i) % 13), replace(SAMPLED, seed=70 + i, law=law)) for i, law in enumerate(laws)]


def engine(default: Verifier, regime: Regime = EASY) -> Harness:
    target = tiny_runner(num_pages=regime.num_pages, page_size=regime.page_size)
    return Harness(target, CHAIN(torch.float64), default, regime)


# --- in the engine


@pytest.mark.parametrize("default", ["token", "match", "mixture"])
def test_each_gets_what_an_engine_of_its_own_law_gives_it_alone(default: str) -> None:
    asks = requests(NAMED)
    together = generated(engine(ByRequest(LAWS[default](), build_verifier)).run(asks))
    for ask, got in zip(asks, together, strict=True):
        alone = engine(build_verifier(ask.params.law or default)).run([ask])
        assert got == generated(alone)[0], ask.params.law


def test_nor_does_the_schedule_matter() -> None:
    """In chunks, with too few pages and in another order of arrival; one chain of three always has room."""
    asks = requests(["match", "block", "walk", "mixture", None])
    wanted = generated(engine(ByRequest(LAWS["block"](), build_verifier)).run(asks))
    for regime in (Regime(max_rows=40, num_pages=60), Regime(max_running=2)):
        late = [replace(ask, arrives=3 * (i % 3)) for i, ask in enumerate(asks)]
        harness = engine(ByRequest(LAWS["block"](), build_verifier), regime)
        assert generated(harness.run(late)) == wanted


def test_laws_really_differ_here() -> None:
    """Otherwise everything above would hold of one law under many names."""
    texts = {law: tuple(map(tuple, generated(engine(LAWS[law]()).run(requests([None] * 4))))) for law in LAWS_HERE}
    assert len(set(texts.values())) == len(texts)


LAWS_HERE = ("match", "block", "walk", "mixture", "typical")


# --- one verdict


def batch_of_three() -> tuple[TokenTree, torch.Tensor]:
    """Trees of one, two and no levels."""
    q = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6]], dtype=torch.float64)
    tree = tree_of([0, 1, 2, 0, 2, 1], [-1, 0, -1, 2, 3, -1], [0, 2, 5, 6], q_row=[-1, 0, -1, 1, 0, -1], q=q)
    tree.validate()
    return tree, target_rows(tree, random_rows(5, 3))


def verdicts(laws: list[str | None], default: str = "walk") -> tuple[TokenTree, Verdict]:
    from draftwood.rng import KeyedRng

    tree, p = batch_of_three()
    return tree, ByRequest(LAWS[default](), build_verifier).verify(tree, p, asking_for(laws), KeyedRng())


def asking_for(laws: Sequence[str | None]) -> BatchView:
    names = tuple(dict.fromkeys(laws))
    return replace(
        view_of(sequences=3), law=torch.tensor([names.index(law) for law in laws]), mode=StepMode(laws=names)
    )


def test_one_verdict_for_the_whole_batch() -> None:
    tree, verdict = verdicts(["block", None, "mixture:weight=0.25"])
    assert verdict.path.shape == (3, 3)
    assert verdict.path[:, 0].tolist() == [0, 2, 5]
    for b, (length, path) in enumerate(zip(verdict.length.tolist(), verdict.path.tolist(), strict=True)):
        assert [n >= 0 for n in path] == [i <= length for i in range(3)]
        assert all(tree.owner[n] == b for n in path if n >= 0)
    assert verdict.drift is not None
    assert verdict.drift.tolist() == [0.0, 0.0, 0.0], "two lossless, and nothing was guessed for the third"


def test_drift_stays_with_whom_it_belongs_to() -> None:
    drifts = verdicts(["mixture", "typical", "block"])[1].drift
    assert drifts is not None
    assert 0 < float(drifts[0]) < 1
    assert math.isnan(float(drifts[1]))
    assert float(drifts[2]) == 0
    lossless = verdicts(["block", "walk", None])[1].drift
    assert lossless is None or lossless.tolist() == [0.0] * 3


def test_one_law_for_all_is_that_law() -> None:
    """The short way: no batch is cut up where there is nothing to tell apart."""
    for law in ("block", "mixture"):
        _, verdict = verdicts([law] * 3)
        _, default = verdicts([None] * 3, law)
        for name in ("path", "length", "bonus"):
            assert torch.equal(getattr(verdict, name), getattr(default, name))


def test_laws_side_by_side_draw_independently() -> None:
    """The joint law of two requests under different laws is the product of the two alone."""
    tree, p = batch_of_three()

    def run(laws: tuple[str, ...]):
        asked = asking_for(laws)
        law = ByRequest(LAWS["match"](), build_verifier)
        return law_of(lambda rng: tuple(map(tuple, gained(tree, law.verify(tree, p, asked, rng)))))

    joint = run(("block", "walk", "block"))
    assert sum(joint.values()) == pytest.approx(1, abs=1e-12)
    for b, law in enumerate(("block", "walk", "block")):
        one = run((law,) * 3)
        for text in {texts[b] for texts in (*joint, *one)}:
            mixed, alone = (sum(c for texts, c in h.items() if texts[b] == text) for h in (joint, one))
            assert mixed == pytest.approx(alone, abs=1e-12)
    texts = next(iter(joint))
    chances = [sum(c for other, c in joint.items() if other[b] == texts[b]) for b in range(3)]
    assert joint[texts] == pytest.approx(math.prod(chances), abs=1e-12)


def test_a_law_by_name_is_made_once() -> None:
    made: list[str] = []

    def find(name: str) -> Verifier:
        made.append(name)
        return build_verifier(name)

    laws = ByRequest(LAWS["block"](), find)
    assert (laws.name, laws.lossless) == ("block", True)
    assert laws.law_of(None) is laws.default
    assert laws.law_of("walk") is laws.law_of("walk")
    assert laws.law_of("typical:threshold=0.2") is not laws.law_of("typical")
    assert made == ["walk", "typical:threshold=0.2", "typical"]
    assert laws.refuses(POINT_CHAIN) is None
    assert "one path" in str(laws.refuses(DraftLaw(frozenset({Draw.IID}), chain=False)))


# --- in the Python interface

SMALL = EngineConfig(cache_tokens=2048, page_size=16, threads=1, dtype="float64")
PROMPTS = ["the cat sat", "abcabc", "x", "on the mat", "why"]
LAWS_IN_TURN = ["match", "block", "walk", "mixture:weight=0.6", None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a target, with the folder of a draft model that is like it beside it."""
    models = tmp_path_factory.mktemp("models")
    tiny_folder(models / "draft", noise=0.2)
    return tiny_folder(models / "target")


def start(folder: Path, law: str = "auto", tree: str = "sampled-chain:depth=3") -> LLM:
    drafter = f"model:{folder.parent / 'draft'}"
    return LLM(folder, drafter=drafter, tree=tree, law=law, config=SMALL, controller=FixedBudget(9))


@pytest.fixture(scope="module")
def llm(folder: Path):
    with start(folder) as made:
        yield made


def params_of(law: str | None, seed: int | None, **changes) -> SamplingParams:
    return SamplingParams(temperature=1.0, max_tokens=16, seed=seed, law=law, **changes)


def all_at_once(llm: LLM, asked: list[tuple[str, SamplingParams]]) -> list[Result | BaseException]:
    async def gather() -> list[Result | BaseException]:
        return await asyncio.gather(*(llm.agenerate(p, params) for p, params in asked), return_exceptions=True)

    return asyncio.run(gather())


def test_a_batch_of_many_laws(folder: Path, llm: LLM) -> None:
    asked = [(p, params_of(law, i)) for i, (p, law) in enumerate(zip(PROMPTS, LAWS_IN_TURN, strict=True))]
    got = all_at_once(llm, asked)
    for (prompt, params), result in zip(asked, got, strict=True):
        with start(folder, params.law or "auto") as own:
            want = own.generate(prompt, replace(params, law=None))
        assert isinstance(result, Result)
        assert result.token_ids == want.token_ids
        assert (result.stats.law, result.stats.lossless) == (want.stats.law, want.stats.lossless)
        assert result.stats.drift == pytest.approx(want.stats.drift, abs=1e-9)


def test_statistics_name_the_law_and_what_it_did(llm: LLM) -> None:
    def stats(law: str | None):
        return llm.generate(PROMPTS[0], params_of(law, None if law is None else 3)).stats

    assert [(s.law, s.lossless, s.drift) for s in map(stats, (None, "block", "match"))] == [
        ("block", True, 0.0),
        ("block", True, 0.0),
        ("match", True, 0.0),
    ]
    mixed, typical = stats("mixture:weight=0.5"), stats("typical:threshold=0.2")
    assert (mixed.law, mixed.lossless) == ("mixture", False)
    assert mixed.drift is not None
    assert 0 < mixed.drift < mixed.steps + mixed.accepted
    assert (typical.law, typical.lossless, typical.drift) == ("typical", False, None)
    assert stats("mixture:weight=1").drift == 0.0


def test_drift_is_nothing_where_nothing_was_guessed(folder: Path) -> None:
    with LLM(folder, law="typical", config=SMALL) as plain:
        stats = plain.generate("x", params_of(None, 1)).stats
    assert (stats.law, stats.lossless, stats.drift) == ("typical", False, 0.0)


def test_every_event_of_a_stream_says_it(llm: LLM) -> None:
    events = list(llm.stream("x", params_of("mixture", 2)))
    assert {(e.stats.law, e.stats.lossless) for e in events} == {("mixture", False)}
    drifts = [e.stats.drift for e in events]
    assert drifts == sorted(drifts)


def test_several_answers_under_one_law(llm: LLM) -> None:
    result = llm.generate("x", params_of("walk", 9, n=3))
    assert [c.stats.law for c in result.completions] == ["walk"] * 3
    assert len({c.token_ids for c in result.completions}) == 3
    third = result.completions[2]
    assert llm.generate("x", params_of("walk", third.seed)).token_ids == third.token_ids
    lossy = llm.generate("x", params_of("mixture", 9, n=2))
    assert [c.stats.lossless for c in lossy.completions] == [False, False]


BAD_LAWS = [
    ("martial", InvalidRequest, "Unknown law 'martial'"),
    ("typical:colour=3", InvalidRequest, "no setting 'colour'"),
    ("typical:threshold=high", InvalidRequest, "another kind of value"),
    ("typical:threshold=1.5", InvalidRequest, "between 0 and 1"),
    ("typical:threshold=nan", InvalidRequest, "between 0 and 1"),
    ("typical:threshold", InvalidRequest, "name=value"),
    ("relaxed:k=0", InvalidRequest, "at least 1"),
    ("block:threshold=0.5", InvalidRequest, "no setting 'threshold'"),
    ("rrsw", IncompatibleParts, "independent draws"),
    ("gbv", IncompatibleParts, "whole independent paths"),
    ("hybrid", IncompatibleParts, "not made for independent draws"),
]


@pytest.mark.parametrize(("law", "error", "words"), BAD_LAWS)
def test_a_law_that_cannot_be_had_is_refused_and_harms_nobody(llm: LLM, law: str, error: type, words: str) -> None:
    good, bad = params_of("walk", 4), params_of(law, 4)
    with pytest.raises(error, match=words):
        llm.generate("x", bad)
    with pytest.raises(error, match=words):
        list(llm.stream("x", bad))
    refused = llm.generate(["x", "y"], bad)
    assert [r.finish_reason for r in refused] == [FinishReason.ERROR] * 2
    assert words in (refused[0].completions[0].error or "")
    alone = llm.generate("x", good).token_ids
    first, failure, last = all_at_once(llm, [("x", good), ("y", bad), ("x", good)])
    assert isinstance(failure, error)
    assert first.token_ids == last.token_ids == alone
    assert not llm.engine.scheduler.has_work


def test_a_law_made_for_one_path_is_refused_where_there_are_trees(folder: Path) -> None:
    with start(folder, tree="sampled:widths=2x1") as trees:
        assert trees.generate("x", params_of("rrs", 1)).stats.law == "rrs"
        for law in ("block", "token"):
            with pytest.raises(IncompatibleParts, match=f"'{law}' would not be exact here: it is made for one path"):
                trees.generate("x", params_of(law, 1))


def test_a_law_for_toys_harms_nobody_else(folder: Path) -> None:
    """`optimal` cannot write down a real vocabulary's draws: it tries them in turn there, as `walk` does."""
    with start(folder, tree="sampled:widths=2x1") as trees:
        alone = trees.generate("x", params_of("walk", 4)).token_ids
        first, toy, last = all_at_once(
            trees, [("x", params_of("walk", 4)), ("x", params_of("optimal", 4)), ("x", params_of("walk", 4))]
        )
        assert first.token_ids == toy.token_ids == last.token_ids == alone
        assert toy.stats.law == "optimal"


def test_without_a_solver_the_optimal_law_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftwood.verifiers.optimal.find_spec", lambda name: None)
    assert "scipy" in (LAWS["optimal"]().refuses(Levels((2,), Independent()).law) or "")


def test_auto_suits_the_drafts_for_a_request_too(folder: Path) -> None:
    with start(folder, tree="sampled:widths=2x1", law="match") as trees:
        assert trees.generate("x", params_of("auto", None)).stats.law == "layer"
        assert trees.generate("x", params_of("auto", 4)).stats.law == "match"


class Restless:
    """Another budget in every step, and never the same twice in a row, as timings and load would have it."""

    def __init__(self) -> None:
        self._luck = random.Random(1)

    def budget(self, load: Load) -> Budget:
        return Budget(self._luck.randrange(6))

    def observe(self, report: StepReport) -> None:
        pass


def repeats(llm: LLM, asked: SamplingParams) -> list[Result]:
    """The same request six times, each time beside other requests than before."""
    found = []
    for i in range(6):
        beside = [(PROMPTS[j % len(PROMPTS)], params_of(None, None)) for j in range(i % 3)]
        found.append(all_at_once(llm, [(PROMPTS[0], asked), *beside])[0])
    return found


@pytest.mark.parametrize("tree", ["sampled-chain:depth=3", "hybrid", "paths:paths=2,depth=2"])
def test_a_seed_gives_one_answer_or_the_answer_says_that_it_may_not(folder: Path, tree: str) -> None:
    """Drawn trees, budgets that change and neighbours that change: only a law that was named depends on them."""
    config, drafter = replace(SMALL, dtype="float32"), f"model:{folder.parent / 'draft'}"
    with LLM(folder, drafter=drafter, tree=tree, config=config, controller=Restless()) as llm:
        own = llm.laws.name
        seeded = repeats(llm, replace(params_of(None, 7, n=2), max_tokens=10))
        named = repeats(llm, replace(params_of(own, 7), max_tokens=10))
        free, greedy = llm.generate("x", params_of(None, None)), llm.generate("x", SamplingParams(seed=7, max_tokens=4))
    assert own != "match"
    assert len({tuple(c.token_ids for c in r.completions) for r in seeded}) == 1
    assert {(r.stats.law, r.stats.reproducible, r.stats.seed) for r in seeded} == {("match", True, 7)}
    assert len({r.token_ids for r in named}) > 1
    assert {(r.stats.law, r.stats.reproducible) for r in named} == {(own, False)}
    assert (free.stats.law, free.stats.reproducible) == (own, False)
    assert (greedy.stats.law, greedy.stats.reproducible) == (own, True)


def test_no_answer_is_reproducible_where_rounding_depends_on_the_batch(folder: Path) -> None:
    """Products in float64 are torch's, which sum by the number of rows: `--strict` would refuse them."""
    with LLM(folder, config=SMALL) as llm:
        assert not llm.engine.target.model.strict
        assert not llm.generate("x", params_of("match", 7)).stats.reproducible


@pytest.mark.parametrize("law", ["", 3, ("match",)])
def test_a_law_is_asked_for_by_name(law) -> None:
    with pytest.raises(InvalidRequest, match="name of an acceptance law"):
        SamplingParams(law=law)


def test_the_default_is_not_asked_about_drafts_others_bring() -> None:
    """A default that fits is enough to start; what a request names is checked when it comes."""
    Harness(tiny_runner(), with_model(Levels((2,), Best()))(torch.float64), ByRequest(LAWS["walk"](), build_verifier))
    with pytest.raises(IncompatibleParts, match="one path"):
        Harness(
            tiny_runner(), with_model(Levels((2,), Best()))(torch.float64), ByRequest(LAWS["block"](), build_verifier)
        )


def test_a_law_that_asks_the_host_is_refused_on_a_gpu() -> None:
    """When the request comes, not in a step that others share."""
    laws = choose_law("match", POINT_TREE, torch.device("cuda"))
    with pytest.raises(InvalidRequest, match="CPU only"):
        laws.law_of("optimal")
    assert choose_law("match", POINT_TREE).law_of("optimal").name == "optimal"
