"""`ops.staging` as one kernel."""
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwood.ops.cuda.pdl import OVERLAPPING, wait_for_predecessors

BLOCK = 128


@triton.jit(do_not_specialize=["count", "width", "highest", "shift"])
def _staged(
    lengths, table, index, position, out, count, width, highest, shift,
    ROWS: tl.constexpr, PAGE: tl.constexpr, LINEAR: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    wait_for_predecessors()
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    there = at < count
    b = at // ROWS
    length = tl.load(lengths + b, mask=there, other=1)
    key = tl.maximum(length + shift + tl.load(index + at, mask=there, other=0), 0)
    place = tl.maximum(length + shift + tl.load(position + at, mask=there, other=0), 0)
    page = tl.load(table + b.to(tl.int64) * width + tl.minimum(key // PAGE, width - 1), mask=there, other=0)
    tl.store(out + at, tl.minimum(place, highest), mask=there)
    tl.store(out + count + at, page * PAGE + key % PAGE, mask=there)
    if LINEAR:
        tl.store(out + 2 * count + at, key + 1, mask=there)
    else:
        tl.store(out + 2 * count + at, length, mask=there)


def staged(
    lengths: Tensor,
    table: Tensor,
    index: Tensor,
    position: Tensor,
    shift: int,
    page_size: int,
    highest: int,
    linear: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `ops.staging.staged`."""
    out = torch.empty(3, index.numel(), dtype=torch.int64, device=lengths.device)
    _staged[(triton.cdiv(index.numel(), BLOCK),)](
        lengths, table, index.contiguous(), position.contiguous(), out, index.numel(), table.stride(0), highest, shift,
        index.shape[1], page_size, linear, BLOCK, **OVERLAPPING,
    )  # fmt: skip
    return out[0], out[1], out[2]
