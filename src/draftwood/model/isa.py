"""Some virtual machines announce AMX and then fault on its instructions; oneDNN believes them and the process dies.

Before bfloat16 is first used on such a processor, a child process tries one small product. If that kills it, oneDNN is
told to leave AMX alone, which it heeds only if it has not been used yet in this process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

VARIABLE = "ONEDNN_MAX_CPU_ISA"
WITHOUT_AMX = "AVX512_CORE_BF16"
PROBE = "import torch; torch.mm(*(torch.zeros(32, 32, dtype=torch.bfloat16),) * 2)"


def announces_amx() -> bool:
    """Whether the processor says it has AMX for bfloat16; False where that cannot be read."""
    try:
        return "amx_bf16" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


@cache
def amx_works() -> bool:
    """Whether a bfloat16 product survives in a process of its own."""
    return subprocess.run([sys.executable, "-c", PROBE], capture_output=True, check=False).returncode >= 0


def avoid_broken_amx() -> None:
    """Keep oneDNN from AMX where it is announced but broken; the user's own setting is left alone."""
    if VARIABLE not in os.environ and announces_amx() and not amx_works():
        os.environ[VARIABLE] = WITHOUT_AMX
