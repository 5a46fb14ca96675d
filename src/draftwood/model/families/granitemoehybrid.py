"""Granite 4 hybrid: Granite's multipliers, Mamba-2 mixers, attention in some layers, an MLP beside experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config import ModelConfig
from ..reading import integer
from ..rope import require, shown
from ..spec import ExpertsSpec, LayerSpec, MlpSpec
from .bamba import recurrent_layers, with_mixers
from .base import Family, PlainChoices, Spelling, Stored, lower_half, plain, upper_half, with_layers_changed
from .granite import with_multipliers
from .mamba2 import HYBRID, as_it_is, mamba2_mixer, mamba2_tensors

DEFAULTS = {**HYBRID, "num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 1024}


def _read(config: Mapping[str, Any]) -> ModelConfig:
    config = {**DEFAULTS, **config}
    biases = bool(config.get("attention_bias"))
    decoder = plain(config, "granitemoehybrid", PlainChoices(None, biases, biases, experts=True))
    turning = config.get("position_embedding_type")
    require(turning in (None, "rope", "nope"), f"its position_embedding_type is {shown(turning)}")
    config.setdefault("layer_types", config.get("layers_block_type") or ["linear_attention"] * decoder.num_layers)
    mlp = _mlp(config, decoder)
    decoder = replace(decoder, intermediate_size=mlp.width) if isinstance(mlp, MlpSpec) else decoder

    def change(i: int, layer: LayerSpec) -> LayerSpec:
        turned = layer if turning == "rope" else layer.attending(rope=None)
        return replace(turned, mlp=mlp)

    scaled = with_multipliers(config, with_layers_changed(decoder, change))
    recurrent = recurrent_layers(config, decoder.num_layers)  # in some of the family's models none is
    return with_mixers(scaled, recurrent, mamba2_mixer(config)) if any(recurrent) else scaled


def _mlp(config: Mapping[str, Any], decoder: ModelConfig) -> MlpSpec | ExpertsSpec:
    """One that all tokens run through; beside it experts, if there are any."""
    shared = MlpSpec(integer(config, "shared_intermediate_size"), decoder.activation)
    count = integer(config, "num_local_experts")
    if not count:
        return shared
    expert = MlpSpec(decoder.intermediate_size, decoder.activation)
    return ExpertsSpec(count, integer(config, "num_experts_per_tok"), expert, shared=shared, shared_gate=False)


def _fused(ours: str, source: str, of_expert: bool = False) -> dict[str, Spelling]:
    """Gate and up lie one below the other."""
    first, second = f"{source}.input_linear.weight", f"{source}.output_linear.weight"
    return {
        f"{ours}.gate_proj.weight": Stored((first,), upper_half, of_expert),
        f"{ours}.up_proj.weight": Stored((first,), lower_half, of_expert),
        f"{ours}.down_proj.weight": Stored((second,), as_it_is, of_expert),
    }


_TENSORS = {
    **mamba2_tensors("mamba"),
    **_fused("mlp", "shared_mlp"),
    **_fused("mlp.shared", "shared_mlp"),
    **_fused("mlp.experts.*", "block_sparse_moe", of_expert=True),
    "mlp.router": "block_sparse_moe.router.layer",
}
FAMILY = Family("granitemoehybrid", _read, tensors=_TENSORS)
