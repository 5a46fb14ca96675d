"""Cascades: whatever the inner drafter guesses, what goes to the target is the middle's own chain, made of fewer
forwards where the guesses are right; how many forwards are made is what pays.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from captured import GPU, CapturedHarness
from draftwood.assembly import build_drafter, choose_law, makes_own_trees, suited_tree
from draftwood.config import EngineConfig
from draftwood.drafters.cascade import CascadeDrafter, middle_of
from draftwood.drafters.lookup import LookupDrafter
from draftwood.drafters.model import ModelDrafter
from draftwood.drafters.rates import AGAIN, Rates
from draftwood.drafters.recycling import RecyclingDrafter
from draftwood.drafters.scripted import ScriptedDrafter
from draftwood.drafters.view import View, ViewDrafter, Window, first_layers, without_layers
from draftwood.drafting import Drafter, Proposal
from draftwood.errors import IncompatibleParts, InvalidRequest
from draftwood.growers import Independent, Levels, chain
from draftwood.protocols import BatchView, Randomness
from draftwood.request import SamplingParams
from draftwood.verifiers import Match
from test_model_drafters import TEXTS, Decoding, Fresh
from test_views import Part
from tiny import Ask, Harness, Regime, TinyCheckpoint, generated, tiny_config, tiny_runner, with_arrivals, with_net

INNERS: dict[str, Callable[[], Drafter]] = {
    "lookup": lambda: LookupDrafter(nodes=3, longest=2),
    "recycling": lambda: RecyclingDrafter(nodes=5, width=3, depth=3, least=0.0),
    "scripted": lambda: ScriptedDrafter(lambda tokens: [[1, 2, 3], [5, tokens[-1] % 13], [5, 5]], 7),
}
MIDDLES: dict[str, Callable[[], Any]] = {
    "skip": lambda: ViewDrafter(View(without_layers((1,))), chain(1)),
    "window": lambda: ViewDrafter(View(window=Window(4, 4)), chain(1)),
    "model": lambda: ModelDrafter(tiny_runner(noise=0.2), chain(1)),
}


def checked(rounds: int | None, law: Callable[[BatchView, int, Sequence[int]], torch.Tensor]) -> type[CascadeDrafter]:
    """A cascade that compares what it says with what the middle says behind each path, written out."""

    class Checked(CascadeDrafter):
        seen = 0

        def propose(self, view: BatchView, nodes: int, rng: Randomness) -> Proposal:
            if rounds is not None:
                self.rates.choose = lambda nodes: min(rounds, nodes)  # type: ignore[method-assign]
            proposal = super().propose(view, nodes, rng)
            tree = proposal.tree
            assert view.salts is not None
            for b, row in enumerate(view.rows.tolist()):
                if view.salts[row] < 0:
                    continue
                first, end = tree.offsets[b : b + 2].tolist()
                tokens = [t for t in tree.tokens[first + 1 : end].tolist() if t >= 0]
                for depth, token in enumerate(tokens):
                    assert token == int(law(view, b, tokens[:depth]).argmax()), (depth, tokens)
                    self.seen += 1
            return proposal

    return Checked


def texts(view: BatchView, b: int) -> list[int]:
    return view.history[view.rows[b], : view.lengths[b]].tolist()


def asks(count: int = 5) -> list[Ask]:
    draw = random.Random(5)
    prompts = [tuple(draw.randrange(13) for _ in range(length)) for length in (3, 18, 1, 7, 12)]
    return [Ask(p, SamplingParams(max_tokens=14 + 3 * i, seed=i)) for i, p in enumerate(prompts[:count])]


@pytest.mark.skipif(GPU, reason="compares with a model on a CPU")
@pytest.mark.parametrize(
    ("inner", "middle", "captured"),
    [
        *((inner, "model", False) for inner in INNERS),
        *zip(INNERS, ("skip", "window", "skip"), (False, True, True), strict=True),
        ("recycling", "model", True),
    ],
)
def test_what_is_proposed_is_the_middles_own_chain(inner: str, middle: str, captured: bool) -> None:
    between = MIDDLES[middle]()
    model = tiny_runner()
    if middle == "model":
        fresh = Fresh(between.runner)
        law = lambda view, b, path: fresh.logits([*texts(view, b), *path])  # noqa: E731
    else:
        part = Part(model.model, between.view.of(model.model), (4, 2) if middle == "window" else None)
        law = lambda view, b, path: part.logits(texts(view, b), path)  # noqa: E731
    drafter = checked(3, law)(INNERS[inner](), between, nodes=6, rounds=3, ahead=3)
    wanted = with_arrivals(asks(), 2)
    harness = CapturedHarness(drafter, "match") if captured else Harness(tiny_runner(), drafter, Match())
    answers = harness.run(wanted)
    plain = Harness(tiny_runner(), MIDDLES["skip"](), Match()).run(asks())
    assert generated(answers) == generated(plain)
    assert drafter.seen > 60
    assert sum(answer.accepted for answer in answers) > 15


def test_right_guesses_save_forwards_of_the_middle() -> None:
    said = {tuple(ask.prompt): tokens for ask, tokens in zip(asks(), generated(_plain()), strict=True)}

    def oracle(tokens: Sequence[int]) -> list[list[int]]:
        known = next((p for p in said if tuple(tokens[: len(p)]) == p), None)
        return [] if known is None else [said[known][len(tokens) - len(known) :][:3]]

    rounds = []
    for inner in (ScriptedDrafter(oracle, 3, chain=True), ScriptedDrafter(lambda tokens: [], 3, chain=True)):
        drafter = CascadeDrafter(inner, ViewDrafter(View(), chain(1)), nodes=4, rounds=4, ahead=3)
        drafter.rates.choose = lambda nodes: 4  # type: ignore[method-assign]
        harness, forwards = Harness(tiny_runner(), drafter, Match()), []
        extend = drafter.middle.extend
        drafter.middle.extend = lambda *a, extend=extend, forwards=forwards: (forwards.append(1), extend(*a))[1]  # type: ignore[method-assign]
        answers = harness.run(asks(2))
        assert generated(answers) == generated(_plain())[:2]
        assert all(answer.accepted == answer.drafted for answer in answers), "all of the target is always right"
        rounds.append(len(forwards))
    assert rounds[0] * 2 < rounds[1]


def _plain() -> list[Any]:
    return Harness(tiny_runner(), ViewDrafter(View(), chain(1)), Match()).run(asks())


@pytest.mark.parametrize("middle", ["view", "model"])
def test_preemption_and_shared_prefixes(middle: str) -> None:
    """Where pages are scarce, forwards of the middle find none for some places: nothing of them is proposed or kept."""
    between = ViewDrafter(View(), chain(1)) if middle == "view" else ModelDrafter(tiny_runner(), chain(1))
    drafter = CascadeDrafter(LookupDrafter(3, 2), between, nodes=4, rounds=2, ahead=3)
    drafter.rates.choose = lambda nodes: min(2, nodes)  # type: ignore[method-assign]
    wanted = [Ask((1, 2, 3, 4, 5, 6, 7, 8, 9), SamplingParams(max_tokens=30), arrives=i) for i in range(4)]
    harness = Harness(tiny_runner(num_pages=24), drafter, Match(), Regime(num_pages=24))
    answers = harness.run(wanted)
    assert generated(answers) == generated(Harness(tiny_runner(), ViewDrafter(View(), chain(1)), Match()).run(wanted))
    assert harness.engine.scheduler.num_preemptions > 0
    assert harness.engine.scheduler.tables.pool.num_available == 24, "pages leaked"
    accepted, drafted = (sum(getattr(answer, name) for answer in answers) for name in ("accepted", "drafted"))
    assert accepted == drafted > 20, "all of the target is always right"


class Watched(CascadeDrafter):
    grower = chain(1)

    @property
    def runner(self) -> Any:
        return self.middle.runner  # type: ignore[attr-defined]


@pytest.mark.parametrize("middle", MIDDLES)
def test_it_looks_at_no_values_where_that_would_wait(middle: str) -> None:
    """As if captured: three rounds, and what is kept of them."""
    decoding = Decoding(Watched(LookupDrafter(3, 2), MIDDLES[middle](), 6, 3, 3), TEXTS, look=False)
    view = decoding.view()
    proposal = decoding.propose(view, 6)
    proposal.tree.packed()[0].validate()
    deepest = [int(proposal.tree.offsets[b]) + 2 for b in range(len(TEXTS))]
    assert decoding.accept(view, proposal, deepest, [7] * len(TEXTS)) == 3


# --- how many forwards pay


def rates_with(forward: float, target: float, right: float, gain: float = 2.0, direct: float = 0.0) -> Rates:
    rates = Rates(3)
    for rounds in range(4):
        rates._target[rounds] = type(rates._gain)(target)
    rates._inner.value, rates._forward.value, rates._gain.value, rates._direct.value = 0.0, forward, gain, direct
    rates._depths = [[right, 1.0] for _ in rates._depths]
    return rates


@pytest.mark.parametrize(
    ("forward", "right", "direct", "wanted"),
    [(0.1, 0.9, 0.0, 3), (0.1, 0.4, 0.0, 1), (2.0, 0.9, 0.0, 0), (0.1, 0.9, 9.0, 0), (0.45, 0.8, 0.3, 2)],
)
def test_the_choice_with_the_best_rate_is_made(forward: float, right: float, direct: float, wanted: int) -> None:
    """1 + the chances of r · 2 tokens, in r forwards and a step of the target; the best of 0 … 3, written out."""
    rates = rates_with(forward, 1.0, right, direct=direct)
    worth = [(1 + direct) / 1.0]
    worth += [(1 + sum(right**k for k in range(1, 2 * r + 1))) / (r * forward + 1.0) for r in (1, 2, 3)]
    for rounds in range(4):
        assert rates.rate(rounds, 8) == pytest.approx(worth[rounds])
    assert rates.choose(8) == wanted == max(range(4), key=worth.__getitem__)


def test_everything_is_tried_first_and_again_now_and_then() -> None:
    rates = Rates(2)
    assert rates.choose(8) == 2
    rates._target[2] = type(rates._gain)(1.0)
    assert (rates.choose(8), rates.choose(1)) == (1, 1)
    rates = rates_with(0.1, 1.0, 0.9)
    choices = [rates.choose(8) for _ in range(5 * AGAIN)]
    assert set(choices) == {0, 1, 2, 3}
    assert choices.count(3) > 4 * AGAIN
    assert Rates(3, least=1).choose(1) == 1


def test_what_is_learnt_is_what_happened() -> None:
    """In an engine: the whole target as middle is always right, whatever the inner drafter guesses."""
    drafter = CascadeDrafter(ScriptedDrafter(lambda tokens: [[99 % 13] * 2], 2), ViewDrafter(View(), chain(1)), 3, 2, 2)
    Harness(tiny_runner(), drafter, Match()).run(asks())
    rates = drafter.rates
    assert all(hits == trials - 0.5 for hits, trials in rates._depths[:2])
    assert rates._gain.value is not None
    assert 1.0 <= rates._gain.value <= 3.0
    assert set(rates._target) == {0, 1, 2}


# --- by name


def test_names_and_their_settings() -> None:
    checkpoint = TinyCheckpoint(tiny_config(layers=4))
    spec = "cascade:inner=ngram:nodes=5+longest=3,middle=early-exit:layers=2+window=8,rounds=2"
    made = build_drafter(spec, None, checkpoint, EngineConfig())  # type: ignore[arg-type]
    assert isinstance(made, CascadeDrafter)
    assert isinstance(made.inner, LookupDrafter)
    assert (made.inner.max_nodes, made.inner.longest) == (5, 3)
    assert isinstance(made.middle, ViewDrafter)
    assert made.middle.view.window == Window(4, 8)
    assert made.depth(5) == 5
    assert makes_own_trees("cascade:inner=ngram")
    assert suited_tree("cascade", "coupled") is None
    assert middle_of("cascade:middle=self-int8") == "self-int8"
    assert middle_of("cascade") == "layer-skip"
    assert middle_of("model:x") == "model:x"
    assert choose_law("auto", made.law).default.name == "match"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("cascade:inner=ngram,middle=suffix", "middle of a cascade is a part of the target"),
        ("cascade:inner=early-exit,middle=early-exit", "one without a network"),
        ("cascade:inner=nothing,middle=early-exit", "Unknown drafter 'nothing'"),
        ("cascade:inner=ngram,middle=early-exit,rounds=0", "at least one node, one round"),
        ("cascade:nodes=x", "another kind of value"),
    ],
)
def test_levels_that_make_no_cascade_are_refused(spec: str, words: str) -> None:
    checkpoint = TinyCheckpoint(tiny_config(layers=4))
    with pytest.raises((InvalidRequest, IncompatibleParts), match=words):
        build_drafter(spec, None, checkpoint, EngineConfig())  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="makes its own trees"):
        build_drafter("cascade:inner=ngram,middle=early-exit", "chain", checkpoint, EngineConfig())  # type: ignore[arg-type]


def test_drawn_guesses_are_refused() -> None:
    middle = ViewDrafter(View(first_layers(1)), chain(1))
    with pytest.raises(ValueError, match="choose its tokens, and this one draws"):
        CascadeDrafter(ViewDrafter(View(), Levels((1, 1), Independent())), middle)
    with pytest.raises(ValueError, match="without a network"):
        CascadeDrafter(with_net("eagle3", chain(3))(torch.float64), middle)
