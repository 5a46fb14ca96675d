"""Nemotron-H: each layer is a Mamba-2 mixer, attention that turns nothing, or an MLP of relu² without a gate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config import ModelConfig
from ..reading import integer, number
from ..rope import require, shown
from ..spec import ATTENTION_NORM, MLP_NORM, LayerSpec
from .base import Family, PlainChoices, plain, plain_mlp, renamed, with_layers_changed
from .mamba2 import HYBRID, mamba2_mixer, mamba2_tensors

DEFAULTS = {
    **HYBRID,
    "layer_norm_epsilon": 1e-5,
    "mamba_head_dim": 64,
    "mamba_num_heads": 128,
    "ssm_state_size": 128,
    "n_groups": 8,
    "use_bias": False,
    "use_conv_bias": True,
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "num_key_value_heads": 8,
    "time_step_min": 0.001,
}
_USUAL = {
    "layer_norm_epsilon": "rms_norm_eps",
    "mamba_num_heads": "mamba_n_heads",
    "mamba_head_dim": "mamba_d_head",
    "ssm_state_size": "mamba_d_state",
    "n_groups": "mamba_n_groups",
    "conv_kernel": "mamba_d_conv",
    "use_conv_bias": "mamba_conv_bias",
    "use_bias": "mamba_proj_bias",
}
_MIXER, _ATTENTION, _MLP = ("M", "mamba", "linear_attention"), ("*", "attention", "full_attention"), ("-", "mlp")


def _read(config: Mapping[str, Any]) -> ModelConfig:
    config = renamed({**DEFAULTS, **config}, _USUAL)
    require(config.get("sliding_window") is None, "its attention slides (sliding_window)")
    kinds = _kinds(config)
    usual = {"num_hidden_layers": len(kinds), "hidden_act": config["mlp_hidden_act"]}
    choices = PlainChoices(128, mlp_bias=bool(config.get("mlp_bias")))
    decoder = plain_mlp(plain({**config, **usual}, "nemotron_h", choices))
    heads, head_dim = integer(config, "mamba_n_heads"), integer(config, "mamba_d_head")
    mixer = mamba2_mixer({**config, "hidden_act": config["mamba_hidden_act"]}, heads * head_dim)
    mixer = replace(mixer, least_step=number(config, "time_step_min", None), most_step=math.inf)

    def change(i: int, layer: LayerSpec) -> LayerSpec:
        if kinds[i] in _MIXER:
            return replace(layer, attention=None, mlp=None, recurrent=mixer)
        if kinds[i] in _ATTENTION:
            return replace(layer.attending(rope=None), mlp=None)
        return replace(layer, attention=None)

    return with_layers_changed(decoder, change)


def _kinds(config: Mapping[str, Any]) -> list[str]:
    """What each layer is, from a list or from a word with a letter for each."""
    given = config.get("layers_block_type") or config.get("layer_types") or config.get("hybrid_override_pattern")
    require(isinstance(given, list | tuple | str), f"its layers_block_type is {shown(given)} where a list is needed")
    kinds = [str(kind) for kind in given or ()]
    for kind in kinds:
        require(kind in (*_MIXER, *_ATTENTION, *_MLP), f"its layers_block_type holds {shown(kind)}: not supported")
    return kinds


_TENSORS = {
    **mamba2_tensors("mixer"),
    **{f"self_attn.{part}_proj": f"mixer.{part}_proj" for part in "qkvo"},
    **{f"mlp.{part}_proj": f"mixer.{part}_proj" for part in ("up", "down")},
    ATTENTION_NORM: "norm",
    MLP_NORM: "norm",
}
FAMILY = Family(
    "nemotron_h",
    _read,
    layer="layers.{}.",
    tensors=_TENSORS,
    top={"model.embed_tokens": "embeddings", "model.norm": "norm_f"},
    prefixes=("backbone.", "model.", ""),
)
