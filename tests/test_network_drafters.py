"""Drafters with networks on the target's features; `train/test_methods.py` says what they say of a text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from captured import GPU, CapturedHarness
from draftwood.drafters import features
from draftwood.engine.controller import FixedBudget
from draftwood.engine.sequence import Sequence as Answer
from draftwood.growers import Beam, BestFirst, Coupled, Hybrid, Levels, Paths, StaticShape, WithoutReplacement, chain
from draftwood.ops.reference import DenseAttention
from draftwood.request import SamplingParams
from draftwood.verifiers import LAWS
from no_sync import no_looking
from tiny import NETS, Ask, Harness, tiny_runner, with_net

KINDS = [kind for kind in NETS if kind != "kangaroo"]  # which has no features
GROWERS = {
    "chain": chain(3),
    "without-replacement": Levels((2, 2), WithoutReplacement()),
    "hybrid": Levels((2, 2), Hybrid()),
    "static": StaticShape(((0,), (1,), (0, 0), (0, 2), (1, 0), (0, 0, 0))),
    "paths": Paths(2, 3),
    "beam": Beam(7, 2, 3),
    "best-first": BestFirst(6, 2, 4),
}
ASKS = [
    Ask(prompt, SamplingParams(temperature=0.7, seed=i, max_tokens=9), arrives=i)
    for i, prompt in enumerate([(1, 2, 3), (5, 5), (7, 7, 8, 7, 7, 1, 2)])  # of one token networks have seen nothing
]


def told(answers: list[Answer]) -> list[tuple[list[int], int, int, int]]:
    return [(answer.tokens, answer.steps, answer.drafted, answer.accepted) for answer in answers]


@pytest.mark.skipif(GPU, reason="graphs are captured there: that shows it")
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (kind, name)
        for i, kind in enumerate(KINDS)
        for j, name in enumerate(GROWERS)
        if (i + j) % 3 == 0 or kind == "eagle3" or name == "best-first"  # the one whose forwards mix depths
    ],
)
def test_where_values_may_not_be_looked_at_nothing_does(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is drafted is the same, captured or not."""
    monkeypatch.setattr(features, "plan_attention", DenseAttention.plan)  # kernels for a CPU look
    drafter: Any = with_net(kind, GROWERS[name])(torch.float64)
    wanted = told(CapturedHarness(with_net(kind, GROWERS[name])(torch.float64), "match").run(ASKS))

    def strictly(call: Callable) -> Callable:
        def strict(*arguments: Any) -> Any:
            call(*arguments)  # as before a capture: makes what is made once
            with no_looking():
                return call(*arguments)

        return strict

    for method in ("propose", "ingest", "commit"):
        setattr(drafter, method, strictly(getattr(drafter, method)))
    assert told(CapturedHarness(drafter, "match").run(ASKS)) == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_no_more_rows_are_run_than_the_last_step_added(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where that is known. Blocks and masks come on top; heads run no rows."""
    rows: list[list[int]] = []
    drafter: Any = with_net(kind, Levels((1, 1, 1), Coupled()))(torch.float64)
    begin, stage = drafter.begin, drafter.stage

    def begun(view: Any) -> Any:
        rows.append([])
        return begin(view)

    def staged(*inputs: Any) -> Any:
        batch = stage(*inputs)
        rows[-1].append(len(batch.tokens))
        return batch

    monkeypatch.setattr(drafter, "begin", begun)
    monkeypatch.setattr(drafter, "stage", staged)
    harness = Harness(tiny_runner(), drafter, LAWS["match"]())
    harness.run([Ask((1, 2, 3), SamplingParams(temperature=0.7, seed=3, max_tokens=60))])
    gains = [len(event.token_ids) for event in harness.events]
    assert max(gains) > 1
    blocks = {"dflash": [4], "dspark": [4], "treeflash": [3], "medusa": [], "hydra": []}
    for before, asked in zip([1, *gains], rows[:-3], strict=False):  # in the last steps there is less room
        assert asked == blocks.get(kind, [before + 2] if kind == "peagle" else [before, 1, 1])


@pytest.mark.parametrize(("kind", "most"), [("eagle3", 2), ("dflash", 2), ("medusa", 0)])
def test_features_that_are_not_read_cost_nothing(kind: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty steps without a draft: what a network has to see is put together many at a time, or never."""
    target = tiny_runner(dtype=torch.float32)
    drafter: Any = with_net(kind, chain(2))(torch.float32)
    asked: list[int] = []
    digest = drafter.digest
    monkeypatch.setattr(drafter, "digest", lambda features: (asked.append(len(features)), digest(features))[1])
    harness = Harness(target, drafter, LAWS["match"]())
    harness.engine.controller = FixedBudget(0)
    (answer,) = harness.run([Ask((1, 2, 3), SamplingParams(max_tokens=30))])
    assert len(answer.tokens) == 33
    assert len(asked) <= most
    assert all(count >= 16 for count in asked)
