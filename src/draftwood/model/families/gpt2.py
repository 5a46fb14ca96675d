"""GPT-2: learned positions, layer norms, an MLP without a gate, matrices stored as [in, out]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..config import ModelConfig
from ..reading import integer
from ..rope import require
from ..spec import ATTENTION_NORM, MLP_NORM, LayerSpec
from .base import (
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
from .opt import learned_positions

DEFAULTS = {"activation_function": "gelu_new", "tie_word_embeddings": True, "layer_norm_epsilon": 1e-5}
_USUAL = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
    "activation_function": "hidden_act",
    "layer_norm_epsilon": "rms_norm_eps",
}


def _read(config: Mapping[str, Any]) -> ModelConfig:
    config = renamed({**DEFAULTS, **config}, _USUAL)
    if config.get("intermediate_size") is None:
        config["intermediate_size"] = 4 * integer(config, "hidden_size")
    require(not config.get("add_cross_attention"), "it is the decoder of another model (add_cross_attention)")
    decoder = plain_mlp(layer_normed(plain(config, "gpt2", PlainChoices(None, True, True, True))))
    scaled, by_layer = config.get("scale_attn_weights", True), config.get("scale_attn_by_inverse_layer_idx", False)

    def change(i: int, layer: LayerSpec) -> LayerSpec:
        scale = (decoder.head_dim**-0.5 if scaled else 1.0) / (i + 1 if by_layer else 1)
        return layer.attending(scale=scale)

    return learned_positions(with_layers_changed(decoder, change))


def _turned(config: ModelConfig, weight: Tensor) -> Tensor:
    return weight.t()


_PARTS = {"q": query_rows, "k": key_rows, "v": value_rows}
_TENSORS = {
    ATTENTION_NORM: "ln_1",
    MLP_NORM: "ln_2",
    **{
        f"self_attn.{part}_proj.weight": Stored(
            ("attn.c_attn.weight",), lambda config, weight, rows=rows: rows(config, weight.t())
        )
        for part, rows in _PARTS.items()
    },
    **{f"self_attn.{part}_proj.bias": Stored(("attn.c_attn.bias",), rows) for part, rows in _PARTS.items()},
    "self_attn.o_proj.weight": Stored(("attn.c_proj.weight",), _turned),
    "self_attn.o_proj.bias": "attn.c_proj",
    "mlp.up_proj.weight": Stored(("mlp.c_fc.weight",), _turned),
    "mlp.up_proj.bias": "mlp.c_fc",
    "mlp.down_proj.weight": Stored(("mlp.c_proj.weight",), _turned),
    "mlp.down_proj.bias": "mlp.c_proj",
}
_TOP = {"model.embed_tokens": "wte", "model.embed_positions": "wpe", "model.norm": "ln_f", "lm_head": "lm_head"}
FAMILY = Family("gpt2", _read, "h.{}.", _TENSORS, _TOP, prefixes=("transformer.", ""))
