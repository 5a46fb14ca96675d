"""The connection to a drafter on another machine, and what has come over it for the sequences of a step."""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from draftwood.drafters.remote_protocol import (
    LONGEST,
    MOST_ENTRIES,
    MOST_WAITING,
    TO_TARGET,
    Draft,
    DraftCommit,
    DraftSync,
    Guess,
    address_of,
    welcome_drafter,
)
from draftwood.errors import DraftwoodError, InvalidRequest, WireError
from draftwood.protocols import HostView
from draftwood.wire import Line

MOST_NODES = 4096  # of what comes at once
LIES = 3  # messages that cannot be, before a drafter is left alone for good
MISSES = 3  # deadlines missed one after the other before no step waits for drafts of a sequence, until some come
RETRY = 1.0, 30.0  # seconds between attempts to connect again, at first and at most
log = logging.getLogger(__name__)


@dataclass
class Followed:
    """A sequence that the drafter knows, and how it says that its text goes on."""

    length: int  # tokens that it was told
    branch: int = 0
    base: int = 0  # place in the text of the first guess
    guesses: list[Guess] = field(default_factory=list)
    final: bool = False  # the branch will not grow
    lost: bool = False  # the text went on otherwise than the branch says
    judged: int = 0  # draws before this place have been looked at, and are no fair draws any more

    def take(self, draft: Draft) -> bool:
        """More guesses; whether they are of use. Those of an earlier branch come too late."""
        if draft.branch > self.branch and 0 < draft.base <= self.length:
            self.branch, self.base, self.guesses = draft.branch, draft.base, []
            self.final, self.lost, self.judged = False, False, 0
        if draft.branch != self.branch or self.lost:
            return False
        if draft.base != self.base + len(self.guesses):
            raise WireError("Its guesses do not begin where the last ones ended.")
        self.guesses += draft.guesses
        self.final = draft.final
        return True

    def reached(self, tokens: Sequence[int]) -> bool:
        """Drop the guesses that the text has come to; whether those that are left stand behind it."""
        said = zip(self.guesses, tokens[self.base :], strict=False)
        agreed = [guess.tokens[0] == token for guess, token in said]
        self.lost = self.lost or not all(agreed)
        self.base += len(agreed)
        self.guesses = [] if self.lost else self.guesses[len(agreed) :]
        return self.branch > 0 and not self.lost and self.base == len(tokens)


class Link:
    """The connection, and what came over it; connects again when it is lost."""

    def __init__(self, url: str, key: bytes, vocabulary: str, vocab_size: int) -> None:
        """Raises `InvalidRequest` where no drafter answers, or one that will not do."""
        self.url = url
        self._address = address_of(url)
        self._greeting = key, vocabulary
        self._vocab_size = vocab_size
        self._changed = threading.Condition()
        self._followed: dict[int, Followed] = {}
        self._closed = threading.Event()
        self.arrived = 0  # drafts
        try:
            self._line: Line | None = self._connect()
        except (OSError, WireError) as error:
            raise InvalidRequest(f"The drafter at {url} cannot be reached: {error}") from error
        self._reader = threading.Thread(target=self._run, name="draftwood-remote-drafter", daemon=True)
        self._reader.start()

    def follow(self, text: DraftSync) -> None:
        """Tell the drafter how a text goes on, of which it may know the beginning."""
        with self._changed:
            if self._line is None:
                return
            known = self._followed.get(text.sequence)
            if known is None:
                self._followed[text.sequence] = Followed(len(text.tokens))
                self._line.send("sync", text)
            elif known.length < len(text.tokens):
                news = text.tokens[known.length :]
                self._line.send("commit", DraftCommit(text.sequence, known.length, news))
                known.length = len(text.tokens)

    def drop(self, sequence: int) -> None:
        """The text has ended."""
        with self._changed:
            if self._followed.pop(sequence, None) is not None and self._line is not None:
                self._line.send("close", sequence)

    def guesses(self, sequence: int, tokens: Sequence[int], most: int, *, final: bool) -> tuple[list[Guess], bool]:
        """How the drafter goes on with a text, and whether no more of it is expected. What is drawn is looked at if
        this is `final`: given again, it is chosen.
        """
        with self._changed:
            known = self._followed.get(sequence)
            if known is None or not known.reached(tokens):
                return [], False
            found, fair = known.guesses[:most], known.judged - len(tokens)
            found = [replace(guess, row=()) if i < fair else guess for i, guess in enumerate(found)]
            if final:
                known.judged = max(known.judged, len(tokens) + len(found))
            return found, known.final or len(found) == most

    def wait(self, seconds: float, arrived: int) -> bool:
        """Until more than `arrived` drafts have come; False if that takes too long or will not be."""
        with self._changed:
            self._changed.wait_for(lambda: self._line is None or self.arrived > arrived, seconds)
            return self._line is not None and self.arrived > arrived

    def close(self) -> None:
        """Hang up for good."""
        self._closed.set()
        with self._changed:
            line, self._line = self._line, None
            self._changed.notify_all()
        if line is not None:
            line.close()

    def _connect(self) -> Line:
        end = socket.create_connection(self._address, timeout=10)
        try:
            welcome_drafter(end, *self._greeting)
            return Line(end, TO_TARGET, LONGEST, MOST_WAITING)
        except BaseException:
            end.close()
            raise

    def _run(self) -> None:
        line, lies = self._line, 0
        while line is not None:
            reason: object = "it hung up"
            try:
                for _, draft in line.messages():
                    self._take(draft)
            except WireError as error:
                reason, lies = error, lies + 1
            line.close(0)
            if self._closed.is_set():
                return
            log.warning("The remote drafter at %s is lost (%s): answers go on without its drafts.", self.url, reason)
            with self._changed:
                self._line = None
                self._followed.clear()
                self._changed.notify_all()
            line = self._again() if lies < LIES else None
        if lies >= LIES:
            log.error("The remote drafter at %s is not asked any more. Restart the engine to use it again.", self.url)

    def _again(self) -> Line | None:
        """Another connection, however long it takes; None once this is closed."""
        pause, longest = RETRY
        while not self._closed.wait(pause):
            pause = min(2 * pause, longest)
            with suppress(OSError, DraftwoodError):
                line = self._connect()
                with self._changed:
                    if not self._closed.is_set():
                        self._line = line
                        log.warning("The remote drafter at %s is back.", self.url)
                        return line
                line.close(0)
        return None

    def _take(self, draft: Draft) -> None:
        """Refuses what no drafter would say: then it is hung up on."""
        for guess in draft.guesses:
            drawn = dict(guess.row)
            if not guess.tokens or any(not 0 <= token < self._vocab_size for token in (*guess.tokens, *drawn)):
                raise WireError("It sent tokens that are not in the vocabulary.")
            if drawn and not (
                len(drawn) == len(guess.row) <= MOST_ENTRIES
                and all(map(math.isfinite, drawn.values()))
                and guess.tokens[0] in drawn
            ):
                raise WireError("It sent a token that cannot have been drawn from the row beside it.")
        with self._changed:
            known = self._followed.get(draft.sequence)
            if known is not None and known.take(draft):
                if len(known.guesses) > MOST_NODES:
                    raise WireError(f"It sent more than {MOST_NODES} guesses at once.")
                self.arrived += 1
                self._changed.notify_all()


@dataclass
class Arrivals:
    """What has come for the sequences of a step, `wait` seconds from when it could begin."""

    link: Link
    nodes: int  # that a tree should have
    wait: float
    entries: int = 0  # of the rows that tokens are drawn from; 0: they are chosen
    misses: dict[int, int] = field(default_factory=dict)  # of each sequence, one after the other

    def take(self, view: HostView, most: int) -> list[list[Guess]]:
        """Guesses for every sequence, at most as many as it has room for and never more than `most`."""
        for each in filter(None, (view, view.resting)):
            for number, tokens, params, room in zip(
                each.seq_ids, each.tokens, each.params, each.max_nodes, strict=True
            ):
                if room > 0:
                    wish = params.temperature, self.entries
                    self.link.follow(DraftSync(number, tuple(tokens), self.nodes, params.cache_salt, *wish))
        rooms = [max(0, min(*limits, most)) for limits in zip(view.max_nodes, view.max_depth, strict=True)]
        self._wait(view, rooms)
        asked = zip(view.seq_ids, view.tokens, rooms, strict=True)
        found = [self.link.guesses(*one, final=True) if one[2] else ([], True) for one in asked]
        for number, (guesses, done) in zip(view.seq_ids, found, strict=True):
            self.misses[number] = 0 if guesses or done else self.misses.get(number, 0) + 1
        return [guesses for guesses, _ in found]

    def _wait(self, view: HostView, rooms: list[int]) -> None:
        """Until all that was asked for has come, or the deadline passes."""
        end = time.monotonic() + self.wait
        asked = [one for one in zip(view.seq_ids, view.tokens, rooms, strict=True) if one[2]]
        while True:
            arrived = self.link.arrived
            asked = [one for one in asked if not self.link.guesses(*one, final=False)[1]]
            patient = any(self.misses.get(number, 0) < MISSES for number, *_ in asked)
            left = end - time.monotonic() if patient else 0.0
            if left <= 0 or not self.link.wait(left, arrived):
                return

    def drop(self, sequence: int) -> None:
        """Tell the drafter that it may forget the text."""
        self.misses.pop(sequence, None)
        self.link.drop(sequence)
