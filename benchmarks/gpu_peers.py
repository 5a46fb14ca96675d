"""The GPU benchmark's workload through other engines: transformers, and vLLM where it can be imported.

python benchmarks/gpu_peers.py --standin DIR --small DIR [--only transformers:plain,vllm:ngram] [--quick]

Every contender is a process of its own, so that none finds its memory taken. All of them get the same token ids, and
every token after the prompt counts, as for ours. Both folders are what benchmarks/gpu.py builds.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from common import report
from draftwood.model.checkpoint import open_checkpoint
from draftwood.model.isa import avoid_broken_amx
from gpu_measure import QUICK, Row, Sizes
from gpu_prompts import CHAT8, chats

TIMEOUT = 400  # seconds a contender may take
DRAFTED = 5  # tokens, as in the figures for vLLM
BATCHES: dict[str, tuple[int, ...]] = {
    "transformers:plain": (1, 8, 32),
    "transformers:assisted": (1,),  # it takes one sequence at a time
    "transformers:lookup": (1,),
    "transformers:static": (1,),  # compiled for more than a minute: only where it is asked for
    "vllm:plain": (1, 8, 32, 128, 256),
    "vllm:ngram": (1, 32),
    "vllm:model": (1, 32),
}
BY_DEFAULT = [name for name in BATCHES if name != "transformers:static"]

Prompts = Sequence[Sequence[int]]
Answer = Callable[[Prompts, int, float], int]  # prompts, new tokens, temperature -> tokens written altogether


def transformers_answer(mode: str, given: argparse.Namespace) -> Answer:
    """`generate` with the default attention."""
    from transformers import AutoModelForCausalLM

    def load(folder: Path) -> Any:
        return (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, trust_remote_code=False)
            .to(given.device)
            .eval()
        )

    model = load(given.standin)
    extra: dict[str, Any] = {}
    if mode == "assisted":
        extra["assistant_model"] = load(given.small)
    if mode == "lookup":
        extra["prompt_lookup_num_tokens"] = DRAFTED
    if mode == "static":
        extra["cache_implementation"] = "static"

    @torch.inference_mode()
    def answer(prompts: Prompts, tokens: int, temperature: float) -> int:
        longest = max(map(len, prompts))
        ids = torch.tensor([[2] * (longest - len(p)) + list(p) for p in prompts], device=given.device)
        seen = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=given.device)
        drawn = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        settings = drawn if temperature else {"do_sample": False}
        out = model.generate(
            ids,
            attention_mask=seen,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            pad_token_id=2,
            **settings,
            **extra,
        )
        return (out.shape[1] - longest) * len(prompts)

    return answer


def vllm_answer(mode: str, given: argparse.Namespace) -> Answer:
    """Its offline engine, without a prefix cache."""
    vllm = importlib.import_module("vllm")
    speculative = {
        "plain": None,
        "ngram": {"method": "ngram", "num_speculative_tokens": DRAFTED, "prompt_lookup_max": 4},
        "model": {"method": "draft_model", "model": str(given.small), "num_speculative_tokens": DRAFTED},
    }[mode]
    engine = vllm.LLM(
        model=str(given.standin),
        dtype="bfloat16",
        enable_prefix_caching=False,
        max_model_len=2048,
        max_num_seqs=256,
        speculative_config=speculative,
        disable_log_stats=True,
    )

    def answer(prompts: Prompts, tokens: int, temperature: float) -> int:
        params = vllm.SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True)
        results = engine.generate([{"prompt_token_ids": list(p)} for p in prompts], params, use_tqdm=False)
        return sum(len(result.outputs[0].token_ids) for result in results)

    return answer


def run_one(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """Everything of one contender, in this process."""
    avoid_broken_amx()
    engine, mode = name.split(":")
    start = time.perf_counter()
    answer = {"transformers": transformers_answer, "vllm": vllm_answer}[engine](mode, given)
    found: dict[str, Any] = {"loaded": time.perf_counter() - start, "speeds": {}}
    tokenizer, sizes = open_checkpoint(given.small).tokenizer(), QUICK if given.quick else Sizes()
    if engine == "transformers":  # 256 tokens take it 20 seconds: what a second round would tell is not worth them
        temperatures = sizes.temperatures if mode == "assisted" else (0.0,)
        sizes = dataclasses.replace(sizes, rounds=1, warm_up=8, temperatures=temperatures)
    batches = [batch for batch in BATCHES[name] if not given.quick or batch <= 8]
    for batch in batches:
        for temperature in sizes.temperatures:
            answer(chats(tokenizer, CHAT8, batch, 3000), sizes.warm_up, temperature)
            speeds = []
            for turn in range(sizes.rounds):
                prompts = chats(tokenizer, CHAT8, batch, 1000 * turn)
                start = time.perf_counter()
                written = answer(prompts, sizes.tokens, temperature)
                speeds.append(written / (time.perf_counter() - start))
            found["speeds"][f"batch {batch}, T={temperature:g}"] = statistics.median(speeds)
            print(f"  {name}, batch {batch}, T={temperature:g}: {speeds}", file=sys.stderr, flush=True)
    found["version"] = importlib.import_module(engine).__version__
    return found


def run_apart(name: str, arguments: Sequence[str]) -> dict[str, Any]:
    """The same in a process of its own; what went wrong instead, if anything did."""
    if importlib.util.find_spec(name.split(":")[0]) is None:
        return {"missing": "not installed"}
    command = [sys.executable, __file__, "--one", name, *arguments]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return {"missing": f"not done after {TIMEOUT} s"}
    if done.returncode:
        return {"missing": f"exit status {done.returncode}"}
    return json.loads(done.stdout.strip().splitlines()[-1])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--standin", type=Path, required=True)
    parser.add_argument("--small", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default=",".join(BY_DEFAULT), help=f"of {', '.join(BATCHES)}")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # this process is that contender
    return parser.parse_args()


def main() -> int:
    given = arguments()
    if given.one:
        found = run_one(given.one, given)
        print(json.dumps(found), flush=True)
        return 0
    options = ["--standin", str(given.standin), "--small", str(given.small), "--device", given.device]
    options += ["--quick"] if given.quick else []
    found = {}
    rows: list[Row] = []
    for name in filter(None, given.only.split(",")):
        print(f"== {name}", flush=True)
        found[name] = own = run_apart(name, options)
        if "missing" in own:
            print(f"missing: {own['missing']}", flush=True)
            continue
        rows += [(f"{name}, {what}, tok/s", value, "", None, "") for what, value in own["speeds"].items()]
        rows.append((f"{name}, loaded", own["loaded"], "s", None, ""))
    return 0 if report(rows, "gpu-peers", {"contenders": found}) else 1


if __name__ == "__main__":
    sys.exit(main())
