"""Trees grown with the target's noise (`Coupled`), verified by laws that draw: do the two share a random number?

A round at length 1 used to: its ACCEPT key was the target's key at position 2. `SharedNoise` computes the law of
draws that share a key, so such a collision is a measured bias here and not only a refused key.
"""

from __future__ import annotations

import pytest
import torch

from draftwood.drafting import Grower
from draftwood.growers import Coupled, Levels
from draftwood.rng import KeyedRng, Purpose, derive
from draftwood.verifiers import LAWS, NodeLaw
from enumeration import Enumerator, SharedNoise, assert_lossless, constant, law_of, shared_law

TREES: dict[str, Grower] = {
    "chain": Levels((1, 1), Coupled()),
    "chain-of-three": Levels((1, 1, 1), Coupled()),
    "two-then-one": Levels((2, 1), Coupled()),
    "two-then-two": Levels((2, 2), Coupled()),
    "all-then-one": Levels((3, 1), Coupled()),
}
P, Q = constant(0.5, 0.3, 0.2), constant(0.4, 0.35, 0.25)
NODE_LAWS = [name for name in LAWS if isinstance(LAWS[name](), NodeLaw) and LAWS[name]().lossless and name != "optimal"]
SMALL = ("chain", "two-then-one")  # the others are shown for one law of a node at a time and one of whole layers
PAIRS = [
    (tree, law)
    for tree in TREES
    for law in (NODE_LAWS if tree in SMALL else ("walk", "layer"))
    if LAWS[law]().refuses(TREES[tree].law) is None
]


@pytest.mark.parametrize(("tree", "law"), PAIRS)
def test_a_round_at_length_one_has_the_target_law(tree: str, law: str) -> None:
    assert_lossless(shared_law(TREES[tree], LAWS[law](), P, Q), P, 3)
    assert_lossless(shared_law(TREES[tree], LAWS[law](), P, Q, blind=True), P, 3)


@pytest.mark.parametrize("winners", [1, 2, 3])
@pytest.mark.parametrize("race_first", [True, False])
def test_the_enumerated_law_of_shared_noise_is_that_of_keyed_draws(winners: int, *, race_first: bool) -> None:
    """A race and a pick with one key, 40,000 keys: every joint outcome within five standard deviations."""
    count, runners, weights = 40_000, torch.tensor([0.2, 0.5, 0.3]), torch.tensor([0.3, 0.1, 0.6])

    def draws(rng: Enumerator | KeyedRng, keys: torch.Tensor) -> torch.Tensor:
        raced, picked = torch.empty(len(keys), winners, dtype=torch.int64), torch.empty_like(keys)
        for race in (race_first, not race_first):
            if race:
                raced = rng.race(runners.expand(len(keys), -1).double(), keys, winners)
            else:
                picked = rng.pick(weights.expand(len(keys), -1).double(), keys)
        return torch.cat([raced, picked[:, None]], 1)

    law = law_of(lambda rng: tuple(draws(rng, torch.tensor([1]))[0].tolist()), source=SharedNoise)
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    keys = derive(torch.arange(count), Purpose.TARGET)
    seen, counts = draws(KeyedRng(), keys).unique(dim=0, return_counts=True)
    found = dict(zip(map(tuple, seen.tolist()), counts.tolist(), strict=True))
    assert found.keys() <= law.keys()
    for outcome, chance in law.items():
        spread = (count * chance * (1 - chance)) ** 0.5
        assert abs(found.get(outcome, 0) - count * chance) <= 5 * spread + 1e-9, outcome
