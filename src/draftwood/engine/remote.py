"""An engine in another process: the two ends of a private socket, and the process behind it.

Every frame is a list of messages, each a verb and its data. What waits to be sent is sent together, so that a step's
events take one frame.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

from draftwood.assembly import choose_law
from draftwood.config import DTYPES
from draftwood.engine.client import EngineCard, EngineClient, Listener, Pulse
from draftwood.engine.images import ImageReader
from draftwood.engine.intake import Intake
from draftwood.engine.requests import EngineRequest
from draftwood.errors import DraftwoodError, EngineDead, WireError
from draftwood.model.checkpoint import Checkpoint
from draftwood.request import Event, FinishReason, SpeculationStats
from draftwood.wire import Line

BEAT, IDLE_BEAT = 0.1, 1.0  # seconds between two pulses, and where there is nothing new
SILENCE = 5.0  # seconds without a pulse from which on the engine counts as busy with something
LONGEST = 1 << 30  # bytes of a frame; both ends are ours
PATIENCE = 60.0  # seconds that a process has to end after it was told to
TO_ENGINE: Mapping[str, type] = {"submit": EngineRequest, "cancel": int, "close": str}
TO_CLIENT: Mapping[str, type] = {"ready": EngineCard, "refused": str, "event": Event, "pulse": Pulse}


def failed(request: EngineRequest, indices: Sequence[int], error: DraftwoodError) -> Iterator[Event]:
    """The end of answers that there is no engine for."""
    stats = SpeculationStats(prompt_tokens=request.prompt_length, seed=request.seed)
    for index in indices:
        yield Event(request.id, index, (), (), "", FinishReason.ERROR, stats, error=str(error), error_code=error.code)


class EngineHost:
    """The engine's end: hands requests to it, events and pulses to the client."""

    def __init__(self, engine: EngineClient, line: Line) -> None:
        self._engine = engine
        self._line = line
        # Grammars take time to compile: other requests, and what is cancelled, do not wait for them.
        self._slow = ThreadPoolExecutor(2, "draftwood-grammars")
        self._preparing: dict[int, bool] = {}  # requests, and whether they were cancelled meanwhile
        self._guard = threading.Lock()
        self._ended = threading.Event()

    def run(self) -> None:
        """Until the client says so or is gone; the engine is the caller's to close."""
        self._line.send("ready", self._engine.card)
        beating = threading.Thread(target=self._beat, name="draftwood-pulse", daemon=True)
        beating.start()
        try:
            for verb, value in self._line.messages():
                if verb == "close":
                    break
                self._obey(verb, value)
        finally:
            self._ended.set()
            self._slow.shutdown(wait=False, cancel_futures=True)

    def _obey(self, verb: str, value: Any) -> None:
        if verb == "cancel":
            self._cancel(value)
        elif value.params.grammar is None:
            self._submit(value)
        else:
            with self._guard:
                self._preparing[value.id] = False
            self._slow.submit(self._prepare, value)

    def _submit(self, request: EngineRequest) -> None:
        try:
            self._engine.submit(request, lambda event: self._line.send("event", event))
        except Exception as error:
            refusal = error if isinstance(error, DraftwoodError) else DraftwoodError(f"The engine failed: {error!r}")
            for event in failed(request, range(request.params.n), refusal):
                self._line.send("event", event)

    def _prepare(self, request: EngineRequest) -> None:
        self._submit(request)
        with self._guard:
            cancelled = self._preparing.pop(request.id)
        if cancelled:
            self._engine.cancel(request.id)

    def _cancel(self, request_id: int) -> None:
        with self._guard:
            if request_id in self._preparing:
                self._preparing[request_id] = True
                return
        self._engine.cancel(request_id)

    def _beat(self) -> None:
        last, sent = None, 0.0
        while not self._ended.wait(BEAT):
            pulse = self._engine.pulse
            if pulse != last or time.monotonic() - sent > IDLE_BEAT:
                self._line.send("pulse", pulse)
                last, sent = pulse, time.monotonic()


@dataclass
class _Open:
    """A request that has not ended."""

    request: EngineRequest
    listener: Listener
    indices: set[int]  # of answers to come


class RemoteEngine:
    """The client's end; an `EngineClient` with its intake. Listeners hear events on a thread of its own."""

    def __init__(self, line: Line, checkpoint: Checkpoint, process: subprocess.Popen[bytes] | None = None) -> None:
        """Waits until the engine is ready; raises what it was refused for."""
        self._line = line
        self._process = process
        self._open: dict[int, _Open] = {}
        self._guard = threading.Lock()
        self._death: str | None = None
        self._closing = False
        self._heard, self._pulse = time.monotonic(), Pulse()
        self._messages = line.messages()
        self.card = self._wait_until_ready()
        device = torch.device(self.card.device)
        laws = choose_law(self.card.law, self.card.drafter.law, device)
        images = ImageReader.of(checkpoint, DTYPES[self.card.dtype], device)
        self.intake = Intake(checkpoint, self.card, laws, images)
        self._reader = threading.Thread(target=self._read, name="draftwood-events", daemon=True)
        self._reader.start()

    @property
    def pulse(self) -> Pulse:
        """The last one that came."""
        pulse, age = self._pulse, time.monotonic() - self._heard
        if pulse.stepping is None and age < SILENCE:
            return pulse
        return replace(pulse, stepping=(pulse.stepping or 0.0) + age)

    @property
    def death(self) -> str | None:
        """Why it will never answer again; None while it may."""
        return self._death

    def submit(self, request: EngineRequest, listener: Listener) -> None:
        """Run all answers of a request; one that comes too late ends at once."""
        one = _Open(request, listener, set(range(request.params.n)))
        with self._guard:
            self._open[request.id] = one
            dead = self._death
        if dead is None:
            self._line.send("submit", request)
        else:
            self._fail(one, dead)

    def cancel(self, request_id: int) -> None:
        """End a request before the next step."""
        self._line.send("cancel", request_id)

    def close(self) -> None:
        """Cancel everything, and wait for the process to end."""
        self._closing = True
        self._line.send("close", "")
        if self._process is not None:
            try:
                self._process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._line.close()
        self._reader.join(5)

    def _wait_until_ready(self) -> EngineCard:
        _, value = next(self._messages, ("refused", None))
        if isinstance(value, EngineCard):
            return value
        self._line.close()
        if value is None:
            raise EngineDead(f"{self._obituary()} It was not ready yet; what it wrote says why.")
        raise DraftwoodError(value)

    def _read(self) -> None:
        reason = None
        try:
            for verb, value in self._messages:
                if verb == "event":
                    self._tell(value)
                else:
                    self._heard, self._pulse = time.monotonic(), value
        except WireError as error:
            reason = str(error)
        with self._guard:
            self._death = reason or self._obituary()
            lost = list(self._open.values())
        for one in lost:
            self._fail(one, self._death)

    def _tell(self, event: Event) -> None:
        one = self._open.get(event.request_id)
        if one is None:
            return
        if event.finished:
            one.indices.discard(event.index)
            if not one.indices:
                del self._open[event.request_id]
        one.listener(event)

    def _fail(self, one: _Open, reason: str) -> None:
        self._open.pop(one.request.id, None)
        for event in failed(one.request, sorted(one.indices), EngineDead(f"The engine is dead: {reason}")):
            one.listener(event)

    def _obituary(self) -> str:
        if self._process is None or self._closing:
            return "The engine has hung up."
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return "The engine process has hung up."
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return f"The engine process has ended {how}."


def started(command: Sequence[str], order: object) -> tuple[Line, subprocess.Popen[bytes]]:
    """A process that hosts an engine, and the line to it. The command is given the number of a socket, which nothing
    else can open, and reads from it what it is to load.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        fd = theirs.fileno()
        process = subprocess.Popen([*command, str(fd)], pass_fds=(fd,), stdin=subprocess.DEVNULL)
    line = Line(ours, TO_CLIENT, LONGEST)
    line.send("start", order)
    return line, process
