"""What a server is told besides which engine to run."""

from __future__ import annotations

from dataclasses import dataclass

from draftwood.errors import InvalidRequest


@dataclass(frozen=True)
class ServerConfig:
    """Names, doors and limits."""

    model_name: str  # what clients call the model
    api_keys: tuple[str, ...] = ()  # none: everybody may ask
    max_queue: int = 256  # answers that may wait, beside those that run
    deadline: float = 600.0  # seconds a request may take, and the most it may ask for
    drain_seconds: float = 30.0  # how long SIGTERM waits for answers under way
    stall_seconds: float = 120.0  # a step that takes longer is taken for dead
    max_body: int = 8 << 20  # bytes
    vllm_names: bool = False  # also export metrics under vLLM's names

    def __post_init__(self) -> None:
        for name in ("max_queue", "deadline", "stall_seconds", "max_body"):
            if getattr(self, name) <= 0:
                raise InvalidRequest(f"{name} must be greater than 0.")
        if self.drain_seconds < 0:
            raise InvalidRequest("drain_seconds must be at least 0.")
        if any(not key or not key.isascii() for key in self.api_keys):
            raise InvalidRequest("An API key must be ASCII text of at least one character: it travels in a header.")
