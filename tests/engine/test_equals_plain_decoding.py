"""The equality matrix: whatever guesses, whatever the schedule, the tokens are those of plain decoding.

A new drafter, tree, law, kernel or cache change adds a row here, not a new harness.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch

from draftwood.growers import (
    Beam,
    Best,
    BestFirst,
    Hybrid,
    Independent,
    Levels,
    StaticShape,
    WithoutReplacement,
    chain,
)
from draftwood.model.weights import FORMATS
from draftwood.request import SamplingParams
from draftwood.verifiers import LAWS
from tiny import (
    Ask,
    DraftMaker,
    Harness,
    Regime,
    generated,
    ngram,
    no_drafter,
    scripted,
    tiny_config,
    tiny_runner,
    with_arrivals,
    with_model,
)

V = 13


def always_zero(tokens: Sequence[int]) -> list[list[int]]:
    return [[0, 0, 0]]


def every_pair(tokens: Sequence[int]) -> list[list[int]]:
    """A bushy tree that always holds the next two tokens: every accepted path leaves siblings behind."""
    return [[a, b] for a in range(V) for b in range(V)]


DRAFTERS: dict[str, tuple[DraftMaker, bool]] = {  # name -> (maker, whether its trees are chains)
    "none": (no_drafter, True),
    "scripted-wrong": (scripted(always_zero, 3, True), True),
    "scripted-bushy": (scripted(every_pair, 200, False), False),
    "ngram": (ngram(nodes=4, longest=3, shortest=1), True),
    "ngram-tree": (ngram(nodes=8, longest=3, shortest=1, branches=3), False),
    "model-chain": (with_model(chain(4)), True),
    "model-static": (with_model(Levels((3, 2, 1), Best())), False),
    "model-shape": (with_model(StaticShape(((0,), (1,), (3,), (0, 0), (0, 2), (1, 0), (0, 0, 0)))), False),
    "model-beam": (with_model(Beam(nodes=9, width=3, depth=3)), False),
    "model-best-first": (with_model(BestFirst(nodes=9, width=3, forwards=3)), False),
    "model-sampled-chain": (with_model(Levels((1, 1, 1), Independent())), True),
    "model-iid": (with_model(Levels((2, 2), Independent())), False),
    "model-without-replacement": (with_model(Levels((3, 2, 1), WithoutReplacement())), False),
    "model-hybrid": (with_model(Levels((3, 2, 1), Hybrid())), False),
    "model-starved": (with_model(chain(3), num_pages=20), True),
    "model-other-family": (with_model(Levels((2, 2), Best()), family="qwen3", layers=1), False),
}

LAWS_AT = [("match", 0.0), ("match", 1.0), ("walk", 0.0), ("block", 0.0)]

REGIMES: dict[str, Regime] = {
    "one-batch": Regime(),
    "one-by-one": Regime(max_running=1),
    "chunks-of-five": Regime(max_rows=5),
    "starved": Regime(max_rows=24, num_pages=16),
    "big-pages": Regime(page_size=32, num_pages=20),
}


def requests(temperature: float) -> list[Ask]:
    rng = random.Random(7)
    asks = []
    for i in range(7):
        prompt = tuple(rng.randrange(V) for _ in range(rng.randrange(1, 22)))
        params = SamplingParams(temperature=temperature, seed=100 + i, max_tokens=rng.randrange(1, 26))
        asks.append(Ask(prompt, params))
    asks.append(replace(asks[3], params=replace(asks[3].params, seed=5)))  # shares a prompt: prefix pages
    return asks


def run(name: str, law: str, temperature: float, regime: Regime, dtype: torch.dtype, asks: Sequence[Ask]):
    target = tiny_runner(dtype=dtype, num_pages=regime.num_pages, page_size=regime.page_size)
    harness = Harness(target, DRAFTERS[name][0](dtype), LAWS[law](), regime)
    return harness, harness.run(asks)


@cache
def plain(temperature: float, dtype: torch.dtype) -> list[list[int]]:
    """One request at a time, nothing guessed, nothing shared, nothing scarce."""
    wanted = []
    for ask in requests(temperature):
        target = tiny_runner(dtype=dtype)
        wanted += generated(Harness(target, no_drafter(dtype), LAWS["match"]()).run([ask]))
    return wanted


def supported(name: str, law: str) -> bool:
    return law != "block" or DRAFTERS[name][1]


MATRIX = [(n, law, t) for n in DRAFTERS for law, t in LAWS_AT if supported(n, law)]


@pytest.mark.parametrize("regime", REGIMES, ids=str)
@pytest.mark.parametrize(("name", "law", "temperature"), MATRIX)
def test_tokens_equal_plain_decoding(name: str, law: str, temperature: float, regime: str) -> None:
    """Every drafter, tree and law, in every schedule."""
    harness, answers = run(name, law, temperature, REGIMES[regime], torch.float64, requests(temperature))
    assert generated(answers) == plain(temperature, torch.float64)
    if regime == "starved":
        assert harness.engine.scheduler.num_preemptions > 0, "the cache was not scarce enough to test anything"


@pytest.mark.parametrize(("name", "law", "temperature"), MATRIX)
def test_tokens_equal_plain_decoding_in_float32_with_staggered_arrivals(
    name: str, law: str, temperature: float
) -> None:
    """A request that joins in the middle changes nobody's tokens, nor do they change its own."""
    asks = with_arrivals(requests(temperature), every=2)
    _, answers = run(name, law, temperature, Regime(max_rows=40, num_pages=40), torch.float32, asks)
    assert generated(answers) == plain(temperature, torch.float32)


@pytest.mark.parametrize(("name", "law", "temperature"), MATRIX)
def test_cancelled_requests_leave_the_others_alone(name: str, law: str, temperature: float) -> None:
    """Cancelled while waiting, in the middle of a prompt, and in the middle of an answer."""
    asks = [
        replace(ask, cancelled=cancelled)
        for ask, cancelled in zip(requests(temperature), (None, 1, None, 3, 0, None, 6, None), strict=True)
    ]
    regime = Regime(max_rows=9, num_pages=24)
    harness, answers = run(name, law, temperature, regime, torch.float64, asks)
    for ask, got, want in zip(asks, generated(answers), plain(temperature, torch.float64), strict=True):
        assert got == (want if ask.cancelled is None else want[: len(got)])
    assert harness.engine.scheduler.tables.pool.num_available == regime.num_pages, "pages leaked"


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("name", ["scripted-bushy", "model-beam", "ngram-tree"])
def test_every_family_under_a_tree(family: str, name: str) -> None:
    """Sliding windows shorter than the text, biases and head norms, under tree attention and path commits."""
    asks = requests(1.0)
    config = tiny_config(family)
    wanted = generated(Harness(tiny_runner(config), no_drafter(torch.float64), LAWS["match"]()).run(asks))
    target = tiny_runner(config)
    answers = Harness(target, DRAFTERS[name][0](torch.float64), LAWS["match"]()).run(asks)
    assert generated(answers) == wanted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["scripted-bushy", "ngram", "model-beam", "model-hybrid", "model-sampled-chain"])
@pytest.mark.parametrize("weights", FORMATS)
def test_every_weight_format_is_a_target_of_its_own(weights: str, name: str, temperature: float) -> None:
    """A quantised model's tokens are its own plain decoding's, in chunks, under pressure and with any guesses."""
    family = {"ngram": "qwen2", "model-beam": "qwen3"}.get(name, "llama")
    config, asks = tiny_config(family), requests(temperature)
    target = tiny_runner(config, dtype=torch.float32, weights=weights)
    wanted = [generated(Harness(target, no_drafter(torch.float32), LAWS["match"]()).run([ask]))[0] for ask in asks]
    target = tiny_runner(config, dtype=torch.float32, weights=weights, num_pages=16)
    drafter = DRAFTERS[name][0](torch.float32)
    answers = Harness(target, drafter, LAWS["match"](), Regime(max_rows=24, num_pages=16)).run(asks)
    assert generated(answers) == wanted


def test_drafts_are_accepted_at_all() -> None:
    """Equality would be cheap if nothing were ever accepted: each drafter that can be right is, more than once."""
    for name in DRAFTERS:
        if name in ("none", "scripted-wrong", "model-other-family"):
            continue
        _, answers = run(name, "match", 0.0, Regime(), torch.float64, requests(0.0))
        assert sum(answer.accepted for answer in answers) > 5, name
