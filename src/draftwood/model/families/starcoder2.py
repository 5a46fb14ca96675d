"""StarCoder2: layer norms, biases everywhere, an MLP without a gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import ModelConfig
from ..reading import layer_count, optional_integer
from .base import Family, PlainChoices, layer_normed, plain, plain_mlp, renamed
from .in_gguf import GgufForm

DEFAULTS = {"norm_epsilon": 1e-5, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True}
_TENSORS = {"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}


def _read(config: Mapping[str, Any]) -> ModelConfig:
    config = renamed({**DEFAULTS, **config}, {"norm_epsilon": "rms_norm_eps"})
    biases = bool(config.get("use_bias", True))
    windows = (optional_integer(config, "sliding_window"),) * layer_count(config, "num_hidden_layers")
    decoder = plain(config, "starcoder2", PlainChoices(None, biases, biases, biases), windows)
    return plain_mlp(layer_normed(decoder))


FAMILY = Family("starcoder2", _read, tensors=_TENSORS, gguf=GgufForm("starcoder2"))
