"""The other process of `draftwood serve --engine-process`: an engine, and a socket to the server that started it.

It ends when that socket does. Signals are left to the server, which drains first; systemd sends them to both.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from draftwood.cli.flags import EngineFlags
from draftwood.errors import InvalidRequest

if TYPE_CHECKING:
    from draftwood.engine.remote import RemoteEngine
    from draftwood.wire import Line

COMMAND = "import sys; from draftwood.cli.engine_process import main; main(int(sys.argv[1]))"


@dataclass(frozen=True)
class EngineOrder:
    """What the engine is to be made of."""

    flags: EngineFlags
    offers: tuple[str, ...]
    max_running: int
    adapt: str | None = None  # a folder for a drafter that learns
    kv_events: str | None = None  # endpoint
    kv_topic: str = ""
    adapters: Mapping[str, str] = field(default_factory=dict)  # folders by name


def start_engine(order: EngineOrder) -> RemoteEngine:
    """An engine in a process of its own."""
    from draftwood.engine.remote import RemoteEngine, started
    from draftwood.model.checkpoint import open_checkpoint

    if os.name != "posix":
        raise InvalidRequest("--engine-process hands a socket over as Linux and macOS do; leave it out here.")
    line, process = started([sys.executable, "-c", COMMAND], order)
    try:
        return RemoteEngine(line, open_checkpoint(order.flags.model, order.flags.impl), process)
    except BaseException:  # an interruption too: it would load on
        process.kill()
        process.wait()
        line.close()
        raise


def host(order: EngineOrder, line: Line) -> None:
    """Load, and serve the one client there is."""
    from draftwood.cli.session import open_llm, publish_events, save_adapted, start_adapting
    from draftwood.engine.remote import EngineHost
    from draftwood.errors import DraftwoodError

    try:
        llm = open_llm(order.flags, offers=order.offers, max_running=order.max_running, adapters=order.adapters)
    except DraftwoodError as error:
        line.send("refused", str(error))
        return
    with llm:
        adapter = start_adapting(llm) if order.adapt is not None else None
        events = None if order.kv_events is None else publish_events(llm, order.kv_events, order.kv_topic)
        EngineHost(llm, line).run()
        if events is not None:
            events.close()
        if adapter is not None and order.adapt is not None:
            save_adapted(adapter, Path(order.adapt))


def main(fd: int) -> None:
    """With the socket of this number."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    from draftwood.engine.remote import LONGEST, TO_ENGINE
    from draftwood.wire import Line

    verbs: Mapping[str, type] = {**TO_ENGINE, "start": EngineOrder}
    line = Line(socket.socket(fileno=fd), verbs, LONGEST)
    for _, order in line.messages():
        host(order, line)
        break
    line.close()
