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
from draftwood.engine.graph_runner import READINGS, CapturedStep
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
        made = [part() for part in steps.warm_ups()]
    outcomes = [step.made.output.outcome for step in made if isinstance(step, CapturedStep)]
    ran = {(each.shape[0], each.shape[1] - NUM_FACTS) for each in outcomes}
    assert ran >= {(1, depth) for depth in sizes} | {(steps.state.capacity, 0)}
    frames = {(frame.rows, frame.pages) for frame in steps._frames.values()}
    assert frames >= {(rows, steps.state.num_pages) for rows in READINGS}
    assert steps.ready == [], "what was made of nothing is not kept"


def test_a_lookup_stands_in_for_drafters_with_weights() -> None:
    lookup = warmup._known_already("ngram:nodes=7", GPU)
    assert isinstance(lookup, LookupDrafter)
    assert lookup.max_nodes == 7
    for other in ("model:smollm2", "eagle3"):
        stands_in = warmup._known_already(other, GPU)
        assert isinstance(stands_in, LookupDrafter), "trees as large as those of a network"
        assert stands_in.max_nodes == 63
    assert isinstance(warmup._known_already(NgramDrafter(), GPU), NoDrafter)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none here")
@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_a_rehearsal_runs(drafter: str) -> None:
    warmup.warm_up(tiny_config(head_dim=64), EngineConfig(device="cuda"), drafter)
