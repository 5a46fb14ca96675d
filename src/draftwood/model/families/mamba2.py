"""Mamba-2: layers of nothing but a state space mixer; and how families read and name such mixers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..config import ModelConfig
from ..mixer_spec import Gating, Mamba2Spec, RecurrentSpec
from ..reading import integer, number
from ..rope import require, shown
from ..spec import LayerSpec
from .base import Family, PlainChoices, Spelling, Stored, plain, renamed, with_layers_changed

DEFAULTS = {
    "layer_norm_epsilon": 1e-5,
    "num_heads": 128,
    "head_dim": 64,
    "state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "expand": 2,
    "use_conv_bias": True,
    "use_bias": False,
}
USUAL = {  # as hybrids spell what Mamba-2 spells otherwise
    "num_heads": "mamba_n_heads",
    "head_dim": "mamba_d_head",
    "state_size": "mamba_d_state",
    "n_groups": "mamba_n_groups",
    "conv_kernel": "mamba_d_conv",
    "expand": "mamba_expand",
    "use_conv_bias": "mamba_conv_bias",
    "use_bias": "mamba_proj_bias",
    "layer_norm_epsilon": "rms_norm_eps",
}
HYBRID = {  # what hybrids' files leave out
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
_HEAD = 64
_LONGEST = 1 << 17  # tokens: nothing in the model ends there, but the token table of a running sequence does


def _read(config: Mapping[str, Any]) -> ModelConfig:
    config = renamed({**DEFAULTS, **config}, USUAL)
    return mixers_alone(config, "mamba2", mamba2_mixer(config))


def mixers_alone(config: Mapping[str, Any], family: str, mixer: RecurrentSpec) -> ModelConfig:
    """A model whose layers are mixers and nothing else."""
    inner = integer(config, "mamba_expand") * integer(config, "hidden_size")
    sizes = {"intermediate_size": inner, "max_position_embeddings": _LONGEST, **_usual_heads(config)}
    decoder = plain({**config, **sizes}, family, PlainChoices())

    def change(i: int, layer: LayerSpec) -> LayerSpec:
        return replace(layer, attention=None, mlp=None, recurrent=mixer)

    return with_layers_changed(decoder, change)


def _usual_heads(config: Mapping[str, Any]) -> dict[str, int]:
    """Of layers with attention, which the model has none of, but networks trained for it have."""
    hidden = integer(config, "hidden_size")
    heads, head_dim = max(hidden // _HEAD, 1), min(_HEAD, max(hidden // 2 * 2, 2))
    return {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": head_dim}


def mamba2_mixer(config: Mapping[str, Any], width: int | None = None) -> Mamba2Spec:
    """The mixer of a configuration with hybrids' spelling; its `width` where that is not `mamba_expand` times."""
    heads = integer(config, "mamba_n_heads")
    width = width or integer(config, "mamba_expand") * integer(config, "hidden_size")
    auto = config["mamba_d_head"] in ("auto", None)
    head_dim = width // max(heads, 1) if auto else integer(config, "mamba_d_head")
    require(heads * head_dim == width, f"{heads} heads of {head_dim} numbers do not make up {width}")
    active = config.get("hidden_act", "silu")
    require(active in ("silu", "swish"), f"its mixers' activation is {shown(active)}, which is not supported")
    least, most = _limits(config.get("time_step_limit"))
    biased = bool(config["mamba_proj_bias"])
    return Mamba2Spec(
        heads=heads,
        head_dim=head_dim,
        groups=integer(config, "mamba_n_groups"),
        state=integer(config, "mamba_d_state"),
        kernel=integer(config, "mamba_d_conv"),
        conv_bias=bool(config["mamba_conv_bias"]),
        bias=biased,
        output_bias=biased,
        least_step=least,
        most_step=most,
        gating=Gating.BEFORE_NORM,
        eps=number(config, "rms_norm_eps", 1e-6),
    )


def _limits(given: object) -> tuple[float, float]:
    """The least and the longest step; JSON has no infinity, so that it is a table or a word in files."""
    if given is None:
        return 0.0, math.inf
    require(isinstance(given, list | tuple) and len(given) == 2, f"its time_step_limit is {shown(given)}")
    least, most = (_limit(value) for value in given)  # pyright: ignore[reportGeneralTypeIssues]
    require(0 <= least < most, f"its time_step_limit is {shown(given)}")
    return least, most


def _limit(value: object) -> float:
    if isinstance(value, Mapping):
        value = value.get("__float__")
    if value in ("Infinity", "inf", math.inf):
        return math.inf
    return number({"time_step_limit": value}, "time_step_limit", None)


def as_it_is(config: ModelConfig, tensor: Tensor) -> Tensor:
    """A tensor under another name."""
    return tensor


def _by_channels(config: ModelConfig, weight: Tensor) -> Tensor:
    """[C, 1, K], as convolutions are stored, or [C, K]."""
    return weight.flatten(1)


def convolution(module: str) -> dict[str, Spelling]:
    """Where a mixer's convolution lies."""
    return {
        "mixer.conv.weight": Stored((f"{module}.weight",), _by_channels),
        "mixer.conv.bias": Stored((f"{module}.bias",), as_it_is),
    }


def mamba2_tensors(module: str) -> dict[str, Spelling]:
    """Where a Mamba-2 mixer lies."""
    return {
        "mixer.in_proj": f"{module}.in_proj",
        "mixer.out_proj": f"{module}.out_proj",
        "mixer.gain": f"{module}.norm",
        "mixer.decay.weight": Stored((f"{module}.A_log",), as_it_is),
        "mixer.step.bias": Stored((f"{module}.dt_bias",), as_it_is),
        "mixer.skip.weight": Stored((f"{module}.D",), as_it_is),
        **convolution(f"{module}.conv1d"),
    }


FAMILY = Family(
    "mamba2",
    _read,
    layer="backbone.layers.{}.",
    tensors={**mamba2_tensors("mixer"), "input_layernorm": "norm"},
    top={"model.embed_tokens": ("backbone.embeddings", "backbone.embedding"), "model.norm": "backbone.norm_f"},
)
