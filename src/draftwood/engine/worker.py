"""The thread that computes, and the bridge to it. Callers submit, cancel and listen from anywhere.

There is one such thread in a process, whatever the number of engines. OpenMP keeps a team of threads for every
thread that computes, and as soon as teams together have more members than the machine has cores, their members
sleep between loops instead of spinning; measured on two cores, a step then takes twice as long. So weights are
loaded, and every engine's steps are run, by the same thread.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Protocol, TypeVar

from draftwood.engine.client import Listener, Pulse
from draftwood.engine.engine import Engine
from draftwood.engine.sequence import Sequence
from draftwood.errors import DraftwoodError
from draftwood.request import Event, FinishReason

T = TypeVar("T")
QUIET = 0.5  # seconds without requests before time is spent on later ones: a request that comes meanwhile waits


class Companion(Protocol):
    """Shares the compute thread with an engine. It hears how answers end, and may work between two steps."""

    def hear(self, answer: Sequence, reason: FinishReason) -> None:
        """An answer has ended, however that was."""
        ...

    def wants(self, *, busy: bool) -> float:
        """Seconds after which it would like to work, as things are now: 0 at once, infinite not at all."""
        ...

    def work(self) -> None:
        """Do a short piece of work: requests wait for it."""
        ...


class Driver(Protocol):
    """What a worker does with an engine: the engine itself, or one that leads others."""

    def add(self, sequences: list[Sequence]) -> None:
        """Queue all answers of one request, or none of them."""
        ...

    def abort(self, request_id: int, reason: FinishReason, error: str | None = None) -> list[Event]:
        """End every unfinished answer of a request now."""
        ...

    def step(self) -> list[Event]:
        """One step, and the news it brings."""
        ...

    def prepare_next(self) -> bool:
        """Prepare for later requests; False if nothing is left to prepare."""
        ...


class ComputeThread:
    """Does what it is told, in order, and in between gives every busy worker a step."""

    _shared: ComputeThread | None = None
    _guard = threading.Lock()

    def __init__(self) -> None:
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._workers: list[Worker] = []
        self._thread = threading.Thread(target=self._run, name="draftwood-compute", daemon=True)
        self._thread.start()

    @classmethod
    def shared(cls) -> ComputeThread:
        """The process's one compute thread."""
        with cls._guard:
            if cls._shared is None:
                cls._shared = cls()
            return cls._shared

    def post(self, order: Callable[[], None]) -> None:
        """Carry out `order` before the next step."""
        self._orders.put(order)

    def call(self, function: Callable[[], T]) -> T:
        """Run `function` there and wait for what it returns or raises."""
        answer: Future[T] = Future()

        def order() -> None:
            try:
                answer.set_result(function())
            except BaseException as error:
                answer.set_exception(error)

        self.post(order)
        return answer.result()

    @property
    def alive(self) -> bool:
        """Whether the thread still runs."""
        return self._thread.is_alive()

    def enlist(self, worker: Worker) -> None:
        """Give `worker` its turns from now on."""
        self._workers.append(worker)

    def dismiss(self, worker: Worker) -> None:
        """No more turns for `worker`."""
        self._workers.remove(worker)

    def _run(self) -> None:
        while True:
            busy = [worker for worker in self._workers if worker.busy]
            while not busy or not self._orders.empty():
                self._obey()
                busy = [worker for worker in self._workers if worker.busy]
            for worker in busy:
                worker.turn()

    def _obey(self) -> None:
        """Carry out the next order; until there is one, workers may use the time."""
        patience = 0.0
        while patience <= 0 and self._orders.empty():
            patience = min((worker.rest() for worker in self._workers), default=math.inf)
        try:
            order = self._orders.get(timeout=None if math.isinf(patience) else patience)
        except queue.Empty:
            return
        order()


class Worker:
    """One engine's place on the compute thread."""

    def __init__(self, engine: Engine, driver: Driver | None = None) -> None:
        self._engine = engine
        self._driver: Driver = driver or engine
        self._thread = ComputeThread.shared()
        self._listeners: dict[int, tuple[Listener, dict[int, Sequence]]] = {}  # request -> (who, answers to come)
        self._companion: Companion | None = None
        self._steps = self._failures = 0
        self._failure: str | None = None
        self._since: float | None = None  # when the present step began
        self._idle_since = 0.0  # when the last step ended
        self._closed = False
        self._thread.post(lambda: self._thread.enlist(self))

    def submit(self, sequences: list[Sequence], listener: Listener) -> None:
        """Run all answers of one request; `listener` gets every event, on the compute thread."""
        if self._closed:
            raise DraftwoodError("This LLM is closed; make a new one.")
        self._thread.post(lambda: self._accept(sequences, listener))

    def cancel(self, request_id: int) -> None:
        """End a request's answers before the next step; unknown or finished ones are left alone."""
        self._thread.post(lambda: self._end(request_id, FinishReason.CANCELLED))

    def accompany(self, companion: Companion | None) -> None:
        """Let a companion hear of answers and work between steps, instead of the one before; None: no companion."""
        self._thread.post(lambda: self._let_in(companion))

    def close(self) -> None:
        """Cancel everything; when this returns, no step is running and none will."""
        if not self._closed:
            self._closed = True
            self._thread.call(self._leave)

    @property
    def death(self) -> str | None:
        """Why there will be no more steps; None while there may be."""
        return None if self._thread.alive else "The compute thread has ended."

    @property
    def pulse(self) -> Pulse:
        """Signs of life, read from any thread."""
        return Pulse.of(self._engine, self._steps, self._failures, self._failure, self._since)

    @property
    def busy(self) -> bool:
        """Whether the next turn has something to do."""
        return self._engine.scheduler.has_work

    def turn(self) -> None:
        """One step, and the news it brings."""
        self._since = time.monotonic()
        try:
            events = self._driver.step()
        except Exception as failure:
            events = self._give_up(failure)
        self._steps += 1
        self._since, self._idle_since = None, time.monotonic()
        for event in events:
            self._tell(event)
        self._give_way(busy=True)

    def rest(self) -> float:
        """There are no requests: let the companion work if it wants to, or prepare the engine for later ones. Seconds
        after which there is more to do.
        """
        wait = self._give_way(busy=False)
        quiet = self._idle_since + QUIET - time.monotonic()
        if quiet > 0:
            return min(wait, quiet)
        return 0.0 if wait > 0 and self._driver.prepare_next() else wait

    def _let_in(self, companion: Companion | None) -> None:
        self._companion = companion

    def _give_way(self, *, busy: bool) -> float:
        """A chance for the companion; seconds until it wants the next one."""
        if self._companion is None:
            return math.inf
        with self._parting():
            wait = self._companion.wants(busy=busy)
            if wait > 0:
                return wait
            self._companion.work()
            self._engine.invalidate_timing()
        return 0.0

    @contextmanager
    def _parting(self) -> Iterator[None]:
        """Detach a background task that raised: no answer may depend on it."""
        try:
            yield
        except Exception:
            logging.getLogger(__name__).exception("What shared the compute thread has failed, and is left behind.")
            self._companion = None

    def _leave(self) -> None:
        for request_id in list(self._listeners):
            self._end(request_id, FinishReason.CANCELLED)
        self._companion = None
        self._thread.dismiss(self)

    def _accept(self, sequences: list[Sequence], listener: Listener) -> None:
        self._listeners[sequences[0].request_id] = (listener, {seq.index: seq for seq in sequences})
        try:
            self._driver.add(sequences)
        except DraftwoodError as refusal:
            now = self._engine.scheduler.clock()
            for seq in sequences:
                self._tell(seq.event(0, 0, FinishReason.ERROR, now, error=str(refusal), error_code=refusal.code))

    def _end(self, request_id: int, reason: FinishReason, error: str | None = None) -> None:
        for event in self._driver.abort(request_id, reason, error):
            self._tell(event)

    def _give_up(self, failure: Exception) -> list[Event]:
        """A step failed: which request caused it is not known, so all running answers end with the reason."""
        error = f"The engine failed: {type(failure).__name__}: {failure}"
        self._failures += 1
        self._failure = error
        # If it failed before a sequence ran, it would fail for waiting ones again and again.
        requests = {seq.request_id for seq in self._engine.scheduler.running or self._engine.scheduler.waiting}
        return [
            event
            for request_id in sorted(requests)
            for event in self._driver.abort(request_id, FinishReason.ERROR, error)
        ]

    def _tell(self, event: Event) -> None:
        listener, unfinished = self._listeners[event.request_id]
        if event.finish_reason is not None:
            self._mark_ended(unfinished.pop(event.index), event.finish_reason)
            if not unfinished:
                del self._listeners[event.request_id]
        listener(event)

    def _mark_ended(self, answer: Sequence, reason: FinishReason) -> None:
        if self._companion is not None:
            with self._parting():
                self._companion.hear(answer, reason)
