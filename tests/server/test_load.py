"""Requests come and go, a fifth hang up, some are poisoned, the cache is too small for all: nothing is lost or leaks.

`--thorough`: 20,000 requests, and memory must stay flat after the first quarter. `benchmarks/serve.py` measures such a
load.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx

from draftwood import LLM, SamplingParams
from serving import SMALL, Serving, serving, soon

KINDS = 12
POISON = 0.05  # share of requests that are wrong
FLAT = 24 << 20  # bytes that the process may grow by once it has seen everything
POISONS: list[dict[str, object]] = [
    {"prompt": [{}] * 50},
    {"prompt": "x " * 20_000},
    {"prompt": [10**6]},
    {"prompt": "a", "temperature": -1},
    {"prompt": "a", "guided_regex": "("},
    {"prompt": "a", "guided_json": {"type": "string", "minLength": 9, "maxLength": 1}},
    {"prompt": "a", "logit_bias": {"-5": 1}},
    {"prompt": "a", "model": "another"},
    {"prompt": "a", "functions": [{}]},
    {"prompt": ["a"] * 400},
]


def ask(i: int) -> dict[str, object]:
    kind = i % KINDS
    return {
        "prompt": f"one two three {kind} " * (1 + kind),
        "max_tokens": 10 + 6 * kind,
        "temperature": float(kind % 2),
        "seed": kind,
        "ignore_eos": True,
    }


async def one(http: httpx.AsyncClient, i: int, wanted: list[str], rng: random.Random) -> str:
    await asyncio.sleep(rng.random() * 0.5)
    luck = rng.random()
    if luck < 0.2:
        return await _leave_early(http, i, rng)
    if luck < 0.2 + POISON:
        response = await http.post("/v1/completions", json=rng.choice(POISONS))
        assert 400 <= response.status_code < 500, response.text
        return "refused"
    response = await http.post("/v1/completions", json=ask(i))
    assert response.status_code == 200, response.text
    return "right" if response.json()["choices"][0]["text"] == wanted[i % KINDS] else "wrong"


async def _leave_early(http: httpx.AsyncClient, i: int, rng: random.Random) -> str:
    """Go after a few bytes, or before the first."""
    patience = rng.randrange(3)
    async with http.stream("POST", "/v1/completions", json=ask(i) | {"stream": True}) as response:
        async for _ in response.aiter_raw():
            if patience == 0:
                return "left"
            patience -= 1
    return "left"


@dataclass
class Usage:
    """What the process holds, while requests come and go."""

    memory: list[int] = field(default_factory=list)  # bytes
    descriptors: list[int] = field(default_factory=list)

    def look(self) -> None:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.memory.append(pages * os.sysconf("SC_PAGE_SIZE"))
        self.descriptors.append(len(os.listdir("/proc/self/fd")))


async def storm(served: Serving, requests: int, wanted: list[str], usage: Usage) -> Counter[str]:
    rng, results = random.Random(1), Counter[str]()
    limits = httpx.Limits(max_connections=64)
    usage.look()
    for quarter in range(4):
        async with httpx.AsyncClient(base_url=served.url, timeout=120, limits=limits) as http:
            first = quarter * requests // 4
            for start in range(first, first + requests // 4, 50):
                wave = range(start, min(start + 50, first + requests // 4))
                results.update(await asyncio.gather(*(one(http, i, wanted, rng) for i in wave)))
        assert soon(lambda: not served.server.server_state.connections), "connections have leaked"
        usage.look()
    return results


def test_nothing_is_lost_and_no_page_leaks(folder: Path, thorough: bool) -> None:
    config = replace(SMALL, cache_tokens=640, max_running=16)
    requests = 20_000 if thorough else 200
    usage = Usage()
    with LLM(folder, drafter="ngram:shortest=1", offers=[], config=config) as llm, serving(llm) as served:
        wanted = [
            llm.generate(str(a["prompt"]), SamplingParams(**{k: v for k, v in a.items() if k != "prompt"})).text  # type: ignore[arg-type]
            for a in map(ask, range(KINDS))
        ]
        results = asyncio.run(storm(served, requests, wanted, usage))
        assert sum(results.values()) == requests
        assert set(results) == {"right", "left", "refused"}
        assert llm.engine.scheduler.num_preemptions > 0, "the cache was not scarce enough to test anything"
        assert served.idle(20), "pages have leaked"
        llm.engine.scheduler.tables.check()
        assert llm.pulse.failures == 0
        with served.http() as http:
            refusals = http.get("/metrics").text
        assert 'request_refused_total{model_name="tiny",status="5' not in refusals
        print(f"{requests} requests, {dict(results)}, {llm.engine.scheduler.num_preemptions} preemptions, {usage}")
    assert max(usage.descriptors[1:]) <= usage.descriptors[0] + 8  # those of the server's own threads and loop
    if thorough:
        assert usage.memory[-1] - usage.memory[1] < FLAT
