"""What a step will run: decided by the scheduler, read by everybody else."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch

from draftwood.engine.sequence import Sequence
from draftwood.protocols import BatchView, Span

T = TypeVar("T")


@dataclass(frozen=True)
class PlanItem:
    """Committed tokens [start, end) of one sequence to run; it samples if they are all it has."""

    seq: Sequence
    start: int
    end: int
    max_nodes: int

    @property
    def samples(self) -> bool:
        """Whether its next token is drawn in this step."""
        return self.end == len(self.seq.tokens)


@dataclass(frozen=True)
class Plan:
    """A step's work."""

    items: tuple[PlanItem, ...]

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
        return [Span(item.seq.id, item.seq.tokens, item.start, item.end) for item in self.items]

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
        return Plan(tuple(PlanItem(item.seq, end - 1, end, item.max_nodes) for item, end in pairs))

    def view(self, device: torch.device) -> BatchView:
        """What drafter and verifier may know of the sequences that sample."""
        items = [self.items[i] for i in self.sampling]
        lengths = [item.end for item in items]
        depths = [max(0, min(item.seq.max_length - item.end - 1, item.seq.deepest)) for item in items]
        integers = torch.tensor(
            [lengths, [item.seq.seed for item in items], [item.max_nodes for item in items], depths],
            dtype=torch.int64,
            device=device,
        )
        return BatchView(
            seq_ids=tuple(item.seq.id for item in items),
            tokens=[item.seq.tokens for item in items],
            prompt_lengths=tuple(item.seq.prompt_length for item in items),
            params=tuple(item.seq.params for item in items),
            bad_words=tuple(item.seq.bad_words for item in items),
            lengths=integers[0],
            seeds=integers[1],
            temperature=torch.tensor([item.seq.params.temperature for item in items], device=device),
            max_nodes=integers[2],
            max_depth=integers[3],
            predictions=_unless_empty(item.seq.prediction for item in items),
            constraints=_unless_empty(item.seq.constraint for item in items),
            early_stop_ids=_unless_empty(item.seq.early_stop_ids for item in items),
        )


def _unless_empty(values: Iterable[T]) -> tuple[T, ...]:
    kept = tuple(values)
    return kept if any(kept) else ()
