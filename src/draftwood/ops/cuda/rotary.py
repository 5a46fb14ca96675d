"""From projected rows, or with their projection, to turned queries and written keys and values in one kernel."""
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from draftwood.ops.cuda.pdl import OVERLAPPING, make_way, wait_for_predecessors
from draftwood.ops.cuda.product_kernels import finished, known_behind, tile_sums
from draftwood.ops.cuda.products import Packed, Tiles, fitting, rows_of_tile

HEADS = 8  # a program


@triton.jit(do_not_specialize=["num_slots"])
def _rotate_and_store(
    qkv, positions, slots, store, table, query_weight, key_weight, query, eps, row_stride, num_slots,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF_PADDED: tl.constexpr,
    HEADS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """A row's next HEADS heads, queries before keys before values; dimension i turns with i + DIM / 2."""
    make_way()
    half: tl.constexpr = DIM // 2
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    i = tl.arange(0, HALF_PADDED)
    mask = (head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & (i < half)[None, :]
    is_query, turns = (head < NUM_HEADS)[:, None], (head < NUM_HEADS + NUM_KV_HEADS)[:, None]
    angle = table + (tl.load(positions + row) * half + i) * 2
    cos = tl.where(turns, tl.load(angle, mask=i < half, other=1.0)[None, :], 1.0)
    sin = tl.where(turns, tl.load(angle + 1, mask=i < half, other=0.0)[None, :], 0.0)
    slot = tl.load(slots + row)
    wait_for_predecessors()
    at = qkv + row * row_stride + head[:, None] * DIM + i[None, :]
    low = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(at + half, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        square = tl.sum(tl.fma(low, low, high * high), 1)
        factor = tl.where(turns, (1.0 / tl.sqrt_rn(square / DIM + eps))[:, None], 1.0)
        low = low * factor * _weight_of(query_weight, key_weight, i, half, is_query, turns)
        high = high * factor * _weight_of(query_weight + half, key_weight + half, i, half, is_query, turns)
    turned_low = tl.fma(low, cos, -(high * sin))
    turned_high = tl.fma(high, cos, low * sin)
    in_query = query + (row * NUM_HEADS + head[:, None]) * DIM + i[None, :]
    # The store's keys and values of all heads lie one behind the other, as in the row.
    in_store = store + ((head - NUM_HEADS).to(tl.int64)[:, None] * num_slots + slot) * DIM + i[None, :]
    kind = query.dtype.element_ty
    tl.store(in_query, turned_low.to(kind), mask=mask & is_query)
    tl.store(in_query + half, turned_high.to(kind), mask=mask & is_query)
    in_cache = mask & (is_query == 0) & (slot >= 0)
    tl.store(in_store, turned_low.to(kind), mask=in_cache)
    tl.store(in_store + half, turned_high.to(kind), mask=in_cache)


@triton.jit
def _weight_of(query_weight, key_weight, i, half, is_query, turns):
    """The norm's weight for each head: the queries', the keys', or one for values."""
    of_query = tl.load(query_weight + i, mask=i < half, other=0.0).to(tl.float32)[None, :]
    of_key = tl.load(key_weight + i, mask=i < half, other=0.0).to(tl.float32)[None, :]
    return tl.where(turns, tl.where(is_query, of_query, of_key), 1.0)


@triton.jit(do_not_specialize=["n", "num_slots"])
def _multiply_and_turn(
    x, weight, scale, minimum, bias, positions, slots, store, table, query, n, num_slots,
    inputs: tl.constexpr, stride: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, PADDED: tl.constexpr, BLOCK_K: tl.constexpr, STORAGE: tl.constexpr,
):  # fmt: skip
    """The product as well: a tile has some dimensions, of one head or the next too, and those they turn with."""
    HALF: tl.constexpr = DIM // 2
    STEPS: tl.constexpr = (inputs + BLOCK_K - 1) // BLOCK_K
    PAIRS: tl.constexpr = PADDED // 2
    OUTPUTS: tl.constexpr = (NUM_HEADS + 2 * NUM_KV_HEADS) * DIM
    FULL: tl.constexpr = (BLOCK_OUT == PADDED) & (OUTPUTS % BLOCK_OUT == 0)
    num_tiles = tl.cdiv(n, ROWS)
    row = (tl.program_id(0) % num_tiles) * ROWS + tl.arange(0, ROWS)
    begin = tl.program_id(0) // num_tiles * (BLOCK_OUT // 2)
    end = tl.minimum(begin + BLOCK_OUT // 2, OUTPUTS // 2)
    i, pair = tl.arange(0, PADDED), begin + tl.arange(0, PAIRS)
    of_tile = begin + i % PAIRS
    local = of_tile // HALF * DIM + of_tile % HALF + i // PAIRS * HALF
    local = tl.where(of_tile < end, local, -1)
    head, d = (pair // HALF)[:, None], (pair % HALF)[:, None]
    there = (row < n)[None, :] & (pair < end)[:, None]
    turns = there & (head < NUM_HEADS + NUM_KV_HEADS)
    angle = table + (tl.load(positions + row, mask=row < n, other=0)[None, :] * HALF + d) * 2
    cos, sin = tl.load(angle, mask=turns, other=1.0), tl.load(angle + 1, mask=turns, other=0.0)
    slot = tl.load(slots + row, mask=row < n, other=-1)[None, :]
    total = tile_sums(
        x, weight, scale, minimum, tl.zeros((), tl.int64), local, row, 0, n, inputs, stride,
        ROWS, PADDED, BLOCK_K, STEPS, inputs % BLOCK_K == 0, FULL, STORAGE,
    )  # fmt: skip
    make_way()
    column = tl.maximum(local, 0)[:, None]
    known = known_behind(scale, bias, None, column, column, column < OUTPUTS, OUTPUTS, STORAGE, -1)
    kind = query.dtype.element_ty
    total = finished(total, total, known, scale, bias, None, STORAGE, -1).to(kind).to(tl.float32)
    low, high = tl.split(tl.permute(tl.reshape(total, (2, PAIRS, ROWS)), (1, 2, 0)))
    turned_low, turned_high = tl.fma(low, cos, -(high * sin)).to(kind), tl.fma(high, cos, low * sin).to(kind)
    at = query + (row[None, :].to(tl.int64) * NUM_HEADS + head) * DIM + d
    tl.store(at, turned_low, mask=there & (head < NUM_HEADS))
    tl.store(at + HALF, turned_high, mask=there & (head < NUM_HEADS))
    at = store + ((head - NUM_HEADS).to(tl.int64) * num_slots + slot) * DIM + d
    written = there & (head >= NUM_HEADS) & (slot >= 0)
    tl.store(at, turned_low, mask=written)
    tl.store(at + HALF, turned_high, mask=written)


@dataclass(frozen=True)
class Turning:
    """How a layer's queries and keys are turned by their positions, and where keys and values go."""

    positions: Tensor  # [N] int64
    slots: Tensor  # [N] int64; a negative one is not written
    store: Tensor  # [2, K, slots, D], written in place
    table: Tensor  # [positions, D / 2, 2] float32 cosine and sine
    num_heads: int
    head_norm: tuple[Tensor, Tensor] | None  # weights [D] of queries and keys
    eps: float

    @property
    def num_kv_heads(self) -> int:
        """Of the store."""
        return self.store.shape[1]

    @property
    def dim(self) -> int:
        """Of a head."""
        return self.store.shape[-1]

    def fits(self, cut: Tiles) -> bool:
        """Whether a product's tiles are enough to turn them: whole sums and pairs, no norm, which looks at heads."""
        return self.head_norm is None and cut.split_k == 1 and self.dim % 2 == 0 and cut.block_out % 2 == 0


def rotate_and_store(qkv: Tensor, turning: Turning) -> Tensor:
    """Norm and turn queries and keys, write keys and values to their slots, give queries; from [N, (H + 2 K) D] not
    turned, dimension i paired with i + D / 2. [N, H, D].

    All in float32, rounded once.
    """
    num_rows, dim, table = qkv.shape[0], turning.dim, turning.table
    num_heads, num_kv_heads, head_norm = turning.num_heads, turning.num_kv_heads, turning.head_norm
    query = qkv.new_empty(num_rows, num_heads, dim)
    query_weight, key_weight = (table, table) if head_norm is None else head_norm
    if num_rows:
        _rotate_and_store[(num_rows, triton.cdiv(num_heads + 2 * num_kv_heads, HEADS))](
            qkv, turning.positions, turning.slots, turning.store, table, query_weight, key_weight, query,
            turning.eps, qkv.stride(0), turning.store.shape[2],
            num_heads, num_kv_heads, dim, triton.next_power_of_2(dim // 2), HEADS, head_norm is not None,
            num_warps=4, enable_fp_fusion=False, **OVERLAPPING,
        )  # fmt: skip
    return query


def multiply_and_turn(x: Tensor, weight: Packed, bias: Tensor | None, turning: Turning, cut: Tiles) -> Tensor:
    """The same from rows [N, in] and a matrix whose tiles it fits, with the product's bits; one launch less."""
    n, dim, num_heads = len(x), turning.dim, turning.num_heads
    rows = rows_of_tile(n)
    cut = fitting(cut, rows, gated=False)
    query = x.new_empty(n, num_heads, dim)
    if n:
        _multiply_and_turn[(triton.cdiv(weight.outputs, cut.block_out) * triton.cdiv(n, rows),)](
            x.contiguous(), weight.codes, weight.scale, weight.minimum, bias, turning.positions, turning.slots,
            turning.store, turning.table, query, n, turning.store.shape[2],
            weight.inputs, weight.stride, num_heads, turning.num_kv_heads, dim,
            rows, cut.block_out, cut.padded, cut.block_k, weight.storage,
            num_warps=cut.warps, num_stages=cut.stages, **OVERLAPPING,
        )  # fmt: skip
    return query
