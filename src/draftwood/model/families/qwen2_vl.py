"""Qwen2-VL and Qwen2.5-VL: Qwen2 whose heads turn by time, height and width where there are images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config import ModelConfig
from ..reading import hf_rope_parameters, integer
from ..rope import require, shown
from ..spec import ImageSpec
from .base import Family, PlainChoices, plain
from .qwen2 import upper_windows

_IMAGE_TOKEN = 151_655
_SECTIONS = (16, 24, 24)


def _read(config: Mapping[str, Any], family: str) -> ModelConfig:
    rope = {key: value for key, value in hf_rope_parameters(config).items() if key not in ("type", "mrope_section")}
    sections = hf_rope_parameters(config).get("mrope_section") or _SECTIONS
    require(isinstance(sections, list | tuple), f"its mrope_section is {shown(sections)} where a list is needed")
    rope["rope_type"] = "default" if rope["rope_type"] == "mrope" else rope["rope_type"]
    stated = {**config, "rope_scaling": None, "rope_parameters": rope}
    decoder = plain(stated, family, PlainChoices(qkv_bias=True), upper_windows(config))
    token = integer(config, "image_token_id", _IMAGE_TOKEN)
    require(0 <= token < decoder.vocab_size, f"its image token is {token}, which is not in the vocabulary")
    return replace(decoder, rope=replace(decoder.rope, sections=tuple(sections)), images=ImageSpec(token))


FAMILY = Family("qwen2_vl", lambda config: _read(config, "qwen2_vl"), within="text_config")
NEXT = Family("qwen2_5_vl", lambda config: _read(config, "qwen2_5_vl"), within="text_config")
