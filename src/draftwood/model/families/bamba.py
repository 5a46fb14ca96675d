"""Bamba: Mamba-2 mixers in most layers, attention that turns half of each head in some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..config import ModelConfig
from ..mixer_spec import RecurrentSpec
from ..rope import require, shown
from ..spec import MLP_NORM, LayerSpec
from .base import Family, PlainChoices, plain, with_layers_changed
from .mamba2 import HYBRID, mamba2_mixer, mamba2_tensors

DEFAULTS = {**HYBRID, "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "partial_rotary_factor": 0.5}
_RECURRENT, _ATTENTION = ("mamba", "linear_attention", "conv"), ("attention", "full_attention")


def _read(config: Mapping[str, Any]) -> ModelConfig:
    config = {**DEFAULTS, **config}
    biases, inner = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    decoder = plain(config, "bamba", PlainChoices(None, biases, biases, inner, partial_rotary=True))
    chosen = config.get("attn_layer_indices") or ()
    require(isinstance(chosen, list | tuple), f"its attn_layer_indices are {shown(chosen)} where a list is needed")
    return with_mixers(decoder, [i not in chosen for i in range(decoder.num_layers)], mamba2_mixer(config))


def with_mixers(decoder: ModelConfig, recurrent: Sequence[bool], mixer: RecurrentSpec) -> ModelConfig:
    """The same model with a mixer in attention's place where a layer is recurrent."""

    def change(i: int, layer: LayerSpec) -> LayerSpec:
        return replace(layer, attention=None, recurrent=mixer) if recurrent[i] else layer

    return with_layers_changed(decoder, change)


def recurrent_layers(config: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Which layers are recurrent, by `layer_types`."""
    kinds = config.get("layer_types") or config.get("layers_block_type")
    require(
        isinstance(kinds, list | tuple) and len(kinds) == num_layers,
        f"its layer_types are {shown(kinds)} where a list of {num_layers} is needed",
    )
    for kind in kinds or ():
        require(kind in (*_RECURRENT, *_ATTENTION), f"its layer_types hold {shown(kind)}, which is not supported")
    return [kind in _RECURRENT for kind in kinds or ()]


_MLP = {f"mlp.{part}_proj": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")}
TENSORS = {**mamba2_tensors("mamba"), **_MLP, MLP_NORM: "pre_ff_layernorm"}
FAMILY = Family("bamba", _read, tensors=TENSORS, top={"model.norm": "model.final_layernorm"})
