"""What a target and a remote drafter say to each other, version 2.

After the handshake the target's side sends texts as they grow, and the drafter's side sends guesses of how they go on,
each once. Neither waits for the other. A guess that was drawn comes with what it was drawn from: the few likeliest
tokens, in which case nothing else can be drawn.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from draftwood.errors import InvalidRequest, WireError
from draftwood.wire import Frames, packer, unpacker

VERSION = 2
KEY_VARIABLE = "DRAFTWOOD_DRAFTER_KEY"
LONGEST = 1 << 24  # bytes of a frame
LONGEST_GREETING = 1 << 12
GREETING_SECONDS = 10.0
MOST_WAITING = 4096  # messages
MOST_ENTRIES = 64  # of a row
T = TypeVar("T")
Row = tuple[tuple[int, float], ...]  # tokens and the logarithms of their chances at temperature 1, up to a constant


@dataclass(frozen=True, slots=True)
class Challenge:
    """The drafter's side begins."""

    version: int
    nonce: str


@dataclass(frozen=True, slots=True)
class Hello:
    """The target's side knows the key, and says whose tokens it speaks of."""

    version: int
    nonce: str
    proof: str
    vocabulary: str  # fingerprint


@dataclass(frozen=True, slots=True)
class Welcome:
    """The drafter's side knows the key too; or why it will not draft."""

    proof: str
    refusal: str | None = None


@dataclass(frozen=True, slots=True)
class DraftSync:
    """A text from its beginning."""

    sequence: int
    tokens: tuple[int, ...]
    nodes: int  # that a tree should have
    salt: str  # texts with different ones share nothing
    temperature: float = 0.0  # at which guesses are drawn
    entries: int = 0  # of the rows they are drawn from; 0: the likeliest tokens are chosen


@dataclass(frozen=True, slots=True)
class DraftCommit:
    """How a text goes on behind its first `base` tokens."""

    sequence: int
    base: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Guess:
    """What may stand in one place of a text."""

    tokens: tuple[int, ...]  # behind the first the next guess stands; the others are alternatives to it
    row: Row = ()  # what the first was drawn from; (): it was chosen


@dataclass(frozen=True, slots=True)
class Draft:
    """How a text may go on, from its place `base` on: where the last guesses of the same branch ended."""

    sequence: int
    branch: int  # one with a higher number begins anew, because the text went on otherwise
    base: int
    guesses: tuple[Guess, ...]
    final: bool  # this branch will not grow


TO_DRAFTER: Mapping[str, type] = {"sync": DraftSync, "commit": DraftCommit, "close": int}
TO_TARGET: Mapping[str, type] = {"draft": Draft}


def key_from_environment() -> bytes:
    """The key both sides share; empty if there is none."""
    return os.environ.get(KEY_VARIABLE, "").encode()


def address_of(url: str) -> tuple[str, int]:
    """`tcp://HOST:PORT` or `HOST:PORT`."""
    host, colon, port = url.removeprefix("tcp://").rpartition(":")
    if not (colon and host and port.isdecimal() and int(port) < 1 << 16):
        raise InvalidRequest(f"'{url}' is no address of a drafter: write remote:HOST:PORT.")
    return host.strip("[]"), int(port)


def welcome_drafter(end: socket.socket, key: bytes, vocabulary: str) -> None:
    """The target's half of the handshake; raises `InvalidRequest` for what will not change by trying again."""
    frames = _greeting(end)
    challenge = _read(frames, Challenge)
    if challenge.version != VERSION:
        raise InvalidRequest(f"The drafter speaks version {challenge.version} of the protocol, and this is {VERSION}.")
    nonce = secrets.token_hex(16)
    proof = _proof(key, "target", challenge.nonce, nonce)
    _write(frames, Hello(VERSION, nonce, proof, vocabulary))
    answer = _read(frames, Welcome)
    if answer.refusal is not None:
        raise InvalidRequest(f"The drafter refused: {answer.refusal}")
    if not hmac.compare_digest(answer.proof, _proof(key, "drafter", challenge.nonce, nonce)):
        raise InvalidRequest(f"What answers does not know the key in {KEY_VARIABLE}: prompts are not sent to it.")
    end.settimeout(None)


def welcome_target(end: socket.socket, key: bytes, vocabulary: str) -> None:
    """The drafter's half; raises `WireError` for those it will not draft for."""
    frames = _greeting(end)
    nonce = secrets.token_hex(16)
    _write(frames, Challenge(VERSION, nonce))
    hello = _read(frames, Hello)
    refusal = None
    if hello.version != VERSION:
        refusal = f"it speaks version {VERSION} of the protocol."
    elif not hmac.compare_digest(hello.proof, _proof(key, "target", nonce, hello.nonce)):
        refusal = f"the keys in {KEY_VARIABLE} differ."
    elif hello.vocabulary != vocabulary:
        refusal = "its model has another vocabulary, so its tokens mean something else."
    _write(frames, Welcome("" if refusal else _proof(key, "drafter", nonce, hello.nonce), refusal))
    if refusal is not None:
        raise WireError(f"A target was refused: {refusal}")
    end.settimeout(None)


def _greeting(end: socket.socket) -> Frames:
    end.settimeout(GREETING_SECONDS)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Frames(end, LONGEST_GREETING)


def _proof(key: bytes, who: str, drafters: str, targets: str) -> str:
    return hmac.new(key, f"{who}/{VERSION}/{drafters}/{targets}".encode(), hashlib.sha256).hexdigest()


def _write(frames: Frames, greeting: object) -> None:
    convert = packer(type(greeting))
    assert convert is not None
    frames.send(convert(greeting))


def _read(frames: Frames, kind: type[T]) -> T:
    greeting = frames.receive()
    if greeting is None:
        raise WireError("The other side hung up before it had said who it is.")
    return unpacker(kind)(greeting)
