"""An answer on its way, for callers that wait for results: its events, and what they add up to."""

from __future__ import annotations

from dataclasses import dataclass, field

from draftwood.engine.requests import EngineRequest
from draftwood.request import Completion, Event, Result, TokenLogprob


@dataclass
class Answering:
    """A request on its way."""

    prompt: str | None
    request: EngineRequest
    events: list[list[Event]] = field(init=False)  # of each answer
    num_ended: int = 0

    def __post_init__(self) -> None:
        self.events = [[] for _ in range(self.request.params.n)]

    def add(self, event: Event) -> None:
        """News of an answer."""
        self.events[event.index].append(event)
        self.num_ended += event.finished

    @property
    def done(self) -> bool:
        """Whether all answers have ended."""
        return self.num_ended == len(self.events)

    def result(self) -> Result:
        """All answers; once they have ended."""
        completions = [self._completion(i, events) for i, events in enumerate(self.events)]
        scored: list[tuple[TokenLogprob | None, ...]] = [e.prompt_logprobs for e in self.events[0] if e.prompt_logprobs]
        return Result(self.prompt, self.request.tokens, tuple(completions), scored[0] if scored else ())

    def _completion(self, i: int, events: list[Event]) -> Completion:
        end = events[-1]
        assert end.finish_reason is not None
        return Completion(
            index=i,
            text="".join(event.text for event in events),
            token_ids=tuple(token for event in events for token in event.token_ids),
            accepted=tuple(flag for event in events for flag in event.accepted),
            finish_reason=end.finish_reason,
            stats=end.stats,
            seed=end.stats.seed,
            logprobs=tuple(entry for event in events for entry in event.logprobs),
            error=end.error,
        )
