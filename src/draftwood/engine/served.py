"""What a server needs: an engine behind its border, and what makes requests for it."""

from __future__ import annotations

from typing import Protocol

from draftwood.engine.client import EngineClient
from draftwood.engine.intake import Intake


class ServedEngine(EngineClient, Protocol):
    """An engine with its intake."""

    @property
    def intake(self) -> Intake:
        """Makes requests of prompts."""
        ...
