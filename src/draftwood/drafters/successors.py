"""What may follow a text, and how likely: by what followed its last tokens elsewhere, longest piece first."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from draftwood.drafters.automaton import Place, SuffixAutomaton

MOST_TOLD = 3  # successors of a piece, from which on numbers of them are alike
ORDERS = 4  # pieces that are asked for a token's successors, each shorter than the one before
WIDEST = 64  # successors of a piece that are looked at
LENGTHS, TOTALS = (2, 3, 4, 6, 9, 17, 33), (2, 3, 5, 17)
MEMORY = 1000.0  # trials after which old ones count half
WEIGHT = 4.0  # trials that what is assumed beforehand counts for

Places = tuple[Place, ...]  # one in each of some automata


@dataclass
class Reliability:
    """How often the next token was among the successors of a piece, by what the piece is like; bounded."""

    _table: dict[tuple[int, ...], list[float]] = field(default_factory=dict)

    def of(self, source: int, order: int, length: int, successors: int, total: int) -> list[float]:
        """Hits and trials for pieces of this kind, with so many successors that occurred `total` times."""
        long, often = bisect_right(LENGTHS, length), bisect_right(TOTALS, total)
        key = source, min(order, 1), long, often, min(successors, MOST_TOLD)
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
        seen: set[int] = set()
        for source, order, length, state in self._pieces(automata, places):
            successors, counts = automata[source].successors[state], automata[source].counts
            number = total = 0
            for one, behind in successors.items():  # no further than kinds are told apart
                if one not in seen:
                    number, total = number + 1, total + counts[behind]
                    if number >= MOST_TOLD and total >= TOTALS[-1]:
                        break
            if number:
                hit = token in successors
                learn(self._reliability.of(min(source, 1), order, length, number, total), hit)
                if hit:
                    return
            seen.update(successors)

    def successors(self, automata: Sequence[SuffixAutomaton], places: Places, least: float) -> dict[int, float]:
        """The chance of every token that followed one of the longest pieces, but for those less likely than `least`."""
        chances: dict[int, float] = {}
        left = 1.0
        for source, order, length, state in self._pieces(automata, places):
            counts = automata[source].counts
            new = {
                token: counts[behind]
                for token, behind in islice(automata[source].successors[state].items(), WIDEST)
                if token not in chances
            }
            if not new:
                continue
            total = sum(new.values())
            hits, trials = self._reliability.of(min(source, 1), order, length, len(new), total)
            share = left * hits / trials
            for token, count in new.items():
                chances[token] = share * count / total
            left -= share
            if left <= least:
                break
        return chances

    def _pieces(self, automata: Sequence[SuffixAutomaton], places: Places) -> Iterator[tuple[int, int, int, int]]:
        """The longest first: which automaton, how many were longer, its length and its state."""
        at = list(places)
        for order in range(ORDERS):
            source, (state, length) = 0, at[0]
            for number, (other, tokens) in enumerate(at):
                if tokens > length:
                    source, state, length = number, other, tokens
            if length < self.shortest:
                return
            at[source] = automata[source].shortened((state, length))
            yield source, order, length, state
