"""From what a client sends to what the engine is asked: prompts and sampling parameters. Refusals say which field."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from draftwood.engine.images import ImageReader
from draftwood.errors import DraftwoodError
from draftwood.model.grammar import choice_grammar, json_grammar, regex_grammar
from draftwood.model.tokenizer import Tokenizer
from draftwood.request import SamplingParams, Slo
from draftwood.server.errors import invalid, refusal
from draftwood.server.schemas import (
    ChatRequest,
    CompletionRequest,
    ContentPart,
    Message,
    Prediction,
    ResponseFormat,
    Sampling,
    Speculation,
    StructuredOutputs,
)
from draftwood.server.tools import ToolBox, write_call

DEFAULT_COMPLETION = 16  # tokens, as OpenAI's
TINY = 1e-9  # a top_p of 0 keeps the likeliest token
# Fields of OpenAI's and vLLM's that would change an answer and are not offered: values that change nothing, and a hint.
NotOffered = Mapping[str, tuple[tuple[Any, ...], str]]
NOT_OFFERED: NotOffered = {
    "suffix": (("",), "this server continues texts, it does not fill gaps"),
    "functions": (([],), "describe functions in tools"),
    "function_call": (("auto", "none"), "use tool_choice"),
    "use_beam_search": ((False,), "answers are sampled"),
    "length_penalty": ((1, 1.0), "it belongs to beam search"),
    "early_stopping": ((False,), "it belongs to beam search"),
    "allowed_token_ids": (([],), "use logit_bias or guided_choice"),
    "include_stop_str_in_output": ((False,), "stop strings are never part of an answer"),
    "truncate_prompt_tokens": ((), "shorten the prompt before sending it"),
    "logits_processors": (([],), "nothing that a client sends is executed"),
    "chat_template": ((), "the model's own template is used"),
    "chat_template_kwargs": (({},), "the model's own template is used as it is"),
    "documents": (([],), "write them into a message"),
    "continue_final_message": ((False,), "use /v1/completions to continue a text"),
    "add_generation_prompt": ((True,), "use /v1/completions to continue a text"),
    "skip_special_tokens": ((True,), "special tokens are never part of a text"),
    "guided_whitespace_pattern": ((), "JSON is written with one space behind ',' and ':'"),
    "modalities": ((["text"],), "answers are text"),
    "audio": ((), "answers are text"),
    "prompt_logprobs": ((), "use /v1/completions with echo and logprobs"),
    # Fields of one route, sent to another.
    "response_format": (({"type": "text"},), "use guided_json, or /v1/chat/completions"),
    "tools": (([],), "use /v1/chat/completions"),
    "tool_choice": (("none", "auto"), "use /v1/chat/completions"),
    "max_completion_tokens": ((), "use max_tokens"),
    "top_logprobs": ((), "logprobs is the number of alternatives here"),
    "echo": ((False,), "use /v1/completions"),
    "encoder_input": ((), "use /v1/completions"),
    "web_search_options": ((), "this server reaches no other"),
}


def chat_params(request: ChatRequest, toolbox: ToolBox | None, longest: int) -> SamplingParams:
    """How a conversation is answered; `longest`: tokens where the client names no limit."""
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("top_logprobs needs logprobs to be true.", "top_logprobs")
    return _params(
        request,
        max_tokens=request.max_completion_tokens or request.max_tokens or longest,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        grammar=_grammar(request, toolbox),
        prediction=_predicted(request.prediction),
    )


def completion_params(request: CompletionRequest) -> SamplingParams:
    """How a text is continued."""
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
        grammar=_guided(request),
        prediction=_predicted(request.prediction),
    )
    return params if scored is None else replace(params, prompt_logprobs=scored, max_tokens=wanted)


def only_echoes(request: CompletionRequest) -> bool:
    """Whether the prompt's text is all that is wanted."""
    return request.max_tokens == 0 and request.logprobs is None


def _params(
    request: Sampling, max_tokens: int, logprobs: int | None, grammar: str | None, prediction: str
) -> SamplingParams:
    check_fields(request.model_extra or {})
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
        "min_tokens": request.min_tokens,
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
        cache_salt=request.cache_salt or "",
        slo=None if request.slo is None else Slo(request.slo.ttft_ms, request.slo.tpot_ms),
        priority=request.priority or 0,
        **{name: value for name, value in given.items() if value is not None},
    )


def check_fields(given: Mapping[str, Any], not_offered: NotOffered = NOT_OFFERED) -> None:
    """Refuse fields that would change the answer's meaning, by name: an answer that ignores them would be wrong."""
    for name, (neutral, instead) in not_offered.items():
        value = given.get(name)
        if value is not None and value not in neutral:
            raise invalid(f"{name} is not offered: {instead}.", name, "unsupported_parameter")


def _bias(given: dict[str, float] | None) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in (given or {}).items()}
    except ValueError as error:
        raise invalid("logit_bias maps token ids, written as numbers, to biases.", "logit_bias") from error


def _predicted(prediction: Prediction | None) -> str:
    return "" if prediction is None else plain_text(prediction.content, "prediction")


def _grammar(request: ChatRequest, toolbox: ToolBox | None) -> str | None:
    """What shapes an answer: at most one of a format, a guide and tools."""
    given = {"response_format": _formatted(request.response_format), "guided_*": _guided(request)}
    given["tools"] = None if toolbox is None else toolbox.grammar
    named = [name for name, grammar in given.items() if grammar is not None]
    if len(named) > 1:
        raise invalid(f"{named[0]} and {named[1]} cannot both shape an answer; leave one out.", named[0])
    return given[named[0]] if named else None


def _formatted(wanted: ResponseFormat | None) -> str | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return json_grammar({"type": "object"})
    schema = None if wanted.json_schema is None else wanted.json_schema.schema_
    if schema is None:
        raise invalid("response_format json_schema needs json_schema.schema.", "response_format")
    return _by_schema(schema, "response_format")


def _by_schema(schema: dict[str, Any] | str, field: str) -> str:
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(parsed, dict):
            raise invalid(f"{field} must be a JSON schema, an object.", field)
        return json_grammar(parsed)
    except ValueError as error:
        raise invalid(f"{field} is not JSON: {error}.", field) from error
    except DraftwoodError as error:
        raise refusal(error, field) from error


def _guided(request: Sampling) -> str | None:
    """vLLM's guides, under the older and the newer names."""
    newer = request.structured_outputs or StructuredOutputs()  # pyright: ignore[reportCallIssue]
    wishes = {
        "guided_json": [_by_schema(s, "guided_json") for s in (request.guided_json, newer.json_) if s is not None],
        "guided_regex": [regex_grammar(r) for r in (request.guided_regex, newer.regex) if r is not None],
        "guided_choice": [choice_grammar(c) for c in (request.guided_choice, newer.choice) if c is not None],
        "guided_grammar": [g for g in (request.guided_grammar, newer.grammar) if g is not None],
        "json_object": [json_grammar({"type": "object"})] if newer.json_object else [],
    }
    given = [(name, grammar) for name, grammars in wishes.items() for grammar in grammars]
    if len(given) > 1:
        raise invalid(f"{given[0][0]} and {given[1][0]} cannot both shape an answer; leave one out.", given[1][0])
    return given[0][1] if given else None


def plain_text(content: str | Sequence[ContentPart] | None, field: str) -> str:
    """The text of a content; nothing else than text can be read here."""
    if content is None or isinstance(content, str):
        return content or ""
    strange = next((part.type for part in content if part.type != "text" or part.text is None), None)
    if strange is not None:
        raise invalid(f"Only text can be read here, not a part of type '{strange}'.", field)
    return "".join(part.text or "" for part in content)


def chat_text(
    tokenizer: Tokenizer, messages: Sequence[Message], toolbox: ToolBox | None, images: ImageReader
) -> tuple[str, list[bytes]]:
    """A conversation as the model reads it, and the files of its images."""
    knows, files = tokenizer.knows_tools, []
    contents = [_content(message.content, images, files) for message in messages]
    write = _as_template if knows else _as_words
    said = [write(message, content) for message, content in zip(messages, contents, strict=True)]
    if toolbox is not None and not knows:
        said = _with_instructions(said, toolbox.instructions)
    tools = None if toolbox is None or not knows else toolbox.descriptions
    return images.framed(tokenizer.render_chat(said, tools=tools), files, tokenizer), files


def _content(content: str | Sequence[ContentPart] | None, images: ImageReader, files: list[bytes]) -> Any:
    if content is None or isinstance(content, str) or all(part.type != "image_url" for part in content):
        return plain_text(content, "messages")
    try:
        return images.content([part.model_dump() for part in content], files)
    except DraftwoodError as error:
        raise refusal(error, "messages") from error


def _role(message: Message) -> str:
    return "system" if message.role == "developer" else message.role


def _as_template(message: Message, content: Any) -> dict[str, Any]:
    said: dict[str, Any] = {"role": _role(message), "content": content}
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


def _as_words(message: Message, content: Any) -> dict[str, Any]:
    """For templates that know no tools: calls and their results as text."""
    if not isinstance(content, str):
        return {"role": _role(message), "content": content}
    if message.role == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = [write_call(call.function.name, call.function.arguments) for call in message.tool_calls or []]
    return {"role": _role(message), "content": "\n".join(filter(None, [content, *calls]))}


def _with_instructions(said: list[dict[str, Any]], instructions: str) -> list[dict[str, Any]]:
    if said and said[0]["role"] == "system":
        return [{"role": "system", "content": f"{said[0]['content']}\n\n{instructions}"}, *said[1:]]
    return [{"role": "system", "content": instructions}, *said]
