"""The core's figures on a CPU: SmolLM2 in float32, ratios within one run, medians, both sides interleaved.

python benchmarks/core.py [--rounds 5] [--threads 2]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence

import torch

from common import interleaved, report
from draftwood import LLM, EngineConfig, SamplingParams
from draftwood.drafters.scripted import ScriptedDrafter
from draftwood.engine.worker import ComputeThread
from peers import transformers_model

PROMPT = [{"role": "user", "content": "Tell me the story of a lighthouse keeper who finds a message in a bottle."}]
TOKENS = 96
PARAMS = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
RIGHT_CHAIN = 4
STEPS_OF_PRODUCTS = 40  # about as long as an answer, so that both sides see the same moods of the machine

STARTUP = """
import json, resource, sys, time
start = time.perf_counter()
from draftwood import LLM, EngineConfig, SamplingParams
llm = LLM("smollm2", drafter="ngram", config=EngineConfig(threads={threads}, weights="float32"))
first = next(iter(llm.stream("The lighthouse", SamplingParams(max_tokens=1))))
seconds = time.perf_counter() - start
llm.generate("The lighthouse", SamplingParams(max_tokens=64))
target = llm.engine.target
planned = target.model.num_bytes + target.cache.num_bytes
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({{"seconds": seconds, "peak": peak, "planned": planned, "weights": target.model.num_bytes}}))
"""


def tokens_per_second(llm: LLM, batch: int = 1) -> float:
    start = time.perf_counter()
    results = llm.generate([PROMPT] * batch, PARAMS)
    return sum(r.stats.num_tokens for r in results) / (time.perf_counter() - start)


def transformers_tokens_per_second(model, prompt: list[int]) -> float:
    def run() -> float:
        ids = torch.tensor([prompt])
        start = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=TOKENS,
                min_new_tokens=TOKENS,
                do_sample=False,
                pad_token_id=2,
            )
        return (out.shape[1] - ids.shape[1]) / (time.perf_counter() - start)

    return ComputeThread.shared().call(run)


def products_alone(llm: LLM, rows: int) -> float:
    """Seconds of one step's matrix products on the model's own weights, and nothing else."""
    model = llm.engine.target.model

    def run() -> float:
        start = time.perf_counter()
        for _ in range(STEPS_OF_PRODUCTS):
            model.products_alone(rows)
        return (time.perf_counter() - start) / STEPS_OF_PRODUCTS

    return ComputeThread.shared().call(run)


def step_seconds(llm: LLM, batch: int = 1) -> float:
    """Wall time of a decode step, taken over a whole answer."""
    results = llm.generate([PROMPT] * batch, PARAMS)
    stats = results[0].stats
    return (stats.seconds - stats.first_token_seconds) / (stats.steps - 1)


def overhead_share(llm: LLM, batch: int) -> float:
    """Share of the engine's time that is not spent in model forwards."""
    timers = llm.engine.timers
    step, clock = llm.engine.step, {"seconds": 0.0}

    def timed():
        start = time.perf_counter()
        events = step()
        clock["seconds"] += time.perf_counter() - start
        return events

    llm.engine.step = timed  # type: ignore[method-assign]
    timers.reset()
    llm.generate([PROMPT] * batch, PARAMS)
    del llm.engine.step
    return 1 - timers.seconds["target"] / clock["seconds"]


def scripted(answer: Sequence[int], prompt_length: int, right: bool) -> ScriptedDrafter:
    def script(tokens: Sequence[int]) -> list[Sequence[int]]:
        at = len(tokens) - prompt_length
        ahead = answer[at : at + RIGHT_CHAIN]
        return [ahead] if right else [[(ahead[0] + 1) % 49152]] if ahead else []

    return ScriptedDrafter(script, RIGHT_CHAIN if right else 1, chain=True)


def start_up(threads: int) -> dict[str, float]:
    code = STARTUP.format(threads=threads)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    started = start_up(arguments.threads)
    config = EngineConfig(threads=arguments.threads, cache_tokens=4096, weights="float32")
    plain = LLM("smollm2", config=config)
    answer = plain.generate([PROMPT], PARAMS)[0]
    prompt = list(answer.prompt_token_ids)
    right, wrong = (
        LLM("smollm2", drafter=scripted(answer.token_ids, len(prompt), good), config=config) for good in (True, False)
    )
    hf = ComputeThread.shared().call(lambda: transformers_model(plain.checkpoint))
    measured = interleaved(
        {
            "plain": lambda: tokens_per_second(plain),
            "batch 8": lambda: tokens_per_second(plain, 8),
            "right": lambda: tokens_per_second(right),
            "wrong": lambda: tokens_per_second(wrong),
            "transformers": lambda: transformers_tokens_per_second(hf, prompt),
            "products": lambda: products_alone(plain, 1),
            "step": lambda: step_seconds(plain),
            "overhead 1": lambda: overhead_share(plain, 1),
            "overhead 8": lambda: overhead_share(plain, 8),
        },
        arguments.rounds,
    )
    got = right.generate([PROMPT], PARAMS)[0], wrong.generate([PROMPT], PARAMS)[0]
    assert all(r.token_ids == answer.token_ids for r in got), "speculation changed the answer"
    rows = [
        ("plain decoding, tokens per second", measured["plain"], "", None, ""),
        ("transformers generate, tokens per second", measured["transformers"], "", None, ""),
        ("plain / transformers", measured["plain"] / measured["transformers"], "x", 1.35, ">="),
        ("whole step / its matrix products alone", measured["step"] / measured["products"], "x", 1.2, "<="),
        ("matrix products of one row, ms", measured["products"] * 1e3, "ms", None, ""),
        ("batch 8 throughput / batch 1", measured["batch 8"] / measured["plain"], "x", 3.0, ">="),
        ("engine overhead at batch 1, % of a step", 100 * measured["overhead 1"], "%", 5.0, "<="),
        ("engine overhead at batch 8, % of a step", 100 * measured["overhead 8"], "%", 5.0, "<="),
        ("always-right chain of 4 / plain", measured["right"] / measured["plain"], "x", 2.4, ">="),
        ("always-wrong single node / plain", measured["wrong"] / measured["plain"], "x", 0.8, ">="),
        ("start-up to first token, s", started["seconds"], "s", 8.0, "<="),
        ("peak memory / (weights + cache)", started["peak"] / started["planned"], "x", 1.3, "<="),
        ("weights, MB", started["weights"] / 1e6, "MB", None, ""),
    ]
    return 0 if report(rows, "core") else 1


if __name__ == "__main__":
    sys.exit(main())
