"""Replicas behind Ray Serve, and what of them needs no Ray."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path

import httpx
import pytest

from draftwood import LLM, SamplingParams
from draftwood.ray.forwarding import Forwarded, Head, answers, lost
from draftwood.ray.ranking import IMBALANCE, favourite, ranked
from draftwood.server.app import make_app
from draftwood.server.config import ServerConfig
from serving import NAME, wait_for
from tiny import tiny_folder

MESSAGES = [{"role": "user", "content": "the cat sat on the mat"}]
HEADERS = ((b"host", b"localhost"), (b"content-type", b"application/json"))


def asking(body: object, path: str = "/v1/chat/completions", headers=HEADERS) -> Forwarded:  # type: ignore[no-untyped-def]
    return Forwarded("POST", path, b"", headers, json.dumps(body).encode(), ("127.0.0.1", 5))


def test_an_application_answers_without_a_socket(llm: LLM) -> None:
    app = make_app(llm, ServerConfig(NAME))
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 12}

    async def whole(request: Forwarded) -> list[Head | bytes]:
        async with aclosing(answers(app, request)) as parts:
            return [part async for part in parts]

    async def hang_up() -> None:
        async with aclosing(
            answers(app, asking(body | {"max_tokens": 1500, "ignore_eos": True, "stream": True}))
        ) as parts:
            assert isinstance(await anext(parts), Head)
            await anext(parts)

    head, *pieces = asyncio.run(whole(asking(body)))
    assert isinstance(head, Head)
    assert head.status == 200
    said = json.loads(b"".join(piece for piece in pieces if isinstance(piece, bytes)))["choices"][0]["message"][
        "content"
    ]
    assert said == llm.chat(MESSAGES, SamplingParams(max_tokens=12)).text
    refused = asyncio.run(whole(asking({"messages": []})))[0]
    assert isinstance(refused, Head)
    assert refused.status == 400
    asyncio.run(hang_up())
    wait_for(lambda: not llm.engine.scheduler.has_work)


def test_prefixes_tell_what_is_shared() -> None:
    turn = asking({"messages": MESSAGES})
    later = asking({"messages": [*MESSAGES, {"role": "assistant", "content": "x"}, *MESSAGES]})
    same = asking({"messages": [*MESSAGES, {"role": "assistant", "content": "x"}]})
    assert later.prefix == same.prefix != turn.prefix
    other_key = asking({"messages": MESSAGES}, headers=(*HEADERS, (b"authorization", b"Bearer x")))
    assert other_key.prefix != turn.prefix
    assert asking({"prompt": "a" * 9999}).prefix == asking({"prompt": "a" * 9998}).prefix
    for nothing in ({}, [], 7, {"prompt": None}):
        assert isinstance(asking(nothing).prefix, str)


def test_last_words_have_the_form_of_the_api() -> None:
    assert lost("/v1/chat/completions", "gone").endswith(b"data: [DONE]\n\n")
    assert b'"code": "engine_dead"' in lost("/v1/completions", "gone")
    assert lost("/v1/responses", "gone").startswith(b"event: error\n")


def test_a_prefix_stays_with_its_replica_unless_that_is_too_busy() -> None:
    names = [f"replica-{i}" for i in range(4)]
    prefixes = [f"prompt {i}" for i in range(400)]
    homes = {prefix: favourite(prefix, names) for prefix in prefixes}
    assert all(60 < list(homes.values()).count(name) < 140 for name in names)
    assert all(favourite(p, names[1:]) == home for p, home in homes.items() if home != names[0])
    busy = dict.fromkeys(names, 1)
    home = homes["prompt 7"]
    assert ranked("prompt 7", busy)[0] == [home]
    assert ranked("prompt 7", busy | {home: IMBALANCE})[0] == [home]
    assert home not in ranked("prompt 7", busy | {home: 1 + IMBALANCE})[0]
    assert sorted(ranked("", busy)[0]) == names


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Two replicas of a tiny model on a Ray of their own."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("replicas need Ray")
    folder = tiny_folder(tmp_path_factory.mktemp("ray") / "tiny", max_position_embeddings=2048)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "draftwood.ray", "--model", str(folder), "--port", str(port), "--replicas", "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert any("replicas of" in line for line in process.stdout), "they have not started"
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        finally:
            process.kill()
            process.stdout.close()


def replica_processes() -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                title = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if re.match(rb"ray::ServeReplica:draftwood:Replica", title):
                found.append(int(entry.name))
    return found


@pytest.mark.slow
def test_a_replica_that_is_killed_costs_its_streams_only(replicas: str) -> None:
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    bodies = [body | {"messages": [{"role": "user", "content": f"{i} {'a' * i}"}]} for i in range(12)]

    def ask(asked: dict[str, object]) -> str:
        return httpx.post(f"{replicas}/v1/chat/completions", json=asked, timeout=120).text

    models = httpx.get(f"{replicas}/v1/models", timeout=60)
    assert models.json()["data"][0]["id"]
    assert httpx.get(f"{replicas}/manage/requests").status_code == 404
    first, second = (ask(bodies[3] | {"stream": False, "max_tokens": 20}) for _ in range(2))
    assert json.loads(first)["choices"] == json.loads(second)["choices"]
    with ThreadPoolExecutor(12) as pool:
        streams = [pool.submit(ask, each) for each in bodies]
        time.sleep(1.0)
        victims = replica_processes()
        assert len(victims) == 2
        os.kill(victims[0], signal.SIGKILL)
        time.sleep(0.1)
        late = [pool.submit(ask, each | {"max_tokens": 10}) for each in bodies[:4]]
        texts, later = [stream.result() for stream in streams], [one.result() for one in late]
    broken = ["engine_dead" in text for text in texts]
    assert 0 < sum(broken) < 12, f"{sum(broken)} of 12 streams were broken"
    assert all(text.endswith("data: [DONE]\n\n") for text in texts)
    assert all('"finish_reason":"length"' in text for text, bad in zip(texts, broken, strict=True) if not bad)
    assert all('"finish_reason":"length"' in text for text in later), "what had not begun goes to the other replica"
    wait_for(lambda: len(replica_processes()) == 2, 60)
