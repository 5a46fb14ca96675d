"""`ops.choice` as two kernels: the best of parts of every row at once, then the best of those."""
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwood.ops.cuda.pdl import OVERLAPPING, wait_for_predecessors

PART = 2048  # tokens a program
MOST = 16  # tokens of a row that are found one after the other


@triton.jit
def next_best(value, token, left, vocabulary):
    """The largest of those left and its token, the first of equal ones; `vocabulary` where nothing is left."""
    highest = tl.max(tl.where(left, value, float("-inf")), 0)
    return highest, tl.min(tl.where(left & (value == highest), token, vocabulary), 0)


@triton.jit(do_not_specialize=["vocabulary", "parts"])
def _best_of_part(logits, best, place, vocabulary, parts, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    wait_for_predecessors()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = part * WIDTH + tl.arange(0, WIDTH)
    left = token < vocabulary
    value = tl.load(logits + row * vocabulary + token, mask=left, other=float("-inf")).to(tl.float32)
    for rank in tl.static_range(COUNT):
        highest, first = next_best(value, token, left, vocabulary)
        tl.store(best + (row * parts + part) * COUNT + rank, highest)
        tl.store(place + (row * parts + part) * COUNT + rank, first)
        left = left & (token != first)


@triton.jit(do_not_specialize=["vocabulary", "candidates"])
def _best_of_all(best, place, tokens, out, vocabulary, candidates, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    wait_for_predecessors()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    left = at < candidates
    value = tl.load(best + row * candidates + at, mask=left, other=float("-inf"))
    token = tl.load(place + row * candidates + at, mask=left, other=vocabulary)
    for rank in tl.static_range(COUNT):
        first = next_best(value, token, left, vocabulary)[1]
        chosen = tl.minimum(first, vocabulary - 1).to(tl.int64)  # a row of nothing but nan has no best
        if tokens is not None:
            chosen = tl.load(tokens + chosen)
        tl.store(out + row * COUNT + rank, chosen)
        left = left & (token != first)


def likeliest(logits: Tensor) -> Tensor:
    """See `ops.choice.likeliest`."""
    return ranked(logits, 1).squeeze(-1)


def ranked(logits: Tensor, count: int, tokens: Tensor | None = None) -> Tensor:
    """See `ops.choice.ranked`; all equal ones come in their order."""
    vocabulary = logits.shape[-1]
    rows, parts = logits.numel() // vocabulary, triton.cdiv(vocabulary, PART)
    out = torch.empty(*logits.shape[:-1], count, dtype=torch.int64, device=logits.device)
    if rows:
        best = torch.empty(rows, parts * count, dtype=torch.float32, device=logits.device)
        place = torch.empty(rows, parts * count, dtype=torch.int32, device=logits.device)
        _best_of_part[(rows, parts)](logits.contiguous(), best, place, vocabulary, parts, count, PART, **OVERLAPPING)
        width = max(2, triton.next_power_of_2(parts * count))
        _best_of_all[(rows,)](
            best, place, tokens, out, vocabulary, parts * count, count, width, num_warps=1, **OVERLAPPING
        )
    return out
