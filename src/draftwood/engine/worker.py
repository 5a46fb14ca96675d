"""The engine's thread. Callers submit, cancel and listen from anywhere; only this thread touches the engine."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from draftwood.engine.engine import Engine
from draftwood.engine.sequence import Sequence
from draftwood.errors import DraftwoodError
from draftwood.request import Event, FinishReason

Listener = Callable[[Event], None]


@dataclass(frozen=True)
class _Submit:
    sequences: list[Sequence]
    listener: Listener


@dataclass(frozen=True)
class _Cancel:
    request_id: int


class _Stop:
    pass


class Worker:
    """Runs steps while there is work and sleeps while there is none."""

    def __init__(self, engine: Engine, num_threads: int | None = None) -> None:
        self._engine = engine
        self._num_threads = num_threads
        self._orders: queue.SimpleQueue[_Submit | _Cancel | _Stop] = queue.SimpleQueue()
        self._listeners: dict[int, tuple[Listener, int]] = {}  # request -> (who, answers to come)
        self._thread = threading.Thread(target=self._run, name="draftwood-engine", daemon=True)
        self._thread.start()

    def submit(self, sequences: list[Sequence], listener: Listener) -> None:
        """Run all answers of one request; `listener` gets every event, on the engine's thread."""
        if not self._thread.is_alive():
            raise DraftwoodError("This engine is closed; make a new one.")
        self._orders.put(_Submit(sequences, listener))

    def cancel(self, request_id: int) -> None:
        """End a request's answers before the next step; unknown or finished ones are left alone."""
        self._orders.put(_Cancel(request_id))

    def close(self) -> None:
        """Cancel everything and end the thread."""
        self._orders.put(_Stop())
        self._thread.join()

    def _run(self) -> None:
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)  # OpenMP keeps this number for each thread
        while self._obey():
            try:
                events = self._engine.step()
            except Exception as failure:
                events = self._give_up(failure)
            for event in events:
                self._tell(event)
        for request_id in list(self._listeners):
            self._end(request_id, FinishReason.CANCELLED)

    def _obey(self) -> bool:
        """Carry out all orders, waiting for one if there is nothing else to do; False when told to stop."""
        while not (self._orders.empty() and self._engine.scheduler.has_work):
            order = self._orders.get()
            if isinstance(order, _Stop):
                return False
            if isinstance(order, _Cancel):
                self._end(order.request_id, FinishReason.CANCELLED)
            else:
                self._accept(order)
        return True

    def _accept(self, order: _Submit) -> None:
        request_id = order.sequences[0].request_id
        self._listeners[request_id] = (order.listener, len(order.sequences))
        try:
            self._engine.scheduler.add(order.sequences)
        except DraftwoodError as refusal:
            now = self._engine.scheduler.clock()
            for seq in order.sequences:
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
