"""Where a step's time goes, off the hot path: two clock readings a section, sums only."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Timers:
    """Seconds and calls by section."""

    seconds: dict[str, float] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def measure(self, section: str) -> Iterator[None]:
        """Add the time of the block to `section`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[section] = self.seconds.get(section, 0.0) + time.perf_counter() - start
            self.calls[section] = self.calls.get(section, 0) + 1

    def reset(self) -> None:
        """Start over."""
        self.seconds.clear()
        self.calls.clear()
