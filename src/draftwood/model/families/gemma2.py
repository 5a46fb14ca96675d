"""Gemma 2: norms on both sides of attention and MLP, capped scores and logits, every other layer slides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config import ModelConfig
from ..reading import every_nth_full, integer, layer_count, number, optional_number
from ..spec import ATTENTION_OUTPUT_NORM, MLP_NORM, MLP_OUTPUT_NORM, LayerSpec, StreamSpec, Wiring
from .base import Family, PlainChoices, plain, with_layers_changed
from .in_gguf import GgufForm

DEFAULTS = {
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
TENSORS = {
    ATTENTION_OUTPUT_NORM: "post_attention_layernorm",
    MLP_NORM: "pre_feedforward_layernorm",
    MLP_OUTPUT_NORM: "post_feedforward_layernorm",
}


def _read(config: Mapping[str, Any]) -> ModelConfig:
    config = {**DEFAULTS, **config, "hidden_act": config.get("hidden_activation", "gelu_pytorch_tanh")}
    biases = bool(config.get("attention_bias"))
    windows = every_nth_full(config, layer_count(config, "num_hidden_layers"), 2)
    decoder = plain(config, "gemma2", PlainChoices(256, biases, biases), windows)
    scale = number(config, "query_pre_attn_scalar", None) ** -0.5
    softcap = optional_number(config, "attn_logit_softcapping")
    return _of(decoder, scale, softcap, optional_number(config, "final_logit_softcapping"))


def _of(decoder: ModelConfig, scale: float, softcap: float | None, logit_softcap: float | None) -> ModelConfig:
    """What makes a plain decoder with windows a Gemma 2."""

    def change(i: int, layer: LayerSpec) -> LayerSpec:
        return replace(
            layer, wiring=Wiring.SANDWICH, attention=replace(layer.attention, scale=scale, softcap=softcap)
        )  # fmt: skip

    stream = StreamSpec(embedding_scale=decoder.hidden_size**0.5, logit_softcap=logit_softcap)
    return with_layers_changed(decoder, change, stream)


def _entries(own: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": score_divisor(own, _LAYERS_OF_27B),
        "attn_logit_softcapping": number(own, "attn_logit_softcapping", 50.0),
        "final_logit_softcapping": number(own, "final_logit_softcapping", 30.0),
        "sliding_window": integer(own, "attention.sliding_window", 4096),
    }


def score_divisor(own: Mapping[str, Any], layers_of_27b: int) -> float:
    """What scores are divided by the root of: the size of a head, but for the models of 27 B, which do not say so."""
    hidden, heads = integer(own, "embedding_length"), integer(own, "attention.head_count")
    per_head = hidden / max(heads, 1)
    large = layer_count(own, "block_count") == layers_of_27b
    return per_head if large else number(own, "attention.key_length", per_head)


_LAYERS_OF_27B = 46

FAMILY = Family(
    "gemma2", _read, tensors=TENSORS, norm_offset=1.0, gguf=GgufForm("gemma2", _entries)
)  # fmt: skip
