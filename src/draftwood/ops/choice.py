"""The likeliest tokens of every row."""

from __future__ import annotations

from torch import Tensor


def likeliest(logits: Tensor) -> Tensor:
    """Where each row's largest number is, the first of equal ones. [..., V] -> [...] int64."""
    return ranked(logits, 1).squeeze(-1)


def ranked(logits: Tensor, count: int, tokens: Tensor | None = None) -> Tensor:
    """Where each row's `count` largest numbers are, largest first; or, given `tokens` [V], which of them stand there.

    [..., V] -> [..., count] int64. The largest is the first of equal ones.
    """
    if logits.is_cuda:
        from draftwood.ops.cuda import choice

        if 0 < count <= choice.MOST:
            return choice.ranked(logits, count, tokens)
    # One alone is found several times faster.
    place = logits.argmax(-1, keepdim=True) if count == 1 else logits.topk(count, -1).indices
    return place if tokens is None else tokens[place]
