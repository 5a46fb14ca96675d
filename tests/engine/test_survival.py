"""Chances of drafters, corrected by what became of their nodes: synthetic drafters that are wrongly sure."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

from draftwood.drafting import Proposal
from draftwood.engine.survival import BINS, DEPTHS, PRIOR, STEP, WIDEST, SurvivalCalibration, fitted
from draftwood.protocols import BatchView, StepMode
from draftwood.tree import TokenTree, Verdict
from no_sync import no_looking
from test_host_drafters import batch_view

MOST = 3  # depth of the chains
SURE, MODEST = "sure", "modest"


def says(name: str, draw: random.Random) -> list[float]:
    """A drafter's chances along a chain."""
    each = [draw.uniform(0.4, 0.95) for _ in range(MOST)]
    return [math.prod(each[: depth + 1]) for depth in range(MOST)]


def truth(name: str, depth: int, said: float) -> float:
    """How likely its node at that depth is, really: one drafter is right less often the deeper it goes, the other one
    more often than it says.
    """
    return said ** (2.0 + depth) if name == SURE else math.sqrt(said)


def step(said: list[list[float]], names: list[str]) -> tuple[Proposal, BatchView]:
    trees = [(list(range(1 + MOST)), list(range(-1, MOST))) for _ in names]
    survival = torch.tensor([[1.0, *own] for own in said]).flatten()
    view = batch_view([[0]] * len(names))
    which = torch.tensor([[SURE, MODEST].index(name) for name in names])
    view = replace(view, drafter=which, mode=StepMode(drafters=(SURE, MODEST)))
    return Proposal(TokenTree.of_points(trees), survival=survival), view


def verdict_of(said: list[list[float]], names: list[str], draw: random.Random) -> Verdict:
    """A chain is accepted down to a depth with the true chance of its node there."""
    paths, lengths = [], []
    for b, (own, name) in enumerate(zip(said, names, strict=True)):
        luck = draw.random()
        length = sum(luck < truth(name, depth, chance) for depth, chance in enumerate(own))
        first = b * (1 + MOST)
        paths.append([first + i if i <= length else -1 for i in range(1 + MOST)])
        lengths.append(length)
    return Verdict(torch.tensor(paths), torch.tensor(lengths), torch.zeros(len(names), dtype=torch.int64))


@pytest.fixture(scope="module")
def learnt() -> SurvivalCalibration:
    draw, calibration = random.Random(0), SurvivalCalibration()
    names = [SURE, MODEST] * 16
    for _ in range(400):
        said = [says(name, draw) for name in names]
        proposal, view = step(said, names)
        outcome, real = verdict_of(said, names, draw), torch.ones(len(names), dtype=torch.bool)
        with no_looking():
            calibration.learn(proposal, view, outcome, real)
    return calibration


def test_chances_become_true(learnt: SurvivalCalibration) -> None:
    draw, names = random.Random(1), [SURE, MODEST] * 50
    said = [says(name, draw) for name in names]
    proposal, view = step(said, names)
    with no_looking():
        found = learnt.chances(proposal, view)
    assert found is not None
    pairs = [
        (chance, truth(name, depth, own), float(found[b * (1 + MOST) + 1 + depth]))
        for b, (name, line) in enumerate(zip(names, said, strict=True))
        for depth, own in enumerate(line)
        for chance in [own]
    ]
    before = sum(abs(raw - true) for raw, true, _ in pairs) / len(pairs)
    after = sum(abs(own - true) for _, true, own in pairs) / len(pairs)
    assert before > 0.2
    assert after < 0.04


def test_the_rows_that_are_chosen_become_right(learnt: SurvivalCalibration) -> None:
    """The true chances of the nodes that a step scores: by the drafters' own word they are those of the sure one."""
    draw, names = random.Random(2), [SURE, MODEST] * 4
    gained = {"raw": 0.0, "corrected": 0.0, "best": 0.0}
    for _ in range(50):
        said = [says(name, draw) for name in names]
        proposal, view = step(said, names)
        real = torch.ones(len(names), dtype=torch.bool)
        true = [truth(name, d, own) for name, line in zip(names, said, strict=True) for d, own in enumerate(line)]
        exact = torch.tensor(
            [1.0 if i % (1 + MOST) == 0 else true[i - 1 - i // (1 + MOST)] for i in range(len(names) * 4)]
        )
        ways = {"raw": None, "corrected": learnt.chances(proposal, view), "best": exact}
        for way, chances in ways.items():
            kept = proposal.likeliest(8, real, chances)
            kept.tree.validate()
            original = kept.columns + (1 + MOST) * kept.tree.owner
            gained[way] += float(exact[original][kept.tree.local > 0].sum())
    assert gained["raw"] < 0.9 * gained["best"]
    assert gained["corrected"] > 0.99 * gained["best"]


def test_nothing_known_changes_nothing() -> None:
    said = [[0.9, 0.5, 0.1]]
    proposal, view = step(said, [SURE])
    found = SurvivalCalibration().chances(proposal, replace(view, drafter=None, mode=StepMode()))
    assert found is not None
    assert found[1:].tolist() == pytest.approx(said[0], abs=0.01)
    bare = Proposal(proposal.tree)
    assert SurvivalCalibration().chances(bare, view) is None


def test_padding_teaches_nothing(learnt: SurvivalCalibration) -> None:
    fresh, draw = SurvivalCalibration(), random.Random(3)
    said = [says(SURE, draw)]
    proposal, view = step(said, [SURE])
    fresh.learn(proposal, view, verdict_of(said, [SURE], draw), torch.tensor([False]))
    assert all(float(counts.sum()) == 0 for counts in fresh._counts.values())


def pooled(means: list[float], weights: list[float]) -> list[float]:
    """Isotonic regression as it is written in textbooks: neighbours that fall are pooled."""
    blocks: list[list[float]] = []
    for mean, weight in zip(means, weights, strict=True):
        blocks.append([mean, weight, 1])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (a, n, i), (b, m, j) = blocks[-2:]
            blocks[-2:] = [[(a * n + b * m) / (n + m), n + m, i + j]]
    return [mean for mean, _, count in blocks for _ in range(int(count))]


def test_the_regression_is_that_of_pooled_neighbours() -> None:
    torch.manual_seed(0)
    tried = torch.rand(DEPTHS, BINS) * 100
    right = tried * torch.rand(DEPTHS, BINS)
    found = fitted(torch.stack([tried, right]))
    prior = torch.sigmoid(torch.arange(BINS) * STEP - WIDEST)
    means, weights = (right + PRIOR * prior) / (tried + PRIOR), tried + PRIOR
    wanted = torch.tensor([pooled(*both) for both in zip(means.tolist(), weights.tolist(), strict=True)])
    assert torch.sigmoid(found).sub(wanted).abs().max() < 1e-5
