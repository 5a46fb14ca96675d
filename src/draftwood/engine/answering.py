"""A request on its way through the Python interface: its events, and what they add up to."""

from __future__ import annotations

from dataclasses import dataclass, field

from draftwood.engine.sequence import Sequence as Answer
from draftwood.request import Completion, Event, Result, TokenLogprob


@dataclass
class Answering:
    """A request on its way: its events, and what they add up to."""

    prompt: str | None
    answers: list[Answer]
    texts: list[list[str]] = field(init=False)
    accepted: list[list[bool]] = field(init=False)
    logprobs: list[list[TokenLogprob]] = field(init=False)
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    ends: dict[int, Event] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.texts, self.accepted, self.logprobs = ([[] for _ in self.answers] for _ in range(3))

    def add(self, event: Event) -> None:
        """What has happened."""
        self.texts[event.index].append(event.text)
        self.accepted[event.index].extend(event.accepted)
        self.logprobs[event.index].extend(event.logprobs)
        self.prompt_logprobs = event.prompt_logprobs or self.prompt_logprobs
        if event.finished:
            self.ends[event.index] = event

    @property
    def done(self) -> bool:
        """Whether all answers have ended."""
        return len(self.ends) == len(self.answers)

    def result(self) -> Result:
        """Once they have."""
        completions = [self._completion(i, answer) for i, answer in enumerate(self.answers)]
        first = self.answers[0]
        prompt = tuple(first.tokens[first.source_length : first.prompt_length])
        return Result(self.prompt, prompt, tuple(completions), self.prompt_logprobs)

    def _completion(self, i: int, answer: Answer) -> Completion:
        end = self.ends[i]
        assert end.finish_reason is not None
        return Completion(
            index=i,
            text="".join(self.texts[i]),
            token_ids=tuple(answer.tokens[answer.prompt_length :]),
            accepted=tuple(self.accepted[i]),
            finish_reason=end.finish_reason,
            stats=end.stats,
            seed=answer.seed,
            logprobs=tuple(self.logprobs[i]),
            error=end.error,
        )
