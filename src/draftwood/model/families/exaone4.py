"""EXAONE 4: norms behind attention and MLP and of queries and keys; layers that see all turn nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config import ModelConfig
from ..reading import every_nth_full, layer_count
from ..rope import require, shown
from ..spec import LayerSpec, Wiring
from .base import Family, PlainChoices, plain, with_layers_changed
from .in_gguf import GgufForm
from .olmo2 import TENSORS

DEFAULTS = {"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4}


def _read(config: Mapping[str, Any]) -> ModelConfig:
    config = {**DEFAULTS, **config}
    num_layers, slides = layer_count(config, "num_hidden_layers"), config["sliding_window"] is not None
    windows = every_nth_full(config, num_layers, _pattern(config)) if slides else None
    decoder = plain(config, "exaone4", PlainChoices(qk_norm=True), windows)

    def change(i: int, layer: LayerSpec) -> LayerSpec:
        attention = layer.attention
        rope = None if slides and attention.window is None else attention.rope
        return replace(layer, wiring=Wiring.POST, attention=replace(attention, rope=rope))

    return with_layers_changed(decoder, change)


def _pattern(config: Mapping[str, Any]) -> int:
    """Every how many layers one sees all; published files write "LLLG"."""
    given = config["sliding_window_pattern"]
    pattern = len(given) if isinstance(given, str) else given
    require(isinstance(pattern, int), f"its sliding_window_pattern is {shown(given)}, which is no number of layers")
    return pattern


def _entries(own: Mapping[str, Any]) -> dict[str, Any]:
    slides = own.get("attention.sliding_window_pattern")
    if not isinstance(slides, list):
        return {}
    return {"layer_types": ["sliding_attention" if slide else "full_attention" for slide in slides]}


FAMILY = Family("exaone4", _read, tensors=TENSORS, gguf=GgufForm("exaone4", _entries))
