"""From what a client sends to what the engine is asked: prompts and sampling parameters. Refusals say which field."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from draftwood.errors import DraftwoodError
from draftwood.model.grammar import json_grammar
from draftwood.model.tokenizer import Tokenizer
from draftwood.request import SamplingParams
from draftwood.server.errors import invalid
from draftwood.server.schemas import (
    ChatRequest,
    CompletionRequest,
    ContentPart,
    Message,
    Prediction,
    ResponseFormat,
    Sampling,
    Speculation,
)
from draftwood.server.tools import ToolBox, write_call

DEFAULT_COMPLETION = 16  # tokens, as OpenAI's
TINY = 1e-9  # a top_p of 0 keeps the likeliest token


def chat_params(request: ChatRequest, toolbox: ToolBox | None, longest: int) -> SamplingParams:
    """How a conversation is answered; `longest`: tokens where the client names no limit."""
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("top_logprobs needs logprobs to be true.", "top_logprobs")
    return _params(
        request,
        max_tokens=request.max_completion_tokens or request.max_tokens or longest,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        grammar=_grammar(request.response_format, toolbox),
        prediction=_predicted(request.prediction),
    )


def completion_params(request: CompletionRequest) -> SamplingParams:
    """How a text is continued."""
    if request.suffix:
        raise invalid("suffix is not offered: this server continues texts, it does not fill gaps.", "suffix")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise invalid("best_of is not offered; ask for n answers and choose.", "best_of")
    if request.max_tokens == 0 and not request.echo:
        raise invalid(
            "max_tokens is 0, which leaves nothing to answer with: ask for at least 1 token, or set echo to get the "
            "prompt back, with its log-probabilities if logprobs is set.",
            "max_tokens",
        )
    scored = request.logprobs if request.echo else None
    wanted = DEFAULT_COMPLETION if request.max_tokens is None else request.max_tokens
    params = _params(
        request,
        max_tokens=max(wanted, 1),  # where nothing is generated and nothing scored, nothing runs: see `only_echoes`
        logprobs=request.logprobs,
        grammar=None,
        prediction=_predicted(request.prediction),
    )
    return params if scored is None else replace(params, prompt_logprobs=scored, max_tokens=wanted)


def only_echoes(request: CompletionRequest) -> bool:
    """Whether the prompt's text is all that is wanted."""
    return request.max_tokens == 0 and request.logprobs is None


def _params(
    request: Sampling, max_tokens: int, logprobs: int | None, grammar: str | None, prediction: str
) -> SamplingParams:
    wishes = request.speculation or Speculation()  # pyright: ignore[reportCallIssue]
    given: dict[str, Any] = {
        "top_k": None if request.top_k is None else max(request.top_k, 0),
        "top_p": None if request.top_p is None else max(request.top_p, TINY),
        "min_p": request.min_p,
        "repetition_penalty": request.repetition_penalty,
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "bad_words": request.bad_words,
        "stop": request.stop,
        "stop_token_ids": request.stop_token_ids,
        "ignore_eos": request.ignore_eos,
        "n": request.n,
    }
    return SamplingParams(
        temperature=1.0 if request.temperature is None else request.temperature,
        max_tokens=max_tokens,
        logit_bias=_bias(request.logit_bias),
        seed=request.seed,
        logprobs=logprobs,
        grammar=grammar,
        prediction=prediction,
        law=wishes.law,
        drafter=wishes.drafter,
        max_nodes=wishes.max_nodes if wishes.enabled else 0,
        max_depth=wishes.depth,
        trace=wishes.report == "trace",
        **{name: value for name, value in given.items() if value is not None},
    )


def _bias(given: dict[str, float] | None) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in (given or {}).items()}
    except ValueError as error:
        raise invalid("logit_bias maps token ids, written as numbers, to biases.", "logit_bias") from error


def _predicted(prediction: Prediction | None) -> str:
    return "" if prediction is None else plain_text(prediction.content, "prediction")


def _grammar(wanted: ResponseFormat | None, toolbox: ToolBox | None) -> str | None:
    if wanted is None or wanted.type == "text":
        return None if toolbox is None else toolbox.grammar
    if toolbox is not None:
        raise invalid("response_format and tools cannot both shape an answer; leave one out.", "response_format")
    if wanted.type == "json_object":
        return json_grammar({"type": "object"})
    schema = None if wanted.json_schema is None else wanted.json_schema.schema_
    if schema is None:
        raise invalid("response_format json_schema needs json_schema.schema.", "response_format")
    try:
        return json_grammar(schema)
    except DraftwoodError as error:
        raise invalid(str(error), "response_format") from error


def plain_text(content: str | Sequence[ContentPart] | None, field: str) -> str:
    """The text of a content; nothing else than text can be read here."""
    if content is None or isinstance(content, str):
        return content or ""
    strange = next((part.type for part in content if part.type != "text" or part.text is None), None)
    if strange is not None:
        raise invalid(f"Only text can be read here, not a part of type '{strange}'.", field)
    return "".join(part.text or "" for part in content)


def chat_prompt(tokenizer: Tokenizer, messages: Sequence[Message], toolbox: ToolBox | None) -> list[int]:
    """A conversation as the model reads it."""
    knows = tokenizer.knows_tools
    said = [_as_template(message) if knows else _as_words(message) for message in messages]
    if toolbox is not None and not knows:
        said = _with_instructions(said, toolbox.instructions)
    tools = None if toolbox is None or not knows else toolbox.descriptions
    return tokenizer.encode(tokenizer.render_chat(said, tools=tools), special=False)


def _role(message: Message) -> str:
    return "system" if message.role == "developer" else message.role


def _as_template(message: Message) -> dict[str, Any]:
    said: dict[str, Any] = {"role": _role(message), "content": plain_text(message.content, "messages")}
    if message.tool_calls:
        said["tool_calls"] = [
            {"type": "function", "function": {"name": c.function.name, "arguments": _unwrapped(c.function.arguments)}}
            for c in message.tool_calls
        ]
    extras = {"name": message.name, "tool_call_id": message.tool_call_id}
    return said | {name: value for name, value in extras.items() if value is not None}


def _unwrapped(arguments: str) -> Any:
    """Templates write arguments as JSON themselves."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _as_words(message: Message) -> dict[str, Any]:
    """For templates that know no tools: calls and their results as text."""
    content = plain_text(message.content, "messages")
    if message.role == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = [write_call(call.function.name, call.function.arguments) for call in message.tool_calls or []]
    return {"role": _role(message), "content": "\n".join(filter(None, [content, *calls]))}


def _with_instructions(said: list[dict[str, Any]], instructions: str) -> list[dict[str, Any]]:
    if said and said[0]["role"] == "system":
        return [{"role": "system", "content": f"{said[0]['content']}\n\n{instructions}"}, *said[1:]]
    return [{"role": "system", "content": instructions}, *said]
