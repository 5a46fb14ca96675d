"""The likeliest token of every row."""

from __future__ import annotations

from torch import Tensor


def likeliest(logits: Tensor) -> Tensor:
    """Where each row's largest number is, the first of equal ones. [..., V] -> [...] int64."""
    if logits.is_cuda:
        from draftwood.ops.cuda.choice import likeliest as launch

        return launch(logits)
    return logits.argmax(-1)
