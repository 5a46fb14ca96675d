"""How many bytes of the next product's weights are worth asking for as a product ends, in whole steps of a model.

    python benchmarks/gpu_ahead.py DIR [--rows 1 64] [--rounds 9]

One place after the other (`Ahead` of model/cuda.py), each with what was best before it; sizes are interleaved, medians
are printed, the last line is JSON. A checkpoint to try it on: benchmarks/standin.py.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, fields, replace

import torch

from common import interleaved, provenance
from draftwood.model import cuda
from draftwood.model.checkpoint import open_checkpoint
from draftwood.model.cuda import Ahead
from draftwood.model.runner import ModelRunner
from laws import REPEATS, repeated, seconds, step_of

MEGABYTES = (0, 1, 2, 4, 8, 16, 32)
PAGES = 512  # of 64 tokens: every step has a sequence of its own


def step_with(runner: ModelRunner, rows: int, ahead: Ahead) -> Callable[[], float]:
    """Times a step of so many rows, captured with these sizes."""
    cuda.AHEAD = ahead
    steps = repeated(step_of(runner, rows - 1), REPEATS)
    return lambda: seconds(steps, runner.device) / REPEATS


def best_sizes(runner: ModelRunner, rows: int, rounds: int) -> dict:
    """The fastest sizes for steps of so many rows, and what was measured on the way."""
    best, tried = Ahead(0, 0, 0, 0), []
    for place in fields(Ahead):
        settings = {f"{size} MiB": replace(best, **{place.name: size << 20}) for size in MEGABYTES}
        steps = {name: step_with(runner, rows, setting) for name, setting in settings.items()}
        medians = interleaved(steps, rounds)
        for name, median in medians.items():
            print(f"{rows:4d} rows  {place.name:10s} {name:>6s}  {1e3 * median:.4f} ms", flush=True)
            tried.append({**asdict(settings[name]), "seconds": median})
        best = settings[min(medians, key=medians.__getitem__)]
    return {"rows": rows, "best": asdict(best), "tried": tried}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a checkpoint's folder")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    runner = ModelRunner.load(open_checkpoint(given.model), torch.bfloat16, torch.device("cuda"), PAGES, 64)
    found = [best_sizes(runner, rows, given.rounds) for rows in given.rows]
    for each in found:
        print(f"best for {each['rows']} rows: {each['best']}")
    print(json.dumps({"benchmark": "gpu-ahead", "found": found, "provenance": provenance()}))


if __name__ == "__main__":
    main()
