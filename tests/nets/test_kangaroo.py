"""Kangaroo: published adapters, what they are refused for, and the first layers of a target as a model of their own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftwood.drafters.kangaroo import ShallowModel
from draftwood.errors import CheckpointError, IncompatibleParts
from draftwood.nets.embeddings import TargetEmbeddings
from draftwood.nets.layouts import Layout, open_drafter, recognise
from draftwood.protocols import Span
from nets.published import (
    HEAD,
    HIDDEN,
    attention,
    causal,
    causal_attend,
    layer_config,
    layer_tensors,
    linear,
    load,
    random,
    rms,
    same,
    write,
)
from tiny import CPU, TinyCheckpoint, random_net, tiny_config, tiny_runner

PLAIN = {key: value for key, value in layer_config().items() if key != "rope_theta"}


def adapter_tensors() -> dict[str, Tensor]:
    layer = layer_tensors("layers.0.")
    kept = {name: value for name, value in layer.items() if "mlp" not in name and "post_" not in name}
    return {**kept, "norm.weight": random(HIDDEN, seed=20)}


def test_a_published_adapter_is_one_attention_between_two_norms(tmp_path: Path) -> None:
    raw = adapter_tensors()
    folder = write(tmp_path, PLAIN, raw)
    assert recognise(open_drafter(folder)) is Layout.KANGAROO
    net = load(folder)
    assert (net.exit_layer, net.reads) == (2, (1,))
    features, places = random(5, HIDDEN, seed=3) * 4, torch.arange(5)
    x = features.double()
    normed = rms(x, raw["layers.0.input_layernorm.weight"])
    x = x + attention(raw, "layers.0.self_attn.", normed, places, causal(5))
    output = net.run(features, places, causal_attend)
    same(output, rms(x, raw["norm.weight"]))
    same(net.head(output), linear(rms(x, raw["norm.weight"]), HEAD))


def test_a_pickle_is_how_they_come(tmp_path: Path) -> None:
    folder = write(tmp_path, PLAIN, adapter_tensors())
    torch.save(adapter_tensors(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert load(folder, allow_pickle=True).exit_layer == 2


def test_one_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    narrow = {**PLAIN, "num_key_value_heads": 1}
    for i, (config, words) in enumerate(
        [({**PLAIN, "exit_layer": 9}, "exits after layer 9"), (narrow, "number of key heads is 1, the target's 2")]
    ):
        with pytest.raises(IncompatibleParts, match=words):
            load(write(tmp_path / str(i), config, adapter_tensors()))
    with pytest.raises(CheckpointError, match="exit_layer = 0"):
        load(write(tmp_path / "none", {**PLAIN, "exit_layer": 0}, adapter_tensors()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])  # of which the second is run by our own kernels
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss"])  # windows; sinks and mixtures of experts
def test_first_layers_make_what_they_make_in_the_whole(dtype: torch.dtype, family: str) -> None:
    whole, other = (tiny_runner(tiny_config(family, layers=3), dtype=dtype) for _ in range(2))
    tokens = [3, 5, 1, 12, 7, 7, 2, 0, 9, 4, 11, 6, 3, 8]
    features = []
    for runner, model in ((whole, whole.model), (other, other.model.part(range(2)))):
        runner.cache.tables.open(1, [])
        assert runner.cache.tables.reserve(1, len(tokens))
        batch = runner.cache.stage_text([Span(1, tokens, 0, len(tokens))])
        nowhere = replace(batch, logit_rows=batch.logit_rows[:0])
        features.append(model.forward(nowhere, runner.cache.memory, frozenset({1})).features[1])
    assert torch.equal(*features)
    same_keys = whole.cache.memory.store[:2] == other.cache.memory.store[:2]
    assert bool(same_keys.all())
    assert not other.cache.memory.store[2].any(), "a layer that was not asked for has run"


def test_only_the_adapter_takes_memory() -> None:
    target = tiny_runner(tiny_config(layers=3))
    net = random_net("kangaroo", TargetEmbeddings(TinyCheckpoint(tiny_config(layers=3)), CPU, torch.float64))
    model = ShallowModel(target.model, net)  # type: ignore[arg-type]
    assert model.trunk.layers.get(0) is target.model.layers.get(0)  # type: ignore[attr-defined]
    assert model.num_bytes == sum(weight.nbytes for weight in net.parameters())
    assert (model.config.num_layers, target.model.config.num_layers) == (1 + 2, 3)
