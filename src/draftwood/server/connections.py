"""What one connection may take: sizes and times, enforced before the application sees a request.

uvicorn's own protocol bounds neither the head of a request nor the time a client takes to send it, and lets idle
connections use up the file descriptors. This one does, whatever key the request will turn out to have.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from draftwood.server.config import ServerConfig
from draftwood.server.errors import ApiError, log
from draftwood.server.middleware import OPEN_PATHS

DESCRIPTORS = 64  # kept for everything that is not a connection
RESERVED = 16  # connections beyond the limit that may ask for /health and /ready
IMPATIENT = 2.0  # seconds in which they must have asked


@dataclass(frozen=True)
class ConnectionLimits:
    """Bounds on a connection."""

    connections: int
    head_bytes: int
    head_seconds: float  # from the first byte, or from connecting, to the end of the headers
    body_seconds: float  # from there to the end of the body
    write_seconds: float  # for which a client may leave what was sent to it unread

    @classmethod
    def of(cls, config: ServerConfig) -> ConnectionLimits:
        """Those of a server on this machine, which may have few descriptors."""
        room = max(1, min(config.max_connections, _max_descriptors() - DESCRIPTORS - RESERVED))
        return cls(room, config.max_header, config.header_timeout, config.body_timeout, config.write_timeout)


def _max_descriptors() -> int:
    """Files that the process may have open."""
    try:
        import resource
    except ImportError:  # not on this system
        return sys.maxsize
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


class BoundedProtocol(HttpToolsProtocol):
    """One connection with limits; `limits` is set on a subclass by `bounded`."""

    limits: ConnectionLimits

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._application = self.app
        self._in_head = False
        self._began = False  # something of that head has arrived
        self._head_bytes = 0  # of it in chunks of their own
        self._field_bytes = 0  # of its request line and headers, as far as they are complete
        self._extra = False  # a connection beyond the limit: it gets /health, /ready and nothing else
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count it; refuse it where even the reserve is used up."""
        super().connection_made(transport)
        self._extra = len(self.connections) > self.limits.connections
        if len(self.connections) > self.limits.connections + RESERVED:
            transport.abort()
        else:
            self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timers."""
        _cancel(self._reading)
        _cancel(self._writing)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """More of a request."""
        if self._reading is None and not self.pipeline:
            self._begin_head()
        began = self._in_head and self._began
        super().data_received(data)
        if began and self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > self.limits.head_bytes:
                self._refuse(self._head_too_large())

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._begin_head()
        self._began = True

    def on_url(self, url: bytes) -> None:
        """Part of the request line."""
        super().on_url(url)
        self._field_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header."""
        super().on_header(name, value)
        self._field_bytes += len(name) + len(value)

    def on_headers_complete(self) -> None:
        """The application gets the request, unless it is refused."""
        self._in_head = False
        self._wait_for_client(self.limits.body_seconds, "body")
        refusal = self._refusal()
        self.app = self._application if refusal is None else refusal.response()  # type: ignore[assignment]
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The client has said everything."""
        _cancel(self._reading)
        self._reading = None
        super().on_message_complete()

    def pause_writing(self) -> None:
        """The client does not read: it may do so for a while."""
        super().pause_writing()
        self._writing = self.loop.call_later(self.limits.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """It reads again."""
        super().resume_writing()
        _cancel(self._writing)

    def _begin_head(self) -> None:
        self._in_head, self._began, self._head_bytes, self._field_bytes = True, False, 0, 0
        self._wait_for_client(IMPATIENT if self._extra else self.limits.head_seconds, "headers")

    def _wait_for_client(self, seconds: float, what: str) -> None:
        _cancel(self._reading)
        self._reading = self.loop.call_later(seconds, self._too_slow, seconds, what)

    def _too_slow(self, seconds: float, what: str) -> None:
        if self.pipeline:  # reading is paused until an earlier request is answered: the client is not late
            return self._wait_for_client(seconds, what)
        self._refuse(ApiError(408, f"The {what} of the request did not arrive in {seconds:g} seconds.", "too_slow"))

    def _refusal(self) -> ApiError | None:
        if self._field_bytes > self.limits.head_bytes:
            return self._head_too_large()
        if self._extra and self.url.partition(b"?")[0].decode("latin-1") not in OPEN_PATHS:
            log.warning("more than %d connections are open: one is refused", self.limits.connections)
            headers = {"Retry-After": "1", "Connection": "close"}
            return ApiError(503, "The server has too many open connections.", "too_many_connections", headers=headers)
        return None

    def _head_too_large(self) -> ApiError:
        message = f"The headers are larger than {self.limits.head_bytes} bytes."
        return ApiError(431, message, "headers_too_large", headers={"Connection": "close"})

    def _refuse(self, refusal: ApiError) -> None:
        """Answer without the application, as far as it has not begun to, and hang up."""
        idle = self.cycle is None or self.cycle.response_complete
        if (idle and self._began) or (not idle and not self.cycle.response_started):
            body, reason = refusal.response().body, HTTPStatus(refusal.status).phrase
            head = f"HTTP/1.1 {refusal.status} {reason}\r\nContent-Type: application/json\r\nConnection: close\r\n"
            self.transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + bytes(body))
        self.transport.close()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def bounded(limits: ConnectionLimits) -> type[BoundedProtocol]:
    """The protocol with these limits: uvicorn makes an instance for each connection itself."""
    return type("BoundedProtocol", (BoundedProtocol,), {"limits": limits})
