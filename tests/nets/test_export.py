"""What is exported loads again as the same network, holds nothing of the target's, and overwrites nothing else."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from draftwood.errors import CheckpointError, InvalidRequest
from draftwood.model.config import ModelConfig
from draftwood.model.rope import RopeConfig
from draftwood.nets import export as exporting
from draftwood.nets.dflash import BlockNet, BlockSpec, Confidence, HiddenCorrection, Markov
from draftwood.nets.eagle import Eagle3, Eagle3Spec
from draftwood.nets.export import export
from draftwood.nets.export import layer_config as exported_layers
from draftwood.nets.kangaroo import Kangaroo
from draftwood.nets.layouts import build_net, open_drafter, self_test
from draftwood.nets.layouts.recognition import _Rows, _try_block, _try_heads, _try_recurrent, _try_shallow
from draftwood.nets.medusa import HeadStack
from draftwood.nets.pard import Ahead, ParallelEagle
from draftwood.nets.parts import DraftHead, LowRankHead
from nets.published import TARGET, WORDS, layer_config, random, write
from tiny import NETS, random_net, tiny_folder

DRAFT = torch.tensor([0, 3, 4, 7, 11])
ONE = dataclasses.replace(TARGET, num_layers=1, windows=(None,))


def own_head(bias: bool = False) -> DraftHead:
    return DraftHead(random(5, 32), DRAFT, 13, own=True, bias=random(5) if bias else None)


def shared_head() -> DraftHead:
    return DraftHead(WORDS.head(DRAFT), DRAFT, 13, own=False)


def treeflash() -> BlockNet:
    net = BlockNet(ONE, BlockSpec((0,), 32, 3, 5, False, norm_in_head=True), shared_head())
    net.markov_head = HiddenCorrection(ONE, net.head, 16, backbone_norm=net.norm)
    return net


def unsure(table: Markov | None) -> BlockNet:
    return BlockNet(ONE, BlockSpec((1, 2), 32, 4, None), shared_head(), table, Confidence(32, table))


def eagle3(head: DraftHead | LowRankHead, **switches: bool) -> Eagle3:
    return Eagle3(ONE, Eagle3Spec((1, 2), 32, **switches), head)


MORE = {
    "own head": lambda: eagle3(own_head(), norm_before_fc=True),
    "low rank": lambda: eagle3(LowRankHead(32, 4, 13)),
    "biases": lambda: Eagle3(dataclasses.replace(ONE, qkv_bias=True, mlp_bias=True), Eagle3Spec((1,), 32), own_head()),
    "qwen3": lambda: Eagle3(dataclasses.replace(ONE, qk_norm=True), Eagle3Spec((1,), 32), own_head()),
    "peagle, own embedding": lambda: ParallelEagle(
        ONE, Eagle3Spec((1, 2), 32), own_head(), Ahead(5, 3), embedding=random(13, 32)
    ),
    "published treeflash": treeflash,
    "confident": lambda: unsure(Markov(13, 5, 3)),
    "confident alone": lambda: unsure(None),
    "medusa, own heads": lambda: HeadStack(32, 7, 1, [own_head(), own_head(True)], grounded=False),
    "medusa, one head": lambda: HeadStack(32, 7, 2, [own_head()] * 2, grounded=False),
    "hydra, own heads": lambda: HeadStack(32, 7, 2, [own_head(True), own_head(True)], grounded=True),
}


def randomised(net: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for i, parameter in enumerate(net.parameters()):
            parameter.copy_(random(*parameter.shape, seed=i))
    return net


def outputs(net: torch.nn.Module) -> dict[str, torch.Tensor]:
    rows = _Rows(WORDS, torch.float32, torch.device("cpu"))
    with torch.no_grad():
        if isinstance(net, BlockNet):
            return _try_block(net, rows)
        if isinstance(net, Kangaroo):
            return _try_shallow(net, rows)
        return _try_heads(net, rows) if isinstance(net, HeadStack) else _try_recurrent(net, rows)  # type: ignore


def facts(net: torch.nn.Module) -> tuple[object, ...]:
    head = net.heads[0] if isinstance(net, HeadStack) else net.head
    tokens = None if head.tokens is None else head.tokens.tolist()
    numbers = tuple(getattr(net, name, None) for name in ("spec", "guesses", "ahead", "exit_layer"))
    return net.reads, numbers, tokens, type(net)


@pytest.mark.parametrize("kind", [*NETS, *MORE])
def test_a_round_trip_changes_nothing(tmp_path: Path, kind: str) -> None:
    net = randomised(MORE[kind]()) if kind in MORE else random_net(kind, WORDS)
    if kind in ("eagle1", "mtp", "medusa", "hydra"):
        net.reads = (TARGET.num_layers - 1,)  # tiny.py builds them for a target of two layers
    export(net, tmp_path, "org/target", {"steps": 3}, dtype=torch.float32)
    loaded = build_net(open_drafter(tmp_path), TARGET, WORDS)
    self_test(loaded, WORDS)
    assert facts(loaded) == facts(net)
    expected, found = outputs(net), outputs(loaded)
    assert expected.keys() == found.keys()
    for what in expected:
        assert torch.equal(found[what], expected[what]), what
    kept = {name: value for name, value in net.named_parameters() if not name.startswith("head.")}
    assert all(torch.equal(loaded.get_parameter(name), value) for name, value in kept.items())
    assert json.loads((tmp_path / "config.json").read_text())["draftwood"]["info"] == {"steps": 3}


def test_nothing_of_the_targets_is_stored(tmp_path: Path) -> None:
    export(randomised(eagle3(shared_head())), tmp_path, "org/target", {})
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["draftwood"] == {"shared_head": True, "tokens": "draft_tokens", "info": {}}
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/target"
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 3]
    assert config["draft_vocab_size"] == 5
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
        assert not {name for name in names if "embed" in name or "lm_head" in name}
        assert file.get_tensor("d2t").tolist() == (DRAFT - torch.arange(5)).tolist()
        assert file.get_tensor("t2d").nonzero().flatten().tolist() == DRAFT.tolist()
        assert file.get_tensor("fc.weight").dtype == torch.bfloat16
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_medusa_is_written_as_vllm_reads_it(tmp_path: Path) -> None:
    export(randomised(MORE["medusa, own heads"]()), tmp_path, "org/target", {}, dtype=torch.float16)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "medusa"
    assert (config["num_heads"], config["num_hidden_layers"], config["truncated_vocab_size"]) == (2, 1, 5)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert {"blocks.0.layers.0.weight", "blocks.1.layers.0.bias", "lm_heads.1.weight"} <= set(file.keys())
        assert file.get_tensor("token_map").tolist() == DRAFT.tolist()


def test_an_export_replaces_a_drafter_and_nothing_else(tmp_path: Path) -> None:
    net = randomised(eagle3(shared_head()))
    again = randomised(eagle3(own_head()))
    export(net, tmp_path / "a", "t", {})
    export(again, tmp_path / "a", "t", {}, dtype=torch.float32)
    assert build_net(open_drafter(tmp_path / "a"), TARGET, WORDS).head.own
    model = tiny_folder(tmp_path / "model", tokenizer=False)
    before = (model / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="holds a language model"):
        export(net, model, "t", {})
    assert (model / "model.safetensors").read_bytes() == before
    other = write(tmp_path / "other", {"speculators_model_type": "xpress"}, {"x": random(2)})
    with pytest.raises(CheckpointError, match="no drafter"):
        export(net, other, "t", {})
    (other / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        export(net, other, "t", {})
    with pytest.raises(CheckpointError, match="is a file"):
        export(net, model / "config.json", "t", {})
    (tmp_path / "a" / "more.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"more\.safetensors"):
        export(net, tmp_path / "a", "t", {})


def test_what_cannot_be_exported(tmp_path: Path) -> None:
    net = eagle3(shared_head())
    with pytest.raises(InvalidRequest, match="bfloat16, float16 or float32"):
        export(net, tmp_path, "t", {}, dtype=torch.float64)
    with pytest.raises(InvalidRequest, match="no network"):
        export(torch.nn.Linear(2, 2), tmp_path, "t", {})
    with pytest.raises(InvalidRequest, match="JSON"):
        export(net, tmp_path, "t", {"x": object()})
    with pytest.raises(InvalidRequest, match="some their own"):
        export(HeadStack(32, 7, 1, [shared_head(), own_head()], grounded=False), tmp_path, "t", {})
    assert not any(tmp_path.iterdir())


def test_a_failure_leaves_the_old_drafter_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export(randomised(eagle3(shared_head())), tmp_path, "t", {})
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def fail(tensors: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(exporting, "save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        export(randomised(eagle3(own_head())), tmp_path, "t", {})
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


ROPES = {
    "default": RopeConfig(theta=500.0),
    "linear": RopeConfig(kind="linear", factor=4.0),
    "llama3": RopeConfig(5e5, "llama3", 8.0, 64, 512, low_freq_factor=1.5, high_freq_factor=5.0),
    "yarn": RopeConfig(1e6, "yarn", 4.0, 128, 512, attention_factor=1.2, truncate=False),
    "gguf llama3": RopeConfig(
        5e5, "longrope", 1.0, 512, 512, attention_factor=1.0, short_factor=(1.0, 2.0, 3.0, 4.0),
        long_factor=(1.0, 2.0, 3.0, 4.0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ROPES)
def test_rope_survives(kind: str) -> None:
    config = dataclasses.replace(TARGET, rope=ROPES[kind])
    again = ModelConfig.from_hf(json.loads(json.dumps(exported_layers(config))))
    for found, expected in zip(again.rope.inverse_frequencies(8), config.rope.inverse_frequencies(8), strict=True):
        torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(expected), rtol=0, atol=0)
    assert layer_config()["hidden_size"] == again.hidden_size
