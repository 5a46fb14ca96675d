"""The kernels of `experts.py`. A *place* is one choice of one row: row r's j-th choice is place r · top_k + j.

Places of one expert lie together in `order`; a tile is some of them. A tile's record is its expert, where its places
begin in `order`, and how many they are. Which program has which tile changes no bit: places do not touch each other.
"""
# pyright: reportMissingImports=false, reportIndexIssue=false, reportUnreachable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from draftwood.ops.cuda.pdl import make_way, wait_and_make_way, wait_for_predecessors
from draftwood.ops.cuda.product_kernels import FLOAT8, finished, known_behind, tile_sums

RECORD = tl.constexpr(3)  # numbers of a tile's record
_NONE = tl.constexpr(1 << 30)  # the expert of places that are not there


@triton.jit
def choose_kernel(
    logits, allowed, chosen, shares, num_tiles, COUNT: tl.constexpr, PADDED: tl.constexpr, TOP_K: tl.constexpr,
    CHOICES: tl.constexpr, NORMALISED: tl.constexpr,
):  # fmt: skip
    """One row: the TOP_K likeliest experts of those allowed, the first of equal ones, and how much of each it gets."""
    wait_and_make_way()
    row, e, j = tl.program_id(0), tl.arange(0, PADDED), tl.arange(0, CHOICES)
    score = tl.load(logits + row * COUNT + e, mask=e < COUNT, other=float("-inf"))
    if allowed is not None:
        score = tl.where(tl.load(allowed + e, mask=e < COUNT, other=0) != 0, score, float("-inf"))
    highest = tl.max(score, 0)
    total = tl.sum(tl.exp(score - highest), 0)
    which, share = tl.zeros((CHOICES,), tl.int32), tl.zeros((CHOICES,), tl.float32)
    for number in tl.static_range(TOP_K):
        best = tl.max(score, 0)
        expert = tl.min(tl.where(score == best, e, COUNT - 1), 0)
        which, share = (
            tl.where(j == number, expert, which),
            tl.where(j == number, tl.exp(best - highest) / total, share),
        )
        score = tl.where(e == expert, float("-inf"), score)
    if NORMALISED:
        share = share / tl.sum(share, 0)
    tl.store(chosen + row * TOP_K + j, which, mask=j < TOP_K)
    tl.store(shares + row * TOP_K + j, share, mask=j < TOP_K)
    if row == 0:
        tl.store(num_tiles, 0)


@triton.jit(do_not_specialize=["places"])
def group_kernel(chosen, order, tiles, num_tiles, places, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """One expert: its places in their order, and tiles of at most ROWS of them."""
    wait_for_predecessors()
    expert, i = tl.program_id(0), tl.arange(0, BLOCK)
    own, before = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
    for start in range(0, places, BLOCK):
        which = tl.load(chosen + start + i, mask=start + i < places, other=_NONE)
        own += (which == expert).to(tl.int32)
        before += (which < expert).to(tl.int32)
    count, first = tl.sum(own, 0), tl.sum(before, 0)
    if count > 0:
        wanted = tl.cdiv(count, ROWS)
        number = tl.atomic_add(num_tiles, wanted)
        for t in range(wanted):
            record = tiles + (number + t) * RECORD
            tl.store(record, expert)
            tl.store(record + 1, first + t * ROWS)
            tl.store(record + 2, tl.minimum(count - t * ROWS, ROWS))
        for start in range(0, places, BLOCK):
            which = tl.load(chosen + start + i, mask=start + i < places, other=_NONE)
            hit = (which == expert).to(tl.int32)
            tl.store(order + first + tl.cumsum(hit, 0) - hit, start + i, mask=hit > 0)
            first += tl.sum(hit, 0)


@triton.jit(do_not_specialize=["places"])
def experts_kernel(
    x, weight, scale, minimum, bias, order, tiles, num_tiles, out, places, outputs,
    inputs: tl.constexpr, stride: tl.constexpr, CHOICES: tl.constexpr, ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr,
    PADDED: tl.constexpr, BLOCK_K: tl.constexpr, STORAGE: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """A tile's places times BLOCK_OUT outputs of its expert, summed as `skinny_kernel` sums. The matrices of all
    experts lie one below the other; CHOICES places read the same row of x.
    """
    wait_for_predecessors()
    GATED: tl.constexpr = ACTIVATION >= 0
    TALL: tl.constexpr = 2 * PADDED if GATED else PADDED
    WIDE: tl.constexpr = 2 if GATED else 1
    FULL: tl.constexpr = BLOCK_OUT == PADDED
    STEPS: tl.constexpr = (inputs + BLOCK_K - 1) // BLOCK_K
    if tl.program_id(0) >= tl.load(num_tiles):
        return
    record = tiles + tl.program_id(0) * RECORD
    above = tl.load(record).to(tl.int64) * (WIDE * outputs)  # outputs of the experts before this one
    begin, count, r = tl.load(record + 1), tl.load(record + 2), tl.arange(0, ROWS)
    place = tl.load(order + begin + r, mask=r < count, other=places).to(tl.int64)
    first = tl.program_id(1) * BLOCK_OUT
    i = tl.arange(0, TALL)
    local = tl.minimum(i % PADDED, outputs - 1 - first) + i // PADDED * outputs
    if not FULL:
        local = tl.where(i % PADDED < BLOCK_OUT, local, -1)
    total = tile_sums(
        x, weight, scale, minimum, above + first, local, place // CHOICES, 0, places // CHOICES, inputs, stride,
        ROWS, TALL, BLOCK_K, STEPS, inputs % BLOCK_K == 0, FULL, STORAGE,
    )  # fmt: skip
    make_way()
    column, up = (first + tl.arange(0, PADDED))[:, None], total
    inside = (column < tl.minimum(first + BLOCK_OUT, outputs)) & (r < count)[None, :]
    if GATED:
        total, up = tl.split(tl.permute(tl.reshape(total, (2, PADDED, ROWS)), (1, 2, 0)))
    if STORAGE == FLOAT8:
        scale += above
    if bias is not None:
        bias += above
    known = known_behind(scale, bias, None, column, column, inside, outputs, STORAGE, ACTIVATION)
    result = finished(total, up, known, scale, bias, None, STORAGE, ACTIVATION)
    tl.store(out + place[None, :] * outputs + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def mix_kernel(
    made, shares, shared, strength, residual, out, gain, normed, width, eps, TOP_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: what its experts made, in the order of its choices, then the expert that is shared and the residual;
    with `gain`, a whole row, and norm it too.
    """
    wait_and_make_way()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, at = column < width, row * width + column
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(TOP_K):
        share = tl.load(shares + row * TOP_K + j)
        total += share * tl.load(made + (row * TOP_K + j) * width + column, mask=inside, other=0.0)
    if shared is not None:
        beside = tl.load(shared + at, mask=inside, other=0.0).to(tl.float32)
        total += beside / (1.0 + tl.exp(-tl.load(strength + row)))
    if residual is not None:
        total += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    result = total.to(out.dtype.element_ty)
    tl.store(out + at, result, mask=inside)
    if gain is not None:
        value = tl.where(inside, result.to(tl.float32), 0.0)
        length = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
        gains = tl.load(gain + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(normed + at, (value * length * gains).to(normed.dtype.element_ty), mask=inside)
