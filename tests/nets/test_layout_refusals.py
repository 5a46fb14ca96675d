"""What is refused, and that the sentence says what was expected and what was found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftwood.errors import CheckpointError, DraftwoodError, IncompatibleParts
from draftwood.nets.layouts import Layout, build_net, files, open_drafter, recognise, self_test
from nets.published import (
    EMBEDDING,
    HIDDEN,
    INNER,
    TARGET,
    VOCABULARY,
    WORDS,
    layer_config,
    layer_tensors,
    load,
    random,
    write,
)
from tiny import tiny_folder

Tensors, Config = dict[str, Tensor], dict[str, object]
DRAFT = torch.tensor([0, 2, 3])


def eagle3() -> tuple[Config, Tensors]:
    config = {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer_config(),
        "draft_vocab_size": 3,
        "eagle_aux_hidden_state_layer_ids": [2, 4],
    }
    raw = {
        "fc.weight": random(HIDDEN, 2 * HIDDEN),
        **layer_tensors("layers.0.", width=2 * HIDDEN),
        "layers.0.hidden_norm.weight": random(HIDDEN),
        "norm.weight": random(HIDDEN),
        "lm_head.weight": random(3, HIDDEN),
        "d2t": DRAFT - torch.arange(3),
        "t2d": torch.zeros(VOCABULARY, dtype=torch.bool).index_fill(0, DRAFT, True),
    }
    return config, raw


def dspark() -> tuple[Config, Tensors]:
    config = {
        **layer_config(1, "qwen3"),
        "block_size": 4,
        "dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 5]},
    }
    raw = {
        "fc.weight": random(HIDDEN, 2 * HIDDEN),
        "hidden_norm.weight": random(HIDDEN),
        "norm.weight": random(HIDDEN),
        **layer_tensors("layers.0.", qk_norm=True),
        "markov_head.markov_w1.weight": random(VOCABULARY, 3),
        "markov_head.markov_w2.weight": random(VOCABULARY, 3),
    }
    return config, raw


def layers(**changes: object) -> Callable[[Config, Tensors], None]:
    return lambda config, raw: config.update(transformer_layer_config=layer_config(**changes))


def keys(**changes: object) -> Callable[[Config, Tensors], None]:
    return lambda config, raw: config.update(changes)


def inner(**changes: object) -> Callable[[Config, Tensors], None]:
    return lambda config, raw: config["dflash_config"].update(changes)  # type: ignore[attr-defined]


def tensors(**changes: Tensor | None) -> Callable[[Config, Tensors], None]:
    def change(config: Config, raw: Tensors) -> None:
        for name, value in changes.items():
            raw.pop(name.replace("__", "."), None)
            if value is not None:
                raw[name.replace("__", ".")] = value

    return change


NAN = torch.full((HIDDEN,), float("nan"))
CASES = {
    "hidden size": (eagle3, layers(hidden_size=64), "hidden size is 64, the target's 32"),
    "vocabulary": (eagle3, layers(vocab_size=99), "vocabulary is 99, the target's 13"),
    "target hidden": (eagle3, keys(target_hidden_size=64), "target_hidden_size is 64"),
    "no layers": (eagle3, keys(transformer_layer_config=None), "no transformer_layer_config"),
    "family": (eagle3, layers(model_type="deepseek_v3"), "architecture is 'deepseek_v3'"),
    "window": (eagle3, layers(model_type="mistral"), "sliding window"),
    "aux layer too deep": (eagle3, keys(eagle_aux_hidden_state_layer_ids=[2, 9]), "layer 9 .* go from 1 to 8"),
    "aux layer 0": (eagle3, keys(eagle_aux_hidden_state_layer_ids=[0, 2]), "layer 0 .* go from 1 to 8"),
    "aux layer twice": (eagle3, keys(eagle_aux_hidden_state_layer_ids=[2, 2]), "names one twice"),
    "aux layer text": (eagle3, keys(eagle_aux_hidden_state_layer_ids=["2"]), "whole numbers are needed"),
    "number of layers": (eagle3, keys(eagle_aux_hidden_state_layer_ids=[2, 3, 4]), r"fc.weight has shape \(32, 64\)"),
    "both norms": (eagle3, keys(fc_norm=True, norm_before_fc=True), "at once"),
    "norm missing": (eagle3, keys(fc_norm=True), "2 tensors are missing: fc_norm.0.weight, fc_norm.1.weight"),
    "missing": (eagle3, tensors(norm__weight=None), "1 tensors are missing: norm.weight"),
    "unknown": (eagle3, tensors(mask_hidden=random(1, HIDDEN)), "1 of its tensors are unknown .*: mask_hidden"),
    "shape": (eagle3, tensors(norm__weight=random(7)), r"norm.weight has shape \(7,\) where .* \(32,\)"),
    "two names": (eagle3, tensors(midlayer__hidden_norm__weight=random(HIDDEN)), "are both layers.0.hidden_norm"),
    "nan": (eagle3, tensors(norm__weight=NAN), "32 numbers that are NaN"),
    "infinite": (eagle3, tensors(norm__weight=NAN.nan_to_num(float("inf"))), "NaN or infinite"),
    "quantised": (eagle3, tensors(norm__weight=torch.ones(HIDDEN, dtype=torch.int8)), "stored as torch.int8"),
    "d2t outside": (eagle3, tensors(d2t=torch.tensor([0, 0, 40])), "guesses token 42"),
    "d2t below": (eagle3, tensors(d2t=torch.tensor([-1, 0, 0])), "guesses token -1"),
    "d2t twice": (eagle3, tensors(d2t=torch.tensor([0, -1, 0])), "same token"),
    "d2t floats": (eagle3, tensors(d2t=torch.ones(3)), "one row of whole numbers"),
    "d2t length": (eagle3, keys(draft_vocab_size=4), "lists 3 tokens where draft_vocab_size is 4"),
    "no d2t": (eagle3, tensors(d2t=None, t2d=None), "guesses 3 of 13 tokens, but has no d2t"),
    "t2d differs": (eagle3, tensors(t2d=torch.ones(VOCABULARY).bool()), "different tokens"),
    "t2d length": (eagle3, tensors(t2d=torch.ones(4).bool()), r"covers \(4,\) tokens"),
    "embedding": (eagle3, tensors(embed_tokens__weight=EMBEDDING.float() * 1.1), "differs from the target's by 10.0%"),
    "type": (eagle3, keys(speculators_model_type="xpress"), "XPress, which is recognised, but not supported yet"),
    "p-eagle": (eagle3, keys(speculators_model_type="peagle"), "mask_token_id is None"),
    "p-eagle's mask": (eagle3, keys(speculators_model_type="peagle", mask_token_id=5), "missing: mask_hidden"),
    "new type": (eagle3, keys(speculators_model_type="later"), "'later', which is recognised, but not supported yet"),
    "hass": (eagle3, keys(speculators_model_type="eagle", layernorms=True), "HASS"),
    "target depth": (dspark, keys(num_target_layers=9), "a target of 9 layers, and this one has 8"),
    "layer of dflash": (dspark, inner(target_layer_ids=[1, 8]), "layer 8 .* go from 0 to 7"),
    "mask": (dspark, inner(mask_token_id=13), "mask_token_id is 13, and the target has 13"),
    "no mask": (dspark, inner(mask_token_id=None), "mask_token_id is None"),
    "no block": (dspark, keys(block_size=None), "block_size = None"),
    "block of one": (dspark, keys(block_size=1, sample_from_anchor=False), "guesses nothing"),
    "gated": (dspark, keys(markov_head_type="gated"), "markov_head_type is gated, which is recognised"),
    "rank": (dspark, keys(markov_rank=4), r"markov_w1.weight has shape \(13, 3\) where .* \(13, 4\)"),
    "confidence": (dspark, keys(enable_confidence_head=True), "missing: confidence_head.proj.weight"),
    "jetspec": (dspark, inner(causal_head=True), "causal_head, which is recognised, but not supported yet"),
    "dflash2": (dspark, tensors(candidate_selector__x=random(2)), "it is DFlash2, which is recognised"),
    "domino": (dspark, tensors(prefix_gru__weight_ih_l0=random(2)), "it is Domino, which is recognised"),
    "domino by key": (dspark, inner(projector_type="domino"), "it is Domino, which is recognised"),
    "lilicorr": (dspark, tensors(lilicorr_layers__x=random(2)), "it is LiLiCorr, which is recognised"),
    "xpress": (dspark, tensors(refiner_head__x=random(2)), "it is XPress, which is recognised"),
    "dflare": (dspark, tensors(layer_fusion_weights=random(2)), "it is DFlare or DFly, which is recognised"),
}


@pytest.mark.parametrize("name", CASES)
def test_refusals(tmp_path: Path, name: str) -> None:
    make, change, sentence = CASES[name]
    config, raw = make()
    load(write(tmp_path / "sound", config, raw))
    change(config, raw)
    with pytest.raises(DraftwoodError, match=sentence) as caught:
        load(write(tmp_path / "changed", config, raw))
    assert str(tmp_path / "changed") in str(caught.value)
    misfits = ("hidden size", "vocabulary", "target hidden", "embedding", "target depth", "mask", "layer of dflash")
    assert name not in misfits or isinstance(caught.value, IncompatibleParts)


MODELOPT = {
    "use_last_layernorm": (False, "use_last_layernorm = False; only True"),
    "use_mtp_layernorm": (True, "use_mtp_layernorm = True; only False"),
    "parallel_draft_step": (4, "recognised, but not supported yet"),
}


@pytest.mark.parametrize("switch", MODELOPT)
def test_modelopts_switches(tmp_path: Path, switch: str) -> None:
    value, sentence = MODELOPT[switch]
    config = {**layer_config(), "draft_vocab_size": 3, "eagle_config": {switch: value}}
    with pytest.raises(CheckpointError, match=sentence):
        load(write(tmp_path, config, eagle3()[1]))


HEADS = {
    "prefix": ({"hydra_num_heads": 1, "hydra_head_arch": "prefix-mlp"}, {}, "prefix-mlp, which is recognised"),
    "offset": ({"hydra_num_heads": 1, "hidden_state_offset": 2}, {}, "hidden_state_offset"),
    "none": ({"medusa_num_heads": 1}, {"x": random(2)}, "it has no heads"),
    "gap": (
        {"medusa_num_heads": 1},
        {"1.0.linear.weight": random(HIDDEN, HIDDEN)},
        "missing: blocks.0.0.linear.weight",
    ),
    "end": (
        {"medusa_num_heads": 1},
        {"0.0.linear.weight": random(HIDDEN, HIDDEN)},
        "missing: lm_heads.0.weight",
    ),
    "tokens": (
        {"model_type": "medusa", "truncated_vocab_size": 4},
        {"blocks.0.layers.0.weight": random(HIDDEN, HIDDEN)},
        "guesses 4 of 13 tokens, but has no token_map",
    ),
    "size": (
        {"model_type": "medusa", "hidden_size": 64},
        {"blocks.0.layers.0.weight": random(HIDDEN, HIDDEN)},
        "hidden size is 64, the target's 32",
    ),
    "mlp": ({"model_type": "mlp_speculator"}, {}, "an MLP speculator, which is recognised"),
}


@pytest.mark.parametrize("name", HEADS)
def test_refusals_of_heads(tmp_path: Path, name: str) -> None:
    config, raw, sentence = HEADS[name]
    with pytest.raises(DraftwoodError, match=sentence):
        load(write(tmp_path, config, raw or {"hydra_mlp.0.0.linear.weight": random(HIDDEN, HIDDEN)}))


def test_models_of_their_own_are_no_networks(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "plain", tokenizer=False)
    assert recognise(open_drafter(folder)) is Layout.LANGUAGE_MODEL
    with pytest.raises(CheckpointError, match="use it as a draft model"):
        build_net(open_drafter(folder), TARGET, WORDS)
    pard = write(tmp_path / "pard", {**layer_config(), "spd_type": "pard", "pard_token": 5}, {"x": random(2)})
    assert recognise(open_drafter(pard)) is Layout.PARD


def test_several_layers_inside_a_target(tmp_path: Path) -> None:
    raw = {f"model.layers.{i}.eh_proj.weight": random(HIDDEN, 2 * HIDDEN) for i in (8, 9)}
    with pytest.raises(CheckpointError, match="several layers"):
        load(write(tmp_path, layer_config(8), raw))


def test_folders_that_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match="There is no drafter"):
        open_drafter(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        open_drafter(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"speculators_model_type": "eagle3"}))
    with pytest.raises(CheckpointError, match="a single file"):
        open_drafter(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match="no weights"):
        open_drafter(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"no pickle")
    with pytest.raises(CheckpointError, match="allow_pickle=True"):
        open_drafter(tmp_path)
    with pytest.raises(CheckpointError, match="damaged"):
        open_drafter(tmp_path, allow_pickle=True)
    monkeypatch.setattr(files, "from_hub", lambda name: write(tmp_path / "hub", *eagle3()))
    assert load_name("org/name") is Layout.SPECULATORS_EAGLE3


def load_name(name: str) -> Layout:
    return recognise(open_drafter(name))


def test_damaged_safetensors(tmp_path: Path) -> None:
    folder = write(tmp_path, *eagle3())
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="damaged or truncated"):
        open_drafter(folder)


def test_an_index_that_promises_too_much(tmp_path: Path) -> None:
    folder = write(tmp_path, *eagle3())
    index = {"weight_map": {"fc.weight": "model.safetensors", "nothing": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="lacks nothing"):
        open_drafter(folder)


@pytest.mark.parametrize("make", [eagle3, dspark])
def test_the_self_test_finds_what_overflows(tmp_path: Path, make: Callable[[], tuple[Config, Tensors]]) -> None:
    config, raw = make()
    net = build_net(open_drafter(write(tmp_path, config, raw)), TARGET, WORDS)
    with torch.no_grad():
        net.norm.weight.fill_(3e38)
    with pytest.raises(CheckpointError, match="NaN or infinite on random input"):
        self_test(net, WORDS)
    with pytest.raises(CheckpointError, match="no network of a drafter"):
        self_test(torch.nn.Linear(INNER, 2), WORDS)
