"""What the GPU decoder can compute of what families say; apart from `cuda.py`, which needs Triton to be imported."""

from __future__ import annotations

from draftwood.model.config import ModelConfig


def refuses(config: ModelConfig) -> str | None:
    """What the kernels for a GPU cannot compute of a model, if there is something."""
    return None if config.is_plain else "what this family does beyond a plain decoder"
