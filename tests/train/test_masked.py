"""Training behind masks: which masks are kept, that they see what they would while drafting, and that it helps."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftwood import LLM, EngineConfig, SamplingParams
from draftwood.drafters.pard import ParallelDrafter
from draftwood.errors import InvalidRequest
from draftwood.growers import Best, Levels, chain
from draftwood.model.runner import ModelRunner
from draftwood.nets.embeddings import TargetEmbeddings
from draftwood.nets.export import export
from draftwood.nets.layouts import Layout, open_drafter, recognise
from draftwood.nets.parts import DraftHead
from draftwood.nets.shared import SharedWords
from draftwood.nets.student import MaskedStudent
from draftwood.train.data import Corpus, PackedBatches, TextBatch
from draftwood.train.losses import parse_mix
from draftwood.train.masked import BehindMasks, MaskedMethod, Masks, ParallelEagleMethod
from draftwood.train.teacher import Teacher
from draftwood.verifiers import LAWS
from listening import listen
from tiny import CPU, Ask, Harness, TinyCheckpoint, random_net, tiny_config, tiny_folder, tiny_runner

F64 = torch.float64
CHECKPOINT = TinyCheckpoint(tiny_config())
GUESSES, MASK = 4, 12


def random_student(dtype: torch.dtype = F64) -> MaskedStudent:
    net = MaskedStudent(tiny_config().with_layers(2), MASK, GUESSES).to(dtype)
    for name, weight in net.named_parameters():
        weight.data.copy_(TinyCheckpoint(net.config, seed=5).tensor(name))
    return net


def method_of(net: MaskedStudent, **training: float) -> MaskedMethod:
    dtype = next(net.parameters()).dtype
    words = TargetEmbeddings(CHECKPOINT, CPU, dtype)
    head = DraftHead(words.head(), None, words.config.vocab_size, own=False)
    return MaskedMethod(net, head, Teacher(tiny_runner(dtype=dtype), ()), words, parse_mix("kl"), **training)


def lessons(texts: int = 6, length: int = 30, rows: int = 2, width: int = 100) -> TextBatch:
    rng = random.Random(2)
    made = [[rng.randrange(12) for _ in range(length + rng.randrange(9))] for _ in range(texts)]
    return next(PackedBatches(Corpus.of([(text[:4], text[4:]) for text in made]), rows, width).epoch(0, 0))


def test_masks_thin_out_with_depth_and_none_stands_without_those_before_it() -> None:
    method, batch = method_of(random_student(), keep=0.5, least=0.2), lessons()
    fit = method.dropping.fit(batch, 1)
    kept = method.dropping.kept(fit)
    assert not bool((kept[..., 1:] & ~kept[..., :-1]).any())
    assert not bool((kept & ~fit[..., 1:]).any())
    starts = fit[..., 0].sum(1)
    for depth, share in enumerate((0.5, 0.25, 0.2)):
        most = (starts * share).ceil()
        found = kept[..., depth].sum(1)
        assert bool((found <= most).all())
        assert bool((found > 0.6 * most).all())  # the others would stand behind the end of a text
    masks = Masks.of(kept)
    assert masks.place.shape[1] < 1.1 * float(starts.max()) * (0.5 + 0.25 + 0.2) + 3
    places = {(b, p, d) for d in (1, 2, 3) for b, _, p in zip(*(x.tolist() for x in masks.at(d)), strict=True)}
    assert places == {(b, p, d + 1) for b, p, d in kept.nonzero().tolist()}


def test_a_mask_sees_its_text_up_to_its_place_and_the_masks_between() -> None:
    masks = Masks(torch.tensor([[1, 1, 2]]), torch.tensor([[1, 2, 1]]))
    seen = masks.sight(torch.ones(1, 4, 4).tril().bool())[0].int().tolist()
    assert seen[:4] == [[1, 0, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0]]
    assert seen[4:] == [[1, 1, 0, 0, 1, 0, 0], [1, 1, 0, 0, 1, 1, 0], [1, 1, 1, 0, 0, 0, 1]]


def test_shares_that_are_none_are_refused() -> None:
    for shares in ({"keep": 1.5}, {"least": 0.0}, {"keep": 0.1, "least": 0.5}):
        with pytest.raises(InvalidRequest, match="least <= keep"):
            method_of(random_student(), **shares)


@cache
def trained_slots(text: tuple[int, ...]) -> Tensor:
    """Logits of all slots behind `text`, as training computes them. [guesses, V]."""
    method = method_of(random_student())
    longer = [*text, *range(GUESSES)]  # what is to be guessed stands there in training
    batch = next(PackedBatches(Corpus.of([(longer[:1], longer[1:])]), 1, len(longer)).epoch(0, 0))
    last = len(text) - 1
    kept = torch.zeros(1, len(longer), GUESSES - 1, dtype=torch.bool)
    kept[0, last] = kept[0, last // 2, 0] = True
    masks = Masks.of(kept)
    hidden = method.outputs(method.teacher.teach(batch), masks)[0]
    own = [
        len(longer) + int(number)
        for d in range(1, GUESSES)
        for _, number, p in zip(*masks.at(d), strict=True)
        if p == last
    ]
    return method.head(hidden[[last, *own]])


@pytest.mark.parametrize("grower", [chain(4), Levels((2, 2, 1), Best())], ids=["chain", "tree"])
def test_a_draft_is_what_was_trained(grower: Any) -> None:
    net = random_student()
    own = {name: weight.detach() for name, weight in net.state_dict().items()}
    runner = ModelRunner.load(SharedWords("student", net.config, own, CHECKPOINT), F64, CPU, 200, 4)
    harness = Harness(tiny_runner(), ParallelDrafter(runner, grower, MASK, GUESSES), LAWS["match"]())
    heard = listen(harness)
    rng = random.Random(1)
    prompts = [tuple(rng.randrange(12) for _ in range(length)) for length in (2, 5, 23, 40)]
    asks = [Ask(p, SamplingParams(max_tokens=12, temperature=1.0, seed=len(p))) for p in prompts]
    harness.run(asks)
    assert sum(depth == 0 for _, depth, _ in heard) > 15
    for tokens, depth, logits in heard:
        slot = trained_slots(tokens[: len(tokens) - depth])[depth]
        torch.testing.assert_close(slot, logits, rtol=1e-6, atol=1e-6)


def eagle_method() -> ParallelEagleMethod:
    words = TargetEmbeddings(CHECKPOINT, CPU, torch.float32)
    net: Any = random_net("peagle", words).requires_grad_(True)
    return ParallelEagleMethod(net, Teacher(tiny_runner(dtype=torch.float32), net.reads), words, parse_mix("kl"))


@pytest.mark.parametrize("make", [lambda: method_of(random_student(torch.float32)), eagle_method])
def test_every_depth_learns(make: Callable[[], BehindMasks]) -> None:
    method, batch = make(), lessons(texts=2, rows=1, width=80)
    optimizer = torch.optim.Adam(method.module.parameters(), 1e-2)
    reports = []
    for _ in range(60):
        report = method.losses(batch)
        optimizer.zero_grad()
        report["loss"].backward()
        optimizer.step()
        reports.append({name: float(value.detach()) for name, value in report.items()})
    for depth in range(1, GUESSES + 1):
        assert reports[-1][f"accept_{depth}"] > reports[0][f"accept_{depth}"] + 0.2
    assert reports[-1]["tokens"] == reports[0]["tokens"]


def test_what_is_exported_guesses_behind_masks(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "target")
    config = EngineConfig(device="cpu", dtype="float64", cache_tokens=2048, controller="fixed")
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    with LLM(folder, config=config) as plain:
        wanted = [result.token_ids for result in plain.generate(["abc", "the cat"], params)]
        net = MaskedStudent(plain.checkpoint.config.with_layers(1), 7, 3)
    export(net, tmp_path / "drafter", "org/target", {}, dtype=torch.float32)
    assert recognise(open_drafter(tmp_path / "drafter")) is Layout.MASKED_STUDENT
    with LLM(folder, drafter=str(tmp_path / "drafter"), config=config) as llm:
        drafter = llm.engine.drafter
        assert isinstance(drafter, ParallelDrafter)
        assert (drafter.mask, drafter.guesses, drafter.max_nodes) == (7, 3, 3)
        results = llm.generate(["abc", "the cat"], params)
    assert [result.token_ids for result in results] == wanted
    assert all(result.stats.drafted for result in results)
    export(net, tmp_path / "drafter", "org/target", {})  # it may be overwritten by the next
