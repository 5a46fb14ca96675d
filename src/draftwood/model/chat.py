"""Conversations to prompts, by the template that came with the model.

A template is a program from a stranger: it runs in Jinja's immutable sandbox, with the same few helpers that
Hugging Face gives it, so that it renders what the model was trained on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import TokenizerError


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, str],
    *,
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """The prompt for `messages`; whatever a template objects to is a `TokenizerError` with its words."""
    _check_messages(messages)
    variables: dict[str, Any] = {**special_tokens, "messages": [dict(message) for message in messages]}
    variables |= {"tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt}
    try:
        return _compile(template).render(variables)
    except TemplateError as error:
        raise TokenizerError(f"The model's chat template refused the conversation: {error.message}") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise TokenizerError(f"The model's chat template failed on the conversation: {error!r}") from error


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    for index, message in enumerate(messages):
        if not isinstance(message.get("role"), str) or "content" not in message:
            raise TokenizerError(
                f"Message {index} needs a 'role' and a 'content', as in "
                '{"role": "user", "content": "Hello"}' + f"; it has {sorted(message)}."
            )


@lru_cache(maxsize=16)
def _compile(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; a prompt just keeps what is inside."""

    tags = {"generation"}  # noqa: RUF012 - the name and form Jinja prescribes

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    # Jinja's own filter escapes HTML, which no model was trained on.
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
