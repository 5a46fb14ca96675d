"""Training and decoding are the same function: what a network learns to say is what it says when it drafts."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from captured import CapturedHarness, Moody
from draftwood.growers import Beam, Best, BestFirst, Levels, Paths, WithoutReplacement, chain
from draftwood.nets.embeddings import TargetEmbeddings
from draftwood.nets.kangaroo import Kangaroo
from draftwood.nets.pard import ParallelEagle
from draftwood.request import SamplingParams
from draftwood.train.attention import Unrolled, causal_mask
from draftwood.train.data import Corpus, PackedBatches, TextBatch
from draftwood.train.losses import Mix
from draftwood.train.masked import Masks, ParallelEagleMethod
from draftwood.train.methods import BlockMethod, ShallowMethod
from draftwood.train.teacher import Teacher
from draftwood.verifiers import LAWS
from listening import Said, listen
from tiny import CPU, NETS, Ask, Harness, TinyCheckpoint, random_net, tiny_config, tiny_runner, with_net

F64 = torch.float64
TEXT = [3, 5, 1, 12, 7, 7, 2, 0, 9, 4, 11, 6, 3, 8]


def batch_of(texts: list[list[int]]) -> TextBatch:
    return next(PackedBatches(Corpus.of([(text[:2], text[2:]) for text in texts]), 1, sum(map(len, texts))).epoch(0, 0))


def teacher_of(reads) -> Teacher:  # type: ignore[no-untyped-def]
    return Teacher(tiny_runner(), reads)


def trained_view(kind: str, text: list[int], depth: int) -> Tensor:
    """Logits after `text`, whose last `depth` tokens are guesses, as training computes them. [V]."""
    words = TargetEmbeddings(TinyCheckpoint(tiny_config()), CPU, F64)
    net: Any = random_net(kind, words)
    batch = batch_of([text])
    lesson = teacher_of(net.reads).teach(batch)
    root = len(text) - depth - 1
    if isinstance(net, ParallelEagle):
        return _behind_masks(net, words, text[: root + 1])[depth]
    if hasattr(net, "fuse"):
        features = words.final_norm(lesson.features) if net.normed else lesson.features
        places = root
        state, attend = net.fuse(features)[:, :places], Unrolled(causal_mask(batch)[:, :places, :places])
        for j in range(depth + 1):
            embedded = words.embed(batch.tokens[:, 1 + j : 1 + j + places])
            state = net.run(embedded, state, batch.positions[:, :places] + j, attend)
        return net.head.spread(net.logits(state[0, -1]))
    if hasattr(net, "spec"):
        method = BlockMethod(net, teacher_of(net.reads), words, Mix({"kl": 1.0}))
        output = method._run(lesson, torch.tensor([[root]]))
        hidden = output[0, 0, net.spec.block_size - net.spec.guesses + depth]
        before = torch.tensor(text[-1])
        return net.head.spread(net.corrected(hidden, net.head(hidden), before, words.embed(before)))
    if isinstance(net, Kangaroo):
        method = ShallowMethod(net, teacher_of(net.reads), words, Mix({"kl": 1.0}))
        return net.head.spread(net.head(method.outputs(lesson)[0, -1]))
    path = words.embed(batch.tokens[0, root:])
    return net.heads[depth].spread(net.logits(depth, words.final_norm(lesson.features[0, root - 1]), path))


def _behind_masks(net: ParallelEagle, words: TargetEmbeddings, text: list[int]) -> Tensor:
    """Of all slots behind `text`. [guesses, V]."""
    method = ParallelEagleMethod(net, teacher_of(net.reads), words, Mix({"kl": 1.0}))
    row, guesses = len(text) - 2, net.ahead.guesses
    batch = batch_of([[*text, *range(guesses)]])  # what is to be guessed stands there in training
    kept = torch.zeros(*batch.tokens.shape, guesses - 1, dtype=torch.bool)
    kept[0, row] = True
    hidden = method.outputs(method.teacher.teach(batch), Masks.of(kept))[0]
    return net.head.spread(net.logits(hidden[[row, *range(batch.tokens.shape[1], len(hidden))]]))


GROWERS = {
    "chain": chain(3),
    "tree": Levels((2, 2, 1), Best()),
    "beam": Beam(7, 2, 3),
    "best-first": BestFirst(6, 2, 4),
    "drawn": Levels((2, 2), WithoutReplacement()),
    "paths": Paths(2, 3),
}


def check(heard: list[Said], kind: str, every: int) -> None:
    assert len(heard) > 40
    for tokens, depth, logits in heard[::every]:
        torch.testing.assert_close(trained_view(kind, list(tokens), depth), logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", list(NETS))
@pytest.mark.parametrize(("shape", "moody"), [*((shape, False) for shape in GROWERS), ("chain", True), ("beam", True)])
def test_a_draft_is_what_was_trained(kind: str, shape: str, moody: bool) -> None:
    """Also behind steps without drafts."""
    harness = Harness(tiny_runner(), with_net(kind, GROWERS[shape])(F64), LAWS["match"]())
    if moody:
        harness.engine.controller = Moody(harness.engine.drafter.max_nodes)
    heard = listen(harness)
    rng = random.Random(1)
    prompts = [tuple(rng.randrange(13) for _ in range(length)) for length in (1, 5, 23, 40)]
    asks = [Ask(prompt, SamplingParams(max_tokens=12, temperature=1.0, seed=len(prompt))) for prompt in prompts]
    harness.run(asks)
    for tokens, _, _ in heard:
        # The first row of a text is missing where pages were shared, which no test here does.
        assert any(tokens[: len(prompt)] == prompt for prompt in prompts)
    check(heard, kind, every=3 if shape in ("chain", "tree") and not moody else 17)


@pytest.mark.parametrize("kind", list(NETS))
@pytest.mark.parametrize("shape", list(GROWERS))
def test_a_draft_in_captured_steps_is_what_was_trained(kind: str, shape: str) -> None:
    harness = CapturedHarness(with_net(kind, GROWERS[shape])(F64), "match", moody=True)
    heard = listen(harness)
    prompts = [(1, 2), (5, 3, 3), (7, 7, 8, 7, 7), tuple(range(1, 12)) * 3]
    harness.run([Ask(p, SamplingParams(temperature=1.0, seed=i, max_tokens=14)) for i, p in enumerate(prompts)])
    check(heard, kind, every=5 if shape in ("chain", "tree", "beam") else 17)
