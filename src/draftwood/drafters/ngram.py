"""N-gram lookup on the host: what followed the last few tokens when they stood in the text before.

Longest match first, most recent first; several continuations become one tree that shares common beginnings. On a GPU
one continuation is looked up there (`lookup.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from draftwood.drafters.lookup import check_settings
from draftwood.drafters.points import PointDrafter, PointTree
from draftwood.tree import POINT_CHAIN, POINT_TREE


@dataclass
class _Index:
    """Where every n-gram of one sequence ended, as far as it has been read."""

    read: int = 0
    ends: dict[tuple[int, ...], list[int]] = field(default_factory=dict)


class NgramDrafter(PointDrafter):
    """Looks the last `longest` … `shortest` tokens up in the sequence itself.

    `shortest` 0: two, since the last token alone is a poor reason for a row of the target that costs time.
    """

    def __init__(self, nodes: int = 4, longest: int = 4, shortest: int = 0, branches: int = 1) -> None:
        check_settings(nodes, longest, shortest, branches)
        self.max_nodes = nodes
        self.longest = longest
        self.shortest = shortest or min(2, longest)
        self.branches = branches
        self.law = POINT_CHAIN if branches == 1 else POINT_TREE
        self._indices: dict[int, _Index] = {}

    def fill(self, tree: PointTree, seq_id: int, tokens: Sequence[int]) -> None:
        """Add up to `branches` different continuations."""
        index = self._indices.setdefault(seq_id, _Index())
        self._read(index, tokens)
        firsts: set[int] = set()
        for end in self._matches(index, tokens):
            # The first continuation may use all the room; others share what it leaves.
            if tokens[end] not in firsts:
                firsts.add(tokens[end])
                tree.add_path(tokens[end : end + tree.max_nodes])
            if len(firsts) == self.branches:
                return

    def release(self, seq_id: int) -> None:
        """Forget the sequence's index."""
        self._indices.pop(seq_id, None)

    def _read(self, index: _Index, tokens: Sequence[int]) -> None:
        """Enter the n-grams that end before the last token: something must follow each of them."""
        for end in range(max(index.read, 1), len(tokens)):
            for n in range(self.shortest, min(self.longest, end) + 1):
                index.ends.setdefault(tuple(tokens[end - n : end]), []).append(end)
        index.read = len(tokens)

    def _matches(self, index: _Index, tokens: Sequence[int]) -> Iterator[int]:
        for n in range(min(self.longest, len(tokens)), self.shortest - 1, -1):
            yield from reversed(index.ends.get(tuple(tokens[-n:]), ()))
