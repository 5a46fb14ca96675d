"""Packed trees, drawn small enough to check by eye."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.drafting import Proposal
from draftwood.shape import TreeShape
from draftwood.tree import Draw, TokenTree, Verdict
from draftwood.verifiers.block import distinct
from no_sync import no_looking
from trees import gained, pruned, tree_of
from trees import padded as with_absent

#   tree 0:  t ── a ── c         tree 1:  u        tree 2:  w ── x ── y ── z
#            └── b  └── d
TREES = [([9, 1, 2, 3, 4], [-1, 0, 0, 1, 1]), ([8], [-1]), ([7, 5, 6, 5], [-1, 0, 1, 2])]


def found(tree: TokenTree) -> TokenTree:
    """The same, everything about its shape found by looking at parents alone."""
    return replace(tree, shape=TreeShape.of(tree.parents, tree.offsets))


@pytest.fixture
def tree() -> TokenTree:
    made = TokenTree.of_points(TREES)
    made.validate()
    return made


def test_shape(tree: TokenTree) -> None:
    assert tree.num_trees == 3
    assert tree.num_nodes == 10
    assert tree.sizes.tolist() == [5, 1, 4]
    assert tree.owner.tolist() == [0] * 5 + [1] + [2] * 4
    assert tree.local.tolist() == [0, 1, 2, 3, 4, 0, 0, 1, 2, 3]
    assert tree.depth.tolist() == [0, 1, 1, 2, 2, 0, 0, 1, 2, 3]
    assert tree.max_depth == 3


def test_paths_run_from_the_root(tree: TokenTree) -> None:
    assert tree.paths[4].tolist() == [0, 1, 4, -1]
    assert tree.paths[9].tolist() == [6, 7, 8, 9]


def test_siblings_in_order(tree: TokenTree) -> None:
    nothing = [-1, -1]
    wanted = [[1, 2], [3, 4], nothing, nothing, nothing, nothing, [7, -1], [8, -1], [9, -1], nothing]
    assert tree.tries.tolist() == wanted
    assert found(tree).tries.tolist() == wanted, "what the host knew is what the device finds"


def test_levels_hold_the_nodes_of_each_depth(tree: TokenTree) -> None:
    assert [nodes.tolist() for nodes in tree.levels] == [[0, 5, 6], [1, 2, 7], [3, 4, 8], [9]]


def test_ancestors_are_bits_over_draft_nodes(tree: TokenTree) -> None:
    assert tree.shape.ancestors[:, 0].tolist() == [0, 0b1, 0b10, 0b101, 0b1001, 0, 0, 0b1, 0b11, 0b111]


def test_large_trees_use_more_words() -> None:
    chain = TokenTree.of_points([([0] * 131, [-1, *range(130)])])
    words = chain.shape.ancestors
    assert words.shape == (131, 3)
    assert words[130].tolist() == [-1, -1, 0b11]
    assert words[64].tolist() == [-1, 0, 0]


def test_two_thousand_nodes() -> None:
    nodes = 2048
    tree = TokenTree.of_points([([0] * (nodes + 1), [-1, *[i // 2 for i in range(nodes)]])])
    tree.validate()
    assert tree.shape.ancestors.shape == (nodes + 1, 32)
    assert int(tree.depth.max()) == 11


def test_roots_are_a_batch_of_single_nodes() -> None:
    roots = TokenTree.roots(torch.tensor([4, 5]))
    roots.validate()
    assert roots.max_depth == 0
    assert roots.sizes.tolist() == [1, 1]
    assert roots.tries.tolist() == [[-1], [-1]]
    assert [nodes.tolist() for nodes in roots.levels] == [[0, 1]]
    assert found(roots).tries.tolist() == roots.tries.tolist()


@st.composite
def random_trees(draw) -> list[tuple[list[int], list[int]]]:
    trees = []
    for _ in range(draw(st.integers(1, 4))):
        size = draw(st.integers(1, 9))
        parents = [-1] + [draw(st.integers(0, i - 1)) for i in range(1, size)]
        trees.append(([draw(st.integers(0, 5)) for _ in range(size)], parents))
    return trees


@given(random_trees())
def test_structure_agrees_with_a_plain_walk(trees: list[tuple[list[int], list[int]]]) -> None:
    tree = TokenTree.of_points(trees)
    tree.validate()
    start = 0
    for _, parents in trees:
        for node, parent in enumerate(parents):
            path, above = [start + node], parent
            while above >= 0:
                path.insert(0, start + above)
                above = parents[above]
            assert [n for n in tree.paths[start + node].tolist() if n >= 0] == path
            children = [start + c for c, p in enumerate(parents) if p == node]
            for made in (tree, found(tree)):  # known from the host, and found on the device
                tries = made.tries[start + node].tolist()
                assert tries == children + [-1] * (len(tries) - len(children))
            assert start + node in tree.levels[len(path) - 1].tolist()
            assert parent < node
        start += len(parents)
    assert sum(len(nodes) for nodes in tree.levels) == tree.num_nodes


def drawn_tree() -> TokenTree:
    q = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]])
    return tree_of([9, 0, 1], [-1, 0, 1], [0, 3], q_row=[-1, 1, -1], q=q)


def test_laws_of_nodes() -> None:
    tree = drawn_tree()
    tree.validate()
    nodes = torch.tensor([1, 2])
    assert tree.drawn_probability(nodes, torch.float32).tolist() == pytest.approx([0.2, 1.0])
    assert tree.law_rows(nodes, torch.zeros(2, 3)).tolist() == [pytest.approx([0.2, 0.3, 0.5]), [0, 1, 0]]


def test_a_part_is_renumbered(tree: TokenTree) -> None:
    kept = pruned(tree, torch.tensor([0, 1, 0, 0, 1, 0, 0, 1, 0, 0], dtype=torch.bool))
    kept.validate()
    assert kept.tokens.tolist() == [9, 1, 4, 8, 7, 5]
    assert kept.parents.tolist() == [-1, 0, 1, -1, -1, 4]
    assert kept.offsets.tolist() == [0, 3, 4, 6]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offsets": torch.tensor([0, 2])}, "offsets"),
        ({"parents": torch.tensor([-1, -1, 1])}, "no root"),
        ({"parents": torch.tensor([-1, 2, 1])}, "after its child"),
        ({"q_row": torch.tensor([-1, -1, -1])}, "names no law"),
        ({"q_row": torch.tensor([-1, 1, 0])}, "point mass names"),
        ({"q_row": torch.tensor([-1, 7, -1])}, "not there"),
        ({"tries": torch.tensor([[1], [-1], [-1]])}, "never drawn"),
        ({"tries": torch.tensor([[-1], [2], [-1]])}, "never drawn"),
        ({"tries": torch.tensor([[1], [2], [3]])}, "never drawn"),
        ({"tokens": torch.tensor([9, 0, -1])}, "another parent than itself"),
    ],
)
def test_validate_names_what_is_wrong(change: dict, message: str) -> None:
    tree = drawn_tree()
    of_shape = {name: change.pop(name) for name in ("offsets", "parents", "tries") if name in change}
    with pytest.raises(ValueError, match=message):
        replace(tree, shape=replace(tree.shape, **of_shape), **change).validate()


def test_validate_notices_a_parent_in_another_tree() -> None:
    tree = TokenTree.of_points([([0, 1], [-1, 0]), ([0, 1], [-1, 0])])
    with pytest.raises(ValueError, match="another tree"):
        replace(tree, shape=replace(tree.shape, parents=torch.tensor([-1, 0, -1, 0]))).validate()


# --- draws that came twice

Q = torch.tensor([[0.5, 0.2, 0.3], [0.1, 0.6, 0.3], [0.25, 0.25, 0.5]], dtype=torch.float64)
A, B, C = 0, 1, 2


def of_draws(drawn: list[int]) -> TokenTree:
    """A root and the tokens drawn behind it from the first row of Q, one node a token, in the order drawn."""
    tokens = list(dict.fromkeys(drawn))
    count = len(tokens)
    draws = [0, *[1 + tokens.index(token) for token in drawn]]
    return tree_of([9, *tokens], [-1, *[0] * count], [0, count + 1], q_row=[-1, *[0] * count], q=Q, drawn=draws)


def test_a_draw_that_repeats_a_node_is_tried_again() -> None:
    tree = of_draws([A, B, A])
    tree.validate()
    assert tree.num_nodes == 3
    assert tree.tries.tolist() == [[1, 2, 1], [-1, -1, -1], [-1, -1, -1]]
    assert of_draws([A, A, B]).tries[0].tolist() == [1, 1, 2]
    assert of_draws([B, B]).tries[0].tolist() == [1, 1]


def test_what_is_left_of_repeated_draws_are_draws_without_replacement() -> None:
    for drawn in ([A, B, A], [A, A, B], [A, B, B]):
        tree = distinct(of_draws(drawn))
        tree.validate()
        assert not tree.shape.repeats
        assert without_padding(tree.tries[0]) == [1, 2]
        assert tree.draw.tolist() == [Draw.POINT, Draw.WITHOUT_REPLACEMENT, Draw.WITHOUT_REPLACEMENT]
        rows = tree.law_rows(torch.tensor([1, 2]), torch.zeros(2, 3, dtype=torch.float64))
        assert rows[0].tolist() == pytest.approx([0.5, 0.2, 0.3])
        assert rows[1].tolist() == pytest.approx([0, 0.4, 0.6]), "the first token cannot come again"
    assert without_padding(distinct(of_draws([A, A, A])).tries[0]) == [1]


def test_twins_that_were_not_merged_stay_independent() -> None:
    """Behind the first root a a as two nodes, behind the second b c b as two: only the latter are without repeats."""
    tokens, parents, rows = [9, A, A, 8, B, C], [-1, 0, 0, -1, 3, 3], [-1, 0, 0, -1, 1, 1]
    tree = tree_of(tokens, parents, [0, 3, 6], q_row=rows, q=Q, drawn=[0, 1, 2, 3, 4, 5, 4])
    tree.validate()
    unrepeated = distinct(tree)
    unrepeated.validate()
    without, independent = Draw.WITHOUT_REPLACEMENT, Draw.IID
    assert unrepeated.draw.tolist() == [Draw.POINT, independent, independent, Draw.POINT, without, without]
    rows = unrepeated.law_rows(torch.tensor([1, 2, 4, 5]), torch.zeros(4, 3, dtype=torch.float64))
    assert rows[:3].tolist() == [Q[0].tolist(), Q[0].tolist(), Q[1].tolist()]
    assert rows[3].tolist() == pytest.approx([0.25, 0, 0.75])


def test_without_repeats_there_is_nothing_to_do(tree: TokenTree) -> None:
    assert distinct(tree) is tree
    unrepeated = drawn_tree()
    assert distinct(unrepeated) is unrepeated


def test_what_distinct_says_is_how_repeated_draws_fall() -> None:
    """All 27 ways three draws can fall: each new token's law given the ones before it, counted and stated."""
    seen: dict[tuple[int, ...], dict[int, float]] = defaultdict(lambda: defaultdict(float))
    stated: dict[tuple[int, ...], list[float]] = {}
    for drawn in itertools.product((A, B, C), repeat=3):
        chance = Q[0, drawn[0]] * Q[0, drawn[1]] * Q[0, drawn[2]]
        tree = distinct(of_draws(list(drawn)))
        tokens = tree.tokens[1:].tolist()
        for place, token in enumerate(tokens):
            before = tuple(tokens[:place])
            seen[before][token] += float(chance)
            assert tree.q is not None
            stated[before] = tree.q[tree.q_row[1 + place]].tolist()
    assert set(stated) == {(), (A,), (B,), (C,), *itertools.permutations((A, B, C), 2)}
    for before, counted in seen.items():
        total = sum(counted.values())
        assert stated[before] == pytest.approx([counted[t] / total for t in (A, B, C)], abs=1e-12), before


@dataclass(frozen=True)
class Grown:
    """A tree drawn at random, as plain lists: what the packed one is compared with."""

    tokens: list[int]
    parents: list[int]
    rows: list[int]  # of Q, -1 for a chosen token
    draws: list[int]  # nodes in the order drawn, the root first


@st.composite
def drawn_trees(draw: st.DrawFn) -> Grown:
    """No two siblings hold the same token; any node but the root may be drawn several times."""
    tokens, parents, rows = [draw(st.integers(0, 2))], [-1], [-1]
    for i in range(1, draw(st.integers(1, 8))):
        parent = draw(st.integers(0, i - 1))
        free = sorted({A, B, C} - {tokens[c] for c in range(i) if parents[c] == parent})
        if free:
            first = next((rows[c] for c in range(len(parents)) if parents[c] == parent), None)
            tokens.append(draw(st.sampled_from(free)))
            parents.append(parent)
            rows.append(draw(st.integers(-1, 2)) if first is None else first)
        else:
            break
    again = draw(st.lists(st.sampled_from(range(1, len(tokens))), max_size=6)) if len(tokens) > 1 else []
    draws = list(range(len(tokens)))
    for node in again:  # a repeat comes anywhere after the first
        draws.insert(draw(st.integers(draws.index(node) + 1, len(draws))), node)
    return Grown(tokens, parents, rows, draws)


def packed(trees: list[Grown]) -> TokenTree:
    columns: dict[str, list[int]] = {name: [] for name in ("tokens", "parents", "rows", "draws")}
    offsets = [0]
    for tree in trees:
        start = offsets[-1]
        columns["tokens"] += tree.tokens
        columns["parents"] += [p + start if p >= 0 else -1 for p in tree.parents]
        columns["rows"] += tree.rows
        columns["draws"] += [node + start for node in tree.draws]
        offsets.append(start + len(tree.tokens))
    names = ("tokens", "parents")
    return tree_of(*(columns[n] for n in names), offsets, q_row=columns["rows"], q=Q, drawn=columns["draws"])


def tries_of(tree: Grown, node: int) -> list[int]:
    return [child for child in tree.draws if tree.parents[child] == node]


def without_padding(row: torch.Tensor, start: int = 0) -> list[int]:
    return [n - start for n in row.tolist() if n >= 0]


BATCHES = st.lists(drawn_trees(), min_size=1, max_size=4)


@given(BATCHES)
@settings(max_examples=60, deadline=None)
def test_every_draw_is_tried_in_the_order_drawn(trees: list[Grown]) -> None:
    batch = packed(trees)
    batch.validate()
    for b, tree in enumerate(trees):
        start = int(batch.offsets[b])
        for node in range(len(tree.tokens)):
            assert without_padding(batch.tries[start + node], start) == tries_of(tree, node)


@given(BATCHES)
@settings(max_examples=60, deadline=None)
def test_distinct_draws_one_by_one(trees: list[Grown]) -> None:
    batch = distinct(packed(trees))
    batch.validate()
    for b, tree in enumerate(trees):
        start = int(batch.offsets[b])
        for node in range(len(tree.tokens)):
            once = list(dict.fromkeys(tries_of(tree, node)))
            assert without_padding(batch.tries[start + node], start) == once
            for place, child in enumerate(once):
                row = [1.0 if t == tree.tokens[child] else 0.0 for t in (A, B, C)]
                if tree.rows[child] >= 0:
                    taken = [tree.tokens[c] for c in once[:place]]
                    left = [0.0 if t in taken else float(Q[tree.rows[child], t]) for t in (A, B, C)]
                    row = [x / sum(left) for x in left]
                nodes = torch.tensor([start + child])
                assert batch.law_rows(nodes, torch.zeros(1, 3, dtype=torch.float64))[0].tolist() == pytest.approx(row)


@given(BATCHES, st.data())
@settings(max_examples=60, deadline=None)
def test_some_trees_of_a_batch_are_those_trees_alone(trees: list[Grown], data: st.DataObject) -> None:
    batch = packed(trees)
    wanted = [b for b in range(len(trees)) if data.draw(st.booleans())] or [len(trees) - 1]
    part, nodes = batch.take(torch.tensor(wanted))
    part.validate()
    alone = packed([trees[b] for b in wanted])
    for name in ("tokens", "draw", "q_row"):
        assert getattr(part, name).tolist() == getattr(alone, name).tolist(), name
    for name in ("parents", "offsets", "tries", "depth", "owner", "local", "ancestors"):
        assert getattr(part.shape, name).tolist() == getattr(alone.shape, name).tolist(), name
    assert torch.equal(batch.tokens[nodes.whole], part.tokens)
    assert nodes.part[nodes.whole].tolist() == list(range(part.num_nodes))
    assert batch.owner[nodes.whole].tolist() == [wanted[b] for b in part.owner.tolist()]
    assert part.q is not None
    every = torch.arange(part.num_nodes)
    like = torch.zeros(part.num_nodes, 3, dtype=torch.float64)
    assert torch.equal(part.law_rows(every, like), batch.law_rows(nodes.whole, like))


@given(BATCHES, st.data())
@settings(max_examples=60, deadline=None)
def test_kept_nodes_keep_their_draws(trees: list[Grown], data: st.DataObject) -> None:
    batch = packed(trees)
    keep = [True] * batch.num_nodes
    for node, parent in enumerate(batch.parents.tolist()):
        keep[node] = parent < 0 or (keep[parent] and data.draw(st.booleans()))
    kept = pruned(batch, torch.tensor(keep))
    kept.validate()
    old = [node for node, stays in enumerate(keep) if stays]  # new number -> old number
    assert kept.tokens.tolist() == batch.tokens[old].tolist()
    assert kept.shape.repeats
    for new, node in enumerate(old):
        assert [old[c] for c in without_padding(kept.tries[new])] == [
            c for c in without_padding(batch.tries[node]) if keep[c]
        ]
    forgotten = kept.forget_draws()
    assert not forgotten.shape.repeats
    forgotten.validate()


# --- absent nodes


def assert_alike(one: TokenTree, other: TokenTree) -> None:
    for name in ("tokens", "draw", "q_row"):
        assert getattr(one, name).tolist() == getattr(other, name).tolist(), name
    for name in ("parents", "offsets", "tries", "depth", "owner", "local"):
        assert getattr(one.shape, name).tolist() == getattr(other.shape, name).tolist(), name


@given(BATCHES, st.integers(0, 5), st.integers(0, 100))
@settings(max_examples=60, deadline=None)
def test_absent_nodes_change_nothing(trees: list[Grown], more: int, seed: int) -> None:
    batch = packed(trees)
    whole, place = with_absent(batch, batch.widest + more, seed)
    whole.validate()
    assert whole.sizes.unique().tolist() == [batch.widest + more]
    again, nodes = whole.packed()
    assert_alike(again, batch)
    if nodes is not None:
        assert nodes.whole.tolist() == place.tolist()
    unrepeated = distinct(whole)
    unrepeated.validate()
    plain = distinct(batch)
    at = torch.arange(batch.num_nodes)
    like = torch.zeros(len(at), 3, dtype=torch.float64)
    assert torch.allclose(unrepeated.law_rows(place, like), plain.law_rows(at, like), atol=1e-15)
    assert unrepeated.draw[place].tolist() == plain.draw.tolist()
    for b, tree in enumerate(trees):  # nothing that is said of trees of one size may need a look at values
        start = int(batch.offsets[b])
        for node in range(len(tree.tokens)):
            mine = whole.tries[place[start + node]]
            assert [batch.tokens[start + n].item() for n in tries_of(tree, node)] == [
                whole.tokens[n].item() for n in without_padding(mine)
            ]


@given(BATCHES, st.data())
@settings(max_examples=60, deadline=None)
def test_dropped_nodes_become_absent_with_all_behind_them(trees: list[Grown], data: st.DataObject) -> None:
    batch = packed(trees)
    dropped = torch.tensor([data.draw(st.booleans()) for _ in range(batch.num_nodes)])
    gone = [False] * batch.num_nodes
    for node, parent in enumerate(batch.parents.tolist()):
        gone[node] = parent >= 0 and (bool(dropped[node]) or gone[parent])
    less = batch.without(dropped)
    less.validate()
    assert (less.tokens < 0).tolist() == gone
    assert less.num_drafted == batch.num_drafted
    assert_alike(less.packed()[0], pruned(batch, ~torch.tensor(gone)))
    assert less.shape.levels[0].tolist() == batch.offsets[:-1].tolist()


def test_a_verdict_on_trees_with_absent_nodes(tree: TokenTree) -> None:
    whole, place = with_absent(tree, 7)
    verdict = Verdict(
        path=torch.cat([place[[0, 1, 4]], torch.tensor([-1])])[None].repeat(3, 1),
        length=torch.tensor([2, 0, 0]),
        bonus=torch.tensor([11, 12, 13]),
    )
    assert gained(whole, verdict)[0] == [1, 4, 11]
    part, nodes = whole.take(torch.tensor([0, 2]))
    assert part.num_nodes == 14
    root = Verdict(torch.tensor([[7, -1]]), torch.tensor([0]), torch.tensor([11]))
    assert nodes.in_whole(root).path.tolist() == [[14, -1]]


def test_shapes_side_by_side(tree: TokenTree) -> None:
    """`tiled` and `known`: the same as the trees one behind the other."""
    tiled = tree.shape.tiled(2, torch.device("cpu")).known()
    double = TokenTree.of_points(TREES * 2).shape
    for name in ("parents", "offsets", "owner", "local", "depth", "ancestors", "tries", "sizes", "paths", "inner"):
        assert getattr(tiled, name).tolist() == getattr(double, name).tolist(), name
    assert [nodes.tolist() for nodes in tiled.levels] == [nodes.tolist() for nodes in double.levels]
    assert tiled.widths == double.widths


# --- the likeliest nodes of a batch


def offered(survival: list[float]) -> Proposal:
    return Proposal(TokenTree.of_points(TREES), survival=torch.tensor(survival))


def kept_of(proposal: Proposal, count: int, real: tuple[bool, ...] = (True, True, True)) -> list[list[int]]:
    """Local indices of the kept nodes of each tree, without the root: columns say where they were."""
    there = torch.tensor(real)
    with no_looking():
        some = proposal.likeliest(count, there)
    some.tree.validate()
    assert some.tree.num_drafted == count
    assert some.columns is not None
    return [[int(c) for c in some.columns[some.tree.owner == b] if c] for b in range(some.tree.num_trees)]


def test_the_likeliest_nodes_of_all_trees_are_kept() -> None:
    proposal = offered([1, 0.6, 0.3, 0.1, 0.5, 1, 1, 0.9, 0.8, 0.05])
    assert kept_of(proposal, 4) == [[1, 4], [], [1, 2]]
    assert kept_of(proposal, 1) == [[], [], [1]]
    assert kept_of(proposal, 6) == [[1, 2, 3, 4], [], [1, 2]]
    assert proposal.likeliest(7, torch.ones(3, dtype=torch.bool)) is proposal


def test_padding_gives_way_to_real_sequences() -> None:
    proposal = offered([1, 0.6, 0.3, 0.1, 0.5, 1, 1, 0.9, 0.8, 0.05])
    assert kept_of(proposal, 4, (True, True, False)) == [[1, 2, 3, 4], [], []]


def test_a_node_is_kept_with_its_parent_whatever_its_chance() -> None:
    proposal = offered([1, 0.2, 0.3, 0.1, 0.9, 1, 1, 0.1, 0.8, 0.9])
    assert kept_of(proposal, 3) == [[1, 2, 4], [], []]
    assert kept_of(Proposal(TokenTree.of_points(TREES)), 3) == [[1, 2], [], [1]], "nothing known: nearest the roots"


def test_absent_nodes_are_kept_only_where_there_are_no_others() -> None:
    proposal = offered([1, 0.6, 0.3, 0.1, 0.5, 1, 1, 0.9, 0.8, 0.05])
    absent = torch.zeros(10, dtype=torch.bool).index_fill_(0, torch.tensor([7, 8, 9]), True)
    proposal = replace(proposal, tree=proposal.tree.without(absent))
    some = proposal.likeliest(5, torch.ones(3, dtype=torch.bool))
    assert (some.tree.tokens >= 0).sum() == 3 + 4
    assert some.tree.num_drafted == 5


def test_links_of_kept_nodes_are_those_of_a_tree_made_of_them() -> None:
    some = offered([1, 0.6, 0.3, 0.1, 0.5, 1, 1, 0.9, 0.8, 0.05]).likeliest(4, torch.ones(3, dtype=torch.bool)).tree
    own = TokenTree.of_points([([9, 1, 4], [-1, 0, 1]), ([8], [-1]), ([7, 5, 6], [-1, 0, 1])])
    assert some.tokens.tolist() == own.tokens.tolist()
    for name in ("parents", "offsets", "owner", "local", "depth", "ancestors"):
        assert torch.equal(vars(some.shape)[name], vars(own.shape)[name]), name
    assert some.tries[:, :1].tolist() == own.tries.tolist()
    assert (some.tries[:, 1:] < 0).all()


def test_drawn_nodes_are_not_selected_by_their_chances() -> None:
    drawn = tree_of([1, 2, 3], [-1, 0, 0], [0, 3], q_row=[-1, 0, 0], q=torch.full((1, 5), 0.2))
    with pytest.raises(ValueError, match="drawn"):
        Proposal(drawn).likeliest(1, torch.tensor([True]))
