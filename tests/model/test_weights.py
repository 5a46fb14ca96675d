"""Weight formats: what they keep of a matrix, and what they take over from GGUF files number by number."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import quantize

from draftwood.model.gguf import GgufTensor, read_groups
from draftwood.model.weights import (
    FORMATS,
    GROUP,
    Quantised,
    Storage,
    as_numbers,
    exact_storage,
    join_rows,
    quantise_int4,
    quantise_int8,
    round_inputs,
    store_as,
)


def matrix(rows: int = 24, inputs: int = 96, seed: int = 0) -> torch.Tensor:
    weight = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed))
    weight[3] = 0
    weight[4, :GROUP] = 0.25
    return weight


@pytest.mark.parametrize(("quantise", "steps"), [(quantise_int8, 254), (quantise_int4, 15)])
def test_quantising_is_off_by_at_most_half_a_step(quantise, steps: int) -> None:
    weight = matrix()
    groups = weight.unflatten(1, (-1, GROUP))
    span = 2 * groups.abs().amax(-1) if steps == 254 else groups.amax(-1) - groups.amin(-1)
    allowed = (span / steps * 0.5 + 1e-3 * groups.abs().amax(-1)).repeat_interleave(GROUP, 1)  # scales are float16
    error = (quantise(weight).dequantise() - weight).abs()
    assert bool((error <= allowed + 1e-7).all())
    assert float(error[3].max()) == 0.0


def test_a_format_is_its_own_fixed_point() -> None:
    """What a format has rounded once, it rounds no further: a quantised model is one function, not two."""
    for storage in (Storage.INT8, Storage.BFLOAT16):
        once = as_numbers(store_as(storage, matrix())).float()
        assert torch.equal(as_numbers(store_as(storage, once)).float(), once)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_gguf_blocks_are_taken_over_exactly(kind: str) -> None:
    data = quantize(matrix(16, 128).numpy(), GGMLQuantizationType[kind])
    groups = read_groups(GgufTensor("w", (16, 128), kind, data))
    assert groups is not None
    from gguf.quants import dequantize

    want = dequantize(data, GGMLQuantizationType[kind]).reshape(16, 128)
    got = groups.dequantise().numpy()
    # One rounding instead of two for Q4_1's scale and minimum: as close as float32 gets.
    assert np.abs(got - want).max() <= 2e-7 * np.abs(want).max()
    assert store_as(groups.storage, groups) is groups


def test_other_gguf_types_are_not_groups_of_ours() -> None:
    assert read_groups(GgufTensor("w", (2, 32), "F32", np.zeros((2, 128), dtype=np.uint8))) is None


def test_rounded_inputs_depend_on_their_own_row_only() -> None:
    x = torch.randn(5, 70, generator=torch.Generator().manual_seed(2)) * torch.tensor([1, 100, 1e-3, 0, 7.0])[:, None]
    together = round_inputs(x)
    assert all(torch.equal(round_inputs(row[None])[0], whole) for row, whole in zip(x, together, strict=True))
    assert float((together - x).abs().max() / x.abs().max()) <= 0.5 / 127 * 1.001
    assert torch.equal(together[3], torch.zeros(70))


def test_joined_rows_keep_what_they_have_in_common() -> None:
    a, b = quantise_int4(matrix(seed=1)), quantise_int4(matrix(seed=2))
    joined = join_rows([a, b])
    assert isinstance(joined, Quantised)
    assert torch.equal(joined.dequantise(), torch.cat([a.dequantise(), b.dequantise()]))
    mixed = join_rows([a, quantise_int8(matrix(seed=2))])
    assert isinstance(mixed, torch.Tensor)
    assert exact_storage(mixed) is Storage.FLOAT32
    assert exact_storage(matrix().bfloat16()) is Storage.BFLOAT16
    assert exact_storage(a) is Storage.INT4


def test_joined_in_turn() -> None:
    gate, up = torch.arange(6.0)[:, None], torch.arange(6.0)[:, None] + 10
    joined = as_numbers(join_rows([gate, up], 4))[:, 0].tolist()
    assert joined == [0, 1, 2, 3, 10, 11, 12, 13, 4, 5, 0, 0, 14, 15, 0, 0]


def test_every_format_says_what_it_is() -> None:
    assert FORMATS["stored"].layers is None
    assert all(kind.says and kind.name == name for name, kind in FORMATS.items())
    assert [name for name, kind in FORMATS.items() if kind.byte_activations] == ["w8a8", "w4a8"]
