"""A remote drafter over loopback against the same model as a local one, greedy: one request at a time, or several
together (`--together 8`), then also in two groups that decode by turns.

python benchmarks/remote.py --model BIG --draft SMALL [--weights stored] [--latency 0,5] [--nodes 6] [--threads 1]

The drafter is a process of its own. `--latency`: milliseconds added between the two, half of them each way. Say with
`taskset` which cores there are; with one for each side the remote drafter drafts while the target verifies.
`--temperature 0.8 --draws 8`: sampled answers with drawn drafts, which are not compared with those of plain decoding.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import secrets
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from common import report
from cpu_prompts import BUILT_IN
from draftwood import LLM, EngineConfig, SamplingParams
from draftwood.drafters.remote_protocol import KEY_VARIABLE
from draftwood.engine.controller import FixedBudget

SHARE = 0.95  # of the local drafter's rate, at least
CAME: list[int] = []  # bytes of everything that came from the drafter by way of `slowed`


@contextmanager
def drafter(flags: argparse.Namespace) -> Iterator[str]:
    """The address of a drafter in a process of its own."""
    os.environ[KEY_VARIABLE] = secrets.token_hex(16)
    command = [sys.executable, "-m", "draftwood", "drafter", "serve", "--drafter", "none", "--port", "0"]
    command += ["--model", flags.draft, "--weights", flags.weights, "--threads", str(flags.threads)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        found = next((match for line in process.stderr if (match := re.search(r"drafts at (\S+:\d+)", line))), None)
        if found is None:
            raise SystemExit("the drafter has not started")
        yield found[1]
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def _delayed(source: socket.socket, sink: socket.socket, seconds: float, *, counted: bool) -> None:
    """Pass bytes on, each piece so much later; pieces under way do not wait for one another."""
    pieces: list[tuple[float, bytes]] = []
    come = threading.Condition()

    def pass_on() -> None:
        while True:
            with come:
                come.wait_for(lambda: pieces)
                due, piece = pieces.pop(0)
            time.sleep(max(0.0, due - time.monotonic()))
            with suppress(OSError):
                sink.sendall(piece)
            if not piece:
                with suppress(OSError):
                    sink.shutdown(socket.SHUT_RDWR)
                return

    threading.Thread(target=pass_on, daemon=True).start()
    piece = b"more"
    while piece:
        try:
            piece = source.recv(1 << 16)
        except OSError:
            piece = b""
        if counted:
            CAME.append(len(piece))
        with come:
            pieces.append((time.monotonic() + seconds, piece))
            come.notify()


@contextmanager
def slowed(address: str, milliseconds: float) -> Iterator[str]:
    """The same address with so much more time there and back."""
    if milliseconds == 0:
        yield address
        return
    host, port = address.rsplit(":", 1)
    listener = socket.create_server(("127.0.0.1", 0))

    def listen() -> None:
        with suppress(OSError):
            while True:
                near = listener.accept()[0]
                far = socket.create_connection((host, int(port)))
                for pair in ((near, far), (far, near)):
                    pair[0].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    way = {"target": _delayed, "args": (*pair, milliseconds / 2000), "daemon": True}
                    threading.Thread(**way, kwargs={"counted": pair[0] is far}).start()

    threading.Thread(target=listen, daemon=True).start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.close()


@dataclass(frozen=True)
class Run:
    """What came of all prompts."""

    rate: float  # tokens a second behind the first ones
    steps: float  # tokens a step
    drafted: int
    answers: list[tuple[int, ...]]


def run(name: str, flags: argparse.Namespace, groups: int = 1) -> Run:
    """All prompts, so many at a time."""
    config = EngineConfig(weights=flags.weights, threads=flags.threads, groups=groups)
    tree = f"chain:depth={flags.nodes}" if name.startswith("model:") else None
    params = SamplingParams(max_tokens=flags.tokens, ignore_eos=True, temperature=flags.temperature)
    budget = FixedBudget(0 if name == "none" else flags.nodes)  # the same for both
    prompts = [[{"role": "user", "content": prompt}] for prompt in BUILT_IN]
    with LLM(flags.model, drafter=name, tree=tree, config=config, controller=budget) as llm:
        llm.generate("Warm up.", params)
        CAME.clear()
        rates, results = [], []
        for start in range(0, max(len(prompts), flags.together), flags.together):
            some = [prompts[i % len(prompts)] for i in range(start, start + flags.together)]
            began = time.perf_counter()
            found = llm.generate(some, params)  # type: ignore[arg-type]
            seconds = time.perf_counter() - began - max(result.stats.first_token_seconds for result in found)
            rates.append(sum(result.stats.num_tokens - 1 for result in found) / seconds)
            results += found
        steps = statistics.mean(result.stats.tokens_per_step for result in results)
        drafted = sum(result.stats.drafted for result in results)
        return Run(statistics.mean(rates), steps, drafted, [result.token_ids for result in results])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--draft", default="smollm2")
    parser.add_argument("--weights", default="stored")
    parser.add_argument("--latency", type=lambda text: [float(ms) for ms in text.split(",")], default=[0.0, 5.0])
    parser.add_argument("--nodes", type=int, default=6)
    parser.add_argument("--wait", type=float, default=200.0, help="milliseconds")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--together", type=int, default=1, help="requests at a time")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--draws", type=int, default=0, help="likeliest tokens that drafts are drawn from; 0: chosen")
    flags = parser.parse_args()
    plain, local = run("none", flags), run(f"model:{flags.draft}", flags)
    same = local.answers == plain.answers
    rows: list[tuple[str, float | None, str, float | None, str]] = [
        ("plain, tokens a second", plain.rate, "", None, ""),
        (f"local drafter ({local.steps:.2f} tokens a step)", local.rate, "", None, ""),
    ]
    groups = (1, 2) if flags.together > 1 else (1,)
    with drafter(flags) as address:
        for latency, count in itertools.product(flags.latency, groups):
            spec = f"nodes={flags.nodes},wait={flags.wait:g},draws={flags.draws}"
            with slowed(address, latency) as near:
                away = run(f"remote:{near},{spec}", flags, count)
            same = same and away.answers == plain.answers
            what = f"remote, {latency:g} ms more" + (f", {count} groups" if count > 1 else "")
            rows.append((f"{what} ({away.steps:.2f} tokens a step)", away.rate, "", None, ""))
            target = None if flags.together > 1 else SHARE
            rows.append((f"{what}, of the local one", away.rate / local.rate, "", target, ">="))
            if latency:
                rows.append((f"{what}: bytes a node that was verified", sum(CAME) / away.drafted, "", None, ""))
    if flags.temperature == 0:
        rows.append(("answers equal plain decoding's", float(same), "", 1.0, ">="))
    return 0 if report(rows, "remote", {"model": flags.model, "draft": flags.draft}) else 1


if __name__ == "__main__":
    sys.exit(main())
