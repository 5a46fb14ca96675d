"""Mixtral: Mistral with experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..config import ModelConfig
from ..reading import integer, layer_count, optional_integer
from ..spec import ExpertsSpec, LayerSpec, MlpSpec
from .base import Family, PlainChoices, Spelling, Stored, lower_half, plain, upper_half, with_layers_changed
from .in_gguf import GgufForm, has_experts

DEFAULTS = {"rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0, "num_local_experts": 8, "num_experts_per_tok": 2}


def _read(config: Mapping[str, Any]) -> ModelConfig:
    config = {**DEFAULTS, **config}
    windows = (optional_integer(config, "sliding_window"),) * layer_count(config, "num_hidden_layers")
    decoder = plain(config, "mixtral", PlainChoices(experts=True), windows)
    expert = MlpSpec(decoder.intermediate_size, decoder.activation)
    mlp = ExpertsSpec(integer(config, "num_local_experts"), integer(config, "num_experts_per_tok"), expert)

    def change(i: int, layer: LayerSpec) -> LayerSpec:
        return replace(layer, mlp=mlp)

    return with_layers_changed(decoder, change)


def _as_it_is(config: ModelConfig, tensor: Tensor) -> Tensor:
    return tensor


def expert_tensors(apart: Mapping[str, str]) -> dict[str, Spelling | tuple[Spelling, ...]]:
    """Where experts lie: each part apart, as checkpoints have them, or all in one, as transformers 5 writes them."""
    fused = {"gate": ("gate_up_proj", upper_half), "up": ("gate_up_proj", lower_half), "down": ("down_proj", _as_it_is)}
    return {
        f"mlp.experts.*.{part}_proj.weight": (
            apart[part],
            Stored((f"mlp.experts.{name}",), change, of_expert=True),
        )
        for part, (name, change) in fused.items()
    }


def _entries(own: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_local_experts": integer(own, "expert_count"),
        "num_experts_per_tok": integer(own, "expert_used_count"),
    }


_APART = {part: f"block_sparse_moe.experts.*.{name}" for part, name in (("gate", "w1"), ("up", "w3"), ("down", "w2"))}
_TENSORS = {**expert_tensors(_APART), "mlp.router": ("block_sparse_moe.gate", "mlp.gate")}
FAMILY = Family(
    "mixtral", _read, tensors=_TENSORS, gguf=GgufForm("llama", _entries, interleaved=True, fits=has_experts)
)
