"""Which replica answers: the one that has most likely seen the beginning of the prompt, unless it is too busy."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

IMBALANCE = 2  # requests that a replica may have more than the least busy one, or a quarter of what that one has


def favourite(prefix: str, replicas: Sequence[str]) -> str:
    """The replica of a prefix. One that comes or goes changes it only for its own share (rendezvous hashing)."""
    return max(replicas, key=lambda replica: hashlib.sha256(f"{prefix}\0{replica}".encode()).digest())


def ranked(prefix: str, busy: Mapping[str, int]) -> list[list[str]]:
    """Replicas in groups to be tried one after the other, by how many requests each has."""
    least = min(busy.values())
    idle = [name for name, count in busy.items() if count == least]
    if not prefix:
        return [idle, list(busy)]
    first = favourite(prefix, sorted(busy))
    return [[first], idle] if busy[first] - least < max(IMBALANCE, least // 4) else [idle, [first]]
