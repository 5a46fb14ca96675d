"""What can go wrong because of the caller, as exceptions whose message says what to do about it.

Invariants of our own are asserted; nothing here is ever raised for those.
"""

from __future__ import annotations


class DraftwoodError(Exception):
    """Any mistake of the caller's that we can name; the message is one paragraph and says what to do."""


class CheckpointError(DraftwoodError):
    """A model is missing, truncated, or of a kind we cannot run."""


class TokenizerError(DraftwoodError):
    """A text cannot be turned into tokens, or a conversation into a prompt."""


class InvalidRequest(DraftwoodError, ValueError):
    """A request that cannot run: empty prompt, contradictory sampling parameters, too long for the model."""


class GrammarError(DraftwoodError):
    """A grammar nobody can follow: malformed, beyond its limits, or without a word to go on with."""


class StorageError(DraftwoodError):
    """Something could not be written: the disk is full, or the folder cannot be written to."""


class IncompatibleParts(DraftwoodError, ValueError):
    """Parts that would not be exact together: a law with a draw it is not made for, two vocabularies."""
