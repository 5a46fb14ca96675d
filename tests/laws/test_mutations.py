"""The bugs of the field, one by one: each must be noticed by criterion (1).

A test suite proves little until it has been seen to fail. Every mutation changes the shipped code in one place, as
somebody somewhere has shipped it; the law error each of them causes is far above the 1e-12 the real code is held to.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from draftwood import growers
from draftwood.growers import Best, Children, Frontier, Independent, Levels, WithoutReplacement
from draftwood.protocols import Budget
from draftwood.tree import Draw
from draftwood.verifiers import Block, Walk, block, walk
from enumeration import (
    Enumerator,
    TableModel,
    constant,
    emitted,
    law_error,
    law_of,
    random_rows,
    round_law,
    target_rows,
    view_of,
)

P, Q = random_rows(11, 3), random_rows(12, 3)
SAMPLED_CHAIN = Levels((1, 1), Independent())
SWOR = Levels((2, 1), WithoutReplacement())


def error_of(grower=SAMPLED_CHAIN, law=None) -> float:
    return law_error(round_law(grower, law or Walk(), P, Q), P, 3)


def worst_error(grower, law, seeds: int) -> float:
    """Over several pairs of rows: some mutations show only where the residual has more than one token."""
    pairs = [(random_rows(seed, 3), random_rows(seed + 40, 3)) for seed in range(seeds)]
    return max(law_error(round_law(grower, law, p, q), p, 3) for p, q in pairs)


def test_the_unmutated_laws_pass() -> None:
    assert max(error_of(), error_of(law=Block()), error_of(SWOR)) <= 1e-12


def test_inverted_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    """min(1, q / p): the widespread text that has it backwards."""

    class Inverted(Walk):
        def verify(self, tree, p, view, rng):
            class Flipping:
                pick = rng.pick

                def flip(self, prob, keys):
                    return rng.flip(1 / prob, keys)

            return super().verify(tree, p, view, Flipping())

    assert error_of(law=Inverted()) > 1e-2


def test_correction_from_p_instead_of_the_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk, "residual_after", lambda tree, nodes, p: p)
    assert error_of() > 1e-2


def test_bonus_from_q(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token after a fully accepted chain drawn from the draft model's row."""

    class BonusFromDraft(Walk):
        def verify(self, tree, p, view, rng):
            leaf = torch.tensor(Q(tuple(tree.tokens[1:].tolist())), dtype=torch.float64)
            p = p.clone()
            p[-1] = leaf
            return super().verify(tree, p, view, rng)

    assert error_of(law=BonusFromDraft()) > 1e-2


def test_draft_temperature_differs_from_the_stated_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn at temperature 0.7, verified with the probabilities of temperature 1."""

    class Colder(Independent):
        def children(self, frontier: Frontier, width: int):
            token = frontier.pick(frontier.q ** (1 / 0.7), 0)
            yield Children(token, torch.ones_like(token, dtype=torch.bool), Draw.IID, frontier.q)

    assert error_of(Levels((1, 1), Colder())) > 1e-3


def test_independent_rule_on_draws_without_replacement() -> None:
    class StatesTheWrongLaw(WithoutReplacement):
        def children(self, frontier: Frontier, width: int):
            for child in super().children(frontier, width):
                yield replace(child, q=frontier.q)

    assert worst_error(Levels((2,), StatesTheWrongLaw()), Walk(), 8) > 1e-2


def test_chosen_tokens_verified_as_if_drawn() -> None:
    class ClaimsToDraw(Best):
        def children(self, frontier: Frontier, width: int):
            for child in super().children(frontier, width):
                yield replace(child, draw=Draw.IID, q=frontier.q)

    assert error_of(Levels((1, 1), ClaimsToDraw())) > 1e-2


def test_block_with_the_uncapped_ratio_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The posted code of a published rule: its first token is exact, which is why only whole strings notice."""
    right = block._path_weights

    def uncapped(tree, p):
        weight = right(tree, p)
        leaf = tree.num_nodes - 1
        ratio = torch.ones((), dtype=p.dtype)
        for node in range(1, tree.num_nodes):
            ratio = ratio * p[node - 1, tree.tokens[node]] / tree.q[tree.q_row[node], tree.tokens[node]]
        weight[leaf] = ratio.clamp(max=1)
        return weight

    monkeypatch.setattr(block, "_path_weights", uncapped)
    h = round_law(SAMPLED_CHAIN, Block(), constant(1, 2), constant(2, 1))
    assert law_error(h, constant(1, 2), 2) > 1e-3


def test_block_with_the_residual_of_a_single_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """(p - q)+ in place of (w p - q)+."""
    right = block._residual

    def unweighted(tree, p, weight, node):
        _, mass = right(tree, p, weight, node)
        token_wise, _ = right(tree, p, torch.ones_like(weight), node)
        return token_wise, mass

    monkeypatch.setattr(block, "_residual", unweighted)
    assert worst_error(SAMPLED_CHAIN, Block(), 20) > 1e-3


def test_keeping_the_longest_of_several_walks() -> None:
    """Verify two independent chains and keep the one that went further."""

    def run(rng: Enumerator) -> tuple[int, ...]:
        best: tuple[int, ...] = ()
        for seed in (1, 2):
            view = replace(view_of(), seeds=torch.tensor([seed]))
            tree, _ = Levels((1,), Independent()).grow(TableModel(Q), view, Budget(9), rng).build()
            text = emitted(tree, Walk().verify(tree, target_rows(tree, P), view, rng))
            best = max(best, text, key=len)
        return best

    assert law_error(law_of(run), P, 3) > 1e-2


def test_siblings_sorted_by_what_the_target_likes() -> None:
    """Trial order may not depend on the tokens that were drawn."""

    class Sorting(Walk):
        def verify(self, tree, p, view, rng):
            order = sorted(range(1, tree.num_nodes), key=lambda n: -float(p[0, tree.tokens[n]]))
            index = torch.tensor([0, *order])
            return super().verify(
                replace(tree, tokens=tree.tokens[index], q_row=tree.q_row[index], draw=tree.draw[index]),
                p,
                view,
                rng,
            )

    assert error_of(Levels((2,), Independent()), Sorting()) > 1e-3


@pytest.mark.parametrize("law", [Walk(), Block()], ids=["walk", "block"])
def test_dropping_a_drawn_token_of_low_confidence(law) -> None:
    def run(rng: Enumerator) -> tuple[int, ...]:
        tree, _ = SAMPLED_CHAIN.grow(TableModel(Q), view_of(), Budget(9), rng).build()
        confident = tree.q[tree.q_row[1:], tree.tokens[1:]] > 0.3
        keep = torch.cat([torch.tensor([True]), confident.long().cumprod(0).bool()])
        tree = tree.select(keep, judged=False)
        return emitted(tree, law.verify(tree, target_rows(tree, P), view_of(), rng))

    assert law_error(law_of(run), P, 3) > 1e-2


def test_reranking_a_drawn_tree() -> None:
    """EAGLE-2's rerank on a sampled tree, with its draws remembered."""

    def run(rng: Enumerator) -> tuple[int, ...]:
        tree, _ = Levels((2,), WithoutReplacement()).grow(TableModel(Q), view_of(), Budget(9), rng).build()
        chance = torch.tensor([1.0, *(Q(())[t] for t in tree.tokens[1:].tolist())])
        tree = tree.select(chance >= chance[1:].max(), judged=False)
        return emitted(tree, Walk().verify(tree, target_rows(tree, P), view_of(), rng))

    assert law_error(law_of(run), P, 3) > 1e-2


def test_the_same_noise_for_the_draft_and_the_coin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that do not carry the round or the purpose: noticed by the enumerator, as two draws of one key."""
    monkeypatch.setattr(growers, "derive", lambda keys, *parts: keys)
    with pytest.raises(AssertionError, match="share a key"):
        error_of()
