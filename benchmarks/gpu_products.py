"""Which way through a matrix product is fastest on this GPU, by shape and rows: cuBLAS, `gemv`, `skinny` by tiles.

    python benchmarks/gpu_products.py [--seconds 110] [--quick]

Weights rotate through more memory than the cache holds; every time is of launches inside a CUDA graph. TB/s count the
weights' bytes alone. The last line is JSON: for each shape the best tiles for each number of rows, and the tiles that
are best for all of them together, which is what strict mode needs.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from functools import partial

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from draftwood.model.weights import Storage, quantise_float8, store_as
from draftwood.ops.cuda import norm_act as row_kernels
from draftwood.ops.cuda import products
from draftwood.ops.cuda.linear import pack
from draftwood.ops.cuda.products import Around, Norm, Packed, Tiles, gemv, skinny

DEVICE = torch.device("cuda")
ROWS = (1, 8, 16, 32, 64, 128, 256)
OUT_OF_CACHE = 3 * 50 * 2**20  # bytes of copies a product rotates through
LAUNCHES = 20
# block_out, block_k, split_k, stages, warps
ROW_TILES = [Tiles(*t) for t in ((1, 1024, 1, 4, 4), (2, 1024, 1, 1, 4), (2, 1024, 1, 4, 4), (4, 1024, 1, 2, 4),
                                 (4, 1024, 1, 4, 4), (2, 2048, 1, 2, 4), (4, 2048, 1, 2, 8))]  # fmt: skip
LARGE_TILES = [Tiles(*t) for t in ((64, 128, 1, 4, 4), (64, 128, 2, 4, 4), (64, 64, 1, 5, 4), (64, 64, 2, 5, 4),
                                   (128, 64, 1, 4, 4), (128, 128, 1, 3, 8), (128, 64, 2, 4, 4),
                                   (64, 256, 1, 3, 4), (64, 128, 3, 4, 4), (64, 128, 4, 4, 4))]  # fmt: skip
SMALL_TILES = [Tiles(*t) for t in ((16, 64, 1, 5, 4), (16, 64, 1, 5, 2), (32, 64, 1, 5, 4), (64, 64, 1, 5, 4),
                                   (16, 128, 1, 4, 4), (16, 64, 3, 3, 4))]  # fmt: skip
QUANTISED_ROW_TILES = [
    Tiles(*t) for t in ((2, 2048, 1, 2, 4), (4, 2048, 1, 1, 4), (8, 2048, 1, 1, 4), (8, 1024, 1, 1, 4))
]
QUANTISED_TILES = [Tiles(*t) for t in ((64, 128, 1, 4, 4), (64, 128, 2, 4, 4), (128, 128, 1, 4, 8))]


@dataclass(frozen=True)
class Shape:
    """One product of a model; `gated` ones have twice the outputs, and all but `adds` a norm in front."""

    name: str
    outputs: int  # of the matrix
    inputs: int
    gated: bool = False
    adds: bool = False


Plan = tuple[list[Tiles], list[Tiles]]  # candidates for `skinny` and for `gemv`
SHAPES = [
    Shape("7.4B qkv", 6144, 4096),
    Shape("7.4B output", 4096, 4096, adds=True),
    Shape("7.4B gate_up", 28672, 4096, gated=True),
    Shape("7.4B down", 4096, 14336, adds=True),
    Shape("7.4B head", 49152, 4096),
    Shape("135M qkv", 960, 576),
    Shape("135M output", 576, 576, adds=True),
    Shape("135M gate_up", 3072, 576, gated=True),
    Shape("135M down", 576, 1536, adds=True),
    Shape("135M head", 49152, 576),
]


def seconds_each(step: Callable[[int], object], deadline: float) -> float | None:
    """Of one launch, the best of several replays; None where it cannot be compiled or launched."""
    if time.perf_counter() > deadline:
        return None
    try:
        step(0)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(LAUNCHES):
                step(i)
    except Exception as error:
        print(f"    {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        return None
    best = float("inf")
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end))
    return best / 1e3 / LAUNCHES


class CompileOnly:
    """Stands for a kernel: compiles what a launch would need, and launches nothing."""

    def __init__(self, kernel) -> None:  # type: ignore[no-untyped-def]
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable:
        return partial(self._kernel.warmup, grid=grid)


def compile_all(steps: Sequence[Callable[[int], object]]) -> None:
    """Compile for all these launches on all cores; what fails now says so when it is measured."""
    kernels = {name: getattr(products, name) for name in ("gemv_kernel", "skinny_kernel", "joined_kernel")}
    try:
        for name, kernel in kernels.items():
            setattr(products, name, CompileOnly(kernel))
        with (
            ThreadPoolExecutor(os.cpu_count()) as threads,
            triton.AsyncCompileMode(threads, ignore_errors=True),
        ):
            for step in steps:
                step(0)
    finally:
        for name, kernel in kernels.items():
            setattr(products, name, kernel)


class Product:
    """One shape in one storage, with enough copies of the weights."""

    def __init__(self, shape: Shape, storage: str = "bf16") -> None:
        self.shape = shape
        weight = torch.randn(shape.outputs, shape.inputs, device=DEVICE, dtype=torch.bfloat16)
        first = pack([_stored(weight, storage)], shape.inputs)
        parts = [first.codes, first.scale, first.minimum]
        self.bytes = sum(part.nbytes for part in parts if part is not None)
        copies = max(1, -(-OUT_OF_CACHE // self.bytes))
        self.weights = [first] + [_copy(first) for _ in range(copies - 1)]
        self.width = shape.outputs // 2 if shape.gated else shape.outputs
        self.norm = None if shape.adds else Norm(torch.ones(shape.inputs, device=DEVICE, dtype=torch.bfloat16), 1e-5)

    def around(self, n: int, norm: Norm | None) -> Around:
        residual = None
        if self.shape.adds:
            residual = torch.randn(n, self.width, device=DEVICE, dtype=torch.bfloat16)
        return Around(norm, None, residual, "silu" if self.shape.gated else None)

    def at(self, i: int) -> Packed:
        return self.weights[i % len(self.weights)]

    def x(self, n: int) -> Tensor:
        return torch.randn(n, self.shape.inputs, device=DEVICE, dtype=torch.bfloat16)

    def vendor(self, n: int) -> Callable[[int], object]:
        x, around = self.x(n), self.around(n, None)
        if self.shape.gated:
            return lambda i: row_kernels.gated(F.linear(x, self.at(i).codes), "silu")
        if around.residual is not None:
            residual = around.residual
            return lambda i: torch.addmm(residual, x, self.at(i).codes.t())
        return lambda i: F.linear(x, self.at(i).codes)

    def ours(self, n: int, cut: Tiles, kernel: Callable, fused: bool) -> Callable[[int], object]:
        x, around = self.x(n), self.around(n, self.norm if fused else None)
        return lambda i: kernel(x, self.at(i), around, cut)


def _stored(weight: Tensor, storage: str):  # type: ignore[no-untyped-def]
    if storage == "bf16":
        return weight
    return quantise_float8(weight) if storage == "fp8" else store_as(Storage[storage.upper()], weight)


def _copy(packed: Packed) -> Packed:
    parts = [None if part is None else part.clone() for part in (packed.codes, packed.scale, packed.minimum)]
    assert parts[0] is not None
    return Packed(packed.storage, parts[0], packed.inputs, parts[1], parts[2])


Ways = dict[tuple[int, tuple], Callable[[int], object]]


def ways_of(product: Product, numbers: tuple[int, ...], cuts: list[Tiles], row_cuts: list[Tiles]) -> Ways:
    """Every launch to be measured, by (rows, way); ways are tuples that begin with a name."""
    ways: Ways = {}
    for n in numbers:
        if product.at(0).storage == products.DENSE.value:
            ways[n, ("cuBLAS",)] = product.vendor(n)
        for cut in row_cuts if n == 1 else ():
            ways[n, ("gemv", *astuple(cut))] = product.ours(n, cut, gemv, True)
        for cut in cuts:
            ways[n, ("skinny", *astuple(cut))] = product.ours(n, cut, skinny, False)
    return ways


def measure(product: Product, name: str, numbers: tuple[int, ...], plan: Plan, deadline: float) -> dict:
    """Compile, time, print, and give what is best."""
    ways = ways_of(product, numbers, *plan)
    if time.perf_counter() < deadline:
        compile_all([step for (_, way), step in ways.items() if way[0] != "cuBLAS"])
    times = {key: took for key, step in ways.items() if (took := seconds_each(step, deadline)) is not None}
    return report(product, name, numbers, times)


def report(product: Product, name: str, numbers: tuple[int, ...], times: dict) -> dict:
    """Print a table of TB/s, and give what is best."""
    ways = sorted({way for _, way in times}, key=str)
    print(f"\n{name}: {product.shape.outputs} x {product.shape.inputs}, {product.bytes / 1e6:.1f} MB, TB/s")
    print(f"{'':34}" + "".join(f"{n:>8}" for n in numbers))
    for way in ways:
        cells = [times.get((n, way)) for n in numbers]
        line = "".join(f"{product.bytes / took / 1e12:8.2f}" if took else f"{'-':>8}" for took in cells)
        print(f"{' '.join(map(str, way)):34}{line}")
    best = {}
    for n in numbers:
        found = [(took, way) for (rows, way), took in times.items() if rows == n]
        if found:
            took, way = min(found)
            best[n] = {"way": way, "us": round(took * 1e6, 2), "tb_s": round(product.bytes / took / 1e12, 3)}
    few = [n for n in numbers if n <= 128]
    sums = {way: sum(times.get((n, way), 1.0) for n in few) for way in ways if way[0] == "skinny"}
    strict = min(sums, key=lambda way: sums[way]) if sums else None
    print(f"  best for all rows up to 128 (strict): {strict}")
    return {"shape": [product.shape.outputs, product.shape.inputs], "best": best, "strict": strict}


def norm_alone(deadline: float) -> dict[str, float | None]:
    """Microseconds of the norm as a kernel of its own."""
    took = {}
    for n, width in ((1, 4096), (64, 4096), (128, 4096), (1, 576)):
        x, norm = torch.randn(n, width, device=DEVICE).bfloat16(), Norm(torch.ones(width, device=DEVICE), 1e-5)
        seconds = seconds_each(lambda i, x=x, norm=norm: row_kernels.rms_norm(x, norm), deadline)
        took[f"{n}x{width}"] = None if seconds is None else round(seconds * 1e6, 2)
    print("\nnorm alone, us:", took)
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=110.0, help="stop measuring after this long")
    parser.add_argument("--quick", action="store_true", help="fewer rows and no quantised formats")
    arguments = parser.parse_args()
    begin = time.perf_counter()
    deadline = begin + arguments.seconds
    numbers = (1, 16, 64) if arguments.quick else ROWS
    results = {}
    for shape in SHAPES:
        product = Product(shape)
        plan = (SMALL_TILES if product.bytes < 16e6 else LARGE_TILES, ROW_TILES)
        results[shape.name] = measure(product, shape.name, numbers, plan, deadline)
        del product
    for storage in () if arguments.quick else ("fp8", "int8", "int4"):
        for shape in SHAPES[:5]:
            name, product = f"{shape.name} {storage}", Product(shape, storage)
            results[name] = measure(product, name, (1, 64), (QUANTISED_TILES, QUANTISED_ROW_TILES), deadline)
            del product
    results["norm_us"] = norm_alone(deadline + 5)
    results["seconds"] = round(time.perf_counter() - begin, 1)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
