"""Gemma 2: norms on both sides of attention and MLP, capped scores and logits, every other layer slides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config import ModelConfig
from ..reading import every_nth_full, integer, layer_count, number, optional_number
from ..spec import ATTENTION_OUTPUT_NORM, MLP_NORM, MLP_OUTPUT_NORM, LayerSpec, StreamSpec, Wiring
from .base import Family, PlainChoices, plain, with_layers_changed

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
        return replace(layer.attending(scale=scale, softcap=softcap), wiring=Wiring.SANDWICH)

    stream = StreamSpec(embedding_scale=decoder.hidden_size**0.5, logit_softcap=logit_softcap)
    return with_layers_changed(decoder, change, stream)


def _read_gguf(decoder: ModelConfig, own: Mapping[str, Any]) -> ModelConfig:
    window = integer(own, "attention.sliding_window", 4096)
    windows = tuple(None if i % 2 else window for i in range(decoder.num_layers))
    decoder = replace(decoder, windows=windows, activation="gelu_pytorch_tanh")
    per_head = decoder.hidden_size // decoder.num_heads if decoder.num_layers == _LAYERS_OF_27B else decoder.head_dim
    softcap, capped = (number(own, f"{kind}_logit_softcapping", usual) for kind, usual in (("attn", 50), ("final", 30)))
    return _of(decoder, per_head**-0.5, softcap, capped)


_LAYERS_OF_27B = 46  # which divides scores by √(hidden / heads), and its files do not say so

FAMILY = Family(
    "gemma2", _read, tensors=TENSORS, norm_offset=1.0, gguf="gemma2", read_gguf=_read_gguf
)  # fmt: skip
