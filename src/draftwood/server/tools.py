"""Tools: what the model is told about them, and the grammar its calls follow; `calls.py` reads them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftwood.model.grammar import JSON_STYLE
from draftwood.server.calls import CLOSING, OPENING
from draftwood.server.errors import invalid
from draftwood.server.schemas import ChatRequest, NamedTool, Tool

SHARED = ("$defs", "definitions")  # what a schema refers to from its root


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
