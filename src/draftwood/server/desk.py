"""Where requests are taken in, watched and given up, all on the event loop; the engine has a thread of its own.

The bound is on answers, running and waiting together: a queue nobody can see the end of helps nobody.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from draftwood.engine.llm import LLM
from draftwood.engine.sequence import Sequence as Answer
from draftwood.request import Event, FinishReason
from draftwood.server.config import ServerConfig
from draftwood.server.errors import ApiError

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


@dataclass(eq=False)
class Ticket:
    """One HTTP request's answers, from the moment they are taken in to the last event."""

    id: str
    prompts: list[list[Answer]]
    patient: bool  # nobody listens before the end
    watcher: Watcher
    cancel: Callable[[int], None]
    since: float = field(default_factory=time.monotonic)
    open_answers: int = field(init=False)
    failure: ApiError | None = None
    closed: bool = False
    timer: asyncio.TimerHandle | None = None  # its deadline
    _news: list[News] = field(default_factory=list)
    _bell: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.open_answers = sum(map(len, self.prompts))

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(answers[0].prompt_length for answers in self.prompts)

    def receive(self, prompt: int, event: Event) -> None:
        """News from the engine."""
        self.open_answers -= event.finished
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
        """Nobody listens any more: whatever still runs ends before the next step."""
        self.closed = True
        self._cancel_rest()

    def _cancel_rest(self) -> None:
        if self.open_answers:
            for answers in self.prompts:
                self.cancel(answers[0].request_id)


_BAD_ENDS = (FinishReason.ERROR, FinishReason.CANCELLED)


def _failure_of(event: Event) -> ApiError:
    if event.finish_reason == FinishReason.CANCELLED:
        return ApiError(503, "The request was cancelled on the server.", "cancelled")
    message = event.error or "The engine could not answer."
    if message.startswith("GrammarError: "):
        return ApiError(400, message.removeprefix("GrammarError: "), "grammar_error")
    if message.startswith("The queue is full"):
        return queue_full(message, 1)
    return ApiError(500, message, "engine_error")


def queue_full(message: str, seconds: int) -> ApiError:
    """Come back later."""
    return ApiError(429, message, "queue_full", headers={"Retry-After": str(seconds)})


class Desk:
    """Takes requests in while there is room, and knows all that are under way."""

    def __init__(self, llm: LLM, config: ServerConfig, watcher: Watcher) -> None:
        self.llm = llm
        self.config = config
        self.tickets: set[Ticket] = set()
        self.closed_for: ApiError | None = None  # why nobody is taken in any more
        self._watcher = watcher
        self._mailbox: Mailbox | None = None
        self._numbers = itertools.count()
        self._arriving = 0
        self._mean_seconds = 1.0

    @property
    def limit(self) -> int:
        """Answers that may be under way."""
        return self.llm.config.max_running + self.config.max_queue

    @property
    def open_answers(self) -> int:
        """Answers under way."""
        return self._arriving + sum(ticket.open_answers for ticket in self.tickets)

    def make_room(self, answers: int) -> None:
        """Refuse what there is no room for, before any work is done for it."""
        if self.closed_for is not None:
            raise self.closed_for
        if answers > self.limit:
            raise ApiError(400, f"The request asks for {answers} answers and the limit is {self.limit}.", "too_many")
        if self.open_answers + answers > self.limit:
            raise queue_full(
                f"The queue is full: {self.open_answers} answers are under way and the limit is {self.limit}.",
                max(1, min(60, math.ceil(self._mean_seconds))),
            )

    async def take(
        self, request_id: str, prepare: Callable[[], list[list[Answer]]], count: int, deadline: float, *, patient: bool
    ) -> Ticket:
        """Take `count` answers in. `prepare` makes them, on another thread: reading a long prompt takes time."""
        self.make_room(count)
        self._arriving += count
        try:
            prompts = await asyncio.to_thread(prepare)
            if self.closed_for is not None:
                raise self.closed_for
        finally:
            self._arriving -= count
        return self._submit(Ticket(request_id, prompts, patient, self._heard, self.llm.cancel), deadline)

    def _submit(self, ticket: Ticket, deadline: float) -> Ticket:
        loop = asyncio.get_running_loop()
        if self._mailbox is None:
            self._mailbox = Mailbox(loop)
        self.tickets.add(ticket)
        seconds = min(deadline, self.config.deadline)
        late = ApiError(408, f"The deadline of {seconds:g} seconds has passed.", "deadline_exceeded")
        ticket.timer = loop.call_later(seconds, ticket.fail, late)
        for i, answers in enumerate(ticket.prompts):
            self.llm.submit(answers, _listener(self._mailbox, ticket, i))
        return ticket

    def _heard(self, ticket: Ticket, news: News) -> None:
        self._watcher(ticket, news)
        if ticket.open_answers == 0:
            self._forget(ticket)
            self._mean_seconds += 0.1 * (time.monotonic() - ticket.since - self._mean_seconds)

    def close_for(self, reason: ApiError) -> None:
        """Take nobody in any more; those under way go on."""
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
