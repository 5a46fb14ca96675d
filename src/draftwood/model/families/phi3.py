"""Phi-3 and Phi-4: queries, keys and values in one tensor, gates and ups in another; some turn only part of a head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import ModelConfig
from ..reading import layer_count, optional_integer
from .base import (
    Family,
    PlainChoices,
    Stored,
    key_rows,
    lower_half,
    plain,
    query_rows,
    upper_half,
    value_rows,
)
from .in_gguf import FUSED_GATE_UP, GgufForm, Rows

GATE_UP = {
    "mlp.gate_proj.weight": Stored(("mlp.gate_up_proj.weight",), upper_half),
    "mlp.up_proj.weight": Stored(("mlp.gate_up_proj.weight",), lower_half),
}
_TENSORS = {
    "self_attn.q_proj.weight": Stored(("self_attn.qkv_proj.weight",), query_rows),
    "self_attn.k_proj.weight": Stored(("self_attn.qkv_proj.weight",), key_rows),
    "self_attn.v_proj.weight": Stored(("self_attn.qkv_proj.weight",), value_rows),
    **GATE_UP,
}


def _read(config: Mapping[str, Any]) -> ModelConfig:
    config = {"rms_norm_eps": 1e-5, **config}
    window = optional_integer(config, "sliding_window")
    windows = (window,) * layer_count(config, "num_hidden_layers")
    return plain(config, "phi3", PlainChoices(partial_rotary=True), windows)


_IN_GGUF = {
    "self_attn.q_proj": Rows("attn_qkv", query_rows),
    "self_attn.k_proj": Rows("attn_qkv", key_rows),
    "self_attn.v_proj": Rows("attn_qkv", value_rows),
    **FUSED_GATE_UP,
}

FAMILY = Family("phi3", _read, tensors=_TENSORS, gguf=GgufForm("phi3", tensors=_IN_GGUF))
