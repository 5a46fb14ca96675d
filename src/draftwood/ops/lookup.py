"""Where the last tokens of a text stood before, found on the device: longest match first, most recent first."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwood.links import may_look


def suffix_lookup(
    history: Tensor, rows: Tensor, lengths: Tensor, nodes: int, longest: int, shortest: int
) -> tuple[Tensor, Tensor]:
    """The `nodes` tokens after the last earlier place of each text's end, -1 where there is none [B, nodes]; and how
    many tokens are alike there [B].

    history [any, L] holds the texts, `rows` [B] says which, `lengths` [B] how long they are.
    """
    if history.is_cuda:
        from draftwood.ops.cuda.lookup import suffix_lookup as on_cuda

        return on_cuda(history, rows, lengths, nodes, longest, shortest)
    texts = history[:, : int(lengths.max())] if may_look(lengths) else history
    return reference_lookup(texts[rows], lengths, nodes, longest, shortest)


def reference_lookup(texts: Tensor, lengths: Tensor, nodes: int, longest: int, shortest: int) -> tuple[Tensor, Tensor]:
    """The same in plain torch, on the texts themselves [B, L]."""
    index = torch.arange(texts.shape[1], device=texts.device)
    # equal[b, e] is how many tokens before place e are the last ones of the text, in order.
    same = torch.ones_like(texts, dtype=torch.bool)
    equal = torch.zeros_like(texts)
    for back in range(1, longest + 1):
        theirs = torch.where(index >= back, texts.roll(back, 1), -1)
        own = texts.gather(1, (lengths - back).clamp(min=0)[:, None])
        same = same & (theirs == own) & (lengths >= back)[:, None]
        equal = equal + same
    # Something must follow: the end of the text itself is no earlier place.
    found = (equal >= shortest) & (index < lengths[:, None])
    rank = torch.where(found, equal * texts.shape[1] + index, -1)
    best = rank.max(1).values
    place = (best % texts.shape[1])[:, None] + torch.arange(nodes, device=texts.device)
    there = (best[:, None] >= 0) & (place < lengths[:, None])
    tokens = torch.where(there, texts.gather(1, place.clamp(max=texts.shape[1] - 1)), -1)
    return tokens, torch.where(best >= 0, best // texts.shape[1], 0)
