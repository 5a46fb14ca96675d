"""Compile the C files beside this one with the system's compiler, once, and load the result.

The library is kept in the user's cache (`cache.py`) under a name made of everything it depends on. Without a compiler
there are no kernels, and models run on torch's own operations. DRAFTWOOD_NATIVE=0 turns the kernels off,
DRAFTWOOD_NATIVE=PATH takes a library that was built before (`build()` returns its path) and needs no compiler.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch  # loads the OpenMP runtime that the kernels must share with torch  # noqa: F401

from draftwood.machine import advise_home, processor_features
from draftwood.ops.native import cache as kept
from draftwood.ops.native.cache import BuildError
from draftwood.ops.native.structs import declare

SWITCH = "DRAFTWOOD_NATIVE"
FLAGS = (
    "-O3", "-march=native", "-std=gnu11", "-fopenmp", "-fPIC", "-fvisibility=hidden", "-fno-math-errno",
    "-fno-trapping-math",
)  # fmt: skip
_HERE = Path(__file__).parent
Kernels = ctypes.CDLL


def kernels() -> Kernels | None:
    """The compiled kernels, or None where there cannot be any."""
    return _attempt()[0]


def why_missing() -> str | None:
    """The reason why there are no kernels."""
    return _attempt()[1]


@cache
def _attempt() -> tuple[Kernels | None, str | None]:
    wish = os.environ.get(SWITCH)
    if wish == "0":
        return None, f"{SWITCH}=0 turned them off"
    try:
        return load(Path(wish) if wish else build()), None
    except BuildError as error:
        return None, str(error)
    except OSError as error:  # without a number it is the loader's own sentence
        return None, str(error) if error.errno is None else advise_home(error)


def load(path: Path) -> Kernels:
    """Open a built library."""
    library = ctypes.CDLL(str(path))
    declare(library)
    return library


def build(flags: tuple[str, ...] = FLAGS) -> Path:
    """Compile, unless the cache has the result of the same sources, compiler, flags and processor already."""
    compiler = _compiler()
    sources = sorted([*_HERE.glob("*.c"), *_HERE.glob("*.h")])
    parts = [
        " ".join((*compiler, *flags)),
        _compiler_version(compiler),
        processor_features(),
        *(s.read_text() for s in sources),
    ]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    folder = kept.private_folder()
    return kept.find(folder, key) or _compile(compiler, flags, [s for s in sources if s.suffix == ".c"], folder, key)


def _compiler() -> list[str]:
    for name in (os.environ.get("CC"), "gcc", "cc"):
        words = shlex.split(name or "")
        if words and shutil.which(words[0]):
            return words
    raise BuildError("there is no C compiler here (Debian: apt install gcc)")


def _compiler_version(compiler: list[str]) -> str:
    return subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False).stdout


def _compile(compiler: list[str], flags: tuple[str, ...], sources: list[Path], folder: Path, key: str) -> Path:
    with tempfile.TemporaryDirectory(dir=folder) as scratch, ThreadPoolExecutor() as pool:
        objects = [Path(scratch, f"{source.stem}.o") for source in sources]
        commands = [[*compiler, *flags, "-c", str(s), "-o", str(o)] for s, o in zip(sources, objects, strict=True)]
        list(pool.map(_run, commands))
        library = Path(scratch, "kernels.so")
        _run([*compiler, *flags, "-shared", *map(str, objects), "-o", str(library), "-lm"])
        return kept.keep(library, folder, key)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip())
        raise BuildError(f"{command[0]} could not compile them: {first}")
