"""The whole engine under the enumerating source of randomness: drafter, tree attention, pages, commit and law.

A tiny float64 transformer answers one token of prompt with N tokens, over several rounds; the law of the answer over
all V^N strings is compared with the model's own, computed by teacher forcing with a decoder and
a processor stack written out again for the purpose.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

import pytest
from torch import Tensor

from draftwood import faults
from draftwood.drafters.model import ModelDrafter
from draftwood.drafters.ngram import NgramDrafter
from draftwood.growers import (
    Beam,
    Best,
    BestFirst,
    Coupled,
    Greedy,
    Hybrid,
    Independent,
    Levels,
    Paths,
    WithoutReplacement,
    chain,
)
from draftwood.protocols import Randomness
from draftwood.request import SamplingParams
from draftwood.rng import KeyedRng
from draftwood.verifiers import LAWS
from enumeration import Enumerator, law_of
from reference_model import written_out_logits
from tiny import Ask, Harness, Regime, TinyCheckpoint, generated, tiny_config, tiny_runner

pytestmark = pytest.mark.usefixtures("quick_bars")

PROMPT = (0,)
STACK = SamplingParams(
    temperature=2.5,
    top_k=3,
    top_p=0.93,
    min_p=0.02,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=-0.3,
    logit_bias={0: 0.5},
    bad_words=("cb", "d"),
    max_tokens=3,
)


@cache
def logits_after(tokens: tuple[int, ...], vocabulary: int) -> tuple[float, ...]:
    checkpoint = TinyCheckpoint(tiny_config(vocab_size=vocabulary))
    return tuple(written_out_logits(checkpoint, list(tokens))[-1].tolist())


def processed(logits: tuple[float, ...], prompt: tuple[int, ...], answer: tuple[int, ...], s: SamplingParams):
    """The distribution of the next token, the slow and obvious way."""
    x = [v + s.logit_bias.get(t, 0.0) for t, v in enumerate(logits)]
    for word in s.bad_words:
        ids = tuple(ord(c) - ord("a") for c in word)
        if len(ids) == 1 or answer[-(len(ids) - 1) :] == ids[:-1]:
            x[ids[-1]] = -math.inf
    for t in range(len(x)):
        if t in prompt + answer:
            x[t] = x[t] / s.repetition_penalty if x[t] > 0 else x[t] * s.repetition_penalty
        x[t] -= s.frequency_penalty * answer.count(t) + s.presence_penalty * (t in answer)
    x = [v / s.temperature for v in x]
    p = [math.exp(v - max(x)) for v in x]
    p = [v / sum(p) for v in p]
    order = sorted(range(len(p)), key=lambda t: -p[t])
    kept = order[: s.top_k] if s.top_k else order
    total, so_far, nucleus = sum(p[t] for t in kept), 0.0, []
    for t in kept:
        if so_far < s.top_p * total:
            nucleus.append(t)
        so_far += p[t]
    final = [t for t in nucleus if p[t] >= s.min_p * p[order[0]]]
    mass = sum(p[t] for t in final)
    return [p[t] / mass if t in final else 0.0 for t in range(len(p))]


def own_law(vocabulary: int, params: SamplingParams) -> dict[tuple[int, ...], float]:
    law = {}
    for y in itertools.product(range(vocabulary), repeat=params.max_tokens):
        chance = 1.0
        for i in range(len(y)):
            chance *= processed(logits_after((*PROMPT, *y[:i]), vocabulary), PROMPT, y[:i], params)[y[i]]
        law[y] = chance
    return law


@dataclass
class Relay:
    """The source of an engine's randomness, to be changed from run to run."""

    rng: Randomness = field(default_factory=KeyedRng)

    def pick(self, weights: Tensor, keys: Tensor) -> Tensor:
        return self.rng.pick(weights, keys)

    def race(self, weights: Tensor, keys: Tensor, winners: int = 1) -> Tensor:
        return self.rng.race(weights, keys, winners)


def engine_law(
    drafter,
    law: str,
    vocabulary: int,
    params: SamplingParams,
    wrap: Callable = lambda rng: rng,
    max_rows: int = 512,
):
    target, relay = tiny_runner(tiny_config(vocab_size=vocabulary)), Relay()
    harness = Harness(target, drafter, LAWS[law](), Regime(max_rows), relay)

    def run(rng: Enumerator):
        relay.rng = wrap(rng)
        harness.events.clear()
        return tuple(generated(harness.run([Ask(PROMPT, params)]))[0])

    return law_of(run)


def drafts_with(grower, vocabulary: int) -> ModelDrafter:
    return ModelDrafter(tiny_runner(tiny_config(vocab_size=vocabulary), noise=0.4), grower)


CASES = {
    "match, beam": (Beam(nodes=4, width=2, depth=2), "match", 5),
    "match, sampled": (Levels((1, 1), Independent()), "match", 3),
    "walk, chosen chain": (chain(2), "walk", 5),
    "walk, best-first": (BestFirst(nodes=4, width=2, forwards=2), "walk", 5),
    "walk, independent": (Levels((2, 1), Independent()), "walk", 2),
    "walk, greedy": (Greedy(3, 2), "walk", 3),
    "traversal, greedy": (Greedy(3, 3), "traversal", 3),
    "walk, hybrid": (Levels((2, 1), Hybrid()), "walk", 3),
    "block, chosen chain": (chain(2), "block", 5),
    "block, sampled chain": (Levels((1, 1), Independent()), "block", 3),
    "token, sampled chain": (Levels((1, 1), Independent()), "token", 2),
    "naive, paths": (Paths(2, 2), "naive", 2),
    "kseq, paths": (Paths(2, 2), "kseq", 2),
    "rrs, paths": (Paths(2, 2), "rrs", 2),
    "traversal, paths": (Paths(2, 2), "traversal", 2),
    "layer, paths behind a trunk": (Paths(2, 1, trunk=1), "layer", 2),
    "layer-kseq, paths": (Paths(2, 1), "layer-kseq", 2),
    "gbv, paths": (Paths(2, 2), "gbv", 2),
    "gbv, paths behind a trunk": (Paths(2, 1, trunk=1), "gbv", 2),
    "optimal, independent": (Levels((2,), Independent()), "optimal", 2),
    "traversal, without replacement": (Levels((2, 1), WithoutReplacement()), "traversal", 3),
    "rrsw, without replacement": (Levels((2,), WithoutReplacement()), "rrsw", 3),
    "layer, hybrid": (Levels((2, 1), Hybrid()), "layer", 3),
    "hybrid, hybrid": (Levels((2,), Hybrid()), "hybrid", 3),
    "layer-proportional, without replacement": (Levels((2,), WithoutReplacement()), "layer-proportional", 3),
    "layer-proportional, independent": (Levels((2, 1), Independent()), "layer-proportional", 2),
    "layer, without replacement": (Levels((2,), WithoutReplacement()), "layer", 3),
}


@pytest.mark.parametrize("case", CASES)
def test_the_engine_has_the_models_own_law(case: str) -> None:
    """Three tokens, so up to three rounds: state that leaks from one round into the next shows up here."""
    grower, law, vocabulary = CASES[case]
    # Where rows are flat `gbv` falls back to one path, and there would be little to see.
    params = SamplingParams(temperature=1.0 if isinstance(grower, Paths) else 3.0, max_tokens=3)
    h = engine_law(drafts_with(grower, vocabulary), law, vocabulary, params)
    want = own_law(vocabulary, params)
    assert max(abs(h.get(y, 0.0) - p) for y, p in want.items()) <= 1e-9
    assert sum(h.values()) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("law", ["naive", "traversal", "layer", "gbv"])
def test_paths_that_a_full_step_has_no_room_for(law: str) -> None:
    """Three nodes at most: whether a second level has room may not tilt what is drawn on the kept path."""
    params = SamplingParams(temperature=1.0, max_tokens=3)
    h = engine_law(drafts_with(Paths(2, 2), 2), law, 2, params, max_rows=4)
    assert max(abs(h.get(y, 0.0) - p) for y, p in own_law(2, params).items()) <= 1e-9


class Forgetful(ModelDrafter):
    """Fails in the middle of the first round: once its cache has moved on, or as soon as it has drawn a tree."""

    def __init__(self, drafter: ModelDrafter, call: str) -> None:
        super().__init__(drafter.runner, drafter.grower)
        self.call = call

    def propose(self, view, nodes, rng):  # type: ignore[no-untyped-def]
        proposal = super().propose(view, nodes, rng)
        return self._fail() if self.call == "propose" and int(view.lengths[0]) == 1 else proposal

    def commit(self, view, proposal, verdict, features) -> None:  # type: ignore[no-untyped-def]
        super().commit(view, proposal, verdict, features)
        if self.call == "commit" and int(view.lengths[0]) == 1:
            self._fail()

    def _fail(self):  # type: ignore[no-untyped-def]
        raise LookupError(self.call)


@pytest.mark.usefixtures("drafters_may_fail")
@pytest.mark.parametrize("call", ["propose", "commit"])
@pytest.mark.parametrize("case", ["block, sampled chain", "hybrid, hybrid", "gbv, paths"])
def test_a_drafter_that_fails_on_its_way_tilts_nothing(case: str, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it draws afterwards comes from the probabilities it states, whatever it has forgotten."""
    monkeypatch.setattr(faults, "MOST_IN_A_ROW", 1 << 30)
    grower, law, vocabulary = CASES[case]
    params = SamplingParams(temperature=2.0, max_tokens=3)
    drafter = Forgetful(drafts_with(grower, vocabulary), call)
    h = engine_law(drafter, law, vocabulary, params)
    assert max(abs(h.get(y, 0.0) - p) for y, p in own_law(vocabulary, params).items()) <= 1e-9
    assert sum(h.values()) == pytest.approx(1, abs=1e-12)


def own_law_with_stops(vocabulary: int, params: SamplingParams) -> dict[tuple[int, ...], float]:
    """The law of answers that end with a stop token, none of which may come among the first `min_tokens`."""
    law: dict[tuple[int, ...], float] = {}
    front = {(): 1.0}
    while front:
        y, chance = front.popitem()
        p = processed(logits_after((*PROMPT, *y), vocabulary), PROMPT, y, params)
        if len(y) < params.min_tokens:
            p = [0.0 if t in params.stop_token_ids else v for t, v in enumerate(p)]
        for t, v in enumerate(p):
            longer = (*y, t)
            ends = t in params.stop_token_ids or len(longer) == params.max_tokens
            (law if ends else front)[longer] = chance * v / sum(p)
    return law


@pytest.mark.parametrize(
    "case", ["match, sampled", "rrsw, without replacement", "block, sampled chain", "gbv, paths", "layer, hybrid"]
)
def test_a_minimum_length_is_part_of_the_law(case: str) -> None:
    """Guesses run on past the minimum, so one tree has nodes that may stop and nodes that may not."""
    grower, law, vocabulary = CASES[case]
    params = SamplingParams(temperature=2.0, max_tokens=3, min_tokens=1, stop_token_ids=(0,))
    h = engine_law(drafts_with(grower, vocabulary), law, vocabulary, params)
    want = own_law_with_stops(vocabulary, params)
    assert max(abs(h.get(y, 0.0) - p) for y, p in want.items()) <= 1e-9
    assert sum(h.values()) == pytest.approx(1, abs=1e-12)
    assert any(len(y) == 2 for y, p in h.items() if p > 0)
    assert sum(p for y, p in h.items() if len(y) < 2) == 0


@dataclass(frozen=True)
class FixedNoise:
    """Races run on the noise of their keys, as shipped; picks are enumerated, and may not use a raced key."""

    rng: Enumerator

    def pick(self, weights: Tensor, keys: Tensor) -> Tensor:
        return self.rng.pick(weights, keys)

    def race(self, weights: Tensor, keys: Tensor, winners: int = 1) -> Tensor:
        self.rng.used.update(keys.tolist())
        return KeyedRng().race(weights, keys, winners)


@pytest.mark.parametrize(
    ("widths", "law"),
    [((1, 1), "walk"), ((1, 1), "block"), ((2, 1), "traversal"), ((2, 1), "layer"), ((2, 1), "naive")],
    ids=["walk", "block", "traversal", "layer", "naive"],
)
def test_coupled_drafts_are_chosen_tokens_for_every_other_law(widths: tuple[int, ...], law: str) -> None:
    """Whatever the shared noise is, and though it comes again round after round: the laws draw with their own."""
    for seed in range(2):
        params = SamplingParams(temperature=3.0, max_tokens=3, seed=seed)
        h = engine_law(drafts_with(Levels(widths, Coupled()), 3), law, 3, params, FixedNoise)
        assert len(h) == 27
        assert max(abs(h[y] - p) for y, p in own_law(3, params).items()) <= 1e-9


@pytest.mark.parametrize("law", ["match", "walk", "block", "layer", "traversal", "layer-proportional"])
def test_lookup_from_the_text_itself_keeps_the_law(law: str) -> None:
    """A drafter whose guesses depend on what was drawn in earlier rounds."""
    params = SamplingParams(temperature=3.0, max_tokens=4)
    h = engine_law(NgramDrafter(nodes=2, longest=1, shortest=1), law, 2, params)
    assert max(abs(h.get(y, 0.0) - p) for y, p in own_law(2, params).items()) <= 1e-9


@pytest.mark.parametrize(
    ("grower", "law"),
    [
        (Levels((2,), Best()), "match"),
        (Levels((2, 1), Best()), "walk"),
        (Levels((1, 1), Independent()), "block"),
        (Levels((2,), Hybrid()), "walk"),
        (Paths(2, 1), "gbv"),
        (Levels((2, 1), Hybrid()), "layer"),
        (Levels((2,), WithoutReplacement()), "traversal"),
        (Levels((2,), Independent()), "layer-proportional"),
    ],
    ids=["match", "walk", "block", "hybrid", "gbv", "layer", "traversal", "layer-proportional"],
)
def test_the_whole_sampling_stack_applies_along_every_nodes_own_path(grower, law: str) -> None:
    """Penalties, bad words and truncation at a tree node see that node's path, not the committed text alone."""
    h = engine_law(drafts_with(grower, 4), law, 4, STACK)
    want = own_law(4, STACK)
    assert max(abs(h.get(y, 0.0) - p) for y, p in want.items()) <= 1e-9
    assert min(p for p in want.values() if p > 0) > 0
    assert any(p == 0 for p in want.values()), "the stack removes nothing: it is not tested"


def grammatical_law(vocabulary: int, params: SamplingParams) -> dict[tuple[int, ...], float]:
    """`own_law` under the grammar of `NoStutter`, its two rules written out again."""
    law = {}
    for y in itertools.product(range(vocabulary), repeat=params.max_tokens):
        chance = 1.0
        for i, token in enumerate(y):
            banned = {y[i - 1]} if i else set()
            banned |= {t for t in range(vocabulary) if i % 3 == 2 and t % 2}
            logits = [
                -math.inf if t in banned else x for t, x in enumerate(logits_after((*PROMPT, *y[:i]), vocabulary))
            ]
            chance *= processed(tuple(logits), PROMPT, y[:i], params)[token]
        law[y] = chance
    return law


@pytest.mark.parametrize(
    ("grower", "law"),
    [
        (Levels((1, 1), Independent()), "block"),
        (Levels((2,), Independent()), "walk"),
        (Levels((2,), WithoutReplacement()), "traversal"),
        (Levels((2, 1), Hybrid()), "layer"),
        (Paths(2, 1), "layer-kseq"),
        (Paths(2, 1), "gbv"),
    ],
    ids=["block", "walk", "traversal", "layer", "layer-kseq", "gbv"],
)
def test_a_grammar_with_penalties_under_laws_that_draw(grower, law: str) -> None:
    """The drafter knows no grammar: what it draws in vain must not tilt what is said instead."""
    params = SamplingParams(temperature=2.5, repetition_penalty=1.3, presence_penalty=0.4, max_tokens=3, grammar="4")
    h, want = engine_law(drafts_with(grower, 4), law, 4, params), grammatical_law(4, params)
    assert max(abs(h.get(y, 0.0) - p) for y, p in want.items()) <= 1e-9
    assert sum(p > 0 for p in want.values()) == 4 * 3 + 2 * 3, "pairs of different tokens, then an even one"


@pytest.mark.parametrize(
    ("grower", "law", "vocabulary"),
    [
        (Beam(nodes=5, width=3, depth=2), "match", 3),
        (Levels((2,), WithoutReplacement()), "walk", 3),
        (chain(2), "block", 3),
        (Levels((2, 1), Independent()), "traversal", 2),
        (Paths(2, 2), "gbv", 2),
    ],
    ids=["match", "walk", "block", "traversal", "gbv"],
)
def test_an_end_of_text_inside_the_tree_cuts_the_answer_after_verification(grower, law: str, vocabulary: int) -> None:
    """Both sides truncated alike: the law of texts that end at the first stop token."""
    params = SamplingParams(temperature=1.0 if isinstance(grower, Paths) else 3.0, max_tokens=3)
    stopping = replace(params, stop_token_ids=(1,))
    want: dict[tuple[int, ...], float] = {}
    for y, chance in own_law(vocabulary, params).items():
        cut = y[: y.index(1) + 1] if 1 in y else y
        want[cut] = want.get(cut, 0.0) + chance
    h = engine_law(drafts_with(grower, vocabulary), law, vocabulary, stopping)
    assert set(h) == set(want)
    assert max(abs(h[y] - p) for y, p in want.items()) <= 1e-9
