"""Requests come and go, some hang up, the cache is too small for all: nothing is lost and nothing leaks.

`--thorough`: 2,000 requests. `benchmarks/serve.py` measures the same kind of load.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import httpx

from draftwood import LLM, SamplingParams
from serving import SMALL, Serving, serving

KINDS = 12


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
    if rng.random() < 0.2:
        return await _leave_early(http, i, rng)
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


async def storm(served: Serving, requests: int, wanted: list[str]) -> list[str]:
    rng, results = random.Random(1), []
    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(base_url=served.url, timeout=120, limits=limits) as http:
        for start in range(0, requests, 50):
            wave = range(start, min(start + 50, requests))
            results += await asyncio.gather(*(one(http, i, wanted, rng) for i in wave))
    return results


def test_nothing_is_lost_and_no_page_leaks(folder: Path, thorough: bool) -> None:
    config = replace(SMALL, cache_tokens=640, max_running=16)
    requests = 2000 if thorough else 100
    with LLM(folder, drafter="ngram:shortest=1", offers=[], config=config) as llm, serving(llm) as served:
        wanted = [
            llm.generate(str(a["prompt"]), SamplingParams(**{k: v for k, v in a.items() if k != "prompt"})).text  # type: ignore[arg-type]
            for a in map(ask, range(KINDS))
        ]
        results = asyncio.run(storm(served, requests, wanted))
        assert len(results) == requests
        assert set(results) == {"right", "left"}
        assert llm.engine.scheduler.num_preemptions > 0, "the cache was not scarce enough to test anything"
        assert served.idle(20), "pages have leaked"
        llm.engine.scheduler.tables.check()
        assert llm.pulse.failures == 0
