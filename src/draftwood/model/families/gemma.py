"""Gemma, the first: norms hold what is added to one, embeddings are scaled by √hidden."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config import ModelConfig
from ..spec import StreamSpec
from .base import Family, PlainChoices, plain
from .in_gguf import GgufForm

DEFAULTS = {"tie_word_embeddings": True, "rms_norm_eps": 1e-6}


def _read(config: Mapping[str, Any]) -> ModelConfig:
    # The first files say "gelu" and mean its approximation, which was the only one there was.
    config = {**DEFAULTS, **config, "hidden_act": config.get("hidden_activation") or "gelu_pytorch_tanh"}
    biases = bool(config.get("attention_bias"))
    decoder = plain(config, "gemma", PlainChoices(head_dim=256, qkv_bias=biases, output_bias=biases))
    return replace(decoder, stream=StreamSpec(embedding_scale=decoder.hidden_size**0.5))


FAMILY = Family("gemma", _read, norm_offset=1.0, gguf=GgufForm("gemma"))
