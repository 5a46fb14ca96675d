"""SmolLM3: Llama, every fourth layer of which turns nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config import ModelConfig
from ..reading import integer, layer_count, layer_kinds, optional_integer
from ..rope import require, shown
from ..spec import LayerSpec
from .base import Family, PlainChoices, plain, with_layers_changed
from .in_gguf import GgufForm

DEFAULTS = {"rope_theta": 2_000_000.0, "num_key_value_heads": 4, "tie_word_embeddings": True}


def _read(config: Mapping[str, Any]) -> ModelConfig:
    config = {**DEFAULTS, **config}
    num_layers = layer_count(config, "num_hidden_layers")
    turns = _turning(config, num_layers)
    biases = bool(config.get("attention_bias"))
    choices = PlainChoices(qkv_bias=biases, output_bias=biases, mlp_bias=bool(config.get("mlp_bias")))
    decoder = plain(config, "smollm3", choices, _windows(config, turns))

    def change(i: int, layer: LayerSpec) -> LayerSpec:
        return layer if turns[i] else replace(layer, attention=replace(layer.attention, rope=None))

    return with_layers_changed(decoder, change)


def _turning(config: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    given = config.get("no_rope_layers")
    if given is None:
        interval = integer(config, "no_rope_layer_interval", 4)
        require(interval > 0, f"its no_rope_layer_interval is {interval}, which must be positive")
        return tuple((i + 1) % interval != 0 for i in range(num_layers))
    require(
        isinstance(given, list | tuple) and len(given) >= num_layers,
        f"its no_rope_layers are {shown(given)} where a list of {num_layers} is needed",
    )
    return tuple(bool(turns) for turns in given[:num_layers])


def _windows(config: Mapping[str, Any], turns: tuple[bool, ...]) -> tuple[int | None, ...]:
    window = optional_integer(config, "sliding_window") if config.get("use_sliding_window") else None
    kinds = layer_kinds(config, len(turns)) or tuple(not turned for turned in turns)
    return tuple(window if slides else None for slides in kinds)


FAMILY = Family("smollm3", _read, gguf=GgufForm("smollm3", interleaved=True))
