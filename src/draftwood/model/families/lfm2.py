"""LFM2: short gated convolutions in most layers, attention with normed queries and keys in some."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import ModelConfig
from ..mixer_spec import ShortConvSpec
from ..reading import integer, layer_count, number
from ..rope import require, shown
from ..spec import ATTENTION_NORM, MLP_NORM
from .bamba import recurrent_layers, with_mixers
from .base import Family, PlainChoices, plain, renamed
from .mamba2 import convolution

DEFAULTS = {
    "norm_eps": 1e-5,
    "num_key_value_heads": 8,
    "conv_L_cache": 3,
    "conv_bias": False,
    "block_auto_adjust_ff_dim": True,
    "block_multiple_of": 256,
    "rope_theta": 1_000_000.0,
}


def _read(config: Mapping[str, Any]) -> ModelConfig:
    config = renamed({**DEFAULTS, **config}, {"norm_eps": "rms_norm_eps", "block_ff_dim": "intermediate_size"})
    config["tie_word_embeddings"] = config.get("tie_embedding", config.get("tie_word_embeddings", True))
    config["intermediate_size"] = _width(config)
    num_layers = layer_count(config, "num_hidden_layers")
    config.setdefault("layer_types", _kinds(config, num_layers))
    decoder = plain(config, "lfm2", PlainChoices(qk_norm=True))
    mixer = ShortConvSpec(decoder.hidden_size, integer(config, "conv_L_cache"), bool(config["conv_bias"]))
    return with_mixers(decoder, recurrent_layers(config, num_layers), mixer)


def _kinds(config: Mapping[str, Any], num_layers: int) -> list[str]:
    chosen = config.get("full_attn_idxs")
    require(chosen is None or isinstance(chosen, list | tuple), f"its full_attn_idxs are {shown(chosen)}")
    return ["full_attention" if chosen is None or i in chosen else "conv" for i in range(num_layers)]


def _width(config: Mapping[str, Any]) -> int:
    """Of the MLP: two thirds of what is stated, rounded up, unless the file says otherwise."""
    width = integer(config, "intermediate_size")
    if not config["block_auto_adjust_ff_dim"]:
        return width
    width = int(number(config, "block_ffn_dim_multiplier", 1.0) * (2 * width // 3))
    multiple = integer(config, "block_multiple_of")
    require(multiple > 0, f"its block_multiple_of is {multiple}, which must be positive")
    return -(-width // multiple) * multiple


_TENSORS = {
    ATTENTION_NORM: "operator_norm",
    MLP_NORM: "ffn_norm",
    "self_attn.q_norm": "self_attn.q_layernorm",
    "self_attn.k_norm": "self_attn.k_layernorm",
    "self_attn.o_proj": "self_attn.out_proj",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "mixer.in_proj": "conv.in_proj",
    "mixer.out_proj": "conv.out_proj",
    **convolution("conv.conv"),
}
FAMILY = Family("lfm2", _read, tensors=_TENSORS, top={"model.norm": "model.embedding_norm"})
