"""Data on its way to another process: dataclasses as JSON arrays, in frames of a bounded length. Nothing is executed.

What is read is checked against the types of the dataclass it is read as, so a peer that sends something else gets a
`WireError` and nothing of it comes in.
"""

from __future__ import annotations

import base64
import json
import math
import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import lru_cache
from operator import attrgetter
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from draftwood.errors import WireError

Convert = Callable[[Any], Any]
HEADER = struct.Struct("!I")  # bytes of the frame that follows
PLAIN = (bool, int, str, float)
TENSORS = {"int64": torch.int64, "float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16,
           "float16": torch.float16}  # fmt: skip


@lru_cache(maxsize=256)
def packer(kind: Any) -> Convert | None:
    """What turns values of a type into lists, numbers and texts; None: they are that already."""
    if is_dataclass(kind):
        return _dataclass_packer(kind)
    if kind is Tensor:
        return _pack_tensor
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        inner = packer(_but_none(parts))
        return None if inner is None else lambda value: None if value is None else inner(value)
    if origin is Mapping:
        return lambda value: list(value.items())
    if origin is frozenset:
        return lambda value: sorted(int(item) for item in value)
    if origin is tuple and parts[-1] is Ellipsis:
        inner = packer(parts[0])
        return None if inner is None else lambda value: [inner(item) for item in value]
    return None  # numbers, texts, members of a StrEnum, and tuples of these


def _dataclass_packer(kind: Any) -> Convert:
    hints, names = get_type_hints(kind), [field.name for field in fields(kind)]
    read = attrgetter(*names) if len(names) > 1 else lambda value: (getattr(value, names[0]),)
    inner = [(i, convert) for i, name in enumerate(names) if (convert := packer(hints[name])) is not None]

    def pack(value: Any) -> list[Any]:
        values = list(read(value))
        for i, convert in inner:
            values[i] = convert(values[i])
        return values

    return pack


@lru_cache(maxsize=256)
def unpacker(kind: Any) -> Convert:
    """What makes values of a type again; raises `WireError` for anything else."""
    if is_dataclass(kind):
        return _dataclass_unpacker(kind)
    if kind is Tensor:
        return _unpack_tensor
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        inner = unpacker(_but_none(parts))
        return lambda value: None if value is None else inner(value)
    if origin is Mapping:
        return _mapping_unpacker(*map(unpacker, parts))
    if origin in (tuple, frozenset):
        return _sequence_unpacker(origin, parts)
    if kind in PLAIN:
        return _plain_unpacker(kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return lambda value: _made(kind, value)
    raise TypeError(f"values of {kind} do not cross a border")


def _dataclass_unpacker(kind: Any) -> Convert:
    hints = get_type_hints(kind)
    parts = [unpacker(hints[field.name]) for field in fields(kind)]

    def unpack(values: Any) -> Any:
        if type(values) is not list or len(values) != len(parts):
            raise WireError(f"This is no {kind.__name__}.")
        return _made(kind, *[part(value) for part, value in zip(parts, values, strict=True)])

    return unpack


def _sequence_unpacker(made: Any, parts: tuple[Any, ...]) -> Convert:
    if made is tuple and parts[-1] is not Ellipsis:
        return _fixed_unpacker([unpacker(part) for part in parts])
    inner, plain = unpacker(parts[0]), parts[0] if parts[0] in (int, bool) else None

    def unpack(values: Any) -> Any:
        if type(values) is not list:
            raise WireError("This is no list.")
        if plain is not None and set(map(type, values)) <= {plain}:
            return made(values)
        return made(map(inner, values))

    return unpack


def _fixed_unpacker(parts: list[Convert]) -> Convert:
    def unpack(values: Any) -> tuple[Any, ...]:
        if type(values) is not list or len(values) != len(parts):
            raise WireError(f"These are not {len(parts)} values.")
        return tuple(part(value) for part, value in zip(parts, values, strict=True))

    return unpack


def _mapping_unpacker(key: Convert, item: Convert) -> Convert:
    pairs = _fixed_unpacker([key, item])

    def unpack(values: Any) -> dict[Any, Any]:
        if type(values) is not list:
            raise WireError("This is no list of pairs.")
        return dict(map(pairs, values))

    return unpack


def _plain_unpacker(kind: type) -> Convert:
    kinds = {int, float} if kind is float else {kind}

    def unpack(value: Any) -> Any:
        if type(value) not in kinds:
            raise WireError(f"This is no {kind.__name__}: {str(value)[:40]!r}.")
        return value

    return unpack


def _pack_tensor(tensor: Tensor) -> list[Any]:
    names = {dtype: name for name, dtype in TENSORS.items()}
    content = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return [names[tensor.dtype], list(tensor.shape), base64.b64encode(content).decode()]


def _unpack_tensor(value: Any) -> Tensor:
    try:
        name, shape, text = value
        content = bytearray(base64.b64decode(text, validate=True))
        flat = torch.frombuffer(content, dtype=TENSORS[name]) if content else torch.empty(0, dtype=TENSORS[name])
        return flat.view(shape)
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        raise WireError(f"This is no tensor: {error}.") from error


def _made(kind: Any, *values: Any) -> Any:
    try:
        return kind(*values)
    except (ValueError, TypeError) as error:
        raise WireError(f"This is no {kind.__name__}: {error}") from error


def _but_none(parts: tuple[Any, ...]) -> Any:
    (kind,) = (part for part in parts if part is not NoneType)
    return kind


class Frames:
    """JSON messages over a stream socket, each behind its length. Any thread may send; one receives."""

    def __init__(self, line: socket.socket, longest: int) -> None:
        self._line = line
        self._longest = longest
        self._sending = threading.Lock()

    def send(self, message: Any) -> None:
        """Raises `OSError` where there is nobody to read it."""
        body = json.dumps(message, separators=(",", ":")).encode()
        with self._sending:
            self._line.sendall(HEADER.pack(len(body)) + body)

    def receive(self) -> Any:
        """The next message; None at the end of the stream."""
        header = self._read(HEADER.size)
        if header is None:
            return None
        (size,) = HEADER.unpack(header)
        if size > self._longest:
            raise WireError(f"A message has {size} bytes and the limit is {self._longest}.")
        body = self._read(size)
        if body is None:
            return None
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise WireError(f"A message is no JSON: {error}.") from error

    def _read(self, size: int) -> bytes | None:
        """So many bytes; None where the stream ends before."""
        parts = []
        while size > 0:
            part = self._line.recv(min(size, 1 << 20))
            if not part:
                return None
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        """The end of the stream, for both."""
        with suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)
        self._line.close()


class Line:
    """One end of a stream of messages, each a verb and its data. Any thread may send, and none waits for the peer.

    Every frame is a list of messages: what waits to be sent is sent together.
    """

    def __init__(
        self, end: socket.socket, verbs: Mapping[str, type], longest: int, most_waiting: float = math.inf
    ) -> None:
        """`verbs`: what may come in, in frames of at most `longest` bytes. A peer that leaves more than `most_waiting`
        messages unread is hung up on.
        """
        self._frames = Frames(end, longest)
        self._verbs = verbs
        self._most_waiting = most_waiting
        self._outbox: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="draftwood-line", daemon=True)
        self._writer.start()

    def send(self, verb: str, value: object) -> None:
        """Soon, in order."""
        if self._outbox.qsize() > self._most_waiting:
            self._frames.close()
        self._outbox.put((verb, value))

    def messages(self) -> Iterator[tuple[str, Any]]:
        """What comes in, until the end of the stream. Raises `WireError` for what cannot be read."""
        try:
            while (frame := self._frames.receive()) is not None:
                for verb, value in frame:
                    yield verb, unpacker(self._verbs[verb])(value)
        except (OSError, TypeError, ValueError, KeyError) as error:
            if not isinstance(error, ConnectionError):
                raise WireError(f"The other end sent what cannot be read: {error!r}.") from error

    def close(self, patience: float = 5.0) -> None:
        """Send what waits, if that takes no longer than `patience` seconds, and hang up."""
        self._outbox.put(None)
        if patience:
            self._writer.join(patience)
        self._frames.close()

    def _write(self) -> None:
        while (letter := self._outbox.get()) is not None:
            letters = [letter]
            while not self._outbox.empty():
                more = self._outbox.get()
                if more is None:
                    self._outbox.put(None)
                    break
                letters.append(more)
            try:
                self._frames.send([[verb, _packed(value)] for verb, value in letters])
            except OSError:  # the end of the stream is noticed by those who read
                return


def _packed(value: Any) -> Any:
    convert = packer(type(value))
    return value if convert is None else convert(value)
