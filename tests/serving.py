"""A real server on a loopback port, in a thread of this process, over a tiny model."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import openai

from draftwood import LLM, EngineConfig
from draftwood.server.app import make_app
from draftwood.server.config import ServerConfig
from draftwood.server.run import DrainingServer
from draftwood.server.service import Service

# What a test counts must not depend on what steps take.
SMALL = EngineConfig(cache_tokens=4096, page_size=16, threads=1, max_running=16, controller="fixed")
NAME = "tiny"


@dataclass
class Serving:
    """A running server, and ways to talk to it."""

    llm: LLM
    server: DrainingServer
    service: Service
    url: str

    def client(self, **settings: object) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", **{"api_key": "none", "max_retries": 0, "timeout": 30} | settings
        )

    def http(self, **settings: object) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30, **settings)

    def post(self, path: str, json: object) -> httpx.Response:
        with self.http() as http:
            return http.post(path, json=json)

    def idle(self, seconds: float = 5) -> bool:
        """Whether nothing is left of any request, soon: no answer, no page."""
        pool, scheduler = self.llm.engine.scheduler.tables.pool, self.llm.engine.scheduler

        def done() -> bool:
            return (
                not scheduler.has_work and not self.service.admission.tickets and pool.num_available == pool.num_pages
            )

        return soon(done, seconds)


def soon(true: Callable[[], object], seconds: float = 10) -> bool:
    """Whether it is so within some seconds."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def wait_for(condition: Callable[[], object], seconds: float = 5) -> None:
    assert soon(condition, seconds), "it never happened"


def http_request(path: str, body: bytes) -> bytes:
    """A POST as bytes, for those who hang up in the middle of it."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Content-Type: application/json\r\n\r\n".encode() + body


@contextmanager
def serving(llm: LLM, drafter: str = "ngram", offers: tuple[str, ...] = (), **settings: object) -> Iterator[Serving]:
    """Serve until the block ends."""
    config = ServerConfig(NAME, **{"drain_seconds": 2} | settings)  # type: ignore[arg-type]
    app = make_app(llm, config, drafter, offers)
    manage = [] if config.manage_port is None else [socket.create_server(("127.0.0.1", config.manage_port))]
    door = socket.create_server(("127.0.0.1", 0))
    server = DrainingServer(app)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[door, *manage])))
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield Serving(llm, server, app.state.service, f"http://127.0.0.1:{door.getsockname()[1]}")
    finally:
        server.should_exit = True
        thread.join(20)
        door.close()
        assert not thread.is_alive(), "the server hangs"
