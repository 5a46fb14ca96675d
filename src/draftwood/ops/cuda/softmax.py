"""`ops.softmax` as two kernels: what each part of a row adds up to, then the row itself."""
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwood.ops.cuda.pdl import OVERLAPPING, wait_for_predecessors

PART = 2048  # tokens a program


@triton.jit
def _scaled(logits, temperature, row, token, vocabulary):
    """A part of a row over its temperature, and whether that is 0: then the row itself."""
    heat = tl.load(temperature + row)
    value = tl.load(logits + row * vocabulary + token, mask=token < vocabulary, other=float("-inf"))
    # Divided as torch does, to the last bit: what is lost here grows with the logit when its exponential is taken.
    return tl.div_rn(value, tl.where(heat == 0, 1.0, heat)), heat == 0


@triton.jit(do_not_specialize=["vocabulary", "parts"])
def _add_up(logits, temperature, best, place, total, vocabulary, parts, WIDTH: tl.constexpr):
    """The largest number of a part, where it is, and what all of it adds up to beside that."""
    wait_for_predecessors()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = part * WIDTH + tl.arange(0, WIDTH)
    value, _ = _scaled(logits, temperature, row, token, vocabulary)
    highest = tl.max(value, 0)
    pivot = tl.where(highest == float("-inf"), 0.0, highest)
    first = tl.min(tl.where((value == highest) & (token < vocabulary), token, vocabulary), 0)
    tl.store(best + row * parts + part, highest)
    tl.store(place + row * parts + part, first)
    tl.store(total + row * parts + part, tl.sum(tl.exp(value - pivot), 0))


@triton.jit(do_not_specialize=["vocabulary", "parts"])
def _share_out(
    logits, temperature, best, place, total, out, vocabulary, parts, WIDTH: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """A part of the distribution; every program adds the parts' sums in the same order."""
    wait_for_predecessors()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, PARTS)
    highs = tl.load(best + row * parts + i, mask=i < parts, other=float("-inf"))
    sums = tl.load(total + row * parts + i, mask=i < parts, other=0.0)
    firsts = tl.load(place + row * parts + i, mask=i < parts, other=vocabulary)
    highest = tl.max(highs, 0)
    whole = tl.sum(sums * tl.exp(highs - highest), 0)
    chosen = tl.min(tl.where(highs == highest, firsts, vocabulary), 0)
    token = part * WIDTH + tl.arange(0, WIDTH)
    value, greedy = _scaled(logits, temperature, row, token, vocabulary)
    share = tl.where(greedy, (token == chosen).to(tl.float32), tl.exp(value - highest) / whole)
    tl.store(out + row * vocabulary + token, share, mask=token < vocabulary)


def tempered(logits: Tensor, temperature: Tensor) -> Tensor:
    """See `ops.softmax.tempered`."""
    rows, vocabulary = logits.shape
    parts = triton.cdiv(vocabulary, PART)
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    if rows:
        best, total = torch.empty(2, rows, parts, dtype=torch.float32, device=logits.device)
        place = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
        logits, temperature = logits.contiguous(), temperature.float().contiguous()
        _add_up[(rows, parts)](logits, temperature, best, place, total, vocabulary, parts, PART, **OVERLAPPING)
        _share_out[(rows, parts)](
            logits, temperature, best, place, total, out, vocabulary, parts, PART,
            max(2, triton.next_power_of_2(parts)), **OVERLAPPING,
        )  # fmt: skip
    return out
