"""GLM-4: the first text models (`glm`), and those with norms on both sides (`glm4`). Half of each head is turned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config import ModelConfig
from ..spec import ATTENTION_OUTPUT_NORM, MLP_OUTPUT_NORM, Wiring
from .base import Family, PlainChoices, plain, with_layers_changed
from .in_gguf import FUSED_GATE_UP, GgufForm
from .phi3 import GATE_UP

DEFAULTS = {"partial_rotary_factor": 0.5, "attention_bias": True, "rms_norm_eps": 1.5625e-07}
_TENSORS = {**GATE_UP, ATTENTION_OUTPUT_NORM: "post_self_attn_layernorm", MLP_OUTPUT_NORM: "post_mlp_layernorm"}


def _read_as(family: str, config: Mapping[str, Any]) -> ModelConfig:
    config = {**DEFAULTS, **config}
    choices = PlainChoices(128, qkv_bias=bool(config.get("attention_bias")), partial_rotary=True)
    return plain(config, family, choices)


def _read(config: Mapping[str, Any]) -> ModelConfig:
    return _read_as("glm", config)


def _read_fourth(config: Mapping[str, Any]) -> ModelConfig:
    decoder = _read_as("glm4", config)
    return with_layers_changed(decoder, lambda i, layer: replace(layer, wiring=Wiring.SANDWICH))


FAMILY = Family(
    "glm", _read, tensors=GATE_UP, interleaved=True, gguf=GgufForm("chatglm", tensors=FUSED_GATE_UP, interleaved=True)
)  # fmt: skip
FOURTH = Family(
    "glm4", _read_fourth, tensors=_TENSORS, interleaved=True,
    gguf=GgufForm("glm4", tensors=FUSED_GATE_UP, interleaved=True),
)  # fmt: skip
