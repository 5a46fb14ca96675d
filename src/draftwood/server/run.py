"""A server as a process: sockets, signals, draining."""

from __future__ import annotations

import asyncio
import logging
import signal
from types import FrameType

import uvicorn
from fastapi import FastAPI

from draftwood.server.app import DRAINING
from draftwood.server.connections import ConnectionLimits, bounded
from draftwood.server.errors import ApiError, log
from draftwood.server.service import Service


class DrainingServer(uvicorn.Server):
    """SIGTERM and Ctrl-C close the door and wait for answers under way; the second time, nothing is waited for."""

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
        """Streams that have no end of their own are not waited for."""
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
        """Take no more requests, wait, end what is left, stop."""
        admission, seconds = self._service.admission, self._service.config.drain_seconds
        admission.close_for(ApiError(503, "The server is going down.", DRAINING, headers={"Retry-After": "5"}))
        if not await admission.drained(seconds):
            log.warning("ending %d answers that were not finished in %g seconds", admission.open_answers, seconds)
            admission.fail_all(ApiError(503, "The server went down before the answer was finished.", DRAINING))
            await asyncio.sleep(0.1)  # so that the last events get out
        self.should_exit = True


def set_up_logging() -> None:
    """One line an event on standard error, the access log as JSON."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
