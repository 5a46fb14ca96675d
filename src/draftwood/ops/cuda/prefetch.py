"""The weights that a product reads first, on their way before it begins.

Between two products of one row the memory has nothing to do, so as the first ends its last programs ask for some of
the second one's weights. Products of several rows gain nothing by it.
"""
# pyright: reportMissingImports=false, reportIndexIssue=false, reportUnreachable=false
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from draftwood.ops.cuda.pdl import ask_for_all

AT_ONCE = tl.constexpr(512)  # weights of a request


@dataclass(frozen=True)
class Beginning:
    """The first weights of each of several equal parts of a matrix, one below the other."""

    weight: Tensor  # [out, in], two bytes each
    requests: int  # for each part
    parts: int

    @classmethod
    def of(cls, weight: Tensor, size: int, parts: int = 1) -> Beginning | None:
        """About `size` bytes; None where they cannot be asked for: parts must begin with sixteen of them."""
        each = weight.numel() // parts
        if weight.element_size() != 2 or each % 8:
            return None
        return cls(weight, min(each, size // (2 * parts)) // AT_ONCE.value, parts)

    @property
    def arguments(self) -> tuple[Tensor, int, int, int]:
        """As the kernels take it."""
        return self.weight, self.requests, self.parts, self.weight.numel() // self.parts


NOTHING = (None, 0, 1, 0)  # to begin with


@triton.jit
def ask_for_share(
    then, requests, program, programs, PARTS: tl.constexpr, DISTANCE: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """One program's share of a `Beginning`, on its way."""
    count = requests * PARTS
    share = tl.cdiv(count, programs)
    i = tl.arange(0, LANES)
    for begin in range(0, share, LANES):
        number = program * share + begin + i
        at = then + (number // requests).to(tl.int64) * DISTANCE + (number % requests).to(tl.int64) * AT_ONCE
        ask_for_all(at, tl.where((begin + i < share) & (number < count), 2 * AT_ONCE, 0))
