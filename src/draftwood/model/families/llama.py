"""Llama, and whatever has its format: SmolLM2, TinyLlama, Yi and many more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import ModelConfig
from .base import Family, PlainChoices, plain
from .in_gguf import GgufForm


def _read(config: Mapping[str, Any]) -> ModelConfig:
    biases = bool(config.get("attention_bias"))
    choices = PlainChoices(qkv_bias=biases, output_bias=biases, mlp_bias=bool(config.get("mlp_bias")))
    return plain(config, "llama", choices)


def _sees_all(own: Mapping[str, Any]) -> bool:
    return not own.get("expert_count") and not own.get("attention.sliding_window")


FAMILY = Family("llama", _read, gguf=GgufForm("llama", interleaved=True, fits=_sees_all))
