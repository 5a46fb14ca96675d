"""Who may come in, with how much, and what the log says about it afterwards. Plain ASGI, outside of everything else."""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
import json
import logging
import re
import secrets
import time
from collections.abc import Callable
from typing import Any

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draftwood.server.errors import ApiError

access = logging.getLogger("draftwood.access")
OPEN_PATHS = frozenset({"/health"})
PAGE = re.compile(r"/|/page/.*", re.DOTALL)
QUIET = re.compile(r"/health|/ready|/metrics|/live|/page/.*", re.DOTALL)  # asked for again and again
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip", "via")


class ApiKeys:
    """A key for everything but /health. All keys are compared, each in constant time.

    Programs send `Bearer KEY`. A browser that opens the page asks its user, and from then on sends the key by itself as
    the password of `Basic`, whatever the name.
    """

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let in, or refuse."""
        if scope["type"] != "http" or not self._keys or scope["path"] in OPEN_PATHS or self._known(scope):
            return await self._app(scope, receive, send)
        refusal = ApiError(
            401,
            "This server wants an API key: send the header 'Authorization: Bearer KEY'.",
            "invalid_api_key",
            headers={"WWW-Authenticate": 'Basic realm="draftwood"' if PAGE.fullmatch(scope["path"]) else "Bearer"},
        )
        await refusal.response()(scope, receive, send)

    def _known(self, scope: Scope) -> bool:
        given = _given_key(Headers(scope=scope).get("authorization", ""))
        same = [hmac.compare_digest(given, key) for key in self._keys]
        return any(same)


def _given_key(authorization: str) -> bytes:
    """The key in a header; none is empty, and nobody's key is."""
    kind, _, given = authorization.partition(" ")
    if kind.lower() == "bearer":
        return given.strip().encode()
    if kind.lower() != "basic":
        return b""
    try:
        return base64.b64decode(given.strip(), validate=True).partition(b":")[2]
    except (binascii.Error, ValueError):
        return b""


class BodyLimit:
    """No more bytes than the server is willing to read, whatever the header says."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        announced = Headers(scope=scope).get("content-length", "0")
        if announced.isdigit() and int(announced) > self._limit:
            return await self._too_large().response()(scope, receive, send)
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._limit:
                raise self._too_large()
            return message

        await self._app(scope, counted, send)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"The request is larger than {self._limit} bytes.", "too_large")


class AccessLog:
    """One line a request: who asked for what, and what became of it."""

    def __init__(self, app: ASGIApp, refused: Callable[[int], None]) -> None:
        self._app = app
        self._refused = refused  # hears of every status that is an error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Give the request a name, and write about it when it is over."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        asked = Headers(scope=scope).get("x-request-id", "")
        request_id = asked if REQUEST_ID.fullmatch(asked) else secrets.token_hex(8)
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        began, status = time.perf_counter(), 0

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, named)
        finally:
            seconds = time.perf_counter() - began
            if status >= 400:
                self._refused(status)
            told = {"id": request_id, "method": scope["method"], "path": scope["path"], "status": status}
            _write(told | {"seconds": round(seconds, 4)} | state.get("figures", dict)())


def _write(line: dict[str, Any]) -> None:
    quiet = QUIET.fullmatch(line["path"]) is not None and line["status"] < 400
    access.log(logging.DEBUG if quiet else logging.INFO, "%s", json.dumps(line, ensure_ascii=True))


def only_from_here(request: Request) -> None:
    """Management is for people on this machine: no other address, no proxy in between, no page of another site."""
    host = request.client.host if request.client else ""
    forwarded = any(name in request.headers for name in FORWARDED)
    origin = request.headers.get("origin")
    elsewhere = origin is not None and not _is_here(re.sub(r"^\w+://", "", origin))
    if not _is_loopback(host) or forwarded or elsewhere or not _is_here(request.headers.get("host", "")):
        raise ApiError(403, "Management is only possible from the machine itself, not through a proxy.", "not_local")


def _is_here(host: str) -> bool:
    """Whether a Host or Origin names this machine; another name for the same address may be a trap."""
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    return name == "localhost" or _is_loopback(name.strip("[]"))


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
