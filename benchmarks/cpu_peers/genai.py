"""OpenVINO GenAI on models that prepare.py made; it is fed with token ids, so it has no tokenizer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import openvino
import openvino_genai

from cpu_peers import LONGEST_NGRAM, LOOKED_UP, LOOKUP


def settings(form: str, threads: int) -> dict[str, object]:
    """Two threads and no bfloat16 behind our back. Otherwise its defaults: it may round activations if weights are."""
    exact = {"KV_CACHE_PRECISION": "f32"} if form == "float32" else {}
    return {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32", **exact}


class GenAI:
    """LLMPipeline for whole answers, the bare stateful model for single steps."""

    def __init__(self, form: str, mode: str, threads: int, folder: Path) -> None:
        self.version = f"openvino-genai {openvino_genai.__version__}"
        self._settings = settings(form, threads)
        self._folder = folder
        self._lookup = mode == LOOKUP
        options = {**self._settings, "prompt_lookup": True} if self._lookup else self._settings
        self._pipeline = openvino_genai.LLMPipeline(str(folder), "CPU", **options)

    def generate(self, prompt: Sequence[int], max_tokens: int, answer: Sequence[int]) -> Sequence[int]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = max_tokens, True, False
        if self._lookup:
            config.num_assistant_tokens, config.max_ngram_size = LOOKED_UP["openvino"], LONGEST_NGRAM
        return self._pipeline.generate(openvino.Tensor(np.array([prompt])), config).tokens[0]

    @cached_property
    def _bare(self) -> openvino.InferRequest:
        model = openvino.Core().compile_model(str(self._folder / "openvino_model.xml"), "CPU", self._settings)
        return model.create_infer_request()

    def steps(self, context: Sequence[int], rows: Sequence[int], repeats: int) -> list[float]:
        """The state cannot be rewound, so steps follow each other and have `context` behind them on average."""
        self._bare.reset_state()
        before = max(1, len(context) - len(rows) * repeats // 2)
        self._infer(context[:before], 0)
        return [self._infer(rows, before + i * len(rows)) for i in range(repeats)]

    def _infer(self, tokens: Sequence[int], before: int) -> float:
        after = before + len(tokens)
        inputs = {
            "input_ids": np.array([tokens], dtype=np.int64),
            "attention_mask": np.ones((1, after), dtype=np.int64),
            "position_ids": np.arange(before, after, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, dtype=np.int32),
        }
        start = time.perf_counter()
        self._bare.infer(inputs, share_inputs=True, share_outputs=True)
        return time.perf_counter() - start


def make(form: str, mode: str, threads: int, models: str) -> GenAI:
    return GenAI(form, mode, threads, Path(models) / f"openvino-{form}")
