"""Answers as they grow, piece by piece: text, log-probabilities that belong to it, calls, and what speculation did.

A log-probability is told with the text of its token, and never for a token that a stop string took back.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from draftwood.drafters.predicted import Alignment
from draftwood.model.tokenizer import Tokenizer
from draftwood.request import Event, FinishReason, SpeculationStats, TokenLogprob
from draftwood.server.calls import Call, CallReader, CallStart, Part, Words, calls_of
from draftwood.server.logprob_buffer import LogprobBuffer, Spoken
from draftwood.server.tracing import Tracer


@dataclass(frozen=True)
class Delta:
    """What an event adds to an answer."""

    parts: list[Part]
    tokens: list[Spoken[TokenLogprob]]
    steps: list[dict[str, Any]]  # where the answer is traced
    finish: str | None

    @property
    def text(self) -> str:
        """Words outside of calls."""
        return "".join(part.text for part in self.parts if isinstance(part, Words))

    @property
    def empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not (self.parts or self.tokens or self.steps or self.finish)


@dataclass
class Figures:
    """What speculation did for one answer, step by step."""

    accepted: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    _before: int = 0

    def add(self, event: Event) -> None:
        """An event with tokens is a step."""
        self.stats = event.stats
        if event.token_ids:
            self.accepted.append(sum(event.accepted))
            self.drafted.append(event.stats.drafted - self._before)
            self._before = event.stats.drafted

    def report(self, *, detailed: bool) -> dict[str, Any]:
        """vLLM's block, by the steps that guessed something, and what the law promises."""
        steps = [(a, d) for a, d in zip(self.accepted, self.drafted, strict=True) if d]
        accepted, drafted = sum(a for a, _ in steps), sum(d for _, d in steps)
        most = max((a for a, _ in steps), default=0)
        counts = Counter(a for a, _ in steps)
        block: dict[str, Any] = {
            "mean_acceptance_length": 1 + accepted / len(steps) if steps else 1.0,
            "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
            "acceptance_histogram": [counts[i] for i in range(most + 1)] if steps else [],
            "num_spec_steps": len(steps),
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafted,
            "num_spec_tokens": max((d for _, d in steps), default=0),
            "law": self.stats.law,
            "lossless": self.stats.lossless,
            "reproducible": self.stats.reproducible,
            "members": dict(self.stats.members),
        }
        if detailed:
            block |= {"per_step_accepted": self.accepted, "per_step_drafted": self.drafted}
        return block


class Choice:
    """One answer of a request."""

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        *,
        reads_calls: bool,
        prediction: tuple[int, ...] = (),
        tracer: Tracer | None = None,
        tells_end: bool = False,  # log-probabilities also of tokens that read as nothing, such as the end of text
    ) -> None:
        self.index = index
        self.parts: list[Part] = []
        self.num_calls = 0
        self.tokens: list[Spoken[TokenLogprob]] = []
        self.prompt: tuple[TokenLogprob | None, ...] = ()  # where log-probabilities of the prompt are wanted
        self.finish: str | None = None
        self.stats = SpeculationStats()
        self.figures = Figures()
        self.alignment = Alignment(prediction) if prediction else None
        self._tokenizer = tokenizer
        self._margin: LogprobBuffer[TokenLogprob] = LogprobBuffer(tokenizer)
        self._tracer = tracer
        self._reader = CallReader() if reads_calls else None
        self._tells_end = tells_end

    @property
    def text(self) -> list[str]:
        """Words outside of calls, in pieces."""
        return [part.text for part in self.parts if isinstance(part, Words)]

    @property
    def calls(self) -> list[Call]:
        """The calls, as far as they are written."""
        return calls_of(self.parts)

    def add(self, event: Event) -> Delta:
        """Take the news in, and say what they add."""
        self.stats = event.stats
        self.figures.add(event)
        if self.alignment is not None:
            self.alignment.follow(event.token_ids)
        self.prompt = event.prompt_logprobs or self.prompt
        # In a conversation, what reads as nothing, such as the end of text, is not told.
        readable = [e for e in event.logprobs if self._tells_end or self._tokenizer.piece(e.token)]
        tokens = self._margin.add(readable, event)
        steps = [] if self._tracer is None else self._tracer.add(event)
        parts = self._read(event)
        if event.finished:
            self.finish = self._finish(event.finish_reason)
        self.parts += parts
        self.num_calls += sum(isinstance(part, CallStart) for part in parts)
        self.tokens += tokens
        return Delta(parts, tokens, steps, self.finish)

    def _read(self, event: Event) -> list[Part]:
        if self._reader is None:
            return [Words(event.text)] if event.text else []
        parts = self._reader.feed(event.text)
        return parts + self._reader.finish() if event.finished else parts

    def _finish(self, reason: FinishReason | None) -> str:
        """An answer that ends inside a call, by a stop string or at its limit, is not finished by its calls."""
        reader = self._reader
        if reason == FinishReason.STOP and reader is not None and reader.num_calls and not reader.cut_off:
            return "tool_calls"
        return str(reason)


def usage(choices: list[Choice], n: int, prompt_tokens: int) -> dict[str, Any]:
    """What a request with `n` answers a prompt took. Guesses that came to nothing are no tokens of an answer."""
    completion = sum(choice.stats.num_tokens for choice in choices)
    aligned = [choice.alignment for choice in choices if choice.alignment is not None]
    accepted = [min(a.matched, len(a.expected)) for a in aligned]
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
        # Further answers share the first one's prompt, which saves nothing.
        "prompt_tokens_details": {"cached_tokens": sum(choice.stats.cached_prompt_tokens for choice in choices[::n])},
        "completion_tokens_details": {
            "accepted_prediction_tokens": sum(accepted),
            "rejected_prediction_tokens": sum(len(a.expected) for a in aligned) - sum(accepted),
            "reasoning_tokens": 0,
            "audio_tokens": 0,
        },
        "reproducible": all(choice.stats.reproducible for choice in choices),
    }
