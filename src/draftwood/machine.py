"""What this machine is, and where we keep what belongs to it."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def home() -> Path:
    """`$DRAFTWOOD_HOME`, or a folder of ours in the user's cache."""
    own = os.environ.get("DRAFTWOOD_HOME")
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(own).expanduser() if own else Path(cache).expanduser() / "draftwood"


def processor_features() -> str:
    """The processor's name and instruction sets, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    telling = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(telling)))
