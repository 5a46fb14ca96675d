"""Norm, rotation and cache write in one kernel against the same in plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from draftwood.ops.cuda.rotary import rotate_and_store

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE.type == "cuda" else [])
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
EPS = 1e-5


def reference_rotate_and_store(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    layer_store: Tensor,
    table: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_norm: tuple[Tensor, Tensor] | None,
    eps: float,
) -> Tensor:
    dim = layer_store.shape[-1]
    parts = qkv.float().unflatten(1, (-1, dim)).split((num_heads, num_kv_heads, num_kv_heads), 1)
    query, key, value = parts
    if head_norm is not None:
        query, key = (
            x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float()
            for x, weight in zip((query, key), head_norm, strict=True)
        )
    cos, sin = table[positions].unbind(-1)
    query, key = (_turned(x, cos[:, None], sin[:, None]) for x in (query, key))
    written = slots >= 0
    layer_store[0][:, slots[written]] = key[written].transpose(0, 1).to(layer_store.dtype)
    layer_store[1][:, slots[written]] = value[written].transpose(0, 1).to(layer_store.dtype)
    return query.to(qkv.dtype)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


def make_inputs(
    rows: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim, generator=draw).to(DEVICE, dtype)
    positions = torch.randint(50, (rows,), generator=draw).to(DEVICE)
    slots = torch.randperm(rows + 20, generator=draw)[:rows].to(DEVICE)
    angles = torch.outer(torch.arange(50.0), 10000 ** -(torch.arange(dim // 2) / (dim // 2)))
    table = torch.stack([angles.cos(), angles.sin()], -1).to(DEVICE)
    return qkv, positions, slots, table


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 1, 64), (3, 3, 96), (7, 1, 128), (2, 1, 256)])
@pytest.mark.parametrize("normed", [False, True])
def test_parity(dtype: torch.dtype, heads: int, kv_heads: int, dim: int, normed: bool) -> None:
    qkv, positions, slots, table = make_inputs(5, heads, kv_heads, dim, dtype)
    slots[3] = -1  # padding that is not to be written
    norm = (torch.rand(dim).to(DEVICE, dtype), torch.rand(dim).to(DEVICE, dtype)) if normed else None
    got_store, store = torch.zeros(2, 2, kv_heads, 32, dim, device=DEVICE, dtype=dtype)
    rest = (table, heads, kv_heads, norm, EPS)
    got = rotate_and_store(qkv, positions, slots, got_store, *rest)
    expected = reference_rotate_and_store(qkv, positions, slots, store, *rest)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(got_store, store, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_are_copied_and_rows_do_not_touch_each_other(dtype: torch.dtype) -> None:
    qkv, positions, slots, table = make_inputs(6, 4, 2, 64, dtype)
    weights = (torch.rand(64).to(DEVICE, dtype), torch.rand(64).to(DEVICE, dtype))
    together, alone = torch.zeros(2, 2, 2, 32, 64, device=DEVICE, dtype=dtype)
    query = rotate_and_store(qkv, positions, slots, together, table, 4, 2, weights, EPS)
    assert torch.equal(together[1][:, slots].transpose(0, 1).flatten(1), qkv[:, -2 * 64 :])
    for i in range(6):
        row = slice(i, i + 1)
        own = rotate_and_store(qkv[row], positions[row], slots[row], alone, table, 4, 2, weights, EPS)
        assert torch.equal(own, query[row])
    assert torch.equal(alone, together)
