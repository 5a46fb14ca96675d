"""Cohere's Command R (`cohere`) and Command R7B (`cohere2`): attention and MLP read one norm; neighbours are turned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..config import ModelConfig
from ..reading import every_nth_full, integer, layer_count, number
from ..spec import HeadNorms, HeadNormSpec, LayerSpec, Wiring
from .base import Family, PlainChoices, Stored, layer_normed, plain, renamed, with_layers_changed
from .in_gguf import GgufForm

DEFAULTS = {"layer_norm_eps": 1e-5, "tie_word_embeddings": True, "logit_scale": 0.0625}
_PATTERN = 4  # the last of so many layers sees all, and turns nothing


def _read(config: Mapping[str, Any]) -> ModelConfig:
    config = {**DEFAULTS, "rope_theta": 500_000.0, **config}
    return _side_by_side(config, "cohere", None, bool(config.get("use_qk_norm")))


def _read_second(config: Mapping[str, Any]) -> ModelConfig:
    config = {**DEFAULTS, "sliding_window": 4096, **config}
    pattern = integer(config, "sliding_window_pattern", _PATTERN)
    windows = every_nth_full(config, layer_count(config, "num_hidden_layers"), pattern)
    decoder = _side_by_side(config, "cohere2", windows, False)

    def change(i: int, layer: LayerSpec) -> LayerSpec:
        attention = layer.attention
        return layer if attention.window is not None else replace(layer, attention=replace(attention, rope=None))

    return with_layers_changed(decoder, change)


def _side_by_side(
    config: Mapping[str, Any], family: str, windows: tuple[int | None, ...] | None, head_norms: bool
) -> ModelConfig:
    biases = bool(config.get("attention_bias"))
    config = renamed(config, {"layer_norm_eps": "rms_norm_eps"})
    decoder = layer_normed(plain(config, family, PlainChoices(None, biases, biases), windows), bias=False)
    normed = HeadNormSpec(decoder.final_norm, HeadNorms.OWN) if head_norms else None

    def change(i: int, layer: LayerSpec) -> LayerSpec:
        attention = replace(layer.attention, head_norm=normed)
        return replace(layer, wiring=Wiring.PARALLEL_SHARED, attention=attention)

    return with_layers_changed(
        decoder, change, replace(decoder.stream, logit_scale=number(config, "logit_scale", 1.0))
    )  # fmt: skip


def _by_heads(config: ModelConfig, weight: Tensor) -> Tensor:
    return weight.flatten()


def _entries(own: Mapping[str, Any]) -> dict[str, Any]:
    return {"logit_scale": number(own, "logit_scale", 0.0625)}


_TENSORS = {
    f"self_attn.{part}_norm.weight": Stored((f"self_attn.{part}_norm.weight",), _by_heads) for part in "qk"
}  # fmt: skip
FAMILY = Family(
    "cohere", _read, tensors=_TENSORS, interleaved=True, gguf=GgufForm("command-r", _entries, interleaved=True)
)  # fmt: skip
SECOND = Family("cohere2", _read_second, interleaved=True, gguf=GgufForm("cohere2", _entries, interleaved=True))
