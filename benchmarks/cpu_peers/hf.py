"""transformers, float32, its default attention and cache."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import transformers
from transformers import DynamicCache

from cpu_peers import LOOKED_UP, LOOKUP
from draftwood.model.checkpoint import open_checkpoint
from peers import transformers_model


class Transformers:
    """`generate`, plain or with prompt lookup."""

    def __init__(self, mode: str, threads: int) -> None:
        self.version = f"transformers {transformers.__version__}"
        torch.set_num_threads(threads)
        self._model = transformers_model(open_checkpoint("smollm2"))
        self._model.generation_config.eos_token_id = None  # end of text is a token like any other here
        self._options = {"prompt_lookup_num_tokens": LOOKED_UP["transformers"]} if mode == LOOKUP else {}

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int], max_tokens: int, answer: Sequence[int]) -> Sequence[int]:
        ids = torch.tensor([prompt])
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
            **self._options,
        )
        return out[0, len(prompt) :].tolist()

    @torch.inference_mode()
    def steps(self, context: Sequence[int], rows: Sequence[int], repeats: int) -> list[float]:
        cache, ids, times = DynamicCache(), torch.tensor([rows]), []
        self._model(torch.tensor([context]), past_key_values=cache, logits_to_keep=1)
        for _ in range(repeats):
            start = time.perf_counter()
            self._model(ids, past_key_values=cache)
            times.append(time.perf_counter() - start)
            cache.crop(-len(rows))
        return times


def make(form: str, mode: str, threads: int, models: str) -> Transformers:
    return Transformers(mode, threads)
