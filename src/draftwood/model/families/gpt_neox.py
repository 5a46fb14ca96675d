"""GPT-NeoX and Pythia: attention and MLP side by side, a quarter of each head turned, one tensor by heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..config import ModelConfig
from ..spec import Wiring
from .base import (
    Change,
    Family,
    PlainChoices,
    Stored,
    key_rows,
    layer_normed,
    plain,
    plain_mlp,
    query_rows,
    renamed,
    value_rows,
    with_layers_changed,
)
from .in_gguf import GgufForm, Rows

DEFAULTS = {"layer_norm_eps": 1e-5, "hidden_act": "gelu", "rotary_emb_base": 10_000.0, "rotary_pct": 0.25}
_USUAL = {"layer_norm_eps": "rms_norm_eps"}


def _read(config: Mapping[str, Any]) -> ModelConfig:
    config = renamed({**DEFAULTS, **config}, _USUAL)
    stated = config.get("rope_parameters") or {}
    rope = {"rope_theta": config["rotary_emb_base"], "partial_rotary_factor": config["rotary_pct"], **stated}
    scaling = config.get("rope_scaling") or {}
    config = {**config, "rope_scaling": None, "rope_parameters": {**rope, **scaling}}
    biases = bool(config.get("attention_bias", True))
    decoder = plain(config, "gpt_neox", PlainChoices(None, biases, biases, True, partial_rotary=True))
    wiring = Wiring.PARALLEL if config.get("use_parallel_residual", True) else Wiring.PRE
    decoder = plain_mlp(layer_normed(decoder))
    return with_layers_changed(decoder, lambda i, layer: replace(layer, wiring=wiring))


def _of_heads(part: int) -> Change:
    """Queries, keys or values of rows that hold, head by head, all three."""

    def change(config: ModelConfig, fused: Tensor) -> Tensor:
        return fused.unflatten(0, (config.num_heads, 3, config.head_dim))[:, part].flatten(0, 1)

    return change


_FUSED = "attention.query_key_value"
_TENSORS = {
    **{
        f"self_attn.{name}_proj.{kind}": Stored((f"{_FUSED}.{kind}",), _of_heads(i))
        for i, name in enumerate("qkv")
        for kind in ("weight", "bias")
    },
    "self_attn.o_proj": "attention.dense",
    "mlp.up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}
_TOP = {
    "model.embed_tokens": "gpt_neox.embed_in",
    "model.norm": "gpt_neox.final_layer_norm",
    "lm_head": ("embed_out", "lm_head"),
}


def _entries(own: Mapping[str, Any]) -> dict[str, Any]:
    return {"use_parallel_residual": own.get("use_parallel_residual", True)}


_IN_GGUF = {
    f"self_attn.{part}_proj": Rows("attn_qkv", pick)
    for part, pick in (("q", query_rows), ("k", key_rows), ("v", value_rows))
}

FAMILY = Family(
    "gpt_neox", _read, layer="gpt_neox.layers.{}.", tensors=_TENSORS, top=_TOP,
    gguf=GgufForm("gptneox", _entries, tensors=_IN_GGUF),
)  # fmt: skip
