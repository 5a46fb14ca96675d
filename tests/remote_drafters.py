"""Remote drafters on loopback: a host in a thread of this process, and peers that behave badly."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache

import torch

from draftwood.drafters.ngram import NgramDrafter
from draftwood.drafters.points import PointTree
from draftwood.drafters.remote import RemoteDrafter
from draftwood.drafters.remote_link import Link
from draftwood.drafters.remote_protocol import LONGEST, TO_DRAFTER, DraftSync, Guess, welcome_target
from draftwood.drafters.remote_sampler import RemoteSampler
from draftwood.engine.drafter_host import Cancel, DrafterHost, Hear, Speaker
from draftwood.wire import Line
from tiny import DraftMaker

VOCABULARY, VOCAB_SIZE = "tiny", 13
KEY = b"shared"


@dataclass(eq=False)
class PeriodicSpeaker:
    """Says again what followed the last tokens earlier in the text, with rows where draws are wished for."""

    spoken: list[tuple[int, ...]] = field(default_factory=list)

    def speak(self, tokens: Sequence[int], wish: DraftSync, count: int, hear: Hear) -> Cancel:
        self.spoken.append(tuple(tokens))
        tree = PointTree(tokens[-1], count, count)
        NgramDrafter(nodes=count, shortest=1).fill(tree, 0, tokens)
        entries = wish.entries if wish.temperature > 0 else 0
        rows = [tuple(((token + i) % VOCAB_SIZE, -float(i)) for i in range(entries)) for token in tree.tokens[1:]]
        said = zip(tree.tokens[1:], rows, strict=True)
        hear([Guess((token, (token + 1) % VOCAB_SIZE), row) for token, row in said], True)
        return lambda: None


@cache
def hosted(speaker: Speaker) -> str:
    """The address of a host that lives as long as the tests."""
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=DrafterHost(speaker, VOCABULARY, listener, KEY).run, daemon=True).start()
    return f"127.0.0.1:{listener.getsockname()[1]}"


def link_to(address: str) -> Link:
    return Link(address, KEY, VOCABULARY, VOCAB_SIZE)


def remote(speaker: Speaker, nodes: int = 5, wait: float = 2000.0) -> DraftMaker:
    def make(dtype: torch.dtype) -> RemoteDrafter:
        return RemoteDrafter(link_to(hosted(speaker)), nodes, wait)

    return make


def sampling(speaker: Speaker, nodes: int = 6, draws: int = 3, width: int = 2) -> DraftMaker:
    def make(dtype: torch.dtype) -> RemoteSampler:
        return RemoteSampler(link_to(hosted(speaker)), nodes, 2000.0, draws, width)

    return make


Behaviour = Callable[[socket.socket], None]


@contextmanager
def peer(behaviour: Behaviour) -> Iterator[str]:
    """The address of something that knows the key and then does as it likes with each connection."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(end: socket.socket) -> None:
        with end, suppress(OSError):
            welcome_target(end, KEY, VOCABULARY)
            behaviour(end)

    def listen() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    listening = threading.Thread(target=listen)
    listening.start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    with suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    listening.join()


def messages(end: socket.socket) -> Iterator[tuple[Line, object]]:
    """What a target says, and the line to answer on."""
    line = Line(end, TO_DRAFTER, LONGEST)
    try:
        for _, message in line.messages():
            yield line, message
    finally:
        line.close(0)
