"""OLMo 2: norms behind attention and MLP instead of before, and of whole rows of queries and of keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config import ModelConfig
from ..spec import ATTENTION_OUTPUT_NORM, MLP_OUTPUT_NORM, HeadNorms, HeadNormSpec, LayerSpec, Wiring
from .base import Family, PlainChoices, plain, with_layers_changed
from .in_gguf import GgufForm

TENSORS = {
    ATTENTION_OUTPUT_NORM: "post_attention_layernorm",
    MLP_OUTPUT_NORM: "post_feedforward_layernorm",
}


def _read(config: Mapping[str, Any]) -> ModelConfig:
    biases = bool(config.get("attention_bias"))
    choices = PlainChoices(qkv_bias=biases, output_bias=biases, qk_norm=True)
    decoder = plain({"rms_norm_eps": 1e-5, **config}, "olmo2", choices)

    def change(i: int, layer: LayerSpec) -> LayerSpec:
        attention = replace(layer.attention, head_norm=HeadNormSpec(layer.norm, HeadNorms.WHOLE))
        return replace(layer, wiring=Wiring.POST, attention=attention)

    return with_layers_changed(decoder, change)


FAMILY = Family("olmo2", _read, tensors=TENSORS, gguf=GgufForm("olmo2"))
