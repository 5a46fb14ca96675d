"""The other side of a remote drafter: follows texts of targets elsewhere, and runs ahead of them with its own model.

It goes on drafting while a target verifies. As long as the text goes on as it was drafted nothing is thrown away;
otherwise it begins anew behind what the target said.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Protocol

from draftwood.drafters.remote_protocol import (
    LONGEST,
    MOST_ENTRIES,
    MOST_WAITING,
    TO_DRAFTER,
    Draft,
    DraftCommit,
    DraftSync,
    Guess,
    Row,
    welcome_target,
)
from draftwood.engine.served import ServedEngine
from draftwood.errors import DraftwoodError, WireError
from draftwood.request import Event, SamplingParams, TokenLogprob
from draftwood.wire import Line

MOST_SEQUENCES = 4096  # of one target
MOST_NODES = 256
AHEAD = 3  # times as many tokens as a tree has: they last until what the target kept of a tree has come
log = logging.getLogger(__name__)
Hear = Callable[[Sequence[Guess], bool], None]  # more guesses, and whether they were the last
Cancel = Callable[[], None]


class Speaker(Protocol):
    """What can go on with a text."""

    def speak(self, tokens: Sequence[int], wish: DraftSync, count: int, hear: Hear) -> Cancel:
        """Guess the next `count` tokens in the way of `wish`; `hear` is told of them as they come, on any thread."""
        ...


@dataclass(frozen=True)
class EngineSpeaker:
    """What an engine's model says: its likeliest tokens, with as many alternatives to each as `width` has room for; or
    tokens drawn from the likeliest ones, with noise of their own.
    """

    engine: ServedEngine
    width: int = 1

    def speak(self, tokens: Sequence[int], wish: DraftSync, count: int, hear: Hear) -> Cancel:
        """A request; its prefix is in the cache but for the last tokens."""
        entries = min(wish.entries, MOST_ENTRIES) if wish.temperature > 0 else 0
        params = SamplingParams(max_tokens=count, ignore_eos=True, cache_salt=wish.salt)
        if entries:  # one more tells where another token is as likely as the last of them
            shown = {"temperature": wish.temperature, "top_k": entries, "logprobs": entries + 1}
        else:
            shown = {"logprobs": self.width} if self.width > 1 else {}
        try:
            _, request = self.engine.intake.request(list(tokens), replace(params, **shown))
        except DraftwoodError:  # too long for this model: nothing to say
            hear((), True)
            return lambda: None
        over = False

        def tell(event: Event) -> None:
            nonlocal over
            guesses = [self._guess(token, entry, entries) for token, entry in _told(event)]
            known = [] if over else [guess for guess in takewhile(bool, guesses) if guess is not None]
            over = over or len(known) < len(guesses)
            hear(known, event.finished)

        self.engine.submit(request, tell)
        return lambda: self.engine.cancel(request.id)

    def _guess(self, token: int, entry: TokenLogprob | None, entries: int) -> Guess | None:
        """None where it is not known what the token was drawn from: guesses end there."""
        if entry is None:
            return Guess((token,))
        if not entries:
            return Guess((token, *[other for other, _ in entry.top if other != token][: self.width - 1]))
        row: Row = entry.top[:entries]
        tied = len(entry.top) > entries and entry.top[entries][1] == row[-1][1]
        return None if tied or all(token != other for other, _ in row) else Guess((token,), row)


def _told(event: Event) -> Iterator[tuple[int, TokenLogprob | None]]:
    return zip(event.token_ids, event.logprobs or [None] * len(event.token_ids), strict=True)


def _not_yet() -> None:
    """There is nothing to cancel so far."""


@dataclass
class _Text:
    """A text that is followed, and what is guessed behind it."""

    wish: DraftSync
    tokens: list[int]
    ahead: list[Guess] = field(default_factory=list)
    branch: int = 1
    final: bool = False  # the speaker has nothing more to say
    cancel: Cancel | None = None  # of the guessing under way
    turn: int = 0  # guesses of an earlier one do not count
    asked: int = 0  # guesses of this one that have not come

    @property
    def nodes(self) -> int:
        """That a tree should have."""
        return max(1, min(self.wish.nodes, MOST_NODES))

    def accepts(self, news: Sequence[int]) -> bool:
        """The text goes on; whether it does so as it was guessed."""
        guessed = [guess.tokens[0] for guess in self.ahead[: len(news)]]
        self.tokens += news
        self.ahead = self.ahead[len(news) :]
        return guessed == list(news)

    def grown(self, guesses: Sequence[Guess]) -> Draft:
        """More guesses, as they are sent."""
        base = len(self.tokens) + len(self.ahead)
        self.ahead += guesses
        return Draft(self.wish.sequence, self.branch, base, tuple(guesses), self.final)


class DraftSession:
    """One target's texts."""

    def __init__(self, speaker: Speaker, line: Line) -> None:
        self._speaker = speaker
        self._line = line
        self._texts: dict[int, _Text] = {}
        self._guard = threading.RLock()

    def run(self) -> None:
        """Until the target hangs up or sends what cannot be read."""
        try:
            for _, message in self._line.messages():
                with self._guard:
                    self._obey(message)
        finally:
            with self._guard:
                for text in self._texts.values():
                    self._stop(text)
                self._texts.clear()

    def _obey(self, message: DraftSync | DraftCommit | int) -> None:
        match message:
            case DraftSync() if len(self._texts) < MOST_SEQUENCES and message.tokens:
                text = self._texts[message.sequence] = _Text(message, list(message.tokens))
                self._go_on(text)
            case DraftCommit() if message.sequence in self._texts:
                self._commit(self._texts[message.sequence], message)
            case int() if message in self._texts:
                self._stop(self._texts.pop(message))
            case _:
                pass  # closed meanwhile

    def _commit(self, text: _Text, news: DraftCommit) -> None:
        if news.base != len(text.tokens):
            raise WireError(f"A text of {len(text.tokens)} tokens was continued behind {news.base}.")
        if not text.accepts(news.tokens):
            self._stop(text)
            text.ahead, text.final, text.branch = [], False, text.branch + 1
        self._go_on(text)

    def _go_on(self, text: _Text) -> None:
        """Guess more, unless that is being done or there are enough."""
        missing = AHEAD * text.nodes - len(text.ahead)
        if text.cancel is not None or text.final or missing < text.nodes:
            return
        text.turn += 1
        turn, text.asked = text.turn, missing
        text.cancel = _not_yet
        whole = [*text.tokens, *(guess.tokens[0] for guess in text.ahead)]
        cancel = self._speaker.speak(
            whole, text.wish, missing, lambda guesses, last: self._hear(text, turn, guesses, last)
        )
        if text.cancel is _not_yet:  # it has not ended already
            text.cancel = cancel

    def _hear(self, text: _Text, turn: int, guesses: Sequence[Guess], last: bool) -> None:
        with self._guard:
            if turn != text.turn or text.wish.sequence not in self._texts:
                return
            text.asked -= len(guesses)
            if last:
                text.cancel, text.final = None, text.asked > 0
            if guesses or text.final:
                self._line.send("draft", text.grown(guesses))
            if last:  # the text may have come a long way meanwhile
                self._go_on(text)

    def _stop(self, text: _Text) -> None:
        text.turn += 1
        if text.cancel is not None:
            text.cancel()
            text.cancel = None


class DrafterHost:
    """Listens for targets; each has a thread."""

    def __init__(self, speaker: Speaker, vocabulary: str, listener: socket.socket, key: bytes = b"") -> None:
        self._speaker = speaker
        self._vocabulary = vocabulary
        self._listener = listener
        self._key = key
        self._ends: set[socket.socket] = set()
        self._guard = threading.Lock()

    def run(self) -> None:
        """Until it is closed."""
        for end in self._arrivals():
            threading.Thread(target=self._serve, args=(end,), name="draftwood-target", daemon=True).start()

    def close(self) -> None:
        """Hang up on all targets."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._guard:
            ends = list(self._ends)
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _arrivals(self) -> Iterator[socket.socket]:
        while True:
            try:
                yield self._listener.accept()[0]
            except OSError:
                return

    def _serve(self, end: socket.socket) -> None:
        with self._guard:
            self._ends.add(end)
        try:
            welcome_target(end, self._key, self._vocabulary)
            line = Line(end, TO_DRAFTER, LONGEST, MOST_WAITING)
            try:
                DraftSession(self._speaker, line).run()
            finally:
                line.close(0)
        except (OSError, DraftwoodError) as error:
            log.warning("a target is gone: %s", error)
        finally:
            with self._guard:
                self._ends.discard(end)
            end.close()
