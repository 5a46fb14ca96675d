"""Tools: what the model is told about them, the grammar its calls follow, and the calls in its text.

Calls are written as the Hermes and Qwen families write them, one JSON object between two tags.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from draftwood.model.grammar import JSON_STYLE
from draftwood.server.errors import invalid
from draftwood.server.schemas import ChatRequest, NamedTool, Tool

OPENING, CLOSING = "<tool_call>", "</tool_call>"
SHARED = ("$defs", "definitions")  # what a schema refers to from its root


@dataclass(frozen=True)
class Call:
    """A call the model made."""

    name: str
    arguments: str  # JSON


@dataclass(frozen=True)
class ToolBox:
    """The tools of a request, and how they may be used."""

    tools: Sequence[Tool]
    required: bool
    parallel: bool

    @classmethod
    def of(cls, request: ChatRequest) -> ToolBox | None:
        """None where no tool may be called."""
        tools, choice = request.tools or [], request.tool_choice
        if choice == "none" or (not tools and choice in (None, "auto")):
            return None
        if not tools:
            raise invalid("tool_choice names tools, but there are no tools.", "tool_choice")
        if isinstance(choice, NamedTool):
            chosen = [tool for tool in tools if tool.function.name == choice.function.name]
            if not chosen:
                raise invalid(
                    f"tool_choice names '{choice.function.name}', which is not among the tools.", "tool_choice"
                )
            return cls(chosen[:1], required=True, parallel=False)
        return cls(tools, required=choice == "required", parallel=request.parallel_tool_calls is not False)

    @property
    def descriptions(self) -> list[dict[str, Any]]:
        """As chat templates want them."""
        return [tool.model_dump(exclude_none=True) for tool in self.tools]

    @property
    def grammar(self) -> str:
        """Text with calls in it, or nothing but calls; each call has the arguments its function wants."""
        names = " | ".join(f"call_{i}" for i in range(len(self.tools)))
        rules = [f"call_{i}: %json {json.dumps(_call_schema(tool))}" for i, tool in enumerate(self.tools)]
        if self.required:
            start = r'start: call ("\n" call)*' if self.parallel else "start: call"
            head = [start, rf'call: "{OPENING}\n" ({names}) "\n{CLOSING}"']
        else:
            head = [
                "start: called* rest" if self.parallel else "start: called | rest",
                rf'called: opening "\n" ({names}) "\n{CLOSING}"',
                f'opening[lazy]: TEXT "{OPENING}"',
                "rest: TEXT",
                r"TEXT: /(.|\n)*/",
            ]
        return "\n".join(["%llguidance {}", *head, *rules, ""])

    @property
    def instructions(self) -> str:
        """For models whose template says nothing about tools."""
        described = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in self.descriptions)
        example = json.dumps({"name": "function-name", "arguments": {"argument-name": "value"}})
        return (
            f"You can call functions. These are their signatures:\n<tools>\n{described}\n</tools>\n"
            f"To call one, write:\n{OPENING}\n{example}\n{CLOSING}"
        )


def _call_schema(tool: Tool) -> dict[str, Any]:
    arguments = dict(tool.function.parameters or {"type": "object"})
    shared = {key: arguments.pop(key) for key in SHARED if key in arguments}
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
        "x-guidance": JSON_STYLE,
        **shared,
    }


def write_call(name: str, arguments: str) -> str:
    """A call as the model would have written it."""
    return f'{OPENING}\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n{CLOSING}'


@dataclass
class CallReader:
    """Takes an answer's text apart into words and calls; the same however the text is cut into pieces."""

    num_calls: int = 0
    _held: str = ""
    _inside: bool = False
    _spoke: bool = False  # something else than blanks
    _words: list[str] = field(default_factory=list)
    _calls: list[Call] = field(default_factory=list)

    def feed(self, text: str) -> tuple[str, list[Call]]:
        """The words and the calls that are certain now."""
        self._held += text
        while self._advance():
            pass
        return self._taken()

    def finish(self) -> tuple[str, list[Call]]:
        """No more text: what is held is words, unless they are blanks around calls."""
        rest = OPENING * self._inside + self._held
        self._held = ""
        if rest.strip() or not self.num_calls:
            self._words.append(rest)
        return self._taken()

    def _taken(self) -> tuple[str, list[Call]]:
        words, calls = "".join(self._words), self._calls
        self._words, self._calls = [], []
        return words, calls

    def _advance(self) -> bool:
        """Deal with what is held up to the next tag; False if there is none yet."""
        before, tag, after = self._held.partition(CLOSING if self._inside else OPENING)
        if self._inside:
            if tag:
                self._close(before)
                self._inside, self._held = False, after
            return bool(tag)
        if tag:
            self._say(before)
            self._inside, self._held = True, after
            return True
        sure = len(before) - _possible_tag(before)
        if before[:sure].strip() or self._spoke:
            self._say(before[:sure])
            self._held = before[sure:]
        return False

    def _say(self, words: str) -> None:
        if words.strip():
            self._words.append(words.lstrip() if self.num_calls and not self._spoke else words)
            self._spoke = True
        elif self._spoke:
            self._words.append(words)

    def _close(self, body: str) -> None:
        try:
            call = json.loads(body)
            self._calls.append(Call(call["name"], json.dumps(call["arguments"], ensure_ascii=False)))
        except (ValueError, KeyError, TypeError):  # no grammar lets this pass; words they stay
            self._words.append(f"{OPENING}{body}{CLOSING}")
            return
        self.num_calls += 1
        self._spoke = False


def _possible_tag(text: str) -> int:
    """Length of the longest end of `text` that a tag could begin with."""
    return next((n for n in range(min(len(OPENING) - 1, len(text)), 0, -1) if OPENING.startswith(text[-n:])), 0)
