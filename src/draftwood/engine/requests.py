"""A request as an engine takes it."""

from __future__ import annotations

from dataclasses import dataclass

from draftwood.batch import Images, Source
from draftwood.request import SamplingParams


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request that was checked: all that decides its answers, as data."""

    id: int
    tokens: tuple[int, ...]  # of the prompt
    params: SamplingParams  # with the law that it runs under
    seed: int
    tenant: str = ""  # on whose behalf it runs
    prediction: tuple[int, ...] = ()  # tokens of `params.prediction`
    bad_words: tuple[tuple[int, ...], ...] = ()  # tokens of `params.bad_words`
    source: Source | None = None  # what an encoder reads before the prompt
    images: Images | None = None  # what stands at the prompt's image tokens

    @property
    def prompt_length(self) -> int:
        """Tokens of its source and prompt."""
        return len(self.tokens) + (0 if self.source is None else len(self.source))
