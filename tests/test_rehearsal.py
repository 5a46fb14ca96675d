"""Rehearsals need a GPU to be of use; that they cannot do harm is shown here too."""

from __future__ import annotations

import pytest
import torch

from draftwood import rehearsal
from draftwood.config import EngineConfig
from tiny import tiny_config


def test_a_rehearsal_that_fails_is_not_heard_of() -> None:
    with rehearsal.rehearsing(tiny_config(), EngineConfig(device="cpu", weights="fp8")):
        reached = True
    assert reached


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none here")
def test_a_rehearsal_runs() -> None:
    rehearsal.rehearse(tiny_config(head_dim=64), EngineConfig(device="cuda"))
