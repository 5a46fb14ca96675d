"""From a ticket to an HTTP response: at once, or as server-sent events. A hang-up is noticed without a token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from draftwood.server.admission import Ticket
from draftwood.server.choice_state import Choice, Delta, usage
from draftwood.server.errors import ApiError, error_body, log
from draftwood.server.formatters import Writer

CLIENT_GONE = 499  # what nginx writes into its log
MANY_ENTRIES = 512  # tokens of prompts with log-probabilities
T = TypeVar("T")


@dataclass
class Reply:
    """A request's answers on their way into a response."""

    ticket: Ticket
    choices: list[Choice]
    n: int
    writer: Writer
    report: str  # none, summary, detailed or trace

    def choice_of(self, prompt: int, index: int) -> Choice:
        """The choice that an answer becomes."""
        return self.choices[prompt * self.n + index]

    @property
    def usage(self) -> dict[str, Any]:
        """What it took."""
        return usage(self.choices, self.n, self.ticket.prompt_tokens)

    @property
    def metrics(self) -> dict[str, Any] | None:
        """What speculation did, if that was asked for; of several answers it would belong to none."""
        if self.report == "none":
            return None
        only = self.choices[0].figures if len(self.choices) == 1 else None
        block = None if only is None else only.report(detailed=self.report == "detailed")
        return {"speculative_decoding": block}

    async def whole(self) -> dict[str, Any]:
        """Everything at once."""
        steps: list[dict[str, Any]] = []
        while news := await self.ticket.news():
            for prompt, event in news:
                steps += self.choice_of(prompt, event.index).add(event).steps
        metrics = self.metrics
        if metrics is not None and self.report == "trace":
            metrics["trace"] = steps
        return await self._in_time(partial(self.writer.whole, self.choices, self.usage, metrics))

    async def encoded(self, whole: dict[str, Any]) -> bytes:
        """As JSON."""
        return await self._in_time(lambda: json.dumps(whole, ensure_ascii=False, separators=(",", ":")).encode())

    async def parts(self) -> AsyncGenerator[bytes, None]:
        """Chunk by chunk; a failure is the last of them."""
        writer = self.writer
        try:
            yield self._framed(writer.openings(self.choices))
            while news := await self.ticket.news():
                deltas = [(choice := self.choice_of(i, event.index), choice.add(event)) for i, event in news]
                told = [(choice, delta) for choice, delta in deltas if not delta.empty]
                if told:
                    yield await self._in_time(partial(self._chunks, told))
            yield self._framed(writer.endings(self.choices, self.usage, self.metrics))
        except ApiError as failure:
            yield self._framed(writer.failings(failure.body))
        except Exception:
            log.exception("a stream has failed")
            error = error_body(500, "The server failed on this request; its log says why.", "internal_error")
            yield self._framed(writer.failings(error))
        yield writer.end

    def _chunks(self, told: list[tuple[Choice, Delta]]) -> bytes:
        return self._framed(chunk for choice, delta in told for chunk in self.writer.chunks(choice, delta))

    def _framed(self, events: Iterable[dict[str, Any]]) -> bytes:
        return b"".join(map(self.writer.frame, events))

    async def _in_time(self, write: Callable[[], T]) -> T:
        """Written here, or on another thread where there is so much of it that other requests would notice."""
        entries = self.n * sum(len(choice.prompt) for choice in self.choices)
        return await asyncio.to_thread(write) if entries > MANY_ENTRIES else write()


async def answer_at_once(request: Request, reply: Reply) -> Response:
    """Wait for the whole, unless the client hangs up."""
    try:
        whole = await _unless_gone(request.receive, reply.whole())
    finally:
        reply.ticket.close()
    if whole is None:
        return Response(status_code=CLIENT_GONE)
    content = await reply.encoded(whole)
    return Response(content, media_type="application/json")


async def _unless_gone(receive: Receive, work: Awaitable[dict[str, Any]]) -> dict[str, Any] | None:
    """What `work` gives; None, and no more work, once the client is gone."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await leaving


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events; closed, with everything behind it, as soon as the client hangs up."""

    media_type = "text/event-stream"

    def __init__(self, parts: AsyncGenerator[bytes, None], close: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._parts = parts
        self._close = close  # whatever is behind the parts, once the client has gone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the end of the parts or of the connection."""
        sending, leaving = asyncio.ensure_future(self._send(send)), asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            self._close()
            for task in (sending, leaving):
                task.cancel()
                with suppress(asyncio.CancelledError, OSError):
                    await task

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._parts) as parts:
            async for part in parts:
                await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
