"""The routes of the Responses API."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Body, FastAPI, Request
from fastapi.responses import Response

from draftwood.server.errors import ApiError
from draftwood.server.response_models import ErrorReply
from draftwood.server.responses_api.parsing import CHAT_NAMES, as_chat
from draftwood.server.responses_api.schemas import ResponseObject, ResponsesRequest
from draftwood.server.responses_api.writer import ResponseWriter
from draftwood.server.service import Service

EVENT = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["event", "data"],
}
ANSWER: dict[int | str, dict[str, Any]] = {
    200: {"model": ResponseObject, "content": {"text/event-stream": {"schema": EVENT}}}
}


def add_routes(app: FastAPI, service: Service) -> None:
    """Answer conversations; nothing is stored, so there is nothing to look up later."""

    @app.post("/v1/responses", responses=ANSWER, tags=["answers"])
    async def responses(body: Annotated[ResponsesRequest, Body()], request: Request) -> Response:
        """Answer a conversation, as OpenAI's Responses API does."""
        chat = as_chat(body)
        writer = ResponseWriter(body, service.called(chat), service.llm.intake.tokenizer)
        try:
            return await service.converse(chat, request, writer)
        except ApiError as error:
            error.param = CHAT_NAMES.get(error.param or "", error.param)
            raise

    @app.get("/v1/responses/{response_id}", status_code=404, response_model=ErrorReply, tags=["answers"])
    async def stored_response(response_id: str) -> None:
        """Always 404."""
        raise _not_stored(response_id)

    @app.delete("/v1/responses/{response_id}", status_code=404, response_model=ErrorReply, tags=["answers"])
    async def delete_response(response_id: str) -> None:
        """Always 404."""
        raise _not_stored(response_id)


def _not_stored(response_id: str) -> ApiError:
    return ApiError(
        404,
        f"There is no response '{response_id}': responses are not stored here; keep the answer of POST /v1/responses.",
        "not_stored",
        "response_id",
    )
