"""A front and its replicas as a Ray Serve application.

Ray's processes trust each other and talk by means of their own; nothing of that reaches a client.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from ray import serve  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]
from ray.exceptions import RayError  # pyright: ignore[reportMissingImports]
from ray.serve.autoscaling_policy import default_autoscaling_policy  # pyright: ignore[reportMissingImports]
from ray.serve.config import (  # pyright: ignore[reportMissingImports]
    AutoscalingConfig,
    AutoscalingContext,
    AutoscalingPolicy,
    RequestRouterConfig,
)
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from draftwood.config import EngineConfig
from draftwood.engine.llm import LLM
from draftwood.ray.forwarding import Forwarded, Head, answers, lost
from draftwood.ray.router import PrefixRouter
from draftwood.server.app import make_app
from draftwood.server.config import ServerConfig

FULL = 0.8  # share of a replica's cache from which on there should be another one
HOP = {b"connection", b"transfer-encoding", b"content-length"}
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReplicaOptions:
    """What every replica is made of."""

    model: str
    server: ServerConfig
    drafter: str = "ngram"
    tree: str | None = None
    offers: tuple[str, ...] = ()
    engine: EngineConfig = field(default_factory=EngineConfig)


class Replica:
    """A server without a socket."""

    def __init__(self, options: ReplicaOptions) -> None:
        self._llm = LLM(
            options.model, drafter=options.drafter, tree=options.tree, offers=options.offers, config=options.engine
        )
        self._app = make_app(self._llm, options.server, options.drafter, options.offers)
        self._service = self._app.state.service
        self._watching: asyncio.Task[None] | None = None

    async def answer(self, request: Forwarded) -> AsyncGenerator[Head | bytes, None]:
        """The head, then the body in pieces."""
        if self._watching is None:
            self._watching = asyncio.create_task(self._service.monitor.run())
        async with aclosing(answers(self._app, request)) as parts:
            async for part in parts:
                yield part

    async def check_health(self) -> None:
        """Ray replaces a replica whose engine is dead."""
        self._service.monitor.look()
        if self._service.monitor.reason is not None:
            raise RuntimeError(self._service.monitor.reason)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What replicas are added by, besides requests under way."""
        pulse = self._llm.pulse
        return {"kv_use": pulse.kv_use, "waiting": float(pulse.waiting)}

    def __del__(self) -> None:
        self._llm.close()


class Front:
    """Takes requests in and passes answers on."""

    def __init__(self, replicas: Any, max_body: int) -> None:
        self._replicas = replicas.options(stream=True)
        self._max_body = max_body

    async def __call__(self, request: Request) -> Response:
        """Answer a request. What a lost replica had not begun to answer goes to another one."""
        if request.url.path.startswith("/manage"):  # of one replica among several: nobody could say which
            return _error(404, "Replicas are managed through Ray.", "not_found")
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > self._max_body:
                return _error(413, f"The body has more than {self._max_body} bytes.", "too_large")
        client = None if request.client is None else (request.client.host, request.client.port)
        forwarded = Forwarded(
            request.method,
            request.url.path,
            request.url.query.encode(),
            tuple(request.headers.raw),
            bytes(body),
            client,
        )
        for _ in range(2):
            parts = self._replicas.answer.remote(forwarded)
            try:
                head = await anext(aiter(parts))
            except RayError as error:
                log.warning("a replica is lost before it answered: %r", error)
                continue
            kept = [(name, value) for name, value in head.headers if name.lower() not in HOP]
            response = StreamingResponse(self._body(forwarded, head, parts), head.status)
            response.raw_headers = kept
            return response
        return _error(503, "The replicas that were asked have ended. Try again.", "engine_dead")

    async def _body(self, request: Forwarded, head: Head, parts: Any) -> AsyncGenerator[bytes, None]:
        try:
            async for part in parts:
                yield part
        except RayError as error:
            log.warning("a replica is lost while it answered: %r", error)
            if not dict(head.headers).get(b"content-type", b"").startswith(b"text/event-stream"):
                raise
            yield lost(request.path, "The replica that answered has ended.")


def _error(status: int, message: str, code: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": "server_error", "param": None, "code": code}}, status)


def scaled(ctx: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Replicas by requests under way as Ray counts them, and more where caches are full."""
    wanted, state = default_autoscaling_policy(ctx)
    uses = [use for use in (ctx.aggregated_metrics or {}).get("kv_use", {}).values() if use is not None]
    by_cache = math.ceil(sum(uses) / FULL) if uses else 0
    return max(wanted, min(by_cache, ctx.capacity_adjusted_max_replicas)), state


def application(
    options: ReplicaOptions, replicas: tuple[int, int] = (1, 1), cpus: float = 1.0, gpus: float = 0.0
) -> Any:
    """For `serve.run`: between so many replicas, each with so much of a machine."""
    fewest, most = replicas
    running = options.engine.max_running or 64
    scaling = AutoscalingConfig(
        min_replicas=fewest,
        initial_replicas=fewest,
        max_replicas=most,
        target_ongoing_requests=max(1, running // 2),
        policy=AutoscalingPolicy(policy_function=scaled),
    )
    deployment: Any = serve.deployment  # its types are those of a decorator
    router: Any = PrefixRouter
    replica = deployment(Replica).options(
        name="Replica",
        max_ongoing_requests=running + options.server.max_queue,
        ray_actor_options={"num_cpus": cpus, "num_gpus": gpus},
        request_router_config=RequestRouterConfig(request_router_class=router),
        health_check_period_s=1.0,
        **({"autoscaling_config": scaling} if most > fewest else {"num_replicas": fewest}),
    )
    front = deployment(Front).options(name="Front", max_ongoing_requests=4096, ray_actor_options={"num_cpus": 0.0})
    return front.bind(replica.bind(options), options.server.max_body)
