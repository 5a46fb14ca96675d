"""Folders of LoRA adapters as PEFT saves them: recognised, and described, before anything of a model is read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .files import read_object

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_MAX_CONFIG = 1 << 22


def is_adapter(path: str | Path) -> bool:
    """Whether a folder holds an adapter and no model."""
    folder = Path(path).expanduser()
    return (folder / CONFIG).is_file() and not (folder / "config.json").is_file()


def adapter_config(folder: Path) -> Mapping[str, Any]:
    """What PEFT says of it."""
    return read_object(folder / CONFIG, _MAX_CONFIG)


def described(path: str | Path) -> str:
    """What such a folder is and how it is used, in a sentence."""
    given = adapter_config(Path(path).expanduser())
    base = given.get("base_model_name_or_path")
    of = f" for {base}" if isinstance(base, str) and base else ""
    return (
        f"{path} is an adapter ({given.get('peft_type')!s:.40} of rank {given.get('r')!s:.20}{of}), not a model: merge "
        f"it into its base when loading, --model BASE --lora {path}, or let requests choose it, draftwood serve BASE "
        f"--adapters NAME={path}."
    )
