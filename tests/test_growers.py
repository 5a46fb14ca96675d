"""Shapes that a person can check: what grows from a table of draft probabilities, and within which limits."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.growers import (
    Beam,
    Best,
    BestFirst,
    Coupled,
    Hybrid,
    Independent,
    Levels,
    Paths,
    StaticShape,
    WithoutReplacement,
    chain,
)
from draftwood.growers.levels import MAX_NODES
from draftwood.growers.pickers import Frontier
from draftwood.nets.parts import DraftHead
from draftwood.protocols import Budget
from draftwood.rng import KeyedRng, Purpose, derive
from draftwood.tree import Draw, TokenTree
from enumeration import Enumerator, TableModel, law_of, view_of

ROWS = {(): (0.6, 0.3, 0.1), (0,): (0.2, 0.7, 0.1), (1,): (0.1, 0.1, 0.8), (0, 1): (0.5, 0.4, 0.1)}


def draft(prefix: tuple[int, ...]) -> tuple[float, ...]:
    return ROWS.get(prefix, (0.5, 0.3, 0.2))


def grown(grower, nodes: int = 100, depth: int = 100, temperature: float = 1.0, budget: int = 100, seed: int = 7):
    view = replace(view_of(temperature, nodes, depth, root=2), seeds=torch.tensor([seed]))
    tree, _ = grower.grow(TableModel(draft), view, Budget(budget), KeyedRng()).build()
    tree.validate()
    return tree


def paths(tree) -> set[tuple[int, ...]]:
    every = [tuple(tree.tokens[[n for n in path if n >= 0]].tolist()[1:]) for path in tree.paths.tolist()]
    return {path for path in every if path}


def test_chain() -> None:
    assert paths(grown(chain(3))) == {(0,), (0, 1), (0, 1, 0)}


class Fluent(TableModel):
    """One that guesses on by itself, or says that it cannot."""

    answers: list[int] | None = None

    def chain(self, view, depth: int):  # type: ignore[no-untyped-def]
        return None if self.answers is None else torch.tensor([self.answers[:depth]])


@pytest.mark.parametrize(("nodes", "depth", "budget"), [(100, 100, 100), (2, 100, 100), (100, 2, 100), (100, 100, 2)])
def test_a_model_that_guesses_on_by_itself_is_asked_once_and_within_limits(nodes: int, depth: int, budget: int) -> None:
    fluent = Fluent(draft)
    view = view_of(1.0, nodes, depth, root=2)
    stepwise, _ = chain(3).grow(fluent, view, Budget(budget), KeyedRng()).build()
    fluent.answers = [0, 1, 0]
    at_once, _ = chain(3).grow(fluent, view, Budget(budget), KeyedRng()).build()
    at_once.validate()
    assert paths(at_once) == paths(stepwise)
    assert len(paths(at_once)) == min(3, nodes, depth, budget)
    drawn, _ = Levels((1, 1), Independent()).grow(fluent, view, Budget(budget), KeyedRng()).build()
    assert drawn.q is not None, "who draws has to see every law"


def test_levels_of_the_likeliest() -> None:
    assert paths(grown(Levels((2, 1), Best()))) == {(0,), (1,), (0, 1), (1, 2)}


def test_the_likeliest_of_few_are_the_likeliest_of_all() -> None:
    """A reduced draft vocabulary is looked through as it is; only whoever wants more than it has sees the others."""
    head = DraftHead(torch.zeros(3, 1), torch.tensor([1, 3, 4]), 6, own=False)
    logits = torch.tensor([[[0.5, 2.0, 2.0], [-1.0, -3.0, -2.0]]])
    columns = torch.zeros(1, 2, dtype=torch.int64)
    narrow = Frontier(columns, columns, logits, view_of(1.0, 9, 9, root=2), KeyedRng(), head)
    wide = replace(narrow, logits=head.spread(logits), among=None)
    assert narrow.best(1).tolist() == wide.best(1).tolist() == [[[3], [1]]]
    assert narrow.best(2).tolist() == [[[3, 4], [1, 4]]]
    assert [sorted(row) for row in narrow.best(9)[0].tolist()] == [list(range(6))] * 2
    assert torch.equal(narrow.q, wide.q)


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
    Levels((1, 1, 1), Coupled()),
    Levels((2, 2), Coupled()),
    Paths(1, 3),
    Paths(2, 2),
    Paths(3, 2),
    Paths(2, 2, trunk=1),
    Paths(3, 1, trunk=2),
]


@settings(deadline=None, max_examples=120)
@given(st.sampled_from(EVERY), st.integers(0, 9), st.integers(0, 4), st.integers(0, 9), st.integers(0, 50))
def test_limits_are_kept(grower, nodes: int, depth: int, budget: int, seed: int) -> None:
    tree = grown(grower, nodes, depth, budget=budget, seed=seed)
    assert tree.num_nodes - 1 <= min(nodes, budget, grower.max_nodes)
    assert tree.max_depth <= depth


@pytest.mark.parametrize("grower", EVERY)
def test_the_promised_law_is_kept(grower) -> None:
    for tree in (grown(grower, seed=seed) for seed in range(8)):
        assert {Draw(d) for d in tree.draw[1:].tolist()} <= grower.law.draws
        assert not grower.law.chain or tree.tries.shape[1] == 1
        assert tree.num_nodes - 1 <= grower.max_nodes
        assert tree.drawn is None or grower.law.paths, "only paths are merged"


# --- independent paths


PATHS = [Paths(1, 3), Paths(2, 2), Paths(3, 3), Paths(4, 2), Paths(2, 2, trunk=1), Paths(3, 2, trunk=2)]
SEEDS = range(10)


def children_of(tree: TokenTree, node: int) -> list[int]:
    return [child for child in tree.tries[node].tolist() if child >= 0]


@pytest.mark.parametrize("grower", PATHS)
def test_paths_that_agree_share_their_nodes(grower: Paths) -> None:
    """As many draws behind a node as paths come through it, and one node for each token drawn behind it."""
    merged = 0
    for seed in SEEDS:
        tree = grown(grower, seed=seed)
        for node in range(tree.num_nodes):
            children = children_of(tree, node)
            tokens = [int(tree.tokens[child]) for child in dict.fromkeys(children)]
            assert len(tokens) == len(set(tokens)), "two nodes for the same text"
            depth = int(tree.depth[node])
            if depth == grower.trunk + grower.depth:
                assert children == []
            elif depth < grower.trunk:
                assert len(children) == 1
            elif depth == grower.trunk:
                assert len(children) == grower.paths, "here all paths begin"
            else:
                arrivals = children_of(tree, int(tree.parents[node])).count(node)
                assert len(children) == arrivals
            merged += len(children) - len(tokens)
        for level in tree.levels[grower.trunk + 1 :]:
            assert sum(children_of(tree, int(tree.parents[n])).count(int(n)) for n in level) == grower.paths
    assert (merged > 0) == (grower.paths > 1)


def test_one_path_is_a_chain() -> None:
    assert Paths(1, 3).law.chain
    assert not Paths(2, 3).law.chain
    assert Paths(2, 3).law.paths
    for seed in SEEDS:
        tree = grown(Paths(1, 2, trunk=1), seed=seed)
        assert tree.parents.tolist() == [-1, 0, 1, 2]
        assert tree.tries.tolist() == [[1], [2], [3], [-1]]


def test_at_temperature_zero_all_paths_agree() -> None:
    tree = grown(Paths(3, 2), temperature=0.0)
    assert paths(tree) == {(0,), (0, 1)}
    assert tree.tries.tolist() == [[1, 1, 1], [2, 2, 2], [-1, -1, -1]]


def drawn_texts(tree: TokenTree) -> tuple[tuple[int, ...], ...]:
    """The text of every draw, level by level: a node as often as it was drawn."""
    drawn = range(tree.num_nodes) if tree.drawn is None else tree.drawn.tolist()
    whole = [tuple(tree.tokens[[n for n in path if n >= 0]].tolist()[1:]) for path in tree.paths.tolist()]
    return tuple(sorted((whole[node] for node in drawn if whole[node]), key=lambda text: (len(text), text)))


@pytest.mark.parametrize("grower", [Paths(2, 2), Paths(3, 1), Paths(2, 1, trunk=1)])
def test_the_draws_are_those_of_independent_paths(grower: Paths) -> None:
    """The law of what is drawn, repeats counted, is that of whole paths drawn one after the other."""

    def run(rng: Enumerator):
        return drawn_texts(grower.grow(TableModel(draft), view_of(root=2), Budget(100), rng).build()[0])

    def texts(length: int, prefix: tuple[int, ...] = ()) -> dict[tuple[int, ...], float]:
        found = {prefix: 1.0}
        for _ in range(length):
            found = {(*v, t): c * draft(v)[t] for v, c in found.items() for t in range(3)}
        return found

    want: Counter[tuple[tuple[int, ...], ...]] = Counter()
    for trunk, chance in texts(grower.trunk).items():
        ways = texts(grower.depth, trunk)
        for chosen in itertools.product(ways, repeat=grower.paths):
            shared = [trunk[: i + 1] for i in range(grower.trunk)]
            parts = [path[:n] for path in chosen for n in range(grower.trunk + 1, len(path) + 1)]
            key = tuple(sorted(shared + parts, key=lambda text: (len(text), text)))
            want[key] += chance * math.prod(ways[path] for path in chosen)
    got = law_of(run)
    assert set(got) == set(want)
    assert max(abs(got[key] - want[key]) for key in want) <= 1e-12


@pytest.mark.parametrize("grower", PATHS)
def test_how_deep_paths_go_depends_on_their_room_alone(grower: Paths) -> None:
    """A level is grown whole or not at all, where there is room for it even if no two draws of the tree agree.

    Where agreement made room for one more level, that level's law would depend on who agreed, and `gbv` be biased.
    """
    sizes = list(itertools.accumulate([1] * grower.trunk + [grower.paths] * grower.depth))
    for seed, room in itertools.product(SEEDS, range(grower.max_nodes + 1)):
        whole = grown(grower, seed=seed)
        tree = grown(grower, seed=seed, **{("nodes", "budget")[room % 2]: room})
        assert tree.max_depth == sum(size <= room for size in sizes)
        assert drawn_texts(tree) == tuple(text for text in drawn_texts(whole) if len(text) <= tree.max_depth)


@pytest.mark.parametrize("grower", EVERY)
def test_trees_of_a_batch_grow_as_they_would_alone(grower) -> None:
    """Every sequence has room of its own: whoever has none left stops, and the others do not notice."""
    rooms, depths = torch.tensor([9, 0, 3, 4, 9, 5, 9, 2]), torch.tensor([9, 9, 9, 9, 0, 2, 1, 9])
    view = replace(view_of(root=2, sequences=8), max_nodes=rooms, max_depth=depths)
    batch, _ = grower.grow(TableModel(draft), view, Budget(7), KeyedRng()).build()
    batch.validate()
    for b in range(8):
        alone, _ = grower.grow(TableModel(draft), view.take([b]), Budget(7), KeyedRng()).build()
        part, _ = batch.take(torch.tensor([b]))
        assert part.tokens.tolist() == alone.tokens.tolist()
        assert part.parents.tolist() == alone.parents.tolist()
        for node in range(part.num_nodes):
            assert children_of(part, node) == children_of(alone, node)


# --- shared noise


def test_coupled_guesses_are_what_the_target_would_draw_if_it_were_the_draft() -> None:
    for seed in range(20):
        tree = grown(Levels((1, 1, 1), Coupled()), seed=seed)
        text: tuple[int, ...] = ()
        for position in range(1, 4):  # one token is committed
            key = derive(torch.tensor([seed]), Purpose.TARGET, torch.tensor([position]))
            row = torch.tensor([draft(text)], dtype=torch.float64)
            text = (*text, int(KeyedRng().race(row, key)))
        assert tree.tokens.tolist()[1:] == list(text)
        assert tree.q is None


def test_coupled_siblings_are_the_first_of_one_race() -> None:
    for seed in range(20):
        key = derive(torch.tensor([seed]), Purpose.TARGET, torch.tensor([1]))
        row = torch.tensor([draft(())], dtype=torch.float64)
        places = KeyedRng().race(row, key, winners=3)[0].tolist()
        for width in (1, 2, 3, 5):
            assert grown(Levels((width,), Coupled()), seed=seed).tokens.tolist()[1:] == places[:width]


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
        lambda: Paths(0, 1),
        lambda: Paths(1, 0),
        lambda: Paths(1, 1, -1),
        lambda: Paths(64, 33),
        lambda: Paths(1, 1, MAX_NODES),
    ],
)
def test_impossible_shapes_are_refused(make) -> None:
    with pytest.raises(ValueError, match=r"tree|shape|node|path"):
        make()
