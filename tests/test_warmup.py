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
from draftwood.engine.graph_runner import READINGS
from draftwood.protocols import StepMode
from tiny import tiny_config

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
        _, *others = [part() for part in steps.warm_ups(StepMode(greedy=True))]
    outcomes = [each.made.output.outcome for each in others]
    assert {(each.shape[0], each.shape[1] - NUM_FACTS) for each in outcomes} == {(1, depth) for depth in sizes}
    assert [(frame.rows, frame.pages) for frame in steps._frames.values()] == [(READINGS[0], steps.state.num_pages)]
    assert steps.ready == [], "what was made of nothing is not kept"


def test_drafters_with_weights_are_not_rehearsed() -> None:
    lookup = warmup._known_already("ngram:nodes=7", GPU)
    assert isinstance(lookup, LookupDrafter)
    assert lookup.max_nodes == 7
    for other in ("model:smollm2", "eagle3", NgramDrafter()):
        assert isinstance(warmup._known_already(other, GPU), NoDrafter)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none here")
@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_a_rehearsal_runs(drafter: str) -> None:
    warmup.warm_up(tiny_config(head_dim=64), EngineConfig(device="cuda"), drafter)
