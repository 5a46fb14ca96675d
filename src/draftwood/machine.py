"""What this machine is, and where we keep what belongs to it."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import platform
import re
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

READERS, BLOCK = 8, 8 << 20  # of files that will be needed soon
_being_read: set[Path] = set()
_MAPPED = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ (\d+)")  # a mapping in Linux's list of them
SET_HOME = "set DRAFTWOOD_HOME to a folder with room that you can write to, as in `export DRAFTWOOD_HOME=~/draftwood`"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EROFS, errno.EACCES, errno.EPERM)


def home() -> Path:
    """`$DRAFTWOOD_HOME`, or a folder of ours in the user's cache."""
    own = os.environ.get("DRAFTWOOD_HOME")
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(own).expanduser() if own else Path(cache).expanduser() / "draftwood"


def why_unwritable(error: BaseException) -> str | None:
    """Why something could not be written, as a clause; None: the error is about something else."""
    number = error.errno if isinstance(error, OSError) else None
    if number in _FULL or "No space left on device" in str(error):  # libraries in Rust say it in their own types
        return f"the disk is full{_place(error)}"
    if number in _FORBIDDEN:
        return f"{os.strerror(number).lower()}{_place(error)}"
    return None


def advise_home(error: OSError) -> str:
    """What went wrong under `home`, and which setting moves it elsewhere."""
    reason = why_unwritable(error) or f"{(error.strerror or str(error)).lower()}{_place(error)}"
    return f"{reason}; {SET_HOME} (now {home()})"


def _place(error: BaseException) -> str:
    name = error.filename if isinstance(error, OSError) else None
    return f" ({name})" if name else ""


def zeroed_memory(num_bytes: int, *, large_pages: bool) -> mmap.mmap:
    """Memory that costs nothing until it is written to; in pages of megabytes where the system has them, or never."""
    if not hasattr(mmap, "MAP_PRIVATE"):  # not a Unix
        return mmap.mmap(-1, num_bytes)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advice = getattr(mmap, "MADV_HUGEPAGE" if large_pages else "MADV_NOHUGEPAGE", None)
    if advice is not None:
        memory.madvise(advice)
    return memory


def spilled_memory(num_bytes: int) -> mmap.mmap:
    """Memory that the system may write to a file of ours, without a name, and read again when it is needed."""
    folder = home() / "layers"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        allocate = getattr(os, "posix_fallocate", None)  # not on macOS
        if allocate is None:
            file.truncate(num_bytes)
        else:  # a disk that is full is an error here, and would end the process when the memory is written to
            allocate(file.fileno(), 0, num_bytes)
        return mmap.mmap(file.fileno(), num_bytes)


@contextmanager
def reading_ahead(files: Sequence[Path]) -> Iterator[None]:
    """Have the system read files into its memory during the block, in several places at once, if it has that much.

    Mapping a file and taking one page after the other lets the disk wait, although it could read ahead.
    A file that is being read ahead already is left alone, and one that is not there is reported elsewhere.
    """
    wanted = [path for path in files if path.is_file() and path.resolve() not in _being_read]
    sizes = {path: path.stat().st_size for path in wanted}
    if sum(sizes.values()) > free_memory() / 2:
        sizes = {}
    own = {path.resolve() for path in sizes}
    places = [(path, start) for path, size in sizes.items() for start in range(0, size, BLOCK)]
    turns, over = iter(places), threading.Event()

    def read() -> None:
        block = bytearray(BLOCK)
        while not over.is_set() and (place := next(turns, None)) is not None:
            _have_read(*place, block)

    count = min(READERS, len(places))
    readers = [threading.Thread(target=read, name="draftwood-reader", daemon=True) for _ in range(count)]
    _being_read.update(own)
    for reader in readers:
        reader.start()
    try:
        yield
    finally:
        _being_read.difference_update(own)
        over.set()
        for reader in readers:
            reader.join()


def _have_read(path: Path, start: int, block: bytearray) -> None:
    """Read a piece of a file unless it is in memory already. What cannot be read is told of by who needs it."""
    with suppress(OSError), path.open("rb", buffering=0) as file:
        if not _is_in_memory(file.fileno(), start):
            file.seek(start)
            file.readinto(block)


def _is_in_memory(file: int, start: int) -> bool:
    """As far as the system tells."""
    try:
        return os.preadv(file, [bytearray(1)], start, os.RWF_NOWAIT) == 1
    except (AttributeError, OSError):
        return False


def free_memory() -> int:
    """Bytes that could be had; none where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable:")))
    except (OSError, StopIteration, ValueError):
        return 0


def give_back_memory() -> None:
    """Return what loading has freed to the system; allocators like to keep it."""
    gc.collect()
    library = ctypes.CDLL(None) if os.name == "posix" else None
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
    if hasattr(mmap, "MADV_DONTNEED"):
        for begin, end in _unwritten_files():
            library.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


def _unwritten_files() -> Iterator[tuple[int, int]]:
    """Where pages of files are mapped that cannot be written to and never were: begin and end.

    They count as our memory, and starting touches far more of torch's libraries than running does. What is needed again
    the system has at hand.
    """
    try:
        lines = Path("/proc/self/smaps").read_text().splitlines()
    except OSError:  # not on Linux
        return
    begin = end = 0
    for line in lines:
        if mapped := _MAPPED.match(line):
            begin, end = int(mapped[1], 16), int(mapped[2], 16)
            if "w" in mapped[3] or mapped[4] == "0":  # no file
                begin = end
        elif end > begin and line.split() == ["Anonymous:", "0", "kB"]:
            yield begin, end


def launched_size() -> int:
    """Ranks that torchrun, or rank 0 of ours, has started; 0: none."""
    return int(os.environ.get("WORLD_SIZE", 0)) if "RANK" in os.environ else 0


def is_follower(size: int) -> bool:
    """Whether this process is a rank of `size`, and not the first."""
    return size > 1 and launched_size() == size and os.environ["RANK"] != "0"


def processor_features() -> str:
    """The processor's name and instruction sets, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    telling = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(telling)))
