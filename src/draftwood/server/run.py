"""A server as a process: sockets, signals, draining."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

import uvicorn
from fastapi import FastAPI

from draftwood.errors import InvalidRequest
from draftwood.server.app import DRAINING
from draftwood.server.connections import ConnectionLimits, bounded
from draftwood.server.errors import ApiError, log
from draftwood.server.service import Service


class DrainingServer(uvicorn.Server):
    """SIGTERM and Ctrl-C close the door and wait for answers under way; the second time, nobody waits."""

    def __init__(self, app: FastAPI) -> None:
        self._service: Service = app.state.service
        config = uvicorn.Config(
            app,
            http=bounded(ConnectionLimits.of(self._service.config)),
            ws="none",
            log_config=None,
            access_log=False,
            proxy_headers=False,  # the application believes them from proxies that it was told to trust
            server_header=False,
            timeout_keep_alive=self._service.config.keep_alive,
            timeout_graceful_shutdown=5,
        )
        super().__init__(config)
        self._draining: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, sockets=None) -> None:  # type: ignore[no-untyped-def]
        """Until it is told to stop."""
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    async def shutdown(self, sockets=None) -> None:  # type: ignore[no-untyped-def]
        """Nobody waits for streams that have no end of their own."""
        self._service.live.close()
        await super().shutdown(sockets)

    @property
    def engine_died(self) -> bool:
        """Whether there is nothing left that could be closed."""
        return self._service.monitor.reason is not None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: drain, then stop."""
        if self._draining is None and self._loop is not None:
            log.info("%s: finishing what is under way", signal.Signals(sig).name)
            self._loop.call_soon_threadsafe(self._start_draining)
        else:
            self.should_exit = self.force_exit = True

    def _start_draining(self) -> None:
        self._draining = asyncio.create_task(self.drain())

    async def drain(self) -> None:
        """Take nobody in any more, wait, end what is left, stop."""
        desk, seconds = self._service.desk, self._service.config.drain_seconds
        desk.close_for(ApiError(503, "The server is going down.", DRAINING, headers={"Retry-After": "5"}))
        if not await desk.drained(seconds):
            log.warning("ending %d answers that were not finished in %g seconds", desk.open_answers, seconds)
            desk.fail_all(ApiError(503, "The server went down before the answer was finished.", DRAINING))
            await asyncio.sleep(0.1)  # so that the last events get out
        self.should_exit = True


@contextmanager
def listening(addresses: Iterable[tuple[str, int]]) -> Iterator[list[socket.socket]]:
    """Sockets at addresses that are free."""
    with ExitStack() as stack:
        yield [stack.enter_context(_listen(host, port)) for host, port in addresses]


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except socket.gaierror as error:
        raise InvalidRequest(f"'{host}' is no address: {error.strerror}. Choose another one with --host.") from error
    except OSError as error:
        reason = os.strerror(error.errno or 0).lower()
        hint = (
            "choose another port with --port" if error.errno == errno.EADDRINUSE else "choose another --host or --port"
        )
        raise InvalidRequest(f"The server cannot listen at {host}:{port}: {reason}; {hint}.") from error


def set_up_logging() -> None:
    """One line an event on standard error, the access log as JSON."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
