"""Mistral: Llama with one sliding window for all layers, which newer models leave away."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import ModelConfig
from ..reading import layer_count, optional_integer
from .base import Family, plain
from .in_gguf import GgufForm


def _read(config: Mapping[str, Any]) -> ModelConfig:
    window = optional_integer({"sliding_window": 4096, **config}, "sliding_window")  # null means none
    return plain(config, "mistral", windows=(window,) * layer_count(config, "num_hidden_layers"))


def _slides(own: Mapping[str, Any]) -> bool:
    return not own.get("expert_count") and bool(own.get("attention.sliding_window"))


FAMILY = Family("mistral", _read, gguf=GgufForm("llama", interleaved=True, fits=_slides))
