"""Randomness as a pure function of its key, identical on every device.

A key is one 64-bit integer a row, folded from (request seed, purpose, position, …) by `derive`. Nothing here has
state, so batching, chunking and preemption cannot change a draw. What keeps a law exact is that no key is ever
used for two draws. Every key therefore starts with the seed and a purpose, which says what the next part means: a
position for TARGET (`target_keys`), the committed length for ROUND (`round_keys`), an answer for SAMPLE. What a later
round may draw again carries the length, which grows because every round commits at least one token.

Plain torch says what everything must be; C on a CPU and Triton on CUDA compute the same integers in one go.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

import torch
from torch import Tensor

from draftwood.ops.native import Kernels, kernels

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
    ROUND = 6  # what one round draws: the committed length follows, then ACCEPT, RESIDUAL or DRAFT


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
    if keys.is_cuda:
        from draftwood.ops.cuda.random import derive as launch

        return launch(keys, *parts)
    library = kernels()
    if library is None or not _alike(keys, *parts):
        return derive_reference(keys, *parts)
    for part in parts:
        keys = _fold(library, keys, part)
    return keys


def _alike(keys: Tensor, *parts: int | Tensor) -> bool:
    """Whether all of it is 64-bit integers of one shape."""
    others = [part for part in parts if isinstance(part, Tensor)]
    return keys.dtype == torch.int64 and all(x.shape == keys.shape and x.dtype == torch.int64 for x in others)


def _fold(library: Kernels, keys: Tensor, part: int | Tensor) -> Tensor:
    keys, tensor = keys.contiguous(), part.contiguous() if isinstance(part, Tensor) else None
    out = torch.empty_like(keys)
    address, value = (0, _signed(int(part))) if tensor is None else (tensor.data_ptr(), 0)
    library.dw_derive(keys.data_ptr(), address, value, keys.numel(), out.data_ptr())
    return out


def derive_reference(keys: Tensor, *parts: int | Tensor) -> Tensor:
    """What `derive` must be."""
    for part in parts:
        keys = _mix((keys ^ part) * _signed(GOLDEN) + _signed(MIX_A))
    return keys


def target_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """The keys of the target's own tokens at `positions`, of the same shape as `seeds`."""
    return derive(seeds, Purpose.TARGET, positions)


def round_keys(seeds: Tensor, lengths: Tensor, purpose: Purpose) -> Tensor:
    """The keys of what rounds draw for `purpose` after `lengths` committed tokens. [B], [B] -> [B]."""
    return derive(seeds, Purpose.ROUND, lengths, purpose)


def fold_seed(seed: int, *parts: int) -> int:
    """`derive` for one plain integer, as a signed 64-bit value."""
    return int(derive(torch.tensor([_signed(seed)]), *parts).item())


def _unit_interval(bits: Tensor) -> Tensor:
    """52 random bits in the middle of their cells: strictly inside (0, 1) in float64."""
    return _shift_right(bits, 12).double().add_(0.5).mul_(2.0**-52)


def uniforms(keys: Tensor) -> Tensor:
    """One number in (0, 1) for each key. [B] -> [B] float64."""
    if keys.is_cuda:
        from draftwood.ops.cuda.random import uniforms as launch

        return launch(keys)
    library = kernels()
    if library is None:
        return uniforms_reference(keys)
    keys = keys.contiguous()
    out = torch.empty_like(keys, dtype=torch.float64)
    library.dw_uniforms(keys.data_ptr(), keys.numel(), out.data_ptr())
    return out


def uniforms_reference(keys: Tensor) -> Tensor:
    """What `uniforms` must be."""
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
        if weights.is_cuda and _real(weights):
            from draftwood.ops.cuda.random import pick as launch

            return launch(weights, keys)
        library = kernels()
        if library is None or weights.is_cuda or not _real(weights):
            return pick_reference(weights, keys)
        out = torch.empty_like(keys, memory_format=torch.contiguous_format)
        _draw(library.dw_pick, weights, keys, out)
        return out

    def race(self, weights: Tensor, keys: Tensor, winners: int = 1) -> Tensor:
        """The first `winners` of an exponential race: E_i / w_i, the smallest first. [B, V], [B] -> [B, winners].

        The first is i with probability w_i / sum(w), the others follow as if drawn without replacement. Dearer than
        `pick`, but two races with the same key and similar weights mostly end alike.
        """
        if weights.is_cuda and _real(weights):
            from draftwood.ops.cuda.random import race as launch

            return launch(weights, keys, winners)
        library = kernels()
        if library is None or weights.is_cuda or winners > 1 or not _real(weights):
            return race_reference(weights, keys, winners)
        out = torch.empty_like(keys, memory_format=torch.contiguous_format)
        _draw(library.dw_race, weights, keys, out)
        return out[:, None]


def _real(weights: Tensor) -> bool:
    return weights.dtype in (torch.float32, torch.float64)


def _draw(kernel: Callable[..., None], weights: Tensor, keys: Tensor, out: Tensor) -> None:
    weights, keys = weights if weights.stride(-1) == 1 else weights.contiguous(), keys.contiguous()
    wide = int(weights.dtype == torch.float64)
    kernel(weights.data_ptr(), wide, *weights.shape, weights.stride(0), keys.data_ptr(), out.data_ptr())


def pick_reference(weights: Tensor, keys: Tensor) -> Tensor:
    """What `KeyedRng.pick` must be."""
    borders = weights.cumsum(-1, dtype=torch.float64)
    total = borders[:, -1]
    # Rounding must not reach the end: there is nothing behind it.
    aim = torch.minimum(uniforms_reference(keys) * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(borders, aim[:, None], right=True)[:, 0].clamp(max=weights.shape[-1] - 1)


def race_reference(weights: Tensor, keys: Tensor, winners: int = 1) -> Tensor:
    """What `KeyedRng.race` must be."""
    speed = weights / token_uniforms(keys, weights.shape[-1]).log_().neg_()
    return speed.argmax(-1, keepdim=True) if winners == 1 else speed.topk(winners, -1).indices
