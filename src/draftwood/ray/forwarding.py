"""A request as data, and an ASGI application that answers it without a socket. Needs no Ray."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp

PREFIX = 2048  # characters of a prompt by which it is told whether a replica has seen it
Header = tuple[bytes, bytes]


@dataclass(frozen=True)
class Forwarded:
    """An HTTP request that was read to its end."""

    method: str
    path: str
    query: bytes
    headers: tuple[Header, ...]
    body: bytes
    client: tuple[str, int] | None

    @property
    def prefix(self) -> str:
        """How its prompt begins, and under whose key: requests that agree in it share cached pages. "" for others."""
        try:
            asked = json.loads(self.body)
            start = next(asked[name] for name in ("messages", "prompt", "input") if name in asked)
        except (ValueError, TypeError, StopIteration, RecursionError):
            return ""
        first = start[:2] if isinstance(start, list) and start and isinstance(start[0], dict) else start
        key = dict(self.headers).get(b"authorization", b"").decode("latin-1")
        return json.dumps([key, asked.get("cache_salt"), asked.get("instructions"), first])[:PREFIX]

    def scope(self) -> dict[str, Any]:
        """As ASGI wants it."""
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "root_path": "",
            "query_string": self.query,
            "headers": list(self.headers),
            "client": self.client,
            "server": None,
        }


@dataclass(frozen=True)
class Head:
    """How an answer begins."""

    status: int
    headers: tuple[Header, ...]


async def answers(app: ASGIApp, request: Forwarded) -> AsyncGenerator[Head | bytes, None]:
    """The head of an answer, then its body in pieces. Closing it early is a client that hangs up."""
    parts: asyncio.Queue[Head | bytes | None] = asyncio.Queue(maxsize=64)
    gone, told = asyncio.Event(), False

    async def receive() -> dict[str, Any]:
        nonlocal told
        if not told:
            told = True
            return {"type": "http.request", "body": request.body, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Mapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            await parts.put(Head(message["status"], tuple(map(tuple, message["headers"]))))
        elif message["type"] == "http.response.body" and message.get("body"):
            await parts.put(message["body"])

    async def run() -> None:
        try:
            await app(request.scope(), receive, send)  # type: ignore[arg-type]
        finally:
            if not gone.is_set():
                await parts.put(None)

    working = asyncio.create_task(run())
    try:
        while (part := await parts.get()) is not None:
            yield part
        await working
    finally:
        gone.set()
        working.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await working


def lost(path: str, message: str) -> bytes:
    """The last words of a stream whose replica has ended, in the form of the API that it speaks."""
    if path == "/v1/responses":
        event = {"type": "error", "code": "engine_dead", "message": message, "param": None}
        return f"event: error\ndata: {json.dumps(event)}\n\n".encode()
    error = {"error": {"message": message, "type": "server_error", "param": None, "code": "engine_dead"}}
    return f"data: {json.dumps(error)}\n\ndata: [DONE]\n\n".encode()
