"""Suffix drafts: trees of what followed the end of the text earlier in it, or in answers to other requests.

Chances come from counts in suffix automata and from how often such counts were right. What is learnt from answers is
shared among requests with the same salt (`cache_salt`) only, and bounded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from draftwood.drafters.automaton import NOWHERE, SuffixAutomaton
from draftwood.drafters.best_first import grow
from draftwood.drafters.points import HostDrafter, HostTrees, PointTree
from draftwood.drafters.successors import Places, Predictor
from draftwood.protocols import HostView

OVERHEAD = 64  # tokens that an automaton counts for, however little it has read


class SharedTexts:
    """Answers by salt, about `size` tokens in all: the oldest half of the salt that was not used longest goes first."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._by_salt: OrderedDict[str, list[SuffixAutomaton]] = OrderedDict()

    @property
    def held(self) -> int:
        """Tokens held, with overhead."""
        return sum(OVERHEAD + automaton.size for own in self._by_salt.values() for automaton in own)

    def of(self, salt: str) -> list[SuffixAutomaton]:
        """The youngest first."""
        if salt in self._by_salt:
            self._by_salt.move_to_end(salt)
        return self._by_salt.get(salt, [])[::-1]

    def add(self, salt: str, tokens: Sequence[int]) -> None:
        """Keep an answer, or its end if it is long."""
        half = max(self.size // 2 - OVERHEAD, 0)
        tokens = tokens[max(len(tokens) - half, 0) :]
        if not tokens or not half:
            return
        own = self._by_salt.setdefault(salt, [])
        self._by_salt.move_to_end(salt)
        if not own or own[-1].size + len(tokens) > half:
            own.append(SuffixAutomaton())
        own[-1].extend(tokens)
        while self.held > self.size:
            oldest, texts = next(iter(self._by_salt.items()))
            texts.pop(0)
            if not texts:
                del self._by_salt[oldest]


@dataclass
class _Reading:
    """One sequence: what has been read of it, and where its end occurs in its own text and in others."""

    salt: str
    prompt_length: int
    tokens: Sequence[int] = ()
    read: int = 0
    last: int = 0
    automata: list[SuffixAutomaton] = field(default_factory=lambda: [SuffixAutomaton()])  # its own, shared ones
    places: Places = (NOWHERE,)


class SuffixDrafter(HostDrafter):
    """The likeliest continuations of a text's last `longest` … `shortest` tokens, as a tree of at most `nodes` nodes.

    Nodes less likely than `least` stay out. `shared`: tokens of others' answers that are kept; 0: none.
    """

    scores = True

    def __init__(
        self, nodes: int = 8, longest: int = 32, shortest: int = 1, least: float = 0.2, shared: int = 65536
    ) -> None:
        if not 1 <= shortest <= longest or nodes < 1:
            raise ValueError("a suffix drafter needs 1 <= shortest <= longest and at least one node")
        if not 0 <= least < 1 or shared < 0:
            raise ValueError("a suffix drafter needs 0 <= least < 1 and shared at least 0")
        self.max_nodes = nodes
        self.least = least
        self.shared = SharedTexts(shared)
        self._predictor = Predictor(shortest, longest)
        self._readings: dict[int, _Reading] = {}

    def scored(self, view: HostView, nodes: int) -> HostTrees:
        """Grown best first, sequence by sequence."""
        grown, known = [], self._predictor
        for b, tokens in enumerate(view.tokens):
            tree = PointTree(tokens[-1], min(view.max_nodes[b], nodes), view.max_depth[b])
            if tree.max_nodes > 0 and tree.max_depth > 0:  # a request that another drafter drafts for is not read
                automata, places = (reading := self._reading(view, b)).automata, reading.places
                successors, follow = partial(known.successors, automata), partial(known.follow, automata)
                grow(tree, places, successors, follow, self.least)
            grown.append(tree)
        return HostTrees.of(grown)

    def release(self, seq_id: int) -> None:
        """Forget the sequence, but keep its answer for others of its salt."""
        reading = self._readings.pop(seq_id, None)
        if reading is not None and reading.read > reading.prompt_length:
            before = max(reading.prompt_length - self._predictor.longest, 0)
            self.shared.add(reading.salt, reading.tokens[before : reading.read])

    def _reading(self, view: HostView, b: int) -> _Reading:
        """What is known of a sequence of the view, all of its text included."""
        reading = self._readings.get(view.seq_ids[b])
        if reading is None:
            reading = _Reading(view.params[b].cache_salt, view.prompt_lengths[b])
            self._readings[view.seq_ids[b]] = reading
        self._read(reading, view.tokens[b])
        return reading

    def _read(self, reading: _Reading, tokens: Sequence[int]) -> None:
        """What is new of the text. What follows in the prompt is no measure of what the target says."""
        own, longest = reading.automata[0], self._predictor.longest
        if reading.read < reading.prompt_length:
            for token in tokens[reading.read : reading.prompt_length]:
                reading.last = own.append(reading.last, token)
            reading.read = min(reading.prompt_length, len(tokens))
            reading.automata = [own]
        self._share(reading, tokens)
        others = reading.automata[1:]
        for token in tokens[reading.read :]:
            self._predictor.learn(reading.automata, reading.places, token)
            reading.last = own.append(reading.last, token)
            behind = [a.follow(place, token, longest) for a, place in zip(others, reading.places[1:], strict=True)]
            reading.places = (own.earlier(reading.last, longest), *behind)
        reading.tokens, reading.read = tokens, len(tokens)

    def _share(self, reading: _Reading, tokens: Sequence[int]) -> None:
        """Find the end of what has been read in others' answers that are new, and leave those that are gone."""
        own, longest = reading.automata[0], self._predictor.longest
        known = dict(zip(map(id, reading.automata[1:]), reading.places[1:], strict=False))
        reading.automata, places = [own, *self.shared.of(reading.salt)], [own.earlier(reading.last, longest)]
        for automaton in reading.automata[1:]:
            place = automaton.settled(known.get(id(automaton), NOWHERE))
            if id(automaton) not in known:
                for token in tokens[max(reading.read - longest, 0) : reading.read]:
                    place = automaton.follow(place, token, longest)
            places.append(place)
        reading.places = tuple(places)
