"""Attention as training needs it: whole texts under masks, with gradients.

Shapes: B rows · T places · H heads · K key heads · D head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwood.train.data import TextBatch


def causal_mask(batch: TextBatch) -> Tensor:
    """Which places of its own text each place sees: itself and those before it. [B, T, T] bool."""
    same = batch.text[:, :, None] == batch.text[:, None, :]
    return same & torch.ones_like(same[0]).tril()


class Causal:
    """Plain causal attention within texts."""

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask  # [B, T, T]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[B, T, H, D], [B, T, K, D] x 2 -> [B, T, H * D]."""
        return _attend(query, key, value, self.mask)


class Unrolled:
    """Training-time test (EAGLE-3): in step 0 a row sees the rows before it; in step j also its own earlier steps.

    So row i of step j sees what it would see while drafting: the target's features up to i, then its own guesses.
    """

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask  # [B, T, T]
        self._known: dict[int, list[tuple[Tensor, Tensor]]] = {}  # layer -> keys and values of each step

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[B, T, H, D], [B, T, K, D] x 2 -> [B, T, H * D]."""
        steps = self._known.setdefault(layer, [])
        steps.append((key, value))
        if len(steps) == 1:
            return _attend(query, key, value, self.mask)
        group = query.shape[2] // key.shape[2]
        spread = [(k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)) for k, v in steps]
        scale = query.shape[-1] ** -0.5
        first = torch.einsum("bthd,bshd->bhts", query, spread[0][0]).float() * scale
        first = first.masked_fill(~self.mask[:, None], float("-inf"))
        own = [(query * k).sum(-1).transpose(1, 2).float()[..., None] * scale for k, _ in spread[1:]]  # [B, H, T, 1]
        weights = torch.cat([first, *own], -1).softmax(-1).to(query.dtype)
        places = first.shape[-1]
        mixed = torch.einsum("bhts,bshd->bthd", weights[..., :places], spread[0][1])
        for j, (_, v) in enumerate(spread[1:]):
            mixed = mixed + weights[..., places + j].transpose(1, 2)[..., None] * v
        return mixed.flatten(2)


class Blocks:
    """Blocks behind anchors: their rows see the target's features before the anchor, and each other."""

    def __init__(self, context: list[tuple[Tensor, Tensor]], before: Tensor, size: int) -> None:
        """Keys and values [B, T, K, D] of every layer; `before` [B, A, T] bool what each anchor's block sees."""
        self.context, self.size = context, size
        anchors = before.shape[1]
        together = torch.eye(anchors, dtype=torch.bool, device=before.device)
        together = together.repeat_interleave(size, 0).repeat_interleave(size, 1)
        rows = before.repeat_interleave(size, 1)  # [B, A * size, T]
        self.mask = torch.cat([rows, together.expand(len(rows), -1, -1)], -1)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[B, A * size, H, D], [B, A * size, K, D] x 2 -> [B, A * size, H * D]."""
        keys, values = self.context[layer]
        return _attend(query, torch.cat([keys, key], 1), torch.cat([values, value], 1), self.mask)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """[B, Q, H, D], [B, S, K, D] x 2, [B, Q, S] -> [B, Q, H * D]; rows that see nothing give zeros.

    Keys are spread over their groups here: with masks, torch's own groups would cost whole matrices of scores.
    """
    group = query.shape[2] // key.shape[2]
    spread = (part.repeat_interleave(group, 2).transpose(1, 2) for part in (key, value))
    mixed = F.scaled_dot_product_attention(query.transpose(1, 2), *spread, attn_mask=mask[:, None])
    mixed = torch.where(mask.any(-1)[:, None, :, None], mixed, 0.0)
    return mixed.transpose(1, 2).flatten(2)
