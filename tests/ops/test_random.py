"""Randomness by C and by Triton: the integers of the reference, and its draws."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from draftwood import rng
from draftwood.ops.native import kernels
from draftwood.rng import KeyedRng, Purpose

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs Triton", allow_module_level=True)

from draftwood.ops.cuda import random as triton_random
from keys import key_for

EDGES = [0, 1, -1, 2**63 - 1, -(2**63), 123456789, -987654321]


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(params=["c", "triton"])
def pick(request: pytest.FixtureRequest, device: torch.device):
    if request.param == "triton":
        return lambda w, k: triton_random.pick(w.to(device), k.to(device)).cpu()
    if kernels() is None:
        pytest.skip("no C compiler")
    return KeyedRng().pick


@pytest.fixture(params=["c", "triton"])
def race(request: pytest.FixtureRequest, device: torch.device):
    if request.param == "triton":
        return lambda w, k, *n: triton_random.race(w.to(device), k.to(device), *n).cpu()
    if kernels() is None:
        pytest.skip("no C compiler")
    return KeyedRng().race


def test_keys_can_be_found_for_any_uniform_number() -> None:
    wanted = [0.0, 2.0**-52, 0.3, 0.5, 1 - 2.0**-53]
    got = rng.uniforms_reference(torch.tensor([key_for(u) for u in wanted])).tolist()
    assert got == [(int(u * 2**52) + 0.5) / 2**52 for u in wanted]


def test_keys_are_folded_to_the_same_integers(device: torch.device) -> None:
    keys = torch.tensor(EDGES)
    other = torch.tensor(EDGES[::-1])
    for parts in [(3,), (-5, other), (other, Purpose.DRAFT, 2**40), (1, 2, other, 4, 0), (other + 1, other, other)]:
        want = rng.derive_reference(keys, *parts)
        there = [x.to(device) if isinstance(x, torch.Tensor) else x for x in parts]
        assert torch.equal(triton_random.derive(keys.to(device), *there).cpu(), want)
        assert torch.equal(rng.derive(keys, *parts), want)
    assert triton_random.derive(keys.to(device)).tolist() == EDGES


def test_keys_of_any_layout(device: torch.device) -> None:
    """Expanded, transposed, broadcast against each other, in three dimensions, and none at all."""
    rows, columns = torch.arange(300)[:, None], torch.arange(14).view(7, 2).T[:1]
    cases = [
        (rows.expand(300, 7), columns.expand(300, 7)),
        (rows, columns),
        (rows[:, 0], torch.tensor(5)),
        (torch.arange(24).view(2, 3, 4), torch.arange(3)[:, None]),
        (rows[:0], columns[:0]),
    ]
    for keys, part in cases:
        want = rng.derive_reference(keys, part, 9)
        got = triton_random.derive(keys.to(device), part.to(device), 9).cpu()
        assert torch.equal(got, want)
        assert torch.equal(rng.derive(keys, part, 9), want)


def test_uniform_numbers_are_the_same(device: torch.device) -> None:
    keys = torch.cat([torch.tensor(EDGES), rng.derive_reference(torch.arange(200), 1)])
    assert torch.equal(triton_random.uniforms(keys.to(device)).cpu(), rng.uniforms_reference(keys))
    assert torch.equal(rng.uniforms(keys), rng.uniforms_reference(keys))


def adversarial_rows(dtype: torch.dtype) -> torch.Tensor:
    """Zeros, one token, the smallest numbers there are, and long tails. [9, 5000]."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.zeros(9, 5000, dtype=dtype)
    rows[0] = torch.rand(5000, generator=generator)
    rows[1, 4321] = 0.7
    rows[2, ::17] = 1e-38
    rows[3, [5, 4095, 4096, 4999]] = torch.tensor([1e-30, 1.0, 1e-30, 1e-7], dtype=dtype)
    rows[4] = torch.softmax(8 * torch.randn(5000, generator=generator), 0)
    rows[5, 0], rows[5, -1] = 3e30, 1e30
    rows[6] = 0.1
    rows[7, 100:4200] = torch.rand(4100, generator=generator) ** 8
    rows[8] = 5e-324 if dtype == torch.float64 else 1e-45
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_picks_are_those_of_the_reference(pick, dtype: torch.dtype) -> None:
    rows = adversarial_rows(dtype)
    for seed in range(12):
        keys = rng.derive_reference(torch.arange(len(rows)), seed)
        want, got = rng.pick_reference(rows, keys), pick(rows, keys)
        assert torch.equal(got, want), seed


def test_an_empty_row_gives_its_last_token(pick) -> None:
    rows = torch.zeros(2, 7)
    assert torch.equal(pick(rows, torch.tensor([1, 2])), rng.pick_reference(rows, torch.tensor([1, 2])))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_token_of_weight_zero_is_ever_picked(pick, dtype: torch.dtype) -> None:
    """At both ends of the interval and just around borders, for sums that round."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.rand(6, 700, generator=generator, dtype=torch.float64) ** 8
    rows[torch.rand(6, 700, generator=generator) < 0.6] = 0
    rows[:, 690:] = 0
    rows[:, :3] = 0
    rows = rows.to(dtype)
    borders = rows.double().cumsum(1) / rows.double().sum(1, keepdim=True)
    aims = [0.0, 1 - 2.0**-53]
    for border in borders[0, ::90].tolist():
        aims += [max(0.0, min(border + step * 2.0**-52, 1 - 2.0**-53)) for step in (-1, 0, 1)]
    keys = torch.tensor([[key_for(u)] * 6 for u in aims]).view(-1)
    every = rows.repeat(len(aims), 1)
    chosen = pick(every, keys)
    assert bool((every.gather(1, chosen[:, None]) > 0).all())
    assert chosen[:6].tolist() == (rows > 0).long().argmax(1).tolist()


def test_rows_of_any_layout_are_picked_from(pick) -> None:
    weights, keys = torch.rand(5, 7, generator=torch.Generator().manual_seed(1)), torch.arange(5)
    want = rng.pick_reference(weights, keys)
    assert torch.equal(pick(weights.T.contiguous().T, keys), want)
    assert torch.equal(pick(torch.cat([weights, weights], 1)[:, :7], keys), want)
    assert torch.equal(pick(weights[:1].expand(5, -1), keys), rng.pick_reference(weights[:1].expand(5, -1), keys))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_races_end_as_the_references(race, dtype: torch.dtype) -> None:
    rows = adversarial_rows(dtype)
    for seed in range(6):
        keys = rng.derive_reference(torch.arange(len(rows)), seed)
        assert torch.equal(race(rows, keys), rng.race_reference(rows, keys)), seed
    assert race(torch.zeros(1, 5), torch.tensor([3])).tolist() == [[0]]


def test_races_with_several_winners(race) -> None:
    rows, keys = adversarial_rows(torch.float32)[[0, 4, 6]], torch.arange(3)
    assert torch.equal(race(rows, keys, 3), rng.race_reference(rows, keys, 3))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_draws_on_a_gpu_can_be_captured_and_are_those_of_the_cpu() -> None:
    weights = torch.softmax(3 * torch.randn(64, 151_936, generator=torch.Generator().manual_seed(2)), -1)
    keys = torch.arange(64)
    there, on_device = weights.cuda(), keys.cuda()

    def draw() -> tuple[torch.Tensor, torch.Tensor]:
        named = rng.derive(on_device, Purpose.TARGET, on_device)
        return KeyedRng().pick(there, named), KeyedRng().race(there, named)

    draw()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        picked, raced = draw()
    graph.replay()
    named = rng.derive_reference(keys, Purpose.TARGET, keys)
    assert torch.equal(picked.cpu(), rng.pick_reference(weights, named))
    assert torch.equal(raced.cpu(), rng.race_reference(weights, named))
