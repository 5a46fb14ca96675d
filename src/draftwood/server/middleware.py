"""Who may come in, with how much, and what the log says about it afterwards. Plain ASGI, outside of everything else."""

from __future__ import annotations

import base64
import binascii
import ipaddress
import json
import logging
import re
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import Request
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draftwood.server.errors import ApiError
from draftwood.server.keys import Caller, KeyRing

access = logging.getLogger("draftwood.access")
OPEN_PATHS = frozenset({"/health", "/ready"})
PAGE = re.compile(r"/|/page/.*", re.DOTALL)
QUIET = re.compile(r"/health|/ready|/metrics|/live|/page/.*", re.DOTALL)  # asked for again and again
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
FORWARDED = ("forwarded", "x-real-ip", "via")  # and whatever begins with x-forwarded-


class ApiKeys:
    """A key for everything but /health and /ready; whom it belongs to is in the request's state from then on.

    Programs send `Bearer KEY`. A browser that opens the page asks its user, and from then on sends the key by itself as
    the password of `Basic`, whatever the name.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let in, or refuse."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        caller = self._keys.caller_of(_given_key(Headers(scope=scope).get("authorization", "")))
        if caller is not None:
            scope.setdefault("state", {})["caller"] = caller
        if caller is not None or scope["path"] in OPEN_PATHS:
            return await self._app(scope, receive, send)
        refusal = ApiError(
            401,
            "This server wants an API key: send the header 'Authorization: Bearer KEY'.",
            "invalid_api_key",
            headers={"WWW-Authenticate": 'Basic realm="draftwood"' if PAGE.fullmatch(scope["path"]) else "Bearer"},
        )
        await refusal.response()(scope, receive, send)


def _given_key(authorization: str) -> bytes:
    """The key in a header; empty, as no key is, where there is none."""
    kind, _, given = authorization.partition(" ")
    if kind.lower() == "bearer":
        return given.strip().encode()
    if kind.lower() != "basic":
        return b""
    try:
        return base64.b64decode(given.strip(), validate=True).partition(b":")[2]
    except (binascii.Error, ValueError):
        return b""


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
            client = (scope.get("client") or ("",))[0]
            told = {"id": request_id, "client": client, "method": scope["method"], "path": scope["path"]}
            told["status"] = status
            caller: Caller | None = state.get("caller")
            owner = {} if caller is None or not caller.name else {"key": caller.name}
            _write(told | owner | {"seconds": round(seconds, 4)} | state.get("figures", dict)())


def _write(line: dict[str, Any]) -> None:
    quiet = QUIET.fullmatch(line["path"]) is not None and line["status"] < 400
    access.log(logging.DEBUG if quiet else logging.INFO, "%s", json.dumps(line, ensure_ascii=True))


class AllowedHosts:
    """Requests for names that are this server's: a page of another site may have its own name lead here.

    That trick (DNS rebinding) needs a name, so addresses are allowed, and so are localhost and this machine's own name.
    /health and /ready tell nothing else and are open to all.
    """

    def __init__(self, app: ASGIApp, names: Sequence[str]) -> None:
        self._app = app
        self._all = "*" in names
        self._names = {name.lower().rstrip(".") for name in (*names, "localhost", socket.gethostname())}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let in, or refuse."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._known(Headers(scope=scope).get("host", "")):
            return await self._app(scope, receive, send)
        message = (
            "The server does not go by the name in the header Host; start it with --allowed-host NAME if it should."
        )
        await ApiError(403, message, "host_not_allowed").response()(scope, receive, send)

    def _known(self, host: str) -> bool:
        name = _host_name(host)
        return self._all or name in self._names or _address(name) is not None


def only_from_here(request: Request) -> None:
    """Management is for people on this machine: no other address, no proxy in between, no page of another site."""
    host = request.client.host if request.client else ""
    proxied = any(name in FORWARDED or name.startswith("x-forwarded-") for name in request.headers)
    origin = request.headers.get("origin")
    elsewhere = origin is not None and not _is_here(re.sub(r"^\w+://", "", origin))
    if not _is_loopback(host) or proxied or elsewhere or not _is_here(request.headers.get("host", "")):
        raise ApiError(403, "Management is only possible from the machine itself, not through a proxy.", "not_local")


class OnPort:
    """A dependency: the route exists at one port only."""

    def __init__(self, port: int) -> None:
        self._port = port

    def __call__(self, request: Request) -> None:
        """404 anywhere else."""
        if (request.scope.get("server") or ("", None))[1] != self._port:
            raise HTTPException(404)


def _is_here(host: str) -> bool:
    """Whether a Host or Origin names this machine; another name for the same address may be a trap."""
    name = _host_name(host)
    return name == "localhost" or _is_loopback(name)


def _host_name(host: str) -> str:
    """A host without its port and brackets."""
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    return name.strip("[]").lower().rstrip(".")


def _is_loopback(name: str) -> bool:
    address = _address(name)
    return address is not None and address.is_loopback


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
