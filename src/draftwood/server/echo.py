"""Prompts that are repeated before their answers, with where each token stands in the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draftwood.engine.intake import Prompt
from draftwood.model.tokenizer import Detokenizer, Tokenizer
from draftwood.server.errors import invalid

MOST_ENTRIES = 500_000  # log-probabilities of prompts in one response: each takes a hundred bytes, and as many in JSON


@dataclass(frozen=True)
class Echo:
    """A prompt as it is repeated."""

    text: str
    tokens: tuple[int, ...] = ()  # only where log-probabilities are told with it
    starts: tuple[int, ...] = ()  # characters before each of them

    @classmethod
    def of(cls, prompt: Prompt, tokens: Sequence[int], tokenizer: Tokenizer) -> Echo:
        """Without log-probabilities: a text as it was sent, tokens as they read."""
        return cls(prompt if isinstance(prompt, str) else tokenizer.decode(tokens))

    @classmethod
    def scored(cls, prompt: Prompt, tokens: Sequence[int], tokenizer: Tokenizer) -> Echo:
        """With log-probabilities."""
        reader = Detokenizer(tokenizer)
        pieces, starts, length = [], [], 0
        for token in tokens:
            starts.append(length)
            pieces.append(reader.push([token]))
            length += len(pieces[-1])
        read = "".join(pieces) + reader.flush()
        return cls(prompt if isinstance(prompt, str) else read, tuple(tokens), tuple(starts))


def check_entries(num_tokens: int, n: int, logprobs: int) -> None:
    """Refuse what would make a response of hundreds of megabytes out of a short request."""
    entries = num_tokens * n * (1 + logprobs)
    if entries > MOST_ENTRIES:
        raise invalid(
            f"echo with logprobs would return {entries} log-probabilities of prompt tokens, and the limit is "
            f"{MOST_ENTRIES}: send fewer or shorter prompts in one request, or lower n or logprobs.",
            "logprobs",
        )
