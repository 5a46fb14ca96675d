"""A model in stages: two processes measured against one, and more stages simulated from the times of each.

python benchmarks/pipeline.py MODEL [--drafter ngram:nodes=24] [--nodes 6] [--requests 1,8] [--stages 2,4] …

Every process has one thread, as if it were a machine of its own. Answers are compared with those of one process. The
simulation is of one request whose drafts are chains: each stage takes as long as measured here for so many rows, each
guess is right with the chance that the measured answers show, and a hop takes `--link-ms`.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from common import report
from cpu_prompts import BUILT_IN
from draftwood import LLM, EngineConfig, SamplingParams
from draftwood.model.checkpoint import Checkpoint, open_checkpoint
from draftwood.model.runner import ModelRunner
from draftwood.model.stages import StageCheckpoint, StageModel
from draftwood.protocols import Span

CONTEXT = 128  # tokens before the rows that are timed
TOKENS = 20_000  # of a simulated answer
Row = tuple[str, float | None, str, float | None, str]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--drafter", default="ngram:nodes=24")
    parser.add_argument("--nodes", type=int, default=6)
    parser.add_argument("--requests", default="1,8")
    parser.add_argument("--stages", default="2,4")
    parser.add_argument("--link-ms", type=float, default=0.1)
    parser.add_argument("--tokens", type=int, default=64)
    return parser.parse_args()


@dataclass(frozen=True)
class Run:
    """What one engine gave."""

    answers: list[tuple[int, ...]]
    rate: float  # tokens a second
    tokens_per_step: float


def measure(given: argparse.Namespace, stages: int, counts: Sequence[int]) -> list[Run]:
    config = EngineConfig(pp=stages, threads=1, controller=f"fixed:nodes={given.nodes}")
    params, runs = SamplingParams(max_tokens=given.tokens, ignore_eos=True), []
    with LLM(given.model, drafter=given.drafter, config=config) as llm:
        llm.generate("Once", SamplingParams(max_tokens=4))
        for count in counts:
            prompts = [BUILT_IN[::-1][i % len(BUILT_IN)] for i in range(count)]
            since = time.perf_counter()
            results = llm.generate(prompts, params)
            seconds = time.perf_counter() - since
            tokens, steps = (sum(getattr(r.stats, name) for r in results) for name in ("num_tokens", "steps"))
            runs.append(Run([r.completions[0].token_ids for r in results], tokens / seconds, tokens / steps))
    return runs


class Line:
    """A stage whose rows come from nowhere and go nowhere."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def receive(self, rows: Tensor, source: int) -> Tensor:
        return rows.fill_(0.01)

    def post(self, rows: Tensor, to: int) -> None:
        pass

    def tell(self, tensors: Sequence[Tensor], number: int) -> None:
        pass


def stage_seconds(checkpoint: Checkpoint, stages: int, rows: int) -> list[list[float]]:
    """Of each stage, for 1 to `rows` rows."""
    found = []
    for rank in range(stages):
        part = StageCheckpoint(checkpoint, Line(rank, stages))  # type: ignore[arg-type]
        runner = ModelRunner.load(part, torch.float32, torch.device("cpu"), 8, 64)
        runner.cache.tables.open(0, [1] * CONTEXT)
        runner.cache.tables.reserve(0, CONTEXT + rows)
        times = []
        for count in range(1, rows + 1):
            batch = runner.cache.stage_text([Span(0, [1] * (CONTEXT + count), CONTEXT, CONTEXT + count)])
            batch = replace(batch, logit_rows=torch.arange(count))
            times.append(statistics.median(timed(runner, batch) for _ in range(9)))
        found.append(times)
    return found


def timed(runner: ModelRunner, batch: object) -> float:
    model = runner.model
    assert isinstance(model, StageModel)
    since = time.perf_counter()
    with torch.inference_mode():
        model.begin(batch, runner.cache.memory, frozenset())  # type: ignore[arg-type]
    return time.perf_counter() - since


def chance(tokens_per_step: float, nodes: int) -> float:
    """Of a guess to be right, where chains of `nodes` give so many tokens a step."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        gain = sum(middle**i for i in range(nodes + 1))
        low, high = (middle, high) if gain < tokens_per_step else (low, middle)
    return low


class Stages:
    """When each stage is free."""

    def __init__(self, seconds: Sequence[Sequence[float]], link: float) -> None:
        self._seconds, self._link = seconds, link
        self._free = [0.0] * len(seconds)

    def launch(self, now: float, rows: int) -> tuple[float, float]:
        """When the first stage is through, and when the first stage knows the outcome."""
        for stage, times in enumerate(self._seconds):
            now = self._free[stage] = max(now, self._free[stage]) + times[rows - 1]
            now += self._link
        return self._free[0], now


def ahead(seconds: Sequence[Sequence[float]], link: float, alpha: float, nodes: int) -> float:
    """Tokens a second of one request with trees in flight, as the engine launches them."""
    rng, stages, now, tokens = random.Random(1), Stages(seconds, link), 0.0, 0
    deepest_guess = nodes * len(seconds)
    while tokens < TOKENS:
        right = 0  # guesses one behind the other, from here
        while rng.random() < alpha:
            right += 1
        flights: deque[tuple[int, float]] = deque()  # the deepest level of each, and when it is known
        launched, known = -1, 0
        while known <= right:
            more = min(max(launched, 0) + nodes, known + deepest_guess) - launched
            if more > 0 and len(flights) < len(seconds):
                launched += more
                now, back = stages.launch(now, more)
                flights.append((launched, back))
            if len(flights) == len(seconds) or more <= 0 or launched == known + deepest_guess:
                deepest, back = flights.popleft()
                now, known = max(now, back), deepest + 1
        tokens += right + 1
    return tokens / now


def simulated(checkpoint: Checkpoint, stages: int, alpha: float, nodes: int, link: float) -> list[Row]:
    """One request in so many stages."""
    seconds = stage_seconds(checkpoint, stages, nodes + 1)
    gain, whole = sum(alpha**i for i in range(nodes + 1)), sum(times[nodes] for times in seconds)
    best = max(ahead(seconds, link, alpha, own) for own in range(1, nodes + 1))
    return [
        (
            f"{stages} stages, simulated: slowest to mean",
            stages * max(t[nodes] for t in seconds) / whole,
            "x",
            None,
            ">=",
        ),
        (f"{stages} stages, simulated: one tree at a time", whole / (whole + stages * link), "x", None, ">="),
        (
            f"{stages} stages, simulated: trees in flight",
            ahead(seconds, link, alpha, nodes) * whole / gain,
            "x",
            None,
            ">=",
        ),
        (f"{stages} stages, simulated: at the best depth", best * whole / gain, "x", None, ">="),
    ]


def main() -> None:
    given = arguments()
    counts = [int(count) for count in given.requests.split(",")]
    torch.set_num_threads(1)
    runs, rows = {stages: measure(given, stages, counts) for stages in (1, 2)}, []
    for count, one, two in zip(counts, runs[1], runs[2], strict=True):
        same = sum(a == b for a, b in zip(one.answers, two.answers, strict=True))
        rows.append((f"{count} requests, one process", one.rate, "/s", None, ">="))
        rows.append((f"{count} requests, two stages", two.rate / one.rate, "x", None, ">="))
        rows.append((f"{count} requests, answers that are the same", float(same), "", float(count), ">="))
    alpha = chance(runs[1][0].tokens_per_step, given.nodes)
    rows.append(("a guess is right with the chance", alpha, "", None, ">="))
    checkpoint = open_checkpoint(given.model)
    for stages in map(int, given.stages.split(",")):
        rows += simulated(checkpoint, stages, alpha, given.nodes, given.link_ms / 1000)
    sys.exit(not report(rows, "pipeline", vars(given)))


if __name__ == "__main__":
    main()
