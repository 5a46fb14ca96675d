"""Families on our own CPU kernels: the same function as the torch decoder, every row the same bits in any company."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from draftwood.errors import InvalidRequest
from draftwood.model.config import ModelConfig
from draftwood.model.families.base import with_layers_changed
from draftwood.model.native import NativeTransformer, refuses
from draftwood.model.runner import load_model, require_strict
from draftwood.model.spec import CLAMPED, MlpSpec
from draftwood.model.transformer import Transformer
from draftwood.model.weights import FORMATS
from draftwood.ops.native import kernels
from families import FAMILIES
from tiny import CPU, TinyCheckpoint

from .test_native import as_branch, batched, in_chunks, runner_of, same, texts

CONFIGS = {name: ModelConfig.from_hf(raw) for name, raw in FAMILIES.items()}
COMPUTED = [name for name, config in CONFIGS.items() if refuses(config) is None]


@pytest.fixture(scope="module")
def library():
    found = kernels()
    if found is None:
        pytest.skip("no kernels here")
    return found


@pytest.mark.parametrize("name", COMPUTED)
def test_logits_are_the_references(library, name: str) -> None:
    checkpoint, tokens = TinyCheckpoint(CONFIGS[name]), texts(13)[0]
    want = in_chunks(runner_of(Transformer(checkpoint, torch.float64, CPU)), tokens, same(64))
    native = runner_of(NativeTransformer(library, checkpoint, FORMATS["stored"]))
    assert (in_chunks(native, tokens, same(64)) - want).abs().max() <= 5e-5 * max(1.0, float(want.abs().max()))


@pytest.mark.parametrize("name", COMPUTED)
def test_rows_are_the_same_bits_in_any_company(library, name: str) -> None:
    runner = runner_of(NativeTransformer(library, TinyCheckpoint(CONFIGS[name]), FORMATS["int8"]))
    asked = texts(13)
    alone = [in_chunks(runner, tokens, same(1)) for tokens in asked]
    assert torch.equal(in_chunks(runner, asked[0], same(7)), alone[0])
    assert all(torch.equal(got, want) for got, want in zip(batched(runner, asked), alone, strict=True))
    assert torch.equal(as_branch(runner, asked[0], 5), alone[0][-6:])


@pytest.mark.parametrize("weights", ["int4", "w8a8"])
@pytest.mark.parametrize("name", ["gemma2", "olmo2", "cohere", "qwen2_moe", "gpt_oss"])
def test_rounded_weights_are_those_of_the_format(library, name: str, weights: str) -> None:
    checkpoint = TinyCheckpoint(CONFIGS[name])
    native = runner_of(NativeTransformer(library, checkpoint, FORMATS[weights]))
    reference = runner_of(Transformer(checkpoint, torch.float64, CPU, FORMATS[weights]))
    worst = [
        float((in_chunks(native, tokens, same(64)) - in_chunks(reference, tokens, same(64))).abs().max())
        for tokens in ([i, (3 * i + 1) % 13] for i in range(12))
    ]
    assert sorted(worst)[len(worst) // 2] <= 1e-4  # inputs rounded to bytes fall on two sides of a step now and then


def clamped_without_a_gate() -> ModelConfig:
    config = CONFIGS["nemotron"]
    mlp = MlpSpec(config.intermediate_size, CLAMPED, gated=False)
    return with_layers_changed(config, lambda i, layer: replace(layer, mlp=mlp))


def test_what_the_kernels_do_not_know_runs_on_torch_and_is_said(caplog: pytest.LogCaptureFixture) -> None:
    if kernels() is None:
        pytest.skip("no kernels here")
    with caplog.at_level(logging.WARNING, logger="draftwood.model.runner"):
        model = load_model(TinyCheckpoint(clamped_without_a_gate()), torch.float32, CPU)
    assert isinstance(model, Transformer)
    assert "do not know clamped activations without a gate; it runs on torch's own operations" in caplog.text
    with pytest.raises(InvalidRequest, match="do not know clamped activations without a gate"):
        require_strict(model)
