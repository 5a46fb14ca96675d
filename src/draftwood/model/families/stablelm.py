"""StableLM: layer norms, a gated MLP, a quarter of each head turned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config import ModelConfig
from ..rope import require
from ..spec import Wiring
from .base import Family, PlainChoices, layer_normed, plain, renamed, with_layers_changed
from .in_gguf import GgufForm

DEFAULTS = {"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25}


def _read(config: Mapping[str, Any]) -> ModelConfig:
    config = renamed({**DEFAULTS, **config}, {"layer_norm_eps": "rms_norm_eps"})
    require(not config.get("qk_layernorm"), "its queries and keys have a norm for each head (qk_layernorm)")
    biases = bool(config.get("use_qkv_bias"))
    decoder = layer_normed(plain(config, "stablelm", PlainChoices(qkv_bias=biases, partial_rotary=True)))
    if not config.get("use_parallel_residual"):
        return decoder
    return with_layers_changed(decoder, lambda i, layer: replace(layer, wiring=Wiring.PARALLEL_SHARED))


def _entries(own: Mapping[str, Any]) -> dict[str, Any]:
    return {"use_parallel_residual": own.get("use_parallel_residual")}


FAMILY = Family("stablelm", _read, gguf=GgufForm("stablelm", _entries))
