"""Adapters by request where they cannot be."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from draftwood.engine.adapters import take_adapters
from draftwood.errors import InvalidRequest
from tiny import TinyCheckpoint, tiny_config


def test_adapters_by_request_are_refused_where_steps_do_not_carry_them() -> None:
    model, checkpoint = SimpleNamespace(device=torch.device("cuda")), TinyCheckpoint(tiny_config())
    take_adapters(model, checkpoint, {})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"on a CPU only, and this model runs on cuda.*--lora PATH"):
        take_adapters(model, checkpoint, {"poet": "nowhere"})  # type: ignore[arg-type]
