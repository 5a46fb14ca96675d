"""`draftwood simulate`: what a controller would do on a machine that is only recorded, or described."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from draftwood.cli.flags import EngineFlags
from draftwood.cli.screen import say, stdout, write_json
from draftwood.errors import InvalidRequest

if TYPE_CHECKING:
    from draftwood.engine.llm import LLM
    from draftwood.lab.recording import Recording
    from draftwood.lab.simulate import Outcome, Workload

RECORDED_AT = 4  # sequences at a time
RECORDED = "recorded"


def _option(text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel="Simulation", show_default=True)


@dataclass(frozen=True)
class SimulateFlags:
    """What is simulated."""

    controllers: Annotated[
        str, _option("Controllers to compare, separated by commas (settings: fixed:nodes=3).", "--controllers")
    ] = "auto,off"
    at: Annotated[str, _option("Requests at a time, separated by commas.")] = "1,8,32,128"
    rate: Annotated[float, _option("Arrivals a second instead, at random.")] = 0.0
    requests: Annotated[int, _option("Requests of each run; 0: 8 for each that is under way, at least 32.")] = 0
    prompt: Annotated[str, _option("Tokens of a prompt, such as 64-256.")] = "64-256"
    answer: Annotated[str, _option("Tokens of an answer.")] = "64-256"
    text: Annotated[str, _option("Kinds of recorded text, separated by commas; all if not given.")] = ""
    ttft_ms: Annotated[float | None, _option("Promise each request its first token within this.")] = None
    tpot_ms: Annotated[float | None, _option("Promise each request its further tokens as fast as this.")] = None
    max_running: Annotated[int, _option("Sequences at a time that the engine runs.")] = 256
    cache_tokens_held: Annotated[int, _option("Tokens that its cache holds.")] = 1 << 20
    seed: Annotated[int, _option("Of arrivals, lengths and what becomes of drafts.")] = 0

    def workloads(self) -> Iterator[Workload]:
        """One for each load."""
        from draftwood.lab.simulate import Workload
        from draftwood.request import Slo

        slo = Slo(self.ttft_ms, self.tpot_ms) if self.ttft_ms or self.tpot_ms else None
        try:
            loads = [0] if self.rate > 0 else [int(at) for at in self.at.split(",")]
            for at in loads:
                yield Workload(
                    at, self.rate, self.requests or max(32, 8 * at), _span(self.prompt), _span(self.answer),
                    tuple(filter(None, self.text.split(","))), slo, self.seed,
                )  # fmt: skip
        except ValueError as error:
            raise InvalidRequest(f"This is no load: {error}.") from error

    def policies(self) -> list[str]:
        """`fixed:nodes=3` has no comma of its own."""
        from draftwood.engine.policies import find_policy

        names = [name for name in self.controllers.split(",") if name]
        for name in names:
            find_policy(name)
        return names


def _span(text: str) -> tuple[int, int]:
    least, _, most = text.partition("-")
    return int(least), int(most or least)


def run_simulate(file: Path, flags: SimulateFlags, *, as_json: bool) -> None:
    """Every controller under every load."""
    from draftwood.lab.recording import Recording
    from draftwood.lab.simulate import Limits, Simulation

    policies, workloads = flags.policies(), list(flags.workloads())
    recording = Recording.load(file)
    unknown = [text for text in workloads[0].texts if text not in recording.texts]
    if unknown:
        raise InvalidRequest(f"There is no text '{unknown[0]}' in {file}; there are {', '.join(recording.texts)}.")
    limits = Limits(flags.max_running, cache_tokens=flags.cache_tokens_held)
    table = Table("Load", "Controller", "tokens/s", "tokens/step", "first token p95", "each token p95", "broken")
    for workload in workloads:
        load = f"{workload.at} at a time" if workload.at else f"{workload.rate:g} a second"
        for policy in policies:
            outcome = Simulation(recording, policy, limits, flags.seed).run(workload)
            if as_json:
                write_json({"load": load, "controller": policy} | figures(outcome))
                continue
            own = figures(outcome)
            table.add_row(
                load, policy, f"{own['tokens_per_second']:.1f}", f"{own['tokens_per_step']:.2f}",
                f"{own['ttft_p95_ms']:.0f} ms", f"{own['tpot_p95_ms']:.1f} ms", f"{own['violated']:.1%}",
            )  # fmt: skip
    if not as_json:
        stdout().print(table)


def figures(outcome: Outcome) -> dict[str, float]:
    """Of one simulation."""
    steps = sum(own.steps for own in outcome.ended)
    return {
        "tokens_per_second": round(outcome.rate, 3),
        "tokens_per_step": round(outcome.tokens / max(steps, 1), 4),
        "seconds": round(outcome.seconds, 4),
        "ttft_p95_ms": round(1e3 * outcome.percentile(0.95, first=True), 3),
        "tpot_p95_ms": round(1e3 * outcome.percentile(0.95, first=False), 4),
        "violated": round(outcome.violated, 4),
    }


def run_record(engine: EngineFlags, file: Path, prompts: Path | None) -> None:
    """Record what steps cost here, and what becomes of a drafter's trees."""
    from draftwood.cli.demo_prompts import PROMPTS
    from draftwood.cli.session import open_llm
    from draftwood.lab.experiment import read_prompts

    texts = [prompt.text for prompt in PROMPTS] if prompts is None else read_prompts(prompts)
    with open_llm(engine) as llm:
        recording = record(llm, texts)
        rates = [] if recording.chain else rates_of(llm, texts)
    recording.save(file)
    if rates:
        say(f"Accepted by the rank of siblings, of 100: --tree sequoia:rates={'x'.join(map(str, rates))}")
    say(f"Written: {file}. Replay it with: draftwood simulate {file}")


def rates_of(llm: LLM, texts: list[str], max_tokens: int = 64) -> list[int]:
    """How often the first, second, … child of an accepted node is accepted, with all that the drafter proposes."""
    from draftwood.engine.worker import ComputeThread
    from draftwood.lab.recording import Recorder, rank_rates
    from draftwood.request import SamplingParams

    before, recorder = llm.engine.controller, Recorder(llm.engine.drafter.max_nodes)
    ComputeThread.shared().call(partial(setattr, llm.engine, "controller", recorder))
    params = SamplingParams(max_tokens=max_tokens, trace=True)
    steps = [event.step for text in texts for event in llm.stream(text, params) if event.step is not None]
    ComputeThread.shared().call(partial(setattr, llm.engine, "controller", before))
    return rank_rates(step.tree for step in steps if step.tree is not None)


def record(llm: LLM, texts: list[str], max_tokens: int = 64) -> Recording:
    """Outcomes of every size; chains need only the longest, which holds the others. Costs as calibrated, which are the
    best of several times, by as much more as requests took in the end.
    """
    from draftwood.drafting import tree_sizes
    from draftwood.engine.worker import ComputeThread
    from draftwood.lab.recording import Recorder, Recording
    from draftwood.request import SamplingParams

    if llm.engine.drafter.max_nodes == 0:
        raise InvalidRequest("There is nothing to record of --drafter none: name one that guesses.")
    costs = llm.calibrate(say)
    chain, most = llm.engine.drafter.law.chain, llm.engine.drafter.max_nodes
    before, found, drafting, silent, took = llm.engine.controller, {}, {}, 0.0, []
    for nodes in [most] if chain else [size for size in tree_sizes(most) if size]:
        recorder = Recorder(nodes, costs)
        ComputeThread.shared().call(partial(setattr, llm.engine, "controller", recorder))
        params = SamplingParams(max_tokens=max_tokens)
        for start in range(0, len(texts), RECORDED_AT):
            predicted, since = recorder.predicted, time.perf_counter()
            llm.generate(texts[start : start + RECORDED_AT], params)
            took.append((time.perf_counter() - since) / (recorder.predicted - predicted))
        found[nodes], drafting[nodes], silent = recorder.histogram, recorder.draft_seconds, recorder.silent
    ComputeThread.shared().call(partial(setattr, llm.engine, "controller", before))
    padded = llm.engine.scheduler.config.asynchronous
    return Recording(
        costs.scaled(statistics.median(took)), {RECORDED: found}, drafting, {RECORDED: silent}, chain=chain,
        padded=padded, reads=llm.engine.drafter.reads,
    )  # fmt: skip
