"""rng.py on CUDA, in Triton: the same integers, and the same draws up to the rounding of a float64 sum.

Nothing here waits for the host. A draw belongs to one program, or to several in a fixed order, so that its neighbours
do not matter.
"""
# pyright: reportMissingImports=false, reportIndexIssue=false, reportUnreachable=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
MIX_A = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_B = tl.constexpr(0x94D049BB133111EB)
ALL_BITS = tl.constexpr(0xFFFFFFFFFFFFFFFF)

MOST_PARTS = 3  # folded by one launch
KEYS = 128  # a program folds
PICK_BLOCK = 4096
RACE_BLOCK = 2048
RACE_CHUNK = 4  # blocks a program of a race looks at


@triton.jit
def mix(x):
    """The splitmix64 finaliser, of unsigned integers."""
    x = (x ^ (x >> 30)) * MIX_A
    x = (x ^ (x >> 27)) * MIX_B
    return x ^ (x >> 31)


@triton.jit
def fold(keys, part):
    """One step of `derive`: signed integers in, signed integers out."""
    mixed = mix((keys.to(tl.uint64) ^ part.to(tl.int64).to(tl.uint64)) * GOLDEN + MIX_A)
    return mixed.to(tl.int64)


@triton.jit
def unit_interval(bits):
    """52 random bits in the middle of their cells."""
    return ((bits >> 12).to(tl.int64).to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2^-52


@triton.jit
def uniform(keys):
    """`uniforms` of signed integers."""
    return unit_interval(mix(keys.to(tl.uint64) + GOLDEN))


@triton.jit
def aim_at(u, total):
    """Where a uniform number points on weights that sum to `total`; rounding must not reach the end."""
    below = (total.to(tl.int64, bitcast=True) - (total > 0).to(tl.int64)).to(tl.float64, bitcast=True)
    return tl.minimum(u * total, below)


@triton.jit
def first_beyond(borders, weights, index, aim, SIZE: tl.constexpr):
    """The first place with any weight whose border lies beyond `aim`; by rounding there is none: the last with any."""
    beyond = tl.min(tl.where((borders > aim) & (weights > 0), index, SIZE), 0)
    last = tl.max(tl.where(weights > 0, index, 0), 0)
    return tl.where(beyond < SIZE, beyond, last)


@triton.jit
def block_beyond(sums, index, u, SIZE: tl.constexpr):
    """Given the sums of a row's blocks: where u points, the block it points into, and what lies before that block."""
    borders = tl.cumsum(sums, 0)
    total = tl.max(tl.where(sums > 0, borders, 0.0), 0)
    aim = aim_at(u, total)
    block = first_beyond(borders, sums, index, aim, SIZE)
    before = tl.sum(tl.where(index == block - 1, borders, 0.0), 0)
    return aim, block, before, total


@triton.jit
def _part(part, row, column, step, across, inside, TENSOR: tl.constexpr):
    if TENSOR:
        value = tl.load(part + row * step + column * across, mask=inside, other=0).to(tl.int64)
    else:
        value = tl.zeros(row.shape, tl.int64) + part
    return value


@triton.jit(do_not_specialize=["a", "b", "c", "count", "columns"])
def _derive(
    keys, key_step, key_across, a, a_step, a_across, b, b_step, b_across, c, c_step, c_across, out, count, columns,
    PARTS: tl.constexpr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Up to three parts folded into keys [rows, columns]; A, B, C: whether a part is a tensor."""
    x = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = x < count
    row, column = x // columns, x % columns
    value = tl.load(keys + row * key_step + column * key_across, mask=inside, other=0)
    value = fold(value, _part(a, row, column, a_step, a_across, inside, A))
    if PARTS > 1:
        value = fold(value, _part(b, row, column, b_step, b_across, inside, B))
    if PARTS > 2:
        value = fold(value, _part(c, row, column, c_step, c_across, inside, C))
    tl.store(out + x, value, mask=inside)


def derive(keys: Tensor, *parts: int | Tensor) -> Tensor:
    """`rng.derive`, up to three parts a launch; tensors broadcast as torch's do."""
    for first in range(0, len(parts), MOST_PARTS):
        keys = _derive_some(keys, parts[first : first + MOST_PARTS])
    return keys


def _derive_some(keys: Tensor, parts: tuple[int | Tensor, ...]) -> Tensor:
    shape = torch.broadcast_shapes(keys.shape, *(part.shape for part in parts if isinstance(part, Tensor)))
    out = torch.empty(shape, dtype=torch.int64, device=keys.device)
    if not out.numel():
        return out
    arguments: list[object] = []
    for part in (*parts, *[0] * (MOST_PARTS - len(parts))):
        arguments += _flat(part, shape) if isinstance(part, Tensor) else (int(part), 0, 0)
    tensors = [isinstance(part, Tensor) for part in parts] + [False] * (MOST_PARTS - len(parts))
    columns = shape[-1] if shape else 1
    grid = (triton.cdiv(out.numel(), KEYS),)
    _derive[grid](*_flat(keys, shape), *arguments, out, out.numel(), columns, len(parts), *tensors, KEYS)
    return out


def _flat(x: Tensor, shape: torch.Size) -> tuple[Tensor, int, int]:
    """A tensor as rows and columns, broadcast to `shape`: itself, the steps from row to row and across."""
    x = x.expand(shape)
    if x.dim() > 2:
        x = x.contiguous().view(-1, shape[-1])
    steps = (0, 0, *x.stride())
    return x, steps[-2], steps[-1]


@triton.jit(do_not_specialize=["count"])
def _uniforms(keys, out, count, SIZE: tl.constexpr):
    x = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + x, uniform(tl.load(keys + x, mask=x < count, other=0)), mask=x < count)


def uniforms(keys: Tensor) -> Tensor:
    """`rng.uniforms`."""
    keys = keys.contiguous()
    out = torch.empty_like(keys, dtype=torch.float64)
    if keys.numel():
        _uniforms[(triton.cdiv(keys.numel(), KEYS),)](keys, out, keys.numel(), KEYS)
    return out


@triton.jit
def _block_sums(weights, sums, vocabulary, stride, SIZE: tl.constexpr):
    n, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x = block * SIZE + tl.arange(0, SIZE)
    w = tl.load(weights + n * stride + x, mask=x < vocabulary, other=0.0).to(tl.float64)
    tl.store(sums + n * tl.num_programs(1) + block, tl.sum(w, 0))


@triton.jit
def _pick(weights, sums, keys, out, vocabulary, stride, blocks, BLOCKS: tl.constexpr, SIZE: tl.constexpr):
    """One row a program: the block the uniform number points into, then the weight in there."""
    n = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCKS)
    of_blocks = tl.load(sums + n * blocks + index, mask=index < blocks, other=0.0)
    aim, block, before, total = block_beyond(of_blocks, index, uniform(tl.load(keys + n)), BLOCKS)
    x = tl.arange(0, SIZE)
    at = block * SIZE + x
    w = tl.load(weights + n * stride + at, mask=at < vocabulary, other=0.0).to(tl.float64)
    chosen = block * SIZE + first_beyond(before + tl.cumsum(w, 0), w, x, aim, SIZE)
    tl.store(out + n, tl.where(total > 0, chosen, vocabulary - 1))


def pick(weights: Tensor, keys: Tensor) -> Tensor:
    """`KeyedRng.pick`. [B, V], [B] -> [B] int64."""
    weights = weights if weights.stride(-1) == 1 else weights.contiguous()
    rows, vocabulary = weights.shape
    blocks = triton.cdiv(vocabulary, PICK_BLOCK)
    sums = torch.empty(rows, blocks, dtype=torch.float64, device=weights.device)
    out = torch.empty(rows, dtype=torch.int64, device=weights.device)
    shape = (vocabulary, weights.stride(0))
    if rows:
        _block_sums[(rows, blocks)](weights, sums, *shape, PICK_BLOCK)
        padded = max(2, triton.next_power_of_2(blocks))
        _pick[(rows,)](weights, sums, keys.contiguous(), out, *shape, blocks, padded, PICK_BLOCK, num_warps=8)
    return out


@triton.jit
def _token_bits(key, tokens):
    """The noise of one key for each token: the n-th number of a splitmix64 generator."""
    return mix(key.to(tl.uint64) + (tokens + 1).to(tl.uint64) * GOLDEN)


@triton.jit
def _race(weights, keys, best_out, winner_out, vocabulary, stride, CHUNK: tl.constexpr, SIZE: tl.constexpr):
    """Some blocks of a row a program. -log u is at least 1 - u: a block without small numbers needs no logarithms."""
    n, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    key = tl.load(keys + n)
    best = tl.load(keys + n).to(tl.float64) * 0.0
    winner = chunk * CHUNK * SIZE
    for block in range(CHUNK):
        x = (chunk * CHUNK + block) * SIZE + tl.arange(0, SIZE)
        w = tl.load(weights + n * stride + x, mask=x < vocabulary, other=0.0).to(tl.float64)
        bits = _token_bits(key, x.to(tl.int64))
        gap = unit_interval(bits ^ ALL_BITS)  # 1 - u, exactly
        if tl.max(((w > 0) & (w >= best * gap * (1 - 1e-9))).to(tl.int32), 0) > 0:
            speed = w / -tl.log(unit_interval(bits))
            fastest = tl.max(speed, 0)
            first = tl.min(tl.where(speed == fastest, x, vocabulary), 0)
            winner = tl.where(fastest > best, first, winner)
            best = tl.maximum(fastest, best)
    tl.store(best_out + n * tl.num_programs(1) + chunk, best)
    tl.store(winner_out + n * tl.num_programs(1) + chunk, winner)


@triton.jit
def _fastest(best, winner, out, chunks, PADDED: tl.constexpr):
    n = tl.program_id(0)
    x = tl.arange(0, PADDED)
    speed = tl.load(best + n * chunks + x, mask=x < chunks, other=-1.0)
    first = tl.min(tl.where(speed == tl.max(speed, 0), x, PADDED), 0)
    tl.store(out + n, tl.load(winner + n * chunks + first).to(tl.int64))


@triton.jit
def _speeds(weights, keys, out, vocabulary, stride, SIZE: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    x = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    w = tl.load(weights + n * stride + x, mask=x < vocabulary, other=0.0).to(tl.float64)
    u = unit_interval(_token_bits(tl.load(keys + n), x.to(tl.int64)))
    tl.store(out + n * vocabulary + x, w / -tl.log(u), mask=x < vocabulary)


def race(weights: Tensor, keys: Tensor, winners: int = 1) -> Tensor:
    """`KeyedRng.race`. [B, V], [B] -> [B, winners] int64."""
    weights, keys = weights if weights.stride(-1) == 1 else weights.contiguous(), keys.contiguous()
    rows, vocabulary = weights.shape
    out = torch.empty(rows, 1, dtype=torch.int64, device=weights.device)
    if not rows:
        return out.expand(rows, winners)
    if winners > 1:
        speeds = torch.empty(rows, vocabulary, dtype=torch.float64, device=weights.device)
        grid = (rows, triton.cdiv(vocabulary, RACE_BLOCK))
        _speeds[grid](weights, keys, speeds, vocabulary, weights.stride(0), RACE_BLOCK)
        return speeds.topk(winners, -1).indices
    chunks = triton.cdiv(vocabulary, RACE_CHUNK * RACE_BLOCK)
    best = torch.empty(rows, chunks, dtype=torch.float64, device=weights.device)
    winner = torch.empty(rows, chunks, dtype=torch.int32, device=weights.device)
    _race[(rows, chunks)](
        weights, keys, best, winner, vocabulary, weights.stride(0), RACE_CHUNK, RACE_BLOCK, num_warps=8
    )
    _fastest[(rows,)](best, winner, out, chunks, max(2, triton.next_power_of_2(chunks)), num_warps=1)
    return out
