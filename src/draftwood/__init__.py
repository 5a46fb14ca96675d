"""Lossless speculative decoding for large language models."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftwood.config import EngineConfig
    from draftwood.engine.llm import LLM
    from draftwood.errors import DraftwoodError
    from draftwood.request import Completion, Event, FinishReason, Result, SamplingParams, Slo, SpeculationStats

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "Completion",
    "DraftwoodError",
    "EngineConfig",
    "Event",
    "FinishReason",
    "Result",
    "SamplingParams",
    "Slo",
    "SpeculationStats",
    "__version__",
]

# Loaded when first asked for: torch takes seconds to import, and `draftwood --help` needs none of it.
_HOMES = {
    "LLM": "draftwood.engine.llm",
    "EngineConfig": "draftwood.config",
    "DraftwoodError": "draftwood.errors",
} | dict.fromkeys(
    ("Completion", "Event", "FinishReason", "Result", "SamplingParams", "Slo", "SpeculationStats"),
    "draftwood.request",
)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'draftwood' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
