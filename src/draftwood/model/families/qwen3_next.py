"""Qwen3-Next (`qwen3_next`) and Qwen3.5 (`qwen3_5`): gated delta nets, every fourth layer attention with a gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..config import ModelConfig
from ..reading import integer, layer_count
from ..rope import require, shown
from ..spec import GatedDeltaSpec, LayerSpec, MlpSpec
from .bamba import recurrent_layers, with_mixers
from .base import Change, Family, PlainChoices, Stored, plain, with_layers_changed
from .mamba2 import as_it_is, convolution
from .qwen2_moe import SHARED, TENSORS, with_experts

DEFAULTS = {
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_EXPERTS = {
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
}


def _read_next(config: Mapping[str, Any]) -> ModelConfig:
    return _read_with_experts({**DEFAULTS, **_EXPERTS, **config}, "qwen3_next")


def _read_fifth_moe(config: Mapping[str, Any]) -> ModelConfig:
    usual = {"num_experts": 256, "num_experts_per_tok": 8}
    return _read_with_experts({**DEFAULTS, **_EXPERTS, **usual, **_of_text(config)}, "qwen3_5_moe_text")


def _read_with_experts(config: Mapping[str, Any], family: str) -> ModelConfig:
    config = {"intermediate_size": config["moe_intermediate_size"], **config}
    decoder = _read(config, family)
    if not integer(config, "num_experts"):
        return decoder
    shared = MlpSpec(integer(config, "shared_expert_intermediate_size"), decoder.activation)
    return with_experts(config, decoder, shared)


def _read_fifth(config: Mapping[str, Any]) -> ModelConfig:
    return _read({**DEFAULTS, "num_key_value_heads": 4, **_of_text(config)}, "qwen3_5_text")


def _of_text(config: Mapping[str, Any]) -> dict[str, Any]:
    """Without how rotation is shared among time, height and width of images: text has one position for all three."""
    given = config.get("rope_parameters") or {}
    require(isinstance(given, Mapping), f"its rope_parameters are {shown(given)} where a table is needed")
    return {**config, "rope_parameters": {key: given[key] for key in given if not key.startswith("mrope")}}


def _read(config: Mapping[str, Any], family: str) -> ModelConfig:
    num_layers = layer_count(config, "num_hidden_layers")
    interval = integer(config, "full_attention_interval", 4)
    require(interval > 0, f"its full_attention_interval is {interval}, which must be positive")
    kinds = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(num_layers)]
    config = {**config, "layer_types": config.get("layer_types") or kinds}
    biases = bool(config.get("attention_bias"))
    choices = PlainChoices(256, biases, biases, qk_norm=True, partial_rotary=True, experts=True)
    decoder = plain(config, family, choices)
    mixer = GatedDeltaSpec(
        key_heads=integer(config, "linear_num_key_heads"),
        value_heads=integer(config, "linear_num_value_heads"),
        key_dim=integer(config, "linear_key_head_dim"),
        value_dim=integer(config, "linear_value_head_dim"),
        kernel=integer(config, "linear_conv_kernel_dim"),
        eps=decoder.norm_eps,
    )

    def change(i: int, layer: LayerSpec) -> LayerSpec:
        return layer.attending(gated=True)

    return with_mixers(with_layers_changed(decoder, change), recurrent_layers(config, num_layers), mixer)


def _of_heads(first: bool) -> Change:
    """Queries or gates of each head, which lie in turn."""

    def change(config: ModelConfig, rows: Tensor) -> Tensor:
        parts = rows.unflatten(0, (config.num_heads, 2, config.head_dim))
        return parts[:, 0 if first else 1].flatten(0, 1)

    return change


def _by_parts(config: ModelConfig, fused: Tensor, rates: Tensor) -> Tensor:
    """Of each key head its query, key, values and gates, and learning and forgetting: as they lie in Qwen3-Next."""
    spec = config.recurrent[0]
    assert isinstance(spec, GatedDeltaSpec)
    shared = spec.value_heads // spec.key_heads
    sizes = (spec.key_dim, spec.key_dim, shared * spec.value_dim, shared * spec.value_dim)
    parts = fused.unflatten(0, (spec.key_heads, sum(sizes))).split_with_sizes(sizes, 1)
    both = rates.unflatten(0, (spec.key_heads, 2 * shared)).split_with_sizes((shared, shared), 1)
    return torch.cat([part.flatten(0, 1) for part in (*parts, *both)])


def _one_below_the_other(config: ModelConfig, *parts: Tensor) -> Tensor:
    return torch.cat(parts)


_OWN = "linear_attn"
_MIXER = {
    "mixer.out_proj": f"{_OWN}.out_proj",
    "mixer.gain": f"{_OWN}.norm",
    "mixer.decay.weight": Stored((f"{_OWN}.A_log",), as_it_is),
    "mixer.step.bias": Stored((f"{_OWN}.dt_bias",), as_it_is),
    **convolution(f"{_OWN}.conv1d"),
    **{
        f"self_attn.{part}_proj.{kind}": Stored((f"self_attn.q_proj.{kind}",), _of_heads(part == "q"))
        for part in ("q", "gate")
        for kind in ("weight", "bias")
    },
}
_FUSED = Stored((f"{_OWN}.in_proj_qkvz.weight", f"{_OWN}.in_proj_ba.weight"), _by_parts)
_APART = Stored(tuple(f"{_OWN}.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")), _one_below_the_other)
FAMILY = Family(
    "qwen3_next", _read_next, tensors={**TENSORS, **SHARED, **_MIXER, "mixer.in_proj.weight": _FUSED}, norm_offset=1.0
)
FIFTH = Family("qwen3_5_text", _read_fifth, tensors={**_MIXER, "mixer.in_proj.weight": _APART}, norm_offset=1.0)
FIFTH_MOE = Family("qwen3_5_moe_text", _read_fifth_moe, tensors={**TENSORS, **SHARED, **FIFTH.tensors}, norm_offset=1.0)


def _with_images(text: Family, name: str) -> Family:
    """The text model of one that sees images."""
    return replace(
        text,
        name=name,
        read=lambda config: replace(text.read(config), family=name),
        within="text_config",
    )


FIFTH_WITH_IMAGES = _with_images(FIFTH, "qwen3_5")
FIFTH_MOE_WITH_IMAGES = _with_images(FIFTH_MOE, "qwen3_5_moe")
