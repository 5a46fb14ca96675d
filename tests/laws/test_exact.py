"""Criterion (1) to 1e-12 for every law and every draw, through the shipped growers and verifiers."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from draftwood.growers import (
    Beam,
    BestFirst,
    Hybrid,
    Independent,
    Levels,
    StaticShape,
    WithoutReplacement,
    chain,
)
from draftwood.protocols import Budget, Grower
from draftwood.tree import Draw, TokenTree
from draftwood.verifiers import LAWS, Block, Match, Walk
from enumeration import (
    Enumerator,
    Rows,
    TableModel,
    aligned_rows,
    assert_lossless,
    constant,
    dirichlet,
    emitted,
    law_error,
    law_of,
    random_rows,
    round_law,
    target_rows,
    view_of,
)

SEEDS = 30


TREES: dict[str, tuple[Grower, int]] = {  # name -> (grower, vocabulary)
    "chain": (chain(2), 3),
    "sampled-chain": (Levels((1, 1), Independent()), 3),
    "sampled-chain-of-three": (Levels((1, 1, 1), Independent()), 2),
    "without-replacement-chain": (Levels((1, 1), WithoutReplacement()), 3),
    "iid": (Levels((2, 1), Independent()), 2),
    "iid-of-three": (Levels((3,), Independent()), 3),
    "without-replacement": (Levels((2, 1), WithoutReplacement()), 3),
    "without-replacement-beyond-support": (Levels((3, 1), WithoutReplacement()), 2),
    "hybrid": (Levels((2, 1), Hybrid()), 3),
    "hybrid-wide": (Levels((3,), Hybrid()), 4),
    "static": (StaticShape(((0,), (1,), (0, 0), (0, 1), (0, 0, 0))), 3),
    "beam": (Beam(nodes=4, width=2, depth=2), 3),
    "best-first": (BestFirst(nodes=4, width=1, forwards=3), 3),
}
CHAINS = ("chain", "sampled-chain", "sampled-chain-of-three", "without-replacement-chain")
PAIRS = [(tree, law) for tree in TREES for law in LAWS if law != "block" or tree in CHAINS]


def num_seeds(tree: str) -> int:
    """Trees with many outcomes get fewer seeds; every pair still sees several of each kind."""
    few = {"without-replacement": 4, "hybrid": 6, "iid": 12, "sampled-chain-of-three": 12, "iid-of-three": 6}
    return few.get(tree, 10 if "beyond" in tree else SEEDS)


@pytest.mark.parametrize(("tree", "law"), PAIRS)
def test_random_rows(tree: str, law: str) -> None:
    grower, vocabulary = TREES[tree]
    for seed in range(num_seeds(tree)):
        p = random_rows(seed, vocabulary, (0.3, 1.0)[seed % 2])
        q = aligned_rows(p, seed, vocabulary, 0.7) if seed % 3 == 0 else random_rows(seed + 500, vocabulary)
        assert_lossless(round_law(grower, LAWS[law](), p, q), p, vocabulary)


def adversarial(vocabulary: int) -> dict[str, tuple[Rows, Rows]]:
    mixed = random_rows(3, vocabulary)
    first, last = [0.0] * vocabulary, [0.0] * vocabulary
    first[0], last[-1] = 1.0, 1.0
    half = [1.0] * (vocabulary // 2) + [0.0] * (vocabulary - vocabulary // 2)
    rest = [1 - x for x in half]
    return {
        "zeros in p": (constant(*half), mixed),
        "zeros in q": (mixed, constant(*rest)),
        "p equals q": (mixed, mixed),
        "disjoint": (constant(*half), constant(*rest)),
        "one-hot p": (constant(*last), mixed),
        "one-hot q": (mixed, constant(*first)),
        "both one-hot, equal": (constant(*first), constant(*first)),
        "both one-hot, different": (constant(*first), constant(*last)),
        "ties": (constant(*[1.0] * vocabulary), constant(*[1.0] * vocabulary)),
    }


@pytest.mark.parametrize(("tree", "law"), PAIRS)
def test_adversarial_rows(tree: str, law: str) -> None:
    grower, vocabulary = TREES[tree]
    for name, (p, q) in adversarial(vocabulary).items():
        h = round_law(grower, LAWS[law](), p, q)
        assert_lossless(h, p, vocabulary)
        if name == "p equals q" and law != "match" and tree in CHAINS[1:]:
            depth = max(len(s) for s in h) - 1
            accepted = sum(weight * (len(s) - 1) for s, weight in h.items())
            assert accepted == pytest.approx(depth, abs=1e-12), "a perfect draft is accepted whole"


@pytest.mark.parametrize("law", LAWS)
def test_no_guesses_at_all(law: str) -> None:
    p = random_rows(1, 3)
    tree = TokenTree.roots(torch.tensor([0]))
    h = law_of(lambda rng: emitted(tree, LAWS[law]().verify(tree, target_rows(tree, p), view_of(), rng)))
    assert_lossless(h, p, 3)


def test_any_mixture_of_draws_under_one_parent_is_exact_for_walk() -> None:
    """A point mass, an independent draw and a tail draw as siblings: each row is its law given the earlier ones."""
    for seed in range(SEEDS):
        p, rng = random_rows(seed, 4), random.Random(seed)
        laws = torch.tensor([dirichlet(rng, 4, 1.0), dirichlet(rng, 4, 1.0)], dtype=torch.float64)
        laws[1, 2] = 0
        laws[1] /= laws[1].sum()

        def run(source: Enumerator, p: Rows = p, laws: torch.Tensor = laws) -> tuple[int, ...]:
            drawn = source.pick(laws, torch.tensor([1, 2]))
            tree = TokenTree(
                tokens=torch.tensor([0, int(drawn[1]), 2, int(drawn[0])]),
                parents=torch.tensor([-1, 0, 0, 0]),
                offsets=torch.tensor([0, 4]),
                draw=torch.tensor([Draw.POINT, Draw.TAIL, Draw.POINT, Draw.IID]),
                q_row=torch.tensor([-1, 1, -1, 0]),
                q=laws,
            )
            return emitted(tree, Walk().verify(tree, target_rows(tree, p), view_of(), source))

        assert_lossless(law_of(run), p, 4)


def test_the_example_of_the_block_verification_paper() -> None:
    """p = (1/3, 2/3), q = (2/3, 1/3) at every position, two tokens: token by token 10/9, as a block 11/9 accepted."""
    p, q = constant(1, 2), constant(2, 1)
    grower = Levels((1, 1), Independent())
    accepted = {
        law.name: sum(w * (len(s) - 1) for s, w in round_law(grower, law, p, q).items()) for law in (Walk(), Block())
    }
    assert accepted["walk"] == pytest.approx(10 / 9, abs=1e-12)
    assert accepted["block"] == pytest.approx(11 / 9, abs=1e-12)


@pytest.mark.parametrize("seed", range(10))
def test_block_accepts_at_least_what_walk_accepts(seed: int) -> None:
    p, q = random_rows(seed, 3), random_rows(seed + 77, 3)
    grower = Levels((1, 1), Independent())
    walk, block = (sum(w * len(s) for s, w in round_law(grower, law, p, q).items()) for law in (Walk(), Block()))
    assert block >= walk - 1e-12


@pytest.mark.parametrize("tree", ["chain", "static", "beam", "best-first"])
def test_on_chosen_trees_every_law_accepts_the_target_mass_in_the_tree(tree: str) -> None:
    """For a deterministic tree no lossless law beats the sum of p over its nodes, and all of ours reach it."""
    grower, vocabulary = TREES[tree]
    for seed in range(5):
        p, q = random_rows(seed, vocabulary), random_rows(seed + 9, vocabulary)
        laws = [Match(), Walk()] + ([Block()] if tree == "chain" else [])
        lengths = [sum(w * len(s) for s, w in round_law(grower, law, p, q).items()) for law in laws]
        assert lengths == pytest.approx([lengths[0]] * len(laws), abs=1e-12)


def test_an_edit_that_looked_at_drawn_tokens_is_exact_once_it_forgets_the_draws() -> None:
    """Drop every drawn token that the draft itself thought unlikely: biased with q kept, exact as point masses."""
    p, q = random_rows(4, 3), random_rows(5, 3)
    grower = Levels((2,), WithoutReplacement())
    errors = {}
    for judged in (True, False):

        def run(rng: Enumerator, judged: bool = judged) -> tuple[int, ...]:
            tree, _ = grower.grow(TableModel(q), view_of(), Budget(9), rng).build()
            likely = torch.tensor([1.0, *(q(())[t] for t in tree.tokens[1:].tolist())]) > 0.3
            tree = tree.select(likely, judged=judged)
            return emitted(tree, Walk().verify(tree, target_rows(tree, p), view_of(), rng))

        errors[judged] = law_error(law_of(run), p, 3)
    assert errors[True] <= 1e-12
    assert errors[False] > 1e-3


def test_every_string_of_a_chain_is_reachable() -> None:
    """The enumerator itself: as many outcomes as there are, and their weights sum to one."""
    h = round_law(chain(1), Match(), random_rows(0, 3), random_rows(1, 3))
    best = max(range(3), key=lambda t: random_rows(1, 3)(())[t])
    assert set(h) == {(t,) for t in range(3) if t != best} | set(itertools.product([best], range(3)))
    assert sum(h.values()) == pytest.approx(1, abs=1e-12)
