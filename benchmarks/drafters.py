"""Drafters side by side on one model: rates as ratios to plain decoding, batch 1, greedy, interleaved, medians.

python benchmarks/drafters.py --data FOLDER [--tasks summarization,qa] [--weights float32,w8a8] [--prompts 5]
python benchmarks/drafters.py --data FOLDER --model tinyllama.gguf --weights w8a8 --drafters \
    "model:smollm2.gguf;model:smollm2.gguf@beam:nodes=8,width=2"

FOLDER has prompts as JSON lines with `task` and `turns`, such as Spec-Bench's. A drafter may have its tree behind an @.
Every prompt is answered by all drafters in turn, the other way round in odd rounds. What a drafter learns it keeps for
other prompts of its round, but not for the next round (`cache_salt`); with --again each prompt is asked twice in a
round, with another word in front, and the second answer counts: repetitive traffic.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from common import provenance
from draftwood import LLM, EngineConfig, SamplingParams
from draftwood.request import Result

TASKS = "summarization,qa,rag,translation,math_reasoning,coding,writing,code"
DRAFTERS = "ngram;suffix;combined:suffix+recycling"
PLAIN = "none"


@dataclass
class Figures:
    """One drafter on one task."""

    ratios: list[float] = field(default_factory=list)  # of rates, to plain decoding in the same round
    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    alike: list[bool] = field(default_factory=list)  # the answer is plain decoding's

    def record(self) -> dict[str, float]:
        return {
            "ratio": round(statistics.median(self.ratios), 3),
            "worst": round(min(self.ratios), 3),
            "tokens_per_step": round(self.tokens / self.steps, 3),
            "nodes_per_step": round(self.drafted / self.steps, 3),
            "accepted": round(self.accepted / max(self.drafted, 1), 3),
            "alike": round(statistics.mean(self.alike), 3),
        }


def prompts_of(folder: Path, tasks: Sequence[str], count: int) -> dict[str, list[str]]:
    """The first so many of each task, of all files."""
    found: dict[str, list[str]] = defaultdict(list)
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            if entry["task"] in tasks and len(found[entry["task"]]) < count:
                found[entry["task"]].append(entry["turns"][0])
    missing = set(tasks) - found.keys()
    if missing:
        print(f"no prompts for {', '.join(sorted(missing))}", file=sys.stderr)
    return {task: found[task] for task in tasks if task in found}


def answered(llm: LLM, prompt: str, tokens: int, salt: str, again: bool) -> Result:
    params = SamplingParams(max_tokens=tokens, cache_salt=salt)
    if again:
        llm.chat([{"role": "user", "content": prompt}], params)
        prompt = f"Please: {prompt}"
    return llm.chat([{"role": "user", "content": prompt}], params)


def rate(result: Result) -> float:
    """Tokens a second behind the first."""
    stats = result.stats
    return (stats.num_tokens - 1) / max(stats.seconds - stats.first_token_seconds, 1e-9)


def measure(arguments: argparse.Namespace, weights: str, tasks: dict[str, list[str]]) -> dict[str, dict[str, object]]:
    config = EngineConfig(threads=arguments.threads, cache_tokens=arguments.cache_tokens, weights=weights)
    found: dict[str, dict[str, Figures]] = {task: defaultdict(Figures) for task in tasks}
    with ExitStack() as stack:
        engines = {}
        for name in (PLAIN, *arguments.drafters.split(";")):
            print(f"{weights}: loading {name}", file=sys.stderr, flush=True)
            drafter, _, tree = name.partition("@")
            engines[name] = stack.enter_context(LLM(arguments.model, drafter=drafter, tree=tree or None, config=config))
        if arguments.calibrate and not engines[PLAIN].is_calibrated:
            engines[PLAIN].calibrate(lambda text: print(text, file=sys.stderr))
            raise SystemExit("Calibrated: run the same command again, so that all engines load the table.")
        for turn in range(-1, arguments.rounds):  # the first warms up
            for task, prompts in tasks.items():
                for prompt in prompts[:1] if turn < 0 else prompts:
                    order = list(engines) if turn % 2 == 0 else list(reversed(engines))
                    salt = f"round {turn}"
                    got = {n: answered(engines[n], prompt, arguments.tokens, salt, arguments.again) for n in order}
                    if turn >= 0:
                        _add(found[task], got)
            print(f"{weights}: round {turn + 1} of {arguments.rounds} done", file=sys.stderr, flush=True)
        calibrated = engines[PLAIN].is_calibrated
    shown = {task: {name: own.record() for name, own in figures.items()} for task, figures in found.items()}
    return {"calibrated": calibrated, "tasks": shown}


def _add(figures: dict[str, Figures], got: dict[str, Result]) -> None:
    plain = got[PLAIN]
    for name, result in got.items():
        own, stats = figures[name], result.stats
        own.ratios.append(rate(result) / rate(plain))
        own.alike.append(result.token_ids == plain.token_ids)
        own.tokens, own.steps = own.tokens + stats.num_tokens, own.steps + stats.steps
        own.drafted, own.accepted = own.drafted + stats.drafted, own.accepted + stats.accepted


def show(weights: str, figures: dict[str, dict[str, object]]) -> None:
    print(f"\n{weights}, {'' if figures['calibrated'] else 'not '}calibrated: ratio to plain (tokens a step)")
    for task, by_name in figures["tasks"].items():
        cells = [f"{name} {own['ratio']:.2f} ({own['tokens_per_step']:.2f})" for name, own in by_name.items()]
        print(f"  {task:16s} " + "   ".join(cells))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tasks", default=TASKS)
    parser.add_argument("--drafters", default=DRAFTERS, help="separated by semicolons")
    parser.add_argument("--weights", default="float32,w8a8")
    parser.add_argument("--prompts", type=int, default=5, help="of each task")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache-tokens", type=int, default=8192)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--calibrate", action="store_true", help="measure step costs first, where they are not known")
    arguments = parser.parse_args()
    tasks = prompts_of(arguments.data, arguments.tasks.split(","), arguments.prompts)
    figures = {}
    for weights in arguments.weights.split(","):
        figures[weights] = measure(arguments, weights, tasks)
        show(weights, figures[weights])
    print(json.dumps({"benchmark": "drafters", "figures": figures, "provenance": provenance()}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
