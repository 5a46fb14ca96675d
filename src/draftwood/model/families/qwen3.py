"""Qwen3: norms of queries and keys instead of biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import ModelConfig
from .base import Family, PlainChoices, plain
from .in_gguf import GgufForm
from .qwen2 import entries, upper_windows


def _read(config: Mapping[str, Any]) -> ModelConfig:
    biases = bool(config.get("attention_bias"))
    choices = PlainChoices(head_dim=128, qkv_bias=biases, output_bias=biases, qk_norm=True)
    return plain(config, "qwen3", choices, upper_windows(config))


FAMILY = Family("qwen3", _read, gguf=GgufForm("qwen3", entries))
