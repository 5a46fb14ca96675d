"""The thread that computes, and the bridge to it. Callers submit, cancel and listen from anywhere.

There is one such thread in a process, whatever the number of engines. OpenMP keeps a team of threads for every
thread that computes, and as soon as teams together have more members than the machine has cores, their members
sleep between loops instead of spinning; measured on two cores, a step then takes twice as long. So weights are
loaded, and every engine's steps are run, by the same thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from draftwood.engine.engine import Engine
from draftwood.engine.sequence import Sequence
from draftwood.errors import DraftwoodError
from draftwood.request import Event, FinishReason

Listener = Callable[[Event], None]
T = TypeVar("T")


class ComputeThread:
    """Does what it is told, in order, and in between gives every busy worker a step."""

    _shared: ComputeThread | None = None
    _guard = threading.Lock()

    def __init__(self) -> None:
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._workers: list[Worker] = []
        threading.Thread(target=self._run, name="draftwood-compute", daemon=True).start()

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
                self._orders.get()()
                busy = [worker for worker in self._workers if worker.busy]
            for worker in busy:
                worker.turn()


class Worker:
    """One engine's place on the compute thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._thread = ComputeThread.shared()
        self._listeners: dict[int, tuple[Listener, int]] = {}  # request -> (who, answers to come)
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

    def close(self) -> None:
        """Cancel everything; when this returns, no step is running and none will."""
        if not self._closed:
            self._closed = True
            self._thread.call(self._leave)

    @property
    def busy(self) -> bool:
        """Whether the next turn has something to do."""
        return self._engine.scheduler.has_work

    def turn(self) -> None:
        """One step, and the news it brings."""
        try:
            events = self._engine.step()
        except Exception as failure:
            events = self._give_up(failure)
        for event in events:
            self._tell(event)

    def _leave(self) -> None:
        for request_id in list(self._listeners):
            self._end(request_id, FinishReason.CANCELLED)
        self._thread.dismiss(self)

    def _accept(self, sequences: list[Sequence], listener: Listener) -> None:
        self._listeners[sequences[0].request_id] = (listener, len(sequences))
        try:
            self._engine.scheduler.add(sequences)
        except DraftwoodError as refusal:
            now = self._engine.scheduler.clock()
            for seq in sequences:
                self._tell(seq.event(0, 0, FinishReason.ERROR, now, error=str(refusal)))

    def _end(self, request_id: int, reason: FinishReason, error: str | None = None) -> None:
        for event in self._engine.scheduler.abort(request_id, reason, error):
            self._tell(event)

    def _give_up(self, failure: Exception) -> list[Event]:
        """A step failed: nobody can say whose fault it was, so all running answers end with the reason."""
        error = f"The engine failed: {type(failure).__name__}: {failure}"
        requests = {seq.request_id for seq in self._engine.scheduler.running}
        return [
            event
            for request_id in sorted(requests)
            for event in self._engine.scheduler.abort(request_id, FinishReason.ERROR, error)
        ]

    def _tell(self, event: Event) -> None:
        listener, left = self._listeners[event.request_id]
        if event.finished:
            left -= 1
            if left:
                self._listeners[event.request_id] = (listener, left)
            else:
                del self._listeners[event.request_id]
        listener(event)
