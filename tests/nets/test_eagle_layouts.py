"""EAGLE-1, EAGLE-3 and multi-token prediction: each spelling gives the network its authors' code would run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftwood.model.rope import RopeConfig
from draftwood.nets.layouts import Layout, build_net, open_drafter, recognise
from nets.published import (
    EMBEDDING,
    HEAD,
    HIDDEN,
    INNER,
    LAYERS,
    TARGET,
    THETA,
    VOCABULARY,
    WORDS,
    attention,
    causal,
    causal_attend,
    decoder,
    layer_config,
    layer_tensors,
    linear,
    load,
    mlp,
    random,
    rms,
    same,
    write,
)

TOKENS = torch.tensor([3, 1, 4, 1, 5])
POSITIONS = torch.arange(5)
DRAFT = torch.tensor([0, 2, 3, 7, 8, 12])
D2T, T2D = DRAFT - torch.arange(6), torch.zeros(VOCABULARY, dtype=torch.bool).index_fill(0, DRAFT, True)


def eagle3_tensors(layer: str = "layers.0.", reads: int = 3, qk_norm: bool = False) -> dict[str, Tensor]:
    return {
        "fc.weight": random(HIDDEN, reads * HIDDEN),
        **layer_tensors(layer, width=2 * HIDDEN, qk_norm=qk_norm),
        f"{layer}hidden_norm.weight": random(HIDDEN, seed=5),
        "norm.weight": random(HIDDEN, seed=6),
        "lm_head.weight": random(6, HIDDEN, seed=7) * 4,
        "d2t": D2T,
        "t2d": T2D,
    }


def speculators(**changes: object) -> dict[str, object]:
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "transformer_layer_config": layer_config(),
        "draft_vocab_size": 6,
        "norm_before_residual": False,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "tiny"}},
        **changes,
    }


def eagle3_by_hand(
    raw, features: Tensor, p: str = "layers.0.", before=False, output=False, theta: float = THETA
) -> tuple[Tensor, Tensor]:
    """Two steps: on the target's features, then on its own output. The second output, and its logits."""
    if "input_norm.weight" in raw:
        features = rms(features, raw["input_norm.weight"])
    if "fc_norm.0.weight" in raw:
        parts = features.chunk(3, -1)
        features = torch.cat([rms(part, raw[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)], -1)
    hidden = linear(features, raw["fc.weight"])
    for _ in range(2):
        normed = rms(hidden, raw[f"{p}hidden_norm.weight"])
        both = torch.cat([rms(EMBEDDING[TOKENS], raw[f"{p}input_layernorm.weight"]), normed], -1)
        x = normed if before else hidden
        x = x + attention(raw, f"{p}self_attn.", both, POSITIONS, causal(5), theta=theta)
        x = x + mlp(raw, f"{p}mlp.", rms(x, raw[f"{p}post_attention_layernorm.weight"]))
        final = rms(x, raw["norm.weight"])
        hidden = final if output else x
    return hidden, linear(final, raw["lm_head.weight"])


def by_net(net, features: Tensor) -> tuple[Tensor, Tensor]:
    hidden, embedded = net.fuse(features.float()), EMBEDDING[TOKENS].float()
    for _ in range(2):
        hidden = net.run(embedded, hidden, POSITIONS, causal_attend)
    return hidden, net.logits(hidden)


def check_eagle3(folder: Path, raw, p: str = "layers.0.", reads=(1, 3, 4), **options) -> None:
    net = load(folder)
    assert net.reads == tuple(reads)
    features = random(5, len(reads) * HIDDEN, seed=20).double() * 5
    expected, logits = eagle3_by_hand(raw, features, p, **options)
    output, found = by_net(net, features)
    same(output, expected)
    same(found, logits)
    assert net.head.tokens.tolist() == DRAFT.tolist()
    assert torch.equal(net.head.spread(found)[:, DRAFT], found)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("output", [False, True])
@pytest.mark.parametrize("norm", ["none", "fc_norm", "norm_before_fc"])
def test_speculators_eagle3(tmp_path: Path, before: bool, output: bool, norm: str) -> None:
    raw = eagle3_tensors()
    if norm == "fc_norm":
        raw |= {f"fc_norm.{i}.weight": random(HIDDEN, seed=30 + i) for i in range(3)}
    if norm == "norm_before_fc":
        raw["input_norm.weight"] = random(3 * HIDDEN, seed=40)
    config = speculators(
        norm_before_residual=before,
        norm_output=output,
        fc_norm=norm == "fc_norm",
        norm_before_fc=norm == "norm_before_fc",
    )
    config |= {"embed_requires_grad": False}
    written = {**raw, "embed_tokens.weight": torch.full((VOCABULARY, HIDDEN), float("nan"))}
    check_eagle3(write(tmp_path, config, written), raw, before=before, output=output)


@pytest.mark.parametrize("embedding", [False, True])
def test_official_eagle3(tmp_path: Path, embedding: bool) -> None:
    """`midlayer`, layers by the rule, perhaps a copy of the target's embedding."""
    raw = eagle3_tensors("midlayer.")
    config = {**layer_config(), "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 6}
    copy = {"embed_tokens.weight": EMBEDDING.bfloat16()} if embedding else {}
    folder = write(tmp_path, config, {**raw, **copy})
    assert recognise(open_drafter(folder)) is Layout.EAGLE3
    check_eagle3(folder, raw, "midlayer.", (1, 3, 4))


def test_eagle31_under_its_first_names(tmp_path: Path) -> None:
    norms = [random(HIDDEN, seed=30 + i) for i in range(3)]
    raw = eagle3_tensors("midlayer.")
    config = {**layer_config(), "draft_vocab_size": 6, "use_aux_norm": True, "norm_output": True}
    named = {f"aux_norm_{n}.weight": norm for n, norm in zip(("low", "mid", "high"), norms, strict=True)}
    ours = {**raw, **{f"fc_norm.{i}.weight": norm for i, norm in enumerate(norms)}}
    check_eagle3(write(tmp_path, config, {**raw, **named}), ours, "midlayer.", output=True)


@pytest.mark.parametrize(("ids", "reads"), [([1, 3, 4], (1, 3, 4)), ([2, 5, 8], (1, 4, 7))])
def test_modelopt_eagle3(tmp_path: Path, ids: list[int], reads: tuple[int, ...]) -> None:
    """Its ids are of outputs; one as high as the target's depth can only be of what enters."""
    raw = eagle3_tensors()
    switches = {
        "eagle_aux_hidden_state_layer_ids": ids,
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
    }
    config = {**layer_config(), "draft_vocab_size": 6, "eagle_config": switches, "rope_scaling": None}
    folder = write(tmp_path, config, raw)
    assert recognise(open_drafter(folder)) is Layout.MODELOPT_EAGLE3
    check_eagle3(folder, raw, reads=reads)


def test_deepspec_eagle3(tmp_path: Path) -> None:
    """Qwen3's layer, and the target's whole head as its own."""
    raw = {**eagle3_tensors(qk_norm=True), "lm_head.weight": HEAD.float()}
    del raw["d2t"], raw["t2d"]
    config = {**layer_config(family="qwen3"), "architectures": ["Qwen3Eagle3Model"], "target_layer_ids": [1, 3, 4]}
    net = load(write(tmp_path, config, {**raw, "embed_tokens.weight": EMBEDDING.float()}))
    features = random(5, 3 * HIDDEN, seed=20).double()
    same(by_net(net, features)[1], eagle3_by_hand(raw, features)[1])
    assert net.reads == (1, 3, 4)
    assert net.head.own


def test_tokens_in_any_order_are_put_in_order(tmp_path: Path) -> None:
    raw = eagle3_tensors()
    shuffled = torch.tensor([12, 0, 7, 2, 8, 3])
    config = write(tmp_path, speculators(), {**raw, "d2t": shuffled - torch.arange(6)})
    net = load(config)
    features = random(5, 3 * HIDDEN, seed=20).double()
    same(net.head.spread(by_net(net, features)[1])[:, shuffled], eagle3_by_hand(raw, features)[1])
    assert net.head.tokens.tolist() == DRAFT.tolist()


def test_a_head_that_is_not_stored_is_the_targets(tmp_path: Path) -> None:
    raw = eagle3_tensors()
    del raw["lm_head.weight"]
    net = load(write(tmp_path, speculators(), raw))
    features = random(5, 3 * HIDDEN, seed=20).double()
    same(by_net(net, features)[1], eagle3_by_hand({**raw, "lm_head.weight": HEAD[DRAFT]}, features)[1])
    assert not net.head.own


def test_several_layers(tmp_path: Path) -> None:
    raw = {**eagle3_tensors(), **layer_tensors("layers.1.", seed=50)}
    net = load(write(tmp_path, speculators(transformer_layer_config=layer_config(2)), raw))
    assert len(net.layers) == 2
    assert torch.equal(net.layers[1].mlp.up_proj.weight, raw["layers.1.mlp.up_proj.weight"])


def test_rope_that_the_drafter_states_is_its_own(tmp_path: Path) -> None:
    raw, config = eagle3_tensors(), layer_config(rope_theta=500.0)
    check_eagle3(write(tmp_path, speculators(transformer_layer_config=config), raw), raw, theta=500.0)


@pytest.mark.parametrize("stated", ["nothing", "theta", "parameters", "scaling"])
def test_rope_that_it_does_not_state_is_the_targets(tmp_path: Path, stated: str) -> None:
    target = replace(TARGET, rope=RopeConfig(700.0, "linear", 2.0))
    config = layer_config(rope_theta=500.0)
    if stated != "theta":
        del config["rope_theta"]
    if stated == "parameters":
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": 500.0}
    if stated == "scaling":
        config["rope_scaling"] = {"rope_type": "linear", "factor": 4.0}
    files = open_drafter(write(tmp_path, speculators(transformer_layer_config=config), eagle3_tensors()))
    rope = build_net(files, target, WORDS).config.rope
    expected = {"nothing": (700.0, "linear", 2.0), "scaling": (700.0, "linear", 4.0)}
    assert (rope.theta, rope.kind, rope.factor) == expected.get(stated, (500.0, "default", 1.0))


def eagle1_by_hand(raw, features: Tensor, fc: str = "fc.", p: str = "layers.0.") -> tuple[Tensor, Tensor]:
    hidden = features
    for _ in range(2):
        x = linear(torch.cat([EMBEDDING[TOKENS], hidden], -1), raw[f"{fc}weight"], raw.get(f"{fc}bias"))
        x = x + attention(raw, f"{p}self_attn.", x, POSITIONS, causal(5))
        hidden = x + mlp(raw, f"{p}mlp.", rms(x, raw[f"{p}post_attention_layernorm.weight"]))
    return hidden, linear(hidden, HEAD)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("legacy", [False, True])
def test_eagle1(tmp_path: Path, bias: bool, legacy: bool) -> None:
    fc, p = ("fusion_fc.", "transformer.") if legacy else ("fc.", "layers.0.")
    raw = {f"{fc}weight": random(HIDDEN, 2 * HIDDEN), **layer_tensors(p)}
    del raw[f"{p}input_layernorm.weight"]
    raw |= {f"{fc}bias": random(HIDDEN, seed=3)} if bias else {}
    config: dict[str, object] = {**layer_config(), "architectures": ["LlamaForCausalLMEagle"], "bias": bias}
    if legacy:
        config = {"speculators_model_type": "eagle", "transformer_layer_config": layer_config()}
        config |= {"fusion_bias": bias, "layernorms": False}
    net = load(write(tmp_path, config, {**raw, "embed_tokens.weight": EMBEDDING.half()}))
    assert net.reads == (LAYERS - 1,)
    features = random(5, HIDDEN, seed=9).double() * 5
    for found, expected in zip(by_net(net, features), eagle1_by_hand(raw, features, fc, p), strict=True):
        same(found, expected)


MTP_NAMES = {
    "speculators": ("mtp_layers.0.{}", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
    "qwen": ("mtp.{}", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
    "deepseek": (f"model.layers.{LAYERS}.{{}}", "enorm", "hnorm", "eh_proj", "shared_head.norm"),
}


@pytest.mark.parametrize("kind", MTP_NAMES)
def test_multi_token_prediction(tmp_path: Path, kind: str) -> None:
    place, *names = MTP_NAMES[kind]
    enorm, hnorm, proj, norm = (place.format(name) + ".weight" for name in names)
    p = "mtp.layers.0." if kind == "qwen" else place.format("")
    raw = {
        enorm: random(HIDDEN, seed=1),
        hnorm: random(HIDDEN, seed=2),
        proj: random(HIDDEN, 2 * HIDDEN),
        norm: random(HIDDEN, seed=3),
        **layer_tensors(p),
    }
    config: dict[str, object] = {**layer_config(LAYERS), "num_nextn_predict_layers": 1}
    rest = {"model.layers.0.mlp.up_proj.weight": random(INNER, HIDDEN), "lm_head.weight": HEAD.float()}
    if kind == "speculators":
        config = {"speculators_model_type": "mtp", "transformer_layer_config": layer_config(LAYERS)}
        rest = {}
    folder = write(tmp_path, config, {**raw, **rest})
    net = load(folder)
    hidden = features = random(5, HIDDEN, seed=9).double() * 3
    for _ in range(2):
        x = linear(torch.cat([rms(EMBEDDING[TOKENS], raw[enorm]), rms(hidden, raw[hnorm])], -1), raw[proj])
        hidden = rms(decoder(raw, p, x, POSITIONS, causal(5)), raw[norm])
    output, logits = by_net(net, features)
    same(output, hidden)
    same(logits, linear(hidden, HEAD))
