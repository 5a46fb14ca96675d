"""Randomness as a pure function of its key, identical on every device.

A key is one 64-bit integer a row, folded from (request seed, purpose, position, …) by `derive`. Nothing here has
state, so batching, chunking and preemption cannot change a draw. What keeps a law exact is that no key is ever
used for two draws: whatever a round may draw again later must carry the round in its key, and the committed
length does, because every round commits at least one token.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
MIX_A = 0xBF58476D1CE4E5B9
MIX_B = 0x94D049BB133111EB


class Purpose(IntEnum):
    """What a draw is for; part of its key, so that no two purposes share noise."""

    TARGET = 1  # the target's own token at a position: the same in every round, the heart of `Match`
    ACCEPT = 2
    RESIDUAL = 3
    DRAFT = 4
    SAMPLE = 5  # the seed of the i-th answer of a request with n > 1


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: torch has no unsigned 64-bit arithmetic, and `>>` copies the sign."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """The splitmix64 finaliser: a bijection of 64-bit integers that spreads every bit over all others."""
    x = (x ^ _shift_right(x, 30)).mul_(_signed(MIX_A))
    x = (x ^ _shift_right(x, 27)).mul_(_signed(MIX_B))
    return x ^ _shift_right(x, 31)


def derive(keys: Tensor, *parts: int | Tensor) -> Tensor:
    """Fold `parts` (integers or [B] tensors) into `keys` [B], one after the other; order matters."""
    for part in parts:
        keys = _mix((keys ^ part) * _signed(GOLDEN) + _signed(MIX_A))
    return keys


def fold_seed(seed: int, *parts: int) -> int:
    """`derive` for one plain integer, as a signed 64-bit value."""
    return int(derive(torch.tensor([_signed(seed)]), *parts).item())


def _unit_interval(bits: Tensor) -> Tensor:
    """52 random bits in the middle of their cells: strictly inside (0, 1) in float64."""
    return _shift_right(bits, 12).double().add_(0.5).mul_(2.0**-52)


def uniforms(keys: Tensor) -> Tensor:
    """One number in (0, 1) for each key. [B] -> [B] float64."""
    return _unit_interval(_mix(keys + _signed(GOLDEN)))


def token_uniforms(keys: Tensor, num_tokens: int) -> Tensor:
    """A number in (0, 1) for each key and token. [B] -> [B, num_tokens] float64."""
    counters = torch.arange(1, num_tokens + 1, device=keys.device) * _signed(GOLDEN)
    return _unit_interval(_mix(keys[:, None] + counters))


class KeyedRng:
    """The production source of randomness. Tests put an enumerator of all outcomes in its place."""

    def pick(self, weights: Tensor, keys: Tensor) -> Tensor:
        """An index drawn in proportion to `weights`, which need not sum to one. [B, V], [B] -> [B] int64.

        One uniform number on the cumulated weights, in float64: with float32 the rounding of 150,000 borders would
        show in the law.
        """
        borders = weights.cumsum(-1, dtype=torch.float64)
        total = borders[:, -1]
        # Rounding must not reach the end: behind it there is nobody.
        aim = torch.minimum(uniforms(keys) * total, torch.nextafter(total, torch.zeros_like(total)))
        return torch.searchsorted(borders, aim[:, None], right=True)[:, 0].clamp(max=weights.shape[-1] - 1)

    def race(self, weights: Tensor, keys: Tensor, winners: int = 1) -> Tensor:
        """The first `winners` of an exponential race: E_i / w_i, the smallest first. [B, V], [B] -> [B, winners].

        The first is i with probability w_i / sum(w), the others follow as if drawn without replacement. Dearer than
        `pick`, but two races with the same key and similar weights mostly end alike.
        """
        best, choice = weights.max(-1)
        if winners == 1 and bool((best == weights.sum(-1)).all()):
            return choice[:, None]  # one possible outcome needs no noise
        speed = weights / token_uniforms(keys, weights.shape[-1]).log_().neg_()
        return speed.argmax(-1, keepdim=True) if winners == 1 else speed.topk(winners, -1).indices
