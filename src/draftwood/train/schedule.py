"""How large the steps of training are at each point of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from draftwood.errors import InvalidRequest


@dataclass(frozen=True)
class Schedule:
    """A linear warm-up, then half a cosine down, or a stable rate with a linear descent at the end (WSD)."""

    kind: Literal["cosine", "wsd", "constant"] = "wsd"
    warmup: float = 0.04  # share of all steps
    decay: float = 0.2  # share of all steps, of WSD only
    floor: float = 0.0  # where the descent ends, as a share of the full rate

    def __post_init__(self) -> None:
        if self.kind not in ("cosine", "wsd", "constant"):
            raise InvalidRequest(f"A schedule is cosine, wsd or constant, not {self.kind!r}.")
        if not (self.warmup >= 0 and self.decay >= 0 and self.warmup + self.decay <= 1 and 0 <= self.floor <= 1):
            raise InvalidRequest(
                "Warm-up and decay are shares of a run, at most 1 together; the floor is one of the rate."
            )

    def lr_at(self, step: int, total: int) -> float:
        """The factor of the learning rate in step 0 ≤ `step` < `total`; never 0 but by a floor of 0 after the last."""
        warm = round(self.warmup * total)
        if step < warm:
            return (step + 1) / warm
        if self.kind == "constant":
            return 1.0
        start = warm if self.kind == "cosine" else max(warm, total - round(self.decay * total))
        if step < start:
            return 1.0
        done = min(1.0, (step - start) / max(1, total - start))
        left = (1 + math.cos(math.pi * done)) / 2 if self.kind == "cosine" else 1 - done
        return self.floor + (1 - self.floor) * left
