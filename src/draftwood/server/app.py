"""The routes, and what stands around them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any

from fastapi import Body, Depends, FastAPI, Query, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.middleware.cors import CORSMiddleware
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

import draftwood
from draftwood.engine.served import ServedEngine
from draftwood.server.admission import Ticket
from draftwood.server.bodies import BodyLimit, JsonRoute
from draftwood.server.config import ServerConfig
from draftwood.server.errors import ApiError, install_handlers
from draftwood.server.files import page_file
from draftwood.server.live import LONGEST, SHORTEST
from draftwood.server.middleware import AccessLog, AllowedHosts, ApiKeys, OnPort, only_from_here
from draftwood.server.response_models import (
    ChatCompletion,
    ErrorReply,
    ModelCard,
    ModelList,
    State,
    Text,
    TextCompletion,
    Tokens,
    UnderWay,
    Version,
)
from draftwood.server.responses_api.routes import add_routes as add_responses_api
from draftwood.server.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from draftwood.server.service import Service
from draftwood.server.streaming import EventStream

DRAINING = "draining"
REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorReply, "description": text}
    for status, text in {
        400: "The request cannot run.",
        401: "A key is missing.",
        403: "The request came to a name or from a place that is not allowed.",
        404: "There is no such thing.",
        413: "The request is too large.",
        429: "The queue is full, or the API key's limits are reached.",
        431: "The headers are too large.",
        500: "The engine failed on the request.",
        503: "The server is going down, or its engine is dead.",
        408: "The deadline has passed.",
    }.items()
}


def make_app(llm: ServedEngine, config: ServerConfig, drafter: str = "none", offers: Sequence[str] = ()) -> FastAPI:
    """An ASGI application over `llm`, whose drafter and offers are only named here."""
    service = Service(llm, config, drafter, offers)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None, None]:
        watching = asyncio.create_task(service.monitor.run())
        yield
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching

    app = FastAPI(
        title="Draftwood",
        version=draftwood.__version__,
        summary="Lossless speculative decoding behind OpenAI's interface.",
        lifespan=lifespan,
        responses=REFUSALS,
        docs_url=None,
        redoc_url=None,
    )
    app.router.route_class = JsonRoute
    app.state.service = service
    install_handlers(app)
    _answering(app, service)
    add_responses_api(app, service)
    _reading(app, service)
    _watching(app, service)
    _showing(app)
    _managing(app, service)
    _guard(app, service)
    app.openapi = lambda: _openapi(app)
    return app


def _guard(app: FastAPI, service: Service) -> None:
    """What a request passes through before it reaches a route; the last one added is the first."""
    config = service.config
    app.add_middleware(ApiKeys, keys=service.keys)
    app.add_middleware(BodyLimit, limit=config.max_body, total=config.max_bodies)
    if config.cors_origins:  # before keys: a browser asks for leave without one
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_middleware(AllowedHosts, names=config.allowed_hosts)
    app.add_middleware(AccessLog, refused=service.metrics.refused)
    if config.trusted_proxies:
        app.add_middleware(ProxyHeadersMiddleware, trusted_hosts=list(config.trusted_proxies))


EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
STREAM = {"content": {"text/event-stream": {"schema": EVENT}}}


def _answering(app: FastAPI, service: Service) -> None:

    @app.post("/v1/chat/completions", responses={200: {"model": ChatCompletion, **STREAM}}, tags=["answers"])
    async def chat_completions(body: Annotated[ChatRequest, Body()], request: Request) -> Response:
        """Answer a conversation."""
        return await service.chat(body, request)

    @app.post("/v1/completions", responses={200: {"model": TextCompletion, **STREAM}}, tags=["answers"])
    async def completions(body: Annotated[CompletionRequest, Body()], request: Request) -> Response:
        """Continue texts."""
        return await service.complete(body, request)


def _reading(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models", tags=["models"])
    async def models() -> ModelList:
        """The model, its drafters and its law, and its adapters."""
        return ModelList(data=service.cards)

    @app.get("/v1/models/{name:path}", tags=["models"])
    async def model(name: str) -> ModelCard:
        """The same by name."""
        return service.card_of(name)

    # Not on the event loop: a long text takes a while.
    @app.post("/tokenize", tags=["tokens"])
    def tokenize(body: Annotated[TokenizeRequest, Body()]) -> Tokens:
        """A text or a conversation as tokens."""
        tokens = service.tokens(body)
        return Tokens(count=len(tokens), max_model_len=service.llm.card.max_length, tokens=tokens)

    @app.post("/detokenize", tags=["tokens"])
    def detokenize(body: Annotated[DetokenizeRequest, Body()]) -> Text:
        """Tokens as text."""
        return Text(prompt=service.text(body.tokens))


def _watching(app: FastAPI, service: Service) -> None:
    @app.get("/version", tags=["state"])
    async def version() -> Version:
        """The server's version."""
        return Version(version=draftwood.__version__)

    @app.get("/health", tags=["state"], responses={200: {"model": State}, 503: {"model": State}})
    async def health() -> JSONResponse:
        """200 while the engine lives."""
        service.monitor.look()
        reason = service.monitor.reason
        state = State(status="ok" if reason is None else "dead", reason=reason)
        return JSONResponse(state.model_dump(), 200 if reason is None else 503)

    @app.get("/ready", tags=["state"], responses={200: {"model": State}, 503: {"model": State}})
    async def ready() -> JSONResponse:
        """200 while new requests are taken in."""
        closed = service.admission.closed_for
        state = State(status="ready" if closed is None else "closed", reason=None if closed is None else closed.message)
        return JSONResponse(state.model_dump(), 200 if closed is None else 503)

    @app.get("/live", tags=["state"], response_class=Response, responses={200: STREAM})
    async def live(
        every: Annotated[float, Query(ge=SHORTEST, le=LONGEST, description="Seconds between two events.")] = 0.5,
        count: Annotated[int | None, Query(ge=1, description="Events after which the stream ends.")] = None,
    ) -> Response:
        """Figures of the moment, as server-sent events."""
        return EventStream(service.live.listen(every, count), lambda: None)

    @app.get("/metrics", tags=["state"], response_class=Response)
    def metrics() -> Response:
        """Figures for Prometheus."""
        return Response(service.metrics.page(), media_type=CONTENT_TYPE_LATEST)


def _showing(app: FastAPI) -> None:
    # Not on the event loop, for they are read from disk; and not in the document, for they are no interface.
    @app.get("/", include_in_schema=False)
    def index(request: Request) -> Response:
        """The page."""
        return page_file("index.html", request)

    @app.get("/page/{name:path}", include_in_schema=False)
    def page(name: str, request: Request) -> Response:
        """What belongs to it."""
        return page_file(name, request)


def _managing(app: FastAPI, service: Service) -> None:
    port = service.config.manage_port
    here = [Depends(only_from_here), *([] if port is None else [Depends(OnPort(port))])]
    refused: dict[int | str, dict[str, Any]] = {403: {"model": ErrorReply}}

    @app.get("/manage/requests", dependencies=here, responses=refused, tags=["management"])
    async def under_way() -> list[UnderWay]:
        """Requests that are being answered."""
        return [_under_way(ticket) for ticket in service.admission.tickets]

    @app.post("/manage/requests/{request_id}/cancel", dependencies=here, responses=refused, tags=["management"])
    async def cancel(request_id: str) -> State:
        """End a request."""
        found = [ticket for ticket in service.admission.tickets if ticket.id == request_id]
        if not found:
            raise ApiError(404, f"No request '{request_id}' is under way.", "not_found")
        for ticket in found:
            ticket.fail(ApiError(503, "The request was cancelled on the server.", "cancelled"))
        return State(status="cancelled")

    @app.post("/manage/drain", dependencies=here, responses=refused, tags=["management"])
    async def drain() -> State:
        """Take no new requests in; those under way go on."""
        service.admission.close_for(
            ApiError(503, "The server is being drained.", DRAINING, headers={"Retry-After": "5"})
        )
        return State(status=DRAINING)

    @app.post("/manage/resume", dependencies=here, responses=refused, tags=["management"])
    async def resume() -> State:
        """Take requests in again."""
        if service.monitor.reason is not None:
            raise ApiError(503, f"The engine is dead: {service.monitor.reason}", "engine_dead")
        service.admission.closed_for = None
        return State(status="ready")


def _under_way(ticket: Ticket) -> UnderWay:
    return UnderWay(
        id=ticket.id,
        seconds=time.monotonic() - ticket.since,
        open_answers=ticket.open_answers,
        prompt_tokens=ticket.prompt_tokens,
        completion_tokens=ticket.completion_tokens,
    )


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document without the shape of errors that we do not have."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
        for operations in document["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            document["components"]["schemas"].pop(name, None)
        app.openapi_schema = document
    return app.openapi_schema
