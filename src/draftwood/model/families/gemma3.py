"""Gemma 3, its text models and the text of those that see images.

Five layers slide and turn fast for each that sees all and turns slowly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config import ModelConfig
from ..reading import every_nth_full, hf_rope, integer, layer_count, number, optional_number
from ..rope import RopeConfig, require
from ..spec import ImageSpec, LayerSpec, StreamSpec, Wiring
from .base import Family, PlainChoices, plain, with_layers_changed
from .gemma2 import TENSORS, score_divisor
from .in_gguf import GgufForm

DEFAULTS = {
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "max_position_embeddings": 131_072,
}
_LOCAL_THETA, _GLOBAL_THETA = 10_000.0, 1_000_000.0
_PATTERN = 6  # the last of so many layers sees all


def _read(config: Mapping[str, Any]) -> ModelConfig:
    require(not config.get("use_bidirectional_attention"), "it looks ahead (use_bidirectional_attention)")
    config = {**DEFAULTS, **config, "hidden_act": config.get("hidden_activation", "gelu_pytorch_tanh")}
    local, everywhere = _ropes(config)
    biases = bool(config.get("attention_bias"))
    pattern = integer(config, "sliding_window_pattern", _PATTERN)
    windows = every_nth_full(config, layer_count(config, "num_hidden_layers"), pattern)
    decoder = plain({**config, **everywhere}, "gemma3_text", PlainChoices(256, biases, biases, qk_norm=True), windows)
    rope = hf_rope({**config, **local}, decoder.max_positions)
    scale = number(config, "query_pre_attn_scalar", None) ** -0.5
    capped = optional_number(config, "final_logit_softcapping")
    return _of(decoder, rope, scale, optional_number(config, "attn_logit_softcapping"), capped)


def _ropes(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Rotary embedding of layers that slide and of those that see all, as entries of a usual configuration."""
    nested = config.get("rope_parameters") or {}
    if "full_attention" in nested or "sliding_attention" in nested:
        local = {"rope_theta": _LOCAL_THETA, **(nested.get("sliding_attention") or {})}
        everywhere = {"rope_theta": _GLOBAL_THETA, **(nested.get("full_attention") or {})}
    else:
        local = {"rope_theta": config.get("rope_local_base_freq") or _LOCAL_THETA}
        everywhere = {"rope_theta": config.get("rope_theta") or _GLOBAL_THETA, **(config.get("rope_scaling") or {})}
    return _rope_entries(local), _rope_entries(everywhere)


def _rope_entries(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"rope_scaling": None, "rope_theta": None, "rope_parameters": parameters}


def _of(
    decoder: ModelConfig, local: RopeConfig, scale: float, softcap: float | None, logit_softcap: float | None
) -> ModelConfig:
    """What makes a plain decoder, with norms of queries and keys and with windows, a Gemma 3."""

    def change(i: int, layer: LayerSpec) -> LayerSpec:
        turned = layer if layer.window is None else layer.attending(rope=local)
        return replace(turned.attending(scale=scale, softcap=softcap), wiring=Wiring.SANDWICH)

    stream = StreamSpec(embedding_scale=decoder.hidden_size**0.5, logit_softcap=logit_softcap)
    return with_layers_changed(decoder, change, stream)


def _entries(own: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": score_divisor(own, _LAYERS_OF_27B),
        "rope_local_base_freq": number(own, "rope.freq_base_swa", _LOCAL_THETA),
        "final_logit_softcapping": optional_number(own, "final_logit_softcapping"),
        "rms_norm_eps": number(own, "attention.layer_norm_rms_epsilon", None),
    }


_LAYERS_OF_27B = 62

_FRAME, _PIECE, _PIECES = (255_999, 256_000), 262_144, 256


def _read_with_images(config: Mapping[str, Any]) -> ModelConfig:
    """The same behind a vision tower: an image is always as many pieces, all of which see each other."""
    decoder = replace(_read(config), family="gemma3")
    if config.get("vision_config") is None:
        return decoder
    names, defaults = ("image_token_index", "boi_token_index", "eoi_token_index"), (_PIECE, *_FRAME)
    piece, begin, end = (integer(config, name, default) for name, default in zip(names, defaults, strict=True))
    inside = all(0 <= token < decoder.vocab_size for token in (piece, begin, end))
    require(inside, f"its tokens of images are {piece}, {begin} and {end}, and its vocabulary has {decoder.vocab_size}")
    windows = [layer.window for layer in decoder.layer_specs if layer.window is not None]
    pieces = integer(config, "mm_tokens_per_image", _PIECES)
    require(all(window >= pieces for window in windows), f"an image has {pieces} pieces, more than its windows hold")
    return replace(decoder, images=ImageSpec(piece, (begin, end), sees_ahead=True))


WITH_IMAGES = Family(
    "gemma3",
    _read_with_images,
    tensors=TENSORS,
    norm_offset=1.0,
    within="text_config",
)
FAMILY = Family(
    "gemma3_text", _read, tensors=TENSORS, norm_offset=1.0, gguf=GgufForm("gemma3", _entries)
)  # fmt: skip
