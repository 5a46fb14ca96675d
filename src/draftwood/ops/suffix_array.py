"""Ranges of a suffix array: all places of a text that begin alike, in the order of what follows.

The array sorts places by their first tokens only; a range is known for as many tokens as were sorted by.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from draftwood.ops.native import kernels

WIDEST = 64  # successors of a piece that are looked at


def sorted_places(tokens: NDArray[np.int32], depth: int) -> NDArray[np.int32]:
    """All places of `tokens` in the order of the `depth` tokens that begin there; the end comes before every token."""
    rank = np.unique(tokens, return_inverse=True)[1].astype(np.int64) + 1
    length = 1
    while length < depth:
        then = np.zeros_like(rank)
        then[:-length] = rank[length:]
        both = rank * (len(rank) + 2) + then
        order = np.argsort(both, kind="stable")
        ordered = both[order]
        rank[order] = np.cumsum(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
        length *= 2
    return np.argsort(rank, kind="stable").astype(np.int32)


class SuffixArray:
    """Tokens and their places in order, as they lie in a file: what they say is checked when it is used."""

    def __init__(self, tokens: NDArray[np.int32], order: NDArray[np.int32], depth: int) -> None:
        if len(tokens) != len(order) or not (tokens.flags.c_contiguous and order.flags.c_contiguous):
            raise ValueError("a suffix array has one place for each token")
        self.tokens, self.order, self.depth = tokens, order, depth
        self._memory = tokens.ctypes.data, order.ctypes.data, len(tokens)
        self._range, self._found, self._counts = ((ctypes.c_int64 * n)() for n in (2, WIDEST, WIDEST))
        self._text = (ctypes.c_int32 * depth)()
        self._kernels = kernels()

    def narrow(self, low: int, high: int, offset: int, token: int) -> tuple[int, int]:
        """Of places that are alike for `offset` tokens, those that go on with `token`."""
        if offset >= self.depth:
            return 0, 0
        if self._kernels is None:
            return self._narrow(low, high, offset, token)
        self._range[:] = low, high
        self._kernels.dw_narrow(*self._memory, self._range, offset, token)
        return self._range[0], self._range[1]

    def successors(self, low: int, high: int, offset: int) -> dict[int, int]:
        """What goes on places that are alike for `offset` tokens, and how often; smaller tokens first, at most
        `WIDEST`.
        """
        if offset >= self.depth:
            return {}
        if self._kernels is None:
            return self._successors(low, high, offset)
        number = self._kernels.dw_successors(*self._memory, low, high, offset, WIDEST, self._found, self._counts)
        return dict(zip(self._found[:number], self._counts[:number], strict=True))

    def longest_end(self, text: Sequence[int], shortest: int) -> tuple[int, int, int]:
        """The longest end of a text, of `shortest` to `depth` tokens, that begins some place: its
        length, 0 if there is none, and the ranks of these places.
        """
        text = text[-self.depth :]
        if self._kernels is None:
            return self._longest_end(text, shortest)
        self._text[: len(text)] = text
        length = self._kernels.dw_longest_end(*self._memory, self._text, len(text), shortest, self._range)
        return length, self._range[0], self._range[1]

    # The reference.

    def _longest_end(self, text: Sequence[int], shortest: int) -> tuple[int, int, int]:
        for length in range(len(text), shortest - 1, -1):
            low, high = 0, len(self.order)
            for offset, token in enumerate(text[len(text) - length :]):
                low, high = self._narrow(low, high, offset, token)
            if low < high:
                return length, low, high
        return 0, 0, 0

    def _token(self, rank: int, offset: int) -> int:
        place = int(self.order[rank])
        return int(self.tokens[place + offset]) if place >= 0 and place + offset < len(self.tokens) else -1

    def _narrow(self, low: int, high: int, offset: int, token: int) -> tuple[int, int]:
        start = bisect_left(range(high), token, low, high, key=lambda rank: self._token(rank, offset))
        return start, bisect_left(range(high), token + 1, start, high, key=lambda rank: self._token(rank, offset))

    def _successors(self, low: int, high: int, offset: int) -> dict[int, int]:
        found: dict[int, int] = {}
        low, _ = self._narrow(low, high, offset, 0)
        while low < high and len(found) < WIDEST:
            token = self._token(low, offset)
            _, end = self._narrow(low, high, offset, token)
            found[token] = end - low
            low = max(end, low + 1)
        return found
