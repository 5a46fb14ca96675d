"""The equality matrix: whatever guesses, whatever the schedule, the tokens are those of plain decoding.

A new drafter, tree, law, kernel or cache change adds a row here, not a new harness.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from adapters import ALL, adapter_tensors, llama_modules, write_adapter
from draftwood.drafters.cascade import CascadeDrafter
from draftwood.drafters.lookahead import LookaheadDrafter
from draftwood.drafters.self_drafts import SELF_DRAFTS
from draftwood.drafters.view import View, ViewDrafter, Window, first_layers, without_layers
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
    StaticShape,
    WithoutReplacement,
    chain,
    sequoia,
)
from draftwood.model.config import ModelConfig
from draftwood.model.lora import Adapter as LoraAdapter
from draftwood.model.lora import read_adapter
from draftwood.model.runner import ModelRunner
from draftwood.model.spec import Sublayers
from draftwood.model.weights import FORMATS
from draftwood.ops.packed import Packing
from draftwood.request import FinishReason, SamplingParams
from draftwood.train.online import LEARNT, AdaptConfig, Adapter, Contest
from draftwood.train.optim import OptimConfig
from draftwood.tree import DraftLaw, Draw
from draftwood.verifiers import LAWS
from families import RECURRENT
from remote_drafters import PeriodicSpeaker, remote, sampling
from seq2seq import seq2seq_folder, seq2seq_runner, source_of
from tiny import (
    NETS,
    Ask,
    DraftMaker,
    Harness,
    Regime,
    TinyCheckpoint,
    choosing,
    combining,
    expecting,
    generated,
    ngram,
    no_drafter,
    offering,
    recycling,
    rest,
    rounded,
    scripted,
    suffix,
    tiny_config,
    tiny_runner,
    with_arrivals,
    with_bridge,
    with_masks,
    with_model,
    with_net,
    with_recurrent,
    with_student,
    with_view,
)

V = 13


def always_zero(tokens: Sequence[int]) -> list[list[int]]:
    return [[0, 0, 0]]


def every_pair(tokens: Sequence[int]) -> list[list[int]]:
    """A bushy tree that always holds the next two tokens: every accepted path leaves siblings behind."""
    return [[a, b] for a in range(V) for b in range(V)]


DRAFTERS: dict[str, DraftMaker] = {
    "none": no_drafter,
    "scripted-wrong": scripted(always_zero, 3, True),
    "scripted-bushy": scripted(every_pair, 200, False),
    "ngram": ngram(nodes=4, longest=3, shortest=1),
    "ngram-tree": ngram(nodes=8, longest=3, shortest=1, branches=3),
    "suffix": suffix(nodes=7, longest=6, shortest=1, least=0.01, shared=400),
    "recycling": recycling,
    "lookahead": lambda dtype: LookaheadDrafter(width=3, length=3, guesses=3),
    "rest": rest,
    "combined": combining(suffix(nodes=7, shortest=1, least=0.0), recycling),
    "combined-networks": combining(
        with_net("eagle3", Beam(nodes=9, width=3, depth=3)), with_model(chain(3)), ngram(nodes=4, shortest=1), nodes=9
    ),
    "combined-drawn": combining(
        recycling, with_model(Levels((2, 1), Independent())), with_model(Levels((1, 1), Independent()), noise=0.4)
    ),
    "remote": remote(PeriodicSpeaker()),
    "remote-drawn": sampling(PeriodicSpeaker()),
    "model-chain": with_model(chain(4)),
    "model-static": with_model(Levels((3, 2, 1), Best())),
    "model-shape": with_model(StaticShape(((0,), (1,), (3,), (0, 0), (0, 2), (1, 0), (0, 0, 0)))),
    "model-beam": with_model(Beam(nodes=9, width=3, depth=3)),
    "model-best-first": with_model(BestFirst(nodes=9, width=3, forwards=3)),
    "model-sampled-chain": with_model(Levels((1, 1, 1), Independent())),
    "model-iid": with_model(Levels((2, 2), Independent())),
    "model-without-replacement": with_model(Levels((3, 2, 1), WithoutReplacement())),
    "model-pairs": with_model(Levels((2, 2), WithoutReplacement())),
    "model-sequoia": with_model(sequoia(9, 4, (50, 20, 10))),
    "model-greedy": with_model(Greedy(9, 3)),
    "model-hybrid": with_model(Levels((3, 2, 1), Hybrid())),
    "model-paths": with_model(Paths(3, 3)),
    "model-delayed": with_model(Paths(2, 2, trunk=2)),
    "model-coupled": with_model(Levels((1, 1, 1), Coupled())),
    "model-coupled-tree": with_model(Levels((2, 2), Coupled())),
    "model-starved": with_model(chain(3), num_pages=20),
    "pard-chain": with_masks(chain(5)),
    "pard-tree": with_masks(Levels((3, 2, 1), Best())),
    "pard-sampled": with_masks(Levels((1, 1, 1), Independent())),
    "eagle3-chain": with_net("eagle3", chain(4)),
    "eagle3-tree": with_net("eagle3", Levels((3, 2, 1), Best())),
    "peagle-chain": with_net("peagle", chain(5)),
    "peagle-sampled-tree": with_net("peagle", Levels((2, 2), WithoutReplacement())),
    "eagle31-beam": with_net("eagle31", Beam(nodes=9, width=3, depth=3)),
    "eagle1-best-first": with_net("eagle1", BestFirst(nodes=9, width=3, forwards=3)),
    "mtp-sampled": with_net("mtp", Levels((1, 1, 1), Independent())),
    "dflash-chain": with_net("dflash", chain(5)),
    "dspark-tree": with_net("dspark", Levels((3, 2, 1), Best())),
    "dspark-without-replacement": with_net("dspark", Levels((2, 2), WithoutReplacement())),
    "treeflash-best-first": with_net("treeflash", BestFirst(nodes=9, width=3, forwards=3)),
    "medusa-shape": with_net("medusa", StaticShape(((0,), (1,), (3,), (0, 0), (0, 2), (1, 0), (0, 0, 0)))),
    "hydra-tree": with_net("hydra", Levels((3, 2, 1), Best())),
    "kangaroo-tree": with_net("kangaroo", Levels((3, 2, 1), Best())),
    "kangaroo-sampled": with_net("kangaroo", Levels((1, 1, 1), Independent())),
    "model-other-family": with_model(Levels((2, 2), Best()), family="qwen3", layers=1),
    "model-other-vocabulary": with_bridge(Levels((2, 1), WithoutReplacement())),
    "view-int4-beam": with_view(
        View(changed=rounded("w4a8"), without=Sublayers(frozenset({0}), frozenset({1}))),
        Beam(nodes=9, width=3, depth=3),
    ),
    "view-window": with_view(View(window=Window(4, 4)), BestFirst(nodes=9, width=3, forwards=3)),
    "offered-views": offering(
        with_view(View(first_layers(1)), Levels((1, 1, 1), Independent())),
        with_view(View(window=Window(0, 4)), chain(4)),
        with_model(chain(3)),
        suffix(nodes=4, shortest=1, least=0.0),
    ),
    "cascade-view": lambda dtype: CascadeDrafter(
        suffix(nodes=5, shortest=1, least=0.0)(dtype), ViewDrafter(View(without_layers((0,))), chain(1)), 5, 2, 3
    ),
    "cascade-drawn": lambda dtype: CascadeDrafter(
        recycling(dtype),
        with_model(chain(1))(dtype),  # type: ignore[arg-type]
        nodes=5,
        rounds=2,
        ahead=3,
        drawn=1,
    ),
    "predicted": expecting(no_drafter, lambda prompt: nearly_right(tuple(prompt))),
    "predicted-model-iid": expecting(
        with_model(Levels((2, 2), Independent())), lambda prompt: nearly_right(tuple(prompt))
    ),
    "predicted-eagle3": expecting(
        with_net("eagle3", Levels((3, 2, 1), Best())), lambda prompt: nearly_right(tuple(prompt))
    ),
    "offered-nets": offering(
        with_net("eagle3", Levels((3, 2, 1), Best())), with_net("medusa", chain(3)), with_model(chain(3))
    ),
    "choice": choosing(
        suffix(nodes=6, shortest=1, least=0.0), with_model(chain(3)), ngram(nodes=3, longest=3, shortest=1)
    ),
    "offered-combined": offering(
        combining(with_model(chain(3)), recycling), with_model(chain(3)), suffix(nodes=6, shortest=1, least=0.0)
    ),
    "offered-sampled": offering(with_model(Levels((1, 1, 1), Independent())), ngram(nodes=3, longest=3, shortest=1)),
}


@cache
def nearly_right(prompt: tuple[int, ...]) -> tuple[int, ...]:
    """What greedy plain decoding says, with a token replaced, one left out and two put in."""
    ask = Ask(prompt, SamplingParams(max_tokens=30))
    said = generated(Harness(tiny_runner(), no_drafter(torch.float64), LAWS["match"]()).run([ask]))[0]
    return (*said[:5], (said[5] + 1) % V, *said[6:11], *said[12:17], 3, 3, *said[17:])


LOSSLESS = tuple(law for law in LAWS if LAWS[law]().lossless)
# At temperature 0 every lossless law is one and the same short cut, so most names need no more than a hard schedule,
# and `optimal` costs nothing.
OFTEN_USED = ("match", "walk", "block", "layer", "traversal", "gbv")
LAWS_AT = [("match", 1.0), ("coupled", 1.0), *((law, 0.0) for law in LOSSLESS)]

REGIMES: dict[str, Regime] = {
    "one-batch": Regime(),
    "one-by-one": Regime(max_running=1),
    "chunks-of-five": Regime(max_rows=5),
    "starved": Regime(max_rows=24, num_pages=16),
    "big-pages-by-turns": Regime(page_size=32, num_pages=20, groups=2),
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


def run(name: str, law: str, regime: Regime, dtype: torch.dtype, asks: Sequence[Ask]):
    target = tiny_runner(dtype=dtype, num_pages=regime.num_pages, page_size=regime.page_size)
    harness = Harness(target, DRAFTERS[name](dtype), LAWS[law](), regime)
    return harness, harness.run(asks)


@cache
def plain(temperature: float, dtype: torch.dtype) -> list[list[int]]:
    """One request at a time, nothing guessed, nothing shared, nothing scarce."""
    wanted = []
    for ask in requests(temperature):
        target = tiny_runner(dtype=dtype)
        wanted += generated(Harness(target, no_drafter(dtype), LAWS["match"]()).run([ask]))
    return wanted


@cache
def draft_law(name: str) -> DraftLaw:
    return DRAFTERS[name](torch.float64).law


def supported(name: str, law: str) -> bool:
    return LAWS[law]().refuses(draft_law(name)) is None


MATRIX = [(n, law, t) for n in DRAFTERS for law, t in LAWS_AT if supported(n, law)]
FEW = [row for row in MATRIX if row[1] in ("match", "block", "gbv") or (row[1] == "walk" and "model" in row[0])]


def regimes_of(name: str, law: str) -> list[str]:
    """Every schedule for the laws people use, hard ones for the other names; chosen tokens need only the hardest."""
    if law in OFTEN_USED:
        return list(REGIMES)
    return ["starved"] if draft_law(name).draws == {Draw.POINT} else ["starved", "chunks-of-five"]


FULL = [(*row, regime) for row in MATRIX for regime in regimes_of(*row[:2])]


def test_every_lossless_law_has_its_rows() -> None:
    assert {law for _, law, _ in MATRIX} == set(LOSSLESS)
    assert {name for name, *_ in MATRIX} == set(DRAFTERS)
    assert len(LOSSLESS) == 16


@pytest.mark.parametrize(("name", "law", "temperature", "regime"), FULL)
def test_tokens_equal_plain_decoding(name: str, law: str, temperature: float, regime: str) -> None:
    """Every drafter, tree and law, in every schedule."""
    harness, answers = run(name, law, REGIMES[regime], torch.float64, requests(temperature))
    assert generated(answers) == plain(temperature, torch.float64)
    if regime == "starved":
        assert harness.engine.scheduler.num_preemptions > 0, "the cache was not scarce enough to test anything"


# The linear programs of `optimal` are for toys: here it gets two of the shapes it can do in time.
MIXED = [
    (name, law)
    for name in DRAFTERS
    for law in LOSSLESS
    if supported(name, law)
    and name not in ("none", "scripted-wrong", "ngram", "model-chain", "model-static", "model-best-first")
    and (law != "optimal" or name in ("ngram-tree", "model-sampled-chain"))
]


@pytest.mark.parametrize(("name", "law"), MIXED)
def test_greedy_requests_among_sampled_ones_equal_plain_decoding(name: str, law: str) -> None:
    """Nothing is certain for the batch as a whole, so the odds are asked, and must be certain for the greedy ones."""
    mixed = [requests(float(i % 2))[i] for i in range(8)]
    _, answers = run(name, law, Regime(max_rows=60), torch.float64, mixed)
    for i, got in enumerate(generated(answers)):
        if i % 2 == 0 or law in ("match", "coupled"):
            assert got == plain(float(i % 2), torch.float64)[i]
        assert len(got) == mixed[i].params.max_tokens


@pytest.mark.parametrize(("name", "law", "temperature"), FEW)
def test_tokens_equal_plain_decoding_in_float32_with_staggered_arrivals(
    name: str, law: str, temperature: float
) -> None:
    """A request that joins in the middle changes nobody's tokens, nor do they change its own."""
    asks = with_arrivals(requests(temperature), every=2)
    _, answers = run(name, law, Regime(max_rows=40, num_pages=40), torch.float32, asks)
    assert generated(answers) == plain(temperature, torch.float32)


@pytest.mark.parametrize(("name", "law", "temperature"), FEW)
def test_cancelled_requests_leave_the_others_alone(name: str, law: str, temperature: float) -> None:
    """Cancelled while waiting, in the middle of a prompt, and in the middle of an answer."""
    asks = [
        replace(ask, cancelled=cancelled)
        for ask, cancelled in zip(requests(temperature), (None, 1, None, 3, 0, None, 6, None), strict=True)
    ]
    regime = Regime(max_rows=9, num_pages=24)
    harness, answers = run(name, law, regime, torch.float64, asks)
    for ask, got, want in zip(asks, generated(answers), plain(temperature, torch.float64), strict=True):
        assert got == (want if ask.cancelled is None else want[: len(got)])
    assert harness.engine.scheduler.tables.pool.num_available == regime.num_pages, "pages leaked"


FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "olmo2", "gpt_oss")
FAMILY_ROWS = [(family, name) for name in ("scripted-bushy", "model-beam", "ngram-tree") for family in FAMILIES]


@pytest.mark.parametrize(("family", "name"), [*FAMILY_ROWS, ("gpt_oss", "view-hot-experts")])
def test_every_family_under_a_tree(family: str, name: str) -> None:
    """Sliding windows, biases, norms wherever they stand, capped scores, sinks and experts, under trees and commits."""
    asks = requests(1.0)
    config = tiny_config(family)
    wanted = generated(Harness(tiny_runner(config), no_drafter(torch.float64), LAWS["match"]()).run(asks))
    target = tiny_runner(config)
    drafters = {**DRAFTERS, "view-hot-experts": with_view(View(experts=0), Beam(nodes=9, width=3, depth=3))}
    answers = Harness(target, drafters[name](torch.float64), LAWS["match"]()).run(asks)
    assert generated(answers) == wanted


@cache
def recurrent(family: str, temperature: float = 0.8) -> tuple[ModelConfig, list[list[int]]]:
    """A family with recurrent layers, and what plain decoding says: one request at a time, nothing shared."""
    config = ModelConfig.from_hf({**RECURRENT[family], "max_position_embeddings": 512})
    asks = requests(temperature)
    runs = [Harness(tiny_runner(config), no_drafter(torch.float64), LAWS["match"]()).run([ask]) for ask in asks]
    return config, [generated(answers)[0] for answers in runs]


RECURRENT_ROWS = [
    ("none", "chunks-of-five"),
    ("scripted-bushy", "one-batch"),
    ("model-iid", "starved"),
    ("eagle3-tree", "starved"),
    ("ngram", "one-by-one"),
]


@pytest.mark.parametrize(("name", "regime"), RECURRENT_ROWS)
@pytest.mark.parametrize("family", ["mamba2", "bamba", "falcon_h1", "lfm2", "nemotron_h", "qwen3_next", "jamba"])
def test_recurrent_layers_give_rejected_drafts_back(family: str, name: str, regime: str) -> None:
    """States behind trees, chains, chunks, preemption and shared prefixes are those of plain decoding."""
    config, wanted = recurrent(family)
    own = REGIMES[regime]
    target = tiny_runner(config, num_pages=own.num_pages, page_size=own.page_size)
    harness = Harness(target, DRAFTERS[name](torch.float64), LAWS["match"](), own)
    answers = harness.run(requests(0.8))
    assert generated(answers) == wanted
    assert name == "none" or sum(answer.accepted for answer in answers) > 0
    assert regime != "starved" or harness.engine.scheduler.num_preemptions > 0


def without_attention() -> View:
    entry = SELF_DRAFTS["component"]
    return entry.make()(TinyCheckpoint(tiny_config()))


RECURRENT_DRAFTS: dict[str, DraftMaker] = {
    "model-tree": with_recurrent("mamba2", Levels((3, 2, 1), Best())),
    "model-drawn": with_recurrent("qwen3_next", Levels((2, 2), WithoutReplacement())),
    "model-paths": with_recurrent("lfm2", Paths(2, 2, trunk=2)),
    "combined": combining(with_recurrent("falcon_h1", Levels((1, 1, 1), Independent())), recycling, nodes=9),
    "offered": offering(with_recurrent("bamba", Greedy(9, 3)), with_recurrent("lfm2", chain(3)), recycling),
    "component": with_view(without_attention(), Levels((2, 2), WithoutReplacement())),
    "component-beam": with_view(without_attention(), Beam(nodes=9, width=3, depth=3)),
    "early-exit": with_view(View(first_layers(1)), chain(4)),
}


@pytest.mark.parametrize("regime", ["chunks-of-five", "starved"])
@pytest.mark.parametrize("name", RECURRENT_DRAFTS)
def test_drafts_of_recurrent_layers(name: str, regime: str) -> None:
    """As second models, for a target without states, and as parts of a target with them."""
    own, config, wanted = REGIMES[regime], None, plain(1.0, torch.float64)
    if name.startswith(("component", "early")):
        config, wanted = recurrent("falcon_h1", 1.0)
    target = tiny_runner(config, num_pages=own.num_pages, page_size=own.page_size)
    harness = Harness(target, RECURRENT_DRAFTS[name](torch.float64), LAWS["match"](), own)
    answers = harness.run(requests(1.0))
    assert generated(answers) == wanted
    assert sum(answer.accepted for answer in answers) > 0
    assert regime != "starved" or harness.engine.scheduler.num_preemptions > 0


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
    drafter = DRAFTERS[name](torch.float32)
    answers = Harness(target, drafter, LAWS["match"](), Regime(max_rows=24, num_pages=16)).run(asks)
    assert generated(answers) == wanted


@cache
def packed_plain(packing: Packing, temperature: float, dtype: torch.dtype) -> list[list[int]]:
    """One request at a time over an 8-bit cache, nothing guessed."""
    target, none = tiny_runner(tiny_config("qwen2"), dtype=dtype, packing=packing), no_drafter(dtype)
    return [generated(Harness(target, none, LAWS["match"]()).run([ask]))[0] for ask in requests(temperature)]


@pytest.mark.parametrize(("temperature", "dtype"), [(0.0, torch.float32), (1.0, torch.float64)], ids=["c", "torch"])
@pytest.mark.parametrize("name", ["scripted-bushy", "ngram-tree", "model-beam", "eagle3-tree"])
@pytest.mark.parametrize("packing", Packing)
def test_an_8_bit_cache_is_a_target_of_its_own(
    packing: Packing, name: str, temperature: float, dtype: torch.dtype
) -> None:
    """In chunks, under pressure, with pages shared and accepted paths moved; on our kernels and on torch's."""
    regime, wanted = Regime(max_rows=24, num_pages=16), packed_plain(packing, temperature, dtype)
    target = tiny_runner(tiny_config("qwen2"), dtype=dtype, packing=packing, num_pages=regime.num_pages)
    harness = Harness(target, DRAFTERS[name](dtype), LAWS["match"](), regime)
    assert generated(harness.run(requests(temperature))) == wanted


ADAPTED = ("scripted-bushy", "ngram-tree", "recycling", "model-beam", "eagle3-tree", "medusa-shape", "kangaroo-tree")


@cache
def adapters() -> tuple[LoraAdapter, LoraAdapter]:
    """All matrices of both layers, and attention of the first."""
    modules, found = ({0: (2, ALL), 1: (1, ("q_proj", "v_proj"))}), []
    for seed, (layers, which) in modules.items():
        tensors = adapter_tensors(llama_modules(layers, which), seed)
        with TemporaryDirectory() as folder:
            found.append(read_adapter(write_adapter(Path(folder), tensors), TinyCheckpoint(tiny_config())))
    return found[0], found[1]


def adapted_runner(dtype: torch.dtype, num_pages: int = 200, page_size: int = 4) -> ModelRunner:
    runner = tiny_runner(dtype=dtype, num_pages=num_pages, page_size=page_size)
    runner.model.adapt(adapters())  # type: ignore[attr-defined]
    return runner


def adapted_requests(temperature: float) -> list[Ask]:
    """For the base and two adapters in turn; the last three have one prompt, which shares no pages."""
    named, asks = (None, "0", "1"), requests(temperature)
    chosen = [*zip(asks, named * 3, strict=False), *((asks[3], adapter) for adapter in named)]
    return [replace(ask, params=replace(ask.params, adapter=adapter)) for ask, adapter in chosen]


@cache
def adapted_plain(temperature: float, dtype: torch.dtype) -> list[list[int]]:
    """One request at a time, nothing guessed."""
    return [
        generated(Harness(adapted_runner(dtype), no_drafter(dtype), LAWS["match"]()).run([ask]))[0]
        for ask in adapted_requests(temperature)
    ]


@pytest.mark.parametrize(
    ("temperature", "dtype"), [(0.0, torch.float32), (1.0, torch.float64)], ids=["greedy", "drawn"]
)
@pytest.mark.parametrize("name", ADAPTED)
def test_each_request_with_its_adapter_equals_its_plain_decoding(
    name: str, temperature: float, dtype: torch.dtype
) -> None:
    """The base and two adapters in the same steps, under pressure."""
    regime, wanted = REGIMES["starved"], adapted_plain(temperature, dtype)
    assert wanted[-1] != wanted[-2] != wanted[-3]
    target = adapted_runner(dtype, regime.num_pages, regime.page_size)
    harness = Harness(target, DRAFTERS[name](dtype), LAWS["match"](), regime)
    assert generated(harness.run(adapted_requests(temperature))) == wanted


def translations() -> list[Ask]:
    """Sources of several lengths, some of them the same, behind which texts begin in several ways."""
    return [
        replace(ask, source=source_of("t5", i % 3), params=replace(ask.params, max_tokens=5 + i))
        for i, ask in enumerate(requests(1.0)[:5])
    ]


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """An encoder-decoder, and what it says of each source alone."""
    folder = seq2seq_folder(tmp_path_factory.mktemp("t5"), "t5")
    target, plain = seq2seq_runner(folder), no_drafter(torch.float64)
    return folder, [generated(Harness(target, plain, LAWS["match"]()).run([ask]))[0] for ask in translations()]


BEHIND_ENCODERS = (
    *("none", "scripted-bushy", "ngram", "ngram-tree", "suffix", "recycling", "combined", "model-static", "model-iid"),
    *("pard-tree", "predicted-model-iid", "choice"),
)


@pytest.mark.parametrize("name", BEHIND_ENCODERS)
def test_a_decoder_behind_an_encoder_is_a_target_like_any_other(
    translator: tuple[Path, list[list[int]]], name: str
) -> None:
    """Draft models without an encoder read sources as text."""
    folder, wanted = translator
    regime = Regime(max_rows=24, num_pages=20)
    target = seq2seq_runner(folder, num_pages=regime.num_pages)
    answers = Harness(target, DRAFTERS[name](torch.float64), LAWS["match"](), regime).run(translations())
    assert generated(answers) == wanted


GUIDED = ("scripted-bushy", "ngram-tree", "model-beam", "model-iid", "predicted-model-iid", "eagle3-tree")


@pytest.mark.parametrize("law", ["match", "walk", "layer"])
@pytest.mark.parametrize("name", GUIDED)
def test_a_grammar_holds_at_every_node_along_its_own_path(name: str, law: str) -> None:
    """Among requests without one; a mask taken from another node, or left out at one, would change the tokens."""
    asks = [
        replace(ask, params=replace(ask.params, grammar=str(V))) if i % 3 else ask
        for i, ask in enumerate(requests(1.0 if law == "match" else 0.0))
    ]
    wanted = [
        generated(Harness(tiny_runner(), no_drafter(torch.float64), LAWS["match"]()).run([ask]))[0] for ask in asks
    ]
    _, answers = run(name, law, REGIMES["starved"], torch.float64, asks)
    assert generated(answers) == wanted
    for ask, said in zip(asks, wanted, strict=True):
        if ask.params.grammar:
            assert all(a != b for a, b in pairwise(said))
            assert all(token % 2 == 0 for token in said[2::3])


@pytest.mark.parametrize("law", ["match", "walk", "layer"])
@pytest.mark.parametrize("name", GUIDED)
def test_a_minimum_length_holds_at_every_node_along_its_own_path(name: str, law: str) -> None:
    """Among requests without one, with and without a grammar; most would have stopped within a few tokens."""
    stops = {1, 2, 4, 5, 6, 8}
    asks = [
        replace(
            ask,
            params=replace(
                ask.params,
                stop_token_ids=tuple(stops),
                min_tokens=min(3 * (i % 4), ask.params.max_tokens),
                grammar=str(V) if i % 5 == 3 else None,
            ),
        )
        for i, ask in enumerate(requests(1.0 if law == "match" else 0.0))
    ]
    wanted = [
        generated(Harness(tiny_runner(), no_drafter(torch.float64), LAWS["match"]()).run([ask]))[0] for ask in asks
    ]
    _, answers = run(name, law, REGIMES["starved"], torch.float64, asks)
    assert generated(answers) == wanted
    for ask, said in zip(asks, wanted, strict=True):
        assert len(said) >= ask.params.min_tokens
        assert not stops & set(said[: ask.params.min_tokens])
        assert not stops & set(said[:-1])
    assert any(len(said) < ask.params.max_tokens for ask, said in zip(asks, wanted, strict=True))


@pytest.mark.parametrize("law", ["match", "walk"])
def test_limits_of_single_requests_change_no_tokens(law: str) -> None:
    """Nodes, depth and whether to guess at all, each another way in the same batch."""
    wishes = [{}, {"max_nodes": 0}, {"max_nodes": 2}, {"max_depth": 1}, {"max_nodes": 5, "max_depth": 2}]
    asks = [replace(ask, params=replace(ask.params, **wishes[i % len(wishes)])) for i, ask in enumerate(requests(0.0))]
    _, answers = run("model-iid", law, REGIMES["starved"], torch.float64, asks)
    assert generated(answers) == plain(0.0, torch.float64)
    assert all(answer.drafted == 0 for answer in answers if answer.params.max_nodes == 0)
    assert any(answer.drafted for answer in answers)


LEARNING: dict[str, DraftMaker] = {
    **{name: DRAFTERS[name] for name in ("eagle3-tree", "dspark-tree", "medusa-shape", "hydra-tree", "kangaroo-tree")},
    "student-tree": with_student(Levels((3, 2, 1), Best())),
    "student-sampled": with_student(Levels((1, 1, 1), Independent())),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", LEARNING)
def test_tokens_equal_plain_decoding_while_the_drafter_learns(
    name: str, temperature: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As wildly as it gets: whatever it has learnt runs at once, in the middle of answers; some are cancelled."""
    monkeypatch.setattr(Contest, "enter", lambda self, scores: LEARNT)
    asks = with_arrivals([*requests(temperature), *requests(temperature)], every=3)
    asks = [replace(ask, cancelled=ask.arrives + 4) if i % 5 == 2 else ask for i, ask in enumerate(asks)]
    regime = Regime(max_rows=24, num_pages=24)
    target = tiny_runner(dtype=dtype, num_pages=regime.num_pages, page_size=regime.page_size)
    harness = Harness(target, LEARNING[name](dtype), LAWS["match"](), regime)
    wild = AdaptConfig(share=1.0, length=32, repeats=1, window=1, optimizer=OptimConfig(lr=0.1, muon_lr=0.3))
    harness.companion = adapter = Adapter(harness.engine, wild, clock=lambda: 0.0)
    answers = harness.run(asks)
    for ask, got, want in zip(asks, generated(answers), 2 * plain(temperature, dtype), strict=True):
        assert got == (want if ask.cancelled is None else want[: len(got)])
    assert adapter.progress.adopted >= 4
    ended = [event.finish_reason for event in harness.events if event.finished]
    assert adapter.progress.answers == len(asks) - ended.count(FinishReason.CANCELLED) < len(asks)
    assert harness.engine.scheduler.tables.pool.num_available == regime.num_pages, "pages leaked"


def test_drafts_are_accepted_at_all() -> None:
    """Equality would be cheap if nothing were ever accepted: each drafter that can be right is, more than once."""
    for name in DRAFTERS:
        if name in ("none", "scripted-wrong", "model-other-family"):
            continue
        _, answers = run(name, "match", Regime(), torch.float64, requests(0.0))
        by_luck = name.split("-")[0] in (*NETS, "pard")  # their weights are random: right one time in thirteen
        assert sum(answer.accepted for answer in answers) > (1 if by_luck else 5), name


def test_shared_noise_is_accepted_more_often_than_noise_of_its_own() -> None:
    """The same draft model at temperature 1 under `match`: what the target's own noise makes of q, or a fresh draw."""
    asks = [Ask((i % V, i // V), SamplingParams(temperature=1.0, seed=500 + i, max_tokens=25)) for i in range(24)]
    accepted = {}
    for name in ("model-sampled-chain", "model-coupled", "model-iid", "model-coupled-tree"):
        _, answers = run(name, "match", Regime(), torch.float64, asks)
        accepted[name] = sum(a.accepted for a in answers) / sum(a.steps for a in answers)
    assert accepted["model-coupled"] > 1.5 * accepted["model-sampled-chain"]
    assert accepted["model-coupled-tree"] > 1.5 * accepted["model-iid"]
