"""Starts the other ranks as processes, and sees to it that none outlives the rest.

A follower reads what to build from its standard input, which stays open for as long as rank 0 lives: when that ends,
however it ends, the follower does too. When a follower ends, rank 0 is told.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from draftwood.config import EngineConfig
from draftwood.errors import DraftwoodError, InvalidRequest
from draftwood.ranks import ProcessRanks, RankLost, dist, meet

HERE = "127.0.0.1"
PATIENCE = 10.0  # seconds that a follower has to end by itself
log = logging.getLogger(__name__)
GRACE = 1.0  # seconds between the end of its input and its own
_START = "from draftwood.engine.followers import main; main()"


class Followers:
    """The processes of all ranks but the first, on this machine."""

    def __init__(self, size: int, spec: Mapping[str, Any]) -> None:
        self._store = dist.TCPStore(HERE, 0, None, True, timedelta(seconds=PATIENCE), wait_for_workers=False)
        self._size = size
        self._closed = False
        self._processes = [self._start(rank, json.dumps(spec)) for rank in range(1, size)]

    def _start(self, rank: int, spec: str) -> subprocess.Popen[bytes]:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self._size, "MASTER_PORT": self._store.port}
        where = {"MASTER_ADDR": HERE, "TORCHELASTIC_USE_AGENT_STORE": "True"}
        environment = os.environ | {name: str(value) for name, value in place.items()} | where
        process = subprocess.Popen(
            [sys.executable, "-c", _START],
            stdin=subprocess.PIPE,
            stdout=sys.stderr.fileno() if _has_file(sys.stderr) else subprocess.DEVNULL,
            env=environment | _loopback(),
            start_new_session=True,  # Ctrl-C is for rank 0, which ends the others
        )
        assert process.stdin is not None
        process.stdin.write(spec.encode() + b"\n")
        process.stdin.flush()
        return process

    def ranks(self, device: torch.device) -> ProcessRanks:
        """The ranks, as rank 0 sees them, once all are there."""
        before = {name: os.environ.get(name) for name in _loopback()}
        os.environ.update(_loopback())
        try:
            return meet(self._store, 0, self._size, device, self._check)
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)

    def _check(self) -> None:
        for rank, process in enumerate(self._processes, 1):
            if process.poll() is not None:
                raise RankLost(f"{self._ended(rank, process)} before it had begun; its messages above say why.")

    def watch(self, lost: Callable[[str], None]) -> None:
        """Call `lost` with the reason when one ends by itself."""
        for rank, process in enumerate(self._processes, 1):
            name = f"draftwood-rank-{rank}"
            threading.Thread(target=self._watch, args=(rank, process, lost), name=name, daemon=True).start()

    def _watch(self, rank: int, process: subprocess.Popen[bytes], lost: Callable[[str], None]) -> None:
        process.wait()
        if not self._closed:
            reason = f"{self._ended(rank, process)}."
            log.critical("%s", reason)
            lost(reason)

    @staticmethod
    def _ended(rank: int, process: subprocess.Popen[bytes]) -> str:
        return f"Rank {rank} (process {process.pid}) has ended with status {process.returncode}"

    def close(self) -> None:
        """Let them end; one that does not is killed."""
        self._closed = True
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def spec_of(
    model: object, parts: Mapping[str, Any], config: EngineConfig, *, offers: object, allow_pickle: bool
) -> dict[str, Any]:
    """What a follower builds its engine from; only names can be sent to another process."""
    for what, value in {"model": model, **parts}.items():
        if value is not None and not isinstance(value, str | Path):
            raise InvalidRequest(
                f"With tp or pp the other ranks build the {what} by its name, and it was given as an object. Give a "
                "name, or start the program on every rank with torchrun."
            )
    named = {what: value and str(value) for what, value in parts.items()}
    return {"model": str(model), **named, "offers": offers, "config": asdict(config), "allow_pickle": allow_pickle}


def main() -> None:
    """A follower: build the same engine as rank 0, and do as it does."""
    spec = json.loads(_line_of_input())
    threading.Thread(target=_end_with_rank_0, name="draftwood-lifeline", daemon=True).start()
    from draftwood.engine.llm import LLM

    try:
        LLM(spec.pop("model"), **spec | {"config": EngineConfig(**spec["config"])})
    except DraftwoodError as error:
        sys.exit(f"draftwood, rank {os.environ['RANK']}: {error}")


def _line_of_input() -> bytes:
    """Without a buffer: a thread that waits in one holds up the end of the process."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    return line


def _end_with_rank_0() -> None:
    """The pipe is closed when rank 0 ends or closes it; the grace is for an order to stop that is on its way."""
    while os.read(0, 1):
        pass
    time.sleep(GRACE)
    os._exit(1)


def _loopback() -> dict[str, str]:
    """Ranks of one machine talk over its loopback interface, which nobody else reaches."""
    if "GLOO_SOCKET_IFNAME" in os.environ or sys.platform == "win32":
        return {}
    return {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}


def _has_file(stream: Any) -> bool:
    try:
        stream.fileno()
    except (AttributeError, OSError, ValueError):
        return False
    return True
