"""Suffix automata with counts: how often each piece of a text occurs, and what followed it, read token by token."""

from __future__ import annotations

from collections.abc import Iterable

MOST = 128  # counts stop here: a step up all pieces that end at a token ends at the first that occurs so often

Place = tuple[int, int]  # a state, and how many tokens the piece has that led to it
NOWHERE: Place = (0, 0)


class SuffixAutomaton:
    """All pieces of some texts. A state is a set of pieces that end at the same places; state 0 is the empty piece.

    Reading a token takes O(1) amortised time for the automaton and at most `MOST` steps for counts: of the pieces that
    end at a token, shorter ones occur more often than longer ones of another state.
    """

    def __init__(self) -> None:
        self.successors: list[dict[int, int]] = [{}]
        self.links: list[int] = [-1]  # the state of the longest piece's longest end that is in another state
        self.lengths: list[int] = [0]  # of a state's longest piece
        self.counts: list[int] = [0]  # how often its pieces occur, up to MOST
        self.size = 0  # tokens read

    def append(self, last: int, token: int) -> int:
        """Read a token behind the text that ended in state `last` (0: a text begins); where it ends now."""
        known = self.successors[last].get(token)
        end = self._new(last, token) if known is None else self._exactly(last, token, known)
        self.size += 1
        state = end
        while state > 0 and self.counts[state] < MOST:
            self.counts[state] += 1
            state = self.links[state]
        return end

    def extend(self, tokens: Iterable[int]) -> None:
        """Read a text of its own."""
        last = 0
        for token in tokens:
            last = self.append(last, token)

    def follow(self, place: Place, token: int, longest: int) -> Place:
        """The longest piece of at most `longest` tokens that ends the piece at `place` with `token` behind it."""
        state, length = self.settled(place)
        while state > 0 and token not in self.successors[state]:
            state = self.links[state]
            length = self.lengths[state]
        after = self.successors[state].get(token)
        if after is None:
            return NOWHERE
        return self.settled((after, min(length + 1, longest)))

    def earlier(self, last: int, longest: int) -> Place:
        """The longest end, of at most `longest` tokens, that occurs elsewhere of the text that ends in state `last`."""
        link = self.links[last]
        return self.settled((link, min(self.lengths[link], longest))) if link > 0 else NOWHERE

    def settled(self, place: Place) -> Place:
        """The same piece's state: it may be another one after texts were read."""
        state, length = place
        while state > 0 and length <= self.lengths[self.links[state]]:
            state = self.links[state]
        return state, length

    def shortened(self, place: Place) -> Place:
        """The longest end of a piece that occurs more often than the piece, or nowhere."""
        link = self.links[place[0]]
        return (link, self.lengths[link]) if link > 0 else NOWHERE

    def _new(self, last: int, token: int) -> int:
        end = self._state(self.lengths[last] + 1, {}, 0, 0)
        state = last
        while state >= 0 and token not in self.successors[state]:
            self.successors[state][token] = end
            state = self.links[state]
        if state >= 0:
            self.links[end] = self._exactly(state, token, self.successors[state][token])
        return end

    def _exactly(self, state: int, token: int, known: int) -> int:
        """The state whose longest piece is that of `state` with `token` behind it; split from `known` if need be."""
        length = self.lengths[state] + 1
        if self.lengths[known] == length:
            return known
        split = self._state(length, dict(self.successors[known]), self.links[known], self.counts[known])
        self.links[known] = split
        while state >= 0 and self.successors[state].get(token) == known:
            self.successors[state][token] = split
            state = self.links[state]
        return split

    def _state(self, length: int, successors: dict[int, int], link: int, count: int) -> int:
        self.successors.append(successors)
        self.links.append(link)
        self.lengths.append(length)
        self.counts.append(count)
        return len(self.links) - 1
