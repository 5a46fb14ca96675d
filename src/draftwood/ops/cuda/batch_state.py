"""Gather and advance the batch state, one kernel each; `cache/batch_state.py` has the torch reference."""
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwood.ops.cuda.pdl import OVERLAPPING, wait_for_predecessors

PAGES = 256  # of a block table at a time
NODES = 64  # of a tree at a time


@triton.jit(do_not_specialize=["longest", "pages", "stride", "size"])
def _open(
    rows, length, seed, sampling, history, table, integers, numbers, temperature, own_table, longest, pages, stride,
    size, WIDTH: tl.constexpr,
):  # fmt: skip
    """One sequence's state, gathered from its row of the batch state."""
    wait_for_predecessors()
    b = tl.program_id(0)
    slot = tl.load(rows + b)
    own = tl.load(length + slot)
    tl.store(integers + b, own)
    tl.store(integers + size + b, tl.load(seed + slot))
    tl.store(integers + 2 * size + b, tl.load(history + slot * longest + own - 1))
    tl.store(integers + 3 * size + b, tl.load(sampling + slot * 4 + 1).to(tl.int64))
    tl.store(temperature + b, tl.load(sampling + slot * 4).to(tl.float32))
    tl.store(numbers + b, tl.load(sampling + slot * 4 + 2))
    tl.store(numbers + size + b, tl.load(sampling + slot * 4 + 3))
    for start in range(0, pages, WIDTH):
        page = start + tl.arange(0, WIDTH)
        tl.store(
            own_table + b * pages + page, tl.load(table + slot * stride + page, mask=page < pages), mask=page < pages
        )


def opened(
    rows: Tensor, length: Tensor, seed: Tensor, sampling: Tensor, history: Tensor, table: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Integers [4, B]: length, seed, last token, top k; numbers [2, B]: top p, min p; temperature [B]; pages [B, P]."""
    size, pages = len(rows), table.shape[1]
    integers = torch.empty(4, size, dtype=torch.int64, device=rows.device)
    numbers = torch.empty(2, size, dtype=torch.float64, device=rows.device)
    temperature = torch.empty(size, dtype=torch.float32, device=rows.device)
    own_table = torch.empty(size, pages, dtype=torch.int64, device=rows.device)
    _open[(size,)](
        rows, length, seed, sampling, history, table, integers, numbers, temperature, own_table,
        history.shape[1], pages, table.stride(0), size, PAGES, **OVERLAPPING,
    )  # fmt: skip
    return integers, numbers, temperature, own_table


@triton.jit(do_not_specialize=["longest", "padding_row", "steps"])
def _close(
    rows, lengths, tokens, offsets, path, accepted, bonus, usable, history, length, outcome, longest, padding_row,
    steps, STEPS: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
    """Append one sequence's gained tokens."""
    wait_for_predecessors()
    b = tl.program_id(0).to(tl.int64)
    slot, before = tl.load(rows + b), tl.load(lengths + b)
    kept, last = tl.load(accepted + b), tl.load(bonus + b)
    step = tl.arange(0, STEPS)
    node = tl.load(path + b * (steps + 1) + 1 + step, mask=step < steps, other=-1)
    token = tl.load(tokens + node, mask=node >= 0, other=0)
    own = outcome + b * (steps + 4)
    tl.store(own + 4 + step, token, mask=step < steps)
    at = tl.minimum(before + step, longest - 1)
    tl.store(history + slot * longest + at, tl.where(step == kept, last, token), mask=step <= kept)
    drafted, end = tl.zeros((NODES,), tl.int64), tl.load(offsets + b + 1)
    for start in range(tl.load(offsets + b) + 1, end, NODES):
        i = start + tl.arange(0, NODES)
        drafted += (tl.load(tokens + i, mask=i < end, other=-1) >= 0).to(tl.int64)
    tl.store(own, kept)
    tl.store(own + 1, last)
    tl.store(own + 2, tl.sum(drafted, 0))
    tl.store(own + 3, tl.load(usable + b).to(tl.int64))
    tl.store(length + slot, tl.where(slot == padding_row, 1, tl.minimum(before + kept + 1, longest - 1)))


def closed(
    rows: Tensor, lengths: Tensor, tokens: Tensor, offsets: Tensor, path: Tensor, accepted: Tensor, bonus: Tensor,
    usable: Tensor, history: Tensor, length: Tensor, padding_row: int,
) -> Tensor:  # fmt: skip
    """Append gained tokens to `history` and update `length`; what the host is told. [B, 4 + D]."""
    size, steps = len(rows), path.shape[1] - 1
    outcome = torch.empty(size, 4 + steps, dtype=torch.int64, device=rows.device)
    _close[(size,)](
        rows, lengths, tokens, offsets, path.contiguous(), accepted.contiguous(), bonus.contiguous(), usable, history,
        length, outcome, history.shape[1], padding_row, steps,
        max(2, triton.next_power_of_2(steps + 1)), NODES, **OVERLAPPING,
    )  # fmt: skip
    return outcome
