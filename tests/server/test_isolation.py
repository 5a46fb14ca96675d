"""One poisoned request among good ones: the others get the tokens of an undisturbed run. `--thorough`: 200 rounds."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import Callable

import httpx
import pytest

from draftwood import LLM, SamplingParams
from serving import Serving, http_request

GOOD = 16
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "x"}]


def prompt(i: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"the {i} cats sat on the {i} mats, the {i} cats " * (1 + i % 3)}]


def settings(i: int) -> dict[str, object]:
    return {"temperature": float(i % 2), "seed": i, "max_tokens": 12 + i, "frequency_penalty": 0.5 * (i % 3)}


def chat_body(**more: object) -> bytes:
    return json.dumps({"messages": MESSAGES} | more).encode()


def schema_body(schema: object) -> bytes:
    return chat_body(response_format={"type": "json_schema", "json_schema": {"schema": schema}})


def nested(depth: int) -> bytes:
    return b'{"messages": ' + b"[" * depth + b"]" * depth + b"}"


POISONS: dict[str, Callable[[random.Random], bytes]] = {
    "NaN bias": lambda rng: chat_body(logit_bias={"3": float("nan")}),
    "infinite temperature": lambda rng: chat_body(temperature=float("inf")),
    "biases nobody survives": lambda rng: chat_body(logit_bias={str(t): -100 for t in range(257)}, max_tokens=50),
    "unsatisfiable schema": lambda rng: schema_body({"type": "string", "minLength": 9, "maxLength": 1}),
    "schema of nested anything": lambda rng: schema_body({"allOf": [{"$ref": "#"}]}),
    "a pattern that explodes": lambda rng: schema_body({"type": "string", "pattern": "^(a|a?){40}(b+b+)+$"}),
    "a tool that is none": lambda rng: chat_body(
        tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": "zebra"}}}]
    ),
    "huge stop list": lambda rng: chat_body(stop=[f"{i}" for i in range(100_000)]),
    "long stops": lambda rng: chat_body(stop=["a" * 256] * 64, max_tokens=50),
    "broken UTF-8": lambda rng: b'{"messages": [{"role": "user", "content": "\xff\xfe\xc3"}]}',
    "half a surrogate": lambda rng: b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    "1 MB of nested JSON": lambda rng: nested(500_000),
    "nested just below the limit": lambda rng: schema_body(json.loads("[" * 400 + "]" * 400)),
    "a prompt beyond the window": lambda rng: chat_body(messages=[{"role": "user", "content": "y" * 100_000}]),
    "far tokens": lambda rng: json.dumps({"messages": MESSAGES, "stop_token_ids": [2**31 - 1]}).encode(),
    "everything at once": lambda rng: chat_body(n=16, temperature=100, logprobs=True, top_logprobs=20, max_tokens=20),
    "bad words of bytes": lambda rng: chat_body(bad_words=["\x00", "é" * 100], max_tokens=20),
    "a wrong prediction": lambda rng: chat_body(prediction={"type": "content", "content": "z" * 5000}, max_tokens=40),
}


def hang_up(served: Serving, body: bytes, rng: random.Random) -> None:
    """Say some of a request, perhaps hear some of the answer, and go."""
    whole = http_request(CHAT, body)
    with socket.create_connection(("127.0.0.1", int(served.url.rsplit(":", 1)[1])), timeout=10) as line:
        said = rng.randrange(1, len(whole) + 1)
        line.sendall(whole[:said])
        if said == len(whole) or rng.random() < 0.3:
            line.sendall(whole[said:])
            line.recv(rng.randrange(1, 2000))


async def good(http: httpx.AsyncClient, i: int) -> str:
    body = {"messages": prompt(i), "stream": i % 4 == 0} | settings(i)
    response = await http.post(CHAT, json=body)
    if i % 4:
        return response.json()["choices"][0]["message"]["content"]
    chunks = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


async def a_round(served: Serving, rng: random.Random) -> tuple[list[str], str, int | None]:
    name = rng.choice([*POISONS, "hang up", "hang up"])
    async with httpx.AsyncClient(base_url=served.url, timeout=60) as http:
        asked = [asyncio.create_task(good(http, i)) for i in range(GOOD)]
        await asyncio.sleep(rng.random() * 0.1)
        if name == "hang up":
            body = chat_body(stream=rng.random() < 0.5, max_tokens=200, ignore_eos=True)
            await asyncio.to_thread(hang_up, served, body, rng)
            status = None
        else:
            headers = {"content-type": "application/json"}
            status = (await http.post(CHAT, content=POISONS[name](rng), headers=headers)).status_code
        return list(await asyncio.gather(*asked)), name, status


def test_a_poisoned_request_disturbs_nobody(served: Serving, llm: LLM, thorough: bool) -> None:
    wanted = [llm.chat(prompt(i), SamplingParams(**settings(i))).text for i in range(GOOD)]  # type: ignore[arg-type]
    rng = random.Random(5)
    for _ in range(200 if thorough else 6):
        got, name, status = asyncio.run(a_round(served, rng))
        assert got == wanted, f"disturbed by {name}"
        assert status is None or status < 500, f"{name} gave {status}"
    assert served.idle(20), "something is left behind"
    assert llm.pulse.failures == 0


@pytest.mark.parametrize("name", POISONS)
def test_every_poison_is_survived_and_answered(served: Serving, llm: LLM, name: str) -> None:
    with served.http() as http:
        response = http.post(
            CHAT, content=POISONS[name](random.Random(0)), headers={"content-type": "application/json"}
        )
    assert response.status_code in (200, 400, 413)
    assert response.status_code == 200 or response.json()["error"]["message"]
    assert llm.pulse.failures == 0
    assert served.idle()
