"""Recurrent mixers as records, for `spec.py`: what a layer has in attention's place, or beside it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from .rope import require


class Gating(StrEnum):
    """How a Mamba-2 mixer's result meets its gate."""

    PLAIN = "times silu(gate)"
    BEFORE_NORM = "times silu(gate), then normed"
    AFTER_NORM = "normed, then times silu(gate)"


@dataclass(frozen=True, slots=True)
class Mamba2Spec:
    """A state space mixer: S ← exp(-exp(A) Δ) S + Δ x Bᵀ, y = S C + D x, behind a short convolution of x, B and C."""

    heads: int
    head_dim: int
    groups: int  # of heads that share B and C
    state: int
    kernel: int
    conv_bias: bool = True
    bias: bool = False
    output_bias: bool = False
    least_step: float = 0.0  # Δ
    most_step: float = math.inf
    gating: Gating = Gating.BEFORE_NORM
    eps: float = 1e-5
    input_scales: tuple[float, ...] = (1.0,) * 5  # of gate, x, B, C and Δ
    output_scale: float = 1.0

    def __post_init__(self) -> None:
        sizes = (self.heads, self.head_dim, self.groups, self.state)
        _require_sizes("Mamba-2", sizes, self.kernel)
        require(self.heads % self.groups == 0, f"{self.heads} heads cannot share {self.groups} groups evenly")
        require(len(self.input_scales) == _INPUTS, f"{len(self.input_scales)} multipliers are given for 5 inputs")

    @property
    def width(self) -> int:
        """Numbers of a row that the output projection reads."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Numbers of a row that the convolution reads."""
        return self.width + 2 * self.groups * self.state

    @property
    def projected(self) -> int:
        """Numbers of a row that the input projection makes: gate, x, B, C, Δ."""
        return self.width + self.channels + self.heads

    @property
    def memory(self) -> tuple[int, int, int]:
        """Heads, numbers of a value, numbers of a key."""
        return self.heads, self.head_dim, self.state


@dataclass(frozen=True, slots=True)
class MambaSpec:
    """A selective scan: S ← exp(A Δ) S + Δ x Bᵀ, each number with a decay of its own, y = S C + D x; Δ, B and C are
    made of x behind a short convolution.
    """

    width: int
    state: int
    kernel: int
    rank: int  # of Δ
    conv_bias: bool = True
    bias: bool = False
    norm_eps: float | None = None  # of norms of what makes Δ, of B and of C; None: they are not normed
    normed_by_weights: bool = False
    output_scale: float = 1.0

    def __post_init__(self) -> None:
        _require_sizes("Mamba", (self.width, self.state, self.rank), self.kernel)

    @property
    def output_bias(self) -> bool:
        """Of the output projection."""
        return self.bias

    @property
    def channels(self) -> int:
        """Numbers of a row that the convolution reads."""
        return self.width

    @property
    def projected(self) -> int:
        """Numbers of a row that the input projection makes: x and the gate."""
        return 2 * self.width

    @property
    def memory(self) -> tuple[int, int, int]:
        """Heads of one number, one, numbers of a key."""
        return self.width, 1, self.state


@dataclass(frozen=True, slots=True)
class GatedDeltaSpec:
    """A gated delta net: S ← a S, then S ← S + β (v - S k) kᵀ, y = S q, behind a short convolution of q, k and v."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    eps: float
    conv_bias: bool = False
    output_bias: bool = False
    output_scale: float = 1.0

    def __post_init__(self) -> None:
        _require_sizes("delta", (self.key_heads, self.value_heads, self.key_dim, self.value_dim), self.kernel)
        require(
            self.value_heads % self.key_heads == 0,
            f"{self.value_heads} value heads cannot share {self.key_heads} key heads evenly",
        )

    @property
    def width(self) -> int:
        """Numbers of a row that the output projection reads."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Numbers of a row that the convolution reads."""
        return 2 * self.key_heads * self.key_dim + self.width

    @property
    def projected(self) -> int:
        """Numbers of a row that the input projection makes: q, k, v, gate, β, a."""
        return self.channels + self.width + 2 * self.value_heads

    @property
    def memory(self) -> tuple[int, int, int]:
        """Heads, numbers of a value, numbers of a key."""
        return self.value_heads, self.value_dim, self.key_dim


@dataclass(frozen=True, slots=True)
class ShortConvSpec:
    """A convolution over the last few tokens, between two gates."""

    width: int
    kernel: int
    bias: bool = False
    output_scale: float = 1.0

    def __post_init__(self) -> None:
        _require_sizes("convolution", (self.width,), self.kernel)

    @property
    def conv_bias(self) -> bool:
        """Of the convolution."""
        return self.bias

    @property
    def output_bias(self) -> bool:
        """Of the output projection."""
        return self.bias

    @property
    def channels(self) -> int:
        """Numbers of a row that the convolution reads."""
        return self.width

    @property
    def projected(self) -> int:
        """Numbers of a row that the input projection makes: gate before, gate behind, x."""
        return 3 * self.width

    @property
    def memory(self) -> None:
        """The last tokens are all there is."""
        return


RecurrentSpec = MambaSpec | Mamba2Spec | GatedDeltaSpec | ShortConvSpec
_INPUTS = 5
_LARGEST = 1 << 20  # than which no published model has a larger part


def _require_sizes(what: str, sizes: tuple[int, ...], kernel: int) -> None:
    for size in sizes:
        require(0 < size <= _LARGEST, f"its {what} layers have a part of size {size}; 1 to {_LARGEST} are supported")
    require(1 < kernel <= _LONGEST_KERNEL, f"its convolutions are {kernel} long; 2 to {_LONGEST_KERNEL} are supported")


_LONGEST_KERNEL = 64
