"""Trees in flight by hand: what is launched, where its keys lie, and how the text goes on."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from draftwood.drafting import Proposal
from draftwood.engine.ahead import TreeAhead
from draftwood.tree import TokenTree

LENGTH, PAGE = 6, 4


def tree_of(length: int, tokens: list[int], parents: list[int], room: int = 24) -> TreeAhead:
    view = SimpleNamespace(lengths=torch.tensor([length]), block_table=torch.arange(8)[None])
    return TreeAhead(view, Proposal(TokenTree.of_points([(tokens, parents)])), room)  # type: ignore[arg-type]


def told(tree: TreeAhead, nodes: list[int], tokens: list[int]) -> None:
    for row, token in zip(tree.rows(nodes), tokens, strict=True):
        row.taken = (token, True)


#        0 root
#       1   2        level 1: tokens 7, 8
#       3   4        level 2: 9 behind 7, 5 behind 8
#           5        level 3: 6 behind 5
TOKENS, PARENTS = [3, 7, 8, 9, 5, 6], [-1, 0, 0, 1, 2, 4]


def test_levels_are_launched_in_slices() -> None:
    tree = tree_of(LENGTH, TOKENS, PARENTS)
    assert tree.launch(1) == [0, 1, 2]
    assert [row.key for row in tree.rows([0, 1, 2])] == [5, 6, 7]
    assert tree.launch(1) == [3, 4]
    assert not tree.is_launched
    assert tree.launch(5) == [5]
    assert tree.is_launched
    assert tree.launch(5) == []
    assert tree.step() is None  # nothing is known yet
    staged = tree.staged([3, 5], PAGE, 100)
    assert staged.positions.tolist() == [7, 8]
    assert staged.slots.tolist() == [8, 10]  # as pages lie one behind the other here
    assert staged.visible.tolist() == [LENGTH] * 2
    assert staged.ancestors.tolist() == [[0b101], [0b11010]]
    assert staged.num_keys.tolist() == [11]


def test_the_text_goes_on_and_nodes_in_flight_stay() -> None:
    tree = tree_of(LENGTH, TOKENS, PARENTS)
    first, second = tree.launch(1), tree.launch(1)
    told(tree, first, [8, 0, 5])
    step = tree.step()
    assert step is not None
    assert (step.verdict.path.tolist(), step.verdict.length.tolist(), step.verdict.bonus.tolist()) == (
        [[0, 2]],
        [1],
        [5],
    )
    assert step.end == 4
    assert step.index == [0, 2, 4]  # the last one is the node that the text ends with now
    assert second == [3, 4]
    (end,) = tree.rows([4])
    assert end.key == 7  # it has moved to its place

    following = tree_of(LENGTH + 2, [5, 6, 1, 2], [-1, 0, 0, 1])
    following.adopt(tree, 4)
    assert following.launch(9) == [1, 2, 3]  # the root is on its way
    assert [row.key for row in following.rows([1, 2, 3])] == [8, 9, 10]
    told(tree, [4], [1])  # the same row
    step = following.step()
    assert step is not None
    assert (step.verdict.length.tolist(), step.verdict.bonus.tolist(), step.end) == ([0], [1], 2)


def test_a_miss_ends_it() -> None:
    tree = tree_of(LENGTH, TOKENS, PARENTS)
    told(tree, tree.launch(3), [7, 12, 0, 0, 0, 0])
    step = tree.step()
    assert step is not None
    assert (step.verdict.path.tolist(), step.verdict.bonus.tolist(), step.end) == ([[0, 1]], [12], None)


def test_keys_of_forgotten_nodes_are_used_again_but_never_before_their_place() -> None:
    tree = tree_of(LENGTH, TOKENS, PARENTS)
    told(tree, tree.launch(2)[:3], [8, 0, 5])
    assert tree.step() is not None
    following = tree_of(LENGTH + 2, [5, 1, 6, 2, 4], [-1, 0, 0, 2, 3])
    following.adopt(tree, 4)
    assert following.launch(3) == [1, 2, 3, 4]
    keys = [row.key for row in following.rows([0, 1, 2, 3, 4])]
    assert keys == [7, 8, 9, 10, 11]
    assert all(key >= 7 + depth for key, depth in zip(keys, [0, 1, 1, 2, 3], strict=True))


def test_without_pages_nodes_are_left_out() -> None:
    tree = tree_of(LENGTH, TOKENS, PARENTS, room=8)
    assert tree.launch(3) == [0, 1, 2]
    told(tree, [0, 1, 2], [7, 9, 0])
    step = tree.step()
    assert step is not None
    assert (step.verdict.length.tolist(), step.verdict.bonus.tolist(), step.end) == ([1], [9], None)
    assert torch.equal(step.verdict.path, torch.tensor([[0, 1]]))
