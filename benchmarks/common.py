"""What every benchmark shares: provenance, medians, one table for people and one JSON line for programs."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

import draftwood

ROOT = Path(__file__).resolve().parent.parent


def provenance() -> dict[str, object]:
    """Everything somebody would need to know to measure the same again."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
        "draftwood": draftwood.__version__,
        "commit": commit.stdout.strip() or None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "arguments": sys.argv[1:],
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def interleaved(contenders: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Medians of what each contender returns, all of them once a round, so that drift hits everybody alike."""
    for run in contenders.values():
        run()  # warm-up
    results: dict[str, list[float]] = {name: [] for name in contenders}
    for i in range(rounds):
        order = list(contenders) if i % 2 == 0 else list(reversed(contenders))
        for name in order:
            results[name].append(contenders[name]())
    return {name: statistics.median(values) for name, values in results.items()}


def report(
    rows: Sequence[tuple[str, float | None, str, float | None, str]],
    name: str,
    details: Mapping[str, object] | None = None,
) -> bool:
    """Print (what, value, unit, target, direction) as a table and as JSON; whether every target is met.

    A value of None could not be measured: it meets no target. `details` go into the JSON only.
    """
    print(f"\n{'measure':58s} {'value':>10s} {'target':>10s}")
    met = True
    for what, value, unit, target, direction in rows:
        good = target is None or (value is not None and (value >= target if direction == ">=" else value <= target))
        met &= good
        wanted = "" if target is None else f"{direction} {target:g}"
        shown = f"{'missing':>8s}   " if value is None else f"{value:8.2f} {unit:2s}"
        print(f"{what:58s} {shown}{wanted:>9s} {'' if target is None else 'ok' if good else 'MISSED'}")
    figures = {
        what: {"value": None if value is None else round(value, 4), "unit": unit, "target": target}
        for what, value, unit, target, _ in rows
    }
    print(json.dumps({"benchmark": name, "figures": figures, **(details or {}), "provenance": provenance()}))
    return met
