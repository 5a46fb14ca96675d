"""What drafters without weights take of a step at long contexts: milliseconds on one core, batch 1, eagerly.

python benchmarks/draft_time.py [--context 10000] [--drafters suffix,combined:suffix+recycling,rest] [--files FOLDER]

Each is led through the end of a text: of this repository's own documents, or of --files. `rest` looks up in a
datastore of the same files. Drafting is `prepare` and `propose`; keeping is `commit`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import torch

from common import ROOT, report
from draftwood.drafters.datastore import build
from draftwood.drafters.lookups import build_lookup
from draftwood.drafting import Drafter, Proposal
from draftwood.model.checkpoint import open_checkpoint
from draftwood.protocols import BatchView, HostView
from draftwood.request import SamplingParams
from draftwood.rng import KeyedRng
from draftwood.tree import Verdict

DRAFTERS = "ngram,suffix,recycling,rest,combined:suffix+recycling,combined:suffix+ngram,combined:suffix+recycling+rest"
GOAL = 0.2  # milliseconds of drafting, at 10,000 tokens
CPU = torch.device("cpu")
ROWS = 64


@dataclass
class Times:
    """Seconds of every step."""

    drafting: list[float] = field(default_factory=list)
    keeping: list[float] = field(default_factory=list)
    reading: float = 0.0  # the prompt, in the first step
    drafted: int = 0
    accepted: int = 0


def views(tokens: list[int], prompt: int, nodes: int) -> tuple[HostView, BatchView]:
    host = HostView((0,), [tokens], (prompt,), (SamplingParams(),), (nodes,), (nodes,))
    zero, count = torch.zeros(1, dtype=torch.int64), torch.tensor([len(tokens)])
    batch = BatchView(
        lengths=count,
        seeds=zero,
        roots=torch.tensor(tokens[-1:]),
        temperature=zero.float(),
        rows=zero,
        history=torch.tensor([tokens]),
        block_table=zero[:, None],
        max_nodes=zero + nodes,
        max_depth=zero + nodes,
        may_look=True,
    )
    return host, batch


def verdict_of(proposal: Proposal, following: Sequence[int]) -> Verdict:
    """The path along which the text goes on."""
    tree, path = proposal.tree, [0]
    children, tokens = tree.tries.tolist(), tree.tokens.tolist()
    for token in following[:-1]:
        right = [node for node in children[path[-1]] if node >= 0 and tokens[node] == token]
        if not right:
            break
        path.append(right[0])
    return Verdict(torch.tensor([path]), torch.tensor([len(path) - 1]), torch.tensor([following[len(path) - 1]]))


def led_through(drafter: Drafter, text: Sequence[int], context: int, steps: int, logits: torch.Tensor) -> Times:
    """From the prompt, all but the end of the text, through its end."""
    times, tokens, prompt = Times(), list(text[:context]), context
    while len(times.drafting) < steps and len(tokens) + drafter.max_nodes + 1 < len(text):
        host, batch = views(tokens, prompt, drafter.max_nodes)
        start = time.perf_counter()
        if drafter.waits:
            drafter.prepare(host, 1, drafter.max_nodes)
        proposal = drafter.propose(batch, drafter.max_nodes, KeyedRng()).packed()
        middle = time.perf_counter()
        verdict = verdict_of(proposal, text[len(tokens) : len(tokens) + drafter.max_nodes + 2])
        features = dict.fromkeys(drafter.needs, logits[: proposal.tree.num_nodes])
        begin = time.perf_counter()
        drafter.commit(batch, proposal, verdict, features)
        times.drafting.append(middle - start)
        times.keeping.append(time.perf_counter() - begin)
        gained = int(verdict.length) + 1
        times.drafted += proposal.tree.num_drafted
        times.accepted += gained - 1
        tokens += text[len(tokens) : len(tokens) + gained]
    times.reading = times.drafting.pop(0)
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--drafters", default=DRAFTERS)
    parser.add_argument("--files", type=Path, default=ROOT / "docs")
    parser.add_argument("--model", default="smollm2")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    checkpoint = open_checkpoint(arguments.model)
    tokenizer, vocabulary = checkpoint.tokenizer(), checkpoint.config.vocab_size
    files = sorted(path for path in arguments.files.rglob("*") if path.suffix in (".md", ".txt", ".py"))
    text = tokenizer.encode("\n".join(path.read_text() for path in files)[: 8 * arguments.context], special=False)
    target = SimpleNamespace(model=SimpleNamespace(config=checkpoint.config), device=CPU)
    logits = torch.randn(ROWS, vocabulary, generator=torch.Generator().manual_seed(0))
    rows, details = [], {}
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        store = Path(folder) / "store"
        build(store, files, tokenizer, vocabulary, lambda done, size: None)
        for name in arguments.drafters.split(","):
            spec = name.replace("rest", f"rest:{store}")
            drafter = build_lookup(spec, CPU)
            drafter.attach(target)
            times = led_through(drafter, text, arguments.context, arguments.steps, logits)
            rows.append((f"{name}: drafting", 1e3 * statistics.median(times.drafting), "ms", GOAL, "<="))
            rows.append((f"{name}: keeping", 1e3 * statistics.median(times.keeping), "ms", None, ""))
            details[name] = {
                "p95_ms": round(1e3 * sorted(times.drafting)[int(0.95 * len(times.drafting))], 3),
                "prompt_ms": round(1e3 * times.reading, 1),
                "drafted": times.drafted,
                "accepted": times.accepted,
                "steps": len(times.drafting),
            }
    return 0 if report(rows, "draft_time", {"context": arguments.context, "drafters": details}) else 1


if __name__ == "__main__":
    raise SystemExit(main())
