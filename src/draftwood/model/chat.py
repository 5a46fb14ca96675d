"""Conversations to prompts, by the template that came with the model.

A template is a program from a stranger: it runs in a sandbox with a budget (`sandbox.py`), with the same few helpers
that Hugging Face gives it, so that it renders what the model was trained on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from ..errors import TokenizerError
from .sandbox import BoundedSandbox, budget, size_of

MAX_TEMPLATE = 1 << 18  # characters; published ones have up to some twenty thousand
_LARGEST_REQUEST = 1 << 28  # more of a conversation does not enlarge what its template may spend


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
        compiled = _compile(template)
        with budget(size_of([variables["messages"], tools], _LARGEST_REQUEST)):
            return compiled.render(variables)
    except TemplateError as error:
        raise TokenizerError(f"The model's chat template refused the conversation: {error.message}") from error
    except Exception as error:  # a template can fail in any way: RecursionError, SyntaxError, MemoryError
        said = f"{error!r:.300}"
        raise TokenizerError(f"The model's chat template failed on the conversation: {said}") from error


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    for index, message in enumerate(messages):
        if not isinstance(message.get("role"), str) or "content" not in message:
            raise TokenizerError(
                f"Message {index} needs a 'role' and a 'content', as in "
                '{"role": "user", "content": "Hello"}' + f"; it has {sorted(message)}."
            )


@lru_cache(maxsize=16)
def _compile(template: str) -> Template:
    if len(template) > MAX_TEMPLATE:
        raise TemplateError(f"it has {len(template):,} characters, and {MAX_TEMPLATE:,} is the limit")
    environment = BoundedSandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    with budget(0):
        return environment.from_string(template)


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; a prompt just keeps what is inside."""

    tags = {"generation"}  # noqa: RUF012 - the name and form Jinja prescribes

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
