"""The depths of a draft as one loss: which guesses belong together, how much each counts, what whole drafts lose."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from draftwood.nets.embeddings import TargetEmbeddings
from draftwood.train.data import Corpus, PackedBatches, TextBatch
from draftwood.train.grading import Fixed, Graded, Paced, together, whole_loss
from draftwood.train.losses import Mix, parse_mix
from draftwood.train.methods import BlockMethod, HeadStackMethod, RecurrentMethod
from draftwood.train.teacher import Teacher
from tiny import CPU, TinyCheckpoint, random_net, tiny_config, tiny_runner

METHODS: dict[str, Any] = {"eagle3": RecurrentMethod, "dspark": BlockMethod, "hydra": HeadStackMethod}


def graded(accept: list[dict[int, float]], losses: list[dict[int, float]] | None = None) -> list[Graded]:
    """Three drafts: at each depth, numbers by draft."""
    depths = []
    for at, lost in zip(accept, losses or accept, strict=True):
        drafts, chances = torch.tensor(list(at), dtype=torch.int64), torch.tensor(list(at.values()))
        depths.append(Graded(torch.tensor(list(lost.values())), chances, chances > 0.5, drafts, 3))
    return depths


def test_guesses_of_a_draft_stand_side_by_side() -> None:
    numbers, there = together(depths := graded([{0: 0.5, 2: 0.25}, {2: 0.75}]), [d.accept for d in depths])
    assert numbers.tolist() == [[0.5, 0.0], [0.0, 0.0], [0.25, 0.75]]
    assert there.tolist() == [[True, False], [False, False], [True, True]]


def test_fixed_weights_are_of_means_of_depths() -> None:
    depths = graded([{0: 1.0, 1: 2.0}, {1: 4.0}, {}])
    assert float(Fixed(torch.tensor([2.0, 1.0, 1.0]))(depths)) == pytest.approx((2 * 1.5 + 4.0) / 4)


def test_paced_weights_follow_the_acceptance() -> None:
    """A guess counts by what hangs on it: much early and in drafts that come far, little behind a likely failure."""
    ones = [{0: 1.0, 1: 1.0}] * 3
    far, near = [{0: 0.9, 1: 0.1}, {0: 0.9, 1: 0.1}, {0: 0.9, 1: 0.1}], []
    for depth in range(3):
        for draft in range(2):
            only = [{d: float((k, d) == (depth, draft)) for d in (0, 1)} for k in range(3)]
            near.append(float(Paced()(graded(far, only))))
    assert sum(near) == pytest.approx(1.0)
    first, _, second, weak, third, weakest = near
    assert first > second > third > weak > weakest
    assert float(Paced()(graded(far, ones))) == pytest.approx(1.0)


def test_end_to_end_is_the_share_of_a_draft_that_is_lost() -> None:
    depths = graded([{0: 0.5, 2: 1.0}, {2: 0.5}])
    lost = [1 - 0.5, 2 - (1.0 + 0.5)]  # drafts 0 and 2; number 1 has no guess that counts
    loss = whole_loss(depths, parse_mix("kl=1,e2e=3"), Fixed(torch.tensor([1.0, 0.0])))
    assert float(loss) == pytest.approx(0.75 + 3 * sum(lost) / 2 / 2)


def lessons() -> list[TextBatch]:
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(13, (18,), generator=generator).tolist() for _ in range(6)]
    return list(PackedBatches(Corpus.of([(text[:3], text[3:]) for text in texts]), 3, 40).epoch(0, 0))


def method_of(kind: str, mix: Mix) -> Any:
    words = TargetEmbeddings(TinyCheckpoint(tiny_config()), CPU, torch.float32)
    net = random_net(kind, words).requires_grad_(True)
    return METHODS[kind](net, Teacher(tiny_runner(dtype=torch.float32), net.reads), words, mix)


def expected_length(report: dict[str, Tensor]) -> float:
    alive, total, depth = 1.0, 1.0, 1
    while f"accept_{depth}" in report:
        alive *= float(report[f"accept_{depth}"])
        total, depth = total + alive, depth + 1
    return total


@pytest.mark.parametrize("kind", list(METHODS))
def test_end_to_end_alone_makes_drafts_longer(kind: str) -> None:
    method, batches = method_of(kind, parse_mix("e2e")), lessons()
    optimizer = torch.optim.Adam(method.module.parameters(), 3e-3)
    found = []
    for _ in range(40):
        torch.manual_seed(0)  # the same anchors
        report = method.losses(batches[0])
        found.append((float(report["loss"].detach()), expected_length(report)))
        optimizer.zero_grad()
        report["loss"].backward()
        optimizer.step()
    assert 0 < found[-1][0] < found[0][0] < 2  # a doubt may add to it
    assert found[-1][1] > 1.25 * found[0][1]


@pytest.mark.parametrize("kind", list(METHODS))
def test_paced_drafts_learn_as_well(kind: str) -> None:
    method, batches = method_of(kind, parse_mix("kl")), lessons()
    method.weigh = Paced()
    torch.manual_seed(0)
    report = method.losses(batches[0])
    report["loss"].backward()
    assert all(weight.grad is None or weight.grad.isfinite().all() for weight in method.module.parameters())
    assert float(report["loss"].detach()) > 0
