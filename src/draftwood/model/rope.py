"""Rotary position embedding, in every kind that scales it to longer contexts.

All kinds come down to one vector of inverse frequencies and one scale, computed here once in float64; the
model rounds them to whatever it computes in.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import CheckpointError, DraftwoodError

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


def require(condition: bool, reason: str) -> None:
    """Refuse a model for a reason that reads well after "This model cannot be run:"."""
    if not condition:
        raise CheckpointError(f"This model cannot be run: {reason}.")


def shown(value: object) -> str:
    """A value of a file in an error's sentence: cut where it is long or deep."""
    return reprlib.repr(value)


@contextmanager
def refusing_malformed(what: str) -> Iterator[None]:
    """Whatever else a malformed file makes fail, beyond what is checked by name, is a `CheckpointError` too."""
    try:
        yield
    except DraftwoodError:
        raise
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RuntimeError, MemoryError) as error:
        raise CheckpointError(f"This model cannot be run: {what} is malformed ({error!r:.200}).") from error


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: the base `theta`, and how a context longer than the trained one is reached.

    Every kind only changes the inverse frequencies and one scale on cos and sin, so that is all a model
    asks for. `None` means "as the kind's paper has it"; `max_positions` is the length the model will be run
    to.
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    max_positions: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float | None = None  # yarn, longrope
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn
    short_factor: tuple[float, ...] = ()  # longrope, [head_dim / 2]
    long_factor: tuple[float, ...] = ()  # longrope, [head_dim / 2]
    sections: tuple[int, ...] = ()  # how many pairs turn by time, height and width; none: all by position

    def __post_init__(self) -> None:
        require(
            self.kind in ROPE_KINDS,
            f"rotary embedding kind {self.kind!r} is not supported; supported are {', '.join(ROPE_KINDS)}",
        )
        counts = self.sections
        require(
            not counts or (len(counts) == 3 and all(isinstance(n, int) and n >= 0 for n in counts)),
            f"its rotary sections are {shown(counts)} where three numbers of pairs are needed",
        )
        require(self.theta > 1, f"rope theta is {self.theta}, which must be above 1")
        require(self.factor > 0, f"rope scaling factor is {self.factor}, which must be positive")
        self._check_numbers()
        if self.kind in ("llama3", "yarn", "longrope"):
            require(
                self.original_max_positions > 0,
                f"{self.kind} rope needs original_max_position_embeddings, and it is missing",
            )
        if self.kind == "llama3":
            require(
                self.high_freq_factor > self.low_freq_factor > 0,
                f"llama3 rope needs 0 < low_freq_factor < high_freq_factor, not {self.low_freq_factor} and "
                f"{self.high_freq_factor}",
            )

    def _check_numbers(self) -> None:
        numbers = [self.theta, self.factor, self.low_freq_factor, self.high_freq_factor, self.beta_fast, self.beta_slow]
        optional = [self.attention_factor, self.mscale, self.mscale_all_dim]
        given = [*numbers, *(number for number in optional if number is not None)]
        require(all(map(math.isfinite, given)), f"its rope parameters are not all finite numbers: {shown(given)}")
        require(
            min(self.beta_fast, self.beta_slow) > 0,
            f"rope beta_fast and beta_slow are {self.beta_fast} and {self.beta_slow}, which must be positive",
        )
        require(
            min(self.mscale or 0, self.mscale_all_dim or 0) >= 0,
            f"rope mscale and mscale_all_dim are {self.mscale} and {self.mscale_all_dim}, which must not be negative",
        )
        require(
            all(math.isfinite(factor) and factor > 0 for factor in (*self.short_factor, *self.long_factor)),
            "rope short_factor and long_factor must be positive numbers",
        )

    def inverse_frequencies(self, head_dim: int) -> tuple[Tensor, float]:
        """The float64 [head_dim / 2] angles per position, and the scale to put on cos and sin."""
        pairs = sum(self.sections)
        require(
            not pairs or 2 * pairs == head_dim, f"its rotary sections have {pairs} pairs of a head's {head_dim // 2}"
        )
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
        plain = self.theta**-exponents
        return _SCALINGS[self.kind](self, plain)


def _unscaled(rope: RopeConfig, plain: Tensor) -> tuple[Tensor, float]:
    # "dynamic" lands here too: `ModelConfig` never runs it past the length where its base starts to change.
    return plain, 1.0


def _linear(rope: RopeConfig, plain: Tensor) -> tuple[Tensor, float]:
    return plain / rope.factor, 1.0


def _llama3(rope: RopeConfig, plain: Tensor) -> tuple[Tensor, float]:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended (Llama 3.1)."""
    turns = rope.original_max_positions * plain / (2 * math.pi)  # rotations within the trained context
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0, 1)
    return plain * kept + plain / rope.factor * (1 - kept), 1.0


def _yarn(rope: RopeConfig, plain: Tensor) -> tuple[Tensor, float]:
    """Interpolate slow dimensions, keep fast ones, ramp between (YaRN, arXiv:2309.00071)."""
    num_pairs = plain.numel()

    def pair_of(rotations: float) -> float:
        wavelength = rope.original_max_positions / (rotations * 2 * math.pi)
        return num_pairs * math.log(wavelength) / math.log(rope.theta)

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * num_pairs - 1)
    width = high - low or 0.001  # the reference's guard against a ramp of no width
    ramp = ((torch.arange(num_pairs, dtype=torch.float64) - low) / width).clamp(0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp), _yarn_attention(rope)


def _yarn_attention(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    log_factor = 0.1 * math.log(max(rope.factor, 1.0))
    if rope.mscale and rope.mscale_all_dim:
        return (log_factor * rope.mscale + 1) / (log_factor * rope.mscale_all_dim + 1)
    return log_factor + 1


def _longrope(rope: RopeConfig, plain: Tensor) -> tuple[Tensor, float]:
    """One stretch per pair (LongRoPE, arXiv:2402.13753), chosen once for the whole context.

    Switching from the short to the long factors as a text grows would rotate new keys unlike cached ones.
    """
    extended = rope.max_positions > rope.original_max_positions
    factors = torch.tensor(rope.long_factor if extended else rope.short_factor, dtype=torch.float64)
    require(
        factors.shape == plain.shape,
        f"longrope gives {factors.numel()} factors where the head has {plain.numel()} rotary pairs",
    )
    if rope.attention_factor is not None:
        return plain / factors, rope.attention_factor
    require(rope.original_max_positions > 1, "longrope needs original_max_position_embeddings above 1")
    stretch = math.log(max(rope.factor, 1.0)) / math.log(rope.original_max_positions)
    return plain / factors, math.sqrt(1 + stretch)


def planes_of(sections: tuple[int, ...]) -> Tensor:
    """Of each pair, whether time (0), height (1) or width (2) turns it. [pairs] int64."""
    return torch.tensor([plane for plane, count in enumerate(sections) for _ in range(count)], dtype=torch.int64)


_SCALINGS: dict[str, Callable[[RopeConfig, Tensor], tuple[Tensor, float]]] = {
    "default": _unscaled,
    "dynamic": _unscaled,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
