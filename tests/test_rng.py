"""Keys, noise, and the two ways to draw with them. Every statistical bound fails by chance less than once in 1e6."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from draftwood.rng import (
    KeyedRng,
    Purpose,
    derive,
    fold_seed,
    pick_reference,
    round_keys,
    target_keys,
    token_uniforms,
    uniforms,
)
from keys import key_for

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


def keys_of_answers(seeds: torch.Tensor, lengths: torch.Tensor) -> dict[str, torch.Tensor]:
    """Every key of the answers with these seeds: positions and rounds `lengths`, 4 columns with 3 trials a round."""
    each, at = (x.flatten() for x in torch.meshgrid(seeds, lengths, indexing="ij"))
    columns = torch.arange(4)[:, None].expand(4, 3).reshape(1, -1).expand(len(each), -1)
    trials = torch.arange(3).expand(len(each), 4, 3).reshape(len(each), -1)
    drafts = round_keys(each, at, Purpose.DRAFT)[:, None].expand_as(columns)
    return {
        "target": target_keys(each, at),
        "accept": round_keys(each, at, Purpose.ACCEPT),
        "residual": round_keys(each, at, Purpose.RESIDUAL),
        "draft": derive(drafts, columns, trials).flatten(),
    }


def test_no_two_draws_share_a_key() -> None:
    """16 requests with n = 8, lengths 1 to 300: all their draws, and of each request the seeds of its answers too."""
    answers = [[seed, *(fold_seed(seed, Purpose.SAMPLE, i) for i in range(1, 8))] for seed in range(16)]
    every = []
    for seeds in answers:
        keys = torch.cat(list(keys_of_answers(torch.tensor(seeds), torch.arange(1, 301)).values()))
        assert len(keys) == 8 * 300 * (3 + 12)
        assert not set(seeds) & set(keys.tolist())
        every.append(keys)
    assert len(torch.cat(every).unique()) == 16 * len(every[0])


@pytest.mark.parametrize("seed", [0, 1, 41, -7, 2**63 - 1])
def test_the_keys_of_the_target_are_the_documented_ones(seed: int) -> None:
    """The answers of `match` and of plain decoding for a seed hang on these keys: they must never change."""
    for position in (1, 2, 5, 1000):
        key = seed & MASK
        for part in (1, position):
            key = splitmix(((key ^ part) * 0x9E3779B97F4A7C15 + 0xBF58476D1CE4E5B9) & MASK)
        assert target_keys(torch.tensor([seed]), torch.tensor([position])).item() & MASK == key
        assert derive(torch.tensor([seed]), Purpose.TARGET, position).item() & MASK == key
    assert fold_seed(seed, Purpose.SAMPLE, 3) == derive(torch.tensor([seed]), 5, 3).item()


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
    assert KeyedRng().race(weights, torch.tensor([1, 2])).tolist() == [[1], [2]]


# --- one uniform on the cumulated weights

LOWEST, HIGHEST = 2.0**-53, 1 - 2.0**-53  # the ends of what `uniforms` can return


def pick_at(u: float, weights: torch.Tensor) -> list[int]:
    keys = torch.full((len(weights),), key_for(u))
    picked = KeyedRng().pick(weights, keys)
    assert torch.equal(
        weights.gather(1, picked[:, None]) > 0, weights.gather(1, pick_reference(weights, keys)[:, None]) > 0
    )
    return picked.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_ends_of_the_interval_are_the_first_and_the_last_token(dtype: torch.dtype) -> None:
    """Zeros at either end, sums that round down, up, or to nearly nothing: never a token of weight zero."""
    rows = torch.tensor(
        [
            [0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1],
            [0.0, 0.0, 0.3, 0.0, 0.3, 0.0, 0.4, 0.0, 0.0, 0.0],
            [0.0, 0.0, 0.0, 1.0, 1e-30, 0.0, 0.0, 0.0, 0.0, 0.0],
            [0.0, 1e-38, 0.0, 2e-38, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
            [7.0, 1e-3, 9.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 5.0],
        ],
        dtype=dtype,
    )
    assert pick_at(LOWEST, rows) == [0, 2, 3, 1, 0]
    highest = pick_at(HIGHEST, rows)
    assert highest[:2] + highest[3:] == [9, 6, 3, 9]
    assert highest[2] in (3, 4)


def test_sums_that_round_never_lead_to_a_token_of_weight_zero() -> None:
    """Random rows with zeros in them, at both ends of the interval and just around every border."""
    generator = torch.Generator().manual_seed(3)
    weights = torch.rand(400, 37, generator=generator, dtype=torch.float64) ** 8
    weights[torch.rand(400, 37, generator=generator) < 0.6] = 0
    weights[:, 5] += 1e-9
    for row in weights[:40]:
        borders = (row.cumsum(0) / row.sum()).tolist()
        for border in (LOWEST, HIGHEST, *borders[:-1]):
            for u in (border, math.nextafter(border, 0), math.nextafter(border, 1)):
                (chosen,) = pick_at(min(max(u, LOWEST), HIGHEST), row[None])
                assert row[chosen] > 0
    for u in (LOWEST, 0.5, HIGHEST):
        chosen = torch.tensor(pick_at(u, weights))
        assert bool((weights.gather(1, chosen[:, None]) > 0).all())


def test_the_smallest_weights_there_are() -> None:
    """Where a product rounds to nothing or to the whole, there is still only one token with any weight."""
    rows = torch.tensor([[0.0, 5e-324, 0.0], [0.0, 1e-310, 0.0]], dtype=torch.float64)
    for u in (LOWEST, 0.3, HIGHEST):
        assert pick_at(u, rows) == [1, 1]


def settled_picks(weights: torch.Tensor, borders: torch.Tensor) -> int:
    """How many of 256 picks were settled by exact `borders` [V] of the interval, all of them rightly."""
    keys = derive(torch.arange(256), Purpose.RESIDUAL)
    aim = uniforms(keys)
    want = torch.searchsorted(borders, aim, right=True)
    near = torch.minimum((borders[want] - aim).abs(), (borders[(want - 1).clamp(min=0)] - aim).abs())
    settled = near > 1e-9
    assert torch.equal(KeyedRng().pick(weights.expand(256, -1), keys)[settled], want[settled])
    return int(settled.sum())


@pytest.mark.parametrize("scale", [1.0, 4.0, 2.0**-40])
def test_a_flat_row_of_a_whole_vocabulary_has_its_borders_where_they_belong(scale: float) -> None:
    """150,000 weights in float32, equal or not: the token is where the uniform number points, so all have their share.

    Summed in float32 the borders would be off by whole tokens.
    """
    vocabulary = 150_000
    equal = torch.full((1, vocabulary), scale / vocabulary, dtype=torch.float32)
    assert settled_picks(equal, torch.arange(1, vocabulary + 1, dtype=torch.float64) / vocabulary) > 240
    uneven = 0.5 + torch.rand(1, vocabulary, generator=torch.Generator().manual_seed(5))
    sums = (uneven[0].double() * 2**24).long().cumsum(0)  # exact: such numbers are multiples of 2^-24
    assert settled_picks(scale * uneven, sums / sums[-1].double()) > 240


def test_any_layout_of_rows_will_do() -> None:
    weights = torch.rand(5, 7, generator=torch.Generator().manual_seed(1))
    keys = torch.arange(5)
    wanted = KeyedRng().pick(weights, keys).tolist()
    assert KeyedRng().pick(weights.T.contiguous().T, keys).tolist() == wanted
    assert KeyedRng().pick(torch.cat([weights, weights], 1)[:, :7], keys).tolist() == wanted
    assert KeyedRng().pick(weights.double(), keys).tolist() == wanted
    assert [int(KeyedRng().pick(w[None], k[None])) for w, k in zip(weights, keys, strict=True)] == wanted


# --- the race

WEIGHTS = torch.tensor([0.5, 0.2, 0.0, 0.3])


def test_a_race_ends_as_draws_without_replacement_would() -> None:
    """Chi-square with 5 degrees of freedom over the six orders of three tokens: above 37 with probability 6e-7."""
    count = 40_000
    keys = derive(torch.arange(count), Purpose.TARGET)
    places = KeyedRng().race(WEIGHTS.expand(count, -1), keys, winners=3)
    statistic = 0.0
    for first, second, third in itertools.permutations((0, 1, 3)):
        w = WEIGHTS.double().tolist()
        expected = count * w[first] * w[second] / (1 - w[first])
        seen = int((places == torch.tensor([first, second, third])).all(1).sum())
        statistic += (seen - expected) ** 2 / expected
    assert statistic < 37


def test_more_winners_change_nothing_for_the_first() -> None:
    keys = derive(torch.arange(500), Purpose.TARGET)
    rows = WEIGHTS.expand(500, -1)
    assert torch.equal(KeyedRng().race(rows, keys), KeyedRng().race(rows, keys, winners=3)[:, :1])
    assert set(KeyedRng().race(rows, keys, winners=4)[:, 3].tolist()) == {2}, "a token of weight zero comes last"


def test_a_race_is_a_function_of_its_key_and_its_own_row() -> None:
    """Alone or among others, certain or not, scaled or not, with tokens nobody may say behind it: the same end."""
    keys = derive(torch.arange(50), Purpose.TARGET)
    rows = torch.rand(50, 9, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    rows[::7] = torch.eye(9, dtype=torch.float64)[3]
    together = KeyedRng().race(rows, keys)
    alone = [KeyedRng().race(rows[i : i + 1], keys[i : i + 1]).item() for i in range(50)]
    assert together[:, 0].tolist() == alone
    assert torch.equal(KeyedRng().race(rows * 4, keys), together)
    assert torch.equal(KeyedRng().race(torch.nn.functional.pad(rows, (0, 5)), keys), together)


PAIRS = {
    "alike": ((0.5, 0.3, 0.2), (0.45, 0.33, 0.22)),
    "reversed": ((0.7, 0.2, 0.1), (0.1, 0.2, 0.7)),
    "sharp and flat": ((0.9, 0.05, 0.03, 0.02), (0.25, 0.25, 0.25, 0.25)),
    "half of it": ((0.5, 0.5, 0.0, 0.0), (0.25, 0.25, 0.25, 0.25)),
    "apart": ((1.0, 0.0), (0.0, 1.0)),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_two_races_with_one_key_end_alike_as_often_as_promised(pair: str) -> None:
    """Daliri et al. 2024: at least (1 - TV) / (1 + TV), far above the sum of p q that unshared noise gives."""
    p, q = (torch.tensor(row, dtype=torch.float64) for row in PAIRS[pair])
    count = 20_000
    keys = derive(torch.arange(count), Purpose.TARGET)
    mine = KeyedRng().race(p.expand(count, -1), keys)[:, 0]
    yours = KeyedRng().race(q.expand(count, -1), keys)[:, 0]
    distance = float((p - q).abs().sum()) / 2
    promised = (1 - distance) / (1 + distance)
    margin = 5 * math.sqrt(0.25 / count)
    alike = float((mine == yours).double().mean())
    assert alike >= promised - margin
    assert alike <= 1 - distance + margin, "more than any coupling can"
    if pair == "alike":
        assert alike > float((p * q).sum()) + 0.3
