"""Two Ray replicas against one: tokens a second, each on a core of its own and with as many requests at a time.

python benchmarks/replicas.py [--model smollm2] [--weights w8a8] [--requests 32] [--concurrency 8]

Needs `pip install 'draftwood[serve,ray]'`. Client, front and Ray's own processes run on whatever cores there are: where
there are no more than replicas they take time from these, and how much is reported. Linux.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from common import report
from serve import ask, body_of

SPEEDUP = 1.9
REPLICA = b"ray::ServeReplica:draftwood:Replica"


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


def processes() -> dict[int, bytes]:
    """Command lines by process id."""
    found = {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdecimal():
                found[int(entry.name)] = (entry / "cmdline").read_bytes()
    return found


def pin_replicas() -> set[int]:
    """Every replica to a core; their process ids."""
    replicas = sorted(pid for pid, line in processes().items() if line.startswith(REPLICA))
    for core, pid in enumerate(replicas):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {core})
    return set(replicas)


def busy_seconds() -> dict[int, float]:
    """Processor time of this process and of everything of Ray's, by process id."""
    found = {}
    for pid, line in processes().items():
        if pid == os.getpid() or b"ray" in line.split(b"\0")[0] or b"draftwood.ray" in line:
            with suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                found[pid] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


async def answered(port: int, flags: argparse.Namespace, count: int) -> tuple[float, float]:
    """Tokens a second of all requests, as many at a time; and the share of processor time beside the replicas."""
    replicas = pin_replicas()
    room = asyncio.Semaphore(count * flags.concurrency)

    async def one(number: int) -> int:
        async with room:
            return (await ask(port, body_of(number, flags, everything=True))).tokens

    await asyncio.gather(*(one(-1 - i) for i in range(4)))  # warm
    before, start = busy_seconds(), time.perf_counter()
    tokens = await asyncio.gather(*(one(i) for i in range(count * flags.requests)))
    rate = sum(tokens) / (time.perf_counter() - start)
    spent = {pid: seconds - before.get(pid, 0.0) for pid, seconds in busy_seconds().items()}
    print(f"{count} replicas: processor seconds of each {[round(spent[pid], 1) for pid in replicas]}", flush=True)
    return rate, 1 - sum(spent[pid] for pid in replicas) / sum(spent.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--weights", default="w8a8")
    parser.add_argument("--drafter", default="ngram")
    parser.add_argument("--requests", type=int, default=32, help="for each replica")
    parser.add_argument("--concurrency", type=int, default=8, help="of each replica")
    parser.add_argument("--tokens", type=int, default=64)
    flags = parser.parse_args()
    rates = {}
    for count in (1, 2):
        with replicas(count, flags) as port:
            rates[count] = asyncio.run(answered(port, flags, count))
    rows: list[tuple[str, float | None, str, float | None, str]] = [
        ("one replica, tokens a second", rates[1][0], "", None, ""),
        ("two replicas, tokens a second", rates[2][0], "", None, ""),
        ("processor time beside two replicas", 100 * rates[2][1], "%", None, ""),
        ("two replicas, times one", rates[2][0] / rates[1][0], "", SPEEDUP, ">="),
    ]
    return 0 if report(rows, "replicas", {"model": flags.model, "weights": flags.weights}) else 1


if __name__ == "__main__":
    sys.exit(main())
