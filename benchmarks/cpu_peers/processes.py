"""The parent's side: start contenders, ask them, and keep the reason when one fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cpu_peers.prepare import NEEDED_FIRST

HERE = Path(__file__).resolve().parent
PATIENCE = 600  # seconds for one answer, or for making one file
FILES = {"llamacpp": "{}.gguf", "openvino": "openvino-{}"}
WITHOUT_AMX = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}  # some machines announce AMX and fault on it


class Failure(Exception):
    """A contender cannot take part; the message says why."""


class Key(NamedTuple):
    """Which contender: ours or a peer, what its weights are stored as, and how it drafts."""

    engine: str
    form: str
    mode: str

    def __str__(self) -> str:
        return " ".join(self)


@dataclass(frozen=True)
class Environments:
    """Where contenders run."""

    peers: Path  # a virtual environment; models made for peers lie in it too
    threads: int

    @property
    def models(self) -> Path:
        return self.peers / "models"

    def python(self, engine: str) -> str:
        if engine in ("ours", "transformers"):
            return sys.executable
        python = self.peers / "bin" / "python"
        if not python.exists():
            raise Failure("the peers' environment is not there; make bench-cpu installs it")
        return str(python)

    def variables(self) -> dict[str, str]:
        """The same for everybody. The hub is not asked: everything needed is here."""
        defaults = {**WITHOUT_AMX, "HF_HUB_OFFLINE": "1", **os.environ}
        return {**defaults, "PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": str(self.threads)}

    def provide(self, what: str) -> None:
        """Make the file `what`, and what it is made from, unless they are there."""
        if (self.models / what).exists():
            return
        before = NEEDED_FIRST.get(what)
        if before is not None:
            self.provide(before)
        python = self.python("ours" if before is None else "openvino")
        self.models.mkdir(parents=True, exist_ok=True)
        command = [python, "-m", "cpu_peers.prepare", what, str(self.models)]
        try:
            done = subprocess.run(
                command, env=self.variables(), capture_output=True, text=True, check=False, timeout=PATIENCE
            )
        except subprocess.TimeoutExpired:
            raise Failure(f"{what} was not made within {PATIENCE} s") from None
        if done.returncode:
            raise Failure(f"{what} could not be made: {reason(done.returncode, done.stderr)}")


class Process:
    """One contender at work. It sleeps unless it is asked."""

    def __init__(self, key: Key, places: Environments) -> None:
        if key.engine in FILES:
            places.python(key.engine)
            places.provide(FILES[key.engine].format(key.form))
        command = [places.python(key.engine), "-m", "cpu_peers.worker", *key, str(places.threads), str(places.models)]
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            command,
            env=places.variables(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            bufsize=1,
        )
        self.version: str = self._answer()["version"]

    def ask(self, do: str, **details: object) -> Mapping[str, Any]:
        with suppress(BrokenPipeError):  # it is dead; reading says why
            print(json.dumps({"do": do, **details}), file=self._process.stdin)
        return self._answer()

    def _answer(self) -> Mapping[str, Any]:
        assert self._process.stdout is not None
        with killed_after(self._process, PATIENCE):
            line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self._errors.seek(0)
            raise Failure(reason(code, self._errors.read()))
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()  # its loop ends with its input
        with killed_after(self._process, 10):
            self._process.wait()
        self._errors.close()


@contextmanager
def killed_after(process: subprocess.Popen[str], seconds: float) -> Iterator[None]:
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def reason(code: int, errors: str) -> str:
    """Why a process ended, in one line: its signal, or the last thing it said."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return lines[-1] if lines else f"exit status {code}"
