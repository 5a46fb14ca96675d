"""Trees of a drafter on another machine. It can be late, gone or wrong: that costs drafts, never answers.

The drafter runs ahead of the text while the target verifies, so what came for a shorter text is used as far as the text
went on as it says. What is missing when a step begins is waited for until the deadline.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from draftwood.config import EngineConfig
from draftwood.drafters.points import HostDrafter, HostTree, PointTree
from draftwood.drafters.remote_protocol import (
    LONGEST,
    MOST_WAITING,
    TO_TARGET,
    Draft,
    DraftCommit,
    DraftSync,
    address_of,
    key_from_environment,
    welcome_drafter,
)
from draftwood.entries import Entry, split_spec
from draftwood.errors import DraftwoodError, InvalidRequest, WireError
from draftwood.model.checkpoint import Checkpoint
from draftwood.protocols import HostView
from draftwood.wire import Line

MOST_NODES = 4096  # of what comes at once
LIES = 3  # messages that cannot be, before a drafter is left alone for good
MISSES = 3  # deadlines missed one after the other before no step waits for drafts of a sequence, until some come
RETRY = 1.0, 30.0  # seconds between attempts to connect again, at first and at most
log = logging.getLogger(__name__)


@dataclass
class _Followed:
    """A sequence that the drafter knows."""

    length: int  # tokens that it was told
    draft: Draft | None = None  # the last that came


class Link:
    """The connection, and what came over it; connects again when it is lost."""

    def __init__(self, url: str, key: bytes, vocabulary: str, vocab_size: int) -> None:
        """Raises `InvalidRequest` where no drafter answers, or one that will not do."""
        self.url = url
        self._address = address_of(url)
        self._greeting = key, vocabulary
        self._vocab_size = vocab_size
        self._changed = threading.Condition()
        self._followed: dict[int, _Followed] = {}
        self._closed = threading.Event()
        self.arrived = 0  # drafts
        try:
            self._line: Line | None = self._connect()
        except (OSError, WireError) as error:
            raise InvalidRequest(f"The drafter at {url} cannot be reached: {error}") from error
        self._reader = threading.Thread(target=self._run, name="draftwood-remote-drafter", daemon=True)
        self._reader.start()

    def follow(self, sequence: int, tokens: Sequence[int], nodes: int, salt: str) -> None:
        """Tell the drafter how a text goes on."""
        with self._changed:
            if self._line is None:
                return
            known = self._followed.get(sequence)
            if known is None:
                self._followed[sequence] = _Followed(len(tokens))
                self._line.send("sync", DraftSync(sequence, tuple(tokens), nodes, salt))
            elif known.length < len(tokens):
                self._line.send("commit", DraftCommit(sequence, known.length, tuple(tokens[known.length :])))
                known.length = len(tokens)

    def drop(self, sequence: int) -> None:
        """The text has ended."""
        with self._changed:
            if self._followed.pop(sequence, None) is not None and self._line is not None:
                self._line.send("close", sequence)

    def draft(self, sequence: int) -> Draft | None:
        """The last that came for a text."""
        known = self._followed.get(sequence)
        return None if known is None else known.draft

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
        nodes = enumerate(draft.parents)
        if (
            len(draft.tokens) > MOST_NODES
            or len(draft.tokens) != len(draft.parents)
            or any(not -1 <= parent < node for node, parent in nodes)
        ):
            raise WireError("What it sent is no tree.")
        if any(not 0 <= token < self._vocab_size for token in draft.tokens):
            raise WireError("It sent tokens that are not in the vocabulary.")
        with self._changed:
            known = self._followed.get(draft.sequence)
            if known is not None and draft.base <= known.length:
                known.draft = draft
                self.arrived += 1
                self._changed.notify_all()


class RemoteDrafter(HostDrafter):
    """Drafts of at most `nodes` nodes that come within `wait` milliseconds from when a step could begin."""

    def __init__(self, link: Link, nodes: int = 8, wait: float = 50.0) -> None:
        if nodes < 1 or wait < 0:
            raise ValueError("a remote drafter needs at least one node and a wait of at least 0 milliseconds")
        self.max_nodes = nodes
        self._wait = wait / 1000
        self._link = link
        self._misses: dict[int, int] = {}  # of each sequence, one after the other
        weakref.finalize(self, link.close)

    def trees(self, view: HostView, nodes: int) -> list[HostTree]:
        """What has come when the deadline passes, or all that was asked for before."""
        wanted = [
            (seq_id, tokens, min(room, nodes), depth)
            for seq_id, tokens, room, depth in zip(
                view.seq_ids, view.tokens, view.max_nodes, view.max_depth, strict=True
            )
        ]
        for (seq_id, tokens, room, _), params in zip(wanted, view.params, strict=True):
            if room > 0:
                self._link.follow(seq_id, tokens, self.max_nodes, params.cache_salt)
        end = time.monotonic() + self._wait
        while True:
            arrived = self._link.arrived
            grown = [self._grown(*one) for one in wanted]
            awaited = [seq_id for seq_id, (_, done) in zip(view.seq_ids, grown, strict=True) if not done]
            patient = any(self._misses.get(seq_id, 0) < MISSES for seq_id in awaited)
            left = end - time.monotonic() if patient else 0.0
            if left <= 0 or not self._link.wait(left, arrived):
                break
        for seq_id, (tree, done) in zip(view.seq_ids, grown, strict=True):
            missed = not done and len(tree.tokens) == 1
            self._misses[seq_id] = self._misses.get(seq_id, 0) + 1 if missed else 0
        return [(tree.tokens, tree.parents) for tree, _ in grown]

    def release(self, seq_id: int) -> None:
        """Tell the drafter that it may forget the text."""
        self._misses.pop(seq_id, None)
        self._link.drop(seq_id)

    def _grown(self, seq_id: int, tokens: Sequence[int], room: int, depth: int) -> tuple[PointTree, bool]:
        """The tree of a sequence as far as it has come, and whether no more of it is expected."""
        tree = PointTree(tokens[-1], room, depth)
        draft = self._link.draft(seq_id) if room > 0 and depth > 0 else None
        if draft is None:
            return tree, room <= 0 or depth <= 0
        place = {-1: 0} if draft.base == len(tokens) else _rerooted(draft, tokens[draft.base :])
        for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
            if parent in place and node not in place:
                added = tree.add(place[parent], token)
                if added is not None:
                    place[node] = added
        fresh = draft.base == len(tokens) or bool(place)
        return tree, fresh and (draft.final or len(tree.tokens) > min(room, depth))


def _rerooted(draft: Draft, news: Sequence[int]) -> dict[int, int]:
    """The node that a text has come to since, as the root; none where it went on otherwise."""
    children = {
        (parent, token): node for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True))
    }
    at: int | None = -1
    for token in news:
        at = None if at is None else children.get((at, token))
    return {} if at is None else {at: 0}


REMOTE_DRAFTER = "remote:HOST:PORT"
REMOTE = Entry(
    lambda **settings: settings,
    {"url": "", "nodes": 6, "wait": 50.0},
    "what `draftwood drafter serve` says on another machine; wait: milliseconds after which a step begins without it",
    on_gpu={"nodes": 8, "wait": 20.0},
    unnamed="url",
)


def build_remote(spec: str, target: Checkpoint, config: EngineConfig) -> RemoteDrafter:
    """A drafter on another machine, once it has shown that it knows the key and the vocabulary."""
    name, settings = split_spec(spec, REMOTE.unnamed)
    values = REMOTE.on(config.torch_device()).build("drafter", name, settings)
    link = Link(values["url"], key_from_environment(), target.tokenizer().fingerprint, target.config.vocab_size)
    try:
        return RemoteDrafter(link, values["nodes"], values["wait"])
    except ValueError as error:
        link.close()
        raise InvalidRequest(f"The drafter '{spec}' cannot be built: {error}.") from error
