"""Asks a server by litellm, and prints what came back as JSON: `litellm_client.py URL MODEL`.

A process of its own: litellm leaves event loops and threads behind that would warn in other tests.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import sys
from typing import Any

import litellm

MESSAGES = [{"role": "user", "content": "the cat sat"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
FLAT_TOOL = {"type": "function", "name": "weather", "parameters": PARAMETERS}
CALLED = {"tool_choice": "required", "parallel_tool_calls": False}


def without_mcp() -> dict[str, Any]:
    """litellm looks for MCP servers among the tools, and needs its extra `mcp` for that; switch it off without it."""
    if importlib.util.find_spec("mcp") is None:
        module = importlib.import_module("litellm.responses.main")
        module._responses_try_dispatch_mcp_gateway = lambda **_: None  # type: ignore[attr-defined]
        return {"_skip_mcp_handler": True}
    return {}


async def streamed(**asked: Any) -> str:
    chunks = await litellm.acompletion(messages=MESSAGES, max_tokens=16, stream=True, **asked)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])  # type: ignore[union-attr]


def main(url: str, model: str) -> None:
    server: dict[str, Any] = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "none", "temperature": 0}
    server |= without_mcp()
    whole = litellm.completion(messages=MESSAGES, max_tokens=16, **server)
    chunks = list(litellm.completion(messages=MESSAGES, max_tokens=99, stream=True, tools=[TOOL], **CALLED, **server))
    calls = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls  # type: ignore[union-attr]
    pieces = [call.function.arguments for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    response = litellm.responses(input="the cat sat", max_output_tokens=16, **server)  # litellm asks for no fewer
    asked = {"input": "the cat sat", "max_output_tokens": 99, "stream": True}
    events = list(litellm.responses(**asked, tools=[FLAT_TOOL], **CALLED, **server))
    try:
        litellm.responses(input="the cat sat", previous_response_id="resp_1", **server)
        refused = None
    except litellm.BadRequestError as error:
        refused = str(error)
    told = {
        "whole": whole.choices[0].message.content,
        "usage": whole.usage.completion_tokens,
        "streamed": asyncio.run(streamed(**server)),
        "calls": [(call.function.name, call.function.arguments) for call in calls],
        "pieces": len([piece for piece in pieces if piece]),
        "response": response.output[0].content[0].text,
        "status": response.status,
        "response_usage": response.usage.output_tokens,
        "events": [str(getattr(event.type, "value", event.type)) for event in events],
        "final": events[-1].response.output[0].arguments,
        "refused": refused,
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
