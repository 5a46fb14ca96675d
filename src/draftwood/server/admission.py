"""Where requests are taken in, watched and given up, all on the event loop; the engine has a thread of its own.

The bound is on answers, running and waiting together: an unbounded queue only delays its refusals.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from draftwood.engine.requests import EngineRequest
from draftwood.engine.served import ServedEngine
from draftwood.errors import EngineDead, QueueFull
from draftwood.request import Event, FinishReason
from draftwood.server.config import ServerConfig
from draftwood.server.errors import ApiError
from draftwood.server.keys import Caller

T = TypeVar("T")
SHARE = 2  # answers that a caller may have under way for each that there is room for
News = tuple[int, Event]  # which prompt of the request, and what happened
Watcher = Callable[["Ticket", News], None]


class Mailbox:
    """From the compute thread to the event loop: one call for everything that happened meanwhile.

    Waking the loop for every event would take a core away from the step, eight times a step at batch 8.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._letters: deque[tuple[Ticket, int, Event]] = deque()
        self._ringing = False

    def post(self, ticket: Ticket, prompt: int, event: Event) -> None:
        """Called by the compute thread."""
        self._letters.append((ticket, prompt, event))
        if not self._ringing and not self._loop.is_closed():
            self._ringing = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._ringing = False  # before looking: what comes from now on rings again
        while self._letters:
            ticket, prompt, event = self._letters.popleft()
            ticket.receive(prompt, event)


@dataclass(frozen=True)
class Arrival:
    """A request at the moment it comes in."""

    request_id: str
    caller: Caller
    deadline: float  # seconds
    takes_long: bool  # to prepare: a long prompt, or a grammar to compile


@dataclass(eq=False)
class Ticket:
    """One HTTP request's answers, from the moment they are taken in to the last event."""

    id: str
    requests: list[EngineRequest]  # one for each prompt
    patient: bool  # not streamed: only the end is delivered
    watcher: Watcher
    cancel: Callable[[int], None]
    caller: Caller
    since: float = field(default_factory=time.monotonic)
    open_answers: int = field(init=False)
    completion_tokens: int = 0
    failure: ApiError | None = None
    closed: bool = False
    timer: asyncio.TimerHandle | None = None  # its deadline
    _news: list[News] = field(default_factory=list)
    _bell: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.open_answers = sum(request.params.n for request in self.requests)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(request.prompt_length for request in self.requests)

    def receive(self, prompt: int, event: Event) -> None:
        """News from the engine."""
        self.open_answers -= event.finished
        self.completion_tokens += len(event.token_ids)
        self.watcher(self, (prompt, event))
        if self.closed:
            return
        self._news.append((prompt, event))
        if not self.patient or self.open_answers == 0 or event.finish_reason in _BAD_ENDS:
            self._bell.set()

    async def news(self) -> list[News]:
        """What has happened since it was last asked; nothing any more: []. Raises what the request failed of."""
        if not self._news and self.failure is None and self.open_answers:
            self._bell.clear()
            await self._bell.wait()
        news, self._news = self._news, []
        bad = next((i for i, (_, event) in enumerate(news) if event.finish_reason in _BAD_ENDS), None)
        if bad is not None:  # what came before it is still told
            self.failure = self.failure or _failure_of(news[bad][1])
            news = news[:bad]
        if self.failure is not None and not news:
            raise self.failure
        return news

    def fail(self, failure: ApiError) -> None:
        """Give up, and say why."""
        if self.failure is None:
            self.failure = failure
        self._bell.set()
        self._cancel_rest()

    def close(self) -> None:
        """The client has gone: whatever still runs ends before the next step."""
        self.closed = True
        self._cancel_rest()

    def _cancel_rest(self) -> None:
        if self.open_answers:
            for request in self.requests:
                self.cancel(request.id)


_BAD_ENDS = (FinishReason.ERROR, FinishReason.CANCELLED)


def _failure_of(event: Event) -> ApiError:
    if event.finish_reason == FinishReason.CANCELLED:
        return ApiError(503, "The request was cancelled on the server.", "cancelled")
    message = event.error or "The engine could not answer."
    if event.error_code == QueueFull.code:
        return come_later(message, 1)
    if event.error_code == EngineDead.code:
        return ApiError(503, message, event.error_code)
    if event.error_code is not None:
        return ApiError(400, message, event.error_code)
    return ApiError(500, message, "engine_error")


def come_later(message: str, seconds: float, code: str | None = QueueFull.code) -> ApiError:
    """429: the same request may be taken in after a while."""
    return ApiError(429, message, code, headers={"Retry-After": str(max(1, min(60, math.ceil(seconds))))})


class Admission:
    """Takes requests in while there is room, and knows all that are under way."""

    def __init__(self, llm: ServedEngine, config: ServerConfig, watcher: Watcher, *, sole_caller: bool) -> None:
        self._sole_caller = sole_caller
        # Requests that take long to prepare wait for one another, and no others wait for them.
        self._prompts = ThreadPoolExecutor(4, "draftwood-prompts")
        self._long_prompts = ThreadPoolExecutor(2, "draftwood-long-prompts")
        self.llm = llm
        self.config = config
        self.tickets: set[Ticket] = set()
        self.closed_for: ApiError | None = None  # why no more requests are admitted
        self._watcher = watcher
        self._mailbox: Mailbox | None = None
        self._arriving: Counter[Caller] = Counter()  # answers that are being prepared
        self._mean_seconds = 1.0

    @property
    def limit(self) -> int:
        """Answers that may be under way."""
        return self.llm.card.max_running + self.config.max_queue

    @property
    def open_answers(self) -> int:
        """Answers under way."""
        return self._arriving.total() + sum(ticket.open_answers for ticket in self.tickets)

    def _open_for(self, caller: Caller) -> int:
        own = (ticket.open_answers for ticket in self.tickets if ticket.caller is caller)
        return self._arriving[caller] + sum(own)

    def make_room(self, answers: int, caller: Caller) -> None:
        """Refuse what there is no room for, before any work is done for it."""
        if self.closed_for is not None:
            raise self.closed_for
        most = min(self.limit, caller.max_concurrent)
        if answers > most:
            raise ApiError(400, f"The request asks for {answers} answers and the limit is {most:g}.", "too_many")
        if self.open_answers + answers > self.limit:
            raise come_later(
                f"The queue is full: {self.open_answers} answers are under way and the limit is {self.limit}.",
                self._mean_seconds,
            )
        own = self._open_for(caller)
        if own + answers > min(caller.max_concurrent, self._share()):
            raise come_later(f"This API key has {own} answers under way already.", self._mean_seconds, "key_limit")
        wait = caller.seconds_to_wait()
        if wait:
            raise come_later("This API key has made too many requests.", wait, "rate_limit_exceeded")

    def _share(self) -> float:
        """Answers that one of several callers may have under way: twice as many as there is room left.

        One caller that floods the server leaves a third of it to the others, two leave a fifth (dynamic thresholds).
        """
        return math.inf if self._sole_caller else SHARE * (self.limit - self.open_answers)

    async def take(
        self, arrival: Arrival, prepare: Callable[[], list[EngineRequest]], count: int, *, patient: bool
    ) -> Ticket:
        """Take `count` answers in. `prepare` makes them, on another thread: reading a long prompt takes time."""
        self.make_room(count, arrival.caller)
        self._arriving[arrival.caller] += count
        try:
            requests = await self.prepared(arrival, prepare)
            if self.closed_for is not None:
                raise self.closed_for
        finally:
            self._arriving[arrival.caller] -= count
        ticket = Ticket(arrival.request_id, requests, patient, self._heard, self.llm.cancel, arrival.caller)
        return self._submit(ticket, arrival.deadline)

    async def prepared(self, arrival: Arrival, prepare: Callable[[], T]) -> T:
        """What `prepare` makes of a request, on a thread."""
        pool = self._long_prompts if arrival.takes_long else self._prompts
        return await asyncio.get_running_loop().run_in_executor(pool, prepare)

    def _submit(self, ticket: Ticket, deadline: float) -> Ticket:
        loop = asyncio.get_running_loop()
        if self._mailbox is None:
            self._mailbox = Mailbox(loop)
        self.tickets.add(ticket)
        seconds = min(deadline, self.config.deadline)
        late = ApiError(408, f"The deadline of {seconds:g} seconds has passed.", "deadline_exceeded")
        ticket.timer = loop.call_later(seconds, ticket.fail, late)
        for i, request in enumerate(ticket.requests):
            self.llm.submit(request, _listener(self._mailbox, ticket, i))
        return ticket

    def _heard(self, ticket: Ticket, news: News) -> None:
        self._watcher(ticket, news)
        if ticket.open_answers == 0:
            self._forget(ticket)
            self._mean_seconds += 0.1 * (time.monotonic() - ticket.since - self._mean_seconds)

    def close_for(self, reason: ApiError) -> None:
        """Take no more requests; those under way go on."""
        self.closed_for = reason

    def fail_all(self, reason: ApiError) -> None:
        """End everything under way, heard of or not."""
        for ticket in list(self.tickets):
            ticket.fail(reason)
            self._forget(ticket)

    def _forget(self, ticket: Ticket) -> None:
        self.tickets.discard(ticket)
        if ticket.timer is not None:
            ticket.timer.cancel()

    async def drained(self, seconds: float) -> bool:
        """Wait until nothing is under way; False if that takes too long."""
        end = time.monotonic() + seconds
        while self.open_answers and time.monotonic() < end:
            await asyncio.sleep(0.02)
        return not self.open_answers


def _listener(mailbox: Mailbox, ticket: Ticket, prompt: int) -> Callable[[Event], None]:
    return lambda event: mailbox.post(ticket, prompt, event)
