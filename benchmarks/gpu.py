"""The stand-in of 7.4 B parameters on one GPU: plain and drafted, by batch and temperature, and what surrounds it.

python benchmarks/gpu.py [--standin DIR] [--small DIR] [--only speed,tree,…] [--batches 1,32] [--quick] [--peers]

Both models are built from --model where their folders are not there yet. Eight chats (gpu_prompts.py) in
turn, 256 new tokens, end of text ignored; no two prompts share a page, so the prefix cache finds nothing. Tokens a
second are from submission to the last token, prompts included; the share of the memory's speed is that of the
target's weights and keys in a step. Each section prints as it goes, and a failing one does not stop the others.
"""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch

from common import report
from draftwood.model.checkpoint import open_checkpoint
from gpu_measure import QUICK, Lab, Row, Sizes
from gpu_sections import SECTIONS
from standin import Shape, build, build_small

BY_DEFAULT = ("load", "costs", "speed", "traffic", "tree", "idle", "strict", "quant", "context")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    scratch = Path(tempfile.gettempdir())
    parser.add_argument("--standin", type=Path, default=scratch / "draftwood-standin")
    parser.add_argument("--small", type=Path, default=scratch / "draftwood-standin-small")
    parser.add_argument("--model", default="smollm2", help="what both are built from")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--only", default=",".join(BY_DEFAULT), help=f"of {', '.join(SECTIONS)}; {' '.join(BY_DEFAULT)}"
    )
    parser.add_argument("--contenders", help="of the sections speed and strict, such as plain,model")
    parser.add_argument("--trained", type=Path, nargs="*", default=[], help="drafters of standin_drafter.py")
    parser.add_argument("--batches", type=_integers, help="such as 1,32")
    parser.add_argument("--temperatures", type=_numbers, help="such as 0")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--tokens", type=int, help="of each answer")
    parser.add_argument("--depth", type=int, help="tokens of a draft chain")
    parser.add_argument("--fixed", action="store_true", help="always draft all of it, whatever steps cost")
    parser.add_argument("--quick", action="store_true", help="a few tokens of everything: does it run?")
    parser.add_argument("--peers", action="store_true", help="afterwards the same through transformers and vLLM")
    return parser.parse_args()


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(item) for item in text.split(","))


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(item) for item in text.split(","))


def chosen_sizes(given: argparse.Namespace) -> Sizes:
    names = ("batches", "temperatures", "rounds", "tokens", "depth")
    changes = {name: getattr(given, name) for name in names if getattr(given, name) is not None}
    return dataclasses.replace(QUICK if given.quick else Sizes(), **changes)


def make_models(given: argparse.Namespace) -> None:
    """Build what is missing."""
    for folder in (given.small, given.standin):
        if (folder / "config.json").is_file():
            continue
        start, source = time.perf_counter(), open_checkpoint(given.model)
        if folder == given.small:
            build_small(source, folder)
        else:
            build(source, folder, Shape(), torch.device(given.device))
        print(f"built {folder} in {time.perf_counter() - start:.1f} s", flush=True)


def run_sections(lab: Lab, names: list[str]) -> tuple[list[Row], dict[str, str]]:
    """Rows of all sections that run, as far as they come, and what stopped the others."""
    rows: list[Row] = []
    failures: dict[str, str] = {}
    for name in names:
        start = time.perf_counter()
        print(f"\n== {name}", flush=True)
        try:
            for row in SECTIONS[name](lab):
                rows.append(row)
        except Exception as error:  # GPU minutes are scarce: what works is measured
            failures[name] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
            print(f"FAILED {name}: {failures[name]}", flush=True)
            lab.close_all()
        print(f"== {name}: {time.perf_counter() - start:.0f} s", flush=True)
    return rows, failures


def main() -> int:
    given = arguments()
    wanted = [name for name in given.only.split(",") if name]
    unknown = [name for name in wanted if name not in SECTIONS]
    if unknown:
        raise SystemExit(f"There is no section {unknown[0]}: choose of {', '.join(SECTIONS)}.")
    names = [name for name in SECTIONS if name in wanted]  # in this order: costs are of use to those behind them
    make_models(given)
    named = tuple(given.contenders.split(",")) if given.contenders else ()
    lab = Lab(given.standin, given.small, given.device, chosen_sizes(given), given.fixed, tuple(given.trained), named)
    rows, failures = run_sections(lab, names)
    lab.close_all()
    if given.peers:  # before our own JSON, which is the last line
        script = Path(__file__).with_name("gpu_peers.py")
        options = ["--standin", given.standin, "--small", given.small, *(["--quick"] if given.quick else [])]
        subprocess.run([sys.executable, script, *options], check=False)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else given.device
    details = {"device": device, "sizes": dataclasses.asdict(lab.sizes), "failures": failures}
    return 0 if report(rows, "gpu", details) and not failures else 1


if __name__ == "__main__":
    sys.exit(main())
