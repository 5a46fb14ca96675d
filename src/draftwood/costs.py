"""What a step costs on this machine: t(rows, context, batch), measured by `draftwood calibrate`, else assumed."""

from __future__ import annotations

import bisect
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from draftwood.errors import InvalidRequest

STEADY = 1.25  # two undisturbed measurements of the same step differ by less
NOISE = 1.5  # times may contradict each other by so much before a table is implausible


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a whole decode step of one sequence by rows and context, and what each further sequence adds: itself,
    and where keys are what takes time, each of its tokens beyond the shortest context.

    Between measured points times are interpolated, beyond the last ones extrapolated. Within a context they never
    fall with the rows: a step that is slower than one with more work was disturbed, since nothing makes steps faster.
    """

    rows: tuple[int, ...]  # ascending, from 1
    contexts: tuple[int, ...]  # ascending
    seconds: tuple[tuple[float, ...], ...]  # [contexts][rows]
    per_sequence: float
    per_token: float = 0.0
    assumed: bool = False  # by what others have measured, in plain steps: good to compare, not to subtract
    spread: float | None = None  # worst ratio between a size's two best measurements; None: not recorded

    def __post_init__(self) -> None:
        sized = len(self.seconds) == len(self.contexts) and all(len(line) == len(self.rows) for line in self.seconds)
        if not sized or len(self.rows) < 2 or not self.contexts:
            raise InvalidRequest("A cost table needs one line a context, with one time for each number of rows.")
        if list(self.rows) != sorted(set(self.rows)) or list(self.contexts) != sorted(set(self.contexts)):
            raise InvalidRequest("The rows and contexts of a cost table must ascend.")
        if any(time <= 0 for line in self.seconds for time in line):
            raise InvalidRequest("The times of a cost table must be positive.")

    def at(self, rows: int, context: float = 0, batch: int = 1) -> float:
        """Seconds of a step with so many rows in all, over `batch` sequences of `context` tokens each."""
        by_context = [_interpolate(self.rows, line, rows) for line in self._rising]
        own = _interpolate(self.contexts, by_context, context) if len(self.contexts) > 1 else by_context[0]
        beyond = max(0.0, context - min(self.contexts))
        return max(own, min(by_context)) + (batch - 1) * (self.per_sequence + beyond * self.per_token)

    @cached_property
    def _rising(self) -> list[list[float]]:
        return [list(itertools.accumulate(reversed(line), min))[::-1] for line in self.seconds]

    @property
    def doubt(self) -> str | None:
        """Why the table should not be used, or None: it was measured on a busy machine, or contradicts itself."""
        if self.spread is not None and self.spread > STEADY:
            return f"two measurements of the same step differed {self.spread:.1f}-fold"
        return next(filter(None, (self._contradiction(line) for line in self.seconds)), None)

    def _contradiction(self, line: Sequence[float]) -> str | None:
        """Times that cannot both be right: rows never make a step faster, and could always run in several steps."""
        points = list(zip(self.rows, line, strict=True))
        for (few, short), (many, long) in itertools.combinations(points, 2):
            most = -(-many // few) * short
            if short > NOISE * long or long > NOISE * most:
                return f"{few} rows took {1e3 * short:.1f} ms and {many} rows {1e3 * long:.1f}"
        return None

    def slope(self, rows: int, context: float = 0, batch: int = 1, over: int = 8) -> float:
        """Seconds that one more row costs, on average over the next few."""
        return (self.at(rows + over, context, batch) - self.at(rows, context, batch)) / over

    def scaled(self, factor: float) -> StepCosts:
        """The same on a machine that takes so many times as long."""
        lines = tuple(tuple(factor * time for time in line) for line in self.seconds)
        others = factor * self.per_sequence, factor * self.per_token
        return replace(self, seconds=lines, per_sequence=others[0], per_token=others[1])

    def of_experts(self, count: int, active: int, share: float) -> StepCosts:
        """The same for a mixture, in plain steps: every row goes to `active` of `count` experts, which are such a
        `share` of the weights that one row reads. Rows that go to other experts read those as well.
        """
        distinct = [count / active * (1 - (1 - active / count) ** rows) for rows in self.rows]
        lines = (
            tuple(time + share * line[0] * (more - 1) for time, more in zip(line, distinct, strict=True))
            for line in self.seconds
        )
        return replace(self, seconds=tuple(lines))

    def record(self) -> dict[str, Any]:
        """For JSON: what was measured."""
        return {name: value for name, value in asdict(self).items() if name != "assumed"}

    def save(self, path: Path) -> None:
        """As JSON, in one step."""
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".tmp")
        draft.write_text(json.dumps(self.record()))
        draft.replace(path)

    @classmethod
    def load(cls, path: Path) -> StepCosts | None:
        """None where there is no table, or none that can be read."""
        try:
            raw = json.loads(path.read_text())
            lines = tuple(tuple(float(time) for time in line) for line in raw["seconds"])
            others = float(raw["per_sequence"]), float(raw.get("per_token", 0.0))
            spread = raw.get("spread")  # older tables have none
            steadiness = None if spread is None else float(spread)
            return cls(tuple(raw["rows"]), tuple(raw["contexts"]), lines, *others, spread=steadiness)
        except (OSError, ValueError, TypeError, KeyError):
            return None


# An H200 and a model of 7.4 B parameters in bfloat16. Where a step gets slow depends on how much a chip computes while
# it reads one byte, which GPUs for such models differ little in.
LIKE_OTHER_GPUS = StepCosts(
    (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024), (64,),
    ((1.0, 1.06, 1.07, 1.09, 1.11, 1.13, 1.18, 1.31, 1.76, 2.86, 5.58),), 0.0, assumed=True,
)  # fmt: skip


# Two cores and a model of 0.1 B parameters, between weights in 8 and in 32 bits. What seems to cost too little is tried
# and corrected; what seems to cost too much would not be.
LIKE_OTHER_CPUS = StepCosts(
    (1, 2, 3, 4, 8, 16, 32, 64), (64,), ((1.0, 1.1, 1.17, 1.25, 1.6, 2.5, 4.2, 8.0),), 0.08, assumed=True
)


def _interpolate(xs: Sequence[int], ys: Sequence[float], x: float) -> float:
    right = min(max(bisect.bisect_left(xs, x), 1), len(xs) - 1)
    left = right - 1
    share = (x - xs[left]) / (xs[right] - xs[left])
    return ys[left] + share * (ys[right] - ys[left])
