"""Matrix products with weights laid out for few rows.

Which layout is best depends on the shape; docs/adr/0008 has the measurements. Most weights are stored [in, out]; a
head is packed by oneDNN, which then scores five rows in the time of one and a third.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

WIDE = 16384  # outputs from which packing pays: the head of any real vocabulary
PACKED_FOR = 32  # rows oneDNN is told to expect; any number is right, and this is the best for 1 … 32


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


class PackedLinear:
    """Weights in oneDNN's own layout, float32 on a CPU. The packed form cannot be read back."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR)
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """[N, in] -> [N, out]."""
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """The product, then the sum."""
        return self(x).add_(residual)


class TiedHead:
    """An output head whose weights are the token embedding's: kept [in, out] for one row, and packed for several.

    The embedding has to be readable beside a packed head in any case; kept [in, out] it serves single rows as well.
    """

    def __init__(self, embedding: Tensor) -> None:
        self._dense = DenseLinear(embedding.t().contiguous())
        self._packed = PackedLinear(embedding)

    @property
    def embedding(self) -> Tensor:
        """[V, hidden], a view."""
        return self._dense.weight.t()

    def __call__(self, x: Tensor) -> Tensor:
        """[N, in] -> [N, out]."""
        return self._dense(x) if x.shape[0] == 1 else self._packed(x)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """The product, then the sum."""
        return self(x).add_(residual)


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


def can_pack(weight: Tensor) -> bool:
    """Whether packing is possible for its device and dtype, and pays for its shape."""
    packable = weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available()
    return packable and weight.shape[0] >= WIDE


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """From the usual [out, in] layout to the fastest there is for its device, dtype and shape."""
    return PackedLinear(weight, bias) if can_pack(weight) else DenseLinear(weight.t().contiguous(), bias)


def make_tied_head(embedding: Tensor) -> tuple[Linear, Tensor]:
    """A head that shares the embedding [V, hidden], and the embedding to read tokens from."""
    if can_pack(embedding):
        head = TiedHead(embedding)
        return head, head.embedding
    head = DenseLinear(embedding.t().contiguous())
    return head, head.weight.t()
