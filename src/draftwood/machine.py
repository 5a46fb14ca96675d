"""What this machine is, and where we keep what belongs to it."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import platform
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

READERS, BLOCK = 8, 8 << 20  # of files that will be needed soon


def home() -> Path:
    """`$DRAFTWOOD_HOME`, or a folder of ours in the user's cache."""
    own = os.environ.get("DRAFTWOOD_HOME")
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(own).expanduser() if own else Path(cache).expanduser() / "draftwood"


def zeroed_memory(num_bytes: int, *, large_pages: bool) -> mmap.mmap:
    """Memory that costs nothing until it is written to; in pages of megabytes where the system has them, or never."""
    if not hasattr(mmap, "MAP_PRIVATE"):  # not a Unix
        return mmap.mmap(-1, num_bytes)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advice = getattr(mmap, "MADV_HUGEPAGE" if large_pages else "MADV_NOHUGEPAGE", None)
    if advice is not None:
        memory.madvise(advice)
    return memory


@contextmanager
def reading_ahead(files: Sequence[Path]) -> Iterator[None]:
    """Have the system read files during the block, in many places at once: who maps them and takes one page after the
    other gets half of what a disk can give, or less.
    """
    places = ((path, start) for path in files for start in range(0, path.stat().st_size, BLOCK))
    turn, over = threading.Lock(), threading.Event()

    def read() -> None:
        block = bytearray(BLOCK)
        while not over.is_set():
            with turn:
                place = next(places, None)
            if place is None:
                return
            with place[0].open("rb", buffering=0) as file:
                file.seek(place[1])
                file.readinto(block)

    readers = [threading.Thread(target=_unless_it_fails(read), name="draftwood-reader") for _ in range(READERS)]
    for reader in readers:
        reader.start()
    try:
        yield
    finally:
        over.set()
        for reader in readers:
            reader.join()


def _unless_it_fails(head_start: Callable[[], None]) -> Callable[[], None]:
    """A file that cannot be read is told of by who needs it."""

    def run() -> None:
        with suppress(OSError):
            head_start()

    return run


def give_back_memory() -> None:
    """Return what loading has freed to the system; allocators like to keep it."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


def processor_features() -> str:
    """The processor's name and instruction sets, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    telling = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(telling)))
