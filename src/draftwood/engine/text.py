"""From tokens to text as it streams: whole characters only, and nothing that may still become a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Decoder(Protocol):
    """Turns tokens into text piece by piece; `model.tokenizer.Detokenizer` is one."""

    def push(self, ids: Sequence[int]) -> str:
        """Text that is final now."""
        ...

    def flush(self) -> str:
        """What was held back."""
        ...


Piece = tuple[str, bool]  # a text, and whether a drafter had guessed the token it came with


class TextStream:
    """One answer's text. Tokens come one at a time, so where a stop string ends never depends on the schedule."""

    def __init__(self, decoder: Decoder, stop: tuple[str, ...] = ()) -> None:
        self._decoder = decoder
        self._stop = stop
        self._held: list[Piece] = []
        self._safe = 0  # characters held: a stop string that ends within them ends nothing

    def push(self, token: int, accepted: bool, *, may_stop: bool = True) -> bool:
        """Take one token; True if it completes a stop string, and then nothing after it may be pushed.

        Unless it `may_stop`: then stop strings that are complete with it stay part of the text.
        """
        self._held.append((self._decoder.push([token]), accepted))
        if may_stop:
            return self._cut_at_stop()
        self._safe = sum(len(text) for text, _ in self._held)
        return False

    def finish(self) -> None:
        """No more tokens: what the decoder holds back is text now, and may still complete a stop string."""
        self._held.append((self._decoder.flush(), False))
        self._cut_at_stop()
        self._stop = ()

    def take(self) -> tuple[Piece, ...]:
        """The text that is final and has not been taken yet."""
        if not self._stop:
            taken, self._held = self._held, []
            return tuple(piece for piece in taken if piece[0])
        text = "".join(piece for piece, _ in self._held)
        certain = len(text) - self._possible_stop(text)
        taken, self._held = _split(self._held, certain)
        self._safe = max(0, self._safe - certain)
        return tuple(piece for piece in taken if piece[0])

    def _cut_at_stop(self) -> bool:
        if not self._stop:
            return False
        text = "".join(piece for piece, _ in self._held)
        firsts = (text.find(stop, max(0, self._safe - len(stop) + 1)) for stop in self._stop)
        found = [at for at in firsts if at >= 0]
        if not found:
            return False
        self._held = _split(self._held, min(found))[0]
        self._stop = ()  # what is left can be taken whole
        return True

    def _possible_stop(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string could begin with."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0


def _split(pieces: list[Piece], at: int) -> tuple[list[Piece], list[Piece]]:
    """The pieces before and after character `at`."""
    before: list[Piece] = []
    after: list[Piece] = []
    for text, accepted in pieces:
        before.append((text[:at], accepted))
        after.append((text[at:], accepted))
        at = max(0, at - len(text))
    return before, [piece for piece in after if piece[0]]
