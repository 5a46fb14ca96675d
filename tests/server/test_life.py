"""Coming, waiting, leaving and dying: nothing hangs, nothing leaks, everybody hears why."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import openai
import pytest
import torch

from draftwood import LLM, SamplingParams
from draftwood.cli.flags import EngineFlags
from draftwood.cli.serve import ServeFlags, run_serve
from draftwood.errors import InvalidRequest
from draftwood.model.checkpoint import open_checkpoint
from draftwood.nets.embeddings import TargetEmbeddings
from draftwood.nets.export import export
from serving import NAME, SMALL, Serving, http_request, serving, wait_for
from tiny import CPU, random_net

MESSAGES = [{"role": "user", "content": "the cat sat on the mat"}]
LONG = {"messages": MESSAGES, "max_tokens": 1500, "ignore_eos": True, "stream": True}


@pytest.fixture
def slow(folder: Path):
    """An engine that takes a while for a step, so that things can happen meanwhile."""
    with LLM(folder, offers=[], config=replace(SMALL, max_running=2)) as llm:
        step = llm.engine.step

        def slowly():
            time.sleep(0.01)
            return step()

        llm.engine.step = slowly  # type: ignore[method-assign]
        yield llm


def running(serving_: Serving) -> int:
    scheduler = serving_.llm.engine.scheduler
    return len(scheduler.running) + len(scheduler.waiting)


@pytest.mark.parametrize("stream", [True, False])
def test_hanging_up_frees_the_pages_within_a_step_or_two(slow: LLM, stream: bool) -> None:
    with serving(slow) as served:
        address = ("127.0.0.1", int(served.url.rsplit(":", 1)[1]))
        body = json.dumps(LONG | {"stream": stream}).encode()
        with socket.create_connection(address) as line:
            line.sendall(http_request("/v1/chat/completions", body))
            wait_for(lambda: any(seq.num_generated > 3 for seq in slow.engine.scheduler.running))
            steps = slow.pulse.steps
        wait_for(lambda: not slow.engine.scheduler.has_work)
        assert slow.pulse.steps - steps <= 4
        assert served.idle()


def test_a_full_queue_says_when_to_come_back(slow: LLM) -> None:
    with serving(slow, max_queue=1) as served, served.http() as http, ThreadPoolExecutor(4) as pool:
        streams = [pool.submit(lambda: served.post("/v1/chat/completions", json=LONG)) for _ in range(3)]
        wait_for(lambda: running(served) == 3)
        refused = http.post("/v1/chat/completions", json=LONG)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "queue_full"
        assert http.post("/v1/chat/completions", json=LONG | {"n": 9, "temperature": 1}).status_code == 400
        assert http.get("/health").status_code == 200
        for request in http.get("/manage/requests").json():
            assert http.post(f"/manage/requests/{request['id']}/cancel").status_code == 200
        for stream in streams:
            assert '"code":"cancelled"' in stream.result().text
        assert served.idle()


@pytest.mark.parametrize("stream", [True, False])
def test_deadlines_end_requests(slow: LLM, stream: bool) -> None:
    with serving(slow, deadline=5.0) as served, served.http() as http:
        began = time.monotonic()
        late = http.post("/v1/chat/completions", json=LONG | {"stream": stream, "deadline": 0.2})
        assert time.monotonic() - began < 3
        assert "deadline_exceeded" in late.text
        assert late.status_code == (200 if stream else 408)
        assert served.idle()


def test_streams_flow_while_others_read_their_prompts(folder: Path) -> None:
    settings = replace(SMALL, max_rows=16)  # so that reading takes many steps
    with LLM(folder, offers=[], config=settings) as llm, serving(llm) as served, ThreadPoolExecutor(2) as pool:
        talking = pool.submit(served.post, "/v1/chat/completions", json=LONG | {"max_tokens": 400})
        wait_for(lambda: any(seq.num_generated > 1 for seq in llm.engine.scheduler.running))
        talker = llm.engine.scheduler.running[0]
        reading = pool.submit(served.post, "/v1/completions", json={"prompt": "x" * 1200, "max_tokens": 1})
        wait_for(lambda: len(llm.engine.scheduler.running) == 2)
        before = talker.num_generated
        assert reading.result().status_code == 200
        assert min(talker.num_generated, 400) - before > 30
        assert '"finish_reason":"length"' in talking.result().text


def test_a_step_that_fails_once_is_survived(folder: Path) -> None:
    with LLM(folder, offers=[], config=SMALL) as llm, serving(llm) as served, served.http() as http:
        step, failures = llm.engine.step, [RuntimeError("cosmic ray")]

        def faulty():
            if failures:
                raise failures.pop()
            return step()

        llm.engine.step = faulty  # type: ignore[method-assign]
        failed = http.post("/v1/chat/completions", json=LONG)
        assert "cosmic ray" in failed.text
        assert failed.text.endswith("data: [DONE]\n\n")
        time.sleep(0.6)
        assert http.get("/health").status_code == 200
        assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200
        assert served.idle()


def test_a_dying_engine_turns_health_red_and_ends_every_stream(folder: Path) -> None:
    with LLM(folder, offers=[], config=SMALL) as llm, serving(llm) as served, served.http() as http:
        step, together = llm.engine.step, []

        def dying():
            if running(served) == 3:  # however late the last one comes
                together.append(1)
            if len(together) > 20:
                raise RuntimeError("illegal memory access")
            return step()

        llm.engine.step = dying  # type: ignore[method-assign]
        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(served.post, "/v1/chat/completions", json=LONG) for _ in range(3)]
            texts = [request.result(timeout=20).text for request in asked]
        assert all("illegal memory access" in text and text.endswith("data: [DONE]\n\n") for text in texts)
        wait_for(lambda: http.get("/health").status_code == 503)
        assert "illegal memory access" in http.get("/health").json()["reason"]
        assert http.get("/ready").status_code == 503
        refused = http.post("/v1/completions", json={"prompt": "a"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_dead")


def test_a_step_that_never_ends_is_noticed(folder: Path) -> None:
    with LLM(folder, offers=[], config=SMALL) as llm, serving(llm, stall_seconds=0.3) as served, served.http() as http:
        step, released = llm.engine.step, threading.Event()

        def stuck():
            released.wait(10)
            return step()

        llm.engine.step = stuck  # type: ignore[method-assign]
        response = http.post("/v1/chat/completions", json=LONG)
        assert "engine_dead" in response.text
        assert http.get("/health").status_code == 503
        released.set()


def test_draining_finishes_what_is_under_way(slow: LLM) -> None:
    with serving(slow, drain_seconds=20) as served, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(served.post, "/v1/chat/completions", json=LONG | {"max_tokens": 60})
        wait_for(lambda: running(served) == 1)
        served.server.handle_exit(signal.SIGTERM, None)
        wait_for(lambda: served.service.admission.closed_for is not None)
        with served.http() as http:
            assert http.get("/ready").status_code == 503
        text = asked.result().text
        assert '"finish_reason":"length"' in text
        wait_for(lambda: served.server.should_exit)


def test_draining_has_an_end(slow: LLM) -> None:
    with serving(slow, drain_seconds=0.3) as served, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(served.post, "/v1/chat/completions", json=LONG)
        wait_for(lambda: running(served) == 1)
        served.server.handle_exit(signal.SIGTERM, None)
        assert '"code":"draining"' in asked.result().text


def test_the_access_log_tells_what_a_request_took(served: Serving, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "draftwood.access"), served.http() as http:
        body = {"messages": MESSAGES, "max_tokens": 9, "temperature": 0}
        http.post("/v1/chat/completions", json=body, headers={"X-Request-Id": "mine"})
        wait_for(lambda: caplog.records)
    line = json.loads(caplog.records[-1].message)
    assert (line["id"], line["status"], line["completion_tokens"]) == ("mine", 200, 9)
    assert line["tokens_per_step"] >= 1
    assert 0 < line["first_token_seconds"] <= line["seconds"]
    assert line["finish"] == ["length"]


@pytest.mark.parametrize("more", [[], ["--engine-process"]], ids=["one process", "engine process"])
def test_the_command_serves_until_it_is_told_to_stop(folder: Path, more: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "draftwood",
        "serve",
        str(folder),
        "--port",
        str(port),
        "--name",
        NAME,
        "--threads",
        "1",
        *more,
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, env=os.environ | {"DRAFTWOOD_API_KEY": "secret"})
    try:
        wait_for(lambda: _answers(port), 40)
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="secret", max_retries=0) as client:
            assert client.completions.create(model=NAME, prompt="abc", max_tokens=3).usage.completion_tokens == 3
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert b"secret" not in process.stderr.read()
    finally:
        process.kill()
        process.stderr.close()
        process.wait()


class _AlreadyOver:
    """A server that was told to stop before it began."""

    engine_died, started = False, True

    def __init__(self, *_: object) -> None:
        pass

    def run(self, sockets: list[socket.socket]) -> None:
        assert [door.getsockname()[0] for door in sockets] == ["127.0.0.1"]


@pytest.mark.parametrize("apart", [False, True], ids=["one process", "engine process"])
def test_a_drafter_that_learns_while_it_serves_is_kept(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apart: bool
) -> None:
    monkeypatch.setattr("draftwood.server.run.DrainingServer", _AlreadyOver)
    words = TargetEmbeddings(open_checkpoint(folder), CPU, torch.float32)
    drafter = export(random_net("eagle3", words), tmp_path / "drafter", str(folder), {})
    kept = tmp_path / "kept"
    run_serve(
        EngineFlags(model=str(folder), drafter=str(drafter), device="cpu"),
        ServeFlags(adapt=kept, port=0, engine_process=apart),
    )
    with LLM(folder, drafter=str(kept)) as llm:
        assert llm.generate("abc", SamplingParams(max_tokens=4)).stats.num_tokens == 4
    with pytest.raises(InvalidRequest, match="cannot learn"):
        run_serve(EngineFlags(model=str(folder), drafter="ngram"), ServeFlags(adapt=kept, port=0))


def _answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    except httpx.TransportError:
        return False
