"""A model with layers that are not on the device: plain decoding, and what drafts make of it.

python benchmarks/offload.py MODEL [--offload 0.8] [--drafters subspec,model:NAME] [--trees "TREE;TREE"] [--tokens 128]

On an H200, after benchmarks/gpu.py has built the stand-in and its small model:
python benchmarks/offload.py /tmp/draftwood-standin --drafters subspec,model:/tmp/draftwood-standin-small

One chat at a time, at temperature 0; every answer is compared with that of plain decoding. Tokens a second include
the prompts; the bandwidth is what plain decoding brings to the device.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time

from common import report
from draftwood import LLM, EngineConfig, SamplingParams
from draftwood.engine.memory import away_bytes
from draftwood.model.checkpoint import open_checkpoint
from gpu_prompts import CHAT8

TREES = (
    "best-first:nodes=64,width=8,forwards=8",
    "best-first:nodes=512,width=32,forwards=16",
    "best-first:nodes=2047,width=64,forwards=24",
)
Answers = list[tuple[int, ...]]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--offload", type=float, default=0.8)
    parser.add_argument("--weights", default="stored")
    parser.add_argument("--drafters", default="subspec", help="separated by commas")
    parser.add_argument("--trees", default=";".join(TREES), help="separated by semicolons")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--chats", type=int, default=4)
    parser.add_argument("--cache-tokens", type=int, default=16384)
    return parser.parse_args()


def config_of(given: argparse.Namespace) -> EngineConfig:
    return EngineConfig(offload=given.offload, weights=given.weights, cache_tokens=given.cache_tokens, max_running=1)


def measure(given: argparse.Namespace, drafter: str, tree: str | None) -> tuple[Answers, float, float]:
    """Answers, tokens a second and tokens a step."""
    params = SamplingParams(max_tokens=given.tokens, ignore_eos=True)
    with LLM(given.model, drafter=drafter, tree=tree, config=config_of(given)) as llm:
        llm.generate("Once", SamplingParams(max_tokens=4))
        since = time.perf_counter()
        results = [llm.chat([{"role": "user", "content": chat}], params) for chat in CHAT8[: given.chats]]
        seconds = time.perf_counter() - since
    tokens = sum(result.stats.num_tokens for result in results)
    steps = sum(result.stats.steps for result in results)
    return [result.token_ids for result in results], tokens / seconds, tokens / steps


def main() -> None:
    given = arguments()
    wanted, plain, _ = measure(given, "none", None)
    away, _ = away_bytes(open_checkpoint(given.model).config, config_of(given), given.weights)
    rows = [("plain", plain, "/s", None, ">="), ("GB a second to the device", away * plain / 1e9, "", None, ">=")]
    for drafter, tree in itertools.product(given.drafters.split(","), given.trees.split(";")):
        found, rate, per_step = measure(given, drafter, tree)
        name = f"{drafter.rpartition('/')[2]} {tree.partition(',')[0]}"
        rows += [
            (name, rate, "/s", None, ">="),
            (f"{name}: times plain", rate / plain, "", 6.0, ">="),
            (f"{name}: tokens a step", per_step, "", None, ">="),
            (f"{name}: equal answers", float(sum(map(tuple.__eq__, found, wanted))), "", float(len(wanted)), ">="),
        ]
    if not report(rows, "offload"):
        sys.exit(1)


if __name__ == "__main__":
    main()
