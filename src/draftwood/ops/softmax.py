"""From logits to a distribution at a temperature."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwood.links import may_look


def tempered(logits: Tensor, temperature: Tensor) -> Tensor:
    """softmax(logits / temperature), and all on the likeliest token where the temperature is 0.

    [M, V], [M] -> [M, V], float32 or wider.
    """
    if logits.is_cuda and logits.dtype == torch.float32:
        from draftwood.ops.cuda.softmax import tempered as launch

        return launch(logits, temperature)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    temperature = temperature.to(logits.dtype)[:, None]
    greedy = temperature == 0
    p = torch.softmax(logits / torch.where(greedy, 1, temperature), -1)
    if not may_look(greedy) or bool(greedy.any()):
        p = torch.where(greedy, one_hot(logits.argmax(-1), p), p)
    return p


def one_hot(tokens: Tensor, like: Tensor) -> Tensor:
    """All mass on one token a row. [M] -> [M, V]."""
    return torch.zeros_like(like).scatter_(1, tokens[:, None], 1.0)
