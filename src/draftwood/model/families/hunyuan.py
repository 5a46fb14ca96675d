"""Hunyuan's dense models: queries and keys are normed after they were turned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config import ModelConfig
from ..rope import require
from ..spec import HeadNormSpec, LayerSpec
from .base import Family, PlainChoices, plain, with_layers_changed
from .in_gguf import GgufForm

_TENSORS = {"self_attn.q_norm": "self_attn.query_layernorm", "self_attn.k_norm": "self_attn.key_layernorm"}


def _read(config: Mapping[str, Any]) -> ModelConfig:
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    require(
        not isinstance(scaling, Mapping) or scaling.get("alpha") in (None, 1, 1.0),
        "its rope has an alpha, which stretches with the text and is not supported",
    )
    biases = bool(config.get("attention_bias"))
    decoder = plain(
        {"rms_norm_eps": 1e-5, **config}, "hunyuan_v1_dense", PlainChoices(None, biases, biases, qk_norm=True)
    )

    def change(i: int, layer: LayerSpec) -> LayerSpec:
        attention = replace(layer.attention, head_norm=HeadNormSpec(layer.norm, after_rope=True))
        return replace(layer, attention=attention)

    return with_layers_changed(decoder, change)


FAMILY = Family("hunyuan_v1_dense", _read, tensors=_TENSORS, gguf=GgufForm("hunyuan-dense"))
