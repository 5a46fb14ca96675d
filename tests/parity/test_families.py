"""Every family beyond the plain ones, from a folder that transformers has saved: the same logits, the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from draftwood.drafters.none import NoDrafter
from draftwood.drafters.scripted import ScriptedDrafter
from draftwood.model.checkpoint import SafetensorsCheckpoint
from draftwood.model.experts import Experts
from draftwood.model.runner import ModelRunner
from draftwood.model.transformer import Transformer
from draftwood.protocols import Span
from draftwood.request import SamplingParams
from draftwood.tree import TokenTree
from draftwood.verifiers import LAWS
from families import FAMILIES, RECURRENT
from staging import text_batch, tree_logits
from tiny import CPU, Ask, Harness

TEXT = [5, 3, 9, 12, 0, 1, 1, 7, 8, 2, 11, 4, 6, 10, 3, 5, 9, 0, 2, 12, 7]


@contextmanager
def everything_wide() -> Iterator[None]:
    """transformers computes norms, rotations and routers in float32 whatever the dtype: here float32 means float64."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def theirs_of(raw: dict[str, Any]) -> Any:
    """transformers' own model of a configuration, with sharp random weights in float64."""
    config = AutoConfig.for_model(raw["model_type"], **{k: v for k, v in raw.items() if k != "model_type"})
    config._attn_implementation = config._experts_implementation = "eager"
    torch.manual_seed(1)
    with everything_wide():
        model = AutoModelForCausalLM.from_config(config).double().eval()
    generator = torch.Generator().manual_seed(2)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        # Sharp enough that a wrong mask, slot or position changes the answer.
        spread = 0.2 if weight.dim() == 1 or "norm" in name else 1.3 * weight.shape[-1] ** -0.5
        with torch.no_grad():
            weight.copy_(weight * (weight.dim() == 1) + spread * noise)
    return model


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    """A model of transformers and the folder it was saved to, by the name of its family; made once."""
    made: dict[str, tuple[Any, Path]] = {}

    def get(name: str) -> tuple[Any, Path]:
        if name not in made:
            model, folder = theirs_of(FAMILIES[name]), tmp_path_factory.mktemp(name)
            model.save_pretrained(folder)
            made[name] = model, folder
        return made[name]

    return get


def runner_of(folder: Path, dtype: torch.dtype) -> ModelRunner:
    return ModelRunner(Transformer(SafetensorsCheckpoint(folder), dtype, CPU), num_pages=30, page_size=4)


def paged_logits(runner: ModelRunner, tokens: list[int], chunk: int) -> torch.Tensor:
    """All logits of one text, run in chunks through the pages."""
    tables = runner.cache.tables
    tables.open(0, ())
    tables.reserve(0, len(tokens))
    rows = []
    for start in range(0, len(tokens), chunk):
        end = min(len(tokens), start + chunk)
        rows.append(runner.forward(text_batch(runner, [Span(0, tokens, start, end)])).logits)
    tables.close(0)
    return torch.cat(rows)


def wanted_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens]), use_cache=False).logits[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(theirs: Callable[[str], tuple[Any, Path]], name: str) -> None:
    """In float32; in float64, whatever the chunks; and of every node of a tree."""
    model, folder = theirs(name)
    with everything_wide():
        want = wanted_logits(model, TEXT)
    assert want.std() > 0.05, "too flat to prove anything"
    assert (paged_logits(runner_of(folder, torch.float32), TEXT, 64) - want).abs().max() <= 1e-4
    runner = runner_of(folder, torch.float64)
    for chunk in (64, 3, 1):
        assert (paged_logits(runner, TEXT, chunk) - want).abs().max() <= 1e-9
    tree, text = bushy_tree(), TEXT[:9]
    runner.cache.tables.open(0, ())
    runner.cache.tables.reserve(0, len(text) + 8)
    got = tree_logits(runner, [Span(0, text, 0, len(text))], tree)
    for node in range(1, tree.num_nodes):
        path = [int(tree.tokens[n]) for n in tree.paths[node].tolist()[1:] if n >= 0]
        with everything_wide():
            expected = wanted_logits(model, text + path)[-1]
        assert (got[node] - expected).abs().max() <= 1e-9


def bushy_tree() -> TokenTree:
    return TokenTree.of_points([([TEXT[8], 3, 5, 3, 7, 1, 4], [-1, 0, 0, 1, 1, 3, 5])])


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_are_those_of_generate(theirs: Callable[[str], tuple[Any, Path]], name: str) -> None:
    model, folder = theirs(name)
    prompt, count = TEXT[:7], 12
    with everything_wide(), torch.no_grad():
        inputs = torch.tensor([prompt])
        want = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=count, do_sample=False, pad_token_id=0,
            eos_token_id=[12345],
        )[0].tolist()  # fmt: skip
    runner, tokens = runner_of(folder, torch.float64), list(prompt)
    tables = runner.cache.tables
    tables.open(0, ())
    tables.reserve(0, len(prompt) + count)
    start = 0
    while len(tokens) < len(want):
        batch = text_batch(runner, [Span(0, tokens, start, len(tokens))])
        start = len(tokens)
        tokens.append(int(runner.forward(batch).logits[-1].argmax()))
    assert tokens == want


@pytest.mark.parametrize("name", RECURRENT)
def test_an_engine_says_of_recurrent_models_what_generate_says(
    theirs: Callable[[str], tuple[Any, Path]], name: str
) -> None:
    """Where states move along paths that are kept: alone, and along drafts."""
    model, folder = theirs(name)
    prompt, count = TEXT[:7], 14
    with everything_wide(), torch.no_grad():
        inputs = torch.tensor([prompt])
        want = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=count, do_sample=False, pad_token_id=0,
            eos_token_id=[12345],
        )[0].tolist()  # fmt: skip
    ask = Ask(tuple(prompt), SamplingParams(max_tokens=count, temperature=0.0))
    script = lambda tokens: [want[len(tokens) : len(tokens) + 3], [want[len(tokens) % len(want)], 1, 2], [3, 4]]  # noqa: E731
    for drafter in (NoDrafter(), ScriptedDrafter(script, 9)):
        answers = Harness(runner_of(folder, torch.float64), drafter, LAWS["match"]()).run([ask])
        assert answers[0].tokens == want
    assert answers[0].accepted >= count // 2


def test_the_text_of_a_model_that_sees_images(tmp_path: Path) -> None:
    """Gemma 3 from 4B on: the folder has a vision tower, which is not read."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = {**FAMILIES["gemma3"], "vocab_size": 40}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config=text, vision_config={**vision, "image_size": 28, "patch_size": 14}, mm_tokens_per_image=1,
        image_token_index=39, boi_token_index=38, eoi_token_index=37,
    )  # fmt: skip
    config._attn_implementation = config.text_config._attn_implementation = "eager"
    with everything_wide():
        model = Gemma3ForConditionalGeneration(config).double().eval()
        model.save_pretrained(tmp_path)
        with torch.no_grad():
            want = model(input_ids=torch.tensor([TEXT]), use_cache=False).logits[0]
    got = paged_logits(runner_of(tmp_path, torch.float64), TEXT, 5)
    assert (got - want).abs().max() <= 1e-9


def test_the_text_of_a_recurrent_model_that_sees_images(tmp_path: Path) -> None:
    """Qwen3.5: the same, with its text model under another name."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    text = {**FAMILIES["qwen3_5"], "vocab_size": 40}
    vision = {"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "out_hidden_size": 32}
    config = Qwen3_5Config(
        text_config=text, vision_config=vision, image_token_id=39, video_token_id=38, vision_start_token_id=37,
        vision_end_token_id=36,
    )  # fmt: skip
    config._attn_implementation = config.text_config._attn_implementation = "eager"
    with everything_wide():
        model = Qwen3_5ForConditionalGeneration(config).double().eval()
        model.save_pretrained(tmp_path)
        with torch.no_grad():
            want = model(input_ids=torch.tensor([TEXT]), use_cache=False).logits[0]
    got = paged_logits(runner_of(tmp_path, torch.float64), TEXT, 5)
    assert (got - want).abs().max() <= 1e-9


def test_experts_on_a_device_are_those_on_a_cpu(
    theirs: Callable[[str], tuple[Any, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gathered weights, for which nothing asks the host, and products expert by expert."""
    for name in ("gpt_oss", "qwen2_moe"):
        runner = runner_of(theirs(name)[1], torch.float64)
        want = paged_logits(runner, TEXT, 4)
        monkeypatch.setattr(Experts, "_few", lambda self, x, chosen: True)
        assert (paged_logits(runner, TEXT, 4) - want).abs().max() <= 1e-9
        monkeypatch.undo()
