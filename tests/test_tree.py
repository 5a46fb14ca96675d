"""Packed trees, drawn small enough to check by eye."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftwood.tree import Draw, TokenTree, Verdict
from draftwood.treebuilder import TreeBuilder

#   tree 0:  t ── a ── c         tree 1:  u        tree 2:  w ── x ── y ── z
#            └── b  └── d
TREES = [([9, 1, 2, 3, 4], [-1, 0, 0, 1, 1]), ([8], [-1]), ([7, 5, 6, 5], [-1, 0, 1, 2])]


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
    assert tree.first_child.tolist() == [1, 3, -1, -1, -1, -1, 7, 8, 9, -1]
    assert tree.next_sibling.tolist() == [-1, 2, -1, 4, -1, -1, -1, -1, -1, -1]


def test_ancestors_are_bits_over_draft_nodes(tree: TokenTree) -> None:
    assert tree.ancestors[:, 0].tolist() == [0, 0b1, 0b10, 0b101, 0b1001, 0, 0, 0b1, 0b11, 0b111]


def test_large_trees_use_more_words() -> None:
    chain = TokenTree.of_points([([0] * 131, [-1, *range(130)])])
    words = chain.ancestors
    assert words.shape == (131, 3)
    assert words[130].tolist() == [-1, -1, 0b11]
    assert words[64].tolist() == [-1, 0, 0]


def test_two_thousand_nodes() -> None:
    nodes = 2048
    tree = TokenTree.of_points([([0] * (nodes + 1), [-1, *[i // 2 for i in range(nodes)]])])
    tree.validate()
    assert tree.ancestors.shape == (nodes + 1, 32)
    assert int(tree.depth.max()) == 11


def test_roots_are_a_batch_of_single_nodes() -> None:
    roots = TokenTree.roots(torch.tensor([4, 5]))
    roots.validate()
    assert roots.max_depth == 0
    assert roots.sizes.tolist() == [1, 1]


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
            found, child = [], int(tree.first_child[start + node])
            while child >= 0:
                found.append(child)
                child = int(tree.next_sibling[child])
            assert found == children
            assert parent < node
        start += len(parents)


def drawn_tree() -> TokenTree:
    q = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]])
    return TokenTree(
        tokens=torch.tensor([9, 0, 1]),
        parents=torch.tensor([-1, 0, 1]),
        offsets=torch.tensor([0, 3]),
        draw=torch.tensor([Draw.POINT, Draw.IID, Draw.POINT]),
        q_row=torch.tensor([-1, 1, -1]),
        q=q,
    )


def test_laws_of_nodes() -> None:
    tree = drawn_tree()
    tree.validate()
    nodes = torch.tensor([1, 2])
    assert tree.drawn_probability(nodes, torch.float32).tolist() == pytest.approx([0.2, 1.0])
    assert tree.law_rows(nodes, torch.zeros(2, 3)).tolist() == [pytest.approx([0.2, 0.3, 0.5]), [0, 1, 0]]


def test_select_renumbers_and_keeps_roots(tree: TokenTree) -> None:
    kept = tree.select(torch.tensor([0, 1, 0, 0, 1, 0, 0, 1, 0, 0], dtype=torch.bool), judged=False)
    kept.validate()
    assert kept.tokens.tolist() == [9, 1, 4, 8, 7, 5]
    assert kept.parents.tolist() == [-1, 0, 1, -1, -1, 4]
    assert kept.offsets.tolist() == [0, 3, 4, 6]


def test_select_after_looking_forgets_every_draw() -> None:
    everything = torch.ones(3, dtype=torch.bool)
    assert drawn_tree().select(everything, judged=False).q is not None
    forgotten = drawn_tree().select(everything, judged=True)
    forgotten.validate()
    assert forgotten.q is None
    assert forgotten.draw.tolist() == [0, 0, 0]


def test_select_refuses_orphans(tree: TokenTree) -> None:
    keep = torch.zeros(10, dtype=torch.bool)
    keep[4] = True
    with pytest.raises(ValueError, match="parent it drops"):
        tree.select(keep, judged=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offsets": torch.tensor([0, 2])}, "offsets"),
        ({"parents": torch.tensor([-1, -1, 1])}, "no root"),
        ({"parents": torch.tensor([-1, 2, 1])}, "after its child"),
        ({"q_row": torch.tensor([-1, -1, -1])}, "names no law"),
        ({"q_row": torch.tensor([-1, 1, 0])}, "point mass names"),
        ({"q_row": torch.tensor([-1, 7, -1])}, "not there"),
    ],
)
def test_validate_names_what_is_wrong(change: dict, message: str) -> None:
    from dataclasses import replace

    with pytest.raises(ValueError, match=message):
        replace(drawn_tree(), **change).validate()


def test_validate_notices_a_parent_in_another_tree() -> None:
    from dataclasses import replace

    tree = TokenTree.of_points([([0, 1], [-1, 0]), ([0, 1], [-1, 0])])
    with pytest.raises(ValueError, match="another tree"):
        replace(tree, parents=torch.tensor([-1, 0, -1, 0])).validate()


def test_a_verdict_on_the_host(tree: TokenTree) -> None:
    verdict = Verdict(
        path=torch.tensor([[0, 1, 4, -1], [5, -1, -1, -1], [6, 7, -1, -1]]),
        length=torch.tensor([2, 0, 1]),
        bonus=torch.tensor([11, 12, 13]),
    )
    host = verdict.to_host(tree)
    assert host.tokens == [[1, 4, 11], [12], [5, 13]]
    assert host.accepted == [2, 0, 1]
    assert host.drafted == [4, 0, 3]


def test_builder_numbers_columns_alike_and_packs_the_living() -> None:
    builder = TreeBuilder(torch.tensor([9, 8]))
    zero = torch.zeros(2, 2, dtype=torch.int64)
    first = builder.add(zero, torch.tensor([[1, 2], [3, 4]]), torch.tensor([[True, True], [True, False]]))
    assert first.tolist() == [[1, 2], [1, 2]]
    q = torch.full((2, 2, 5), 0.2)
    builder.add_drawn(first, torch.tensor([[0, 1], [2, 3]]), torch.ones(2, 2, dtype=torch.bool), Draw.IID, q)
    assert builder.sizes.tolist() == [4, 2], "a child of a dead node is dead"
    assert builder.ancestors(torch.tensor([[3, 4], [3, 0]])).squeeze(-1).tolist() == [
        [0b101, 0b1010],
        [0b101, 0],
    ]
    tree, columns = builder.build()
    tree.validate()
    assert tree.tokens.tolist() == [9, 1, 2, 0, 1, 8, 3, 2]
    assert tree.parents.tolist() == [-1, 0, 0, 1, 2, -1, 5, 6]
    assert columns.tolist() == [0, 1, 2, 3, 4, 0, 1, 3]
    assert tree.q is not None


def test_keep_only_forgets_draws() -> None:
    builder = TreeBuilder(torch.tensor([9]))
    zero = torch.zeros(1, 2, dtype=torch.int64)
    alive = torch.ones(1, 2, dtype=torch.bool)
    builder.add_drawn(zero, torch.tensor([[1, 2]]), alive, Draw.IID, torch.full((1, 2, 3), 1 / 3))
    builder.keep_only(torch.tensor([[False, False, True]]))
    tree, _ = builder.build()
    tree.validate()
    assert tree.tokens.tolist() == [9, 2]
    assert tree.q is None
