"""Medusa and Hydra: official files, vLLM's, pickles, and configurations that are wrong about the number of heads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftwood.errors import CheckpointError
from draftwood.nets.layouts import Layout, open_drafter, recognise
from nets.published import EMBEDDING, HEAD, HIDDEN, LAYERS, VOCABULARY, linear, load, random, same, silu, write

PATHS = torch.tensor([[3, 1, 4], [9, 2, 6]])
FEATURE = random(2, HIDDEN, seed=9) * 5
MEDUSA = {"model_type": "llama", "medusa_num_heads": 2, "medusa_num_layers": 2, "base_model_name_or_path": "tiny"}


def medusa_tensors(heads: int = 3) -> dict[str, Tensor]:
    """Two layers that are one and the same: the reference code makes its list by multiplying it."""
    raw = {}
    for h in range(heads):
        for layer in range(2):
            raw[f"{h}.{layer}.linear.weight"] = random(HIDDEN, HIDDEN, seed=h)
            raw[f"{h}.{layer}.linear.bias"] = random(HIDDEN, seed=h)
        raw[f"{h}.2.weight"] = random(VOCABULARY, HIDDEN, seed=10 + h)
    return raw


def medusa_by_hand(raw, h: int) -> Tensor:
    x = FEATURE.double()
    for layer in range(2):
        x = x + silu(linear(x, raw[f"{h}.{layer}.linear.weight"], raw[f"{h}.{layer}.linear.bias"]))
    return linear(x, raw[f"{h}.2.weight"])


def by_net(net, h: int) -> Tensor:
    return net.logits(h, FEATURE, EMBEDDING[PATHS[:, : h + 1]].float())


def test_official_medusa_counts_its_heads_by_the_tensors(tmp_path: Path) -> None:
    raw = medusa_tensors()
    folder = write(tmp_path, MEDUSA, raw)
    assert recognise(open_drafter(folder)) is Layout.MEDUSA
    net = load(folder)
    assert (net.guesses, net.reads) == (3, (LAYERS - 1,))  # the configuration says two heads
    for h in range(3):
        same(by_net(net, h), medusa_by_hand(raw, h))


def test_official_medusa_as_a_pickle(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MEDUSA))
    torch.save(medusa_tensors(), tmp_path / "medusa_lm_head.pt")
    with pytest.raises(CheckpointError, match="allow_pickle=True"):
        open_drafter(tmp_path)
    same(by_net(load(tmp_path, allow_pickle=True), 1), medusa_by_hand(medusa_tensors(), 1))


class Harm:
    """What a pickle could do."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("harm",)


@pytest.mark.parametrize("content", [{"0.0.linear.weight": Harm()}, [torch.ones(1)], {"a": {"b": torch.ones(1)}}])
def test_a_pickle_of_anything_but_tensors_is_refused(tmp_path: Path, content: object, capsys) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MEDUSA))
    torch.save(content, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(CheckpointError, match="it is not read"):
        open_drafter(tmp_path, allow_pickle=True)
    assert "harm" not in capsys.readouterr().out


TOKENS = torch.tensor([7, 0, 12, 3])


@pytest.mark.parametrize("kind", ["plain", "bias", "tokens", "whole heads", "one head"])
def test_vllm_medusa(tmp_path: Path, kind: str) -> None:
    config: dict[str, object] = {"model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": HIDDEN}
    config |= {"vocab_size": VOCABULARY, "truncated_vocab_size": VOCABULARY, "num_heads": 2, "num_hidden_layers": 1}
    rows = len(TOKENS) if kind == "tokens" else VOCABULARY
    raw = {f"blocks.{h}.layers.0.weight": random(HIDDEN, HIDDEN, seed=h) for h in range(2)}
    ends = {f"lm_heads.{h}.weight": random(rows, HIDDEN, seed=10 + h) for h in range(2)}
    if kind == "bias":
        config["medusa_fc_bias"] = True
        raw |= {f"blocks.{h}.layers.0.bias": random(HIDDEN, seed=h) for h in range(2)}
    if kind in ("tokens", "whole heads"):
        config["truncated_vocab_size"] = len(TOKENS)
        raw["token_map"] = TOKENS
    if kind == "one head":
        config["original_lm_head"] = True
        ends = {"lm_heads.0.weight": ends["lm_heads.0.weight"]}
    folder = write(tmp_path, config, {**raw, **ends})
    assert recognise(open_drafter(folder)) is Layout.MEDUSA_VLLM
    net = load(folder)
    x = FEATURE.double()
    x = x + silu(linear(x, raw["blocks.1.layers.0.weight"], raw.get("blocks.1.layers.0.bias")))
    expected = linear(x, ends["lm_heads.0.weight" if kind == "one head" else "lm_heads.1.weight"])
    found = net.heads[1].spread(by_net(net, 1))
    if kind in ("tokens", "whole heads"):
        same(found[:, TOKENS], expected if kind == "tokens" else expected[:, TOKENS])
        assert int(found.isfinite().sum()) == 2 * len(TOKENS)
    else:
        same(found, expected)


def hydra_tensors(grounded: bool) -> dict[str, Tensor]:
    raw = {}
    for h in range(3):
        width = (h + 2) * HIDDEN if grounded else HIDDEN
        parts = ["linear", "res_connection"] if grounded else ["linear"]
        for i, part in enumerate(parts):
            raw[f"hydra_mlp.{h}.0.{part}.weight"] = random(HIDDEN, width, seed=20 + h + 5 * i)
            raw[f"hydra_mlp.{h}.0.{part}.bias"] = random(HIDDEN, seed=30 + h + 5 * i)
        raw[f"hydra_mlp.{h}.1.linear.weight"] = random(HIDDEN, HIDDEN, seed=40 + h)
        raw[f"hydra_mlp.{h}.1.linear.bias"] = random(HIDDEN, seed=50 + h)
        raw[f"hydra_lm_head.{h}.weight"] = random(VOCABULARY, HIDDEN, seed=60 + h)
        raw[f"hydra_lm_head.{h}.bias"] = random(VOCABULARY, seed=70 + h)
    return raw


@pytest.mark.parametrize("grounded", [True, False])
def test_hydra(tmp_path: Path, grounded: bool) -> None:
    raw = hydra_tensors(grounded)
    config = {"hydra_num_heads": 4, "hydra_num_layers": 2, "hydra_head_arch": "mlp", "grounded_heads": grounded}
    folder = write(tmp_path, {**config, "hidden_state_offset": 0}, raw)
    assert recognise(open_drafter(folder)) is Layout.HYDRA
    net = load(folder)
    assert net.guesses == 3
    for h in range(3):
        x = FEATURE.double()
        if grounded:
            x = torch.cat([x, EMBEDDING[PATHS[:, : h + 1]].flatten(1)], -1)
        p = f"hydra_mlp.{h}."
        short = linear(x, raw[f"{p}0.res_connection.weight"], raw[f"{p}0.res_connection.bias"]) if grounded else x
        x = short + silu(linear(x, raw[f"{p}0.linear.weight"], raw[f"{p}0.linear.bias"]))
        x = x + silu(linear(x, raw[f"{p}1.linear.weight"], raw[f"{p}1.linear.bias"]))
        same(by_net(net, h), linear(x, raw[f"hydra_lm_head.{h}.weight"], raw[f"hydra_lm_head.{h}.bias"]))


def test_blockwise_heads_end_in_the_targets_own(tmp_path: Path) -> None:
    raw = {f"blocks.{h}.layers.0.weight": random(HIDDEN, HIDDEN, seed=h) for h in range(2)}
    config = {"model_type": "medusa", "num_heads": 2, "draftwood": {"shared_head": True}}
    net = load(write(tmp_path, config, raw))
    x = FEATURE.double()
    same(by_net(net, 0), linear(x + silu(linear(x, raw["blocks.0.layers.0.weight"])), HEAD))
