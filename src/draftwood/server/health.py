"""Is the engine alive? A failed step may be one request's fault, so the engine is asked once more before it is dead."""

from __future__ import annotations

import asyncio
import time

from draftwood.engine.llm import LLM
from draftwood.request import Event, FinishReason, SamplingParams
from draftwood.server.admission import Admission
from draftwood.server.errors import ApiError, log

INTERVAL = 0.25  # seconds


class Monitor:
    """Watches the engine, and turns everything red when it is gone."""

    def __init__(self, llm: LLM, admission: Admission, stall_seconds: float) -> None:
        self.reason: str | None = None  # why the engine counts as dead
        self._llm = llm
        self._admission = admission
        self._stall = stall_seconds
        self._failures = llm.pulse.failures
        self._asked: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Until it is cancelled."""
        while self.reason is None:
            self.look()
            await asyncio.sleep(INTERVAL)

    def look(self) -> None:
        """Once."""
        pulse = self._llm.pulse
        began = pulse.since
        if not self._llm.alive:
            self._declare_dead("The compute thread has ended.")
        elif began is not None and time.monotonic() - began > self._stall:
            self._declare_dead(f"A step has taken more than {self._stall:g} seconds.")
        elif pulse.failures > self._failures and (self._asked is None or self._asked.done()):
            self._failures = pulse.failures
            self._asked = asyncio.create_task(self._ask(pulse.failure))

    async def _ask(self, failure: str | None) -> None:
        """One token of anything: an engine that cannot do that is dead."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[Event] = loop.create_future()

        def hear(event: Event) -> None:
            if event.finished:
                loop.call_soon_threadsafe(lambda: ended.done() or ended.set_result(event))

        _, answers = self._llm.intake.answers(self._llm.intake.sources.smallest, SamplingParams(max_tokens=1))
        self._llm.submit(answers, hear)
        try:
            event = await asyncio.wait_for(ended, self._stall)
        except TimeoutError:
            return self._declare_dead(f"{failure} It has not answered since.")
        self._failures = self._llm.pulse.failures
        if event.finish_reason == FinishReason.ERROR:
            self._declare_dead(event.error or failure or "The engine failed.")

    def _declare_dead(self, reason: str) -> None:
        if self.reason is None:
            self.reason = reason
            log.critical("the engine is dead: %s", reason)
            gone = ApiError(503, f"The engine is dead: {reason}", "engine_dead")
            self._admission.close_for(gone)
            self._admission.fail_all(gone)
