"""Nemotron: layer norms that hold what is added to one, an MLP of relu² without a gate, half of each head turned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import ModelConfig
from .base import Family, PlainChoices, layer_normed, plain, plain_mlp, renamed
from .in_gguf import GgufForm

DEFAULTS = {"norm_eps": 1e-5, "hidden_act": "relu2", "partial_rotary_factor": 0.5}


def _read(config: Mapping[str, Any]) -> ModelConfig:
    config = renamed({**DEFAULTS, **config}, {"norm_eps": "rms_norm_eps"})
    biases, inner = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    choices = PlainChoices(None, biases, biases, inner, partial_rotary=True)
    return plain_mlp(layer_normed(plain(config, "nemotron", choices)))


FAMILY = Family("nemotron", _read, norm_offset=1.0, gguf=GgufForm("nemotron"))
