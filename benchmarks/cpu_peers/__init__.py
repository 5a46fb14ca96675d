"""Engines under test on a CPU, each in a process of its own. Here: what such a process must be able to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

PLAIN, LOOKUP, RIGHT = "plain", "lookup", "right"
LOOKED_UP = {"transformers": 3, "llamacpp": 4, "openvino": 4}  # tokens a peer looks up at once
LONGEST_NGRAM = 3


class Contender(Protocol):
    """One engine with one model, in one mode."""

    version: str

    def generate(self, prompt: Sequence[int], max_tokens: int, answer: Sequence[int]) -> Sequence[int]:
        """Exactly `max_tokens` greedy tokens; `answer` is what a plain run said, for drafts that are always right."""
        ...

    def steps(self, context: Sequence[int], rows: Sequence[int], repeats: int) -> list[float]:
        """Seconds of forwards over `rows` behind `context`, logits of every row included."""
        ...


Maker = Callable[[str, str, int, str], Contender]  # format, mode, threads, folder of prepared models
