"""One row times a matrix of codes or small floats: a lane has 16 bytes of an output's, and all it needs to use them.

Everything is one number a lane, so nothing is ever exchanged between lanes before the end.
"""
# pyright: reportMissingImports=false, reportIndexIssue=false, reportUnreachable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl

from draftwood.ops.cuda.dequant import SIXTEENTHS, SMALLER, behind_one, bytes_above_large
from draftwood.ops.cuda.pdl import wait_and_make_way
from draftwood.ops.cuda.product_kernels import FLOAT8, GROUP, INT4, finished, known_behind

ZERO = tl.constexpr(8388608.0 + 128.0)  # the code that stands for zero, as `bytes_above_large` has it


@triton.jit
def _apart(eight, LANES: tl.constexpr):
    """Eight numbers of each lane [LANES, 8], as so many tensors. [LANES] each."""
    even, odd = tl.split(tl.reshape(eight, (LANES, 2, 2, 2)))
    even_0, even_1 = tl.split(even)
    odd_0, odd_1 = tl.split(odd)
    x0, x4 = tl.split(even_0)
    x2, x6 = tl.split(even_1)
    x1, x5 = tl.split(odd_0)
    x3, x7 = tl.split(odd_1)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def _numbers(vector, begin, inputs: tl.constexpr, LANES: tl.constexpr, SHARE: tl.constexpr):
    """A lane's share of a vector. SHARE tensors [LANES]."""
    numbers = ()
    for i in tl.static_range(SHARE // 8):
        at = (begin + 8 * i)[:, None] + tl.arange(0, 8)[None, :]
        numbers += _apart(tl.load(vector + at, mask=at < inputs, other=0.0).to(tl.float32), LANES)
    return numbers


@triton.jit
def _words(at, there, LANES: tl.constexpr):
    """Four words from each lane's place on. [LANES] each."""
    row = tl.load(at[:, None] + tl.arange(0, 4)[None, :], mask=there[:, None], other=0, eviction_policy="evict_first")
    even, odd = tl.split(tl.reshape(row, (LANES, 2, 2)))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
def _four_bits(words, value, lower):
    """Codes times values, in sixteenths, with as many values besides as `_besides` says. `lower`: to be added.

    A code is put behind the exponent of one, which takes one instruction where converting takes two: 1 + code / 16, or
    where that saves a shift, 1 + code / 256. Taking the ones away again costs up to five of float32's 24 bits.
    """
    upper = tl.zeros(lower.shape, tl.float32)
    for w in tl.static_range(4):
        first, second, third, fourth, last = words[w] << 19, words[w] << 11, words[w] << 3, words[w] >> 5, words[w] >> 9
        upper = tl.fma(behind_one(first, SIXTEENTHS), value[8 * w], upper)
        lower = tl.fma(behind_one(second, SMALLER), value[8 * w + 1], lower)
        upper = tl.fma(behind_one(second, SIXTEENTHS), value[8 * w + 2], upper)
        lower = tl.fma(behind_one(third, SMALLER), value[8 * w + 3], lower)
        upper = tl.fma(behind_one(third, SIXTEENTHS), value[8 * w + 4], upper)
        lower = tl.fma(behind_one(fourth, SMALLER), value[8 * w + 5], lower)
        upper = tl.fma(behind_one(fourth, SIXTEENTHS), value[8 * w + 6], upper)
        upper = tl.fma(behind_one(last, SIXTEENTHS), value[8 * w + 7], upper)
    return tl.fma(lower, 16.0, upper)


@triton.jit
def _besides(value):
    """What `_four_bits` counts besides codes, as it is to be taken from the lower ones."""
    upper, lower = tl.zeros(value[0].shape, tl.float32), tl.zeros(value[0].shape, tl.float32)
    for w in tl.static_range(4):
        lower += value[8 * w + 1] + value[8 * w + 3] + value[8 * w + 5]
        upper += value[8 * w] + value[8 * w + 2] + value[8 * w + 4] + value[8 * w + 6] + value[8 * w + 7]
    return tl.fma(upper, 0.0625, lower)


@triton.jit
def _eight_bits(words, value):
    """Codes times values."""
    total = tl.zeros(value[0].shape, tl.float32)
    for w in tl.static_range(4):
        codes = bytes_above_large(words[w])
        for j in tl.static_range(4):
            total = tl.fma(codes[j] - ZERO, value[4 * w + j], total)
    return total


@triton.jit
def _floats(at, there, value, LANES: tl.constexpr):
    """Sixteen floats of eight bits from each lane's place on, times values."""
    at = at[:, None] + tl.arange(0, 16)[None, :]
    row = tl.load(at, mask=there[:, None], other=0.0, eviction_policy="evict_first").to(tl.float32)
    even, odd = tl.split(tl.reshape(row, (LANES, 8, 2)))
    evens, odds = _apart(even, LANES), _apart(odd, LANES)
    total = tl.zeros(value[0].shape, tl.float32)
    for i in tl.static_range(8):
        total = tl.fma(odds[i], value[2 * i + 1], tl.fma(evens[i], value[2 * i], total))
    return total


@triton.jit
def _add_output(
    total, value, whole, besides, weight, scale, minimum, row, share, there, stride: tl.constexpr,
    LANES: tl.constexpr, STORAGE: tl.constexpr,
):  # fmt: skip
    """Add the products of one output's codes to its lanes' sums."""
    SHARE: tl.constexpr = 32 if STORAGE == INT4 else 16
    if STORAGE == FLOAT8:
        total += _floats(weight + row * stride + share * SHARE, there, value, LANES)
    else:
        words = _words(weight + row * (stride // SHARE * 4) + share * 4, there, LANES)
        at = row * (stride // GROUP) + share * SHARE // GROUP
        step = tl.load(scale + at, mask=there, other=0.0).to(tl.float32)
        if STORAGE == INT4:
            least = tl.load(minimum + at, mask=there, other=0.0).to(tl.float32)
            total = tl.fma(least, whole, total)
            total = tl.fma(_four_bits(words, value, -besides), step * 16.0, total)
        else:
            total = tl.fma(_eight_bits(words, value), step, total)
    return total


@triton.jit
def _sums(parts, LANES: tl.constexpr, NUMBER: tl.constexpr):
    """Of each part over its lanes, all at once. [NUMBER]."""
    if NUMBER == 1:
        beside = tl.reshape(parts[0], (LANES, 1))
    elif NUMBER == 2:
        beside = tl.join(parts[0], parts[1])
    elif NUMBER == 4:
        beside = tl.reshape(tl.join(tl.join(parts[0], parts[2]), tl.join(parts[1], parts[3])), (LANES, 4))
    else:
        even = tl.join(tl.join(parts[0], parts[4]), tl.join(parts[2], parts[6]))
        odd = tl.join(tl.join(parts[1], parts[5]), tl.join(parts[3], parts[7]))
        beside = tl.reshape(tl.join(even, odd), (LANES, 8))
    return tl.sum(beside, 0)


@triton.jit
def grouped_gemv_kernel(
    x, weight, scale, minimum, gain, bias, residual, out, outputs, inputs: tl.constexpr, stride: tl.constexpr, eps,
    BLOCK_OUT: tl.constexpr, LANES: tl.constexpr, STORAGE: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """BLOCK_OUT outputs a program, at most eight, in strides of LANES shares of the inputs."""
    wait_and_make_way()
    SHARE: tl.constexpr = 32 if STORAGE == INT4 else 16
    PARTS: tl.constexpr = 2 if ACTIVATION >= 0 else 1  # what opens and what is opened
    first = tl.program_id(0).to(tl.int64) * BLOCK_OUT
    nothing = tl.zeros((LANES,), tl.float32)
    totals, squares = (), nothing
    for _ in tl.static_range(PARTS * BLOCK_OUT):
        totals += (nothing,)
    for start in tl.range(0, (inputs + SHARE - 1) // SHARE, LANES):
        share = start + tl.arange(0, LANES)
        value = _numbers(x, share * SHARE, inputs, LANES, SHARE)
        if gain is not None:
            gains, own = _numbers(gain, share * SHARE, inputs, LANES, SHARE), ()
            for i in tl.static_range(SHARE):
                squares = tl.fma(value[i], value[i], squares)
                own += (value[i] * gains[i],)
            value = own
        whole, besides = nothing, nothing
        if STORAGE == INT4:
            besides = _besides(value)
            for i in tl.static_range(SHARE):
                whole += value[i]
        added = ()
        for i in tl.static_range(PARTS * BLOCK_OUT):
            row = first + i % BLOCK_OUT
            there = (share * SHARE < inputs) & (row < outputs)
            added += (_add_output(
                totals[i], value, whole, besides, weight, scale, minimum, row + i // BLOCK_OUT * outputs, share, there,
                stride, LANES, STORAGE,
            ),)  # fmt: skip
        totals = added
    result = _sums(totals[:BLOCK_OUT], LANES, BLOCK_OUT)
    up = _sums(totals[BLOCK_OUT:], LANES, BLOCK_OUT) if PARTS == 2 else result
    if gain is not None:
        length = tl.rsqrt(tl.sum(squares, 0) / inputs + eps)
        result, up = result * length, up * length
    column = first + tl.arange(0, BLOCK_OUT)
    known = known_behind(scale, bias, residual, column, column, column < outputs, outputs, STORAGE, ACTIVATION)
    result = finished(result, up, known, scale, bias, residual, STORAGE, ACTIVATION)
    tl.store(out + column, result.to(out.dtype.element_ty), mask=column < outputs)
