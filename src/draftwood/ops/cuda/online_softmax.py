"""A softmax that is taken block by block: (highest score, sum, weighted values) of each line of a tile.

Scores are in units of log2, so that weights are powers of two. A state is one that others go on with.
"""
# pyright: reportMissingImports=false, reportIndexIssue=false, reportUnreachable=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 64  # keys a product

_BLOCK = tl.constexpr(BLOCK)
_LOG2E = tl.constexpr(1.4426950408889634)
_SUMS = tl.constexpr(16)  # equal columns of the sum: the narrowest product there is


@triton.jit
def attend(q, k, v, seen, highest, total, acc, scale, CAP: tl.constexpr = 0.0):
    """A running softmax with one block of keys more. Lines do not touch each other, whatever tile they are in. Scores
    become CAP tanh(score / CAP), if that is not 0.

    The sum is a product with ones: the order of a plain sum would depend on how the compiler lays out a tile.
    """
    score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if CAP > 0:
        score = CAP - (2 * CAP) / (tl.exp2(score * (2 * _LOG2E / CAP)) + 1.0)
    score = tl.where(seen, score, float("-inf"))
    before = highest
    highest = tl.maximum(before, tl.max(score, 1))
    pivot = tl.where(highest == float("-inf"), 0.0, highest)
    keep = tl.exp2(before - pivot)[:, None]
    weight = tl.exp2(score - pivot[:, None]).to(v.dtype)
    ones = tl.full((_BLOCK, _SUMS), 1.0, v.dtype)
    total = tl.dot(weight, ones, total * keep, input_precision="ieee")
    acc = tl.dot(weight, v, acc * keep, input_precision="ieee")
    return highest, total, acc


@triton.jit
def combine(highest, total, acc, next_highest, next_total, next_acc):
    """A running softmax with that of the next chunk; an empty one changes no bit."""
    new = tl.maximum(highest, next_highest)
    pivot = tl.where(new == float("-inf"), 0.0, new)
    old_part = tl.exp2(highest - pivot)
    next_part = tl.exp2(next_highest - pivot)
    total = tl.fma(total, old_part, next_total * next_part)
    acc = tl.fma(acc, old_part[:, None], next_acc * next_part[:, None])
    return new, total, acc


@triton.jit
def _normalised(total, acc):
    return acc * (1.0 / tl.where(total > 0, total, 1.0))[:, None]


@triton.jit
def nothing(LINES: tl.constexpr, DIM_PADDED: tl.constexpr):
    """The running softmax of no keys."""
    highest = tl.full((LINES,), float("-inf"), tl.float32)
    return highest, tl.zeros((LINES,), tl.float32), tl.zeros((LINES, DIM_PADDED), tl.float32)


@triton.jit
def widened(total, LINES: tl.constexpr):
    """Sums as `attend` takes them."""
    return tl.broadcast_to(total[:, None], (LINES, _SUMS))


@triton.jit
def store_state(states, sums, line, real, slots, slot, highest, total, acc, DIM: tl.constexpr, PADDED: tl.constexpr):
    """Leave one of each line's `slots` states for others."""
    place = line * slots + slot
    d = tl.arange(0, PADDED)
    tl.store(sums + place * 2, highest, mask=real)
    tl.store(sums + place * 2 + 1, total, mask=real)
    tl.store(states + place[:, None] * DIM + d[None, :], acc, mask=real[:, None] & (d < DIM)[None, :])


@triton.jit
def load_state(states, sums, line, real, slots, slot, DIM: tl.constexpr, PADDED: tl.constexpr):
    """One of each line's states, which others may have left."""
    place = line * slots + slot
    d = tl.arange(0, PADDED)
    mask = real[:, None] & (d < DIM)[None, :]
    highest = tl.load(sums + place * 2, mask=real, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(sums + place * 2 + 1, mask=real, other=0.0, cache_modifier=".cg")
    acc = tl.load(states + place[:, None] * DIM + d[None, :], mask=mask, other=0.0, cache_modifier=".cg")
    return highest, total, acc


@triton.jit
def combined(
    states, sums, line, real, slots, first, until, DIM: tl.constexpr, PADDED: tl.constexpr, LINES: tl.constexpr
):  # fmt: skip
    """The running softmax of chunks first … until - 1 together, from their states."""
    all_highest, all_total, all_acc = nothing(LINES, PADDED)
    for chunk in range(first, until):
        highest, total, acc = load_state(states, sums, line, real, slots, chunk, DIM, PADDED)
        all_highest, all_total, all_acc = combine(all_highest, all_total, all_acc, highest, total, acc)
    return all_highest, all_total, all_acc


@triton.jit
def store_rows(out, line, real, highest, total, acc, sink, DIM: tl.constexpr, PADDED: tl.constexpr):
    """The result of all keys, and of one more score for each line behind which no value stands, if `sink` has them."""
    d = tl.arange(0, PADDED)
    if sink is not None:
        _, total, acc = combine(highest, total, acc, sink * _LOG2E, tl.zeros_like(total) + 1.0, tl.zeros_like(acc))
    mask = real[:, None] & (d < DIM)[None, :]
    tl.store(out + line[:, None] * DIM + d[None, :], _normalised(total, acc).to(out.dtype.element_ty), mask=mask)
