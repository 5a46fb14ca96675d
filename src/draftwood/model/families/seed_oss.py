"""Seed-OSS: Llama with biases of queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import ModelConfig
from ..spec import MLP_NORM
from .base import Family, PlainChoices, plain
from .in_gguf import GgufForm


def _read(config: Mapping[str, Any]) -> ModelConfig:
    choices = PlainChoices(
        head_dim=128,
        qkv_bias=bool(config.get("attention_bias", True)),
        output_bias=bool(config.get("attention_out_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
    )
    return plain(config, "seed_oss", choices)


FAMILY = Family("seed_oss", _read, gguf=GgufForm("seed_oss", tensors={MLP_NORM: "post_attention_norm"}))
