"""Rehearsals need a GPU to be of use; that they cannot do harm is shown here too."""

from __future__ import annotations

import pytest
import torch

from captured import CapturedHarness
from draftwood import warmup
from draftwood.cache.batch_state import NUM_FACTS
from draftwood.config import EngineConfig
from draftwood.drafters.lookup import LookupDrafter
from draftwood.drafters.ngram import NgramDrafter
from draftwood.drafters.none import NoDrafter
from draftwood.drafting import Drafter
from draftwood.engine.captured import READINGS, CapturedStep
from draftwood.growers import Beam
from draftwood.request import SamplingParams
from tiny import Ask, generated, tiny_config

GPU = torch.device("cuda")


def test_a_rehearsal_that_fails_is_not_heard_of() -> None:
    with warmup.warming_up(tiny_config(), EngineConfig(device="cpu", weights="fp8"), "none"):
        reached = True
    assert reached


@pytest.mark.parametrize(("drafter", "sizes"), [(NoDrafter(), {0}), (NgramDrafter(nodes=3), {0, 3})])
def test_what_is_rehearsed(drafter, sizes: set[int]) -> None:
    steps = CapturedHarness(drafter, "match").runner
    steps.captures = False
    with torch.inference_mode():
        made = [part() for part in steps.warm_ups()]
    outcomes = [step.made.output.outcome for step in made if isinstance(step, CapturedStep)]
    ran = {(each.shape[0], each.shape[1] - NUM_FACTS) for each in outcomes}
    assert ran >= {(1, depth) for depth in sizes} | {(steps.state.capacity, 0)}
    frames = {(frame.rows, frame.pages) for frame in steps._frames.values()}
    assert frames >= {(rows, steps.state.num_pages) for rows in READINGS}
    assert steps.ready == [], "what was made of nothing is not kept"


def test_what_stands_in_for_drafters_with_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineConfig, "torch_device", lambda self: GPU)
    config = EngineConfig(dtype="bfloat16")

    def stand_in(drafter: str | Drafter, tree: str | None = None) -> Drafter:
        return warmup._known_already(drafter, tree, 100, config)

    lookup = stand_in("ngram:nodes=7")
    assert isinstance(lookup, LookupDrafter)
    assert lookup.max_nodes == 7
    assert stand_in("eagle3").max_nodes == 63, "a tree as large as a network grows"
    assert not stand_in("eagle3").law.chain
    assert stand_in("model:smollm2").law.chain
    assert stand_in("eagle3", "chain:depth=3").max_nodes == 3
    assert isinstance(stand_in(NgramDrafter()), NoDrafter)


def test_the_stand_in_grows_trees_that_cost_no_token() -> None:
    drafter = warmup._Undecided(Beam(5, 2, 3), tiny_config().vocab_size, torch.float32)
    harness = CapturedHarness(drafter, "match")
    params = [SamplingParams(temperature=0.8, max_tokens=8, seed=number) for number in range(3)]
    asked = [Ask((1 + number, 2, 3), own) for number, own in enumerate(params)]
    assert generated(harness.run(asked)) == generated(CapturedHarness(NoDrafter(), "match").run(asked))
    assert not harness.eager


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none here")
@pytest.mark.parametrize("drafter", ["none", "ngram", "eagle3"])
def test_a_rehearsal_runs(drafter: str) -> None:
    warmup.warm_up(tiny_config(head_dim=64), EngineConfig(device="cuda"), drafter, None)
