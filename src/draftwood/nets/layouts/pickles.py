"""The only place where a pickle is read: drafters of the Medusa and Hydra kind are published as nothing else.

It is reached only by `open_drafter(..., allow_pickle=True)`, and torch is told to build tensors and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from draftwood.errors import CheckpointError


def read_pickle(path: Path) -> Mapping[str, Tensor]:
    """The tensors of a torch state dict by name."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can fail in any way
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"{path} is damaged or holds more than tensors ({reason}); it is not read.") from error
    named = isinstance(content, Mapping) and all(isinstance(value, Tensor) for value in content.values())
    if not named or not all(isinstance(key, str) for key in content):
        raise CheckpointError(f"{path} is no table of tensors by name, so it is not read.")
    return content
