"""API keys: who a request belongs to, and how much that caller may ask for.

A key file is TOML, one table a key:

    [alice]
    key = "sk-…"
    requests_per_minute = 120   # optional
    max_concurrent = 8          # optional: answers running or waiting at a time
    cache_salt = "team-a"       # optional: keys with the same salt share cached prefixes; the key's name if not given
"""

from __future__ import annotations

import hashlib
import hmac
import math
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftwood.errors import InvalidRequest

SETTINGS = frozenset({"key", "requests_per_minute", "max_concurrent", "cache_salt"})


@dataclass(frozen=True)
class ApiKey:
    """A key, the name it has in the log, and its limits."""

    name: str
    key: str = field(repr=False)
    requests_per_minute: float | None = None
    max_concurrent: int | None = None  # answers at a time, running and waiting
    cache_salt: str | None = None  # None: the name

    def __post_init__(self) -> None:
        if not isinstance(self.key, str) or not self.key or not self.key.isascii():
            raise InvalidRequest("An API key must be ASCII text of at least one character: it travels in a header.")
        limits = {"requests_per_minute": self.requests_per_minute, "max_concurrent": self.max_concurrent}
        for name, value in limits.items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (number and math.isfinite(value) and value > 0):
                raise InvalidRequest(f"{name} of the API key '{self.name}' must be a number greater than 0.")
        if self.cache_salt is not None and not isinstance(self.cache_salt, str):
            raise InvalidRequest(f"cache_salt of the API key '{self.name}' must be a text.")

    @property
    def salt(self) -> str:
        """Under which its prompts are cached."""
        return self.name if self.cache_salt is None else self.cache_salt


def read_key_file(path: Path) -> tuple[ApiKey, ...]:
    """The keys of a TOML file; refused as a whole if one of them cannot be used."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"The key file {path} cannot be read: {error}.") from error
    if not tables:
        raise InvalidRequest(f"The key file {path} has no keys: write a table [name] with key = '…' for each.")
    return tuple(_from_table(path, name, table) for name, table in tables.items())


def _from_table(path: Path, name: str, table: Any) -> ApiKey:
    if not isinstance(table, dict) or "key" not in table:
        raise InvalidRequest(f"{path}: [{name}] must be a table with key = '…'.")
    unknown = sorted(set(table) - SETTINGS)
    if unknown:
        raise InvalidRequest(f"{path}: [{name}] has {unknown[0]}, which is none of {', '.join(sorted(SETTINGS))}.")
    return ApiKey(name, **table)


class TokenBucket:
    """Allows so many events a minute, all of a minute's at once after a pause."""

    def __init__(self, per_minute: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = per_minute / 60
        self._size = max(per_minute, 1.0)
        self._left = self._size
        self._clock = clock
        self._filled = clock()

    def wait(self) -> float:
        """Take one event out. 0: done; else the seconds until there is one, and nothing is taken."""
        now = self._clock()
        self._left = min(self._size, self._left + (now - self._filled) * self._rate)
        self._filled = now
        if self._left < 1:
            return (1 - self._left) / self._rate
        self._left -= 1
        return 0.0


class Caller:
    """Whom a request is answered for, and what they may ask for."""

    def __init__(self, key: ApiKey | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = "" if key is None else key.name
        self.salt = "" if key is None else key.salt
        self.max_concurrent = math.inf if key is None or key.max_concurrent is None else key.max_concurrent
        per_minute = None if key is None else key.requests_per_minute
        self._bucket = None if per_minute is None else TokenBucket(per_minute, clock)

    def seconds_to_wait(self) -> float:
        """Count a request against the rate. 0: it may come in; else when the next one may."""
        return 0.0 if self._bucket is None else self._bucket.wait()


def check_distinct(keys: Sequence[ApiKey]) -> None:
    """Refuse keys that could be taken for one another."""
    for what, values in (("name", [key.name for key in keys]), ("key", [key.key for key in keys])):
        if len(set(values)) < len(values):
            raise InvalidRequest(f"Two API keys have the same {what}; give each its own.")


class KeyRing:
    """Finds the caller a key belongs to. Every key is compared, each in constant time."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self.callers = [Caller(key) for key in keys] or [Caller(None)]
        self._digests = [hashlib.sha256(key.key.encode()).digest() for key in keys]

    def caller_of(self, given: bytes) -> Caller | None:
        """Whose key it is; None: no key matches. Where there are no keys, every request has the same caller."""
        if not self._digests:
            return self.callers[0]
        digest = hashlib.sha256(given).digest()
        same = [hmac.compare_digest(digest, known) for known in self._digests]
        return self.callers[same.index(True)] if any(same) else None
