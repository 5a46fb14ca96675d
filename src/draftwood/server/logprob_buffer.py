"""What is known of an answer's tokens, held back until their text is certain: a stop string may take them back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from draftwood.model.tokenizer import Detokenizer, Tokenizer
from draftwood.request import Event, TokenLogprob, TracedToken

T = TypeVar("T", TokenLogprob, TracedToken)


@dataclass(frozen=True)
class Spoken(Generic[T]):
    """What is known of a token, and its text in the answer."""

    entry: T
    text: str  # whole characters: one that began with an earlier token is here, one that is not complete is not
    start: int  # characters of the answer before it

    @property
    def end(self) -> int:
        """Characters of the answer with it."""
        return self.start + len(self.text)


class LogprobBuffer(Generic[T]):
    """Follows an answer's text along its tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._reader = Detokenizer(tokenizer)
        self._read = 0  # characters of all tokens
        self._told = 0  # characters that are certain
        self._held: list[Spoken[T]] = []

    def add(self, entries: Iterable[T], event: Event) -> list[Spoken[T]]:
        """`entries` are the event's. Those whose text is certain with it."""
        for entry in entries:
            self._hold(entry, self._reader.push([entry.token]))
        self._told += len(event.text)
        if event.finished and self._held:  # half a character at the end is read with the last token
            last = self._held.pop()
            self._held.append(Spoken(last.entry, last.text + self._reader.flush(), last.start))
        return self._released(last=event.finished)

    def _hold(self, entry: T, text: str) -> None:
        self._held.append(Spoken(entry, text, self._read))
        self._read += len(text)

    def _released(self, *, last: bool) -> list[Spoken[T]]:
        released: list[Spoken[T]] = []
        for spoken in self._held:
            if spoken.end > self._told:
                if last and spoken.start < self._told:  # a stop string begins inside it
                    released.append(Spoken(spoken.entry, spoken.text[: self._told - spoken.start], spoken.start))
                break
            released.append(spoken)
        self._held = self._held[len(released) :]
        return released
