"""Which sizes of trees keep what requests were promised, and how many rows of prompts leave others enough time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from draftwood.engine.reasons import Outlook
from draftwood.engine.sequence import CATCHING_UP
from draftwood.engine.timing import StepTiming
from draftwood.protocols import Load, Pace

CAREFUL = 0.9  # of the time that is left; steps do not all take as long


class Keeping(NamedTuple):
    """Sizes that may be chosen."""

    sizes: frozenset[int]
    kept: bool  # they keep every promise; otherwise it is one size, the best for the sequence that is worst off


def _own_tokens(outlook: Outlook, pace: Pace) -> float:
    """Expected of a sequence whose drafts are right more or less often than those of others."""
    return 1 + (outlook.tokens - 1) * pace.gain


def _speed(outlook: Outlook, pace: Pace) -> float:
    """Of a sequence, relative to what it was promised."""
    return _own_tokens(outlook, pace) * pace.per_token / outlook.seconds


def _keeps(outlook: Outlook, pace: Pace) -> bool:
    """Whether the sequence is in time after such a step. What it is ahead may be used up, what it is behind has to be
    made good.
    """
    ahead = pace.left - pace.per_token
    if ahead < 0:
        return _speed(outlook, pace) >= CATCHING_UP
    return outlook.seconds <= _own_tokens(outlook, pace) * pace.per_token + ahead


def keeping(outlooks: Mapping[int, Outlook], paces: tuple[Pace, ...]) -> Keeping:
    """The sizes with which every sequence is as fast as it was promised. A promise that no size keeps is given up: it
    must not cost others their speed.
    """
    every = frozenset(outlooks)
    if not paces or any(outlook.assumed for outlook in outlooks.values()):
        return Keeping(every, kept=True)
    paces = tuple(pace for pace in paces if max(_speed(outlook, pace) for outlook in outlooks.values()) >= 1)
    if not paces:
        return Keeping(every, kept=False)
    kept = frozenset(size for size, outlook in outlooks.items() if all(_keeps(outlook, pace) for pace in paces))
    if kept:
        return Keeping(kept, kept=True)
    nearest = max(outlooks, key=lambda size: min(_speed(outlooks[size], pace) for pace in paces))
    return Keeping(frozenset({nearest}), kept=False)


def prompt_rows(timing: StepTiming, load: Load, nodes: int, rows: int) -> int | None:
    """Rows of prompts beside `rows` of those that decode with `nodes` nodes each, so that no next token waits longer
    than was promised; None: any number.
    """
    if not load.paces or timing.costs.assumed:
        return None
    batch = max(load.num_running, 1)
    alone = timing.costs.at(batch, load.context, batch)
    left = min((min(pace.left, pace.per_token) for pace in load.paces if pace.per_token >= alone), default=None)
    if left is None:  # what was promised is more than the machine can do
        return None
    return timing.prompt_rows(rows, load.context, batch, CAREFUL * left - timing.drafting(batch, nodes))
