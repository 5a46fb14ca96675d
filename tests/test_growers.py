"""Shapes that a person can check: what grows from a table of draft probabilities, and within which limits."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftwood.drafting import Front, Grower, Proposal, State
from draftwood.growers import (
    Beam,
    Best,
    BestFirst,
    Coupled,
    Greedy,
    Hybrid,
    Independent,
    Levels,
    Paths,
    StaticShape,
    WithoutReplacement,
    chain,
    sequoia,
)
from draftwood.growers.fixed import MAX_NODES
from draftwood.growers.pickers import Frontier
from draftwood.nets.parts import DraftHead
from draftwood.protocols import BatchView
from draftwood.rng import KeyedRng, Purpose, derive
from draftwood.tree import Draw, TokenTree
from enumeration import Enumerator, TableModel, law_of, view_of
from no_sync import no_looking

ROWS = {(): (0.6, 0.3, 0.1), (0,): (0.2, 0.7, 0.1), (1,): (0.1, 0.1, 0.8), (0, 1): (0.5, 0.4, 0.1)}


def draft(prefix: tuple[int, ...]) -> tuple[float, ...]:
    return ROWS.get(prefix, (0.5, 0.3, 0.2))


def size_within(grower: Grower, budget: int) -> int:
    """The largest tree that a step with so many nodes can have."""
    return max(size for size in grower.sizes if size <= budget)


def proposed(grower: Grower, view: BatchView, budget: int = 100, rng=None, model=None) -> TokenTree:  # type: ignore[no-untyped-def]
    proposal = grower.grow(model or TableModel(draft), view, size_within(grower, budget), rng or KeyedRng())
    proposal.tree.validate()
    assert proposal.tree.sizes.tolist() == [1 + size_within(grower, budget)] * view.size
    tree = proposal.packed().tree
    tree.validate()
    return tree


def grown(
    grower: Grower, nodes: int = 100, depth: int = 100, temperature: float = 1.0, budget: int = 100, seed: int = 7
) -> TokenTree:
    view = replace(view_of(temperature, nodes, depth, root=2), seeds=torch.tensor([seed]))
    return proposed(grower, view, budget)


def deepest(tree: TokenTree) -> int:
    return int(tree.depth.max())


def paths(tree) -> set[tuple[int, ...]]:
    every = [tuple(tree.tokens[[n for n in path if n >= 0]].tolist()[1:]) for path in tree.paths.tolist()]
    return {path for path in every if path}


def test_chain() -> None:
    assert paths(grown(chain(3))) == {(0,), (0, 1), (0, 1, 0)}


@pytest.mark.parametrize(("nodes", "depth", "budget"), [(100, 100, 100), (2, 100, 100), (100, 2, 100), (100, 100, 2)])
def test_a_chain_keeps_within_limits(nodes: int, depth: int, budget: int) -> None:
    assert len(paths(grown(chain(3), nodes, depth, budget=budget))) == min(3, nodes, depth, budget)
    assert grown(Levels((1, 1), Independent()), nodes, depth, budget=budget).q is not None, "laws are told with draws"


def test_levels_of_the_likeliest() -> None:
    assert paths(grown(Levels((2, 1), Best()))) == {(0,), (1,), (0, 1), (1, 2)}


def test_the_likeliest_of_few_are_the_likeliest_of_all() -> None:
    """A reduced draft vocabulary is looked through as it is; others are only seen where more is wanted than it has."""
    head = DraftHead(torch.zeros(3, 1), torch.tensor([1, 3, 4]), 6, own=False)
    logits = torch.tensor([[[0.5, 2.0, 2.0], [-1.0, -3.0, -2.0]]])
    columns = torch.zeros(1, 2, dtype=torch.int64)
    narrow = Frontier(columns, columns, logits, view_of(1.0, 9, 9, root=2), KeyedRng(), head)
    wide = replace(narrow, logits=head.spread(logits), vocabulary=None)
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
    Greedy(6, 3),
    sequoia(6, 3, (50, 20, 10)),
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
    assert deepest(tree) <= depth


@pytest.mark.parametrize("grower", EVERY)
def test_the_promised_law_is_kept(grower) -> None:
    for tree in (grown(grower, seed=seed) for seed in range(8)):
        assert {Draw(d) for d in tree.draw[1:].tolist()} <= grower.law.draws
        assert not grower.law.chain or tree.tries.shape[1] == 1
        assert tree.num_nodes - 1 <= grower.max_nodes
        assert not tree.shape.repeats or grower.law.paths, "only paths are merged"


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
        for level in tree.shape.levels[grower.trunk + 1 :]:
            assert sum(children_of(tree, int(tree.parents[n])).count(int(n)) for n in level) == grower.paths
    assert (merged > 0) == (grower.paths > 1)


# --- the best shape, and trees that grow where the next draw is likeliest


def shapes(nodes: int, depth: int, ranks: int) -> set[tuple[tuple[int, ...], ...]]:
    """Every tree of so many nodes whose siblings have no gaps."""
    found: set[tuple[tuple[int, ...], ...]] = {()}
    for _ in range(nodes):
        grown_by_one = set()
        for shape in found:
            for parent in ((), *shape):
                rank = sum(node[:-1] == parent for node in shape)
                if len(parent) < depth and rank < ranks:
                    grown_by_one.add(tuple(sorted((*shape, (*parent, rank)))))
        found = grown_by_one
    return found


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("rates", [(50, 20, 10), (30, 29, 28), (90, 5), (60,)])
def test_sequoias_shape_gains_most_of_all(rates: tuple[int, ...], depth: int) -> None:
    def gain(shape) -> float:  # type: ignore[no-untyped-def]
        return sum(math.prod(rates[rank] / 100 for rank in node) for node in shape)

    for nodes in (1, 2, 4, 6):
        every = shapes(nodes, depth, len(rates))
        if not every:
            with pytest.raises(ValueError, match="no tree"):
                sequoia(nodes, depth, rates)
            continue
        made = sequoia(nodes, depth, rates)
        assert tuple(sorted(made.nodes)) in every
        assert gain(made.nodes) == pytest.approx(max(map(gain, every)))


def test_sequoias_shape_is_found_quickly_for_large_trees() -> None:
    made = sequoia(256, 12, (60, 15, 8, 4))
    assert made.max_nodes == 256
    assert made.nodes[0] == (0,)
    for wrong in ((0, 3, (50,)), (4, 0, (50,)), (4, 3, ()), (4, 3, (60, 50)), (4, 3, (50, 0))):
        with pytest.raises(ValueError, match=r"rates|a tree has"):
            sequoia(*wrong)


def chances_of_places(tree: TokenTree) -> Iterator[tuple[float, float]]:
    """Written out, for each node: the chance of the place where it was drawn, and of the likeliest place of all."""
    whole = [tuple(tree.tokens[[n for n in path if n >= 0]].tolist()[1:]) for path in tree.paths.tolist()]
    left, chances = {(): dict(enumerate(draft(())))}, {(): 1.0}
    for path in whole[1:]:
        place = path[:-1]
        yield chances[place], max(chances.values())
        total = sum(left[place].values())
        share = left[place].pop(path[-1]) / total
        chances[path], left[path] = chances[place] * share, dict(enumerate(draft(path)))
        chances[place] = chances[place] * (1 - share) if left[place] else 0.0


def test_a_greedy_tree_is_drawn_at_the_likeliest_place_of_all() -> None:
    for seed in range(30):
        for own, best in chances_of_places(grown(Greedy(6, 6), seed=seed)):
            assert own == pytest.approx(best)


def test_a_greedy_tree_draws_nothing_that_pays_for_no_row() -> None:
    view = replace(view_of(root=2), min_accept_prob=0.5)
    for seed in SEEDS:
        some = proposed(Greedy(8, 4), replace(view, seeds=torch.tensor([seed])))
        assert 1 < some.num_nodes < 9
        assert min(own for own, _ in chances_of_places(some)) >= 0.5


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
    whole = [tuple(tree.tokens[[n for n in path if n >= 0]].tolist()[1:]) for path in tree.paths.tolist()]
    drawn = tree.tries[tree.tries >= 0].tolist()
    return tuple(sorted((whole[node] for node in drawn), key=lambda text: (len(text), text)))


@pytest.mark.parametrize("grower", [Paths(2, 2), Paths(3, 1), Paths(2, 1, trunk=1)])
def test_the_draws_are_those_of_independent_paths(grower: Paths) -> None:
    """The law of what is drawn, repeats counted, is that of whole paths drawn one after the other."""

    def run(rng: Enumerator):
        return drawn_texts(proposed(grower, view_of(root=2), rng=rng))

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
        assert deepest(tree) == sum(size <= room for size in sizes)
        assert drawn_texts(tree) == tuple(text for text in drawn_texts(whole) if len(text) <= deepest(tree))


def view_of_eight() -> BatchView:
    """Sequences with different room."""
    rooms, depths = torch.tensor([9, 0, 3, 4, 9, 5, 9, 2]), torch.tensor([9, 9, 9, 9, 0, 2, 1, 9])
    return replace(view_of(root=2, sequences=8), max_nodes=rooms, max_depth=depths)


@pytest.mark.parametrize("grower", EVERY)
def test_trees_of_a_batch_grow_as_they_would_alone(grower) -> None:
    """Every sequence has room of its own: one that has none left stops, and the others do not notice."""
    view = view_of_eight()
    batch = proposed(grower, view, 7)
    for b in range(8):
        alone = proposed(grower, view.take(torch.tensor([b])), 7)
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


# --- without a look at values


class Network:
    """One that looks at nothing: logits by the way to a node, from a table with a row for every short one."""

    def __init__(self, vocabulary: int = 5, rows: int = 46656) -> None:
        self.logits = 2 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(vocabulary))
        self.fronts = list[Front]()

    def row(self, row: Tensor | int, token: Tensor | int):  # type: ignore[no-untyped-def]
        """That of a node, from the one above it."""
        return (row * (1 + self.logits.shape[1]) + 1 + token) % len(self.logits)

    def begin(self, view: BatchView) -> tuple[Tensor, State]:
        self.fronts.clear()
        return self.logits[:1].expand(view.size, 1, -1), ()

    def extend(self, view: BatchView, front: Front, state: State) -> tuple[Tensor, State]:
        self.fronts.append(front)
        row = torch.zeros_like(front.depth)
        for step, token in enumerate(front.path.unbind(-1)):
            row = torch.where(step < front.depth, self.row(row, token), row)
        return self.logits[row], ()

    def vocabulary(self, level: int | None) -> None:
        return None


RANKED = [
    Beam(nodes=12, width=3, depth=4),
    Beam(nodes=90, width=4, depth=5),
    Beam(nodes=30, width=9, depth=2),
    BestFirst(nodes=12, width=3, forwards=4),
    BestFirst(nodes=40, width=2, forwards=6),
    BestFirst(nodes=9, width=20, forwards=5),
    BestFirst(nodes=20, width=4, forwards=6).within_depth(3),
    BestFirst(nodes=20, width=4, forwards=6).within_depth(1),
]
LIMITS = [{}, {"max_nodes": [9, 0, 3, 4, 9, 5, 9, 2], "max_depth": [9, 9, 9, 9, 0, 2, 1, 9]}, {"min_accept_prob": 0.02}]


def limited_view(limits: dict) -> BatchView:
    limits = {name: torch.tensor(own) if isinstance(own, list) else own for name, own in limits.items()}
    view = replace(view_of(root=2, sequences=8), temperature=torch.linspace(0, 1.5, 8))
    return replace(view, **({"max_nodes": None, "max_depth": None} | limits))


def grown_blindly(grower: Grower, model: Network, view: BatchView, nodes: int) -> Proposal:
    """As a captured step grows it: what follows from sizes alone is known from an earlier run."""
    view = replace(view, may_look=False)
    with mock.patch("draftwood.links.LOOKED_AT", frozenset()):
        grower.grow(model, view, nodes, KeyedRng())
    with no_looking():
        return grower.grow(model, view, nodes, KeyedRng())


@pytest.mark.parametrize("limits", LIMITS, ids=["free", "limited", "pruned"])
@pytest.mark.parametrize("grower", [*EVERY, *RANKED])
def test_trees_are_the_same_without_a_look_at_values(grower: Grower, limits: dict) -> None:
    view, model = limited_view(limits), Network()
    for nodes in {grower.sizes[-1], grower.sizes[len(grower.sizes) // 2], grower.sizes[1]}:
        seen = grower.grow(model, view, nodes, KeyedRng())
        blind = grown_blindly(grower, model, view, nodes)
        for proposal in (seen, blind):
            proposal.tree.validate()
            assert proposal.tree.sizes.tolist() == [1 + nodes] * 8
            assert int(proposal.tree.shape.depth.max()) <= proposal.tree.max_depth <= grower.depth_of(nodes)
        seen, blind = seen.packed(), blind.packed()
        for name in ("tokens", "parents", "draw", "q", "offsets", "depth"):
            assert same(getattr(seen.tree, name), getattr(blind.tree, name)), name
        assert same(seen.tree.shape.ancestors, blind.tree.shape.ancestors)
        assert same(seen.survival, blind.survival)
        for node in range(seen.tree.num_nodes):
            assert children_of(seen.tree, node) == children_of(blind.tree, node)
        assert seen.columns is None or same(seen.columns, blind.columns)


def same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


@pytest.mark.parametrize("grower", [*EVERY, *RANKED])
def test_which_nodes_there_are_is_no_matter_of_draws(grower: Grower) -> None:
    """Absent are the same nodes whatever is drawn; but paths that agree are merged, which laws are told."""
    limits = LIMITS[1]
    view = replace(limited_view(limits), temperature=torch.ones(8))
    absent = set()
    for seed in range(6):
        seeds = view.seeds + 100 * seed
        tree = grower.grow(Network(), replace(view, seeds=seeds), grower.max_nodes, KeyedRng()).tree
        gone = tree.tokens < 0
        if grower.law.paths:  # how often nodes were drawn, level by level
            drawn = tree.tries[tree.tries >= 0]
            absent.add(tuple(torch.bincount(tree.owner[drawn] * 100 + tree.depth[drawn]).tolist()))
        else:
            absent.add(tuple(gone.tolist()))
    assert len(absent) == 1


@pytest.mark.parametrize("grower", RANKED, ids=str)
def test_a_network_keeps_every_node_it_was_asked_about_where_the_proposal_says(grower: Grower) -> None:
    """No two at the same place, none beyond the places that were announced, and each sees exactly its own way."""
    view, model = limited_view({}), Network()
    proposal = grower.grow(model, view, grower.max_nodes, KeyedRng())
    tree, columns = proposal.tree, proposal.columns_of(torch.arange(proposal.tree.num_nodes)[:, None])[:, 0]
    kept: dict[tuple[int, int], tuple[int, ...]] = {}
    for front in model.fronts:
        index, bits = front.places.index, front.places.ancestors
        assert bits is not None
        assert int(index.max()) < grower.staged(grower.max_nodes)
        assert int(index.max()) < (front.places.max_nodes or 0)
        assert int(front.depth.max()) <= (front.places.max_depth or 0)
        assert torch.equal(front.places.position, front.depth - 1)
        for b, row in itertools.product(range(8), range(index.shape[1])):
            own = bits.view(8, -1, bits.shape[1])[b, row].tolist()
            seen = [i for i in range(64 * len(own)) if own[i // 64] >> i % 64 & 1]
            way = tuple(front.path[b, row, : front.depth[b, row]].tolist())
            assert (b, int(index[b, row])) not in kept
            kept[b, int(index[b, row])] = way
            if (b, way) in {(int(tree.owner[n]), text_of(tree, n)) for n in range(tree.num_nodes)}:
                assert [kept[b, i] for i in sorted(seen)] == [way[: n + 1] for n in range(len(way))]
    for node in range(tree.num_nodes):
        column = int(columns[node])
        if column:
            assert kept[int(tree.owner[node]), column - 1] == text_of(tree, node)
    inner = set(tree.parents.tolist()) - {-1} - set(tree.offsets.tolist())
    assert all(int(columns[node]) for node in inner if int(tree.tokens[node]) >= 0)


def text_of(tree: TokenTree, node: int) -> tuple[int, ...]:
    return tuple(tree.tokens[[n for n in tree.paths[node].tolist() if n >= 0]].tolist()[1:])


def the_likeliest(model: Network, temperature: float, nodes: int, depth: int) -> set[tuple[int, ...]]:
    """The likeliest ways of all, one after the other."""
    found: set[tuple[int, ...]] = set()
    waiting: list[tuple[float, tuple[int, ...], int]] = [(0.0, (), 0)]
    while len(found) <= nodes and waiting:
        cost, way, row = heapq.heappop(waiting)
        found.add(way)
        if len(way) < depth:
            costs = (-torch.log_softmax(model.logits[row] / (temperature or 1), -1)).tolist()
            for token, more in enumerate(costs):
                heapq.heappush(waiting, (cost + more, (*way, token), int(model.row(row, token))))
    return found - {()}


@pytest.mark.parametrize(("nodes", "width"), [(1, 1), (6, 1), (12, 3), (25, 40)])
@pytest.mark.parametrize("within", [None, 1, 2, 3])
def test_best_first_finds_the_likeliest_of_all_within_reach(nodes: int, width: int, within: int | None) -> None:
    """Given enough forwards, whatever the width."""
    grower, model, view = BestFirst(nodes, width, nodes), Network(), limited_view({})
    grower = grower if within is None else grower.within_depth(within)
    tree = proposed(grower, view, model=model)
    for b in range(8):
        ways = {text_of(tree, node) for node in range(tree.num_nodes) if int(tree.owner[node]) == b} - {()}
        assert ways == the_likeliest(model, float(view.temperature[b]), nodes, within or nodes)


def test_a_large_tree_grows_best_first() -> None:
    grower, view = BestFirst(MAX_NODES, 64, 6), replace(view_of(root=2), max_nodes=None, max_depth=None)
    tree = proposed(grower, view, budget=MAX_NODES, model=Network(vocabulary=50))
    assert tree.num_nodes == 1 + MAX_NODES
    again = TokenTree.of_points([(tree.tokens.tolist(), tree.parents.tolist())])
    assert torch.equal(again.shape.ancestors, tree.shape.ancestors)


def test_room_that_a_ranked_tree_has_is_used() -> None:
    """A sequence that can only take two more tokens has the likeliest nodes of two levels, not fewer."""
    model, view = Network(), limited_view({"max_nodes": [12] * 8, "max_depth": [2] * 8})
    for grower in (Beam(nodes=12, width=5, depth=4), BestFirst(nodes=12, width=5, forwards=6)):
        tree = proposed(grower, view, model=model)
        for b in range(8):
            ways = {text_of(tree, node) for node in range(tree.num_nodes) if int(tree.owner[node]) == b} - {()}
            assert ways == the_likeliest(model, float(view.temperature[b]), 12, 2)


@pytest.mark.parametrize(
    "grower", [Levels((2, 2, 2), Best()), Beam(40, 4, 6), BestFirst(40, 4, 12), Paths(2, 4, trunk=1)]
)
def test_no_tree_is_deeper_than_a_network_guesses(grower: Grower) -> None:
    for most in (1, 2, 3, 9):
        within, model = grower.within_depth(most), Network()
        assert within.levels <= most
        assert within.depth_of(within.max_nodes) <= most
        tree = proposed(within, limited_view({}), model=model)
        assert deepest(tree) <= most
        assert all(int(front.depth.max()) < most for front in model.fronts)


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
