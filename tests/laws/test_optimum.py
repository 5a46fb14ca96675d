"""The optimum by linear programming against the optima that are known in closed form."""

from __future__ import annotations

import itertools
import math

import pytest

from draftwood.drafting import Grower
from draftwood.growers import Beam, Independent, Levels, chain
from enumeration import Rows, aligned_rows, constant, continuation, random_rows
from optimum import optimal_acceptance, tree_law

SEEDS = range(6)
TOLERANCE = 1e-9


def optimum(grower: Grower, p: Rows, q: Rows, vocabulary: int) -> float:
    return optimal_acceptance(tree_law(grower, q), p, vocabulary)


def pair(seed: int, vocabulary: int, alpha: float = 1.0) -> tuple[Rows, Rows]:
    """Target and draft: unrelated at even seeds, alike at odd ones."""
    p = random_rows(seed, vocabulary, alpha)
    return p, aligned_rows(p, seed, vocabulary, 0.6) if seed % 2 else random_rows(seed + 100, vocabulary, alpha)


def best_on_a_path(p: Rows, q: Rows, depth: int) -> float:
    """The sum of A(ux) = min(A(u) p(x | u), q(ux)) over all drafts: no path is accepted oftener than it is drawn."""

    def below(u: tuple[int, ...], accepted: float) -> float:
        if len(u) == depth:
            return 0.0
        total = 0.0
        for x, chance in enumerate(p(u)):
            child = (*u, x)
            reached = min(accepted * chance, continuation(q, child, 0))
            total += reached + below(child, reached)
        return total

    return below((), 1.0)


def best_of_siblings(p: Rows, q: Rows, vocabulary: int, k: int) -> float:
    """1 - max over sets S of q(S)^k - p(S): how much oftener all k draws fall into S than the target does."""
    sets = [s for size in range(vocabulary + 1) for s in itertools.combinations(range(vocabulary), size)]
    return 1 - max(sum(q(())[x] for x in s) ** k - sum(p(())[x] for x in s) for s in sets)


@pytest.mark.parametrize("alpha", [0.3, 1.0])
@pytest.mark.parametrize(("vocabulary", "depth"), [(2, 1), (2, 2), (2, 3), (3, 1), (3, 2)])
@pytest.mark.parametrize("seed", SEEDS)
def test_one_drawn_path(seed: int, vocabulary: int, depth: int, alpha: float) -> None:
    p, q = pair(seed, vocabulary, alpha)
    best = optimum(Levels((1,) * depth, Independent()), p, q, vocabulary)
    assert best == pytest.approx(best_on_a_path(p, q, depth), abs=TOLERANCE)


def test_the_example_of_block_verification() -> None:
    """Sun et al. 2024: token by token accepts 10/9 of the two, the block 11/9."""
    best = optimum(Levels((1, 1), Independent()), constant(1, 2), constant(2, 1), 2)
    assert best == pytest.approx(11 / 9, abs=TOLERANCE)


@pytest.mark.parametrize(
    ("grower", "drafted"), [(chain(2), 2), (Beam(nodes=4, width=2, depth=2), 4)], ids=["chain", "beam"]
)
@pytest.mark.parametrize("seed", SEEDS)
def test_chosen_trees_are_worth_the_target_mass_of_their_nodes(seed: int, grower: Grower, drafted: int) -> None:
    p, q = pair(seed, 3)
    trees = tree_law(grower, q)
    (tree,) = trees
    assert len(tree) == 1 + drafted
    mass = sum(continuation(p, node, 0) for node in tree if node)
    assert optimal_acceptance(trees, p, 3) == pytest.approx(mass, abs=TOLERANCE)


@pytest.mark.parametrize("vocabulary", [3, 4])
@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("seed", SEEDS)
def test_independent_siblings(seed: int, k: int, vocabulary: int) -> None:
    p, q = pair(seed, vocabulary)
    best = optimum(Levels((k,), Independent()), p, q, vocabulary)
    assert best == pytest.approx(best_of_siblings(p, q, vocabulary, k), abs=TOLERANCE)


def test_a_published_bound_is_out_of_reach() -> None:
    """SpecTr-GBV's Theorem 5.3 promises 0.822 of two draws, and no lossless verifier accepts more than 0.69."""
    p, q, k = (0.5, 0.5), (0.9, 0.1), 2
    promised = sum(b * (1 - (1 - min(a / b, 1)) ** k) for a, b in zip(p, q, strict=True))
    best = optimum(Levels((k,), Independent()), constant(*p), constant(*q), 2)
    assert promised == pytest.approx(0.8222, abs=1e-4)
    assert best == pytest.approx(0.69, abs=TOLERANCE)
    assert best < 0.82


def test_the_law_of_the_trees_is_the_drafts() -> None:
    """Two draws of the same token are one node, so the trees of two siblings are three."""
    trees = tree_law(Levels((2,), Independent()), constant(0.9, 0.1))
    expected = {frozenset({(), (0,)}): 0.81, frozenset({(), (1,)}): 0.01, frozenset({(), (0,), (1,)}): 0.18}
    assert trees.keys() == expected.keys()
    assert all(math.isclose(trees[tree], chance, abs_tol=1e-12) for tree, chance in expected.items())
