"""Norm, rotation and cache write in one kernel against the same in plain torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from draftwood.model.weights import quantise_float8
from draftwood.ops.cuda.linear import pack
from draftwood.ops.cuda.products import Around, Tiles, skinny
from draftwood.ops.cuda.rotary import Turning, multiply_and_turn, rotate_and_store

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
    got = rotate_and_store(qkv, Turning(positions, slots, got_store, table, heads, norm, EPS))
    expected = reference_rotate_and_store(qkv, positions, slots, store, table, heads, kv_heads, norm, EPS)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(got_store, store, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_are_copied_and_rows_do_not_touch_each_other(dtype: torch.dtype) -> None:
    qkv, positions, slots, table = make_inputs(6, 4, 2, 64, dtype)
    weights = (torch.rand(64).to(DEVICE, dtype), torch.rand(64).to(DEVICE, dtype))
    together, alone = torch.zeros(2, 2, 2, 32, 64, device=DEVICE, dtype=dtype)
    query = rotate_and_store(qkv, Turning(positions, slots, together, table, 4, weights, EPS))
    assert torch.equal(together[1][:, slots].transpose(0, 1).flatten(1), qkv[:, -2 * 64 :])
    for i in range(6):
        row = slice(i, i + 1)
        own = rotate_and_store(qkv[row], Turning(positions[row], slots[row], alone, table, 4, weights, EPS))
        assert torch.equal(own, query[row])
    assert torch.equal(alone, together)


CUTS = [Tiles(64, 32, 1, 2, 4), Tiles(48, 32, 1, 2, 4)]  # of the second, a quarter of each tile is not there


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cut", CUTS, ids=["full", "padded"])
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "dim", "biased", "float8"),
    [
        (5, 3, 3, 128, False, False),
        (5, 2, 1, 256, True, True),
        (1, 4, 1, 64, True, False),
        (3, 1, 1, 96, False, False),
        (130, 1, 1, 64, True, True),  # more than a tile of rows
    ],
)
def test_a_product_that_turns_gives_the_bits_of_both(
    dtype: torch.dtype, cut: Tiles, rows: int, heads: int, kv_heads: int, dim: int, biased: bool, float8: bool
) -> None:
    outputs, draw = (heads + 2 * kv_heads) * dim, torch.Generator().manual_seed(1)
    _, positions, slots, table = make_inputs(rows, heads, kv_heads, dim, dtype)
    slots[rows // 2] = -1
    x = torch.randn(rows, 80, generator=draw).to(DEVICE, dtype)
    matrix = torch.randn(outputs, 80, generator=draw).to(DEVICE, dtype)
    weight = pack([quantise_float8(matrix.float()) if float8 else matrix], 80)
    bias = torch.randn(outputs, generator=draw).to(DEVICE, dtype) if biased else None
    got_store, store = torch.zeros(2, 2, kv_heads, rows + 20, dim, device=DEVICE, dtype=dtype)
    want = Turning(positions, slots, store, table, heads, None, EPS)
    assert want.fits(cut)
    expected = rotate_and_store(skinny(x, weight, Around(bias=bias), replace(cut, block_out=64)), want)
    got = multiply_and_turn(x, weight, bias, replace(want, store=got_store), cut)
    assert torch.equal(got, expected)
    assert torch.equal(got_store, store)


def test_what_a_tile_cannot_turn() -> None:
    table, store = torch.zeros(4, 48, 2), torch.zeros(2, 2, 8, 96)
    none, cut = torch.zeros(0, dtype=torch.int64), CUTS[0]
    turning = Turning(none, none, store, table, 2, None, EPS)
    assert turning.fits(cut)
    assert not turning.fits(replace(cut, block_out=33))  # half a pair
    assert not turning.fits(replace(cut, split_k=2))
    assert not replace(turning, head_norm=(table, table)).fits(cut)
