"""What may follow a text, and how likely: by what followed its last tokens elsewhere, longest piece first."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from draftwood.drafters.automaton import Place, SuffixAutomaton

ORDERS = 4  # pieces that are asked for a token's successors, each shorter than the one before
WIDEST = 64  # successors of a piece that are looked at
LENGTHS, TOTALS = (2, 3, 4, 6, 9, 17, 33), (2, 3, 5, 17)
MEMORY = 1000.0  # trials after which old ones count half
WEIGHT = 4.0  # trials that what is assumed beforehand counts for

Places = tuple[Place, ...]  # one in each of some automata


@dataclass(frozen=True)
class Piece:
    """The end of a text that occurs elsewhere."""

    successors: dict[int, int]  # token -> how often it followed
    total: int
    reliability: list[
        float
    ]  # hits and trials: how often the next token was among the successors, if in no longer one's


@dataclass
class Reliability:
    """How often the next token was among the successors of a piece, by what the piece is like; bounded."""

    _table: dict[tuple[int, ...], list[float]] = field(default_factory=dict)

    def of(self, source: int, order: int, length: int, successors: dict[int, int], total: int) -> list[float]:
        """Hits and trials for pieces of this kind."""
        long, often = bisect_right(LENGTHS, length), bisect_right(TOTALS, total)
        key = source, min(order, 1), long, often, min(len(successors), 3)
        found = self._table.get(key)
        if found is None:
            found = self._table[key] = [WEIGHT * length / (length + 1), WEIGHT]
        return found


def learn(found: list[float], hit: bool) -> None:
    """Count a trial."""
    found[0] += hit
    found[1] += 1
    if found[1] > MEMORY:
        found[0] /= 2
        found[1] /= 2


class Predictor:
    """Blends what several automata say of the next token; they may differ from text to text."""

    def __init__(self, shortest: int, longest: int) -> None:
        self.shortest = shortest
        self.longest = longest
        self._reliability = Reliability()

    def follow(self, automata: Sequence[SuffixAutomaton], places: Places, token: int) -> Places:
        """The places behind one more token."""
        return tuple(a.follow(place, token, self.longest) for a, place in zip(automata, places, strict=True))

    def learn(self, automata: Sequence[SuffixAutomaton], places: Places, token: int) -> None:
        """`token` came next."""
        for piece in self._pieces(automata, places):
            hit = token in piece.successors
            learn(piece.reliability, hit)
            if hit:
                return

    def successors(self, automata: Sequence[SuffixAutomaton], places: Places) -> dict[int, float]:
        """The chance of every token that followed one of the longest pieces."""
        chances: dict[int, float] = {}
        left = 1.0
        for piece in self._pieces(automata, places):
            hits, trials = piece.reliability
            share = left * hits / trials
            for token, count in piece.successors.items():
                chances.setdefault(token, share * count / piece.total)
            left -= share
        return chances

    def _pieces(self, automata: Sequence[SuffixAutomaton], places: Places) -> Iterator[Piece]:
        """The longest, without successors that a longer one has; automata that come first, first."""
        at, seen = list(places), set()
        for order in range(ORDERS):
            lengths = [length for _, length in at]
            longest = max(lengths, default=0)
            if longest < self.shortest:
                return
            which = lengths.index(longest)
            automaton, place = automata[which], at[which]
            at[which] = automaton.shortened(place)
            counts = automaton.counts
            new = {
                token: counts[state]
                for token, state in islice(automaton.successors[place[0]].items(), WIDEST)
                if token not in seen
            }
            if not new:
                continue
            total = sum(new.values())
            yield Piece(new, total, self._reliability.of(min(which, 1), order, longest, new, total))
            seen.update(new)
