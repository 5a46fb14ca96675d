"""Live figures: one sampler for all who watch, and nobody waits for them."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from draftwood import LLM
from draftwood.costs import StepCosts
from draftwood.engine.controller import MeasuredBudget, MeasuredTreeBudget
from draftwood.server.metrics import RecentDepths
from serving import SMALL, Serving, serving, wait_for

MESSAGES = [{"role": "user", "content": "the cat sat on the mat, the cat sat on"}]
FIELDS = {
    *("time", "uptime", "running", "waiting", "max_running", "kv_use", "status", "controller", "acceptance_by_depth"),
    *("tokens_per_second", "steps_per_second", "tokens_per_step", "drafted", "accepted", "emitted", "steps"),
    "last_step",
}


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line:
            yield json.loads(line.removeprefix("data: "))


def test_figures_come_at_once_and_then_regularly(served: Serving) -> None:
    began = time.monotonic()
    with served.http() as http, http.stream("GET", "/live?every=0.2&count=4") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-cache"
        news = events(response)
        first = next(news)
        assert time.monotonic() - began < 2, "not at once"
        rest = list(news)
    assert len(rest) == 3
    assert all(set(event) == FIELDS for event in (first, *rest))
    assert time.monotonic() - began > 0.3
    assert (first["status"], first["running"], first["max_running"]) == ("ready", 0, 16)
    assert first["tokens_per_second"] is first["tokens_per_step"] is None
    times = [event["time"] for event in (first, *rest)]
    assert times == sorted(times)


def test_figures_follow_the_work(served: Serving) -> None:
    body = {"messages": MESSAGES, "max_tokens": 1200, "temperature": 0, "ignore_eos": True}
    with served.http() as http, ThreadPoolExecutor(1) as pool, http.stream("GET", "/live?every=0.1") as response:
        news = events(response)
        before = next(news)
        answering = pool.submit(served.post, "/v1/chat/completions", body)
        busy = next(event for event in news if event["tokens_per_second"] and event["running"])
        usage = answering.result().json()["usage"]
        after = next(event for event in news if event["running"] == 0 and event["tokens_per_second"] is None)
    assert 0 < busy["kv_use"] <= 1
    assert busy["steps_per_second"] > 0
    # Figures are rounded; whatever the batch, 1 is plain decoding.
    assert busy["tokens_per_step"] == pytest.approx(busy["tokens_per_second"] / busy["steps_per_second"], rel=0.01)
    assert busy["tokens_per_step"] >= 1
    assert after["emitted"] - before["emitted"] == usage["completion_tokens"]
    assert after["accepted"] - before["accepted"] >= 0 < after["drafted"] - before["drafted"]
    assert after["steps"] - before["steps"] == usage["completion_tokens"] - (after["accepted"] - before["accepted"])
    assert all(0 <= share <= 1 for share in after["acceptance_by_depth"])
    assert after["controller"] == {
        "nodes": 8,
        "depth": None,
        "least_chance": 0.0,
        "name": "FixedBudget",
        "why": "always 8 nodes",
        "reason": "rule",
        "expected_gain": None,
        "measured_gain": None,
        "drafted_by": before["controller"]["drafted_by"],  # other requests may have named a drafter
    }
    assert after["last_step"] == {
        "sequences": 1,
        "rows": after["last_step"]["rows"],
        "measured_seconds": after["last_step"]["measured_seconds"],
        "predicted_seconds": None,  # nothing was measured on this machine before
    }
    assert 1 <= after["last_step"]["rows"] <= 9
    assert after["last_step"]["measured_seconds"] > 0


@pytest.mark.parametrize("drafter", ["ngram:shortest=1", "ngram:nodes=8,branches=2"])
def test_a_steps_predicted_time_stands_beside_the_measured_one(folder: Path, drafter: str) -> None:
    costs = StepCosts((1, 64), (64,), ((10.0, 73.0),), 0.0)  # seconds: 9 and one for each row
    kind = MeasuredTreeBudget if "branches" in drafter else MeasuredBudget
    llm = LLM(folder, drafter=drafter, offers=[], config=SMALL, controller=kind(costs, 8))
    with llm, serving(llm) as served:
        served.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 4, "temperature": 0})
        with served.http() as http:
            step = next(events(http.get("/live?count=1")))["last_step"]
    drafting = step["predicted_seconds"] - (9 + step["rows"])
    assert 0 <= drafting < 5, "the table, and what drafting took"
    assert 0 < step["measured_seconds"] < 5


def test_there_is_no_last_step_before_the_first(folder: Path) -> None:
    with LLM(folder, offers=[], config=SMALL) as llm, serving(llm) as served, served.http() as http:
        assert next(events(http.get("/live?count=1")))["last_step"] is None
        served.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1})
        assert next(events(http.get("/live?count=1")))["last_step"] is None, (
            "a step that reads a prompt is no decode step"
        )


@pytest.mark.parametrize("query", ["every=0.05", "every=11", "every=nan", "every=x", "count=0", "every=inf"])
def test_impossible_wishes_are_refused(served: Serving, query: str) -> None:
    with served.http() as http:
        refused = http.get(f"/live?{query}")
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == query.partition("=")[0]


def test_many_listeners_share_a_sampler_and_leave_nothing_behind(served: Serving) -> None:
    live = served.service.live
    with ExitStack() as stack:
        http = stack.enter_context(served.http(limits=httpx.Limits(max_connections=None)))
        streams = [stack.enter_context(http.stream("GET", f"/live?every={0.1 + i % 3 / 10}")) for i in range(30)]
        feeds = [events(stream) for stream in streams]
        for feed in feeds:
            assert next(feed)["status"] == next(feed)["status"] == "ready"
        assert live.num_listeners == 30
        assert len(live._channels) == 3
    wait_for(lambda: live.num_listeners == 0)
    assert live._channels == {}
    assert live._sampling is None


def test_a_listener_who_never_reads_costs_nothing(served: Serving) -> None:
    live = served.service.live
    address = ("127.0.0.1", int(served.url.rsplit(":", 1)[1]))
    with socket.create_connection(address) as line:
        line.sendall(b"GET /live?every=0.1 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        wait_for(lambda: live.num_listeners == 1)
        with served.http() as http:
            assert len(list(events(http.get("/live?every=0.1&count=3")))) == 3
    wait_for(lambda: live.num_listeners == 0)


def test_a_sampler_that_fails_ends_the_streams(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(llm) as served, served.http() as http, http.stream("GET", "/live?every=0.1") as response:
        news = events(response)
        next(news)
        monkeypatch.setattr(served.service.metrics.depths, "shares", lambda: 1 / 0)
        assert len(list(news)) < 5
        wait_for(lambda: served.service.live.num_listeners == 0)
    assert "live figures have failed" in caplog.text


def test_draining_does_not_wait_for_those_who_watch(folder: Path) -> None:
    with (
        LLM(folder, offers=[], config=SMALL) as llm,
        serving(llm, drain_seconds=20) as served,
        served.http() as http,
        http.stream("GET", "/live?every=0.1") as response,
    ):
        news = events(response)
        assert next(news)["status"] == "ready"
        served.service.admission._arriving[served.service.keys.callers[0]] += 1  # an answer that takes a while
        served.server.handle_exit(signal.SIGTERM, None)
        assert next(event for event in news if event["status"] != "ready")["status"] == "draining"
        served.service.admission._arriving.clear()
        began = time.monotonic()
        list(news)  # ends by itself
        wait_for(lambda: not served.server.server_state.connections)
        assert time.monotonic() - began < 4  # uvicorn's own patience is 5 seconds


def test_a_dead_engine_is_told(folder: Path) -> None:
    with LLM(folder, offers=[], config=SMALL) as llm, serving(llm) as served, served.http() as http:
        served.service.monitor._declare_dead("a test")
        assert next(events(http.get("/live?count=1")))["status"] == "dead"


def test_the_access_log_stays_quiet(served: Serving, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "draftwood.access"), served.http() as http:
        http.get("/live?every=0.1&count=2")
        http.get("/live?every=0")
        wait_for(lambda: caplog.records)
    assert [json.loads(record.message)["status"] for record in caplog.records] == [400]


def test_a_listener_who_leaves_takes_nothing_from_the_others(llm: LLM, served: Serving) -> None:
    async def scene() -> list[bytes]:
        from draftwood.server.live import Live

        service = served.service
        live = Live(llm, service.metrics, service.admission, service.monitor)
        one, other = live.listen(0.1), live.listen(0.1)
        await anext(one)
        await anext(other)
        waiting = asyncio.create_task(anext(one))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        news = [await anext(other), await anext(other)]
        assert live.num_listeners == 1
        live.close()
        assert [event async for event in other] == []
        assert live.num_listeners == 0
        return news

    assert len(asyncio.run(scene())) == 2


def test_recent_depths_forget() -> None:
    depths = RecentDepths()
    assert depths.shares() == []
    for _ in range(50):
        depths.learn(3, 3)
    assert depths.shares() == [1, 1, 1]
    depths.learn(9, 3)
    assert depths.shares() == [1, 1, 1], "at depth 4 nothing was ever right"
    for _ in range(400):
        depths.learn(3, 1)
    first, second, *_ = depths.shares()
    assert first == 1
    assert second < 0.05
    for _ in range(3000):
        depths.learn(2, 1)
    assert depths.shares() == [1]
    assert depths._weight < depths.SCALE * 1.1
    depths.learn(1, 1)
