"""`ops.choice` as two kernels: parts of every row at once, then the best of the parts."""
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwood.ops.cuda.overlap import OVERLAPPING, wait_for_predecessors

PART = 2048  # tokens a program


@triton.jit(do_not_specialize=["vocabulary", "parts"])
def _best_of_part(logits, best, place, vocabulary, parts, WIDTH: tl.constexpr):
    wait_for_predecessors()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = part * WIDTH + tl.arange(0, WIDTH)
    value = tl.load(logits + row * vocabulary + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    highest = tl.max(value, 0)
    first = tl.min(tl.where((value == highest) & (token < vocabulary), token, vocabulary), 0)
    tl.store(best + row * parts + part, highest)
    tl.store(place + row * parts + part, first)


@triton.jit(do_not_specialize=["vocabulary", "parts"])
def _best_of_all(best, place, out, vocabulary, parts, WIDTH: tl.constexpr):
    wait_for_predecessors()
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, WIDTH)
    value = tl.load(best + row * parts + part, mask=part < parts, other=float("-inf"))
    first = tl.load(place + row * parts + part, mask=part < parts, other=vocabulary)
    highest = tl.max(value, 0)
    chosen = tl.min(tl.where((value == highest) & (part < parts), first, vocabulary), 0)
    tl.store(out + row, tl.minimum(chosen, vocabulary - 1).to(tl.int64))  # a row of nothing but nan has no best


def likeliest(logits: Tensor) -> Tensor:
    """See `ops.choice.likeliest`."""
    vocabulary = logits.shape[-1]
    rows, parts = logits.numel() // vocabulary, triton.cdiv(vocabulary, PART)
    out = torch.empty(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    if rows:
        best = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
        place = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
        _best_of_part[(rows, parts)](logits.contiguous(), best, place, vocabulary, parts, PART, **OVERLAPPING)
        _best_of_all[(rows,)](
            best, place, out, vocabulary, parts, max(2, triton.next_power_of_2(parts)), num_warps=1, **OVERLAPPING
        )
    return out
