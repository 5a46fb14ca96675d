"""What a verdict costs: every law on trees of real size, beside the step of the target it belongs to.

    python benchmarks/laws.py                      # CPU: SmolLM2 w8a8, trees of about 16 nodes, beside its own step
    python benchmarks/laws.py --device cuda        # trees of 64 nodes; the step is the matrix products of 7.2 B weights
    python benchmarks/laws.py --device cuda --model DIR   # or a model's own, without its verdict: benchmarks/standin.py
    python benchmarks/laws.py --estimate           # on any machine: what the forms in torch would launch on a GPU

Both sides are interleaved, medians are printed, the last line is JSON. On CUDA a verdict is timed launched op by op and
replayed as a graph; laws that look at values on the host cannot be captured and say so. In the engine a verdict is
part of the step's graph, and steps follow each other: the graph timed here holds a verdict REPEATS times, a step is
taken as often in a row, and times are divided. `torch` is the law's form in torch, where it has a kernel for the whole
verdict (on CUDA as a graph), `plain` the same without the kernels that add up rows: what kernels are worth is the
difference, as a share of the step.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common import interleaved, provenance
from draftwood.cache.kv import stage_trees
from draftwood.drafting import Front, Grower, State
from draftwood.growers import Hybrid, Independent, Levels, Paths, WithoutReplacement
from draftwood.links import may_look
from draftwood.model import store
from draftwood.model.checkpoint import open_checkpoint
from draftwood.model.runner import ModelRunner
from draftwood.model.weights import FORMATS
from draftwood.ops import kseq, residual
from draftwood.ops.native import kernels
from draftwood.protocols import BatchView, Span, Verifier
from draftwood.rng import KeyedRng
from draftwood.tree import TokenTree
from draftwood.verifiers import LAWS
from draftwood.verifiers.law import NodeLaw

CPU_TREES: dict[str, Grower] = {
    "sampled chain of 4": Levels((1,) * 4, Independent()),
    "4 paths of 4": Paths(4, 4),
    "without replacement 2x2x2": Levels((2, 2, 2), WithoutReplacement()),
    "hybrid 2x2x2": Levels((2, 2, 2), Hybrid()),
}
CUDA_TREES: dict[str, Grower] = {
    "sampled chain of 64": Levels((1,) * 64, Independent()),
    "8 paths of 8": Paths(8, 8),
    "independent 4x3x4": Levels((4, 3, 4), Independent()),
    "without replacement 4x3x4": Levels((4, 3, 4), WithoutReplacement()),
    "hybrid 4x3x4": Levels((4, 3, 4), Hybrid()),
}
SEQUENCES = count()
ALIASES = {"coupled", "optimal", "rrs", "rrsw", "hybrid", "token"}
REPEATS = 5  # of a step, and of a verdict within a graph: in the engine nothing waits between them


@dataclass(frozen=True)
class Case:
    view: BatchView
    tree: TokenTree
    p: Tensor


class Net:
    """Random logits as sharp as a language model's."""

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        self.size, self.device = vocabulary, device

    def begin(self, view: BatchView) -> tuple[Tensor, State]:
        return 3 * torch.randn(view.size, 1, self.size, device=self.device), ()

    def extend(self, view: BatchView, front: Front, state: State) -> tuple[Tensor, State]:
        return 3 * torch.randn(*front.tokens.shape, self.size, device=self.device), ()

    def vocabulary(self, level: int | None) -> None:
        return None


def view_of(batch: int, device: torch.device) -> BatchView:
    ones, number = torch.ones(batch, dtype=torch.int64, device=device), torch.arange(batch, device=device)
    return BatchView(
        lengths=ones,
        seeds=number,
        roots=ones,
        temperature=ones.float(),
        rows=number,
        history=ones[:, None],
        block_table=number[:, None],
        may_look=may_look(ones),
    )


def make_case(
    grower: Grower, vocabulary: int, batch: int, device: torch.device, *, may_look: bool | None = None
) -> Case:
    """A drawn tree as a step has it there, and a target that agrees with its draft to four fifths."""
    torch.manual_seed(0)
    view, net = view_of(batch, device), Net(vocabulary, device)
    view = view if may_look is None else replace(view, may_look=may_look)
    proposal = grower.grow(net, view, grower.max_nodes, KeyedRng())
    tree = (proposal.packed() if view.may_look else proposal).tree
    p = torch.softmax(3 * torch.randn(tree.num_nodes, vocabulary, device=device), -1)
    first = tree.tries[:, 0].clamp(min=0)
    drawn = (tree.tries[:, 0] >= 0) & (tree.q_row[first] >= 0)
    assert tree.q is not None
    p[drawn] = 0.2 * p[drawn] + 0.8 * tree.q[tree.q_row[first[drawn]]]
    return Case(view, tree, p)


def verdict_of(verifier: Verifier, case: Case) -> Callable[[], object]:
    def run() -> object:
        with torch.inference_mode():
            return verifier.verify(case.tree, case.p, case.view, KeyedRng())

    return run


def without_kernels(law: NodeLaw) -> NodeLaw:
    """The same law in its form in torch."""
    plain = copy.copy(law)
    plain.at_once = lambda tree, p, view: None  # type: ignore[method-assign]
    return plain


def without_sums(run: Callable[[], object]) -> Callable[[], object]:
    """The same without the kernels in C that add up rows."""
    modules = (kseq, residual)

    def plain() -> object:
        kept = [module.native_for for module in modules]
        for module in modules:
            module.native_for = lambda p, q: None
        try:
            return run()
        finally:
            for module, own in zip(modules, kept, strict=True):
                module.native_for = own

    return plain


LAUNCH, BANDWIDTH = 2e-6, 4.3e12  # seconds of the shortest kernel in a graph, bytes a second: an H200
ALIASING = ("empty", "alias", "detach", "lift_fresh", "scalar_tensor")
GATHERING = ("index", "gather", "index_select", "embedding")  # read as much as they write


class Launches(TorchDispatchMode):
    """Counts what a form in torch would launch on a GPU, each op as one kernel that reads its inputs once."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        views = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        name = func.overloadpacket.__name__
        if not views and not name.startswith(ALIASING):
            inputs = [] if name in GATHERING else tree_leaves((args, kwargs))
            outputs = tree_leaves(out) * (1 + (name in GATHERING))
            self.add(*(x for x in (*inputs, *outputs) if isinstance(x, Tensor)))
        return out

    def add(self, *tensors: Tensor) -> None:
        self.count += 1
        self.bytes += sum(x.nbytes for x in tensors)

    @property
    def seconds(self) -> float:
        return self.count * LAUNCH + self.bytes / BANDWIDTH


def estimate(name: str, case: Case) -> None:
    """Launches and bytes of every law's form that a graph can hold, with kernels that add up rows and without."""
    for law, entry in LAWS.items():
        verifier = entry()
        if law in ALIASES or verifier.refuses(GROWERS[name].law) is not None or not isinstance(verifier, NodeLaw):
            continue
        run, found = verdict_of(without_kernels(verifier), case), []
        for plain in (False, True):
            seen = Launches()

            def sums(p: Tensor, q: Tensor | None, seen: Launches = seen, plain: bool = plain) -> object:
                if not plain:
                    seen.add(p, *(() if q is None else (q,)))
                return None if plain else kernels()

            with (
                mock.patch("draftwood.links.LOOKED_AT", frozenset()),
                mock.patch.object(residual, "native_for", sums),
                mock.patch.object(kseq, "native_for", sums),
                seen,
            ):
                run()
            found.append(f"{seen.count:5d} launches {seen.bytes / 1e6:7.0f} MB {1e6 * seen.seconds:7.0f} us")
        print(f"{name:28s} {law:20s} with sums of rows {found[0]}   without {found[1]}", flush=True)


def repeated(run: Callable[[], object], times: int) -> Callable[[], object]:
    def runs() -> None:
        for _ in range(times):
            run()

    return runs


def seconds(run: Callable[[], object], device: torch.device) -> float:
    wait(device)
    start = time.perf_counter()
    run()
    wait(device)
    return time.perf_counter() - start


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def captured(run: Callable[[], object]) -> Callable[[], object] | None:
    """The same as one CUDA graph, or None where the host has to look at something."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except Exception:
        torch.cuda.synchronize()
        return None
    return graph.replay


def load_runner(model: str, device: torch.device) -> ModelRunner:
    """The target whose step verdicts are compared with, computing as it would by default."""
    if model == "smollm2":
        store.fetch(model, lambda _: None)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    weights = FORMATS["w8a8" if device.type == "cpu" else "stored"]
    return ModelRunner.load(open_checkpoint(model), dtype, device, 64, 64, weights)


def step_of(runner: ModelRunner, rows: int) -> Callable[[], object]:
    """A forward with a tree of `rows` nodes after a short prompt; as one graph where there are graphs."""
    tokens = list(range(1, 120))
    tree = TokenTree.of_points([([tokens[-1], *range(200, 200 + rows)], [-1, *range(rows)])], runner.device)
    tables, seq_id = runner.cache.tables, next(SEQUENCES)
    tables.open(seq_id, tokens)
    tables.reserve(seq_id, len(tokens) + rows)
    with torch.inference_mode():
        runner.forward(runner.cache.stage_text([Span(seq_id, tokens, 0, len(tokens) - 1)]))
        tables.advance(seq_id, len(tokens) - 1, tokens)
        pages = torch.tensor([tables.pages(seq_id)], device=runner.device)
        view = replace(view_of(1, runner.device), lengths=torch.full_like(tree.sizes, len(tokens)), block_table=pages)
        batch = stage_trees(view, tree, runner.cache.page_size, runner.model.config.max_positions, chain=True)

    def run() -> object:
        with torch.inference_mode():
            return runner.forward(batch)

    replay = captured(run) if runner.device.type == "cuda" else run
    assert replay is not None, "a forward asks the host for nothing"
    return lambda: (replay(), batch)  # a graph does not keep what it reads


def products_of_7b(rows: int, device: torch.device) -> Callable[[], object]:
    """The matrix products of 7.2 billion bfloat16 weights for `rows` rows, as one graph: less than a model's step."""
    hidden, inner, layers = 4096, 14336, 32
    shapes = [(hidden, 6144), (hidden, hidden), (hidden, 2 * inner), (inner, hidden)] * layers + [(hidden, 49152)]
    weights = [torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes]
    inputs = {size: torch.randn(rows, size, device=device, dtype=torch.bfloat16) for size in (hidden, inner)}

    def run() -> None:
        for weight in weights:
            torch.mm(inputs[weight.shape[0]], weight)

    replay = captured(run)
    assert replay is not None
    return lambda: (replay(), weights)  # a graph does not keep what it reads


def measure(name: str, case: Case, step: Callable[[], object], rounds: int, device: torch.device) -> list[dict]:
    found, steps = [], repeated(step, REPEATS)
    for law, entry in LAWS.items():
        verifier = entry()
        if law in ALIASES or verifier.refuses(GROWERS[name].law) is not None:
            continue
        verdict = verdict_of(verifier, case)
        ways = {"eager": verdict}
        graph = captured(repeated(verdict, REPEATS)) if device.type == "cuda" else None
        ways |= {} if graph is None else {"graph": graph}
        if isinstance(verifier, NodeLaw):
            in_torch = verdict_of(without_kernels(verifier), case)
            if device.type == "cpu":
                ways |= {"torch": in_torch, "plain": without_sums(in_torch)}
            else:
                in_torch = captured(repeated(in_torch, REPEATS))
                ways |= {} if in_torch is None else {"torch": in_torch}
        medians = interleaved(
            {way: lambda run=run: seconds(run, device) for way, run in {**ways, "step": steps}.items()}, rounds
        )
        repeated_ways = ("step",) if device.type == "cpu" else ("graph", "torch", "step")
        medians |= {way: medians[way] / REPEATS for way in repeated_ways if way in medians}
        best = min(medians[way] for way in ways if way in ("eager", "graph"))
        found.append({"tree": name, "nodes": case.tree.num_drafted, "law": law, "lossless": verifier.lossless})
        found[-1] |= {f"{way}_us": 1e6 * t for way, t in medians.items()} | {"share": best / medians["step"]}
        columns = "  ".join(f"{way} {1e6 * t:9.1f} us" for way, t in medians.items())
        gained = {way: (medians[way] - best) / medians["step"] for way in ("torch", "plain") if way in medians}
        other = [f"{way} {gain:6.1%}" for way, gain in gained.items()]
        worth = f", kernels are worth {', '.join(other)}" if other else ""
        print(f"{name:28s} {law:20s} {columns}  share of the step {best / medians['step']:6.1%}{worth}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", help="whose step verdicts are compared with; smollm2 on a CPU")
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--estimate", action="store_true")
    args = parser.parse_args()
    if args.estimate:
        GROWERS.update(CUDA_TREES)
        for name, grower in GROWERS.items():
            estimate(name, make_case(grower, args.vocabulary, args.batch, torch.device("cpu"), may_look=False))
        return
    device = torch.device(args.device)
    model = args.model or ("" if device.type == "cuda" else "smollm2")
    runner = load_runner(model, device) if model else None
    GROWERS.update(CUDA_TREES if device.type == "cuda" else CPU_TREES)
    results = []
    for name, grower in GROWERS.items():
        case = make_case(grower, args.vocabulary, args.batch, device)
        rows = case.tree.num_drafted
        # With as many rows as drafted nodes: one more, and a GPU's tile would be twice as high, and the step slower.
        step = products_of_7b(rows, device) if runner is None else step_of(runner, rows - 1)
        results += measure(name, case, step, args.rounds, device)
        del step
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    about = {"benchmark": "laws", "device": where, "step": model or "products"}
    about |= {"vocabulary": args.vocabulary, "batch": args.batch}
    print(json.dumps(about | {"results": results, "provenance": provenance()}))


GROWERS: dict[str, Grower] = {}

if __name__ == "__main__":
    main()
