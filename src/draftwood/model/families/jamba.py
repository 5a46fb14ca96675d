"""Jamba: Mamba mixers with inner norms, attention that turns nothing in some layers, experts in some."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ..config import ModelConfig
from ..reading import integer
from ..rope import require
from ..spec import MLP_NORM, ExpertsSpec, LayerSpec, MlpSpec
from .base import Family, PlainChoices, plain, with_layers_changed
from .mamba import mamba_mixer, mamba_tensors
from .mamba2 import HYBRID
from .mixtral import expert_tensors

DEFAULTS = {
    **HYBRID,
    "mamba_d_state": 16,
    "rms_norm_eps": 1e-6,
    "num_key_value_heads": 8,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
}


def _read(config: Mapping[str, Any]) -> ModelConfig:
    config = {**DEFAULTS, **config}
    decoder = plain(config, "jamba", PlainChoices(experts=True))
    mixer = mamba_mixer(config, config["rms_norm_eps"], weighed=True)
    attends, chosen = _every(config, "attn"), _every(config, "expert")
    count = integer(config, "num_experts")
    expert = MlpSpec(decoder.intermediate_size, decoder.activation)
    experts = ExpertsSpec(count, min(integer(config, "num_experts_per_tok"), count), expert, normalised=False)

    def change(i: int, layer: LayerSpec) -> LayerSpec:
        layer = replace(layer, mlp=experts if count > 1 and chosen(i) else layer.mlp)
        if attends(i):
            return layer.attending(rope=None)
        return replace(layer, attention=None, recurrent=mixer)

    return with_layers_changed(decoder, change)


def _every(config: Mapping[str, Any], kind: str) -> Callable[[int], bool]:
    period, offset = integer(config, f"{kind}_layer_period"), integer(config, f"{kind}_layer_offset")
    require(0 <= offset < period, f"its {kind}_layer_offset is {offset} and its {kind}_layer_period {period}")
    return lambda i: i % period == offset


_PARTS = {part: f"feed_forward.experts.*.{part}_proj" for part in ("gate", "up", "down")}
_TENSORS = {
    **mamba_tensors("mamba"),
    **expert_tensors(_PARTS, "feed_forward"),
    "mlp.router": "feed_forward.router",
    **{f"mlp.{part}_proj": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
    MLP_NORM: "pre_ff_layernorm",
}
FAMILY = Family("jamba", _read, tensors=_TENSORS, top={"model.norm": "model.final_layernorm"})
