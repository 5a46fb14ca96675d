"""The MLPs of a layer on a GPU: one, or a mixture of experts, of which only those are read that rows have chosen.

A mixture takes four launches behind its router: choices, places grouped by expert, one product for gates and ups of all
experts, one for downs, and the weighted sums. Nothing looks at values on the host, so all of it can be captured, and
sums are taken in an order that a row's neighbours do not change.
"""
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from draftwood.model.spec import ExpertsSpec
from draftwood.ops.cuda.expert_kernels import RECORD, choose_kernel, experts_kernel, group_kernel, mix_kernel
from draftwood.ops.cuda.linear import CudaLinear, Stream
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
        spec, (n, top_k) = self.spec, (len(read), self.spec.top_k)
        places = n * top_k
        rows = min(max(FEWEST_ROWS, triton.next_power_of_2(triton.cdiv(places, spec.count))), LARGEST_TILE)
        most = min(spec.count, places) + places // rows

        def numbers(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int32, device=read.device)

        shares = torch.empty(n, top_k, dtype=torch.float32, device=read.device)
        found = Routes(numbers(n, top_k), shares, numbers(places), numbers(most, RECORD.value), numbers(1), rows)
        if not n:
            return found
        choose_kernel[(n,)](
            self.router(Stream(read), torch.float32), self.allowed, found.chosen, shares, found.num_tiles,
            spec.count, triton.next_power_of_2(spec.count), top_k, triton.next_power_of_2(top_k), spec.normalised,
            **OVERLAPPING,
        )  # fmt: skip
        block = min(1024, max(32, triton.next_power_of_2(places)))
        group_kernel[(spec.count,)](
            found.chosen, found.order, found.tiles, found.num_tiles, places, rows, block, **OVERLAPPING
        )
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
        wide = self._product(self.gate_up, read, routes, read.dtype, self.spec.expert.activation)
        made = self._product(self.down, wide, routes, torch.float32, None)
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
        self, linear: CudaLinear, x: Tensor, routes: Routes, dtype: torch.dtype, activation: str | None
    ) -> Tensor:
        """Each place times the matrix of its expert. [N or N * top_k, in] -> [N * top_k, out]."""
        weight, gated, places = linear.weight, activation is not None, routes.chosen.numel()
        outputs = weight.outputs // self.spec.count // (2 if gated else 1)
        cut = fitting(expert_tiles(weight.storage, gated), routes.rows, gated)
        out = torch.empty(places, outputs, dtype=dtype, device=x.device)
        experts_kernel[(len(routes.tiles), triton.cdiv(outputs, cut.block_out))](
            x, weight.codes, weight.scale, weight.minimum, linear.bias, routes.order, routes.tiles, routes.num_tiles,
            out, places, outputs, weight.inputs, weight.stride, places // len(x), routes.rows, cut.block_out,
            cut.padded, cut.block_k, weight.storage, ACTIVATIONS[activation],
            num_warps=cut.warps, num_stages=cut.stages, **OVERLAPPING,
        )  # fmt: skip
        return out


def expert_tiles(storage: int, gated: bool) -> Tiles:
    """As those of small matrices in `products.tiles`: an expert has few outputs, but several are read at a time."""
    return Tiles(32 if gated else 64, 64 if storage == DENSE.value else 128, 1, 4, 4)


MLP = CudaMlp | CudaExperts
