"""`draftwood laws`: the laboratory."""

from __future__ import annotations

import json
import platform
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import draftwood
from draftwood.cli.flags import EngineFlags
from draftwood.cli.screen import say, stdout
from draftwood.cli.session import open_llm
from draftwood.errors import InvalidRequest
from draftwood.lab.claims import check_claims
from draftwood.lab.experiment import Setting, read_prompts, record, replay
from draftwood.lab.replay import Results
from draftwood.lab.report import tables, write_html
from draftwood.lab.rows import load_rows


def run_laws(
    engine: EngineFlags, prompts: Path | None, setting: Setting, out: Path, save: Path | None, rows: Path | None
) -> None:
    """Record rows, or take recorded ones, replay every law, and write the report."""
    if rows is not None:
        results, about = replay(load_rows(rows), setting), {"target": "recorded rows", "draft": str(rows), "prompts": 0}
    else:
        results, about = _measure(engine, prompts, setting, save)
    report = about | {
        "contexts": max((len(found) for found in results.tokens.values()), default=0),
        "depth": setting.depth,
        "seed": setting.seed,
        "cells": results.cells(),
        "orderings": check_claims(results),
        "provenance": _provenance(engine),
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "laws.html").write_text(write_html(report), encoding="utf-8")
    (out / "laws.json").write_text(json.dumps(report, indent=1, default=str), encoding="utf-8")
    for table in tables(report):
        stdout().print(table)
    say(f"Written: {out / 'laws.html'} and {out / 'laws.json'}")


def _measure(
    engine: EngineFlags, prompts: Path | None, setting: Setting, save: Path | None
) -> tuple[Results, dict[str, Any]]:
    if prompts is None:
        raise InvalidRequest(
            "The laboratory needs a pair of models and texts: draftwood laws --model BIG --drafter model:SMALL "
            "--prompts FILE (one prompt a line, or JSON lines); `--drafter student` goes with smollm2. "
            "`draftwood laws --list` names the laws."
        )
    texts = read_prompts(prompts)
    with open_llm(engine) as llm:
        results = replay(record(llm, texts, setting, say), setting, save, say)
    draft = engine.drafter.removeprefix("model:")
    return results, {"target": Path(engine.model).stem, "draft": Path(draft).stem, "prompts": len(texts)}


def _provenance(engine: EngineFlags) -> dict[str, str]:
    import torch

    return {
        "version": draftwood.__version__,
        "command": shlex.join(["draftwood", *(Path(a).name if "/" in a else a for a in sys.argv[1:])]),
        "weights": engine.weights,
        "machine": f"{platform.machine()}, torch {torch.__version__}, Python {platform.python_version()}",
        "date": time.strftime("%Y-%m-%d"),
    }
