"""What the engine is doing right now, as a stream of events: one sampler, however many people watch.

The sampler runs while there are listeners. Listeners who want news as often get the same bytes; a slow one misses
some, and nothing is ever queued.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import asdict, dataclass, replace
from typing import Any

from draftwood.engine.client import EngineClient, LastStep
from draftwood.server.admission import Admission
from draftwood.server.errors import log
from draftwood.server.formatters import sse
from draftwood.server.health import Monitor
from draftwood.server.metrics import Metrics, Totals

TICK = 0.1  # seconds between two samples
SHORTEST, LONGEST = TICK, 10.0  # seconds between two events


@dataclass(frozen=True)
class Sample:
    """Counts at a moment."""

    time: float  # monotonic
    totals: Totals


class _Channel:
    """Those who want news every so many ticks."""

    def __init__(self) -> None:
        self.listeners = 0
        self._next: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()

    async def next(self) -> bytes | None:
        """The next event; None: there will be no more."""
        return await asyncio.shield(self._next)  # one listener who leaves takes nothing from the others

    def publish(self, event: bytes | None) -> None:
        """Tell all who are waiting."""
        told, self._next = self._next, asyncio.get_running_loop().create_future()
        told.set_result(event)


class Live:
    """Samples the engine while there are listeners."""

    def __init__(self, llm: EngineClient, metrics: Metrics, admission: Admission, monitor: Monitor) -> None:
        self._llm = llm
        self._metrics = metrics
        self._admission = admission
        self._monitor = monitor
        self._began = time.monotonic()
        self._samples: deque[Sample] = deque(maxlen=round(LONGEST / TICK) + 1)
        self._channels: dict[int, _Channel] = {}  # by ticks between two events
        self._sampling: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def num_listeners(self) -> int:
        """Streams that are open."""
        return sum(channel.listeners for channel in self._channels.values())

    async def listen(self, every: float, count: int | None = None) -> AsyncGenerator[bytes, None]:
        """An event now and one every `every` seconds, `count` in all if that is given, until the server goes down."""
        ticks = max(1, round(every / TICK))
        channel = self._join(ticks)
        told = 0
        try:
            event: bytes | None = self._event(ticks)
            while event is not None:
                yield event
                told += 1
                if self._closed or told == count:
                    return
                event = await channel.next()
        finally:
            self._leave(ticks, channel)

    def _join(self, ticks: int) -> _Channel:
        channel = self._channels.setdefault(ticks, _Channel())
        channel.listeners += 1
        if self._sampling is None or self._sampling.done():
            self._samples.clear()  # what was before is not known
            self._samples.append(self._sample())
            self._sampling = asyncio.create_task(self._run())
        return channel

    def _leave(self, ticks: int, channel: _Channel) -> None:
        channel.listeners -= 1
        if not channel.listeners and self._channels.get(ticks) is channel:
            del self._channels[ticks]
        if not self._channels and self._sampling is not None:
            self._sampling.cancel()
            self._sampling = None

    async def _run(self) -> None:
        for tick in itertools.count(1):
            await asyncio.sleep(TICK)
            try:
                self._publish(tick)
            except Exception:  # without a sampler all listeners would wait for ever
                log.exception("the live figures have failed")
                return self._end_streams()

    def _publish(self, tick: int) -> None:
        self._samples.append(self._sample())
        for ticks, channel in self._channels.items():
            if tick % ticks == 0:
                channel.publish(self._event(ticks))

    def close(self) -> None:
        """The server goes down: every stream ends."""
        self._closed = True
        self._end_streams()

    def _end_streams(self) -> None:
        for channel in self._channels.values():
            channel.publish(None)

    def _sample(self) -> Sample:
        return Sample(time.monotonic(), replace(self._metrics.totals))

    def _event(self, ticks: int) -> bytes:
        now, before = self._samples[-1], self._samples[max(0, len(self._samples) - 1 - ticks)]
        return sse(self._state() | asdict(now.totals) | _rates(before, now))

    def _state(self) -> dict[str, Any]:
        pulse = self._llm.pulse
        return {
            "time": round(time.time(), 3),
            "uptime": round(time.monotonic() - self._began, 3),
            "running": pulse.running,
            "waiting": pulse.waiting,
            "max_running": self._llm.card.max_running,
            "kv_use": round(pulse.kv_use, 4),
            "acceptance_by_depth": self._metrics.depths.shares(),
            "controller": {
                "nodes": pulse.max_nodes,
                "depth": None,
                "least_chance": round(pulse.least_chance, 4),
                "name": pulse.controller,
                "why": pulse.why,
                "reason": pulse.reason,
                "expected_gain": _rounded(pulse.expected_gain),
                "measured_gain": _rounded(pulse.measured_gain),
                "drafted_by": dict(pulse.drafted_by),
            },
            "last_step": _told(pulse.last_step),
            "status": self._status(),
        }

    def _status(self) -> str:
        if self._monitor.reason is not None:
            return "dead"
        return "ready" if self._admission.closed_for is None else "draining"


def _rounded(gain: float | None) -> float | None:
    return None if gain is None else round(gain, 4)


def _told(step: LastStep | None) -> dict[str, float | None] | None:
    if step is None:
        return None
    return {
        "sequences": step.sequences,
        "rows": step.rows,
        "measured_seconds": round(step.seconds, 6),
        "predicted_seconds": None if step.predicted_seconds is None else round(step.predicted_seconds, 6),
    }


def _rates(before: Sample, now: Sample) -> dict[str, float | None]:
    """What happened between two samples; nothing, where no answer got a token."""
    seconds, steps = now.time - before.time, now.totals.steps - before.totals.steps
    tokens = now.totals.emitted - before.totals.emitted
    if not steps:
        return dict.fromkeys(("tokens_per_second", "steps_per_second", "tokens_per_step"))
    return {
        "tokens_per_second": round(tokens / seconds, 3),
        "steps_per_second": round(steps / seconds, 3),
        "tokens_per_step": round(tokens / steps, 3),
    }
