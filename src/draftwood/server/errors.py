"""What goes wrong, in the shape OpenAI's clients understand."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as AnyHttpException

from draftwood.errors import DraftwoodError

log = logging.getLogger("draftwood.server")
LONGEST_QUOTE = 400  # characters of the caller's in a message


class ApiError(HTTPException):
    """An answer that is not one: a status, and the reason as clients expect it."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.status = status
        self.message = message
        self.code = code
        self.param = param

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object."""
        return error_body(self.status, self.message, self.code, self.param)

    def response(self) -> JSONResponse:
        """The whole response."""
        return JSONResponse(self.body, self.status, dict(self.headers or {}))


def error_body(status: int, message: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": message, "type": _kind(status), "param": param, "code": code}}


def _kind(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 408:
        return "timeout_error"
    if status == 403:
        return "permission_error"
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that cannot run."""
    return ApiError(400, message, code, param)


def refusal(error: DraftwoodError, param: str | None = None) -> ApiError:
    """A request that the engine would not take, with the engine's reason and its name for it."""
    return invalid(str(error), param, error.code)


def install_handlers(app: FastAPI) -> None:
    """Every way to fail gets the same shape."""
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(DraftwoodError, _refusal)
    app.add_exception_handler(RequestValidationError, _malformed)
    app.add_exception_handler(AnyHttpException, _http_error)
    app.add_exception_handler(RecursionError, _too_deep)
    app.add_exception_handler(Exception, _unexpected)


def _api_error(request: Request, error: Any) -> JSONResponse:
    return error.response()


def _refusal(request: Request, error: Any) -> JSONResponse:
    return refusal(error).response()


def _malformed(request: Request, error: Any) -> JSONResponse:
    """Pydantic's findings as one sentence: the first that matters, and where."""
    problems = error.errors()
    first = problems[0] if problems else {"loc": (), "msg": "the request cannot be read"}
    place = _shortened(".".join(str(part) for part in first["loc"][1:])) or None
    where = "" if place is None else f"{place}: "
    more = "" if len(problems) < 2 else f" ({len(problems) - 1} more)"
    return invalid(f"{where}{_shortened(first['msg'])}{more}", place).response()


def _shortened(text: str) -> str:
    """What a caller sent may be long, and may stand in the message."""
    return text if len(text) <= LONGEST_QUOTE else f"{text[:LONGEST_QUOTE]}…"


def _http_error(request: Request, error: Any) -> JSONResponse:
    path = request.url.path
    messages = {
        404: f"There is no {request.method} {path} here; GET /openapi.json lists what there is.",
        405: f"{path} cannot be asked by {request.method}.",
    }
    message = messages.get(error.status_code, str(error.detail))
    code = "unknown_url" if error.status_code == 404 else None
    return ApiError(error.status_code, message, code, headers=error.headers).response()


def _too_deep(request: Request, error: Exception) -> JSONResponse:
    return invalid("The request is nested too deeply.").response()


def _unexpected(request: Request, error: Exception) -> JSONResponse:
    log.error("unexpected failure at %s %s", request.method, request.url.path, exc_info=error)
    return ApiError(500, "The server failed on this request; its log says why.", "internal_error").response()
