"""What a captured step takes on a GPU, in three parts: drafting, the target's forward, and what keeps a path.

python benchmarks/gpu_steps.py MODEL --drafter eagle3 [--tree beam:nodes=63,…] [--batches 1,32] [--nodes 0,3,15,63]

Steps run on the padding row, behind one token of context, so attention costs nothing; every part is a graph by itself.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator

import torch

from common import report
from draftwood import LLM, EngineConfig
from draftwood.engine.graph_runner import GraphRunner
from draftwood.engine.shapes import StepShape
from draftwood.engine.worker import ComputeThread
from draftwood.protocols import StepMode

Row = tuple[str, float | None, str, float | None, str]
REPEATS = 30


def seconds(run: Callable[[], None]) -> float:
    """Of one replay, the median."""
    marks = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(REPEATS)]
    for start, end in marks:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in marks) / 1000


@torch.inference_mode()
def parts_of(runner: GraphRunner, batch: int, nodes: int) -> list[float]:
    """Seconds of the three parts. A step that waits for masks is captured in parts, so one of them is asked for."""
    shape = StepShape(batch, nodes, runner.shapes.pages_for(1, batch), masked=1)
    step = runner._prepare(shape, StepMode(greedy=True, masked=True))
    return [seconds(run) for run in step.runs]


def measured(given: argparse.Namespace) -> Iterator[Row]:
    config = EngineConfig(
        device="cuda", max_running=max(given.batches), cache_tokens=given.cache_tokens, capture_seconds=0.0
    )
    llm = LLM(given.model, drafter=given.drafter, tree=given.tree, config=config)
    runner = llm.engine.runner
    for batch in given.batches:
        for nodes in given.nodes:
            if batch * (1 + nodes) > runner.shapes.max_rows or nodes not in llm.engine.drafter.sizes:
                continue
            found = ComputeThread.shared().call(lambda b=batch, n=nodes: parts_of(runner, b, n))
            draft, target, law = (1e3 * part for part in found)
            name = f"{given.drafter.rsplit('/', 1)[-1]}, batch {batch}, {nodes} nodes"
            print(f"{name:40s} draft {draft:7.3f}  target {target:7.3f}  law {law:7.3f} ms", flush=True)
            yield f"{name}, step", draft + target + law, "ms", None, ""
            yield f"{name}, drafting", draft, "ms", None, ""
    llm.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--drafter", default="ngram")
    parser.add_argument("--tree")
    parser.add_argument("--batches", type=lambda text: [int(own) for own in text.split(",")], default=[1, 8, 32, 128])
    parser.add_argument("--nodes", type=lambda text: [int(own) for own in text.split(",")], default=[0, 3, 15, 63])
    parser.add_argument("--cache-tokens", type=int, default=65536)
    return 0 if report(list(measured(parser.parse_args())), "gpu-steps") else 1


if __name__ == "__main__":
    sys.exit(main())
