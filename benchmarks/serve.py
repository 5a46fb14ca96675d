"""The server's figures: what it adds to the offline engine, and how requests that arrive by chance fare.

python benchmarks/serve.py [--model smollm2] [--weights w8a8] [--drafter ngram] [--rates 0.5,1,2] [--requests 60]

The server is a process of its own, on loopback; it is measured with its engine in the same process and with the engine
in another one (`draftwood serve --engine-process`), in turns. Load: Poisson arrivals of mixed prompts, the same with
speculation off, with a fixed budget and with the automatic one, a fifth of the clients hanging up if --leave 0.2.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

from common import report
from cpu_prompts import BUILT_IN
from draftwood import LLM, EngineConfig, SamplingParams
from draftwood.cli.engine_process import EngineOrder, start_engine
from draftwood.cli.flags import EngineFlags
from draftwood.engine.controller import FixedBudget
from draftwood.engine.served import ServedEngine

MODES = ("off", "fixed", "automatic")
NAME = "served"
CONCURRENCY = 32
OVERHEAD = {False: 5.0, True: 3.0}  # percent, at most; with the engine in another process


@dataclass(frozen=True)
class Fate:
    """What became of one request; times in seconds."""

    tokens: int
    first: float
    total: float
    left: bool  # its client hung up

    @property
    def per_token(self) -> float:
        return (self.total - self.first) / max(self.tokens - 1, 1)


def engine(flags: argparse.Namespace, mode: str) -> LLM:
    config = EngineConfig(weights=flags.weights, threads=flags.threads, cache_tokens=flags.cache_tokens)
    drafter = "none" if mode == "off" else flags.drafter
    llm = LLM(flags.model, drafter=drafter, offers=(), config=config)
    if mode == "fixed":
        llm.engine.controller = FixedBudget(llm.engine.drafter.max_nodes)
    elif mode == "automatic" and not llm.is_calibrated:
        llm.calibrate()
    return llm


def serve(flags: argparse.Namespace) -> None:
    """The other process."""
    from draftwood.server.app import make_app
    from draftwood.server.config import ServerConfig
    from draftwood.server.run import DrainingServer
    from draftwood.server.sockets import listening

    config = ServerConfig(NAME, max_queue=4096, deadline=3600)
    with listening([("127.0.0.1", flags.port)]) as sockets, closing(served_engine(flags)) as made:
        DrainingServer(make_app(made, config, flags.drafter)).run(sockets)


def served_engine(flags: argparse.Namespace) -> ServedEngine:
    if not flags.engine_process:
        return engine(flags, flags.serve)
    drafter = "none" if flags.serve == "off" else flags.drafter
    parts = EngineFlags(
        flags.model, drafter, weights=flags.weights, threads=flags.threads, cache_tokens=flags.cache_tokens
    )
    return start_engine(EngineOrder(parts, (), 0))


@contextmanager
def server(flags: argparse.Namespace, mode: str, *, engine_process: bool = False) -> Iterator[int]:
    """A server in a process of its own, perhaps with its engine in another one; its port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    given = ["--model", flags.model, "--weights", flags.weights, "--drafter", flags.drafter]
    given += ["--cache-tokens", str(flags.cache_tokens)] + (["--threads", str(flags.threads)] if flags.threads else [])
    given += ["--engine-process"] if engine_process else []
    process = subprocess.Popen([sys.executable, __file__, *given, "--serve", mode, "--port", str(port)])
    try:
        _wait_until_healthy(port, process)
        yield port
    finally:
        process.terminate()
        process.wait(60)


def _wait_until_healthy(port: int, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health").close()
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.2)
    raise SystemExit("the server has not started")


async def ask(port: int, body: dict[str, object], patience: int | None = None) -> Fate:
    """One streaming request, read as bytes: a client that parses would take the engine's cores.

    `patience`: chunks after which it hangs up.
    """
    content = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n"  # noqa: E501
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + content)
    received, first = [], None
    try:
        while piece := await reader.read(1 << 16):
            received.append(piece)
            if first is None and b'"content":"' in piece and b'"content":""' not in piece:
                first = time.perf_counter() - began
            if patience is not None and len(received) > patience:
                return Fate(0, 0.0, 0.0, left=True)
    finally:
        writer.close()
    total = time.perf_counter() - began
    text = b"".join(received)
    if b"[DONE]" not in text or b'"error"' in text:
        raise SystemExit(f"a request was lost: {text[-400:]!r}")
    tokens = int(text.rsplit(b'"completion_tokens":', 1)[1].split(b",", 1)[0])
    return Fate(tokens, first or total, total, left=False)


def body_of(i: int, flags: argparse.Namespace, *, everything: bool = False) -> dict[str, object]:
    """A request of a mix: six kinds of prompts, long and short answers, some of them sampled."""
    lengths = (flags.tokens,) if everything else (flags.tokens // 4, flags.tokens // 2, flags.tokens)
    content = f"{i}. {BUILT_IN[i % len(BUILT_IN)]}"
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": lengths[i % len(lengths)], "seed": i}
    return body | {"temperature": 0.0 if everything or i % 3 else 0.8, "ignore_eos": everything}


async def arrivals(port: int, rate: float, flags: argparse.Namespace) -> list[Fate]:
    """Requests as they come: exponential times between them, the same for every mode."""
    rng = random.Random(f"{rate}/{flags.requests}")
    tasks = []
    for i in range(flags.requests):
        patience = rng.randrange(1, 10) if rng.random() < flags.leave else None
        tasks.append(asyncio.create_task(ask(port, body_of(i, flags), patience)))
        await asyncio.sleep(rng.expovariate(rate))
    return list(await asyncio.gather(*tasks))


def percentiles(values: Sequence[float]) -> dict[str, float]:
    ranked = sorted(values)
    return {f"p{p}": round(ranked[min(len(ranked) - 1, len(ranked) * p // 100)], 4) for p in (50, 95, 99)}


def summary(fates: Sequence[Fate], seconds: float, flags: argparse.Namespace) -> dict[str, object]:
    stayed = [fate for fate in fates if not fate.left]
    good = [fate for fate in stayed if fate.first <= flags.ttft and fate.per_token <= flags.tpot]
    return {
        "requests": len(fates),
        "left": len(fates) - len(stayed),
        "tokens_per_second": round(sum(fate.tokens for fate in stayed) / seconds, 2),
        "ttft": percentiles([fate.first for fate in stayed]),
        "tpot": percentiles([fate.per_token for fate in stayed if fate.tokens > 1]),
        "goodput": round(len(good) / seconds, 4),
    }


def leaks(port: int) -> float:
    """Share of the cache in use when nothing is under way."""
    for _ in range(100):
        page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
        used = [float(line.split()[-1]) for line in page.splitlines() if line.startswith("draftwood:kv_cache_usage")]
        if used == [0.0]:
            return 0.0
        time.sleep(0.1)
    return used[0]


def load(flags: argparse.Namespace) -> dict[str, object]:
    """Every rate with every mode; what came of it."""
    results: dict[str, object] = {}
    for mode in flags.modes:
        with server(flags, mode) as port:
            asyncio.run(ask(port, body_of(0, flags)))  # warm
            for rate in flags.rates:
                start = time.perf_counter()
                fates = asyncio.run(arrivals(port, rate, flags))
                figures = summary(fates, time.perf_counter() - start, flags)
                results[f"{mode} at {rate:g}/s"] = figures
                print(f"{mode:10s} {rate:5g}/s {json.dumps(figures)}", flush=True)
            results[f"{mode}: cache in use afterwards"] = leaks(port)
    return results


def overhead(flags: argparse.Namespace) -> tuple[float, dict[bool, tuple[float, float]]]:
    """Seconds a token offline; and served, with the engine in the server's process and in another one, with the median
    of how many percent more that is. All in turns.
    """
    with (
        engine(flags, "off") as llm,
        server(flags, "off") as near,
        server(flags, "off", engine_process=True) as far,
    ):
        ports, offline = {False: near, True: far}, []
        served: dict[bool, list[float]] = {False: [], True: []}
        numbers = itertools.count()
        for turn in range(flags.rounds + 1):
            number, order = next(numbers), [None, *ports]
            found: dict[bool | None, float] = {}
            for apart in order if turn % 2 else reversed(order):
                found[apart] = (
                    _offline_seconds(llm, number, flags)
                    if apart is None
                    else asyncio.run(_served_seconds(ports[apart], number, flags))
                )
            alone, over_http = found.pop(None), found
            if turn:  # the first is for warming up
                offline.append(alone)
                for apart in ports:
                    served[apart].append(over_http[apart])
    more = {
        apart: statistics.median(100 * (s / o - 1) for s, o in zip(all_, offline, strict=True))
        for apart, all_ in served.items()
    }
    return statistics.median(offline), {apart: (statistics.median(served[apart]), more[apart]) for apart in ports}


def _offline_seconds(llm: LLM, number: int, flags: argparse.Namespace) -> float:
    bodies = [body_of(CONCURRENCY * number + i, flags, everything=True) for i in range(CONCURRENCY)]
    params = SamplingParams(max_tokens=flags.tokens, ignore_eos=True)
    start = time.perf_counter()
    results = llm.generate([body["messages"] for body in bodies], params)  # type: ignore[misc]
    return (time.perf_counter() - start) / sum(result.stats.num_tokens for result in results)


async def _served_seconds(port: int, number: int, flags: argparse.Namespace) -> float:
    bodies = [body_of(CONCURRENCY * number + i, flags, everything=True) for i in range(CONCURRENCY)]
    start = time.perf_counter()
    fates = await asyncio.gather(*(ask(port, body) for body in bodies))
    return (time.perf_counter() - start) / sum(fate.tokens for fate in fates)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--weights", default="w8a8")
    parser.add_argument("--drafter", default="ngram")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--cache-tokens", type=int, default=0)
    parser.add_argument("--rates", type=lambda text: [float(r) for r in text.split(",")], default=[0.5, 1.0, 2.0])
    parser.add_argument("--modes", type=lambda text: text.split(","), default=list(MODES))
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=64, help="longest answer")
    parser.add_argument("--leave", type=float, default=0.0, help="share of clients that hang up")
    parser.add_argument("--ttft", type=float, default=1.0, help="seconds to the first token that are good")
    parser.add_argument("--tpot", type=float, default=0.1, help="seconds a token that are good")
    parser.add_argument("--rounds", type=int, default=5, help="of the comparison with the offline engine; 0: none")
    parser.add_argument("--serve", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--engine-process", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    flags = arguments()
    if flags.serve:
        serve(flags)
        return 0
    details: dict[str, object] = {"model": flags.model, "weights": flags.weights, "drafter": flags.drafter}
    rows: list[tuple[str, float | None, str, float | None, str]] = []
    if flags.rounds:
        offline, served = overhead(flags)
        rows.append((f"offline engine, {CONCURRENCY} at a time, a token", 1000 * offline, "ms", None, ""))
        for apart, (seconds, more) in served.items():
            name = "server with an engine process" if apart else "server"
            rows.append((f"{name}, a token", 1000 * seconds, "ms", None, ""))
            rows.append((f"{name}, tokens a second", 1 / seconds, "", None, ""))
            rows.append((f"{name} adds", more, "%", OVERHEAD[apart], "<="))
    if flags.requests:
        details["load"] = results = load(flags)
        used = [value for name, value in results.items() if name.endswith("afterwards")]
        rows.append(("cache in use when all is done", 100 * max(used), "%", 0.0, "<="))  # type: ignore[type-var]
    return 0 if report(rows, "serve", details) else 1


if __name__ == "__main__":
    sys.exit(main())
