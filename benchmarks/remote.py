"""A remote drafter over loopback against the same model as a local one, one request at a time, greedy.

python benchmarks/remote.py --model BIG --draft SMALL [--weights stored] [--latency 0,5] [--nodes 6] [--threads 1]

The drafter is a process of its own. `--latency`: milliseconds added between the two, half of them each way. Say with
`taskset` which cores there are; with one for each side the remote drafter drafts while the target verifies.
"""

from __future__ import annotations

import argparse
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

from common import report
from cpu_prompts import BUILT_IN
from draftwood import LLM, EngineConfig, SamplingParams
from draftwood.drafters.remote_protocol import KEY_VARIABLE
from draftwood.engine.controller import FixedBudget

SHARE = 0.95  # of the local drafter's rate, at least


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


def _delayed(source: socket.socket, sink: socket.socket, seconds: float) -> None:
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
                    threading.Thread(target=_delayed, args=(*pair, milliseconds / 2000), daemon=True).start()

    threading.Thread(target=listen, daemon=True).start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.close()


def rate(name: str, flags: argparse.Namespace) -> tuple[float, float, list[tuple[int, ...]]]:
    """Tokens a second after the first token, tokens a step, and the tokens themselves."""
    config = EngineConfig(weights=flags.weights, threads=flags.threads)
    tree = f"chain:depth={flags.nodes}" if name.startswith("model:") else None
    params = SamplingParams(max_tokens=flags.tokens, ignore_eos=True)
    budget = FixedBudget(0 if name == "none" else flags.nodes)  # the same for both
    with LLM(flags.model, drafter=name, tree=tree, config=config, controller=budget) as llm:
        llm.generate("Warm up.", params)
        rates, steps, answers = [], [], []
        for prompt in BUILT_IN:
            result = llm.chat([{"role": "user", "content": prompt}], params)
            seconds = result.stats.seconds - result.stats.first_token_seconds
            rates.append((result.stats.num_tokens - 1) / seconds)
            steps.append(result.stats.tokens_per_step)
            answers.append(result.token_ids)
    return statistics.mean(rates), statistics.mean(steps), answers


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
    flags = parser.parse_args()
    plain, _, answers = rate("none", flags)
    local, local_steps, guessed = rate(f"model:{flags.draft}", flags)
    same = guessed == answers
    rows: list[tuple[str, float | None, str, float | None, str]] = [
        ("plain, tokens a second", plain, "", None, ""),
        (f"local drafter ({local_steps:.2f} tokens a step)", local, "", None, ""),
    ]
    with drafter(flags) as address:
        for latency in flags.latency:
            with slowed(address, latency) as near:
                away, steps, guessed = rate(f"remote:{near},nodes={flags.nodes},wait={flags.wait:g}", flags)
            same = same and guessed == answers
            rows.append((f"remote, {latency:g} ms more ({steps:.2f} tokens a step)", away, "", None, ""))
            rows.append((f"remote, {latency:g} ms more, of the local one", away / local, "", SHARE, ">="))
    rows.append(("answers equal plain decoding's", float(same), "", 1.0, ">="))
    return 0 if report(rows, "remote", {"model": flags.model, "draft": flags.draft}) else 1


if __name__ == "__main__":
    sys.exit(main())
