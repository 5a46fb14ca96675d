"""Traced steps: they say what happened, in plain numbers that can be checked, and change nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from captured import DEVICE, CapturedHarness, runner
from draftwood.drafters.model import ModelDrafter
from draftwood.drafters.ngram import NgramDrafter
from draftwood.drafters.none import NoDrafter
from draftwood.drafters.predicted import PredictedDrafter
from draftwood.drafting import Drafter
from draftwood.engine import trace
from draftwood.engine.trace import step_trace
from draftwood.growers import Coupled, Hybrid, Independent, Levels, Paths, WithoutReplacement, chain
from draftwood.growers.pickers import Best
from draftwood.request import Event, GuessedTree, SamplingParams, TokenKind, TracedToken
from draftwood.verifiers import LAWS
from tiny import Ask, Harness, TinyCheckpoint, generated, with_net

PROMPTS = [(1, 2, 3, 1, 2), (5,), (7, 7, 8, 7, 7), (9, 1, 9, 1, 9)]


def second(grower) -> ModelDrafter:  # type: ignore[no-untyped-def]
    return ModelDrafter(runner(0.2), grower)


def network(grower) -> Drafter:  # type: ignore[no-untyped-def]
    target = runner()
    return with_net("eagle3", grower, TinyCheckpoint(target.model.config), DEVICE)(target.model.dtype)


CASES: dict[str, tuple[Callable[[], Drafter], str]] = {
    "none": (NoDrafter, "match"),
    "ngram": (lambda: NgramDrafter(nodes=6, longest=3, shortest=1), "match"),
    "branches": (lambda: NgramDrafter(nodes=6, longest=3, shortest=1, branches=3), "walk"),
    "chain": (lambda: second(chain(4)), "match"),
    "tree": (lambda: second(Levels((2, 2, 1), Best())), "match"),
    "coupled": (lambda: second(Levels((2, 1), Coupled())), "coupled"),
    "sampled chain": (lambda: second(Levels((1, 1, 1), Independent())), "block"),
    "sampled": (lambda: second(Levels((2, 2), Independent())), "layer"),
    "without replacement": (lambda: second(Levels((2, 2), WithoutReplacement())), "traversal"),
    "hybrid": (lambda: second(Levels((2, 2), Hybrid())), "hybrid"),
    "paths": (lambda: second(Paths(2, 3, 0)), "gbv"),
    "network": (lambda: network(chain(3)), "match"),
}


def asks(**params: object) -> list[Ask]:
    return [
        Ask(prompt, SamplingParams(**{"temperature": 0.9, "seed": i, "max_tokens": 12 + 5 * i} | params))  # type: ignore[arg-type]
        for i, prompt in enumerate(PROMPTS)
    ]


def traced(wanted: Sequence[Ask]) -> list[Ask]:
    return [replace(ask, params=replace(ask.params, trace=True)) for ask in wanted]


def emitted(events: Sequence[Event], i: int) -> list[TracedToken]:
    return [token for e in events if e.request_id == i and e.step is not None for token in e.step.emitted]


def check(event: Event) -> None:
    """An event with tokens tells a step whose accepted nodes are a path, and whose tokens are the event's."""
    step = event.step
    assert step is not None
    assert tuple(token.token for token in step.emitted) == event.token_ids
    assert tuple(token.kind == TokenKind.ACCEPTED for token in step.emitted) == event.accepted
    assert [token.depth for token in step.emitted] == list(range(1, len(event.token_ids) + 1))
    assert all(token.p is not None and 0 <= token.p <= 1 + 1e-6 for token in step.emitted)
    assert 1 <= step.num_sequences <= step.num_rows
    if step.tree is None:
        assert [token.kind for token in step.emitted] == [TokenKind.PLAIN]
    else:
        check_tree(step.tree, step.emitted)


def check_tree(tree: GuessedTree, tokens: Sequence[TracedToken]) -> None:
    path = [i for i, accepted in enumerate(tree.accepted) if accepted]
    assert [tree.parents[i] for i in path] == [-1, *path[:-1]]
    assert all(0 <= parent < i for i, parent in enumerate(tree.parents[1:], 1))
    assert (tree.p[0], tree.q[0]) == (None, None)
    for token, node in zip(tokens, path[1:], strict=False):
        assert (token.node, token.token) == (node, tree.tokens[node])
        assert (token.p, token.q) == (tree.p[node], tree.q[node])
    last = tokens[-1]
    if last.kind != TokenKind.ACCEPTED:  # else the answer ended inside an accepted run
        assert len(tokens) == len(path)
        assert last.kind == (TokenKind.CORRECTION if path[-1] in tree.parents else TokenKind.BONUS)
    for parent in set(tree.parents[1:]):  # different siblings share a distribution
        below = {t: p for t, p, above in zip(tree.tokens, tree.p, tree.parents, strict=True) if above == parent}
        assert sum(p for p in below.values() if p is not None) <= 1 + 1e-6


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("name", CASES)
def test_traced_steps_are_consistent_and_change_no_token(name: str, temperature: float) -> None:
    make, law = CASES[name]
    wanted = asks(temperature=temperature)
    harness = Harness(runner(), make(), LAWS[law]())
    got = generated(harness.run(traced(wanted)))
    assert got == generated(Harness(runner(), make(), LAWS[law]()).run(wanted))
    for event in harness.events:
        check(event)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("name", CASES)
def test_captured_steps_tell_the_same(name: str, temperature: float) -> None:
    """A traced request does not leave the captured steps."""
    make, law = CASES[name]
    wanted = asks(temperature=temperature)
    harness = CapturedHarness(make(), law)
    got = generated(harness.run(traced(wanted)))
    assert got == generated(CapturedHarness(make(), law).run(wanted))
    assert not harness.eager
    for event in harness.events:
        check(event)
    if name != "none":
        assert any(event.step.tree is not None for event in harness.events)


@pytest.mark.parametrize("harness", [Harness, CapturedHarness])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_probabilities_are_the_models_own(harness: type, temperature: float) -> None:
    """At temperatures 0 and 1 without truncation, p is what `logprobs` says it is."""
    wanted = asks(temperature=temperature)
    plain = Harness(runner(), NoDrafter(), LAWS["match"]())
    plain.run([replace(ask, params=replace(ask.params, logprobs=0)) for ask in wanted])
    drafter = NgramDrafter(nodes=6, longest=3, shortest=1)
    told = (
        CapturedHarness(drafter, "match") if harness is CapturedHarness else Harness(runner(), drafter, LAWS["match"]())
    )
    told.run(traced(wanted))
    for i in range(len(wanted)):
        logprobs = [entry for e in plain.events if e.request_id == i for entry in e.logprobs]
        tokens = emitted(told.events, i)
        assert [token.token for token in tokens] == [entry.token for entry in logprobs]
        tolerance = 1e-9 if DEVICE.type == "cpu" else 0.02
        for token, entry in zip(tokens, logprobs, strict=True):
            assert token.p == pytest.approx(math.exp(entry.logprob), rel=tolerance)


def test_probabilities_follow_the_requests_sampling() -> None:
    harness = Harness(runner(), NgramDrafter(shortest=1), LAWS["match"]())
    harness.run(traced(asks(top_k=1)))
    assert {round(token.p or 0, 9) for i in range(4) for token in emitted(harness.events, i)} == {1.0}
    harness = Harness(runner(), NgramDrafter(shortest=1), LAWS["match"]())
    harness.run(traced(asks(temperature=0.0, logit_bias={4: 100.0})))
    assert all(token.p == pytest.approx(1.0) for i in range(4) for token in emitted(harness.events, i))
    harness = Harness(runner(), NgramDrafter(shortest=1), LAWS["match"]())
    wanted = asks(temperature=0.0, grammar="13")
    assert generated(harness.run(traced(wanted))) == generated(
        Harness(runner(), NgramDrafter(shortest=1), LAWS["match"]()).run(wanted)
    )
    for event in harness.events:
        check(event)
        tree = event.step.tree  # the grammar forbids what was said just before
        stutters = [] if tree is None else [i for i, p in enumerate(tree.parents) if p > 0 and _same(tree, i, p)]
        assert all(tree.p[i] == 0 for i in stutters)


def _same(tree: GuessedTree, one: int, other: int) -> bool:
    return tree.tokens[one] == tree.tokens[other]


def test_drawn_tokens_say_how_likely_the_drafter_found_them() -> None:
    make, law = CASES["sampled"]
    drawn = Harness(runner(), make(), LAWS[law]())
    drawn.run(traced(asks()))
    trees = [event.step.tree for event in drawn.events if event.step.tree is not None]
    assert all(q is not None and 0 < q <= 1 for tree in trees for q in tree.q[1:])
    chosen = Harness(runner(), second(chain(3)), LAWS["match"]())
    chosen.run(traced(asks()))
    assert all(q is None for event in chosen.events if event.step.tree for q in event.step.tree.q)


def test_only_those_who_ask_are_told() -> None:
    wanted = asks()
    wanted[2] = traced(wanted)[2]
    for harness in (
        Harness(runner(), second(Levels((2, 2), Independent())), LAWS["layer"]()),
        CapturedHarness(NgramDrafter(nodes=6, longest=3, shortest=1), "match"),
    ):
        harness.run(wanted)
        assert {e.request_id for e in harness.events if e.step is not None} == {2}
        for event in (e for e in harness.events if e.request_id == 2):
            check(event)


def test_predictions_are_traced_too() -> None:
    wanted = asks(temperature=0.0, prediction="abcabcabc")
    harness = Harness(runner(), PredictedDrafter(NgramDrafter(shortest=1)), LAWS["match"]())
    untraced = Harness(runner(), PredictedDrafter(NgramDrafter(shortest=1)), LAWS["match"]())
    assert generated(harness.run(traced(wanted))) == generated(untraced.run(wanted))
    for event in harness.events:
        check(event)


def test_nobody_pays_who_does_not_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> torch.Tensor:
        raise AssertionError("nobody asked")

    monkeypatch.setattr(trace, "shown_distribution", never)
    Harness(runner(), NgramDrafter(), LAWS["match"]()).run(asks())
    CapturedHarness(NgramDrafter(), "match").run(asks())


def test_a_tree_a_person_can_check() -> None:
    """root t ─ a ─ b, and c beside a; a was kept, then x instead of b. The last row fills a round up."""
    nan = math.nan
    rows = [
        (9, -1, 1, nan, nan, 0.1, 0),
        (1, 0, 1, 0.7, 0.5, 0.25, 1),
        (3, 0, 0, 0.2, nan, 0.1, 3),
        (2, 1, 0, 0.6, 0.4, 0.1, 2),
        (-1, 0, 0, 0.3, nan, 0.1, 1),
    ]
    step = step_trace(rows, 5, 2, 10, ("suffix", "recycling"))
    assert step.tree == GuessedTree(
        tokens=(9, 1, 3, 2),
        parents=(-1, 0, 0, 1),
        p=(None, 0.7, 0.2, 0.6),
        q=(None, 0.5, None, 0.4),
        accepted=(True, True, False, False),
        members=((), ("suffix",), ("suffix", "recycling"), ("recycling",)),
    )
    assert step.emitted == (
        TracedToken(1, TokenKind.ACCEPTED, 1, 1, 0.7, 0.5),
        TracedToken(5, TokenKind.CORRECTION, 2, None, 0.25, None),
    )
    kept = [(*row[:2], 1, *row[3:]) if i == 3 else row for i, row in enumerate(rows)]
    assert [token.kind for token in step_trace(kept, 5, 2, 10).emitted] == ["accepted", "accepted", "bonus"]
    bare = step_trace(rows[:1], 5, 1, 1)
    assert (bare.tree, bare.emitted) == (None, (TracedToken(5, TokenKind.PLAIN, 1, None, 0.1, None),))
