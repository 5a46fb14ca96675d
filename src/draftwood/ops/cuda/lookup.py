"""`ops.lookup` as one kernel: a program a text."""
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _lookup(
    history,
    rows,
    lengths,
    out,
    alike,
    stride,
    NODES,
    LONGEST: tl.constexpr,
    SHORTEST: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
):
    b = tl.program_id(0)
    text = history + tl.load(rows + b) * stride
    length = tl.load(lengths + b)
    lane = tl.arange(0, WIDTH)
    best = tl.full((WIDTH,), -1, tl.int64)
    for start in range(0, length, WIDTH):
        place = start + lane
        same = place < length
        equal = tl.zeros((WIDTH,), tl.int64)
        for back in tl.static_range(1, LONGEST + 1):
            own = tl.load(text + tl.maximum(length - back, 0))
            theirs = tl.load(text + place - back, mask=(place >= back) & (place < length), other=-1)
            same = same & (theirs == own) & (length >= back)
            equal += same.to(tl.int64)
        rank = tl.where(equal >= SHORTEST, equal * stride + place, -1)
        best = tl.maximum(best, rank)
    found = tl.max(best, 0)
    node = tl.arange(0, PADDED)
    at = found % stride + node
    there = (found >= 0) & (at < length) & (node < NODES)
    token = tl.load(text + at, mask=there, other=-1)
    tl.store(out + b * NODES + node, token, mask=node < NODES)
    tl.store(alike + b, tl.where(found >= 0, found // stride, 0))


def suffix_lookup(
    history: Tensor, rows: Tensor, lengths: Tensor, nodes: int, longest: int, shortest: int
) -> tuple[Tensor, Tensor]:
    """See `ops.lookup.suffix_lookup`."""
    out = torch.empty(len(rows), nodes, dtype=torch.int64, device=history.device)
    alike = torch.empty(len(rows), dtype=torch.int64, device=history.device)
    _lookup[(len(rows),)](
        history, rows, lengths, out, alike, history.stride(0), nodes, longest, shortest,
        BLOCK, triton.next_power_of_2(nodes),
    )  # fmt: skip
    return out, alike
