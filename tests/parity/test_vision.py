"""Models that see images, from folders that transformers has saved: the same logits, the same tokens with drafts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftwood.batch import Images
from draftwood.model.checkpoint import open_checkpoint
from draftwood.model.native import NativeTransformer
from draftwood.model.runner import ModelRunner
from draftwood.model.transformer import Transformer
from draftwood.model.vision import placed
from draftwood.model.weights import FORMATS
from draftwood.ops.native import kernels
from draftwood.protocols import Span
from draftwood.request import SamplingParams
from draftwood.verifiers import LAWS
from pictures import CONFIGS, IMAGE, model_of, seen_by
from tiny import CPU, EASY, Ask, Harness, Regime, generated, no_drafter, scripted

from .test_families import everything_wide

TEXTS = [([5, 6, IMAGE, 7, 8, 3], [0]), ([1, IMAGE, 2, IMAGE, 4, 4], [1, 2]), ([3, 9, 3, IMAGE, 5], [1])]


@pytest.fixture(scope="module", params=CONFIGS)
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    with everything_wide():
        return model_of(request.param, folder), folder


def prompts(folder: Path) -> list[tuple[list[int], Images]]:
    spec = open_checkpoint(folder).config.images
    assert spec is not None
    with everything_wide():
        return [placed(text, seen_by(folder, numbers), spec) for text, numbers in TEXTS]


def theirs(model: Any, folder: Path, tokens: list[int], numbers: list[int]) -> torch.Tensor:
    """The logits of transformers' own forward."""
    from io import BytesIO

    from PIL import Image
    from transformers import AutoImageProcessor

    from pictures import image

    processor = AutoImageProcessor.from_pretrained(folder, trust_remote_code=False, backend="pil")
    made = [processor(images=[Image.open(BytesIO(image(i)))], return_tensors="pt") for i in numbers]
    ids = torch.tensor([tokens])
    given = {"pixel_values": torch.cat([own["pixel_values"] for own in made]).double()}
    if "image_grid_thw" in made[0]:
        given["image_grid_thw"] = torch.cat([own["image_grid_thw"] for own in made])
        given["mm_token_type_ids"] = (ids == IMAGE).int()
        model.model.rope_deltas = None
    elif model.config.model_type == "gemma3":
        given["token_type_ids"] = (ids == IMAGE).int()
    with everything_wide(), torch.inference_mode():
        return model(input_ids=ids, **given, use_cache=False).logits[0]


def ours(runner: ModelRunner, tokens: list[int], images: Images, chunk: int) -> torch.Tensor:
    tables = runner.cache.tables
    tables.open(0, [])
    assert tables.reserve(0, len(tokens))
    found = []
    end = 0
    while end < len(tokens):
        start, end = end, images.whole(min(end + chunk, len(tokens)))
        batch = runner.cache.stage_text([Span(0, tokens, start, end, None, images)], torch.arange(end - start))
        found.append(runner.forward(batch).logits)
    tables.close(0)
    return torch.cat(found)


@pytest.mark.parametrize("chunk", [100, 7])
def test_logits_are_those_of_transformers(seeing: tuple[Any, Path], chunk: int) -> None:
    model, folder = seeing
    runner = ModelRunner(Transformer(open_checkpoint(folder), torch.float64, CPU), num_pages=40, page_size=4)
    library = kernels()
    native = library and NativeTransformer(library, open_checkpoint(folder), FORMATS["stored"])
    for (tokens, images), (_, numbers) in zip(prompts(folder), TEXTS, strict=True):
        want = theirs(model, folder, tokens, numbers)
        assert (ours(runner, tokens, images, chunk) - want).abs().max() <= 1e-9
        if native is not None:
            got = ours(ModelRunner(native, num_pages=40, page_size=4), tokens, images, chunk)
            assert (got.double() - want).abs().max() <= 3e-5


def asks(folder: Path, temperature: float) -> list[Ask]:
    made = [
        Ask(tuple(tokens), SamplingParams(max_tokens=12, temperature=temperature, seed=i), images=images)
        for i, (tokens, images) in enumerate(prompts(folder))
    ]
    return [*made, Ask((1, 2, 3, 1, 2), SamplingParams(max_tokens=8, temperature=temperature, seed=7))]


def run(folder: Path, wanted: list[Ask], drafter: Any = None, regime: Regime = EASY) -> tuple[list[list[int]], Harness]:
    target = ModelRunner(Transformer(open_checkpoint(folder), torch.float64, CPU), regime.num_pages, regime.page_size)
    harness = Harness(target, drafter or no_drafter(torch.float64), LAWS["match"](), regime)
    return generated(harness.run(wanted)), harness


def bushy(truth: list[list[int]], wanted: list[Ask]) -> Callable[[torch.dtype], Any]:
    """Right guesses beside wrong ones."""
    starts = {(ask.prompt, i): said for i, (ask, said) in enumerate(zip(wanted, truth, strict=True))}

    def script(tokens: Any) -> list[list[int]]:
        for (prompt, _), said in starts.items():
            count = len(tokens) - len(prompt)
            if tuple(tokens[: len(prompt)]) == prompt and list(tokens[len(prompt) :]) == said[:count]:
                return [[(said[count] + 1) % 12, 3] if count < len(said) else [1], said[count : count + 3]]
        return [[1, 2]]

    return scripted(script, 8, False)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_trees_chunks_and_preemption_change_no_token(seeing: tuple[Any, Path], temperature: float) -> None:
    _, folder = seeing
    wanted = asks(folder, temperature)
    truth = [run(folder, [ask])[0][0] for ask in wanted]
    drafter = bushy(truth, wanted)(torch.float64)
    room = sum(-(-len(ask.prompt) // 4) for ask in wanted[:2]) + 2  # for the prompts of two, not for their answers
    regime = Regime(max_rows=9, num_pages=room, max_running=3)
    found, harness = run(folder, wanted, drafter, regime)
    assert found == truth
    assert harness.engine.scheduler.num_preemptions > 0
    assert run(folder, wanted, bushy(truth, wanted)(torch.float64))[0] == truth


def test_greedy_tokens_are_those_of_transformers(seeing: tuple[Any, Path]) -> None:
    model, folder = seeing
    wanted = asks(folder, 0.0)[:2]
    for ask, said, (_, numbers) in zip(wanted, run(folder, wanted)[0], TEXTS, strict=False):
        tokens = list(ask.prompt)
        for token in said:
            assert int(theirs(model, folder, tokens, numbers)[-1].argmax()) == token
            tokens.append(token)
            if token == IMAGE:
                break


def test_pages_are_shared_by_what_is_seen(seeing: tuple[Any, Path]) -> None:
    """The same tokens with another image of the same size have other pages."""
    _, folder = seeing
    spec = open_checkpoint(folder).config.images
    assert spec is not None
    text = [5, 6, IMAGE, 7, 8, 3, 2, 1]
    first, other = (placed(text, seen_by(folder, [number]), spec) for number in (0, 3))
    assert first[0] == other[0]
    assert first[1].key != other[1].key
    params = SamplingParams(max_tokens=4)
    three = [
        Ask(tuple(tokens), params, arrives=9 * i, images=own) for i, (tokens, own) in enumerate((first, other, first))
    ]
    target = ModelRunner(Transformer(open_checkpoint(folder), torch.float64, CPU), 100, 4)
    harness = Harness(target, no_drafter(torch.float64), LAWS["match"]())
    answers = harness.run(three)
    assert [answer.cached_prompt_tokens > 0 for answer in answers] == [False, False, True]
    assert answers[0].tokens == answers[2].tokens != answers[1].tokens
