"""gpt-oss: sinks in attention, every other layer slides, experts with biases, stored as 4-bit floats (MXFP4)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..blocks import Blocks
from ..config import ModelConfig
from ..reading import every_nth_full, integer, layer_count, number
from ..rope import require
from ..spec import CLAMPED, MLP_NORM, ExpertsSpec, LayerSpec, MlpSpec
from .base import Change, Family, PlainChoices, Spelling, Stored, plain, with_layers_changed
from .in_gguf import GgufForm, has_experts

DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "sliding_window": 128,
    "max_position_embeddings": 131_072,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "rope_theta": 150_000.0,
    "attention_bias": True,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _read(config: Mapping[str, Any]) -> ModelConfig:
    config = {**DEFAULTS, **config}
    if not config.get("rope_scaling") and not config.get("rope_parameters"):
        config["rope_parameters"] = _YARN
    for name, known in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        require(number(config, name, known) == known, f"its {name} is not {known}")
    rope = config.get("rope_scaling")
    if isinstance(rope, Mapping):  # GGUF files do not say it, and there is no model of the family that differs
        config["rope_scaling"] = {"truncate": False, **rope}
    windows = every_nth_full(config, layer_count(config, "num_hidden_layers"), 2)
    biases = bool(config.get("attention_bias"))
    decoder = plain(config, "gpt_oss", PlainChoices(64, biases, biases, experts=True), windows)
    # Positions beyond the stated ones are never trained: yarn's factor is in them already.
    decoder = replace(decoder, max_positions=integer(config, "max_position_embeddings"))
    expert = MlpSpec(decoder.intermediate_size, CLAMPED, bias=True)
    count, top_k = integer(config, "num_local_experts"), integer(config, "num_experts_per_tok")
    mlp = ExpertsSpec(count, top_k, expert, router_bias=True)

    def change(i: int, layer: LayerSpec) -> LayerSpec:
        return replace(layer, mlp=mlp, attention=replace(layer.attention, sinks=True))

    return with_layers_changed(decoder, change)


_FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # e2m1; the highest of the four bits is the sign


def dequantise_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Numbers of 4-bit floats, low nibbles first, and a power of two (biased by 127) for each 32. -> [out, in]."""
    table = torch.tensor([*_FLOAT4, *(-value for value in _FLOAT4)], dtype=torch.float32)
    codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)  # [out, groups, 32]
    exponent = scales.to(torch.int32) - 127
    return torch.ldexp(table[codes.long()], exponent[..., None]).flatten(-2).to(torch.bfloat16)


def _unpacked(rows: slice) -> Change:
    return lambda config, blocks, scales: dequantise_mxfp4(blocks[rows], scales[rows])


def _packed(rows: slice) -> Callable[..., Blocks]:
    """The same in the blocks of GGUF files: the exponent, then numbers 0 to 15 in low and 16 to 31 in high nibbles."""

    def pack(config: ModelConfig, blocks: Tensor, scales: Tensor) -> Blocks:
        blocks, scales = blocks[rows], scales[rows]
        codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)  # [out, groups, 32]
        data = torch.cat([scales[..., None], codes[..., :16] | codes[..., 16:] << 4], -1).flatten(1)
        return Blocks("MXFP4", data.numpy(), 32 * blocks.shape[1])

    return pack


def _columns(columns: slice) -> Change:
    return lambda config, weight: weight[:, columns].t()


def _entries(entries: slice) -> Change:
    return lambda config, bias: bias[entries]


_ALL, _EVEN, _ODD = slice(None), slice(0, None, 2), slice(1, None, 2)  # gates and ups lie in turn
_FUSED = {"gate": ("gate_up_proj", _EVEN), "up": ("gate_up_proj", _ODD), "down": ("down_proj", _ALL)}


def _expert(name: str, rows: slice) -> tuple[Spelling, ...]:
    packed = (f"mlp.experts.{name}_blocks", f"mlp.experts.{name}_scales")
    return (
        Stored(packed, _unpacked(rows), of_expert=True, blocks=_packed(rows)),
        Stored((f"mlp.experts.{name}",), _columns(rows), of_expert=True),
    )


_TENSORS: dict[str, Spelling | tuple[Spelling, ...]] = {
    **{f"mlp.experts.*.{part}_proj.weight": _expert(name, rows) for part, (name, rows) in _FUSED.items()},
    **{
        f"mlp.experts.*.{part}_proj.bias": Stored((f"mlp.experts.{name}_bias",), _entries(rows), of_expert=True)
        for part, (name, rows) in _FUSED.items()
    },
    "self_attn.sinks.weight": Stored(("self_attn.sinks",), _entries(_ALL)),
}


def _in_gguf(own: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "intermediate_size": integer(own, "expert_feed_forward_length"),
        "num_local_experts": integer(own, "expert_count"),
        "num_experts_per_tok": integer(own, "expert_used_count"),
    }


FAMILY = Family(
    "gpt_oss", _read, tensors=_TENSORS, reads_quantised="mxfp4",
    gguf=GgufForm("gpt-oss", _in_gguf, tensors={MLP_NORM: "post_attention_norm"}, fits=has_experts),
)  # fmt: skip
