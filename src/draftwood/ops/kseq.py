"""K-SEQ's bar: the largest 1 / rho for which k independent draws may each be accepted with min(1, p / (rho q)).

With t = 1 / rho and beta(t) the sum of min(t weight p, q), a bar is lossless where t (1 - (1 - beta)^k) <= beta. beta
is concave in t: its chord between two places lies below it, so what is lossless on the chord is lossless. Halving the
bracket and solving along its chord, a few times, comes as close to the best bar as can be told.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftwood.ops.residual import Residual, native_for, on_cuda, pointers

ROUNDS = 8
HALVINGS = 50  # of plain numbers, no rows
ROUNDING = 1e-15


def kseq_bar(
    p: Tensor, q: Tensor | None, nodes: Tensor, weight: Tensor, rows: Tensor, count: Tensor
) -> tuple[Tensor, Tensor]:
    """The bar t and beta there, for `count` [n] draws from rows of q [n] behind `nodes` [n]. [n], [n] float64."""
    if q is None:  # nothing was drawn
        return torch.ones_like(weight), torch.zeros_like(weight)
    if on_cuda(p, q):
        from draftwood.ops.cuda.kseq import kseq_bar as launch

        return launch(p, q, nodes, weight, rows, count)
    library = native_for(p, q)
    if library is None:
        return kseq_bar_reference(p, q, nodes, weight, rows, count)
    bar = torch.empty(2, len(nodes), dtype=torch.float64)
    kept, addresses = pointers(p, q, nodes, weight, rows, count)
    library.dw_kseq_bar(*addresses[:2], p.shape[1], len(nodes), *addresses[2:], bar.data_ptr())
    del kept
    return bar[0], bar[1]


def kseq_bar_reference(
    p: Tensor, q: Tensor | None, nodes: Tensor, weight: Tensor, rows: Tensor, count: Tensor
) -> tuple[Tensor, Tensor]:
    """What `kseq_bar` must be, as far as rounding lets it."""
    drawn = (count > 0).double()[:, None]

    def beta(bar: Tensor) -> Tensor:
        left = Residual(p, nodes, bar * weight, q, rows[:, None], torch.zeros_like(rows)[:, None], drawn)
        return (bar * weight - left.mass_reference()).clamp(min=0)

    end = torch.ones_like(weight)
    end_beta = beta(end)
    low, high = 1 / count.double().clamp(min=1), end
    low_beta, high_beta = beta(low), end_beta
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        found = beta(middle)
        valid = _lossless(middle, found, count)
        low, low_beta = torch.where(valid, middle, low), torch.where(valid, found, low_beta)
        high, high_beta = torch.where(valid, high, middle), torch.where(valid, high_beta, found)
        low = _along_chord(low, high, low_beta, high_beta, count)
        low_beta = beta(low)
    done = _lossless(end, end_beta, count)
    return torch.where(done, end, low), torch.where(done, end_beta, low_beta)


def _lossless(bar: Tensor, beta: Tensor, count: Tensor) -> Tensor:
    return bar * (1 - (1 - beta) ** count) <= beta + ROUNDING


def _along_chord(low: Tensor, high: Tensor, low_beta: Tensor, high_beta: Tensor, count: Tensor) -> Tensor:
    start, apart = low, high - low
    slope = torch.where(apart > 0, (high_beta - low_beta) / torch.where(apart > 0, apart, 1), 0)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        valid = _lossless(middle, low_beta + (middle - start) * slope, count)
        low, high = torch.where(valid, middle, low), torch.where(valid, high, middle)
    return low
