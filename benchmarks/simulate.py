"""The simulator against the engine on this machine: tokens a second of both, for several controllers and loads.

python benchmarks/simulate.py [MODEL] [--drafter ngram] [--weights w8a8] [--at 1,4] [--requests 12]

Records costs and acceptance first, then answers the same prompts for real, with answers of a fixed length. It wants a
quiet machine; a figure within 0.95 and 1.05 is what is asked for.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator
from functools import partial

from common import report
from cpu_prompts import encoded
from draftwood import LLM, EngineConfig, SamplingParams
from draftwood.calibration import default_controller
from draftwood.cli.simulate import RECORDED, record
from draftwood.engine.worker import ComputeThread
from draftwood.lab.recording import Recording
from draftwood.lab.simulate import Limits, Simulation
from traffic import Pass, Row, closed_loop, prompts_of

ANSWER = 96
POLICIES = ("off", "fixed", "auto")


def real(llm: LLM, asked: list[tuple[list[int], SamplingParams]], policy: str, at: int) -> float:
    """Tokens a second; an `auto` that has learnt, as it will have in a server."""
    controller = ComputeThread.shared().call(
        partial(default_controller, llm.engine.target, llm.engine.drafter, policy=policy)
    )
    ComputeThread.shared().call(partial(setattr, llm.engine, "controller", controller))
    passes: list[Pass] = []
    for number in range(2):
        own = [(ids, SamplingParams(max_tokens=p.max_tokens, ignore_eos=True, cache_salt=f"{policy}{at}{number}"))
               for ids, p in asked]  # fmt: skip
        passes.append(asyncio.run(closed_loop(llm, own, at)))
    return passes[-1].rate


def simulated(recording: Recording, lengths: list[int], policy: str, at: int) -> float:
    """The same requests, twice; of the second time."""
    simulation = Simulation(recording, policy, Limits(max_running=64, max_rows=512, cache_tokens=16384))
    rates = []
    for _ in range(2):
        left, began, tokens = list(lengths), simulation.now, simulation.outcome.tokens
        while left or simulation.scheduler.has_work:
            while left and len(simulation.texts) < at:
                simulation.ask(RECORDED, left.pop(0), ANSWER)
            simulation.step()
        rates.append((simulation.outcome.tokens - tokens) / (simulation.now - began))
    return rates[-1]


def measured(given: argparse.Namespace) -> Iterator[Row]:
    config = EngineConfig(device="cpu", weights=given.weights)
    with LLM(given.model, drafter=given.drafter, tree=given.tree, config=config) as llm:
        texts = [text for some in prompts_of(None, ()) for text in some][: given.requests]
        recording = record(llm, texts, ANSWER)
        prompts = [encoded(llm.tokenizer, [text], 5000 + i)[0] for i, text in enumerate(texts)]
        for at in given.at:
            for policy in POLICIES:
                params = SamplingParams(max_tokens=ANSWER, ignore_eos=True)
                was = real(llm, [(ids, params) for ids in prompts], policy, at)
                told = simulated(recording, [len(ids) for ids in prompts], policy, at)
                yield f"{policy}, {at} at a time: measured, tok/s", was, "", None, ""
                yield f"{policy}, {at} at a time: simulated / measured", told / was, "x", None, ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--drafter", default="ngram")
    parser.add_argument("--tree")
    parser.add_argument("--weights", default="w8a8")
    parser.add_argument("--at", type=lambda text: [int(own) for own in text.split(",")], default=[1, 4])
    parser.add_argument("--requests", type=int, default=12)
    given = parser.parse_args()
    return 0 if report(list(measured(given)), "simulate", {"model": given.model, "drafter": given.drafter}) else 1


if __name__ == "__main__":
    sys.exit(main())
