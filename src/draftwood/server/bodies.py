"""Request bodies: how many bytes, how much JSON, and which text. Bounded before anything is made of them.

Parsing and validating JSON hold the interpreter, on whichever thread they run, so what bounds the time is the size:
bytes, and elements, of which a small body may hold millions.
"""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draftwood.server.errors import ApiError, invalid

MAX_ELEMENTS = 1 << 20  # JSON values; counted by what separates them, so text with as many commas counts too
SEPARATORS = (b",", b"[", b"{")
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class BodyLimit:
    """No more bytes than the server is willing to read, from one request and from all together."""

    def __init__(self, app: ASGIApp, limit: int, total: int) -> None:
        self._app = app
        self._limit = limit
        self._total = total
        self._held = 0  # bytes of bodies that are here now

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count while it arrives."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        announced = Headers(scope=scope).get("content-length", "0")
        if announced.isdigit() and int(announced) > self._limit:
            return await self._too_large().response()(scope, receive, send)
        body = _Body(scope.setdefault("state", {}))

        async def counted() -> Message:
            message = await receive()
            part = message.get("body", b"")
            self._held += len(part)
            body.add(part)
            self._check(body)
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            self._held -= body.size

    def _check(self, body: _Body) -> None:
        if body.size > self._limit:
            raise self._too_large()
        if body.elements > MAX_ELEMENTS:
            raise ApiError(413, f"The request has more than {MAX_ELEMENTS} JSON elements.", "too_large")
        if self._held > self._total:
            message = "The server is receiving too much at the moment; send the request again later."
            raise ApiError(503, message, "overloaded", headers={"Retry-After": "1"})

    def _too_large(self) -> ApiError:
        return ApiError(413, f"The request is larger than {self._limit} bytes.", "too_large")


class _Body:
    """What has arrived of a body; its size is in the request's state."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state
        self.size = 0
        self.elements = 0

    def add(self, part: bytes) -> None:
        self.size += len(part)
        self.elements += sum(part.count(separator) for separator in SEPARATORS)
        self._state["body_bytes"] = self.size


class JsonRequest(Request):
    """A request whose JSON is strict: UTF-8, no NaN, no lone surrogates, which nothing could write down again."""

    async def json(self) -> Any:
        """The body's value."""
        if not hasattr(self, "_json"):
            self._json = parse(await self.body())
        return self._json


def parse(body: bytes) -> Any:
    """JSON as the standard has it; anything else is refused in a sentence."""
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise invalid(f"The body is not UTF-8: byte {error.start} cannot be read.", code="invalid_json") from None
    try:
        with _collector_paused():
            value = json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise invalid(f"The body is not JSON: {error.msg} at character {error.pos}.", code="invalid_json") from None
    except ValueError as error:  # a number of thousands of digits
        raise invalid(f"The body cannot be read: {error}.", code="invalid_json") from None
    if SURROGATE.search(body):
        _check_text(value)
    return value


@contextmanager
def _collector_paused() -> Iterator[None]:
    """No search for garbage meanwhile: new objects are none, and looking takes ten times as long as parsing."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _refuse_constant(name: str) -> Any:
    raise invalid(f"{name} is not JSON.", code="invalid_json")


def _check_text(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        message = "The request has a lone surrogate (\\ud800 to \\udfff without its pair), which is no character."
        raise invalid(message, code="invalid_json") from None


class JsonRoute(APIRoute):
    """A route that reads its body as `JsonRequest` does."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's own, for such a request."""
        handle = super().get_route_handler()

        async def strictly(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return strictly
