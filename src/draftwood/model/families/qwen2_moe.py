"""Qwen2-MoE (Qwen1.5-MoE, Qwen2-57B-A14B): experts, and one shared by all tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config import ModelConfig
from ..reading import integer
from ..rope import require, shown
from ..spec import ExpertsSpec, LayerSpec, MlpSpec
from .base import Family, PlainChoices, plain, with_layers_changed
from .in_gguf import GgufForm, has_experts
from .mixtral import expert_tensors
from .qwen2 import upper_windows

DEFAULTS = {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408}


def _read(config: Mapping[str, Any]) -> ModelConfig:
    config = {**DEFAULTS, "shared_expert_intermediate_size": 5632, **config}
    choices = PlainChoices(qkv_bias=bool(config.get("qkv_bias", True)), experts=True)
    decoder = plain(config, "qwen2_moe", choices, upper_windows(config))
    shared = MlpSpec(integer(config, "shared_expert_intermediate_size"), decoder.activation)
    return with_experts(config, decoder, shared)


def with_experts(config: Mapping[str, Any], decoder: ModelConfig, shared: MlpSpec | None) -> ModelConfig:
    """Experts in the layers that have some: the last of every `decoder_sparse_step`, but those of `mlp_only_layers`."""
    expert = MlpSpec(integer(config, "moe_intermediate_size"), decoder.activation)
    normalised = bool(config.get("norm_topk_prob", False))
    mlp = ExpertsSpec(
        integer(config, "num_experts"), integer(config, "num_experts_per_tok"), expert, normalised, shared=shared
    )  # fmt: skip
    step, without = integer(config, "decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    require(step > 0, f"its decoder_sparse_step is {step}, which must be positive")
    require(isinstance(without, list | tuple), f"its mlp_only_layers are {shown(without)} where a list is needed")

    def change(i: int, layer: LayerSpec) -> LayerSpec:
        return replace(layer, mlp=mlp) if (i + 1) % step == 0 and i not in without else layer

    return with_layers_changed(decoder, change)


def experts_in_gguf(own: Mapping[str, Any]) -> dict[str, Any]:
    """How many experts, and how large."""
    return {
        "num_experts": integer(own, "expert_count"),
        "num_experts_per_tok": integer(own, "expert_used_count"),
        "moe_intermediate_size": integer(own, "expert_feed_forward_length"),
    }


def _entries(own: Mapping[str, Any]) -> dict[str, Any]:
    shared = integer(own, "expert_shared_feed_forward_length")
    return experts_in_gguf(own) | {"norm_topk_prob": False, "shared_expert_intermediate_size": shared}


TENSORS = {
    **expert_tensors({part: f"mlp.experts.*.{part}_proj" for part in ("gate", "up", "down")}),
    "mlp.router": "mlp.gate",
}
_SHARED = {f"mlp.shared.{part}_proj": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")}
FAMILY = Family(
    "qwen2_moe", _read, tensors={**TENSORS, **_SHARED, "mlp.shared_gate": "mlp.shared_expert_gate"},
    gguf=GgufForm("qwen2moe", _entries, fits=has_experts),
)  # fmt: skip
