"""What the prefix cache holds, published over ZeroMQ in the form of vLLM's KV events, for routers.

A message has a topic, a sequence number of eight bytes, and a msgpack array: a time, events as maps, and the rank. Only
full pages of committed tokens are told of. A block's hash covers its salt and all tokens before it.
"""

from __future__ import annotations

import hashlib
import queue
import threading
import time
from array import array
from typing import TYPE_CHECKING, Any

from draftwood.cache.blocks import Key
from draftwood.engine.engine import Engine
from draftwood.engine.worker import ComputeThread
from draftwood.errors import InvalidRequest

if TYPE_CHECKING:
    import zmq  # pyright: ignore[reportMissingImports]

MOST_WAITING = 100_000  # messages for a subscriber that does not keep up; it notices by the sequence numbers
RANK = 0


def block_hash(parent: int | None, tokens: tuple[int, ...], salt: str) -> int:
    """64 bits that name a block and everything before it."""
    digest = hashlib.sha256(b"" if parent is None else parent.to_bytes(8, "big"))
    digest.update(salt.encode() if parent is None else b"")
    digest.update(array("q", tokens).tobytes())
    return int.from_bytes(digest.digest()[:8], "big")


class KvEvents:
    """A `PageWatcher`: hears on the compute thread, publishes on one of its own."""

    def __init__(self, page_size: int, endpoint: str, topic: str = "") -> None:
        self._page_size = page_size
        self._topic = topic.encode()
        self._medium = "GPU"  # routers know no other name for the first tier
        self._hashes: dict[int, int] = {}  # of pages, by the key of the prefix that ends with each
        self._events: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        socket = _publisher(endpoint)
        self._events.put({"type": "AllBlocksCleared"})  # whatever ran here before is gone
        self._thread = threading.Thread(target=self._publish, args=(socket,), name="draftwood-kv-events", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, engine: Engine, endpoint: str, topic: str = "") -> KvEvents:
        """Of an engine that has just been loaded."""
        tables = engine.scheduler.tables
        made = cls(tables.page_size, endpoint, topic)

        def attach() -> None:
            tables.pool.watcher = made

        ComputeThread.shared().call(attach)
        return made

    def stored(self, key: int, before: Key, tokens: tuple[int, ...]) -> None:
        """A page can be found from now on."""
        salt = before if isinstance(before, str) else ""
        parent = None if isinstance(before, str) else self._hashes.get(before)
        if parent is None and not isinstance(before, str):
            return  # what is before it cannot be found any more, and so neither can it
        self._hashes[key] = block_hash(parent, tokens, salt)
        event = {
            "type": "BlockStored",
            "block_hashes": [self._hashes[key]],
            "parent_block_hash": parent,
            "token_ids": list(tokens),
            "block_size": self._page_size,
            "lora_id": None,
            "medium": self._medium,
            "lora_name": None,
        }
        if salt:
            event["extra_keys"] = [[salt]]
        self._events.put(event)

    def removed(self, key: int) -> None:
        """A page cannot be found any more."""
        hashed = self._hashes.pop(key, None)
        if hashed is not None:
            self._events.put({"type": "BlockRemoved", "block_hashes": [hashed], "medium": self._medium})

    def close(self) -> None:
        """Nothing of it is there any more."""
        self._events.put({"type": "AllBlocksCleared"})
        self._events.put(None)
        self._thread.join(5)

    def _publish(self, socket: zmq.Socket[bytes]) -> None:
        """What has happened since the last message is one message."""
        import msgpack  # pyright: ignore[reportMissingImports]

        number, more = 0, True
        while more:
            events = [self._events.get()]
            while not self._events.empty():
                events.append(self._events.get())
            more = events[-1] is not None
            told = [event for event in events if event is not None]
            if told:
                body: Any = msgpack.packb([time.time(), told, RANK])
                socket.send_multipart((self._topic, number.to_bytes(8, "big"), body))
                number += 1
        socket.close(linger=1000)


def _publisher(endpoint: str) -> zmq.Socket[bytes]:
    """Bound where the endpoint names this machine (`*`, ipc), connected otherwise, as vLLM does."""
    try:
        import msgpack  # noqa: F401  # pyright: ignore[reportMissingImports]
        import zmq  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise InvalidRequest(f"KV events need {error.name}: pip install 'draftwood[kv-events]'.") from error
    made = zmq.Context.instance().socket(zmq.PUB)
    made.set_hwm(MOST_WAITING)
    here = "*" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
    try:
        (made.bind if here else made.connect)(endpoint)
    except zmq.ZMQError as error:
        made.close(linger=0)
        raise InvalidRequest(f"KV events cannot be published at '{endpoint}': {error}. Try tcp://*:5557.") from error
    return made
