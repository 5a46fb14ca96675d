"""Mamba and Falcon-Mamba: layers of nothing but a selective scan; and how families read and name such mixers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import ModelConfig
from ..mixer_spec import MambaSpec
from ..reading import integer, number
from ..rope import require, shown
from .base import Family, Spelling, Stored, renamed
from .mamba2 import HYBRID, USUAL, as_it_is, convolution, mixers_alone

DEFAULTS = {
    "layer_norm_epsilon": 1e-5,
    "state_size": 16,
    "conv_kernel": 4,
    "expand": 2,
    "use_conv_bias": True,
    "use_bias": False,
    "tie_word_embeddings": True,
}
_RANKED = 16  # hidden sizes to a number of Δ's rank, where a file leaves it to the reader


def _read(config: Mapping[str, Any]) -> ModelConfig:
    config = renamed({**HYBRID, **DEFAULTS, **config}, USUAL)
    return mixers_alone(config, str(config["model_type"]), mamba_mixer(config, config.get("mixer_rms_eps")))


def _read_falcon(config: Mapping[str, Any]) -> ModelConfig:
    return _read({"mixer_rms_eps": 1e-6, **config})


def mamba_mixer(config: Mapping[str, Any], norm_eps: object, *, weighed: bool = False) -> MambaSpec:
    """The mixer of a configuration with hybrids' spelling; whether its inner norms have weights."""
    active = config.get("hidden_act", "silu")
    require(active in ("silu", "swish"), f"its mixers' activation is {shown(active)}, which is not supported")
    hidden, rank = integer(config, "hidden_size"), config.get("mamba_dt_rank", config.get("time_step_rank", "auto"))
    return MambaSpec(
        width=integer(config, "mamba_expand") * hidden,
        state=integer(config, "mamba_d_state"),
        kernel=integer(config, "mamba_d_conv"),
        rank=-(-hidden // _RANKED) if rank == "auto" else integer({"mamba_dt_rank": rank}, "mamba_dt_rank"),
        conv_bias=bool(config["mamba_conv_bias"]),
        bias=bool(config["mamba_proj_bias"]),
        norm_eps=None if norm_eps is None else number({"mixer_rms_eps": norm_eps}, "mixer_rms_eps", None),
        normed_by_weights=weighed,
    )


def mamba_tensors(module: str) -> dict[str, Spelling]:
    """Where a Mamba mixer lies."""
    norms = {"step": "dt", "key": "b", "query": "c"}
    return {
        "mixer.in_proj": f"{module}.in_proj",
        "mixer.out_proj": f"{module}.out_proj",
        "mixer.x_proj": f"{module}.x_proj",
        "mixer.step_proj": f"{module}.dt_proj",
        "mixer.step.bias": f"{module}.dt_proj",
        "mixer.decay.weight": Stored((f"{module}.A_log",), as_it_is),
        "mixer.skip.weight": Stored((f"{module}.D",), as_it_is),
        **{f"mixer.{ours}_norm": f"{module}.{theirs}_layernorm" for ours, theirs in norms.items()},
        **convolution(f"{module}.conv1d"),
    }


_LAYER = {**mamba_tensors("mixer"), "input_layernorm": "norm"}
_TOP = {"model.embed_tokens": ("backbone.embeddings", "backbone.embedding"), "model.norm": "backbone.norm_f"}
FAMILY = Family("mamba", _read, layer="backbone.layers.{}.", tensors=_LAYER, top=_TOP)
FALCON = Family("falcon_mamba", _read_falcon, layer="backbone.layers.{}.", tensors=_LAYER, top=_TOP)
