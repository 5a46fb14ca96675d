"""What a caller asks for and what comes back: plain data, no tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from draftwood.errors import InvalidRequest

SEED_LIMIT = 1 << 63
# Beyond these a float32 logit would overflow, and a row of infinities has no distribution.
LARGEST_BIAS = 1e30
LEAST_TEMPERATURE = 1e-6  # whatever is smaller means 0
PENALTIES = 1e-6, 1e6  # repetition penalties


MOST_PRIORITY = 100  # either way


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request is promised, as service-level objectives; None: nothing.

    Steps are sized to keep promises first. One that the machine cannot keep is broken, and counted; no request is
    refused or ended for it.
    """

    ttft_ms: float | None = None  # from submission to the first token
    tpot_ms: float | None = None  # for each token behind it, on average over the answer

    def __post_init__(self) -> None:
        for name in ("ttft_ms", "tpot_ms"):
            value = getattr(self, name)
            if value is not None and not (_number(value) and value > 0):
                raise InvalidRequest(f"slo.{name} must be a number of milliseconds above 0, or None for no promise.")


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"  # end of text, a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the model's context window
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled; everything applies alike with and without speculation.

    Order of application at every position, along that position's own history: logit bias and bad words,
    repetition / presence / frequency penalties, grammar, minimum length, temperature, top-k, top-p, min-p.

    `min_tokens`: the first so many tokens of the answer are no stop tokens, and no stop string that they complete ends
    it. A grammar wins: where it allows nothing but the end, the answer ends.

    `max_tokens` may be 0 where `prompt_logprobs` is asked for: the prompt is read, and nothing is generated.
    """

    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and answer
    presence_penalty: float = 0.0  # over the answer
    frequency_penalty: float = 0.0  # over the answer
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[str, ...] = ()
    max_tokens: int = 256
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None  # the same answer again, unless a law is named, see `SpeculationStats.reproducible`
    n: int = 1
    logprobs: int | None = None  # None: none; k: the chosen token's and the k best alternatives'
    prompt_logprobs: int | None = None  # the same for each token of the prompt but the first
    law: str | None = None  # an acceptance law for this request alone, such as "block"; None: the engine's
    drafter: str | None = None  # one of the drafters the engine offers; None: its own
    adapter: str | None = None  # one of the engine's LoRA adapters; None: the model itself
    max_nodes: int | None = None  # draft nodes a step; 0: plain decoding; None: as many as the engine likes
    max_depth: int | None = None  # draft tokens one behind the other; None: as many as the engine likes
    prediction: str = ""  # what the answer will probably resemble: guessed along with the drafter's own ideas
    grammar: str | None = None  # what the answer may be, see `model.grammar`
    trace: bool = False  # tell of every step what was guessed and how likely it was, in `Event.step`
    cache_salt: str = ""  # prompts share cached prefixes only with prompts of the same salt
    slo: Slo | None = None  # what it is promised
    priority: int = 0  # the smaller, the sooner; see `Sequence.turn`

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _as_tuple(self.stop))
        object.__setattr__(self, "bad_words", _as_tuple(self.bad_words))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        if _number(self.temperature) and 0 < self.temperature < LEAST_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)
        for message in self._problems():
            raise InvalidRequest(message)

    def _problems(self) -> list[str]:
        checks = (
            (_number(self.temperature) and self.temperature >= 0, "temperature must be a finite number >= 0"),
            (_integer(self.top_k) and self.top_k >= 0, "top_k must be an integer >= 0 (0 switches it off)"),
            (_number(self.top_p) and 0 < self.top_p <= 1, "top_p must lie in (0, 1]"),
            (_number(self.min_p) and 0 <= self.min_p <= 1, "min_p must lie in [0, 1]"),
            (
                _number(self.repetition_penalty) and PENALTIES[0] <= self.repetition_penalty <= PENALTIES[1],
                "repetition_penalty must be a number from {:g} to {:g} (1 switches it off)".format(*PENALTIES),
            ),
            (
                _number(self.presence_penalty) and abs(self.presence_penalty) <= 2,
                "presence_penalty must lie in [-2, 2]",
            ),
            (
                _number(self.frequency_penalty) and abs(self.frequency_penalty) <= 2,
                "frequency_penalty must lie in [-2, 2]",
            ),
            *self._length_checks(),
            (
                self.seed is None or (_integer(self.seed) and -SEED_LIMIT <= self.seed < SEED_LIMIT),
                "seed must be a 64-bit integer or None",
            ),
            (_integer(self.n) and 1 <= self.n <= 128, "n must be an integer from 1 to 128"),
            (
                self.n == 1 or self.temperature > 0,
                "n > 1 at temperature 0 would give the same answer n times; raise the temperature or ask once",
            ),
            (
                self.logprobs is None or (_integer(self.logprobs) and 0 <= self.logprobs <= 100),
                "logprobs must be None or an integer from 0 to 100",
            ),
            (
                self.prompt_logprobs is None or (_integer(self.prompt_logprobs) and 0 <= self.prompt_logprobs <= 100),
                "prompt_logprobs must be None or an integer from 0 to 100",
            ),
            (
                all(isinstance(s, str) and s for s in self.stop),
                "stop strings must be texts of at least one character",
            ),
            (
                all(isinstance(s, str) and s for s in self.bad_words),
                "bad words must be texts of at least one character",
            ),
            (
                all(_integer(t) and t >= 0 for t in self.stop_token_ids),
                "stop_token_ids must be integers >= 0",
            ),
            (
                all(_integer(t) and t >= 0 and _number(b) for t, b in self.logit_bias.items())
                and all(abs(b) <= LARGEST_BIAS for b in self.logit_bias.values()),
                f"logit_bias must map token ids to numbers from {-LARGEST_BIAS:g} to {LARGEST_BIAS:g}",
            ),
        )
        return [f"{message}." for holds, message in (*checks, *self._guessing_checks()) if not holds]

    def _length_checks(self) -> tuple[tuple[bool, str], ...]:
        least = 1 if self.prompt_logprobs is None else 0
        limits = _integer(self.max_tokens) and self.max_tokens >= least
        return (
            (limits, "max_tokens must be an integer >= 1, or 0 where only prompt_logprobs are wanted"),
            (_integer(self.min_tokens) and self.min_tokens >= 0, "min_tokens must be an integer >= 0"),
            (
                not limits or not _integer(self.min_tokens) or self.min_tokens <= self.max_tokens,
                f"min_tokens is {self.min_tokens} and max_tokens is {self.max_tokens}: an answer cannot be longer than "
                "max_tokens, so lower min_tokens or raise max_tokens",
            ),
        )

    def _guessing_checks(self) -> tuple[tuple[bool, str], ...]:
        return (
            (
                self.law is None or (isinstance(self.law, str) and self.law != ""),
                "law must be the name of an acceptance law, or None for the engine's own",
            ),
            (
                self.drafter is None or (isinstance(self.drafter, str) and self.drafter != ""),
                "drafter must be the name of a drafter that the engine offers, or None for its own",
            ),
            (
                self.adapter is None or (isinstance(self.adapter, str) and self.adapter != ""),
                "adapter must be the name of one of the engine's adapters, or None for the model itself",
            ),
            (
                self.max_nodes is None or (_integer(self.max_nodes) and self.max_nodes >= 0),
                "max_nodes must be None or an integer >= 0 (0 is plain decoding)",
            ),
            (
                self.max_depth is None or (_integer(self.max_depth) and self.max_depth >= 1),
                "max_depth must be None or an integer >= 1",
            ),
            (isinstance(self.trace, bool), "trace must be True or False"),
            (isinstance(self.cache_salt, str), "cache_salt must be a text"),
            (self.slo is None or isinstance(self.slo, Slo), "slo must be an Slo(ttft_ms=…, tpot_ms=…), or None"),
            (
                _integer(self.priority) and abs(self.priority) <= MOST_PRIORITY,
                f"priority must be an integer from -{MOST_PRIORITY} (soonest) to {MOST_PRIORITY}",
            ),
        )

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0

    @property
    def truncates(self) -> bool:
        """Whether tokens are removed from the distribution before drawing."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def penalises(self) -> bool:
        """Whether a token's logit depends on the tokens before it."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


def _as_tuple(value: str | Sequence[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: object) -> bool:
    return (isinstance(value, float) or _integer(value)) and math.isfinite(value)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probabilities of an answer's or prompt's token under the model itself, before temperature and truncation."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # the likeliest alternatives, best first


class TokenKind(StrEnum):
    """Where an emitted token came from."""

    ACCEPTED = "accepted"  # a guess that stayed
    BONUS = "bonus"  # the target's own, behind a path that was accepted to its end
    CORRECTION = "correction"  # the target's own, where none of the guesses stayed
    PLAIN = "plain"  # the target's own, where nothing had been guessed in the step


@dataclass(frozen=True, slots=True)
class TracedToken:
    """An emitted token, and how it came about."""

    token: int
    kind: TokenKind
    depth: int  # its place in the step, from 1
    node: int | None  # of the tree, if it was guessed
    p: float | None  # as in `GuessedTree`
    q: float | None


@dataclass(frozen=True, slots=True)
class GuessedTree:
    """What was guessed for one answer in one step; node 0 is the root, the last token that was certain before it.

    `p` is the target's probability of a node's token behind its parent, as the request samples; at temperature 0 it is
    the model's own, since the request's would be 0 or 1. `q` is the drafter's, where the token was drawn, not chosen.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]  # -1 at the root
    p: tuple[float | None, ...]  # None at the root
    q: tuple[float | None, ...]
    accepted: tuple[bool, ...]  # the root included


@dataclass(frozen=True, slots=True)
class StepTrace:
    """What one step did for one answer."""

    tree: GuessedTree | None  # None: nothing was guessed
    emitted: tuple[TracedToken, ...]
    num_sequences: int  # that the step ran
    num_rows: int
    why: str = ""  # as many nodes were drafted as were
    expected_gain: float | None = None  # times as many tokens a second as without drafts
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """What speculation did for one answer."""

    steps: int = 0  # target forwards that gave this answer at least one token
    drafted: int = 0  # draft nodes the target scored for it
    accepted: int = 0  # emitted tokens that were guessed right
    num_tokens: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0  # found in the prefix cache
    preemptions: int = 0
    seconds: float = 0.0  # from submission to the last token
    queued_seconds: float = 0.0  # of them, before it first ran
    first_token_seconds: float = 0.0
    law: str = "match"
    lossless: bool = True  # whether the law keeps the model's own distribution
    drift: float | None = 0.0  # how far it may have moved it: total variation of the whole text; None: not known
    seed: int = 0  # of its draws
    reproducible: bool = True  # whether the same seed gives the same tokens, whatever the load and the other requests
    adapter: str | None = None  # of the request; None: the model itself
    cache_dtype: str = "auto"  # of keys and values; int8 and fp8 make another model, which speculation is exact for
    slo: Slo | None = None  # what was promised

    @property
    def seconds_per_token(self) -> float | None:
        """Mean time of each token behind the first; None without such tokens."""
        behind = self.num_tokens - 1
        return (self.seconds - self.first_token_seconds) / behind if behind > 0 else None

    @property
    def promises_kept(self) -> Mapping[str, bool]:
        """Whether each promise was kept, as far as the answer has come: of `ttft`, of `tpot`."""
        slo, each = self.slo or Slo(), self.seconds_per_token
        kept = {}
        if slo.ttft_ms is not None:
            kept["ttft"] = 1000 * self.first_token_seconds <= slo.ttft_ms
        if slo.tpot_ms is not None and each is not None:
            kept["tpot"] = 1000 * each <= slo.tpot_ms
        return kept

    @property
    def tokens_per_step(self) -> float:
        """Emitted tokens for each target forward; 1.0 is plain decoding."""
        return self.num_tokens / self.steps if self.steps else 0.0

    @property
    def acceptance(self) -> float:
        """Share of drafted nodes that were accepted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens over the whole time of the request, prompt processing included."""
        return self.num_tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Event:
    """News of one answer: the tokens a step gave it, or its end."""

    request_id: int
    index: int  # which of the request's n answers
    token_ids: tuple[int, ...]
    accepted: tuple[bool, ...]  # for each token, whether a drafter had guessed it
    text: str  # newly final text; stop strings are never part of it
    finish_reason: FinishReason | None
    stats: SpeculationStats
    pieces: tuple[tuple[str, bool], ...] = ()  # `text` in parts, each with whether a drafter had guessed it
    logprobs: tuple[TokenLogprob, ...] = ()
    error: str | None = None
    error_code: str | None = None  # `DraftwoodError.code` of what ended it
    step: StepTrace | None = None  # of the step that gave it tokens, if the request asks
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()  # in the first event of the first answer, if the request asks

    @property
    def finished(self) -> bool:
        """Whether this is the answer's last event."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished answer."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    accepted: tuple[bool, ...]
    finish_reason: FinishReason
    stats: SpeculationStats
    seed: int
    logprobs: tuple[TokenLogprob, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """All answers to one prompt."""

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()  # of each prompt token, None for the first; if asked for

    @property
    def text(self) -> str:
        """The first answer's text."""
        return self.completions[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The first answer's tokens."""
        return self.completions[0].token_ids

    @property
    def stats(self) -> SpeculationStats:
        """The first answer's statistics."""
        return self.completions[0].stats

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first answer ended."""
        return self.completions[0].finish_reason
