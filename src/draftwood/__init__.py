"""Lossless speculative decoding for large language models."""

from draftwood.config import EngineConfig
from draftwood.engine.llm import LLM
from draftwood.errors import DraftwoodError
from draftwood.request import Completion, Event, FinishReason, Result, SamplingParams, SpeculationStats

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
    "SpeculationStats",
    "__version__",
]
