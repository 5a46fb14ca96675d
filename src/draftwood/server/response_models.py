"""What clients get, for the OpenAPI document; `formatters.py` writes it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from draftwood.server.schemas import Open


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    """OpenAI's error object."""

    error: ErrorDetail


class Usage(Open):
    """What a request took."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]
    completion_tokens_details: dict[str, int]
    reproducible: bool  # whether the same seed gives the same answers again


class ChatMessage(Open):
    """What the model said."""

    role: Literal["assistant"]
    content: str | None
    tool_calls: list[dict[str, Any]] | None = None


class ChatChoice(Open):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(Open):
    """Answers to a conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class TextChoice(Open):
    """One continuation."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]


class TextCompletion(Open):
    """Continuations of texts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


class LawCard(BaseModel):
    """A law that a request may name."""

    name: str
    lossless: bool
    exact_for: str  # the trees it takes


class ModelCard(Open):
    """A model, and what can be asked of it."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "draftwood"
    max_model_len: int
    drafter: str
    drafters: list[str]
    branching: list[str]  # those of them that guess trees with branches, not only chains
    law: str
    laws: list[LawCard]
    max_nodes: int  # draft nodes a step, at most
    cache_dtype: str = "auto"  # of keys and values; int8 and fp8 make another model
    parent: str | None = None  # of an adapter: the model it belongs to


class ModelList(BaseModel):
    """The model, and its adapters."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokens(BaseModel):
    """A text as the model reads it."""

    count: int
    max_model_len: int
    tokens: list[int]


class Text(BaseModel):
    """Tokens as a person reads them."""

    prompt: str


class Version(BaseModel):
    """What is running."""

    version: str


class State(BaseModel):
    """How the server is."""

    status: str
    reason: str | None = None


class UnderWay(BaseModel):
    """A request that is being answered."""

    id: str
    seconds: float
    open_answers: int
    prompt_tokens: int
    completion_tokens: int
