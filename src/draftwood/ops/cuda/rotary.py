"""From projected rows to turned queries and written keys and values in one kernel."""
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from draftwood.ops.cuda.overlap import OVERLAPPING, make_way, wait_for_predecessors

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


def rotate_and_store(
    qkv: Tensor,  # [N, (H + 2 K) D] not turned, dimension i paired with i + D / 2
    positions: Tensor,  # [N] int64
    slots: Tensor,  # [N] int64; a negative one is not written
    layer_store: Tensor,  # [2, K, slots, D], written in place
    table: Tensor,  # [positions, D / 2, 2] float32 cosine and sine
    num_heads: int,
    num_kv_heads: int,
    head_norm: tuple[Tensor, Tensor] | None,  # weights [D] of queries and keys
    eps: float,
) -> Tensor:
    """Norm and turn queries and keys, write keys and values to their slots, give queries. [N, H, D].

    All in float32, rounded once.
    """
    num_rows, dim = qkv.shape[0], layer_store.shape[-1]
    query = qkv.new_empty(num_rows, num_heads, dim)
    query_weight, key_weight = (table, table) if head_norm is None else head_norm
    if num_rows:
        _rotate_and_store[(num_rows, triton.cdiv(num_heads + 2 * num_kv_heads, HEADS))](
            qkv, positions, slots, layer_store, table, query_weight, key_weight, query,
            eps, qkv.stride(0), layer_store.shape[2],
            num_heads, num_kv_heads, dim, triton.next_power_of_2(dim // 2), HEADS, head_norm is not None,
            num_warps=4, enable_fp_fusion=False, **OVERLAPPING,
        )  # fmt: skip
    return query
