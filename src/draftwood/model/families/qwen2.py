"""Qwen2 and Qwen2.5: biases of queries, keys and values; upper layers may slide."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import ModelConfig
from ..reading import integer, layer_count, layer_kinds, optional_integer
from .base import Family, PlainChoices, plain
from .in_gguf import GgufForm


def upper_windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Windows of the Qwens: of the layers that `layer_types` names, else of those from `max_window_layers` on."""
    num_layers = layer_count(config, "num_hidden_layers")
    window = optional_integer({"sliding_window": 4096, **config}, "sliding_window")
    if window is None or not config.get("use_sliding_window", False):
        return (None,) * num_layers
    kinds = layer_kinds(config, num_layers)
    if kinds is None:
        first = integer(config, "max_window_layers", 28)
        kinds = tuple(layer >= first for layer in range(num_layers))
    return tuple(window if slides else None for slides in kinds)


def _read(config: Mapping[str, Any]) -> ModelConfig:
    return plain(config, "qwen2", PlainChoices(qkv_bias=True), upper_windows(config))


def entries(own: Mapping[str, Any]) -> dict[str, Any]:
    """Where a file states a window, all layers have it."""
    return {"use_sliding_window": bool(own.get("attention.sliding_window")), "max_window_layers": 0}


FAMILY = Family("qwen2", _read, gguf=GgufForm("qwen2", entries))
