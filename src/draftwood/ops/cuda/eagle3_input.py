"""`ops.side_by_side` as one kernel: two lookups, two norms, one row."""
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwood.ops.cuda.pdl import OVERLAPPING, wait_and_make_way
from draftwood.ops.eagle3_input import PairNorms


@triton.jit
def _side_by_side(
    table, tokens, features, rows, token_gain, feature_gain, residual, wide, hidden, eps,
    NORMED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Half a row a program, the token's or the feature's; what the stream begins with is NORMED or as it is."""
    wait_and_make_way()
    row, half = tl.program_id(0).to(tl.int64), tl.program_id(1)
    k = tl.arange(0, BLOCK)
    inside = k < hidden
    if half == 0:
        value = tl.load(table + tl.load(tokens + row) * hidden + k, mask=inside, other=0.0).to(tl.float32)
        gain = tl.load(token_gain + k, mask=inside, other=0.0).to(tl.float32)
    else:
        value = tl.load(features + tl.load(rows + row) * hidden + k, mask=inside, other=0.0).to(tl.float32)
        gain = tl.load(feature_gain + k, mask=inside, other=0.0).to(tl.float32)
    normed = value * tl.rsqrt(tl.sum(value * value, 0) / hidden + eps) * gain
    tl.store(wide + (row * 2 + half) * hidden + k, normed.to(wide.dtype.element_ty), mask=inside)
    first = normed if NORMED else value
    tl.store(residual + row * hidden + k, first.to(residual.dtype.element_ty), mask=inside & (half == 1))


def side_by_side(
    table: Tensor, tokens: Tensor, features: Tensor, rows: Tensor, norms: PairNorms
) -> tuple[Tensor, Tensor]:
    """See `ops.side_by_side.side_by_side`; in float32, rounded once."""
    count, hidden = len(tokens), features.shape[1]
    residual = torch.empty(count, hidden, dtype=features.dtype, device=features.device)
    wide = torch.empty(count, 2 * hidden, dtype=features.dtype, device=features.device)
    if count:
        block = triton.next_power_of_2(hidden)
        _side_by_side[(count, 2)](
            table, tokens, features.contiguous(), rows, norms.token, norms.feature, residual, wide, hidden, norms.eps,
            norms.before_residual, block, num_warps=min(max(block // 512, 1), 16), **OVERLAPPING,
        )  # fmt: skip
    return residual, wide
