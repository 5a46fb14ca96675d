"""LLaVA: a plain decoder that is given embeddings of images where its prompt has image tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config import ModelConfig
from ..reading import integer
from ..rope import require, shown
from ..spec import ImageSpec
from . import llama, mistral, qwen2
from .base import Family

# What published files leave out of their text_config, because transformers knows it.
_LLAMA = {
    "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}  # fmt: skip
_TEXTS = {"llama": (llama.FAMILY, _LLAMA), "mistral": (mistral.FAMILY, {}), "qwen2": (qwen2.FAMILY, {})}
_IMAGE_TOKEN = 32_000


def _read(config: Mapping[str, Any]) -> ModelConfig:
    kind = config.get("model_type", "llama")
    require(kind in _TEXTS, f"its text model is {shown(kind)}, and those of LLaVA are {', '.join(_TEXTS)} here")
    family, defaults = _TEXTS[str(kind)]
    token = integer(config, "image_token_id", integer(config, "image_token_index", _IMAGE_TOKEN))
    decoder = family.read({**defaults, **config})
    require(0 <= token < decoder.vocab_size, f"its image token is {token}, which is not in the vocabulary")
    return replace(decoder, family="llava", images=ImageSpec(token))


FAMILY = Family("llava", _read, within="text_config")
