"""Granite: Llama with four multipliers: of embeddings, scores, what layers add, and logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config import ModelConfig
from ..reading import number
from ..rope import require
from ..spec import LayerSpec, StreamSpec
from .base import Family, PlainChoices, plain, with_layers_changed
from .in_gguf import GgufForm


def _read(config: Mapping[str, Any]) -> ModelConfig:
    biases = bool(config.get("attention_bias"))
    choices = PlainChoices(qkv_bias=biases, output_bias=biases, mlp_bias=bool(config.get("mlp_bias")))
    decoder = plain(config, "granite", choices)
    scale, added = number(config, "attention_multiplier", 1.0), number(config, "residual_multiplier", 1.0)
    divided = number(config, "logits_scaling", 1.0)
    require(divided > 0, f"its logits_scaling is {divided}, which must be positive")

    def change(i: int, layer: LayerSpec) -> LayerSpec:
        return replace(layer, residual_scale=added, attention=replace(layer.attention, scale=scale))

    stream = StreamSpec(embedding_scale=number(config, "embedding_multiplier", 1.0), logit_scale=1 / divided)
    return with_layers_changed(decoder, change, stream)


def _entries(own: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "attention_multiplier": number(own, "attention.scale", 1.0),
        "embedding_multiplier": number(own, "embedding_scale", 1.0),
        "residual_multiplier": number(own, "residual_scale", 1.0),
        "logits_scaling": number(own, "logit_scale", 1.0),
    }


FAMILY = Family("granite", _read, gguf=GgufForm("granite", _entries, interleaved=True))
