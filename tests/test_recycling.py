"""Token recycling against a plain dictionary: what is kept, for whom, and how often it turns out right."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from draftwood.cache.batch_state import salt_number
from draftwood.drafters.recycling import RecyclingDrafter, SuccessorTable
from draftwood.drafting import Proposal
from draftwood.protocols import LOGITS, BatchView
from draftwood.rng import KeyedRng
from draftwood.tree import TokenTree, Verdict
from no_sync import no_looking
from test_host_drafters import agree_with_parents, batch_view, paths_of
from tiny import tiny_config, tiny_runner

V = 13


def drafter(**settings) -> RecyclingDrafter:
    made = RecyclingDrafter(**{"nodes": 6, "width": 3, "depth": 3, "least": 0.0, **settings})
    made.attach(tiny_runner())
    return made


def view_after(tokens: list[int], salts: list[int] | None = None) -> BatchView:
    """Sequences that end in these tokens."""
    view = replace(batch_view([[token] for token in tokens]), rows=torch.arange(len(tokens)), may_look=True)
    return view if salts is None else replace(view, salts=torch.tensor(salts))


def said(made: RecyclingDrafter, view: BatchView, next_tokens: list[list[int]]) -> None:
    """A step without drafts, in which the target held these tokens likeliest, in this order, and took the first."""
    tree = TokenTree.roots(view.roots)
    logits = torch.full((view.size, V), -9.0)
    for row, tokens in enumerate(next_tokens):
        logits[row, torch.tensor(tokens)] = torch.arange(len(tokens), 0, -1.0)
    bonus = torch.tensor([tokens[0] for tokens in next_tokens])
    made.commit(view, Proposal(tree), Verdict.of_roots(tree, bonus), {LOGITS: logits})


def test_trees_follow_what_the_target_said_behind_each_token() -> None:
    made = drafter()
    assert paths_of(made.propose(view_after([1]), 6, KeyedRng()).tree.packed()[0]) == set()
    said(made, view_after([1]), [[2, 3, 4]])
    said(made, view_after([2]), [[5, 6, 7]])
    tree = made.propose(view_after([1]), 6, KeyedRng()).tree
    agree_with_parents(tree)
    assert paths_of(tree) == {(2,), (3,), (4,), (2, 5), (2, 6), (2, 7)}
    assert tree.tokens.tolist()[:2] == [1, 2], "the likeliest comes first"
    said(made, view_after([1]), [[8, 9, 2]])
    assert (8,) in paths_of(made.propose(view_after([1]), 6, KeyedRng()).tree), "the last word counts"


def test_limits_hold_and_nothing_is_looked_at() -> None:
    made, rng = drafter(nodes=9), random.Random(2)
    for token in range(V):
        said(made, view_after([token]), [rng.sample(range(V), 4)])
    nothing = TokenTree.roots(torch.tensor([1, 2, 2]))
    verdict, logits = Verdict.of_roots(nothing, torch.tensor([3, 4, 5])), torch.randn(3, V)
    blind = replace(view_after([1, 2, 2]), may_look=False)
    with no_looking():
        made.commit(blind, Proposal(nothing), verdict, {LOGITS: logits})
    for limits in ({}, {"nodes": 4}, {"depth": 2}, {"nodes": 0}, {"depth": 0}):
        view = replace(batch_view([[1], [2], [2]], **limits), rows=torch.arange(3))
        seen = made.propose(replace(view, may_look=True), 9, KeyedRng()).packed().tree
        with no_looking():
            unseen = made.propose(replace(view, may_look=False), 9, KeyedRng()).tree
        agree_with_parents(unseen)
        for b in range(3):
            assert paths_of(seen, b) == paths_of(unseen, b)
            assert len(paths_of(seen, b)) <= limits.get("nodes", 9)
            assert all(len(path) <= limits.get("depth", 3) for path in paths_of(seen, b))
        assert limits or len(paths_of(seen, 0)) == 9


def test_rejected_nodes_are_kept_too_but_those_on_the_path_come_first() -> None:
    made = drafter()
    tree = TokenTree.of_points([([1, 2, 3, 3], [-1, 0, 1, 0])])  # 1 -> 2 -> 3 is kept, 1 -> 3 is not
    logits = torch.full((4, V), -9.0)
    for node, token in enumerate((2, 3, 7, 8)):
        logits[node, token] = 5.0
    verdict = Verdict(torch.tensor([[0, 1, 2]]), torch.tensor([2]), torch.tensor([7]))
    made.commit(view_after([1]), Proposal(tree), verdict, {LOGITS: logits})
    assert (7,) in paths_of(made.propose(view_after([3]), 1, KeyedRng()).tree)
    tree = TokenTree.of_points([([1, 2, 4], [-1, 0, 0])])
    verdict = Verdict(torch.tensor([[0, 1]]), torch.tensor([1]), torch.tensor([7]))
    made.commit(view_after([1]), Proposal(tree), verdict, {LOGITS: logits[[0, 1, 3]]})
    assert (8,) in paths_of(made.propose(view_after([4]), 1, KeyedRng()).tree), "4 was rejected"


def test_a_salt_reads_nothing_of_another_and_padding_leaves_nothing() -> None:
    made = drafter()
    ours, theirs = salt_number("a"), salt_number("b")
    said(made, view_after([1, 2, 3], [ours, theirs, -1]), [[4, 5, 6], [7, 8, 9], [10, 11, 12]])
    for token, salt, there in (
        (1, ours, True),
        (1, theirs, False),
        (2, ours, False),
        (2, theirs, True),
        (3, -1, False),
    ):
        paths = paths_of(made.propose(view_after([token], [salt]), 6, KeyedRng()).packed().tree)
        assert bool(paths) == there


def test_salts_that_want_the_same_row_never_mix() -> None:
    """In one batch, in which either may have it; and later, when the other takes it."""
    table = SuccessorTable(V, 2, torch.device("cpu"))
    logits = torch.eye(V)[[4, 5, 6]]
    table.write(torch.tensor([3, 2, 1]), torch.tensor([16, 17, 18]), logits, torch.zeros(3, dtype=torch.int64))
    found = []
    for token, salt, likeliest in ((3, 16, 4), (2, 17, 5), (1, 18, 6)):
        entries, known, _ = table.behind(torch.tensor([[token]]), torch.tensor([salt]))
        found.append(bool(known))
        assert not known or entries[0, 0, 0] == likeliest
    assert found == [False, False, True]


def test_chances_are_how_often_entries_were_right() -> None:
    """Whatever share the target gave them."""
    made, rng = drafter(nodes=3), random.Random(4)
    for _ in range(3000):
        first = rng.random() < 0.7
        said(made, view_after([1]), [[2, 3, 4] if first else [3, 2, 4]])
    survival = made.propose(view_after([1]), 3, KeyedRng()).survival
    assert survival is not None
    # The first entry is what came last time: right with 0.7² + 0.3², else the second is.
    assert survival.tolist()[1:] == pytest.approx([0.58, 0.42, 0.0], abs=0.06)
    assert bool((made._table._counts[1, :-1] <= 1001).all()), "trials are bounded"


def test_no_two_salts_have_the_same_number() -> None:
    numbers = {salt_number(str(i)) for i in range(1000)}
    assert len(numbers) == 1000
    assert all(0 <= number < 1 << 62 for number in numbers)


@pytest.mark.parametrize("settings", [{"nodes": 0}, {"depth": 0}, {"width": 0}, {"width": 17}, {"least": 1.0}])
def test_impossible_settings_are_refused(settings: dict) -> None:
    with pytest.raises(ValueError, match="recycling needs"):
        RecyclingDrafter(**settings)


def test_a_small_vocabulary_has_fewer_entries() -> None:
    made = RecyclingDrafter(nodes=8, width=8, least=0.0)
    made.attach(tiny_runner(tiny_config(vocab_size=5)))
    assert made._table.kept == 5
