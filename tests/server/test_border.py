"""The server over an engine in another process: the same answers, and an end that is told."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import openai
import pytest

from draftwood import LLM
from draftwood.cli.engine_process import EngineOrder, host, start_engine
from draftwood.cli.flags import EngineFlags
from draftwood.engine.remote import LONGEST, TO_CLIENT, TO_ENGINE, EngineHost, RemoteEngine
from draftwood.errors import DraftwoodError
from draftwood.model.checkpoint import open_checkpoint
from draftwood.request import Event, SamplingParams
from draftwood.server.keys import ApiKey
from draftwood.wire import Line
from serving import NAME, Serving, serving, wait_for

MESSAGES = [{"role": "user", "content": "the cat sat on the mat"}]
DRAFTER, OFFERS = "ngram:shortest=1", ("ngram:nodes=8,branches=2", "none")
ASKED = {
    "greedy": {"temperature": 0, "max_tokens": 24},
    "drawn": {"temperature": 1, "seed": 3, "n": 3, "max_tokens": 12, "top_p": 0.9},
    "streamed": {"temperature": 0, "max_tokens": 24, "stream": True},
    "log-probabilities": {"temperature": 0, "max_tokens": 8, "logprobs": True, "top_logprobs": 3},
    "biased and stopped": {"temperature": 1, "seed": 1, "max_tokens": 30, "logit_bias": {"70": 3}, "stop": ["e", "zz"]},
    "grammar": {"temperature": 1, "seed": 2, "max_tokens": 30, "guided_regex": "[ab]{3}c"},
    "prediction": {
        "temperature": 0,
        "max_tokens": 24,
        "prediction": {"type": "content", "content": "the cat sat"},
        "speculation": {"report": "detailed"},
    },
    "drafter by name": {"temperature": 0, "max_tokens": 12, "speculation": {"drafter": OFFERS[0], "report": "summary"}},
    "refused": {"temperature": 0, "logit_bias": {"1000000": 1}},
    "refused grammar": {"guided_regex": "("},
}


@pytest.fixture(scope="module")
def remote(llm: LLM) -> Iterator[RemoteEngine]:
    """The engine of the other tests, at the other end of a socket."""
    ours, theirs = socket.socketpair()
    line = Line(theirs, TO_ENGINE, LONGEST)
    hosting = threading.Thread(target=lambda: (EngineHost(llm, line).run(), line.close()))
    hosting.start()
    made = RemoteEngine(Line(ours, TO_CLIENT, LONGEST), llm.checkpoint)
    yield made
    made.close()
    hosting.join(10)
    assert not hosting.is_alive()


@pytest.fixture(scope="module")
def over(remote: RemoteEngine) -> Iterator[Serving]:
    with serving(remote, DRAFTER, OFFERS, api_keys=(ApiKey("alice", "sk"), "other")) as running:
        yield running


KEY = {"Authorization": "Bearer sk"}


def without_times(text: str) -> str:
    """Ids, clocks and what is cached differ from one request to the next."""
    return re.sub(r'"(id|created|seconds|cached_tokens)":("[^"]*"|[0-9.]+)', "", text)


@pytest.mark.parametrize("name", ASKED)
def test_answers_are_those_of_an_engine_in_the_same_process(served: Serving, over: Serving, name: str) -> None:
    body = {"messages": MESSAGES, **ASKED[name]}
    with served.http() as here, over.http(headers=KEY) as there:
        want, got = (http.post("/v1/chat/completions", json=body) for http in (here, there))
        assert got.status_code == want.status_code == (400 if name.startswith("refused") else 200)
        if not body.get("stream"):
            assert without_times(got.text) == without_times(want.text)
        else:
            assert spoken(got.text) == spoken(want.text) != ""


def spoken(stream: str) -> str:
    chunks = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])


def test_echoes_traces_and_the_card(served: Serving, over: Serving) -> None:
    scored = {"prompt": "abab the cat", "max_tokens": 2, "temperature": 0, "logprobs": 1, "echo": True}
    traced = {"prompt": "abababab", "max_tokens": 12, "temperature": 0, "speculation": {"report": "trace"}}
    with served.http() as here, over.http(headers=KEY) as there:
        for body in (scored, traced):
            want, got = (http.post("/v1/completions", json=body).json() for http in (here, there))
            assert got["choices"] == want["choices"]
        emitted = [token["token"] for step in got["metrics"]["trace"] for token in step["emitted"]]
        assert emitted == [token["token"] for step in want["metrics"]["trace"] for token in step["emitted"]]
        question = {"input": "the cat", "max_output_tokens": 12, "temperature": 0}
        said = [http.post("/v1/responses", json=question).json()["output"][0]["content"] for http in (here, there)]
        assert said[0] == said[1]
        for path, body in (("/tokenize", {"prompt": "abc"}), ("/detokenize", {"tokens": [5, 6]})):
            assert there.post(path, json=body).json() == here.post(path, json=body).json()
        cards = [http.get("/v1/models").json()["data"][0] for http in (here, there)]
        assert {**cards[0], "created": 0} == {**cards[1], "created": 0}


def test_figures_cross(over: Serving, llm: LLM) -> None:
    with over.http(headers=KEY) as http:
        http.post("/v1/completions", json={"prompt": "abababab", "max_tokens": 20}).raise_for_status()
        steps = llm.pulse.steps

        def told() -> bool:
            page = http.get("/metrics").text
            return f'draftwood:engine_steps_total{{model_name="{NAME}"}} {steps:.1f}' in page

        wait_for(told)
        page = http.get("/metrics").text
        assert f'draftwood:kv_cache_usage_perc{{model_name="{NAME}"}} 0.0' in page
        assert f'draftwood:drafter_disabled{{drafter="{OFFERS[0]}",model_name="{NAME}"}} 0.0' in page
        with http.stream("GET", "/live?every=0.1&count=1") as live:
            state = "".join(live.iter_text())
        assert '"max_running":16' in state
        assert f'"name":"{type(llm.engine.controller).__name__}"' in state


def test_a_client_that_hangs_up_cancels_across_the_border(
    over: Serving, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = llm.engine.step
    monkeypatch.setattr(llm.engine, "step", lambda: (time.sleep(0.01), step())[1])  # it would end by itself too soon
    body = {"messages": MESSAGES, "max_tokens": 1800, "ignore_eos": True, "stream": True}
    with over.http(headers=KEY) as http, http.stream("POST", "/v1/chat/completions", json=body) as stream:
        next(stream.iter_text())
        wait_for(lambda: llm.engine.scheduler.has_work)
    wait_for(lambda: not llm.engine.scheduler.has_work)
    pool = llm.engine.scheduler.tables.pool
    assert pool.num_available == pool.num_pages
    grammar = {"prompt": "a", "max_tokens": 1800, "guided_regex": "[ab]{1500}", "stream": True}
    with over.http(headers=KEY) as http, http.stream("POST", "/v1/completions", json=grammar):
        pass
    wait_for(lambda: not llm.engine.scheduler.has_work and not over.service.admission.tickets)


def test_a_stranger_still_needs_a_key(over: Serving) -> None:
    with pytest.raises(openai.AuthenticationError):
        over.client().models.list()


@pytest.fixture(scope="module")
def flags(folder: Path) -> EngineFlags:
    return EngineFlags(model=str(folder), drafter="ngram", threads=1, cache_tokens=4096)


def test_an_engine_process_that_dies_ends_its_streams_and_turns_health_red(flags: EngineFlags) -> None:
    remote = start_engine(EngineOrder(flags, (), 4))
    assert remote._process is not None
    body = {"messages": MESSAGES, "max_tokens": 4000, "ignore_eos": True, "stream": True, "temperature": 0}
    with serving(remote, "ngram") as served, served.http() as http, ThreadPoolExecutor(3) as pool:
        short = body | {"max_tokens": 8, "stream": False}
        assert http.post("/v1/chat/completions", json=short).json()["usage"]["completion_tokens"] == 8
        os.kill(remote._process.pid, signal.SIGTERM)  # as systemd does to all of a service: the server drains first
        os.kill(remote._process.pid, signal.SIGSTOP)  # so that answers are certainly under way
        asked = [pool.submit(served.post, "/v1/chat/completions", body | {"max_tokens": 1500}) for _ in range(3)]
        wait_for(lambda: served.service.admission.open_answers == 3)
        os.kill(remote._process.pid, signal.SIGKILL)
        texts = [request.result(20).text for request in asked]
        assert all('"code":"engine_dead"' in text and text.endswith("data: [DONE]\n\n") for text in texts)
        assert all("SIGKILL" in text for text in texts)
        wait_for(lambda: http.get("/health").status_code == 503)
        assert "SIGKILL" in http.get("/health").json()["reason"]
        assert http.post("/v1/chat/completions", json=short).status_code == 503
        heard: list[Event] = []
        remote.submit(remote.intake.request("late", SamplingParams())[1], heard.append)
        assert [event.error_code for event in heard] == ["engine_dead"]
    remote.close()


def test_what_an_engine_process_refuses_is_said(flags: EngineFlags) -> None:
    ours, theirs = socket.socketpair()
    client, engine = Line(ours, TO_CLIENT, LONGEST), Line(theirs, TO_ENGINE, LONGEST)
    host(EngineOrder(replace(flags, drafter="psychic"), (), 4), engine)
    engine.close()
    with pytest.raises(DraftwoodError, match="psychic"):
        RemoteEngine(client, open_checkpoint(flags.model))
    with pytest.raises(DraftwoodError, match="nowhere"):
        start_engine(EngineOrder(replace(flags, model="./nowhere.gguf"), (), 4))
