"""Falcon-H1: attention and a Mamba-2 mixer side by side in every layer, multipliers everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config import ModelConfig
from ..mixer_spec import Gating, Mamba2Spec
from ..reading import number, optional_integer
from ..rope import require, shown
from ..spec import AttentionSpec, LayerSpec, MlpSpec, StreamSpec
from .bamba import TENSORS
from .base import Family, PlainChoices, plain, with_layers_changed
from .mamba2 import HYBRID, mamba2_mixer

DEFAULTS = {**HYBRID, "mamba_d_ssm": 1024, "num_key_value_heads": 8, "rms_norm_eps": 1e-5}


def _read(config: Mapping[str, Any]) -> ModelConfig:
    config = {**DEFAULTS, **config}
    biases, inner = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    decoder = plain(config, "falcon_h1", PlainChoices(None, biases, biases, inner))
    mixer = _mixer(config)
    gate, down = _multipliers(config, "mlp_multipliers", 2)

    def change(i: int, layer: LayerSpec) -> LayerSpec:
        assert layer.attention is not None
        mlp = MlpSpec(decoder.intermediate_size, decoder.activation, True, inner, gate, down)
        return replace(layer, attention=_attention(config, layer.attention), mlp=mlp, recurrent=mixer)

    stream = StreamSpec(
        embedding_scale=number(config, "embedding_multiplier", 1.0),
        logit_scale=number(config, "lm_head_multiplier", 1.0),
    )
    return with_layers_changed(decoder, change, stream)


def _attention(config: Mapping[str, Any], attention: AttentionSpec) -> AttentionSpec:
    """Multipliers of what queries and keys read, and of keys, are one of scores."""
    read, keys = number(config, "attention_in_multiplier", 1.0), number(config, "key_multiplier", 1.0)
    require(read == 1.0 or not attention.qkv_bias, f"its attention_in_multiplier is {read}, and it has biases")
    added = read * number(config, "attention_out_multiplier", 1.0)
    return replace(attention, scale=attention.scale * keys * read**2, output_scale=added)


def _mixer(config: Mapping[str, Any]) -> Mamba2Spec:
    mixer = mamba2_mixer(config, optional_integer(config, "mamba_d_ssm"))
    read = number(config, "ssm_in_multiplier", 1.0)
    require(read == 1.0 or not mixer.bias, f"its ssm_in_multiplier is {read}, and it has biases")
    normed = Gating.AFTER_NORM if config.get("mamba_norm_before_gate", True) else Gating.BEFORE_NORM
    return replace(
        mixer,
        output_bias=bool(config.get("projectors_bias")),
        gating=normed if config.get("mamba_rms_norm") else Gating.PLAIN,
        input_scales=tuple(read * scale for scale in _multipliers(config, "ssm_multipliers", 5)),
        output_scale=number(config, "ssm_out_multiplier", 1.0),
    )


def _multipliers(config: Mapping[str, Any], name: str, count: int) -> tuple[float, ...]:
    given = config.get(name) or [1.0] * count
    listed = isinstance(given, list | tuple) and len(given) == count
    require(listed, f"its {name} are {shown(given)} where a list of {count} numbers is needed")
    return tuple(number({name: value}, name, None) for value in given)


FAMILY = Family("falcon_h1", _read, tensors=TENSORS, top={"model.norm": "model.final_layernorm"})
