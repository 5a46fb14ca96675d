"""What each weight format costs in quality: perplexity on a fixed text, and how far the distribution moves.

python benchmarks/quality.py [--model smollm2] [--text FILE] [--tokens 4096]

The default text is this repository's own prose. Figures are relative to float32 on the same tokens, in one run.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

import torch
from torch import Tensor

from common import ROOT, provenance
from draftwood.engine.worker import ComputeThread
from draftwood.model.checkpoint import Checkpoint, open_checkpoint
from draftwood.model.runner import ModelRunner
from draftwood.model.weights import FORMATS
from draftwood.protocols import Span

WINDOW = 512
CPU = torch.device("cpu")


def own_prose() -> str:
    return "\n\n".join(path.read_text() for path in sorted((ROOT / "docs").rglob("*.md")))


def log_probabilities(checkpoint: Checkpoint, weights: str, windows: list[list[int]]) -> tuple[list[Tensor], int]:
    """Of every next token, window by window [W - 1, V], and the size of the weights."""
    runner = ModelRunner.load(checkpoint, torch.float32, CPU, WINDOW // 64 + 1, 64, FORMATS[weights])
    tables, found = runner.cache.tables, []
    for i, tokens in enumerate(windows):
        tables.open(i, ())
        tables.reserve(i, len(tokens))
        batch = runner.cache.stage_text([Span(i, tokens, 0, len(tokens))], torch.arange(len(tokens) - 1))
        found.append(torch.log_softmax(runner.forward(batch).logits, -1).to(torch.float16))
        tables.close(i)
    return found, runner.model.num_bytes


def compare(reference: list[Tensor], other: list[Tensor], windows: list[list[int]]) -> dict[str, float]:
    nll, divergence, agreement, count = 0.0, 0.0, 0, 0
    for p, q, tokens in zip(reference, other, windows, strict=True):
        p, q = p.float(), q.float()
        nll -= float(q.gather(1, torch.tensor(tokens[1:])[:, None]).sum())
        divergence += float((p.exp() * (p - q)).sum())
        agreement += int((p.argmax(-1) == q.argmax(-1)).sum())
        count += len(tokens) - 1
    return {"perplexity": math.exp(nll / count), "kl": divergence / count, "agreement": agreement / count}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--tokens", type=int, default=4096)
    arguments = parser.parse_args()
    checkpoint = open_checkpoint(arguments.model)
    text = arguments.text.read_text() if arguments.text else own_prose()
    tokens = checkpoint.tokenizer().encode(text)[: arguments.tokens]
    windows = [tokens[i : i + WINDOW] for i in range(0, len(tokens) - 1, WINDOW)]
    figures: dict[str, dict[str, float]] = {}
    reference: list[Tensor] = []
    print(f"{len(tokens)} tokens, windows of {WINDOW}\n")
    print(
        f"{'weights':10s} {'MB':>7s} {'perplexity':>11s} {'/ float32':>10s} {'KL, nats':>10s} {'same best token':>16s}"
    )
    for name in ("float32", *(name for name in FORMATS if name != "float32")):
        load = ComputeThread.shared().call
        found, size = load(lambda name=name: log_probabilities(checkpoint, name, windows))
        reference = reference or found
        own = compare(reference, found, windows)
        ratio = own["perplexity"] / figures["float32"]["perplexity"] if figures else 1.0
        figures[name] = own | {"megabytes": size / 1e6, "ratio": ratio}
        cells = f"{own['perplexity']:11.4f} {ratio:10.4f} {own['kl']:10.5f} {own['agreement']:16.2%}"
        print(f"{name:10s} {size / 1e6:7.1f} {cells}")
    print(json.dumps({"benchmark": "quality", "figures": figures, "provenance": provenance()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
