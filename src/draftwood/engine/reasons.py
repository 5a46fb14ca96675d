"""Why a step has as many draft nodes as it has; put into words only where a person asks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

RULE = "rule"  # kind of a reason that is only words


@runtime_checkable
class Reason(Protocol):
    """What can be counted by its kind."""

    kind: ClassVar[str]


def kind_of(why: object) -> str:
    """Of a budget's reason."""
    return why.kind if isinstance(why, Reason) else RULE


class Outlook(NamedTuple):
    """What a step is expected to give each sequence, and to take."""

    tokens: float  # on average
    seconds: float
    assumed: bool  # the time is assumed, not measured

    @property
    def rate(self) -> float:
        """Tokens of an average sequence per second, or plain step. All that run share the step, so the size with the
        highest rate is also that with the most tokens per second of everything.
        """
        return self.tokens / self.seconds

    def __str__(self) -> str:
        time = f"{self.seconds:.2f} plain steps (assumed)" if self.assumed else f"{self.seconds * 1000:.2f} ms"
        return f"{self.tokens:.2f} expected tokens in {time}"


@dataclass(frozen=True, slots=True)
class BestRate:
    """It is the best size."""

    kind: ClassVar[str] = "best rate"
    nodes: int
    best: Outlook
    plain: Outlook

    def __str__(self) -> str:
        if self.nodes == 0:
            return f"no nodes pay: {self.plain} without"
        return f"{count(self.nodes)}: {self.best}; none: {self.plain}"


@dataclass(frozen=True, slots=True)
class KeepsPromises:
    """It is the best of the sizes that keep what requests were promised, or comes nearest to it."""

    kind: ClassVar[str] = "promises"
    nodes: int
    best: Outlook
    promised: int  # sequences
    kept: bool

    def __str__(self) -> str:
        size = count(self.nodes) if self.nodes else "no nodes"
        how = "keeps" if self.kept else "comes nearest to"
        return f"{size}: {how} what {self.promised} of the sequences were promised; {self.best}"


@dataclass(frozen=True, slots=True)
class MeasuredFaster:
    """The mode was faster by the clock than the one which estimates speak for."""

    kind: ClassVar[str] = "measured faster"
    nodes: int
    better: float  # times

    def __str__(self) -> str:
        mode = count(self.nodes) if self.nodes else "no nodes"
        return f"{mode}: measured {self.better:.2f} times as fast as {'without' if self.nodes else 'with'}"


@dataclass(frozen=True, slots=True)
class Look:
    """A short try of what does not seem to pay, or was not measured lately."""

    kind: ClassVar[str] = "look"
    nodes: int

    def __str__(self) -> str:
        if self.nodes == 0:
            return "no nodes, to see what a step without takes by now"
        return f"{count(self.nodes)}, to see who has something to propose by now"


@dataclass(frozen=True, slots=True)
class WorthTheRow:
    """A tree may have nodes down to a certain chance."""

    kind: ClassVar[str] = "worth the row"
    nodes: int
    chance: float

    def __str__(self) -> str:
        return f"up to {count(self.nodes)}: one more row pays from a chance of {self.chance:.2f}"


def count(nodes: int) -> str:
    """In words."""
    return "1 node" if nodes == 1 else f"{nodes} nodes"
