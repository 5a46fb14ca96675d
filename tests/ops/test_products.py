"""Matrix products of the GPU: the right numbers whatever is fused around them, and the same among any rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from draftwood.model.layers import ACTIVATIONS, gated
from draftwood.model.weights import Float8, Matrix, Storage, as_numbers, quantise_float8, store_as
from draftwood.ops.cuda import norm_act, products
from draftwood.ops.cuda.linear import FAST_ROWS, CudaLinear, Stream, pack
from draftwood.ops.cuda.prefetch import Beginning
from draftwood.ops.cuda.product_kernels import DENSE
from draftwood.ops.cuda.products import MULTIPROCESSORS, Around, Norm, Tiles, gemv, skinny, skinny_normed, tiles

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if ON_GPU else [])  # the interpreter's bfloat16 is broken
CLOSE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
STORAGES = {"dense": None, "int8": Storage.INT8, "int4": Storage.INT4, "float8": Storage.FLOAT8}
SMALL = Tiles(16, 32, 1, 2, 4)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 31 * sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


def matrix(outputs: int, inputs: int, kind: str, dtype: torch.dtype) -> Matrix | Float8:
    weight = random(outputs, inputs, seed=1) * inputs**-0.5
    storage = STORAGES[kind]
    if storage is None:
        return weight.to(dtype)
    return quantise_float8(weight) if storage == Storage.FLOAT8 else store_as(storage, weight)


def expected(x: Tensor, weight: Matrix | Float8, around: Around) -> Tensor:
    """The same in float64, from the numbers the weights stand for."""
    wide = x.double()
    if around.norm is not None:
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + around.norm.eps) * around.norm.weight.double()
    out = wide @ as_numbers(weight).double()[:, : x.shape[1]].t()
    out = out if around.bias is None else out + around.bias.double()
    if around.activation is not None:
        gate, up = out.chunk(2, -1)
        out = ACTIVATIONS[around.activation](gate) * up
    return out if around.residual is None else out + around.residual.double()


def everything(n: int, outputs: int, inputs: int, activation: str | None, dtype: torch.dtype) -> Around:
    width = 2 * outputs if activation else outputs
    norm = Norm(1 + 0.1 * random(inputs, seed=2, dtype=dtype), 1e-5)
    return Around(norm, random(width, seed=3, dtype=dtype), random(n, outputs, seed=4, dtype=dtype), activation)


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert got.shape == want.shape
    assert (got.double() - want).abs().max() <= CLOSE[dtype] * max(1.0, float(want.abs().max()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", STORAGES)
@pytest.mark.parametrize("activation", [None, "silu"])
def test_one_row(kind: str, activation: str | None, dtype: torch.dtype) -> None:
    for outputs, inputs in ((5, 96), (8, 1100)):
        weight = matrix(outputs * (2 if activation else 1), inputs, kind, dtype) if inputs % 32 == 0 else None
        weight = matrix(outputs * (2 if activation else 1), inputs, "dense", dtype) if weight is None else weight
        x, around = random(1, inputs, dtype=dtype), everything(1, outputs, inputs, activation, dtype)
        cut = Tiles(4, 64 if inputs < 1000 else 1024, 1, 1, 4)
        assert_close(gemv(x, pack([weight], inputs), around, cut), expected(x, weight, around), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", STORAGES)
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_few_rows(kind: str, activation: str | None, dtype: torch.dtype) -> None:
    """Outputs and inputs that no tile divides, in one piece and split; tiles of which a part is not there."""
    n, outputs, inputs = 5, 21, 96 if kind != "dense" else 80
    weight = matrix(outputs * (2 if activation else 1), inputs, kind, dtype)
    x, around = random(n, inputs, dtype=dtype), everything(n, outputs, inputs, activation, dtype)
    want = expected(x, weight, around)
    assert around.norm is not None
    normed, plain = norm_act.rms_norm(x, around.norm), replace(around, norm=None)
    for split, block_out in ((1, 16), (2, 16), (1, 12), (2, 12)):
        cut = replace(SMALL, split_k=split, block_out=block_out)
        assert_close(skinny(normed, pack([weight], inputs), plain, cut), want, dtype)


@pytest.mark.parametrize("outputs", [4096, 8192, 11008, 14336, 18944, 28672, 53248])
def test_gated_products_share_their_outputs_evenly(outputs: int) -> None:
    """No more turns than with the largest tiles, and the last one is used at least as well."""
    cut = tiles(outputs, 4096, DENSE.value, True)
    programs, fewest = -(-outputs // cut.block_out), -(-outputs // 64)
    at_a_time = MULTIPROCESSORS * cut.beside
    assert cut.block_out <= 64
    assert -(-programs // at_a_time) == -(-fewest // at_a_time)
    assert programs >= fewest


def test_a_split_product_norms_its_rows_for_the_next() -> None:
    n, outputs, inputs = 5, 21, 80
    weight, x = matrix(outputs, inputs, "dense", torch.float32), random(n, inputs)
    residual, norm = random(n, outputs, seed=6), Norm(random(outputs, seed=2), 1e-5)
    around = Around(None, None, residual, next_norm=norm)
    out, normed = skinny_normed(x, pack([weight], inputs), around, replace(SMALL, split_k=2))
    assert_close(out, expected(x, weight, around), torch.float32)
    assert normed is not None
    assert_close(normed, norm_act.rms_norm(out, norm).double(), torch.float32)
    assert skinny_normed(x, pack([weight], inputs), around, SMALL)[1] is None


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 4096), (28672, 4096), (4096, 14336), (1536, 576), (96, 72)])
def test_what_is_asked_for_ahead_lies_in_the_matrix(outputs: int, inputs: int, parts: int) -> None:
    for size in (1 << 20, 8 << 20, 1 << 30):
        asked = Beginning.of(torch.empty(outputs, inputs, dtype=torch.float16, device="meta"), size, parts)
        assert asked is not None
        _, requests, _, distance = asked.arguments
        assert 0 < requests * 512 <= distance  # parts do not overlap
        assert parts * distance <= outputs * inputs
        assert requests * 512 * parts * 2 <= size


def test_nothing_is_asked_for_where_bytes_do_not_come_in_sixteens() -> None:
    def asked(*shape: int, dtype: torch.dtype = torch.float16) -> Beginning | None:
        return Beginning.of(torch.empty(*shape, dtype=dtype, device="meta"), 1 << 20)

    assert asked(8, 72) is not None
    assert asked(7, 68) is None
    assert asked(8, 64, dtype=torch.float32) is None
    assert CudaLinear(pack([matrix(8, 64, "int8", torch.float32)], 64)).beginning(1 << 20) is None


def test_asking_for_the_next_weights_changes_no_result() -> None:
    weight, x = matrix(24, 64, "dense", torch.float16), random(1, 64, dtype=torch.float16)
    following = matrix(512, 1024, "dense", torch.float16)
    assert isinstance(following, Tensor)
    plain = gemv(x, pack([weight], 64), Around(), SMALL)
    assert torch.equal(gemv(x, pack([weight], 64), Around(then=Beginning.of(following, 1 << 19)), SMALL), plain)


def test_more_rows_than_a_tile_has() -> None:
    weight, x = matrix(20, 64, "dense", torch.float32), random(200, 64)
    assert_close(skinny(x, pack([weight], 64), Around(), SMALL), expected(x, weight, Around()), torch.float32)


def test_inputs_that_fill_no_group() -> None:
    for kind in ("int8", "int4", "float8"):
        weight, x = matrix(6, 52, kind, torch.float32), random(3, 52)
        want = expected(x, weight, Around())
        assert_close(skinny(x, pack([weight], 52), Around(), SMALL), want, torch.float32)
        assert_close(gemv(x[:1], pack([weight], 52), Around()), want[:1], torch.float32)


def test_joined_matrices() -> None:
    for kind in STORAGES:
        parts = [matrix(n, 64, kind, torch.float32) for n in (6, 3)]
        x = random(2, 64)
        want = torch.cat([expected(x, part, Around()) for part in parts], 1)
        assert_close(skinny(x, pack(parts, 64), Around(), SMALL), want, torch.float32)


@pytest.mark.parametrize("activation", [name for name in products.ACTIVATIONS if name])
def test_what_stands_between_products(activation: str) -> None:
    x = random(3, 2 * 70)
    gate, up = x.double().chunk(2, -1)
    assert_close(norm_act.gated(x, activation), gated(activation, gate, up), torch.float32)
    norm = Norm(random(140, seed=5), 1e-3)
    want = x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-3) * norm.weight.double()
    assert_close(norm_act.rms_norm(x, norm), want, torch.float32)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("n", [1, 3, FAST_ROWS + 1])
def test_every_way_gives_the_same_product(n: int, strict: bool) -> None:
    x, around = random(n, 64), everything(n, 24, 64, None, torch.float32)
    linear = CudaLinear(pack([matrix(24, 64, "dense", torch.float32)], 64), around.bias, strict)
    weight = linear.weight.codes
    assert around.norm is not None
    assert around.residual is not None
    for got, want in (
        (linear(Stream(x, around.norm)), replace(around, residual=None)),
        (linear.add_to(around.residual.clone(), x, around.norm).hidden, replace(around, norm=None)),
        (linear.gated(Stream(x, around.norm), "silu"), replace(around, residual=None, activation="silu")),
    ):
        assert_close(got, expected(x, weight, want), torch.float32)
    half = CudaLinear(pack([weight.half()], 64), strict=strict)
    if ON_GPU or n <= FAST_ROWS or strict:  # torch's own product with a wider result is CUDA's alone
        assert half(Stream(x.half(), around.norm), torch.float32).dtype == torch.float32


def strict_cases() -> list[tuple[str, int, int, torch.dtype]]:
    if ON_GPU:
        dense = [("dense", o, i, torch.bfloat16) for o, i in ((6144, 4096), (960, 576), (512, 14336))]
        return dense + [(kind, 6144, 4096, torch.bfloat16) for kind in STORAGES if kind != "dense"]
    return [(kind, 24, 96, torch.float32) for kind in STORAGES]


@pytest.mark.parametrize(("kind", "outputs", "inputs", "dtype"), strict_cases(), ids=str)
def test_strict_rows_do_not_depend_on_their_neighbours(
    kind: str, outputs: int, inputs: int, dtype: torch.dtype
) -> None:
    """Bit for bit on a GPU: alone, among few, among many, in whatever place."""
    weight = matrix(outputs, inputs, kind, dtype)
    linear = CudaLinear(pack([weight], inputs), strict=True)
    x, norm = random(300 if ON_GPU else 40, inputs, dtype=dtype), Norm(random(inputs, seed=2, dtype=dtype), 1e-5)
    residual = random(len(x), outputs // 2, seed=6, dtype=dtype)
    half = CudaLinear(pack([matrix(outputs // 2, inputs, kind, dtype)], inputs), strict=True)

    def results(begin: int, end: int) -> tuple[Tensor, ...]:
        part = x[begin:end]
        stream, beside = Stream(part, norm), Norm(random(outputs // 2, seed=3, dtype=dtype), 1e-5)
        added = half.add_to(residual[begin:end].clone(), part, beside)
        normed = norm_act.rms_norm(added.hidden, beside) if added.normed is None else added.normed
        return linear(stream, torch.float32), linear.gated(stream, "silu"), added.hidden, normed

    def same(some: Tensor, all_of_them: Tensor) -> bool:
        if ON_GPU:
            return torch.equal(some, all_of_them)
        # The interpreter's products are NumPy's, which choose an order of summation by the shape: as good as equal.
        return torch.allclose(some, all_of_them, rtol=1e-5, atol=1e-6)

    whole = results(0, len(x))
    assert_close(whole[0], expected(x, weight, Around(norm)), dtype)
    for begin, end in ((7, 8), (3, 20), (5, 38), (30, 100), (17, 150)):
        if end <= len(x):
            assert all(same(a, b[begin:end]) for a, b in zip(results(begin, end), whole, strict=True))


def test_no_rows_are_no_work() -> None:
    linear = CudaLinear(pack([matrix(6, 32, "dense", torch.float32)], 32), strict=True)
    assert linear(Stream(random(0, 32), Norm(random(32), 1e-5))).shape == (0, 6)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device, and there is none here")
@pytest.mark.parametrize("kind", STORAGES)
@pytest.mark.parametrize("n", [1, 7, 130])
def test_real_sizes(kind: str, n: int) -> None:
    for outputs, inputs in ((4096, 14336), (960, 576)):
        weight = matrix(outputs, inputs, kind, torch.bfloat16)
        x, around = random(n, inputs, dtype=torch.bfloat16), everything(n, outputs, inputs, None, torch.bfloat16)
        linear = CudaLinear(pack([weight], inputs), around.bias)
        assert around.norm is not None
        assert around.residual is not None
        assert_close(
            linear(Stream(x, around.norm)), expected(x, weight, replace(around, residual=None)), torch.bfloat16
        )
        added = linear.add_to(around.residual.clone(), x, around.norm).hidden
        assert_close(added, expected(x, weight, replace(around, norm=None)), torch.bfloat16)
        gated = replace(around, residual=None, activation="silu")
        assert_close(linear.gated(Stream(x, around.norm), "silu"), expected(x, weight, gated), torch.bfloat16)
