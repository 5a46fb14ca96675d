"""Qwen3-MoE (Qwen3-30B-A3B and its like): Qwen3 with experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import ModelConfig
from ..reading import layer_count, optional_integer
from .base import Family, PlainChoices, plain
from .in_gguf import GgufForm, has_experts
from .qwen2_moe import TENSORS, experts_in_gguf, with_experts

DEFAULTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}


def _read(config: Mapping[str, Any]) -> ModelConfig:
    config = {**DEFAULTS, **config}
    if config.get("num_local_experts") is not None:
        config["num_experts"] = config["num_local_experts"]
    biases = bool(config.get("attention_bias"))
    choices = PlainChoices(None, biases, biases, qk_norm=True, experts=True)
    window = optional_integer(config, "sliding_window") if config.get("use_sliding_window") else None
    windows = (window,) * layer_count(config, "num_hidden_layers")
    return with_experts(config, plain(config, "qwen3_moe", choices, windows), None)


def _entries(own: Mapping[str, Any]) -> dict[str, Any]:
    return experts_in_gguf(own) | {"norm_topk_prob": True}


FAMILY = Family("qwen3_moe", _read, tensors=TENSORS, gguf=GgufForm("qwen3moe", _entries, fits=has_experts))
