"""Retrieval from a datastore: trees of what followed the end of the text in a user's files (REST).

Chances come from counts, and from how often such counts were right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from draftwood.drafters.best_first import grow
from draftwood.drafters.datastore import AGAIN, DEPTH, Datastore
from draftwood.drafters.points import HostDrafter, HostTrees, PointTree
from draftwood.drafters.successors import Reliability, learn
from draftwood.ops.suffix_array import SuffixArray
from draftwood.protocols import HostView

LONGEST = DEPTH // 2  # the other half is for what follows


@dataclass(frozen=True)
class _Match:
    """Places of all segments that begin alike."""

    ranges: tuple[tuple[SuffixArray, int, int], ...]
    length: int  # tokens that are alike

    def follow(self, token: int) -> _Match:
        """Those that go on with a token."""
        narrowed = ((part, *part.narrow(low, high, self.length, token)) for part, low, high in self.ranges)
        return _Match(tuple(one for one in narrowed if one[1] < one[2]), self.length + 1)

    def successors(self, vocab_size: int) -> dict[int, int]:
        """What goes on with them, and how often."""
        counts: dict[int, int] = {}
        for part, low, high in self.ranges:
            for token, count in part.successors(low, high, self.length).items():
                if 0 <= token < vocab_size:
                    counts[token] = counts.get(token, 0) + count
        return counts


@dataclass
class _Asked:
    """What was looked up behind a text."""

    length: int
    successors: dict[int, int]
    reliability: list[float]


class RestDrafter(HostDrafter):
    """The likeliest continuations of the last `longest` … `shortest` tokens, as a tree of at most `nodes` nodes.

    Nodes less likely than `least` stay out.
    """

    scores = True

    def __init__(
        self, path: str = "", nodes: int = 8, longest: int = LONGEST, shortest: int = 2, least: float = 0.2
    ) -> None:
        if not path:
            raise ValueError(f"it needs path=FOLDER, a datastore. {AGAIN}".rstrip("."))
        if not 1 <= shortest <= longest <= LONGEST or nodes < 1 or not 0 <= least < 1:
            raise ValueError(f"it needs 1 <= shortest <= longest <= {LONGEST}, at least one node and 0 <= least < 1")
        self.max_nodes, self.least = nodes, least
        self.datastore = Datastore(Path(path).expanduser())
        self._shortest, self._longest = shortest, longest
        self._reliability = Reliability()
        self._asked: dict[int, _Asked] = {}

    def scored(self, view: HostView, nodes: int) -> HostTrees:
        """Grown best first, sequence by sequence."""
        grown = []
        for b, (seq_id, tokens) in enumerate(zip(view.seq_ids, view.tokens, strict=True)):
            tree = PointTree(tokens[-1], min(view.max_nodes[b], nodes), view.max_depth[b])
            self._learn(seq_id, tokens)
            if tree.max_nodes > 0 and tree.max_depth > 0:
                self._fill(tree, seq_id, tokens)
            grown.append(tree)
        return HostTrees.of(grown)

    def release(self, seq_id: int) -> None:
        """Forget what was asked."""
        self._asked.pop(seq_id, None)

    def _fill(self, tree: PointTree, seq_id: int, tokens: Sequence[int]) -> None:
        size = self.datastore.manifest.vocab_size
        match = self._longest_match(tokens)
        counts = match.successors(size)
        if not counts:
            return
        found = self._reliability.of(0, 0, match.length, len(counts), sum(counts.values()))
        self._asked[seq_id] = _Asked(len(tokens), counts, found)
        sure = found[0] / found[1]

        def successors(place: _Match, least: float) -> dict[int, float]:
            if sure <= least:
                return {}
            following = counts if place is match else place.successors(size)
            total = sum(following.values())
            return {token: sure * count / total for token, count in following.items()}

        grow(tree, match, successors, _Match.follow, self.least)

    def _longest_match(self, tokens: Sequence[int]) -> _Match:
        """The longest end of a text that stands in the files."""
        ends = [(part, *part.longest_end(tokens[-self._longest :], self._shortest)) for part in self.datastore.segments]
        longest = max((length for _, length, _, _ in ends), default=0)
        return _Match(tuple((part, low, high) for part, length, low, high in ends if length == longest > 0), longest)

    def _learn(self, seq_id: int, tokens: Sequence[int]) -> None:
        asked = self._asked.pop(seq_id, None)
        if asked is not None and len(tokens) > asked.length:
            learn(asked.reliability, tokens[asked.length] in asked.successors)
