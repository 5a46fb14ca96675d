"""Draftwood."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

import draftwood
from cpu_peers import LOOKUP, RIGHT
from draftwood import LLM, EngineConfig, SamplingParams
from draftwood.drafters.scripted import ScriptedDrafter
from draftwood.engine.controller import FixedBudget
from draftwood.engine.worker import ComputeThread
from draftwood.protocols import Span

RIGHT_CHAIN = 3
STEP_SEQUENCE = -1  # no request's number


class Ours:
    """One weight format with no drafter, the n-gram drafter, or one that knows the answer."""

    def __init__(self, form: str, mode: str, threads: int) -> None:
        self.version = f"draftwood {draftwood.__version__}"
        self._answer: Sequence[int] = ()
        self._asked = 0
        self.writing: float | None = None
        scripted = ScriptedDrafter(self._ahead, RIGHT_CHAIN, chain=True)
        drafter = {LOOKUP: "ngram", RIGHT: scripted}.get(mode, "none")
        config = EngineConfig(weights=form, threads=threads, cache_tokens=2048)  # one conversation's worth
        controller = FixedBudget(RIGHT_CHAIN) if mode == RIGHT else None
        self._llm = LLM("smollm2", drafter=drafter, config=config, controller=controller)
        if mode == LOOKUP:
            self._llm.calibrate()  # not a table of another day, or of another load

    def _ahead(self, tokens: Sequence[int]) -> list[Sequence[int]]:
        at = len(tokens) - self._asked
        return [self._answer[at : at + RIGHT_CHAIN]]

    def generate(self, prompt: Sequence[int], max_tokens: int, answer: Sequence[int]) -> Sequence[int]:
        self._answer, self._asked = answer, len(prompt)
        result = self._llm.generate([prompt], SamplingParams(max_tokens=max_tokens, ignore_eos=True))[0]
        later = result.stats.seconds - result.stats.first_token_seconds
        self.writing = (max_tokens - 1) / later if max_tokens > 1 else None
        return result.token_ids

    def steps(self, context: Sequence[int], rows: Sequence[int], repeats: int) -> list[float]:
        return ComputeThread.shared().call(lambda: self._steps([*context, *rows], len(context), repeats))

    def _steps(self, tokens: list[int], before: int, repeats: int) -> list[float]:
        """A step leaves nothing behind but keys that the next one overwrites."""
        target = self._llm.engine.target
        tables = target.cache.tables
        tables.open(STEP_SEQUENCE, tokens)
        tables.reserve(STEP_SEQUENCE, len(tokens))
        with torch.inference_mode():
            target.forward(target.cache.stage_text([Span(STEP_SEQUENCE, tokens, 0, before)]))
            wanted = torch.arange(len(tokens) - before)
            batch = target.cache.stage_text([Span(STEP_SEQUENCE, tokens, before, len(tokens))], wanted)
            times = [_timed(lambda: target.forward(batch)) for _ in range(repeats)]
        tables.close(STEP_SEQUENCE)
        return times


def _timed(run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def make(form: str, mode: str, threads: int, models: str) -> Ours:
    return Ours(form, mode, threads)
