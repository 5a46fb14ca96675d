"""OPT: learned positions, layer norms, an MLP without a gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..config import ModelConfig
from ..rope import require
from ..spec import ATTENTION_NORM, MLP_NORM, LayerSpec
from .base import Family, PlainChoices, Stored, layer_normed, plain, plain_mlp, renamed, with_layers_changed

DEFAULTS = {"activation_function": "relu", "tie_word_embeddings": True, "rms_norm_eps": 1e-5}
_USUAL = {"ffn_dim": "intermediate_size", "activation_function": "hidden_act"}
_UNUSED_POSITIONS = 2  # the table's first rows, which no token has


def _read(config: Mapping[str, Any]) -> ModelConfig:
    config = renamed({**DEFAULTS, **config}, _USUAL)
    require(
        bool(config.get("do_layer_norm_before", True)) and not config.get("_remove_final_layer_norm"),
        "it is the OPT whose norms stand behind (do_layer_norm_before false, as in opt-350m); use another size",
    )
    width = config.get("word_embed_proj_dim")
    require(width in (None, config.get("hidden_size")), f"its embeddings are projected (word_embed_proj_dim {width})")
    require(bool(config.get("layer_norm_elementwise_affine", True)), "its norms have no weights")
    biases = bool(config.get("enable_bias", True))
    decoder = plain_mlp(layer_normed(plain(config, "opt", PlainChoices(None, biases, biases, biases))))
    return learned_positions(decoder)


def learned_positions(decoder: ModelConfig) -> ModelConfig:
    """The same model with positions added to embeddings, and nothing turned."""

    def change(i: int, layer: LayerSpec) -> LayerSpec:
        return layer.attending(rope=None)

    return with_layers_changed(decoder, change, replace(decoder.stream, learned_positions=True))


def _used_positions(config: ModelConfig, table: Tensor) -> Tensor:
    return table[_UNUSED_POSITIONS:]


_TENSORS = {
    ATTENTION_NORM: "self_attn_layer_norm",
    MLP_NORM: "final_layer_norm",
    "self_attn.o_proj": "self_attn.out_proj",
    "mlp.up_proj": "fc1",
    "mlp.down_proj": "fc2",
}
_TOP = {
    "model.embed_tokens": "decoder.embed_tokens",
    "model.embed_positions.weight": Stored(("decoder.embed_positions.weight",), _used_positions),
    "model.norm": "decoder.final_layer_norm",
    "lm_head": "lm_head",
}
FAMILY = Family("opt", _read, "decoder.layers.{}.", _TENSORS, _TOP, prefixes=("model.", ""))
