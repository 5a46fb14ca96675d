"""Drafts of the target itself: at every node a view says what its part of the target says there, from the keys and
values that the target has made of the text, and it writes nowhere but where the target will write.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from draftwood.assembly import build_drafter
from draftwood.batch import ROUTES
from draftwood.config import EngineConfig
from draftwood.drafters import swift
from draftwood.drafters.hot_experts import HotExperts
from draftwood.drafters.none import NoDrafter
from draftwood.drafters.self_drafts import copied_as
from draftwood.drafters.view import View, ViewDrafter, Window, first_layers, without_layers
from draftwood.engine.memory import plan_memory, weight_bytes
from draftwood.errors import IncompatibleParts, InvalidRequest
from draftwood.growers import Beam, Independent, Levels, chain
from draftwood.model.native import NativeTransformer
from draftwood.model.runner import Model, ModelRunner, load_model
from draftwood.model.spec import Sublayers
from draftwood.model.transformer import Transformer
from draftwood.model.weights import FORMATS
from draftwood.ops import cpu
from draftwood.protocols import Span
from draftwood.request import SamplingParams
from draftwood.verifiers import Match
from no_sync import no_looking
from test_model_drafters import GROWERS, TEXTS, Decoding, decode
from tiny import CPU, Ask, Harness, Idle, Regime, TinyCheckpoint, generated, tiny_config, tiny_runner

CONFIG = tiny_config(layers=4)
LONG = ([5, 1, 7, 7, 2, 0, 9, 4, 3, 3, 8, 12, 6, 10, 11, 1, 0, 2, 5, 5, 4, 9, 8], [1, 2, 3, 9, 9, 4], [7])


def rounded(weights: str) -> Callable[[Model], Model]:
    """The same model with other weights, on the same kernels."""

    def made(target: Model) -> Model:
        if isinstance(target, Transformer):
            return Transformer(TinyCheckpoint(target.config), target.dtype, CPU, FORMATS[weights])
        return load_model(TinyCheckpoint(target.config), target.dtype, CPU, FORMATS[weights])

    return made


VIEWS = {
    "exit": View(first_layers(2)),
    "skip": View(without_layers((1, 2))),
    "int8": View(changed=rounded("w8a8")),
    "int4 skip": View(without_layers((2,)), rounded("int4")),
    "halves": View(without_layers((0,)), without=Sublayers(frozenset({1}), frozenset({2}))),
    "window": View(window=Window(3, 6)),
    "window skip": View(without_layers((0,)), window=Window(0, 4)),
}
LEFT_OUT = {"window": (4, 3), "window skip": (0, 2)}  # tokens of sinks, and pages at the end


@dataclass
class Part:
    """What a part of a model says behind a text that the whole model has read, written out."""

    model: Model
    part: Model
    left_out: tuple[int, int] | None

    def logits(self, text: Sequence[int], path: Sequence[int]) -> Tensor:
        runner = ModelRunner(self.model, 80, 4)
        tables, before, whole = runner.cache.tables, len(text) - 1, [*text, *path]
        tables.open(0, ())
        assert tables.reserve(0, len(whole))
        if before:
            runner.forward(runner.cache.stage_text([Span(0, whole, 0, before)]))
        last = torch.tensor([len(path)])
        batch = runner.cache.stage_text([Span(0, whole, before, len(whole))], last)
        with patch.object(cpu, "visible_keys", self._visible(before)):
            object.__setattr__(batch, "linear", False)  # or there is no mask
            return self.part.forward(batch, runner.cache.memory).logits[0]

    def _visible(self, last: int) -> Any:
        whole = cpu.visible_keys

        def visible(batch: Any, num_keys: int, window: int | None) -> Tensor:
            mask = whole(batch, num_keys, window)
            if self.left_out is not None:
                sinks, pages = self.left_out
                mask[:, sinks : max(sinks, (last // 4 - pages + 1) * 4)] = False
            return mask

        return visible


class Viewing(Decoding):
    """The target reads what the drafter does not, and the places it may write to are watched."""

    def __init__(self, name: str, grower: str, look: bool, texts: Sequence[Sequence[int]], dtype=torch.float64) -> None:
        self.name = name
        target = tiny_runner(CONFIG, dtype=dtype)
        super().__init__(ViewDrafter(VIEWS[name], GROWERS[grower]), texts, look, target)

    def catch_up(self, read: Sequence[int]) -> None:
        super().catch_up(read)
        assert not self.drafter.reads
        self._read_all()

    def _read_all(self) -> None:
        spans = [Span(i, text, 0, len(text) - 1) for i, text in enumerate(self.texts) if len(text) > 1]
        self.target.forward(self.target.cache.stage_text(spans))

    def propose(self, view: Any, nodes: int) -> Any:
        cache = self.target.cache
        before, own = cache.memory.store.clone(), torch.zeros(cache.memory.store.shape[3], dtype=torch.bool)
        own[cache.scratch_page * 4 :] = True
        for i, text in enumerate(self.texts):
            places = range(len(text) - 1, len(text) + self.drafter.staged(self.drafter.max_nodes))
            own[[cache.tables.pages(i)[at // 4] * 4 + at % 4 for at in places]] = True
        proposal = super().propose(view, nodes)
        same = (before == cache.memory.store).flatten(0, 2).all(0).all(-1)
        assert bool((same | own).all()), "a draft has written where the target reads"
        return proposal

    def accept(self, *args: Any) -> int:
        gained = super().accept(*args)
        self.catch_up([0] * len(self.texts))
        return gained

    def check(self, atol: float = 1e-9) -> int:
        model = Transformer(TinyCheckpoint(CONFIG), self.target.model.dtype, CPU)
        part, count = Part(model, VIEWS[self.name].of(model), LEFT_OUT.get(self.name)), 0
        for heard in self.grower.heard:
            for b, text in enumerate(self.texts):
                for k in range(heard.logits.shape[1]):
                    expected = part.logits(text, heard.path(b, k))
                    assert torch.allclose(heard.logits[b, k], expected, rtol=0, atol=atol), (b, heard.path(b, k))
                    count += 1
        return count


@pytest.mark.parametrize("look", [True, False])
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_says_what_its_part_of_the_target_says(name: str, look: bool) -> None:
    decode(Viewing(name, "beam" if look else "chain", look, LONG), 2, look, False, seed=len(name))


@pytest.mark.parametrize("name", sorted(set(GROWERS) - {"beam", "chain"}))
def test_every_grower_can_ask_a_view(name: str) -> None:
    view = "window skip" if len(name) % 2 else "skip"
    decode(Viewing(view, name, False, (*LONG[:1], *TEXTS[1:3])), 1, False, True, seed=len(name))


@pytest.mark.parametrize("name", VIEWS)
def test_so_it_does_on_our_own_kernels(name: str) -> None:
    decoding = Viewing(name, "levels", True, LONG, torch.float32)
    assert isinstance(decoding.target.model, NativeTransformer)
    # Inputs that are rounded to bytes differ in a step where the sums before them differ in the last bit.
    decode(decoding, 1, True, False, seed=1, atol=2e-2 if name == "int8" else 1e-4)


@pytest.mark.parametrize(
    "view",
    [
        View(without_layers((1,))),
        View(window=Window(0, 8)),
        *(View(without=Sublayers(frozenset({i}), frozenset({1 - i}))) for i in range(2)),
    ],
)
def test_so_it_does_on_kernels_for_a_gpu(view: View) -> None:
    pytest.importorskip("triton")
    from draftwood.model.cuda import CudaTransformer

    config = tiny_config(head_dim=64, num_attention_heads=2, num_key_value_heads=1, layers=2)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    heard = []
    for kind in (CudaTransformer, Transformer):
        runner = ModelRunner(kind(TinyCheckpoint(config), torch.float32, device), 12, 4)
        drafter, text = ViewDrafter(view, chain(2)), [5, 3, 9, 12, 0, 1, 1, 7, 8, 2, 11, 4, 6, 6, 1, 2, 9]
        drafter.attach(runner)
        runner.cache.tables.open(0, ())
        assert runner.cache.tables.reserve(0, len(text) + 3)
        runner.forward(runner.cache.stage_text([Span(0, text, 0, len(text) - 1)]))
        table = torch.tensor([runner.cache.tables.pages(0)], device=device)
        lengths, roots = (torch.tensor([number], device=device) for number in (len(text), text[-1]))
        seen = SimpleNamespace(
            size=1, lengths=lengths, roots=roots, block_table=table, turn_shifts=None, states=None, source_lengths=None
        )
        heard.append(drafter.begin(seen)[0])  # type: ignore[arg-type]
    assert (heard[0].float() - heard[1].float()).abs().max() <= 1e-4


@pytest.mark.parametrize("window", [None, Window(0, 4)])
def test_behind_images_rows_turn_by_their_own_numbers(window: Window | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As verification's rows do: positions and, for each sequence, how far its turns lie from them."""
    runner = tiny_runner(CONFIG)
    drafter, heard = ViewDrafter(View(window=window), chain(3)), []
    drafter.attach(runner)
    monkeypatch.setattr(
        drafter.runner, "forward", lambda batch: heard.append(batch) or runner.forward(replace(batch, turns=None))
    )
    lengths, shifts = torch.tensor([21, 7]), torch.tensor([-3, 2])
    table = torch.arange(16).view(2, 8)
    view = SimpleNamespace(
        size=2,
        lengths=lengths,
        roots=lengths % 13,
        block_table=table,
        turn_shifts=shifts,
        states=None,
        source_lengths=shifts,
    )
    drafter.begin(view)  # type: ignore[arg-type]
    (batch,) = heard
    assert batch.positions.tolist() == [20, 6]
    assert batch.turns.tolist() == [[17, 8]] * 3
    assert batch.source_lengths is shifts


def test_a_view_takes_no_memory_but_for_rounded_weights() -> None:
    target = tiny_runner(CONFIG)
    drafter = ViewDrafter(VIEWS["skip"], chain(2))
    drafter.attach(target)
    assert drafter.runner.cache is target.cache
    model = drafter.runner.model
    assert isinstance(model, Transformer)
    assert isinstance(target.model, Transformer)
    assert [model.layers.get(n) is target.model.layers.get(i) for n, i in enumerate((0, 3))] == [True, True]
    native = tiny_runner(CONFIG, dtype=torch.float32)
    assert isinstance(native.model, NativeTransformer)
    assert native.model.part((0, 3)).part((1,)).num_bytes == native.model.num_bytes


# --- in an engine


@pytest.mark.parametrize("prompts", [[(1, 2, 3), (4, 5), (6,), (7, 8, 9)], [(1, 2, 3, 4, 5, 6, 7, 8, 9)] * 4])
def test_all_of_the_target_is_always_right(prompts: list[tuple[int, ...]]) -> None:
    """Through preemption and shared prefixes; drafts of others take nothing from it."""
    harness = Harness(tiny_runner(num_pages=24), ViewDrafter(View(), chain(3)), Match(), Regime(num_pages=24))
    answers = harness.run([Ask(p, SamplingParams(max_tokens=30), arrives=i) for i, p in enumerate(prompts)])
    assert harness.engine.scheduler.num_preemptions > 0
    assert harness.engine.scheduler.tables.pool.num_available == 24, "pages leaked"
    for answer in answers:
        assert answer.accepted == answer.drafted > 0


def test_drawn_guesses_of_a_view_are_kept_by_every_law_for_them() -> None:
    """At temperature 0 all of the target draws what the target says."""
    harness = Harness(tiny_runner(), ViewDrafter(View(), Levels((1, 1, 1), Independent())), Match())
    (answer,) = harness.run([Ask((1, 2, 3), SamplingParams(max_tokens=21))])
    assert answer.accepted == answer.num_generated - answer.steps


def test_sets_are_tried_while_answers_are_generated() -> None:
    """Of a model two of whose layers do nothing, that is found out; drafts with it are right."""
    target = ModelRunner.load(Idle(CONFIG), torch.float64, CPU, 80, 4, FORMATS["stored"])  # type: ignore[arg-type]
    drafter = ViewDrafter(View(trials=40), chain(3))
    asks = [Ask((i, 2, 3), SamplingParams(max_tokens=40), arrives=12 * i) for i in range(6)]
    with patch.object(swift, "EVERY", 1):
        answers = Harness(target, drafter, Match(), Regime(num_pages=80)).run(asks)
    plain = Harness(target, ViewDrafter(View(), chain(3)), Match(), Regime(num_pages=80)).run(asks)
    assert generated(answers) == generated(plain)
    search = drafter._search
    assert search is not None
    assert search._left == 0, "the search ends"
    assert search.skipped >= {2, 3, 6, 7}, "layers 1 and 3 do nothing"
    assert drafter.staged(3) == swift.WINDOW


def test_less_of_the_text_and_fewer_layers_are_right_less_often() -> None:
    asks = [
        Ask(tuple(random.Random(i).randrange(13) for _ in range(40)), SamplingParams(max_tokens=30)) for i in range(6)
    ]
    rates = []
    for view in (View(), View(changed=rounded("int8")), View(window=Window(4, 8)), View(first_layers(1))):
        answers = Harness(tiny_runner(), ViewDrafter(view, chain(3)), Match()).run(asks)
        rates.append(sum(a.accepted for a in answers) / sum(a.drafted for a in answers))
    assert rates[0] == 1.0
    assert rates[0] > rates[1] > rates[2] > 0.1
    assert rates[1] > rates[3] > 0.1


# --- hot experts


def test_hot_experts_are_those_that_committed_rows_went_to_lately() -> None:
    hot = HotExperts(tiny_config("gpt_oss").mixtures, 0, CPU)
    routes = torch.tensor([[[0, 3], [1, 2]], [[0, 1], [1, 3]], [[2, 1], [0, 0]]])
    committed = torch.tensor([True, True, False])
    with no_looking():
        hot.count(routes, committed)
    assert [part.tolist() for part in hot.allowed] == [[1, 0, 0, 0], [0, 1, 0, 0]]
    for _ in range(40):
        hot.count(routes[2:], torch.tensor([True]))
    assert hot.top_k == 1
    assert [part.tolist() for part in hot.allowed] in ([[0, 1, 0, 0], [1, 0, 0, 0]], [[0, 0, 1, 0], [1, 0, 0, 0]])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_drafts_with_hot_experts_change_no_token(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every committed token is counted once, drafts go to hot experts only, and with all of them they are right."""
    counted, config = [], tiny_config("gpt_oss")
    count = HotExperts.count
    monkeypatch.setattr(
        HotExperts, "count", lambda self, routes, rows: counted.append(int(rows.sum())) or count(self, routes, rows)
    )
    asks = [Ask((1, 2, 3, 4, 5, 6, 7)[i:], SamplingParams(max_tokens=20)) for i in range(3)]
    wanted = generated(Harness(tiny_runner(config, dtype=dtype), NoDrafter(), Match()).run(asks))
    for experts, tree in ((0, Beam(nodes=7, width=2, depth=3)), (config.mixtures[0].count, chain(3))):
        target, drafter = tiny_runner(config, dtype=dtype), ViewDrafter(View(experts=experts), tree)
        answers = Harness(target, drafter, Match()).run(asks)
        assert generated(answers) == wanted
        assert sum(counted) == sum(len(ask.prompt) + len(own) - 1 for ask, own in zip(asks, wanted, strict=True))
        counted.clear()
        assert not experts or all(answer.accepted == answer.drafted > 0 for answer in answers)
    runner, routed = tiny_runner(config, dtype=dtype), []
    drafter = ViewDrafter(View(experts=2), chain(2))
    drafter.attach(runner)
    for model in (drafter.runner, runner):
        runner.cache.tables.open(0, ())
        assert runner.cache.tables.reserve(0, 9)
        batch = runner.cache.stage_text([Span(0, LONG[0], 0, 9)])
        routed.append(model.forward(batch, frozenset({ROUTES})).features[ROUTES])
        runner.cache.tables.close(0)
    assert set(routed[0].flatten().tolist()) == {0, 1}
    assert set(routed[1].flatten().tolist()) == {0, 1, 2, 3}


# --- what is refused


@pytest.mark.parametrize(
    ("view", "words"),
    [
        (View(without_layers((4,))), "no layer 4 to be skipped: the target's are 0 to 3"),
        (View(without_layers(range(4))), "some of the layers 0 to 3, rising, not"),
        (View(experts=0), "no mixture of experts"),
        (View(lambda config: (2, 1)), r"rising, not \[2, 1\]"),
        (View(without=Sublayers(mlp=frozenset({4}))), "no layer 4 to be skipped"),
        (View(changed=lambda target: Transformer(TinyCheckpoint(CONFIG), torch.float32, CPU)), "other kernels"),
    ],
)
def test_parts_that_there_are_none_of_are_refused(view: View, words: str) -> None:
    with pytest.raises(IncompatibleParts, match=words):
        ViewDrafter(view, chain(2)).attach(tiny_runner(CONFIG, dtype=torch.float32))


def test_targets_that_have_no_parts_are_refused() -> None:
    foreign = SimpleNamespace(model=SimpleNamespace(config=CONFIG), cache=None)
    with pytest.raises(IncompatibleParts, match="transformers' own modules"):
        ViewDrafter(View(), chain(2)).attach(foreign)  # type: ignore[arg-type]
    windowed = tiny_runner(tiny_config("mistral"))
    with pytest.raises(IncompatibleParts, match="windows of their own"):
        ViewDrafter(View(window=Window(4, 8)), chain(2)).attach(windowed)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("window:recent=0", "at least one recent token"),
        ("hot-experts:experts=-1", "experts counts those of each layer"),
        ("early-exit:window=-1", "window counts tokens"),
        ("layer-skip:skip=ax2", "another kind of value"),
        ("layer-skip:skip=1,trials=2", "give no skip"),
        ("self-int8:bits=4", "no setting 'bits' .it has: window"),
    ],
)
def test_settings_that_mean_nothing_are_refused(spec: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        build_drafter(spec, None, TinyCheckpoint(CONFIG), EngineConfig())  # type: ignore[arg-type]


def test_rounding_to_what_the_target_is_already_is_refused() -> None:
    checkpoint = TinyCheckpoint(CONFIG)
    drafter = build_drafter("self-int8", None, checkpoint, EngineConfig())  # type: ignore[arg-type]
    with pytest.raises(IncompatibleParts, match="w8a8 already"):
        drafter.attach(tiny_runner(CONFIG, dtype=torch.float32, weights="w8a8"))
    drafter.attach(tiny_runner(CONFIG, dtype=torch.float32, weights="int8"))


def test_names_make_drafters_with_any_tree() -> None:
    checkpoint, target = TinyCheckpoint(CONFIG), tiny_runner(CONFIG)
    for spec in (
        "early-exit:layers=2",
        "layer-skip:skip=1x2,window=8",
        "layer-skip:attention=1,mlp=0x2",
        "layer-skip:trials=4,window=8",
        "self-int4:window=8",
        "window:recent=8,sinks=4",
    ):
        drafter = build_drafter(spec, "beam:nodes=6,width=2,depth=3", checkpoint, EngineConfig())  # type: ignore[arg-type]
        assert isinstance(drafter, ViewDrafter)
        assert isinstance(drafter.grower, Beam)
        drafter.attach(target)
    early = build_drafter("early-exit", None, checkpoint, EngineConfig())  # type: ignore[arg-type]
    early.attach(target)
    assert isinstance(early, ViewDrafter)
    assert early.runner.model.config.num_layers == 2, "a third, rounded up"


def test_a_second_copy_of_the_weights_is_planned_for() -> None:
    config = EngineConfig(dtype="bfloat16", device="cpu", cache_tokens=4096).settled()
    room = 8 << 30, 8 << 30
    plain, copied = (plan_memory(CONFIG, None, config, *room, copy) for copy in (None, copied_as("self-int4:window=8")))
    assert copied.draft_weights == weight_bytes(CONFIG, "int4", torch.bfloat16) > plain.draft_weights == 0
    assert copied_as("early-exit") is None is copied_as(object())
