"""llama.cpp through llama-cpp-python, on GGUF files that prepare.py made."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from cpu_peers import LONGEST_NGRAM, LOOKED_UP, LOOKUP

CONTEXT = 2048


def lookup_options() -> dict[str, object]:
    """Prompt lookup; without `logits_all` its table of logits ends after 512 tokens."""
    lookup = LlamaPromptLookupDecoding(max_ngram_size=LONGEST_NGRAM, num_pred_tokens=LOOKED_UP["llamacpp"])
    return {"draft_model": lookup, "logits_all": True}


class LlamaCpp:
    """One GGUF file."""

    def __init__(self, mode: str, threads: int, path: Path) -> None:
        self.version = f"llama-cpp-python {llama_cpp.__version__}"
        self._options = {
            "model_path": str(path),
            "n_ctx": CONTEXT,
            "n_threads": threads,
            "n_threads_batch": threads,
            "verbose": False,
        }
        self._llama = llama_cpp.Llama(**self._options, **(lookup_options() if mode == LOOKUP else {}))

    def generate(self, prompt: Sequence[int], max_tokens: int, answer: Sequence[int]) -> Sequence[int]:
        """`generate` never stops by itself, end of text or not."""
        return list(itertools.islice(self._llama.generate(list(prompt), temp=0.0), max_tokens))

    @cached_property
    def _all_logits(self) -> llama_cpp.Llama:
        """As a verifier would have it; for plain answers it would only cost time."""
        return llama_cpp.Llama(**self._options, logits_all=True)

    def steps(self, context: Sequence[int], rows: Sequence[int], repeats: int) -> list[float]:
        llama, times = self._all_logits, []
        llama.reset()
        llama.eval(list(context))
        for _ in range(repeats):
            llama.n_tokens = len(context)  # eval forgets what lies behind it
            start = time.perf_counter()
            llama.eval(list(rows))
            times.append(time.perf_counter() - start)
        return times


def make(form: str, mode: str, threads: int, models: str) -> LlamaCpp:
    return LlamaCpp(mode, threads, Path(models) / f"{form}.gguf")
