"""From a request to `/v1/responses` to a chat request. What is not offered is refused by name."""

from __future__ import annotations

from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from draftwood.server.errors import invalid
from draftwood.server.parsing import NotOffered, check_fields
from draftwood.server.responses_api.schemas import (
    LOGPROBS,
    Content,
    FlatTool,
    InputCall,
    InputCallOutput,
    InputItem,
    InputMessage,
    ResponsesRequest,
    TextFormat,
    ToolChoice,
)
from draftwood.server.schemas import ChatRequest, ContentPart, FunctionCall, Message, Sampling, ToolCall

TEXT_PARTS = ("input_text", "output_text", "text")
NOT_STORED = "responses are not stored here; send the whole conversation in input"
NOT_OFFERED: NotOffered = {
    "previous_response_id": ((), NOT_STORED),
    "conversation": ((), NOT_STORED),
    "prompt": ((), "prompt templates are not stored here; send instructions and input"),
    "background": ((False,), "responses are not run in the background; wait for the answer, or stream it"),
    "truncation": (("disabled",), "input is never shortened here; leave old items out yourself"),
    "messages": ((), "this field belongs to /v1/chat/completions; here it is input"),
    "response_format": ((), "this field belongs to /v1/chat/completions; here it is text.format"),
    "logprobs": ((False,), f"this field belongs to /v1/chat/completions; here it is '{LOGPROBS}' in include"),
    "max_completion_tokens": ((), "this field belongs to /v1/chat/completions; here it is max_output_tokens"),
}
CHAT_NAMES = {
    "messages": "input",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
}  # a chat request's fields, and what they are called here


def as_chat(body: ResponsesRequest) -> ChatRequest:
    """The same request to `/v1/chat/completions`."""
    _check(body)
    extra = {name: value for name, value in (body.model_extra or {}).items() if name not in ChatRequest.model_fields}
    shared = extra | {name: value for name, value in body if name in Sampling.model_fields}
    asked = shared | {
        "messages": _messages(body),
        "max_completion_tokens": body.max_output_tokens,
        "logprobs": body.wants_logprobs,
        "top_logprobs": body.top_logprobs if body.wants_logprobs else None,
        "response_format": _format(body.text.format if body.text else None),
        "tools": None if body.tools is None else [_tool(tool) for tool in body.tools],
        "tool_choice": _named(body.tool_choice) if isinstance(body.tool_choice, ToolChoice) else body.tool_choice,
        "parallel_tool_calls": body.parallel_tool_calls,
        "prediction": body.prediction,
    }
    try:
        return ChatRequest.model_validate(asked)
    except ValidationError as error:
        found = [each | {"loc": ("body", *each["loc"])} for each in error.errors()]
        raise RequestValidationError(found) from error


def _check(body: ResponsesRequest) -> None:
    check_fields(dict(body), NOT_OFFERED)
    if (body.n or 1) > 1:
        raise invalid("n is not supported: a response is one answer; ask again for another.", "n")
    if body.top_logprobs and not body.wants_logprobs:
        raise invalid(f"top_logprobs needs '{LOGPROBS}' in include.", "top_logprobs")
    if body.tools and body.tool_choice != "none":
        _check_beside_tools(body)


def _check_beside_tools(body: ResponsesRequest) -> None:
    if body.wants_logprobs:
        raise invalid("Log-probabilities are not given beside tools; leave one of them out.", "include")
    if body.text and body.text.format and body.text.format.type != "text":
        raise invalid("text.format and tools cannot both shape an answer; leave one of them out.", "text.format")


def _messages(body: ResponsesRequest) -> list[Message]:
    messages = [] if body.instructions is None else [Message(role="system", content=body.instructions)]
    if isinstance(body.input, str):
        return [*messages, Message(role="user", content=body.input)]
    for item in body.input:
        _append(messages, item)
    if not messages:
        raise invalid("There is nothing to answer: input holds no message.", "input")
    return messages


def _append(messages: list[Message], item: InputItem) -> None:
    """Calls belong to the assistant's message before them; in the Responses API they are items of their own."""
    match item:
        case InputMessage():
            messages.append(Message(role=item.role, content=_content(item.content)))
        case InputCall():
            call = ToolCall(id=item.call_id, function=FunctionCall(name=item.name, arguments=item.arguments))
            if not messages or messages[-1].role != "assistant":
                messages.append(Message(role="assistant"))
            calls = messages[-1].tool_calls = messages[-1].tool_calls or []
            calls.append(call)
        case InputCallOutput():
            messages.append(Message(role="tool", content=_text(item.output), tool_call_id=item.call_id))
        case _ if item.type != "reasoning":  # another model's thoughts are not for this one
            reason = " Nothing is stored here; send the item itself." if item.type == "item_reference" else ""
            raise invalid(f"An input item of type '{item.type}' cannot be read here.{reason}", "input")


def _content(content: Content) -> str | list[ContentPart]:
    """A text, or parts as chat requests have them where images are among them."""
    if isinstance(content, str) or all(part.type != "input_image" for part in content):
        return _text(content)
    return [_image(part) if part.type == "input_image" else _text_part(part) for part in content]


def _image(part: ContentPart) -> ContentPart:
    url = (part.model_extra or {}).get("image_url")
    if not isinstance(url, str):
        raise invalid("An input_image needs its image_url, a data URL: files are not stored here.", "input")
    return ContentPart.model_validate({"type": "image_url", "image_url": {"url": url}})


def _text_part(part: ContentPart) -> ContentPart:
    return ContentPart(type="text", text=_text([part]))


def _text(content: Content) -> str:
    if isinstance(content, str):
        return content
    strange = next((part.type for part in content if part.type not in TEXT_PARTS or part.text is None), None)
    if strange is not None:
        raise invalid(f"Only text can be read here, not a part of type '{strange}'.", "input")
    return "".join(part.text or "" for part in content)


def _format(wanted: TextFormat | None) -> dict[str, Any] | None:
    if wanted is None or wanted.type != "json_schema":
        return None if wanted is None else {"type": wanted.type}
    if wanted.schema_ is None:
        raise invalid("text.format of type json_schema needs a schema.", "text.format")
    return {"type": wanted.type, "json_schema": {"name": wanted.name, "schema": wanted.schema_}}


def _tool(tool: FlatTool) -> dict[str, Any]:
    if tool.type != "function":
        raise invalid(f"Tools of type '{tool.type}' are not offered here; define a function instead.", "tools")
    if tool.name is None:
        raise invalid("A function needs a name.", "tools")
    described = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": described}


def _named(choice: ToolChoice) -> dict[str, Any]:
    if choice.type != "function" or choice.name is None:
        kinds = "none, auto, required, or {'type': 'function', 'name': NAME}"
        raise invalid(f"tool_choice of type '{choice.type}' is not supported; it may be {kinds}.", "tool_choice")
    return {"type": "function", "function": {"name": choice.name}}


def settings_of(body: ResponsesRequest) -> dict[str, Any]:
    """What the answer repeats of the request."""
    text = {"type": "text"} if body.text is None or body.text.format is None else _plain(body.text.format)
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens or body.max_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": text},
        "tool_choice": _plain(body.tool_choice)
        if isinstance(body.tool_choice, ToolChoice)
        else body.tool_choice or "auto",
        "tools": [{"parameters": None, "strict": True} | _plain(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "user": body.user,
    }


def _plain(model: TextFormat | FlatTool | ToolChoice) -> dict[str, Any]:
    return model.model_dump(by_alias=True, exclude_none=True)
