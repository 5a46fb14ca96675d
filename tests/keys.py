"""Keys for wanted numbers: splitmix64 backwards."""

from __future__ import annotations

from draftwood.rng import GOLDEN, MIX_A, MIX_B

MASK = (1 << 64) - 1


def key_for(u: float) -> int:
    """A key whose uniform number is in the middle of the cell of size 2^-52 that `u` lies in."""
    x = int(u * 2**52) << 12
    x = (_unshift(x, 31) * pow(MIX_B, -1, 1 << 64)) & MASK
    x = (_unshift(x, 27) * pow(MIX_A, -1, 1 << 64)) & MASK
    key = (_unshift(x, 30) - GOLDEN) & MASK
    return key - (1 << 64) if key >> 63 else key


def _unshift(x: int, bits: int) -> int:
    """The y with y ^ (y >> bits) == x."""
    y = x
    for _ in range(64 // bits + 1):
        y = x ^ (y >> bits)
    return y
