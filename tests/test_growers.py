"""Shapes that a person can check: what grows from a table of draft probabilities, and within which limits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.growers import (
    MAX_NODES,
    Beam,
    Best,
    BestFirst,
    Hybrid,
    Independent,
    Levels,
    StaticShape,
    WithoutReplacement,
    chain,
)
from draftwood.protocols import Budget
from draftwood.rng import KeyedRng
from draftwood.tree import Draw
from enumeration import TableModel, view_of

ROWS = {(): (0.6, 0.3, 0.1), (0,): (0.2, 0.7, 0.1), (1,): (0.1, 0.1, 0.8), (0, 1): (0.5, 0.4, 0.1)}


def draft(prefix: tuple[int, ...]) -> tuple[float, ...]:
    return ROWS.get(prefix, (0.5, 0.3, 0.2))


def grown(grower, nodes: int = 100, depth: int = 100, temperature: float = 1.0, budget: int = 100):
    view = view_of(temperature, nodes, depth, root=2)
    tree, _ = grower.grow(TableModel(draft), view, Budget(budget), KeyedRng()).build()
    tree.validate()
    return tree


def paths(tree) -> set[tuple[int, ...]]:
    every = [tuple(tree.tokens[[n for n in path if n >= 0]].tolist()[1:]) for path in tree.paths.tolist()]
    return {path for path in every if path}


def test_chain() -> None:
    assert paths(grown(chain(3))) == {(0,), (0, 1), (0, 1, 0)}


def test_levels_of_the_likeliest() -> None:
    assert paths(grown(Levels((2, 1), Best()))) == {(0,), (1,), (0, 1), (1, 2)}


def test_static_shape_by_rank() -> None:
    shape = StaticShape(((0,), (2,), (0, 0), (0, 1), (0, 0, 1)))
    assert paths(grown(shape)) == {(0,), (2,), (0, 1), (0, 0), (0, 1, 1)}
    assert not shape.law.chain
    assert StaticShape(((0,), (0, 0))).law.chain


def test_ranks_beyond_the_vocabulary_do_not_exist() -> None:
    assert paths(grown(StaticShape(((0,), (7,))))) == {(0,)}
    assert paths(grown(StaticShape(((0,), (7,), (7, 0), (0, 9))))) == {(0,)}


def best_possible(nodes: int, depth: int) -> float:
    """The sum of the likeliest paths of all, the slow way."""
    chances = {(): 1.0}
    level = [()]
    for _ in range(depth):
        level = [(*v, t) for v in level for t in range(3)]
        chances |= {v: chances[v[:-1]] * draft(v[:-1])[v[-1]] for v in level}
    return sum(sorted((c for v, c in chances.items() if v), reverse=True)[:nodes])


def mass(tree) -> float:
    return sum(math.prod(draft(v[:i])[v[i]] for i in range(len(v))) for v in paths(tree))


@pytest.mark.parametrize("grower", [Beam(nodes=5, width=3, depth=3), BestFirst(nodes=5, width=2, forwards=5)])
def test_the_likeliest_nodes_of_all_are_kept(grower) -> None:
    tree = grown(grower)
    assert tree.num_nodes == 6
    assert mass(tree) == pytest.approx(best_possible(5, 3), abs=1e-12)


def test_a_narrow_beam_forgets_what_it_did_not_expand() -> None:
    assert (1, 2) not in paths(grown(Beam(nodes=4, width=1, depth=3)))
    assert paths(grown(Beam(nodes=4, width=1, depth=3))) == {(0,), (0, 1), (0, 1, 0)}


def test_without_replacement_never_repeats_a_sibling() -> None:
    tree = grown(Levels((3, 3), WithoutReplacement()))
    assert len(paths(tree)) == 12
    assert set(tree.draw[1:].tolist()) == {Draw.WITHOUT_REPLACEMENT}
    assert tree.q is not None
    rows = tree.q[tree.q_row[1:]]
    assert torch.allclose(rows.sum(-1), torch.ones(12, dtype=torch.float64))


def test_an_exhausted_support_ends_the_siblings() -> None:
    assert paths(grown(Levels((3,), WithoutReplacement()), temperature=0.0)) == {(0,)}


def test_hybrid_tries_its_draw_first() -> None:
    tree = grown(Levels((3,), Hybrid()))
    assert tree.draw.tolist() == [Draw.POINT, Draw.TAIL, Draw.POINT, Draw.POINT]
    assert tree.tokens.tolist() == [2, 2, 0, 1], "the only token the two likeliest leave"
    assert paths(grown(Levels((2,), Hybrid()), temperature=0.0)) == {(0,)}, "at temperature 0 nothing is left to draw"


def test_independent_draws_may_repeat() -> None:
    tree = grown(Levels((4,), Independent()), temperature=0.0)
    assert tree.tokens.tolist() == [2, 0, 0, 0, 0]


EVERY = [
    chain(4),
    Levels((2, 2, 2), Best()),
    Levels((2, 2), Independent()),
    Levels((3, 2), WithoutReplacement()),
    Levels((3, 2), Hybrid()),
    StaticShape(((0,), (1,), (0, 0), (0, 1), (0, 0, 0))),
    Beam(nodes=6, width=2, depth=3),
    BestFirst(nodes=6, width=2, forwards=3),
]


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(EVERY), st.integers(0, 9), st.integers(0, 4), st.integers(0, 9))
def test_limits_are_kept(grower, nodes: int, depth: int, budget: int) -> None:
    tree = grown(grower, nodes, depth, budget=budget)
    assert tree.num_nodes - 1 <= min(nodes, budget, grower.max_nodes)
    assert tree.max_depth <= depth


@pytest.mark.parametrize("grower", EVERY)
def test_the_promised_law_is_kept(grower) -> None:
    tree = grown(grower)
    assert {Draw(d) for d in tree.draw[1:].tolist()} <= grower.law.draws
    assert not grower.law.chain or bool((tree.next_sibling < 0).all())
    assert tree.num_nodes - 1 <= grower.max_nodes


@pytest.mark.parametrize(
    "make",
    [
        lambda: Levels((), Best()),
        lambda: Levels((0,), Best()),
        lambda: Levels((2,) * 11, Best()),
        lambda: StaticShape(()),
        lambda: StaticShape(((0, 1),)),
        lambda: StaticShape(((0,), (0,))),
        lambda: StaticShape(((-1,),)),
        lambda: Beam(0, 1, 1),
        lambda: Beam(MAX_NODES + 1, 1, 1),
        lambda: BestFirst(1, 0, 1),
    ],
)
def test_impossible_shapes_are_refused(make) -> None:
    with pytest.raises(ValueError, match=r"tree|shape|node"):
        make()
