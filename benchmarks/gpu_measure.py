"""What the GPU benchmark measures with: engines that are loaded once, one workload, and what its steps cost."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch

from draftwood import LLM, EngineConfig, SamplingParams
from draftwood.drafters.scripted import ScriptedDrafter
from draftwood.drafting import Drafter
from draftwood.engine.controller import FixedBudget
from draftwood.engine.memory import token_bytes, weight_bytes
from draftwood.engine.worker import ComputeThread
from draftwood.growers.fixed import MAX_NODES
from draftwood.model.checkpoint import open_checkpoint
from draftwood.model.config import ModelConfig
from draftwood.request import Result
from gpu_prompts import CHAT8, chats

BANDWIDTH = 4.32e12  # bytes a second that one H200 reads, measured by summing 2 GiB
KEPT = 2  # engines in memory at a time
WARM_UPS = 4  # at most
CAPTURE_SECONDS = 2.0  # between two of them
KEY = 16  # tokens within which all prompts of a run differ

Row = tuple[str, float | None, str, float | None, str]


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    batches: tuple[int, ...] = (1, 8, 32, 128, 256)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    tokens: int = 256
    warm_up: int = 256  # tokens: as many as are timed, so that every graph has been captured
    rounds: int = 3
    depth: int = 12  # of draft chains
    strict_prompts: int = 64
    strict_tokens: int = 96
    context: int = 32768
    trees: tuple[int, ...] = (1, 16, 64, 128)  # rows of a step, the root among them

    @property
    def max_running(self) -> int:
        return max(*self.batches, self.strict_prompts)


QUICK = Sizes((1, 4), (0.0, 1.0), 24, 8, 1, 4, 4, 12, 600, (1, 4, 8))


@dataclass(frozen=True)
class Setup:
    """Everything an engine is told when it is made."""

    drafter: str = "none"  # a name, or one of `Lab.scripts`
    tree: str | None = None
    law: str = "auto"
    strict: bool = False
    weights: str = "stored"
    cache_tokens: int | None = None
    max_running: int | None = None
    whole: bool = False  # always all of the tree

    def __str__(self) -> str:
        parts = [self.drafter.split("/")[0], self.tree or "", "strict" if self.strict else ""]
        return " ".join(filter(None, [*parts, self.weights if self.weights != "stored" else ""]))


@dataclass(frozen=True)
class Figures:
    """One contender at one batch and temperature; medians over rounds."""

    tokens_per_second: float  # from the submission to the last token
    step_seconds: float  # after the first tokens
    tokens_per_step: float  # of one sequence
    roofline: float  # the target's weights and keys, read at the memory's speed, as a share of the step


@dataclass
class Lab:
    """The models, the workload, and the engines that are loaded right now."""

    standin: Path
    small: Path
    device: str
    sizes: Sizes
    fixed: bool = False  # every drafter guesses as much as it can, whatever tables of costs say
    trained: tuple[Path, ...] = ()  # folders of drafters for the stand-in
    contenders: tuple[str, ...] = ()  # who takes part besides plain decoding; nobody named: all
    scripts: dict[str, Callable[[], Drafter]] = field(default_factory=dict)
    answers: dict[tuple[int, ...], tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    _engines: dict[Setup, LLM] = field(default_factory=dict)

    @cached_property
    def config(self) -> ModelConfig:
        """Of the target."""
        return open_checkpoint(self.standin).config

    @cached_property
    def starts(self) -> dict[tuple[int, float, int], int]:
        """Where the numbering of prompts starts for (batch, temperature, round): no prompt is ever asked twice."""
        sizes, starts, at = self.sizes, {}, 0
        for batch in sizes.batches:
            for temperature in sizes.temperatures:
                for turn in range(sizes.rounds + 1):
                    starts[batch, temperature, turn] = at
                    at += batch
        return starts

    @property
    def max_running(self) -> int:
        return self.sizes.max_running

    def open(self, setup: Setup) -> LLM:
        """The engine, loaded if it is not there; those used longest ago make room."""
        if setup in self._engines:
            self._engines[setup] = self._engines.pop(setup)
            return self._engines[setup]
        while len(self._engines) >= KEPT:
            self.close(next(iter(self._engines)))
        running = setup.max_running or self.max_running
        room = 256 + self.sizes.tokens + 16 * self.sizes.depth
        config = EngineConfig(
            device=self.device,
            strict=setup.strict,
            weights=setup.weights,
            max_running=running,
            cache_tokens=setup.cache_tokens or max(running * room, 4096),
        )
        drafter = self.scripts[setup.drafter]() if setup.drafter in self.scripts else setup.drafter
        all_of_it = FixedBudget(self.sizes.depth) if self.fixed or setup.drafter in self.scripts else None
        if setup.whole:
            all_of_it = FixedBudget(MAX_NODES)
        start = time.perf_counter()
        llm = LLM(self.standin, drafter=drafter, tree=setup.tree, law=setup.law, config=config, controller=all_of_it)
        print(f"  [{setup}: loaded in {time.perf_counter() - start:.1f} s]", flush=True)
        self._engines[setup] = llm
        return llm

    def close(self, setup: Setup) -> None:
        """Free an engine's memory."""
        self._engines.pop(setup).close()
        gc.collect()
        if torch.cuda.is_available():
            ComputeThread.shared().call(torch.cuda.empty_cache)

    def close_all(self) -> None:
        for setup in list(self._engines):
            self.close(setup)

    def prompts(self, llm: LLM, batch: int, temperature: float, turn: int) -> list[list[int]]:
        return chats(llm.tokenizer, CHAT8, batch, self.starts[batch, temperature, turn])

    def measure(self, setup: Setup, batch: int, temperature: float) -> Figures:
        """One contender."""
        llm, sizes = self.open(setup), self.sizes
        warm_up(llm, self.prompts(llm, batch, temperature, sizes.rounds), sizes.warm_up, temperature)
        found, ready = [], num_ready(llm)
        for turn in range(sizes.rounds):
            prompts = self.prompts(llm, batch, temperature, turn)
            seconds, results = ask(llm, prompts, sizes.tokens, temperature)
            found.append(self._figures(setup, seconds, results))
        if num_ready(llm) > ready:  # a tenth of a second each, and it counts
            print(f"  [{num_ready(llm) - ready} rounds had to be prepared meanwhile]", flush=True)
        return Figures(*(statistics.median(column) for column in zip(*(vars(f).values() for f in found), strict=True)))

    def learn(self, batch: int, temperature: float) -> None:
        """Keep what strict plain decoding answers to all prompts of a size, warming up included."""
        llm = self.open(Setup(strict=True))
        for turn in range(self.sizes.rounds + 1):
            prompts = self.prompts(llm, batch, temperature, turn)
            for result in ask(llm, prompts, self.sizes.tokens, temperature)[1]:
                known = result.prompt_token_ids
                self.answers[tuple(known[:KEY])] = (len(known), result.token_ids)

    def known(self) -> Drafter:
        """Knows what strict plain decoding said, and says it: to whoever is strict too, it is always right."""
        depth = self.sizes.depth

        def script(tokens: Sequence[int]) -> list[Sequence[int]]:
            length, answer = self.answers.get(tuple(tokens[:KEY]), (0, ()))
            at = len(tokens) - length
            return [answer[at : at + depth]] if answer[at : at + depth] else []

        return ScriptedDrafter(script, depth, chain=True)

    def _figures(self, setup: Setup, seconds: float, results: Sequence[Result]) -> Figures:
        tokens = sum(result.stats.num_tokens for result in results)
        step = step_seconds(results)
        own = sum(result.stats.num_tokens for result in results) / sum(result.stats.steps for result in results)
        context = statistics.mean(len(r.prompt_token_ids) + r.stats.num_tokens / 2 for r in results)
        return Figures(tokens / seconds, step, own, self.read_seconds(setup.weights, len(results) * context) / step)

    def read_seconds(self, weights: str, cached: float) -> float:
        """Time to read the target's weights and so many tokens' keys and values once, at the memory's speed."""
        config, dtype = self.config, torch.bfloat16
        embedding = config.vocab_size * config.hidden_size * dtype.itemsize  # of which a step reads a few rows
        read = weight_bytes(config, weights, dtype) - (0 if config.tied_head else embedding)
        return (read + cached * token_bytes(config, dtype)) / BANDWIDTH


def ask(
    llm: LLM, prompts: Sequence[Sequence[int]], tokens: int | Sequence[int], temperature: float
) -> tuple[float, list[Result]]:
    """Seconds for all prompts in one batch, and the answers, of so many `tokens` each."""
    lengths = [tokens] * len(prompts) if isinstance(tokens, int) else tokens
    params = [SamplingParams(max_tokens=own, temperature=temperature, ignore_eos=True, seed=1) for own in lengths]
    return ask_for(llm, prompts, params)


def ask_for(llm: LLM, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> tuple[float, list[Result]]:
    """The same with parameters for each prompt."""
    start = time.perf_counter()
    results = llm.generate(list(prompts), list(params))
    seconds = time.perf_counter() - start
    failed = [result.completions[0].error for result in results if result.finish_reason == "error"]
    if failed:
        raise RuntimeError(failed[0])
    return seconds, results


def warm_up(llm: LLM, prompts: Sequence[Sequence[int]], tokens: int | Sequence[int], temperature: float) -> None:
    """Ask until no shape is missed; what was missed is captured in between, as in an idle engine."""
    for _ in range(WARM_UPS):
        ready = num_ready(llm)
        ask(llm, prompts, tokens, temperature)
        ComputeThread.shared().call(lambda: llm.engine.prepare(CAPTURE_SECONDS))
        if num_ready(llm) == ready:
            return


def num_ready(llm: LLM) -> int:
    """Steps that have been captured."""
    return len(llm.engine.runner.ready)


def timed_on_the_device(llm: LLM) -> Callable[[], float | None]:
    """Seconds of a captured step from now on, the median, as the GPU itself takes them: without what the host does
    between. None where no steps are captured.
    """
    marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    if not llm.engine.runner.captures:
        return lambda: None

    def watched(run: Callable[[], None]) -> Callable[[], None]:
        def run_between_marks() -> None:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            marks.append((start, end))

        return run_between_marks

    def seconds() -> float:
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in marks) / 1000

    for step in llm.engine.runner.steps:
        step.runs = [watched(run) for run in step.runs]
    return seconds


def step_seconds(results: Sequence[Result]) -> float:
    """Time of a step after everybody's first token, by the sequence that took the most steps."""
    first = max(result.stats.first_token_seconds for result in results)
    last = max(result.stats.seconds for result in results)
    steps = max(result.stats.steps for result in results)
    return (last - first) / max(steps - 1, 1)
