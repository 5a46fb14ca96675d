"""The kernels of `products.py`: one row, several rows, and the sum of a split product's parts."""
# pyright: reportMissingImports=false, reportIndexIssue=false, reportUnreachable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from draftwood.ops.cuda.pdl import ask_for, make_way, wait_and_make_way, wait_for_predecessors
from draftwood.ops.cuda.prefetch import ask_for_share

GROUP = tl.constexpr(32)  # inputs that share a scale, as in model/weights.py
LAST = tl.constexpr(528)  # programs of a product with one row: those that run as it ends
DENSE, INT8, INT4, FLOAT8 = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3), tl.constexpr(4)  # model/weights.Storage
ASKED, LINE = tl.constexpr(128), tl.constexpr(64)  # weights asked for before the rows are there, and those in 128 bytes


@triton.jit
def activated(gate, KIND: tl.constexpr):
    """silu, gelu, or gelu with a hyperbolic tangent, in float32."""
    if KIND == 0:
        out = gate / (1.0 + tl.exp(-gate))
    elif KIND == 1:
        out = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        inner = 0.7978845608028654 * tl.fma(0.044715 * gate * gate, gate, gate)
        out = gate / (1.0 + tl.exp(-2.0 * inner))
    return out


@triton.jit
def opened(gate, up, KIND: tl.constexpr):
    """What a gate lets through; 3: gpt-oss's, both clamped."""
    if KIND == 3:
        gate, up = tl.minimum(gate, 7.0), tl.minimum(tl.maximum(up, -7.0), 7.0)
        out = (up + 1.0) * gate / (1.0 + tl.exp(-1.702 * gate))
    else:
        out = activated(gate, KIND) * up
    return out


@triton.jit
def _loaded(at, k, inputs, local, other, EVEN: tl.constexpr, FULL: tl.constexpr, EVICT: tl.constexpr):
    """Read, masked only where it must be: inputs unless EVEN, outputs that are not there (-1) unless FULL."""
    if EVEN & FULL:
        value = tl.load(at, eviction_policy=EVICT)
    elif EVEN:
        value = tl.load(at, mask=(local >= 0)[:, None], other=other, eviction_policy=EVICT)
    else:
        value = tl.load(at, mask=(k < inputs) & (local >= 0)[:, None], other=other, eviction_policy=EVICT)
    return value


@triton.jit
def _codes(
    weight, row, local, start, inputs, stride,
    BLOCK_K: tl.constexpr, STORAGE: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """Stored numbers of rows row + local, inputs from `start` on. [len(local), BLOCK_K]."""
    if STORAGE == INT4:
        k = start // 2 + tl.arange(0, BLOCK_K // 2)[None, :]
        at = weight + row * (stride // 2) + local[:, None] * (stride // 2) + k
        packed = _loaded(at, k, (inputs + 1) // 2, local, 0, EVEN, FULL, EVICT).to(tl.int32)
        codes = tl.interleave(packed & 15, packed >> 4)
    else:
        k = start + tl.arange(0, BLOCK_K)[None, :]
        at = weight + row * stride + local[:, None] * stride + k
        codes = _loaded(at, k, inputs, local, 0.0, EVEN, FULL, EVICT)
    return codes


@triton.jit
def _whole(codes, STORAGE: tl.constexpr):
    """Codes as whole numbers in float32: put behind the exponent of 2^23, since converting is sixteen times slower."""
    shifted = (codes.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True)
    return shifted - (8388736.0 if STORAGE == INT8 else 8388608.0)


@triton.jit
def _groups(part, row, local, start, inputs, stride, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr):
    """The groups' scales or minima of a tile, in float32. [len(local), BLOCK_K / 32]."""
    g = start // GROUP + tl.arange(0, BLOCK_K // GROUP)[None, :]
    at = part + row * (stride // GROUP) + local[:, None] * (stride // GROUP) + g
    return _loaded(at, g * GROUP, inputs, local, 0.0, EVEN, FULL, "").to(tl.float32)


@triton.jit
def _weights(
    weight, scale, minimum, row, local, start, inputs, stride, like,
    BLOCK_OUT: tl.constexpr, BLOCK_K: tl.constexpr, STORAGE: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """A tile of weights in the activations' dtype; float8 still without its row's scale. [BLOCK_OUT, BLOCK_K]."""
    codes = _codes(weight, row, local, start, inputs, stride, BLOCK_K, STORAGE, EVEN, FULL, "")
    if (STORAGE == INT8) | (STORAGE == INT4):
        numbers = _whole(codes, STORAGE).reshape(BLOCK_OUT, BLOCK_K // GROUP, GROUP)
        steps = _groups(scale, row, local, start, inputs, stride, BLOCK_K, EVEN, FULL)[:, :, None]
        if STORAGE == INT4:
            least = _groups(minimum, row, local, start, inputs, stride, BLOCK_K, EVEN, FULL)[:, :, None]
            numbers = tl.fma(numbers, steps.broadcast_to(numbers.shape), least.broadcast_to(numbers.shape))
        else:
            numbers = numbers * steps
        codes = numbers.reshape(BLOCK_OUT, BLOCK_K)
    return codes.to(like.dtype.element_ty)


@triton.jit
def _row_sums(
    total, value, weight, row, local, start, inputs, stride, BLOCK_K: tl.constexpr, STORAGE: tl.constexpr
):  # fmt: skip
    """Add one step's products to the sums of a one-row product."""
    codes = _codes(weight, row, local, start, inputs, stride, BLOCK_K, STORAGE, False, False, "evict_first")
    return total + codes.to(tl.float32) * value[None, :]


@triton.jit(do_not_specialize=["requests"])
def gemv_kernel(
    x, weight, scale, gain, bias, residual, out, outputs, inputs: tl.constexpr, stride: tl.constexpr, eps,
    then, requests, THEN_PARTS: tl.constexpr, THEN_DISTANCE: tl.constexpr, LANES: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_K: tl.constexpr, STORAGE: tl.constexpr, ACTIVATION: tl.constexpr,
    UNROLLED: tl.constexpr,
):  # fmt: skip
    """One row: a program has BLOCK_OUT outputs and sums over all inputs. Of floats; codes: `grouped_kernels.py`."""
    wait_and_make_way()
    GATED: tl.constexpr = ACTIVATION >= 0
    first = tl.program_id(0).to(tl.int64) * BLOCK_OUT
    column = first + tl.arange(0, BLOCK_OUT)
    local = tl.where(column < outputs, tl.arange(0, BLOCK_OUT), -1)
    total = tl.zeros((BLOCK_OUT, BLOCK_K), tl.float32)
    total_up = tl.zeros((BLOCK_OUT, BLOCK_K), tl.float32)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    for start in tl.range(0, inputs, BLOCK_K, loop_unroll_factor=UNROLLED):
        k = start + tl.arange(0, BLOCK_K)
        value = tl.load(x + k, mask=k < inputs, other=0.0).to(tl.float32)
        if gain is not None:
            squares += value * value
            value = value * tl.load(gain + k, mask=k < inputs, other=0.0).to(tl.float32)
        total = _row_sums(total, value, weight, first, local, start, inputs, stride, BLOCK_K, STORAGE)
        if GATED:
            above = first + outputs
            total_up = _row_sums(total_up, value, weight, above, local, start, inputs, stride, BLOCK_K, STORAGE)
    if then is not None:  # the last programs ask: earlier, it would only be in the way
        asking = tl.minimum(tl.num_programs(0), LAST)
        place = tl.program_id(0) - (tl.num_programs(0) - asking)
        if place >= 0:
            ask_for_share(then, requests, place, asking, THEN_PARTS, THEN_DISTANCE, LANES)
    result, up = tl.sum(total, 1), tl.sum(total_up, 1)
    if gain is not None:
        length = tl.rsqrt(tl.sum(squares, 0) / inputs + eps)
        result, up = result * length, up * length
    known = known_behind(scale, bias, residual, column, column, column < outputs, outputs, STORAGE, ACTIVATION)
    result = finished(result, up, known, scale, bias, residual, STORAGE, ACTIVATION)
    tl.store(out + column, result.to(out.dtype.element_ty), mask=column < outputs)


@triton.jit
def known_behind(
    scale, bias, residual, column, at, there, outputs, STORAGE: tl.constexpr, ACTIVATION: tl.constexpr
):  # fmt: skip
    """What is fused behind a product, where it has it: a row's scale of float8 and a bias, of gate and of up, and the
    residual; results go to `at`, where they are `there`.
    """
    inside = column < outputs
    scales, biases, rest = (), (), ()
    for part in tl.static_range(2 if ACTIVATION >= 0 else 1):
        if STORAGE == FLOAT8:
            scales += (tl.load(scale + part * outputs + column, mask=inside, other=0.0),)
        if bias is not None:
            biases += (tl.load(bias + part * outputs + column, mask=inside, other=0.0).to(tl.float32),)
    if residual is not None:
        rest += (tl.load(residual + at, mask=there, other=0.0).to(tl.float32),)
    return scales, biases, rest


@triton.jit
def finished(total, up, known, scale, bias, residual, STORAGE: tl.constexpr, ACTIVATION: tl.constexpr):
    """Sums to results: scale, bias, gate, residual."""
    scales, biases, rest = known
    if STORAGE == FLOAT8:
        total = total * scales[0]
        if ACTIVATION >= 0:
            up = up * scales[1]
    if bias is not None:
        total = total + biases[0]
        if ACTIVATION >= 0:
            up = up + biases[1]
    if ACTIVATION >= 0:
        total = opened(total, up, ACTIVATION)
    if residual is not None:
        total = total + rest[0]
    return total


@triton.jit
def _ask_for_weights(weight, row, local, start, inputs, stride):
    """Have the first weights of a tile on their way; asking for more than about one step of them makes it slower."""
    k = tl.minimum(start + tl.arange(0, ASKED // LINE)[None, :] * LINE, inputs - 1)
    ask_for(weight + row * stride + tl.maximum(local, 0)[:, None] * stride + k)


@triton.jit
def tile_sums(
    x, weight, scale, minimum, first, local, row, begin, n, inputs: tl.constexpr, stride: tl.constexpr,
    ROWS: tl.constexpr, TALL: tl.constexpr, BLOCK_K: tl.constexpr, STEPS: tl.constexpr, EVEN: tl.constexpr,
    FULL: tl.constexpr, STORAGE: tl.constexpr,
):  # fmt: skip
    """Outputs first + local times rows `row`, STEPS blocks of inputs from `begin` on; waits first. Of outputs at -1
    (none where FULL) nothing is read. [TALL, ROWS].
    """
    source = x + row[:, None] * inputs
    there = (row < n)[:, None]  # in place of others the last row would be read, by all programs from the same place
    total = tl.zeros((TALL, ROWS), tl.float32)
    if STORAGE == DENSE:
        _ask_for_weights(weight, first, local, begin, inputs, stride)
    wait_for_predecessors()
    for step in range(STEPS):
        start = begin + step * BLOCK_K
        k = start + tl.arange(0, BLOCK_K)
        value = tl.load(source + k[None, :], mask=there if EVEN else there & (k < inputs)[None, :], other=0.0)
        tile = _weights(
            weight, scale, minimum, first, local, start, inputs, stride, x, TALL, BLOCK_K, STORAGE, EVEN, FULL
        )
        total = tl.dot(tile, tl.trans(value), total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["n"])
def skinny_kernel(
    x, weight, scale, minimum, bias, residual, out, n, outputs, inputs: tl.constexpr, stride: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, PADDED: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
    STORAGE: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """ROWS rows times BLOCK_OUT outputs a program, in a tile of PADDED; with SPLIT_K, a part of their inputs, which
    others add up. Gates lie in one tile with what they open.
    """
    GATED: tl.constexpr = ACTIVATION >= 0
    TALL: tl.constexpr = 2 * PADDED if GATED else PADDED
    FULL: tl.constexpr = BLOCK_OUT == PADDED
    STEPS: tl.constexpr = (inputs + BLOCK_K * SPLIT_K - 1) // (BLOCK_K * SPLIT_K)
    EVEN: tl.constexpr = inputs % (BLOCK_K * SPLIT_K) == 0
    num_tiles = tl.cdiv(n, ROWS)  # neighbouring programs share weights, so that further tiles find them in cache
    first = (tl.program_id(0) // num_tiles).to(tl.int64) * BLOCK_OUT
    row = (tl.program_id(0) % num_tiles) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, TALL)
    local = tl.minimum(i % PADDED, (outputs - 1 - first).to(tl.int32)) + i // PADDED * outputs
    if not FULL:
        local = tl.where(i % PADDED < BLOCK_OUT, local, -1)
    begin = tl.program_id(1) * STEPS * BLOCK_K
    total = tile_sums(
        x, weight, scale, minimum, first, local, row, begin, n, inputs, stride,
        ROWS, TALL, BLOCK_K, STEPS, EVEN, FULL, STORAGE,
    )  # fmt: skip
    make_way()
    column, up = (first + tl.arange(0, PADDED))[:, None], total
    inside = (column < tl.minimum(first + BLOCK_OUT, outputs)) & (row < n)[None, :]
    if GATED:
        total, up = tl.split(tl.permute(tl.reshape(total, (2, PADDED, ROWS)), (1, 2, 0)))
    if SPLIT_K > 1:
        width = outputs * 2 if GATED else outputs
        at = out + (tl.program_id(1) * n + row[None, :]).to(tl.int64) * width + column
        tl.store(at, total, mask=inside)
        if GATED:
            tl.store(at + outputs, up, mask=inside)
    else:
        at = row[None, :].to(tl.int64) * outputs + column
        known = known_behind(scale, bias, residual, column, at, inside, outputs, STORAGE, ACTIVATION)
        result = finished(total, up, known, scale, bias, residual, STORAGE, ACTIVATION)
        tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["n"])
def joined_kernel(
    parts, scale, bias, residual, out, gain, normed, n, outputs, eps,
    BLOCK: tl.constexpr, SPLIT_K: tl.constexpr, STORAGE: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Add the parts of a split product, first to last, and finish it; with `gain`, a whole row, and norm it too. All
    but the parts was there before the product began.
    """
    make_way()
    GATED: tl.constexpr = ACTIVATION >= 0
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < outputs
    width, at = outputs * 2 if GATED else outputs, row * outputs + column
    known = known_behind(scale, bias, residual, column, at, inside, outputs, STORAGE, ACTIVATION)
    if gain is not None:
        gains = tl.load(gain + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_predecessors()
    total = tl.zeros((BLOCK,), tl.float32)
    up = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(SPLIT_K):
        of_part = parts + (part * n + row) * width + column
        total += tl.load(of_part, mask=inside, other=0.0)
        if GATED:
            up += tl.load(of_part + outputs, mask=inside, other=0.0)
    result = finished(total, up, known, scale, bias, residual, STORAGE, ACTIVATION).to(out.dtype.element_ty)
    tl.store(out + at, result, mask=inside)
    if gain is not None:
        value = tl.where(inside, result.to(tl.float32), 0.0)
        length = tl.rsqrt(tl.sum(value * value, 0) / outputs + eps)
        tl.store(normed + at, (value * length * gains).to(normed.dtype.element_ty), mask=inside)
