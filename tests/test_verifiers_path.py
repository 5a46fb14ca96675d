"""Two ways down a tree, one node at a time and all at once, come to the same end."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.ops.path import PathWalk, follow, keep_chosen
from draftwood.shape import TreeShape
from draftwood.tree import TokenTree
from no_sync import no_looking
from trees import padded

CPU = torch.device("cpu")


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    size = draw(st.integers(1, 12))
    tokens = draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    return tokens, [-1, *(draw(st.integers(0, i - 1)) for i in range(1, size))]


@given(st.lists(trees(), min_size=1, max_size=4), st.data())
@settings(max_examples=150, deadline=None)
def test_following_choices_is_walking(given_trees: list[tuple[list[int], list[int]]], data: st.DataObject) -> None:
    tree = TokenTree.of_points(given_trees, CPU)
    count = tree.tokens.shape[0]
    if data.draw(st.booleans()):  # draws that came twice stand twice among the tries, and change nothing
        again = data.draw(st.lists(st.integers(0, count - 1), max_size=5))
        tree = replace(tree, shape=TreeShape.of(tree.parents, tree.offsets, torch.tensor([*range(count), *again])))
    choices = data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    walk, chosen = PathWalk(tree), torch.tensor(choices)
    while bool(walk.active.any()):
        walk.descend(walk.child_with(chosen[walk.node]))
    want, got = walk.verdict(chosen[walk.node]), follow(tree, choices)
    assert got.length.tolist() == want.length.tolist()
    assert got.bonus.tolist() == want.bonus.tolist()
    for b, length in enumerate(want.length.tolist()):
        assert got.path[b, : length + 1].tolist() == want.path[b, : length + 1].tolist()
        assert set(got.path[b, length + 1 :].tolist()) <= {-1}

    whole, place = padded(tree, tree.widest + data.draw(st.integers(0, 3)), data.draw(st.integers(0, 99)))
    everywhere = torch.zeros_like(whole.tokens).index_copy_(0, place, chosen)
    with no_looking():
        blind = keep_chosen(whole, everywhere)
    for found in (blind, keep_chosen(whole, everywhere)):
        assert found.length.tolist() == got.length.tolist()
        assert found.bonus.tolist() == got.bonus.tolist()
        assert found.path.tolist() == torch.where(got.path >= 0, place[got.path.clamp(min=0)], -1).tolist()
