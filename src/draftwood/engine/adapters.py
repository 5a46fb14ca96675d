"""LoRA adapters of an engine: merged when it is loaded, or taken in beside the model for requests to choose."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from draftwood.errors import InvalidRequest
from draftwood.model.checkpoint import Checkpoint
from draftwood.model.lora import MergedCheckpoint, read_adapter
from draftwood.model.lora_layers import check_by_request
from draftwood.model.runner import Adaptable, Model


def merged(checkpoint: Checkpoint, lora: str | Path | None) -> Checkpoint:
    """A model with an adapter in it, if one is given."""
    return checkpoint if lora is None else MergedCheckpoint(checkpoint, read_adapter(lora, checkpoint))


def take_adapters(model: Model, checkpoint: Checkpoint, paths: Mapping[str, str | Path]) -> None:
    """Let rows of forwards have one of these adapters, by its place among them."""
    if not paths:
        return
    if not isinstance(model, Adaptable) or model.device.type != "cpu":
        raise InvalidRequest(
            f"Adapters by request run on a CPU only, and this model runs on {model.device.type}: captured steps do not "
            "carry each row's adapter yet. Merge one when loading: --lora PATH."
        )
    found = [read_adapter(path, checkpoint, name) for name, path in paths.items()]
    check_by_request(found, checkpoint.config)
    model.adapt(found)
