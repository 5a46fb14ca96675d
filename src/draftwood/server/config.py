"""What a server is told besides which engine to run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from draftwood.errors import InvalidRequest
from draftwood.server.keys import ApiKey, check_distinct

POSITIVE = (
    "max_queue",
    "deadline",
    "stall_seconds",
    "max_body",
    "max_bodies",
    "max_connections",
    "max_header",
    "header_timeout",
    "body_timeout",
    "write_timeout",
    "keep_alive",
)


@dataclass(frozen=True)
class ServerConfig:
    """Names, keys and limits."""

    model_name: str  # what clients call the model
    api_keys: tuple[str | ApiKey, ...] = ()  # none: no key is needed
    max_queue: int = 256  # answers that may wait, beside those that run
    deadline: float = 600.0  # seconds a request may take, and the most it may ask for
    drain_seconds: float = 30.0  # how long SIGTERM waits for answers under way
    stall_seconds: float = 120.0  # a step that takes longer is taken for dead
    max_body: int = 8 << 20  # bytes of one request
    max_bodies: int = 256 << 20  # bytes of all requests that are being received
    max_connections: int = 1000  # fewer where the process may not open as many files
    max_header: int = 64 << 10  # bytes of a request's line and headers
    header_timeout: float = 10.0  # seconds a client has to send them
    body_timeout: float = 60.0  # seconds it has to send the body
    write_timeout: float = 60.0  # seconds it may leave an answer unread
    keep_alive: int = 5  # seconds an idle connection stays open
    vllm_names: bool = True  # also export metrics under vLLM's names: routers read these by default
    allowed_hosts: tuple[str, ...] = ()  # names of the server, beside localhost and addresses; "*": any
    trusted_proxies: tuple[str, ...] = ()  # addresses or networks whose X-Forwarded-* headers are believed
    cors_origins: tuple[str, ...] = ()  # origins whose pages may call the server from a browser; "*": all
    manage_port: int | None = None  # /manage answers there, on loopback, and nowhere else

    def __post_init__(self) -> None:
        for name in POSITIVE:
            if getattr(self, name) <= 0:
                raise InvalidRequest(f"{name} must be greater than 0.")
        if self.drain_seconds < 0:
            raise InvalidRequest("drain_seconds must be at least 0.")
        if self.manage_port is not None and not 0 <= self.manage_port < 1 << 16:
            raise InvalidRequest("manage_port must lie between 0 and 65535.")
        check_distinct(self.keys)

    @cached_property
    def keys(self) -> tuple[ApiKey, ...]:
        """All keys, those without a name numbered."""
        given = enumerate(self.api_keys, 1)
        return tuple(key if isinstance(key, ApiKey) else ApiKey(f"key-{i}", key) for i, key in given)
