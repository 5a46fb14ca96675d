"""What a step will run: decided by the scheduler."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from draftwood.engine.sequence import Sequence
from draftwood.protocols import PREDICTED, HostView, Span

T = TypeVar("T")


@dataclass(frozen=True)
class PlanItem:
    """Committed tokens [start, end) of one sequence to run; it samples if they are all it has."""

    seq: Sequence
    start: int
    end: int
    max_nodes: int
    drafter: str | None = None  # by the name that requests give; None: the engine's own
    need: float = 0.0  # tokens that its promise asks of the step, the target's own not counted

    @property
    def samples(self) -> bool:
        """Whether its next token is drawn in this step."""
        return self.end == len(self.seq.tokens)

    @property
    def own_nodes(self) -> int:
        """Draft nodes for the drafter's own tree, beside those for what the caller predicts."""
        return max(0, self.max_nodes - PREDICTED) if self.seq.prediction else self.max_nodes

    @property
    def max_depth(self) -> int:
        """Draft tokens that could still be emitted."""
        return max(0, min(self.seq.max_length - self.end - 1, self.seq.deepest))


@dataclass(frozen=True)
class Plan:
    """A step's work."""

    items: tuple[PlanItem, ...]
    resting: tuple[PlanItem, ...] = ()  # sequences that could decode, and do so in the next step

    @cached_property
    def sampling(self) -> tuple[int, ...]:
        """Items that sample, by index."""
        return tuple(i for i, item in enumerate(self.items) if item.samples)

    @cached_property
    def scored(self) -> tuple[tuple[int, range], ...]:
        """Items with prompt tokens whose log-probabilities are wanted: the index of each, and the rows that give them,
        counted from the beginning of its sequence.
        """
        rows = ((i, item.seq.scored_rows(item.start, item.end)) for i, item in enumerate(self.items))
        return tuple((i, own) for i, own in rows if own)

    @property
    def scored_rows(self) -> list[int]:
        """The same rows, counted through the pending tokens of all items."""
        before = [0, *itertools.accumulate(item.end - item.start for item in self.items)]
        return [before[i] + row - self.items[i].start for i, own in self.scored for row in own]

    @property
    def spans(self) -> list[Span]:
        """Every item's pending tokens."""
        return [
            Span(i.seq.id, i.seq.tokens, i.start, i.end, i.seq.source, i.seq.images, i.seq.adapter) for i in self.items
        ]

    @property
    def num_rows(self) -> int:
        """Pending tokens of all items."""
        return sum(item.end - item.start for item in self.items)

    @property
    def seq_ids(self) -> list[int]:
        """The sequences."""
        return [item.seq.id for item in self.items]

    def parted(self) -> tuple[Plan, Plan]:
        """The items with rows to be scored, and the others."""
        asked = {i for i, _ in self.scored}
        both = ([item for i, item in enumerate(self.items) if (i in asked) == wanted] for wanted in (True, False))
        scored, others = (Plan(tuple(items)) for items in both)
        return scored, others

    def brought_up_to_date(self) -> Plan:
        """The same sequences with the last token each has by now."""
        ends = [len(item.seq.tokens) for item in self.items]
        pairs = zip(self.items, ends, strict=True)
        return Plan(tuple(replace(item, start=end - 1, end=end) for item, end in pairs))

    def view(self) -> HostView:
        """What the host knows of the sequences."""
        seqs = [item.seq for item in self.items]
        return HostView(
            seq_ids=tuple(seq.id for seq in seqs),
            tokens=tuple(seq.tokens for seq in seqs),
            prompt_lengths=tuple(seq.prompt_length for seq in seqs),
            params=tuple(seq.params for seq in seqs),
            max_nodes=tuple(item.max_nodes for item in self.items),
            max_depth=tuple(item.max_depth for item in self.items),
            drafters=_unless_empty(item.drafter for item in self.items),
            bad_words=_unless_empty(seq.bad_words for seq in seqs),
            predictions=_unless_empty(seq.prediction for seq in seqs),
            constraints=_unless_empty(seq.constraint for seq in seqs),
            resting=Plan(self.resting).view() if self.resting else None,
        )


def _unless_empty(values: Iterable[T]) -> tuple[T, ...]:
    kept = tuple(values)
    return kept if any(kept) else ()
