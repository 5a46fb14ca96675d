"""What can go wrong because of the caller, as exceptions whose message says what to do about it.

Invariants of our own are asserted; nothing here is ever raised for those.
"""

from __future__ import annotations


class DraftwoodError(Exception):
    """Any mistake of the caller's that we can name; the message is one paragraph and says what to do."""

    code: str | None = None  # a stable name for programs, where a client may want to react to this error


class CheckpointError(DraftwoodError):
    """A model is missing, truncated, or of a kind we cannot run."""


class TokenizerError(DraftwoodError):
    """A text cannot be turned into tokens, or a conversation into a prompt."""


class InvalidRequest(DraftwoodError, ValueError):
    """A request that cannot run: empty prompt, contradictory sampling parameters, too long for the model."""


class ContextLengthExceeded(InvalidRequest):
    """A prompt that does not fit into the model's context window or the cache."""

    code = "context_length_exceeded"


class QueueFull(InvalidRequest):
    """Too many answers are waiting already."""

    code = "queue_full"


class EngineDead(DraftwoodError):
    """The engine has ended, and with it what it was answering."""

    code = "engine_dead"


class WireError(DraftwoodError):
    """What came from another process cannot be read."""


class GrammarError(DraftwoodError):
    """A grammar that cannot be followed: malformed, beyond its limits, or without a token to go on with."""

    code = "grammar_error"


class StorageError(DraftwoodError):
    """Something could not be written: the disk is full, or the folder cannot be written to."""


class IncompatibleParts(DraftwoodError, ValueError):
    """Parts that would not be exact together: a law with a draw it is not made for, two vocabularies."""
