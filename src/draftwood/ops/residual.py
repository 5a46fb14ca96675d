"""The ops over whole vocabularies that acceptance laws need, in plain torch and by their faster twins.

`Residual` is what is left of a target's row once draft laws were taken from it: U_0 = weight p, and in turn
U_i = (U_{i-1} - scale_i q_i)+. `reject` tries draws one after the other, each against what those before it left. A
point mass is a law without a row. On a CPU C kernels read the rows and write little but sums.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from draftwood.ops.native import Kernels, kernels

WIDEST_ON_CUDA = 8  # draws behind a node that the CUDA kernels are unrolled for


@dataclass(frozen=True)
class Draws:
    """The draws behind n nodes, up to W each, in the order they are tried."""

    exists: Tensor  # [n, W] bool
    child: Tensor  # [n, W] nodes; any where there is none
    tokens: Tensor  # [n, W]
    rows: Tensor  # [n, W] of q; -1 for a point mass
    chance: Tensor  # [n, W] float64: of the draw's own token under its law


@dataclass(frozen=True)
class Residual:
    """n rows of p with up to k laws to be taken from each, in order."""

    p: Tensor  # [M, V] float32 or float64
    nodes: Tensor  # [n] rows of p
    weight: Tensor  # [n] float64
    q: Tensor | None  # [R, V] typed as p
    rows: Tensor  # [n, k] rows of q, -1: a point mass
    tokens: Tensor  # [n, k] where a point mass lies
    scales: Tensor  # [n, k] float64, 0: nothing is taken

    def written_out(self) -> Tensor:
        """U_k. [n, V]."""
        library = native_for(self.p, self.q)
        if library is None:
            return self.written_out_reference()
        return self._native(library.dw_residual_rows, torch.empty(len(self.nodes), self.p.shape[1]))

    def written_out_reference(self) -> Tensor:
        """What `written_out` must be."""
        left = self.p[self.nodes].mul_(self.weight.to(self.p.dtype)[:, None])
        for row, token, scale in zip(self.rows.unbind(1), self.tokens.unbind(1), self.scales.unbind(1), strict=True):
            left = self._take(left, row, token[:, None], scale.to(left.dtype)[:, None])
        return left

    def _take(self, left: Tensor, row: Tensor, token: Tensor, scale: Tensor) -> Tensor:
        point = (row < 0)[:, None]
        if self.q is not None:
            drawn = torch.where(point, 0, scale)
            left = left.sub_(self.q[row.clamp(min=0)].to(left.dtype).mul_(drawn)).clamp_(min=0)
        there = left.gather(1, token)
        return left.scatter_(1, token, torch.where(point, (there - scale).clamp(min=0), there))

    def mass(self) -> Tensor:
        """The sum of U_k. [n] float64."""
        library = native_for(self.p, self.q)
        if library is None:
            return self.mass_reference()
        return self._native(library.dw_residual_mass, torch.empty(len(self.nodes), dtype=torch.float64))

    def mass_reference(self) -> Tensor:
        """What `mass` must be."""
        return self.written_out_reference().sum(-1, dtype=torch.float64)

    def _native(self, kernel: Callable[..., None], out: Tensor) -> Tensor:
        parts = (self.p, self.q, self.nodes, self.weight, self.rows, self.tokens, self.scales)
        kept, addresses = pointers(*parts)
        kernel(*addresses[:2], self.p.shape[1], *self.rows.shape, *addresses[2:], out.data_ptr())
        del kept
        return out


@dataclass(frozen=True)
class Rejected:
    """What became of the draws."""

    chance: Tensor  # [n, W] float64: that a draw is accepted, once all before it were rejected
    scales: Tensor  # [n, W] float64: what survived before each draw, the missing part of the target included
    values: Tensor  # [n, W] float64: what is left at the draws' tokens
    mass: Tensor  # [n] float64: what is left in all


def reject(p: Tensor, q: Tensor | None, nodes: Tensor, weight: Tensor, draws: Draws, tried: int) -> Rejected:
    """Try the first `tried` draws behind `nodes` [n] against weight · p there, one after the other."""
    library = native_for(p, q)
    if library is not None:
        return _reject_native(library, p, q, nodes, weight, draws, tried)
    return reject_reference(p, q, nodes, weight, draws, tried)


def reject_reference(p: Tensor, q: Tensor | None, nodes: Tensor, weight: Tensor, draws: Draws, tried: int) -> Rejected:
    """What `reject` must be. Masses stay unnormalised: what is left and what was missing from the start survives."""
    mass, missing = weight, 1 - weight
    values = weight[:, None] * p[nodes[:, None], draws.tokens].double()
    chance, scales = torch.zeros_like(values), torch.zeros_like(values)
    for place in range(tried):
        survives = torch.where(draws.exists[:, place], mass + missing, 0)
        offered = survives * draws.chance[:, place]
        # Nothing wanted and nothing offered: there is nothing to lose, so the draw is taken.
        fair = torch.where(offered > 0, values[:, place] / torch.where(offered > 0, offered, 1), 1).clamp(max=1)
        chance[:, place] = torch.where(draws.exists[:, place], fair, 0)
        scales[:, place] = survives
        law = law_at(q, draws.rows[:, place], draws.tokens[:, place], draws.tokens)
        values = (values - survives[:, None] * law).clamp(min=0)
        spent = (draws.rows[:, : place + 1], draws.tokens[:, : place + 1], scales[:, : place + 1])
        mass = Residual(p, nodes, weight, q, *spent).mass_reference()
    return Rejected(chance, scales, values, mass)


def law_at(q: Tensor | None, rows: Tensor, points: Tensor, tokens: Tensor) -> Tensor:
    """What laws (row of q, or point mass) [n], [n] say of some tokens [n, W]. [n, W] float64."""
    same = (points[:, None] == tokens).double()
    row = rows[:, None]
    return same if q is None else torch.where(row >= 0, q[row.clamp(min=0), tokens].double(), same)


def _reject_native(
    library: Kernels, p: Tensor, q: Tensor | None, nodes: Tensor, weight: Tensor, draws: Draws, tried: int
) -> Rejected:
    count, width = draws.tokens.shape
    chance, scales, values = torch.zeros(3, count, width, dtype=torch.float64)
    mass = torch.empty(count, dtype=torch.float64)
    kept, addresses = pointers(p, q, nodes, weight, draws.rows, draws.tokens, draws.chance, draws.exists)
    outputs = (x.data_ptr() for x in (chance, scales, values, mass))
    library.dw_reject(*addresses[:2], p.shape[1], count, width, tried, *addresses[2:], *outputs)
    del kept
    return Rejected(chance, scales, values, mass)


def pointers(*tensors: Tensor | None) -> tuple[list[Tensor | None], list[int]]:
    """Contiguous tensors, to be held on to as long as their addresses are used."""
    kept = [None if x is None else x.contiguous() for x in tensors]
    return kept, [0 if x is None else x.data_ptr() for x in kept]


def _single(p: Tensor, q: Tensor | None) -> bool:
    return p.dtype == torch.float32 and (q is None or q.dtype == torch.float32)


def on_cuda(p: Tensor, q: Tensor | None) -> bool:
    """Whether the CUDA kernels can take such rows."""
    return p.is_cuda and _single(p, q)


def native_for(p: Tensor, q: Tensor | None) -> Kernels | None:
    """The C kernels, if they are there and can take such rows."""
    return kernels() if p.device.type == "cpu" and _single(p, q) else None
