"""Drafts of the target itself, and cascades, over plain decoding: batch 1, greedy, all in one run.

python benchmarks/selfdrafts.py [--model smollm2] [--weights float32] [--depth 4] [--tokens 96] [--rounds 3]
                                [--drafters 'self-int8;self-int4'] [--long 4096]
                                [--prompts FILE | --data DIR --every 80]

One engine offers all drafters and answers every prompt with each in turn, plain decoding among them, the order
reversed every other round; an answer that differs from plain decoding's ends the run. Chains of `--depth`; cascades
have a size of their own.
`--long N` puts N tokens of other text before every prompt: what windows are for. Times are of decoding alone, from the
first event on.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import cpu_prompts
from common import report
from draftwood import LLM, EngineConfig, SamplingParams
from draftwood.drafters.skips import find_skips
from draftwood.engine.controller import FixedBudget
from draftwood.model.checkpoint import open_checkpoint
from quality import own_prose

EARLY = "early-exit"
# Suffixes of this request alone: every prompt is asked again and again.
SELF = (EARLY, "layer-skip", "self-int8", "self-int4", "window:recent=512", "suffix:shared=0")
LONG = "self-int8:window=512", "self-int4:window=512"
CASCADES = tuple(
    f"cascade:inner=suffix:shared=0,middle={middle}" for middle in ("self-int8", "self-int4", "layer-skip")
)
Row = tuple[str, float | None, str, float | None, str]


def suited(model: str, weights: str, every: Sequence[str]) -> list[str]:
    """Without those that the model refuses: rounding to what it is already, layers that were not searched for."""
    left_out = {"w8a8": ["self-int8"], "w4a8": ["self-int4"]}.get(weights, [])
    left_out += [] if find_skips(open_checkpoint(model)) else ["layer-skip"]
    kept = [name for name in every if not any(out in name for out in left_out)]
    for name in set(every) - set(kept):
        print(f"left out: {name} ({'run draftwood search-skip first' if 'layer-skip' in name else 'nothing to round'})")
    return kept


def decode(llm: LLM, prompt: str, drafter: str, tokens: int) -> tuple[float, float, list[int]]:
    """Tokens a second and a step, and the answer."""
    said: list[int] = []
    first = begun = last = None
    for event in llm.stream([{"role": "user", "content": prompt}], SamplingParams(max_tokens=tokens, drafter=drafter)):
        said += event.token_ids
        last = time.perf_counter()
        if first is None and said:
            first, begun = last, len(said)
        stats = event.stats
    if first is None or begun is None or last is None or len(said) - begun < 8:
        return float("nan"), float("nan"), said
    return (len(said) - begun) / (last - first), stats.tokens_per_step, said


def before(llm: LLM, count: int) -> str:
    """So many tokens of this repository's own prose."""
    if not count:
        return ""
    return llm.tokenizer.decode(llm.tokenizer.encode(own_prose(), special=False)[:count]) + "\n\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--weights", default="float32")
    parser.add_argument("--drafters", default="")
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--long", type=int, default=0)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--every", type=int, default=80)
    asked = parser.parse_args()
    prompts = list(cpu_prompts.BUILT_IN)
    if asked.prompts or asked.data:
        prompts = (
            cpu_prompts.from_file(asked.prompts) if asked.prompts else cpu_prompts.from_folder(asked.data, asked.every)
        )
    usual = (*SELF, *(LONG if asked.long else CASCADES))
    names = suited(asked.model, asked.weights, asked.drafters.split(";") if asked.drafters else usual)
    config = EngineConfig(weights=asked.weights)
    main_one = next(name for name in names if not name.startswith(("cascade", "suffix")))
    llm = LLM(
        asked.model, drafter=main_one, offers=[name for name in names if name != main_one],
        tree=f"chain:depth={asked.depth}", config=config, controller=FixedBudget(max(asked.depth, 8)),
    )  # fmt: skip
    rates: dict[str, list[float]] = {name: [] for name in ("none", *names)}
    steps: dict[str, list[float]] = {name: [] for name in rates}
    with llm:
        text = before(llm, asked.long)
        for number in range(1 + asked.rounds):
            order = list(rates) if number % 2 else list(reversed(rates))
            for prompt in prompts:
                answers = {}
                for name in order:
                    rate, per_step, answers[name] = decode(llm, text + prompt, name, asked.tokens)
                    if number and rate == rate:  # the first round warms up
                        rates[name].append(rate)
                        steps[name].append(per_step)
                different = [name for name, answer in answers.items() if answer != answers["none"]]
                if different:
                    print(f"answers differ from plain decoding's: {', '.join(different)}")
                    return 1
    return 0 if report(rows_of(rates, steps), "selfdrafts", {"model": asked.model, "weights": asked.weights}) else 1


def rows_of(rates: dict[str, list[float]], steps: dict[str, list[float]]) -> list[Row]:
    """Plain decoding's rate, and everything else over it."""
    plain = statistics.harmonic_mean(rates["none"])
    rows: list[Row] = [("plain decoding", plain, "/s", None, "")]
    for name in rates:
        if name != "none":
            rows.append((f"{name}, over plain", statistics.harmonic_mean(rates[name]) / plain, "×", None, ""))
            rows.append((f"{name}, tokens a step", statistics.mean(steps[name]), "", None, ""))
    return rows


if __name__ == "__main__":
    sys.exit(main())
