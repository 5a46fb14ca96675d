"""How many bytes of the next product's weights are worth asking for as one ends, in steps of a model with one row.

    python benchmarks/gpu_ahead.py DIR [--rounds 9]

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


def step_with(runner: ModelRunner, ahead: Ahead) -> Callable[[], float]:
    """Times a step, captured with these sizes."""
    cuda.ONE_ROW = ahead
    steps = repeated(step_of(runner, 0), REPEATS)
    return lambda: seconds(steps, runner.device) / REPEATS


def best_sizes(runner: ModelRunner, rounds: int) -> dict:
    """The fastest sizes, and what was measured on the way."""
    best, tried = Ahead(0, 0, 0, 0), []
    for place in fields(Ahead):
        settings = {f"{size} MiB": replace(best, **{place.name: size << 20}) for size in MEGABYTES}
        steps = {name: step_with(runner, setting) for name, setting in settings.items()}
        medians = interleaved(steps, rounds)
        for name, median in medians.items():
            print(f"{place.name:10s} {name:>6s}  {1e3 * median:.4f} ms", flush=True)
            tried.append({**asdict(settings[name]), "seconds": median})
        best = settings[min(medians, key=medians.__getitem__)]
    return {"best": asdict(best), "tried": tried}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a checkpoint's folder")
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    runner = ModelRunner.load(open_checkpoint(given.model), torch.bfloat16, torch.device("cuda"), PAGES, 64)
    found = best_sizes(runner, given.rounds)
    print(f"best: {found['best']}")
    print(json.dumps({"benchmark": "gpu-ahead", **found, "provenance": provenance()}))


if __name__ == "__main__":
    main()
