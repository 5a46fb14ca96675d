"""Traffic: requests that arrive and end at different times, through several engines in turn.

python benchmarks/traffic.py MODEL [--contender NAME=DRAFTER[@TREE][!CONTROLLER] …] [--data DIR] [--at 1,8,32]
python benchmarks/traffic.py --cpu [--data DIR]

Closed loops keep so many requests (`--at`) under way; `--rates` are Poisson arrivals, as shares of what the first
contender answers a second in its closed loop. End of text is honoured, answers have limits of 32 to 256 tokens, no
prompt comes twice in a pass. Contenders take turns pass by pass, in one process, every other pass in reverse order; the
first is what others are compared with. Those with the same drafter and tree share an engine, and no cached prefixes.
CONTROLLER is one of `draftwood parts`, or a number of draft nodes for every step. --data: a folder of .jsonl files
with {task, turns}; without it, prompts that come with the benchmark.

--cpu: `auto` against `off` and fixed sizes, SmolLM2 with its n-gram drafter and its block head, w8a8 and float32, 1, 2
and 8 at a time. Takes about 20 minutes on two cores; --passes and --requests make it shorter.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from common import report
from cpu_prompts import encoded
from draftwood import LLM, EngineConfig, SamplingParams
from draftwood.calibration import default_controller
from draftwood.engine.worker import ComputeThread
from draftwood.protocols import Controller
from draftwood.request import Result
from gpu_prompts import CHAT8, CODE8, MATHS8, QUESTIONS, SUBJECTS

Row = tuple[str, float | None, str, float | None, str]


@dataclass(frozen=True)
class Contender:
    """Drafter, tree and controller by name."""

    name: str
    drafter: str
    tree: str | None = None
    controller: str = "auto"

    @classmethod
    def named(cls, text: str) -> Contender:
        name, _, rest = text.partition("=")
        rest, _, controller = rest.partition("!")
        drafter, _, tree = rest.partition("@")
        if not drafter:
            raise SystemExit(f"A contender is NAME=DRAFTER[@TREE][!CONTROLLER], not {text}.")
        controller = f"fixed:nodes={controller}" if controller.isdigit() else controller or "auto"
        return cls(name, drafter, tree or None, controller)


@dataclass(frozen=True)
class Pass:
    """What one pass of requests came to."""

    rate: float  # tokens a second, from the first request to the last answer
    first: tuple[float, float]  # seconds to the first token, median and 95th percentile
    each: tuple[float, float]  # seconds for each token behind it, likewise
    per_step: float  # tokens of a sequence's step
    requests: float  # answered a second

    @classmethod
    def of(cls, results: Sequence[Result], seconds: float) -> Pass:
        failed = [result.completions[0].error for result in results if result.finish_reason == "error"]
        if failed:
            raise RuntimeError(failed[0])
        stats = [result.stats for result in results]
        tokens = sum(own.num_tokens for own in stats)
        each = [(s.seconds - s.first_token_seconds) / (s.num_tokens - 1) for s in stats if s.num_tokens > 1]
        firsts = [own.first_token_seconds for own in stats]
        steps = sum(own.steps for own in stats)
        return cls(
            tokens / seconds, _middle_and_late(firsts), _middle_and_late(each), tokens / steps, len(stats) / seconds
        )


def _middle_and_late(values: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(values)
    return statistics.median(ordered), ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]


def prompts_of(folder: Path | None, tasks: Sequence[str]) -> list[Sequence[str]]:
    """Prompts, task by task."""
    if folder is None:
        lists = [CODE8, MATHS8, CHAT8, [q.format(s) for q in QUESTIONS for s in SUBJECTS]]
    else:
        by_task: dict[str, list[str]] = {}
        for path in sorted(folder.glob("*.jsonl")):
            for line in path.read_text().splitlines():
                row = json.loads(line)
                by_task.setdefault(f"{path.stem}:{row['task']}", []).append(row["turns"][0])
        lists = [texts for task, texts in by_task.items() if not tasks or any(own in task for own in tasks)]
    if not lists:
        raise SystemExit("There are no prompts.")
    return lists


@dataclass(frozen=True)
class Traffic:
    """The requests of a pass."""

    prompts: Sequence[Sequence[str]]  # of each task
    requests: int
    tokens: tuple[int, int]  # least and most tokens of an answer
    temperature: float

    def asked(self, llm: LLM, number: int, whose: str) -> list[tuple[list[int], SamplingParams]]:
        """The requests of pass `number`: other numbers in the first page, so that no two passes share a prefix; as
        many of each task in every pass. `whose`: contenders share no prefixes either."""
        draw = random.Random(number)
        found = []
        for i in range(self.requests):
            text = draw.choice(self.prompts[i % len(self.prompts)])
            (ids,) = encoded(llm.tokenizer, [text], self.requests * number + i)
            limit = draw.randint(*self.tokens)
            found.append((ids, SamplingParams(max_tokens=limit, temperature=self.temperature, cache_salt=whose)))
        return found


async def closed_loop(llm: LLM, asked: Sequence[tuple[list[int], SamplingParams]], at: int) -> Pass:
    """So many requests are under way at any time."""
    left, results = iter(asked), []

    async def client() -> None:
        for prompt, params in left:
            results.append(await llm.agenerate(prompt, params))

    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(at)))
    return Pass.of(results, time.perf_counter() - start)


async def poisson(llm: LLM, asked: Sequence[tuple[list[int], SamplingParams]], rate: float) -> Pass:
    """Requests arrive at random, `rate` a second."""
    draw, start = random.Random(len(asked)), time.perf_counter()
    tasks, due = [], start
    for prompt, params in asked:
        due += draw.expovariate(rate)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(llm.agenerate(prompt, params)))
    results = await asyncio.gather(*tasks)
    return Pass.of(results, time.perf_counter() - start)


class Field:
    """All contenders, loaded."""

    def __init__(self, given: argparse.Namespace, contenders: Sequence[Contender], weights: str) -> None:
        self.contenders, self.given, self.weights = contenders, given, weights
        self.engines: dict[tuple[str, str | None], LLM] = {}
        self.controllers: dict[str, Controller] = {}
        for own in contenders:
            llm = self._engine(own)
            self.controllers[own.name] = ComputeThread.shared().call(
                partial(default_controller, llm.engine.target, llm.engine.drafter, policy=own.controller)
            )

    def _engine(self, own: Contender) -> LLM:
        key = own.drafter, own.tree
        if key not in self.engines:
            given, start = self.given, time.perf_counter()
            config = EngineConfig(
                device=given.device,
                weights=self.weights,
                max_running=given.max_running,
                cache_tokens=given.cache_tokens,
            )
            if given.capture_seconds is not None:
                config = replace(config, capture_seconds=given.capture_seconds)
            self.engines[key] = LLM(given.model, drafter=own.drafter, tree=own.tree, config=config)
            print(f"  [{own.drafter}: loaded in {time.perf_counter() - start:.1f} s]", flush=True)
        return self.engines[key]

    def ready(self, own: Contender) -> LLM:
        """Its engine, with its controller."""
        llm = self._engine(own)
        ComputeThread.shared().call(partial(setattr, llm.engine, "controller", self.controllers[own.name]))
        return llm

    def closed(self, traffic: Traffic, at: int) -> dict[str, list[Pass]]:
        """Passes of every contender, in turn."""
        found: dict[str, list[Pass]] = {own.name: [] for own in self.contenders}
        for number in range(self.given.passes):
            for own in self.contenders if number % 2 == 0 else reversed(self.contenders):
                llm = self.ready(own)
                passed = asyncio.run(closed_loop(llm, traffic.asked(llm, 1000 * at + number, own.name), at))
                found[own.name].append(passed)
                ready = len(llm.engine.runner.ready)
                told = f"{at:4d} at a time  {own.name:24s} pass {number + 1}: {_shown(passed)}, {ready} captured"
                print(told, flush=True)
        return found

    def arriving(self, traffic: Traffic, rate: float) -> dict[str, Pass]:
        """One pass of every contender."""
        found = {}
        for own in self.contenders:
            llm = self.ready(own)
            found[own.name] = asyncio.run(poisson(llm, traffic.asked(llm, int(1e6 * rate), own.name), rate))
            print(f"{rate:6.2f} a second  {own.name:24s} {_shown(found[own.name])}", flush=True)
        return found

    def close(self) -> None:
        for llm in self.engines.values():
            llm.close()


def _shown(own: Pass) -> str:
    first, each = (f"{1e3 * a:6.1f} / {1e3 * b:6.1f} ms" for a, b in (own.first, own.each))
    return f"{own.rate:8.1f} tok/s, first token {first}, each {each}, {own.per_step:.2f} tok/step"


def rows_of_closed(found: Mapping[str, Sequence[Pass]], at: int) -> Iterator[Row]:
    names = list(found)
    rates = {name: statistics.median(own.rate for own in passes[-2:]) for name, passes in found.items()}
    for name in names:
        passes = found[name]
        yield f"{name}, {at} at a time, tok/s", rates[name], "", None, ""
        yield f"{name}, {at} at a time, / {names[0]}", rates[name] / rates[names[0]], "x", None, ""
        yield f"{name}, {at} at a time, tokens a step", passes[-1].per_step, "", None, ""
        if len(passes) > 2:
            yield f"{name}, {at} at a time, first pass / third", passes[0].rate / passes[2].rate, "x", 0.95, ">="


def measured(given: argparse.Namespace) -> Iterator[Row]:
    """Everything that was asked for."""
    field = Field(given, [Contender.named(text) for text in given.contender], given.weights)
    prompts = prompts_of(given.data, given.tasks)
    saturation = None
    for at in given.at:
        traffic = Traffic(prompts, given.requests or max(24, 5 * at), given.tokens, given.temperature)
        found = field.closed(traffic, at)
        saturation = next(iter(found.values()))[-1].requests
        yield from rows_of_closed(found, at)
    for share in given.rates:
        traffic = Traffic(prompts, given.requests or 100, given.tokens, given.temperature)
        for name, own in field.arriving(traffic, share * (saturation or 1.0)).items():
            yield (
                f"{name}, arrivals at {share:.0%}, time for each token, 95th percentile",
                1e3 * own.each[1],
                "ms",
                None,
                "",
            )
            yield f"{name}, arrivals at {share:.0%}, first token, 95th percentile", 1e3 * own.first[1], "ms", None, ""
    field.close()


# What `auto` has to be as good as, on two cores.
ON_A_CPU = {
    "ngram": (None, ("off", "fixed:nodes=1", "fixed:nodes=2", "fixed:nodes=4")),
    "block": ("chain:depth=6", ("off", "fixed:nodes=1", "fixed:nodes=2", "fixed:nodes=3", "fixed:nodes=6")),
}


def of_a_cpu(given: argparse.Namespace) -> Iterator[Row]:
    """`auto` against all fixed settings: the median of the passes but the first, in which it learns."""
    prompts = prompts_of(given.data, given.tasks)
    for weights in ("w8a8", "float32"):
        for drafter, (tree, others) in ON_A_CPU.items():
            field = Field(given, [Contender(own, drafter, tree, own) for own in ("auto", *others)], weights)
            for at in (1, 2, 8):
                traffic = Traffic(prompts, given.requests or max(6, 2 * at), given.tokens, given.temperature)
                yield from compared(field.closed(traffic, at), f"{weights}, {drafter}, {at} at a time")
            field.close()


def compared(found: Mapping[str, Sequence[Pass]], where: str) -> Iterator[Row]:
    """Ratios pass by pass, so that a machine that gets slower does not look like a setting that is."""
    rates = {name: [own.rate for own in passes[1:] or passes] for name, passes in found.items()}
    medians = {name: statistics.median(each) for name, each in rates.items()}
    best = max((name for name in medians if name != "auto"), key=lambda name: medians[name])
    for name, rate in medians.items():
        yield f"{where}: {name}, tok/s", rate, "", None, ""
    for name, least in (("off", 0.99), (best, 0.97)):
        pairs = zip(rates["auto"], rates[name], strict=True)
        ratio = statistics.median(own / other for own, other in pairs)
        yield (
            f"{where}: auto / {'off' if name == 'off' and least == 0.99 else f'best ({name})'}",
            ratio,
            "x",
            least,
            ">=",
        )


def arguments(texts: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--contender", action="append", default=[], help="such as head=eagle3@chain:depth=3")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--tasks", type=lambda text: text.split(","), default=(), help="such as code,maths")
    parser.add_argument("--at", type=lambda text: [int(own) for own in text.split(",")], default=[1, 8])
    parser.add_argument("--rates", type=lambda text: [float(own) for own in text.split(",")], default=[])
    parser.add_argument("--requests", type=int, default=0, help="of a pass; 0: five for each that is under way")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--tokens", type=lambda text: tuple(map(int, text.split("-"))), default=(32, 256))
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--weights", default="stored")
    parser.add_argument("--max-running", type=int, default=0)
    parser.add_argument("--cache-tokens", type=int, default=0)
    parser.add_argument("--capture-seconds", type=float)
    parser.add_argument("--cpu", action="store_true", help="auto against off and fixed sizes on a CPU, see above")
    given = parser.parse_args(texts)
    given.contender = given.contender or ["plain=none", "ngram=ngram"]
    if given.cpu:
        given.device = "cpu"
    return given


def main(texts: Sequence[str] | None = None) -> int:
    given = arguments(texts)
    rows = list(of_a_cpu(given) if given.cpu else measured(given))
    return 0 if report(rows, "traffic", {"model": str(given.model)}) else 1


if __name__ == "__main__":
    sys.exit(main())
