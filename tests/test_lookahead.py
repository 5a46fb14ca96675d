"""Lookahead: the window converges to what the target says, n-grams are kept for one salt and drafted when they fit."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from draftwood.drafters.lookahead import LookaheadDrafter, _Pool
from draftwood.drafting import Proposal
from draftwood.protocols import LOGITS, BatchView
from draftwood.rng import KeyedRng
from draftwood.tree import Verdict
from no_sync import no_looking
from test_host_drafters import agree_with_parents, batch_view, paths_of
from tiny import tiny_runner

V, CPU = 13, torch.device("cpu")


def after(token: int) -> int:
    """What the target always says."""
    return (3 * token + 5) % V


def drafter(**settings: int) -> LookaheadDrafter:
    made = LookaheadDrafter(**{"width": 4, "length": 4, "guesses": 3, **settings})
    made.attach(tiny_runner())
    return made


def said(made: LookaheadDrafter, view: BatchView, proposal: Proposal, longest: int = 99) -> list[int]:
    """The target takes what it says, as far as the trees have it, but at most so many nodes."""
    tree, paths, bonus = proposal.tree, [], []
    logits = torch.full((tree.num_nodes, V), -9.0)
    for node, token in enumerate(tree.tokens.tolist()):
        logits[node, after(max(token, 0))] = 1.0
    for b in range(tree.num_trees):
        path = [int(tree.offsets[b])]
        while len(path) <= longest:
            wanted = after(int(tree.tokens[path[-1]]))
            right = [node for node in tree.tries[path[-1]].tolist() if node >= 0 and int(tree.tokens[node]) == wanted]
            if not right:
                break
            path.append(right[0])
        paths.append(path)
        bonus.append(after(int(tree.tokens[path[-1]])))
    deepest = max(tree.max_depth, 1)
    whole = torch.tensor([[*path, *[-1] * (1 + deepest - len(path))] for path in paths])
    gained = [len(path) - 1 for path in paths]
    made.commit(view, proposal, Verdict(whole, torch.tensor(gained), torch.tensor(bonus)), {LOGITS: logits})
    return gained


def test_the_window_converges_and_its_columns_are_drafted() -> None:
    made, text, rng = drafter(), [1, 7, 7, 2], random.Random(1)
    accepted = 0
    for step in range(30):
        view = replace(batch_view([text]), may_look=step % 2 == 0)
        proposal = made.propose(view, made.max_nodes, KeyedRng())
        agree_with_parents(proposal.tree)
        window = made._step.window[0]
        assert {tuple(window[: 1 + k, 0].tolist()) for k in range(3)} <= paths_of(proposal.tree), "the first column"
        assert tuple(window[0].tolist()) in paths_of(proposal.tree), "the trunk"
        (gained,) = said(made, view, proposal)
        accepted += gained
        for _ in range(gained + 1):
            text = [*text, after(text[-1])]
        if rng.random() < 0.3:  # the text is another one
            text = [*text, rng.randrange(V)]
    for token in range(V):
        for gram in made._pool.behind(torch.tensor([token]), torch.tensor([0]))[0].tolist():
            assert gram[0] < 0 or len(gram) == 3
    assert accepted > 40


def test_levels_are_what_the_target_said_of_the_levels_above() -> None:
    made, text = drafter(), [1, 7, 7, 2]
    for _ in range(4):
        view = batch_view([text])
        said(made, view, made.propose(view, made.max_nodes, KeyedRng()), 0)  # nothing is accepted
        text = [*text, after(text[-1])]
    for level in range(2):
        assert made._windows[0][0, level + 1].tolist() == [after(t) for t in made._windows[0][0, level].tolist()]


def test_a_window_is_for_one_text_and_small_trees_hold_its_beginning() -> None:
    made = drafter()
    view = batch_view([[1, 2, 3], [4, 5, 6]])
    first = made._window(view)
    said(made, view, made.propose(view, made.max_nodes, KeyedRng()))
    moved = batch_view([[1, 2, 3, 4, 5, 6, 7], [4]])
    assert torch.equal(made._window(moved), made._from_text(moved)), "another text has the row now"
    for nodes in (0, 1, 5, made.max_nodes):
        for limits in ({}, {"nodes": 2}, {"depth": 2}):
            some = batch_view([[1, 2, 3], [4, 5, 6]], **limits)
            blind = replace(some, may_look=False)
            made.propose(blind, nodes, KeyedRng())
            with no_looking():
                tree = made.propose(blind, nodes, KeyedRng()).tree
            agree_with_parents(tree)
            assert tree.sizes.tolist() == [1 + nodes] * 2
            for b in range(2):
                assert len(paths_of(tree, b)) <= min(nodes, limits.get("nodes", nodes))
                assert all(len(path) <= limits.get("depth", 9) for path in paths_of(tree, b))
    assert first.shape == (2, 3, 4)


def test_n_grams_stay_with_their_salt_and_the_oldest_go_first() -> None:
    pool, one = _Pool(V, 2, 3, CPU), torch.tensor([5])
    for number in range(4):
        gram = torch.tensor([[number, number, number]])
        for _ in range(2):  # known ones are not kept twice
            pool.keep(one, gram, torch.tensor([16]), torch.tensor([True]))
    assert sorted(pool.behind(one, torch.tensor([16]))[0, :, 0].tolist()) == [2, 3]
    assert pool.behind(one, torch.tensor([32]))[0].tolist() == [[-1] * 3] * 2
    pool.keep(one, torch.tensor([[9, 9, 9]]), torch.tensor([32]), torch.tensor([True]))
    assert sorted(pool.behind(one, torch.tensor([32]))[0, :, 0].tolist()) == [-1, 9], "nothing of the other salt"
    assert pool.behind(one, torch.tensor([16]))[0].tolist() == [[-1] * 3] * 2
    for salt, there in ((-1, True), (0, False)):
        pool.keep(torch.tensor([1]), torch.tensor([[9, 9, 9]]), torch.tensor([salt]), torch.tensor([there]))
        assert (pool.behind(torch.tensor([1]), torch.tensor([max(salt, 0)])) == -1).all()
    both = torch.tensor([[1, 1, 1], [2, 2, 2]])
    pool.keep(torch.tensor([3, 3]), both, torch.tensor([0, 0]), torch.tensor([True, True]))
    assert pool.behind(torch.tensor([3]), torch.tensor([0]))[0].tolist()[0] in both.tolist(), "never a mixture"


@pytest.mark.parametrize("settings", [{"width": 0}, {"length": 1}, {"guesses": 0}])
def test_impossible_settings_are_refused(settings: dict) -> None:
    with pytest.raises(ValueError, match="lookahead needs"):
        LookaheadDrafter(**settings)
