"""Matrix products by torch, for every device and dtype. On a CPU in float32 our own kernels do better (ops/native)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from draftwood.ranks import Ranks


class Linear(Protocol):
    """x W + b."""

    def __call__(self, x: Tensor) -> Tensor:
        """[N, in] -> [N, out]."""
        ...

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + (x W + b). [N, out], [N, in] -> [N, out]."""
        ...


@dataclass(frozen=True)
class DenseLinear:
    """Weights stored [in, out], for every device and dtype."""

    weight: Tensor  # [in, out]
    bias: Tensor | None = None  # [out]

    def __call__(self, x: Tensor) -> Tensor:
        """[N, in] -> [N, out]."""
        return torch.mm(x, self.weight) if self.bias is None else torch.addmm(self.bias, x, self.weight)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """One pass, residual included."""
        out = torch.addmm(residual, x, self.weight)
        return out if self.bias is None else out.add_(self.bias)


@dataclass(frozen=True)
class RoundedInputs:
    """A product whose inputs are rounded first."""

    inner: Linear
    rounding: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        """[N, in] -> [N, out]."""
        return self.inner(self.rounding(x))

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """The product, then the sum."""
        return self.inner.add_to(residual, self.rounding(x))


@dataclass(frozen=True)
class Summed:
    """A product of which each rank computes the part that its inputs make: the result is the sum."""

    inner: Linear
    ranks: Ranks

    def __call__(self, x: Tensor) -> Tensor:
        """[N, in] -> [N, out]."""
        return self.ranks.sum(self.inner(x))

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """The sum, then the residual."""
        return residual + self(x)


def summed(linear: Linear, ranks: Ranks) -> Linear:
    """The product, summed over the ranks where there are several."""
    return linear if ranks.size == 1 else Summed(linear, ranks)


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """From the usual [out, in] layout to ours."""
    return DenseLinear(weight.t().contiguous(), bias)


def make_tied_head(embedding: Tensor) -> tuple[Linear, Tensor]:
    """A head that shares the embedding [V, hidden], and the embedding to read tokens from."""
    head = DenseLinear(embedding.t().contiguous())
    return head, head.weight.t()
