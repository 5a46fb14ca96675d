"""The process around a contender: one JSON line in, one JSON line out, asleep in between.

python -m cpu_peers.worker ENGINE FORMAT MODE THREADS MODELS

Imports nothing but the standard library until it knows its engine: peers live in another environment than ours.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from cpu_peers import Contender

STEP_CYCLES = 2  # times all row counts are gone through for one answer
STEP_REPEATS = 6
STEP_WARM_UP = 2  # steps after a change of shape that are not counted
MODULES = {"ours": "ours", "transformers": "hf", "llamacpp": "llamacpp", "openvino": "genai"}


def private_stdout() -> TextIO:
    """Our own way out; whatever libraries print goes to stderr from here on."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return out


def peak_bytes() -> int:
    """The most memory this process ever had resident."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def generate(contender: Contender, request: Mapping[str, Any]) -> dict[str, Any]:
    start = time.perf_counter()
    tokens = contender.generate(request["prompt"], request["max_tokens"], request.get("answer", ()))
    seconds = time.perf_counter() - start
    writing = getattr(contender, "writing", None)  # tokens a second after the first one
    return {"seconds": seconds, "tokens": [int(token) for token in tokens], "writing": writing}


def steps(contender: Contender, request: Mapping[str, Any]) -> dict[str, Any]:
    """Median seconds of a step by its rows. A row count runs in blocks, as in speculation."""
    seconds: dict[int, list[float]] = {rows: [] for rows in request["rows"]}
    context, more = request["context"], request["more"]
    for _ in range(STEP_CYCLES):
        for rows, times in seconds.items():
            times += contender.steps(context, more[:rows], STEP_REPEATS + STEP_WARM_UP)[STEP_WARM_UP:]
    return {"seconds": {rows: statistics.median(times) for rows, times in seconds.items()}}


def memory(contender: Contender, request: Mapping[str, Any]) -> dict[str, Any]:
    return {"bytes": peak_bytes()}


ANSWERS: dict[str, Callable[[Contender, Mapping[str, Any]], dict[str, Any]]] = {
    "generate": generate,
    "steps": steps,
    "memory": memory,
}


def main() -> None:
    out = private_stdout()
    engine, form, mode, threads, models = sys.argv[1:]
    contender = importlib.import_module(f"cpu_peers.{MODULES[engine]}").make(form, mode, int(threads), models)
    print(json.dumps({"version": contender.version}), file=out)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(ANSWERS[request["do"]](contender, request)), file=out)


if __name__ == "__main__":
    main()
