"""The MLPs of a layer on a GPU: one, or a mixture of experts, of which only those are read that rows have chosen.

A mixture takes four launches behind its router: choices, places grouped by expert, one product for gates and ups of all
experts, one for downs, and the weighted sums. Nothing looks at values on the host, so all of it can be captured, and
sums are taken in an order that a row's neighbours do not change.
"""
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from draftwood.model.spec import ExpertsSpec
from draftwood.ops.cuda.expert_kernels import RECORD, choose_kernel, experts_kernel, group_kernel, mix_kernel
from draftwood.ops.cuda.linear import CudaLinear, Stream, pack
from draftwood.ops.cuda.pdl import OVERLAPPING
from draftwood.ops.cuda.prefetch import Beginning
from draftwood.ops.cuda.product_kernels import DENSE
from draftwood.ops.cuda.products import ACTIVATIONS, LARGEST_TILE, Norm, Tiles, fitting

FEWEST_ROWS = 16  # of a tile


@dataclass(frozen=True)
class CudaMlp:
    """down(act(gate) · up)."""

    gate_up: CudaLinear
    down: CudaLinear
    activation: str

    def __call__(self, x: Stream, routes: list[Tensor] | None = None) -> Tensor:
        """[N, in] -> [N, out]."""
        return self.down(Stream(self.gate_up.gated(x, self.activation)))

    def add_to(
        self, x: Stream, norm: Norm | None, ahead: int = 0, then: Beginning | None = None,
        routes: list[Tensor] | None = None,
    ) -> Stream:  # fmt: skip
        """The stream with it added, to be read through `norm`; asks for `ahead` bytes of its second product early."""
        wide = self.gate_up.gated(x, self.activation, self.down.beginning(ahead))
        return self.down.add_to(x.hidden, wide, norm, then)

    def beginning(self, size: int) -> Beginning | None:
        """About `size` bytes that it will read first for one row."""
        return self.gate_up.beginning(size, gated=True)


@dataclass(frozen=True)
class Routes:
    """Which expert each place has, and the tiles that they make."""

    chosen: Tensor  # [N, top_k] int32
    shares: Tensor  # [N, top_k] float32
    order: Tensor  # [N * top_k] int32 places, those of an expert together
    tiles: Tensor  # [most tiles, 3] int32
    num_tiles: Tensor  # [1] int32 of which so many are there
    rows: int  # places of a tile, at most

    @classmethod
    def room(cls, n: int, top_k: int, count: int, device: torch.device) -> Routes:
        """Memory for those of so many rows among `count` experts."""
        places = n * top_k
        rows = min(max(FEWEST_ROWS, triton.next_power_of_2(triton.cdiv(places, count))), LARGEST_TILE)
        most = min(count, places) + places // rows

        def numbers(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        shares = torch.empty(n, top_k, dtype=torch.float32, device=device)
        return cls(numbers(n, top_k), shares, numbers(places), numbers(most, RECORD.value), numbers(1), rows)

    def group(self, count: int) -> None:
        """Fill in the order and the tiles of what was chosen; there are none yet."""
        places = self.chosen.numel()
        block = min(1024, max(32, triton.next_power_of_2(places)))
        group_kernel[(count,)](
            self.chosen, self.order, self.tiles, self.num_tiles, places, self.rows, block, **OVERLAPPING
        )


@dataclass(frozen=True)
class CudaExperts:
    """A router, experts, and perhaps an MLP that runs for every row, as strongly as its gate says."""

    spec: ExpertsSpec
    router: CudaLinear
    gate_up: CudaLinear  # of all experts, one below the other
    down: CudaLinear
    shared: CudaMlp | None = None
    strength: CudaLinear | None = None  # -> [1]
    allowed: Tensor | None = None  # [count] uint8 which experts may be chosen; None: all

    def narrowed(self, allowed: Tensor, top_k: int) -> CudaExperts:
        """The same with a router that picks `top_k` of those allowed."""
        return replace(self, allowed=allowed, spec=replace(self.spec, top_k=top_k))

    def __call__(self, x: Stream, routes: list[Tensor] | None = None) -> Tensor:
        """[N, in] -> [N, out]; `routes` gets what was chosen."""
        return self._run(x, None, None, routes)[0]

    def add_to(
        self, x: Stream, norm: Norm | None, ahead: int = 0, then: Beginning | None = None,
        routes: list[Tensor] | None = None,
    ) -> Stream:  # fmt: skip
        """The stream with it added, to be read through `norm`; `routes` gets what was chosen."""
        hidden, normed = self._run(x, x.hidden, norm, routes)
        return Stream(hidden, norm, normed)

    def beginning(self, size: int) -> Beginning | None:
        """Which weights it reads is not known before its router has run."""
        return None

    def routes(self, read: Tensor) -> Routes:
        """The choices of rows that are normed already."""
        spec, n = self.spec, len(read)
        found = Routes.room(n, spec.top_k, spec.count, read.device)
        if n:
            choose_kernel[(n,)](
                self.router(Stream(read), torch.float32), self.allowed, found.chosen, found.shares, found.num_tiles,
                spec.count, triton.next_power_of_2(spec.count), spec.top_k, triton.next_power_of_2(spec.top_k),
                spec.normalised, **OVERLAPPING,
            )  # fmt: skip
            found.group(spec.count)
        return found

    def _run(
        self, x: Stream, residual: Tensor | None, norm: Norm | None, told: list[Tensor] | None
    ) -> tuple[Tensor, Tensor | None]:
        read = x.read()
        out = torch.empty_like(x.hidden)
        routes = self.routes(read)
        if told is not None:
            told.append(routes.chosen)
        if not len(out):
            return out, None
        wide = _product(self.gate_up, read, routes, self.spec.count, read.dtype, self.spec.expert.activation)
        made = _product(self.down, wide, routes, self.spec.count, torch.float32, None)
        shared = strength = None
        if self.shared is not None and self.strength is not None:
            shared, strength = self.shared(Stream(read)), self.strength(Stream(read), torch.float32)
        n, width = out.shape
        normed = None if norm is None else torch.empty_like(out)
        block = triton.next_power_of_2(width) if norm else min(1024, triton.next_power_of_2(width))
        mix_kernel[(n, triton.cdiv(width, block))](
            made, routes.shares, shared, strength, residual, out, norm and norm.weight, normed, width,
            norm.eps if norm else 0.0, self.spec.top_k, block, num_warps=8 if norm else 4, **OVERLAPPING,
        )  # fmt: skip
        return out, normed


def _product(
    linear: CudaLinear, x: Tensor, routes: Routes, count: int, dtype: torch.dtype, activation: str | None
) -> Tensor:
    """Each place times the matrix of its expert, of `count` that lie one below the other. [N or N * top_k, in] ->
    [N * top_k, out].
    """
    weight, gated, places = linear.weight, activation is not None, routes.chosen.numel()
    outputs = weight.outputs // count // (2 if gated else 1)
    cut = fitting(expert_tiles(weight.storage, gated), routes.rows, gated)
    out = torch.empty(places, outputs, dtype=dtype, device=x.device)
    experts_kernel[(len(routes.tiles), triton.cdiv(outputs, cut.block_out))](
        x, weight.codes, weight.scale, weight.minimum, linear.bias, routes.order, routes.tiles, routes.num_tiles,
        out, places, outputs, weight.inputs, weight.stride, places // len(x), routes.rows, cut.block_out,
        cut.padded, cut.block_k, weight.storage, ACTIVATIONS[activation],
        num_warps=cut.warps, num_stages=cut.stages, **OVERLAPPING,
    )  # fmt: skip
    return out


def run_grouped(
    x: Tensor, chosen: Tensor, shares: Tensor, gate_up: Tensor, down: Tensor, gate: Callable[[Tensor], Tensor]
) -> Tensor:
    """The same for choices [N, top_k] of another router and matrices [count, out, in]. [N, in] -> [N, out]."""
    n, top_k = chosen.shape
    if not n:
        return torch.empty_like(x)
    routes = Routes.room(n, top_k, len(gate_up), x.device)
    routes.chosen.copy_(chosen)
    routes.num_tiles.zero_()
    routes.group(len(gate_up))
    first, second = (CudaLinear(pack([part.flatten(0, 1)], part.shape[2])) for part in (gate_up, down))
    wide = _product(first, x.contiguous(), routes, len(gate_up), x.dtype, None)
    made = _product(second, gate(wide).contiguous(), routes, len(gate_up), torch.float32, None)
    return (made.view(n, top_k, -1) * shares[..., None]).sum(1).to(x.dtype)


def expert_tiles(storage: int, gated: bool) -> Tiles:
    """As those of small matrices in `products.tiles`: an expert has few outputs, but several are read at a time."""
    return Tiles(32 if gated else 64, 64 if storage == DENSE.value else 128, 1, 4, 4)


MLP = CudaMlp | CudaExperts
