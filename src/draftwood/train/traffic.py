"""Answers as they are given, packed into lessons for a drafter that learns while it serves."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from draftwood.errors import InvalidRequest
from draftwood.train.data import Corpus, PackedBatches, TextBatch

SHORTEST = 8  # tokens of an answer that are worth a look
Piece = tuple[Sequence[int], Sequence[int]]  # what is given, and what the target wrote behind it


class Traffic:
    """The latest lessons: those that have not been looked at yet, and those that are known, as batches of one row."""

    def __init__(self, length: int, lessons: int) -> None:
        if length < 4 * SHORTEST or lessons < 1:
            raise InvalidRequest(f"Lessons have at least {4 * SHORTEST} tokens, and at least one is kept.")
        self.known: deque[TextBatch] = deque(maxlen=lessons)
        self._fresh: deque[list[Piece]] = deque(maxlen=lessons)  # a batch is made of one when its turn comes, if ever
        self._length = length
        self._open: list[Piece] = []
        self._room = length

    def add(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """One more answer. A lesson is complete as soon as the next piece does not fit into it any more."""
        for piece in pieces(prompt, answer, self._length):
            size = len(piece[0]) + len(piece[1])
            if size > self._room:
                self._fresh.append(self._open)
                self._open, self._room = [], self._length
            self._open.append(piece)
            self._room -= size

    @property
    def num_fresh(self) -> int:
        """Complete lessons that have not been looked at."""
        return len(self._fresh)

    def take(self) -> TextBatch:
        """The first fresh lesson, which is known from now on."""
        lesson = self._fresh.popleft()
        size = sum(len(given) + len(written) for given, written in lesson)
        self.known.append(next(PackedBatches(Corpus.of(lesson), 1, size).epoch(0, 0)))
        return self.known[-1]


def pieces(prompt: Sequence[int], answer: Sequence[int], length: int) -> Iterator[Piece]:
    """An answer in parts that fit, each behind what came right before it: the end of the prompt, or of the last part.

    What stood further back is forgotten, so the target will say other things about the first words of a part than it
    said when it wrote them. Those are its words all the same, about a text it might have been given.
    """
    given = prompt[-(length // 2) :]
    while len(answer) >= SHORTEST:
        part = answer[: length - len(given)]
        yield given, part
        given, answer = part[-(length // 4) :], answer[len(part) :]
