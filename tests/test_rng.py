from __future__ import annotations

import math

import pytest
import torch

from draftwood.rng import KeyedRng, Purpose, derive, fold_seed, token_uniforms, uniforms

MASK = (1 << 64) - 1


def splitmix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


@pytest.mark.parametrize("key", [0, 1, -1, 2**63 - 1, -(2**63), 123456789])
def test_uniforms_are_the_documented_function_of_the_key(key: int) -> None:
    """The same bits on every device: the definition in plain integers is what kernels are held to."""
    bits = splitmix((key + 0x9E3779B97F4A7C15) & MASK)
    assert uniforms(torch.tensor([key])).item() == ((bits >> 12) + 0.5) / 2**52


def test_token_noise_is_a_function_of_key_and_token_alone() -> None:
    wide = token_uniforms(torch.tensor([5, 6]), 100)
    narrow = token_uniforms(torch.tensor([6]), 7)
    assert torch.equal(wide[1, :7], narrow[0])
    assert len(wide.unique()) == 200


def test_parts_and_their_order_matter() -> None:
    seeds = torch.tensor([1, 1, 2])
    keys = derive(seeds, Purpose.DRAFT, torch.tensor([3, 4, 3]))
    assert len(set(keys.tolist())) == 3
    assert derive(seeds, 1, 2).tolist() != derive(seeds, 2, 1).tolist()
    assert fold_seed(1, 2) == derive(torch.tensor([1]), 2).item()


def test_flips_have_their_probability() -> None:
    """False-alarm probability below 1e-6: five standard deviations of 100,000 flips."""
    keys = derive(torch.arange(100_000), Purpose.ACCEPT)
    for prob in (0.1, 0.5, 0.93):
        share = KeyedRng().flip(torch.full((100_000,), prob), keys).double().mean().item()
        assert abs(share - prob) < 5 * math.sqrt(prob * (1 - prob) / 100_000)


def test_certain_flips_are_certain() -> None:
    keys = torch.arange(10_000)
    assert KeyedRng().flip(torch.ones(10_000), keys).all()
    assert not KeyedRng().flip(torch.zeros(10_000), keys).any()


def test_picks_have_the_proportions_of_their_weights() -> None:
    """Chi-square with 3 degrees of freedom: above 30 with probability 1.4e-6."""
    weights = torch.tensor([1.0, 0.0, 3.0, 4.0, 2.0])
    counts = torch.bincount(
        KeyedRng().pick(weights.expand(50_000, -1), derive(torch.arange(50_000), 9)), minlength=5
    ).double()
    assert counts[1] == 0
    expected = weights.double() / 10 * 50_000
    kept = weights > 0
    assert ((counts - expected)[kept] ** 2 / expected[kept]).sum() < 30


def test_a_row_with_one_outcome_needs_no_luck() -> None:
    weights = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 2.0]])
    assert KeyedRng().pick(weights, torch.tensor([1, 2])).tolist() == [1, 2]
