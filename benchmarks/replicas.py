"""Two Ray replicas against one: tokens a second of the same requests, each replica with one CPU thread.

python benchmarks/replicas.py [--model smollm2] [--weights w8a8] [--requests 64] [--concurrency 16]

Needs `pip install 'draftwood[serve,ray]'`, and as many idle cores as replicas besides those of clients and front.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from common import report
from serve import ask, body_of

SPEEDUP = 1.9


@contextmanager
def replicas(count: int, flags: argparse.Namespace) -> Iterator[int]:
    """The port of so many replicas."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "draftwood.ray", "--model", flags.model, "--weights", flags.weights]
    command += ["--drafter", flags.drafter, "--replicas", str(count), "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        if not any("replicas of" in line for line in process.stdout):
            raise SystemExit("the replicas have not started")
        yield port
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)
        process.stdout.close()


async def answered(port: int, flags: argparse.Namespace) -> float:
    """Tokens a second of all requests, so many at a time."""
    room = asyncio.Semaphore(flags.concurrency)

    async def one(number: int) -> int:
        async with room:
            return (await ask(port, body_of(number, flags, everything=True))).tokens

    await asyncio.gather(*(one(-1 - i) for i in range(4)))  # warm
    start = time.perf_counter()
    tokens = await asyncio.gather(*(one(i) for i in range(flags.requests)))
    return sum(tokens) / (time.perf_counter() - start)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--weights", default="w8a8")
    parser.add_argument("--drafter", default="ngram")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    flags = parser.parse_args()
    rates = {}
    for count in (1, 2):
        with replicas(count, flags) as port:
            rates[count] = asyncio.run(answered(port, flags))
    rows: list[tuple[str, float | None, str, float | None, str]] = [
        ("one replica, tokens a second", rates[1], "", None, ""),
        ("two replicas, tokens a second", rates[2], "", None, ""),
        ("two replicas, times one", rates[2] / rates[1], "", SPEEDUP, ">="),
    ]
    return 0 if report(rows, "replicas", {"model": flags.model, "weights": flags.weights}) else 1


if __name__ == "__main__":
    sys.exit(main())
