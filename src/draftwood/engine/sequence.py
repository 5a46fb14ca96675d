"""One answer in the making. The scheduler is the only one who changes it."""

from __future__ import annotations

import math
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

from draftwood.batch import Images, Source
from draftwood.cache.row_settings import RowSettings
from draftwood.engine.text import TextStream
from draftwood.errors import GrammarError
from draftwood.protocols import PREDICTED, Constraint, Pace
from draftwood.request import Event, FinishReason, SamplingParams, SpeculationStats, TokenLogprob

DEEP = 1 << 20  # deeper than any tree
_MARK = "\0"  # begins the salts of sequences that have more than the caller's
HEAD_START = 10.0  # seconds: what a level of priority is worth, and a first token that is promised for no time
RECENT = 0.2  # weight of the last step in what drafts gain a sequence


@dataclass(eq=False)  # itself, not its like
class Sequence:
    """Committed tokens and everything that decides when they are enough."""

    id: int  # in order of arrival: the smaller, the older
    request_id: int
    index: int
    tokens: list[int]  # of its source, prompt and answer
    params: SamplingParams
    seed: int
    max_length: int  # source, prompt and answer together
    stop_ids: frozenset[int]
    bad_words: tuple[tuple[int, ...], ...]
    text: TextStream
    arrived: float
    law: str = "match"
    lossless: bool = True
    reproducible: bool = True
    prediction: tuple[int, ...] = ()
    constraint: Constraint | None = None
    adapter: int = -1  # which of the target's adapters; -1: none
    cache_dtype: str = "auto"  # of the engine's keys and values
    source: Source | None = None  # what an encoder reads before the prompt
    images: Images | None = None  # what stands at the prompt's image tokens
    tenant: str = ""  # on whose behalf it runs: free places go to the tenant that has the fewest
    prompt_length: int = field(init=False)
    cached_prompt_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    drift: float = 0.0  # nan once it is not known
    admitted: float | None = None
    first_token: float | None = None
    prompt_logprobs: list[TokenLogprob | None] = field(init=False)  # of the prompt's first tokens; [] unless asked for
    turn: float = field(init=False)  # see `__post_init__`
    gain: float = field(init=False, default=1.0)  # accepted tokens of a step that drafted for it, lately
    _told_prompt: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        # By when it is due to begin. Whatever comes first has the earlier turn: turns never change, so a request waits
        # at most for those that come within its own head start, and none starves.
        slo = self.params.slo
        promised = HEAD_START if slo is None or slo.ttft_ms is None else min(slo.ttft_ms / 1000, HEAD_START)
        self.turn = self.arrived + promised + HEAD_START * self.params.priority
        self.prompt_length = len(self.tokens)
        asked = self.params.prompt_logprobs is not None and self.index == 0
        # Nothing comes before the first token; an encoder gives no distribution of what it reads.
        self.prompt_logprobs = [None] * (self.source_length + 1) if asked else []

    @property
    def source_length(self) -> int:
        """First tokens that an encoder reads, all of them together."""
        return 0 if self.source is None else len(self.source)

    def piece_end(self, end: int) -> int:
        """Where a piece of it that could end at `end` ends: a source is read as a whole, and so are rows of an image
        that see each other, whatever room there is.
        """
        return max(end if self.images is None else self.images.whole(end), self.source_length)

    @property
    def prefix_salt(self) -> str:
        """Pages are shared with sequences of the same one: what an encoder makes of a token depends on all others,
        an image token is another one for each image, and an adapter gives tokens keys of its own.
        """
        keys, salt = [part.key for part in (self.source, self.images) if part is not None], self.params.cache_salt
        if self.adapter < 0 and not keys and not salt.startswith(_MARK):
            return salt
        # What stands before the caller's part says itself where it ends: no caller can write what another has.
        return " ".join([_MARK, str(self.adapter), str(len(keys)), *keys, salt])

    @property
    def num_generated(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - self.prompt_length

    @property
    def _unscored(self) -> bool:
        return 0 < len(self.prompt_logprobs) < self.prompt_length

    @property
    def reusable_tokens(self) -> list[int]:
        """Tokens whose keys and values may come from the prefix cache, and one more. A prompt whose log-probabilities
        are still wanted has to be run from the first row on that has not been scored.
        """
        return self.tokens[: len(self.prompt_logprobs)] if self._unscored else self.tokens

    def scored_rows(self, start: int, end: int) -> range:
        """Of rows [start, end), those whose logits give a prompt token's log-probability that is still wanted.

        The row of a token scores the token behind it.
        """
        if not self._unscored:
            return range(0)
        return range(max(start, len(self.prompt_logprobs) - 1), min(end, self.prompt_length - 1))

    @property
    def deepest(self) -> int:
        """Draft tokens one behind the other that its request allows."""
        return DEEP if self.params.max_depth is None else self.params.max_depth

    def pace(self, now: float, average_gain: float) -> Pace | None:
        """What is promised for its next tokens; None: nothing, or there is no first one yet."""
        slo = self.params.slo
        if slo is None or slo.tpot_ms is None or self.first_token is None:
            return None
        each = slo.tpot_ms / 1000
        left = self.first_token + self.num_generated * each - now
        return Pace(each, left, self.gain / average_gain if average_gain else 1.0)

    def row_settings(self, vocab_size: int) -> RowSettings:
        """What the batch state holds of it besides its tokens. Stop tokens are those of the vocabulary that a minimum
        length defers.
        """
        stops = frozenset(token for token in self.stop_ids if token < vocab_size)
        deferred = stops if self.params.min_tokens else frozenset()
        return RowSettings(
            self.params, self.seed, self.prompt_length, self.max_length, self.deepest, deferred, self.adapter,
            self.source_length, 0 if self.images is None else self.images.shift,
        )  # fmt: skip

    def wanted_nodes(self, nodes: int) -> int:
        """Draft nodes it wants where others get `nodes`: also for what is predicted, within what its request allows."""
        nodes += PREDICTED if self.prediction else 0
        return nodes if self.params.max_nodes is None else min(nodes, self.params.max_nodes)

    def receive(
        self, gained: Tokens[int], num_accepted: int, num_drafted: int, now: float, drift: float = 0.0
    ) -> FinishReason | None:
        """Take a step's tokens one by one; whatever ends the answer cuts the rest off, accepted or not."""
        if self.constraint is not None and self.constraint.error is not None:
            raise GrammarError(self.constraint.error)
        if len(self.tokens) >= self.max_length:  # max_tokens is 0: only the prompt was to be read
            return FinishReason.LENGTH
        self.steps += 1
        self.drift += drift
        self.drafted += num_drafted
        if num_drafted:
            self.gain += RECENT * (num_accepted - self.gain)
        self.first_token = now if self.first_token is None else self.first_token
        for i, token in enumerate(gained):
            self.tokens.append(token)
            self.accepted += i < num_accepted
            reason = self._reason_to_stop(token, i < num_accepted)
            if reason is not None:
                return reason
        return None

    def _reason_to_stop(self, token: int, accepted: bool) -> FinishReason | None:
        if token in self.stop_ids:
            return FinishReason.STOP
        if self.text.push(token, accepted, may_stop=self.num_generated > self.params.min_tokens):
            return FinishReason.STOP
        if len(self.tokens) >= self.max_length:
            return FinishReason.LENGTH
        return None

    def stats(self, now: float) -> SpeculationStats:
        """What speculation has done so far."""
        return SpeculationStats(
            steps=self.steps,
            drafted=self.drafted,
            accepted=self.accepted,
            num_tokens=self.num_generated,
            prompt_tokens=self.prompt_length,
            cached_prompt_tokens=self.cached_prompt_tokens,
            preemptions=self.preemptions,
            seconds=now - self.arrived,
            queued_seconds=(self.admitted or now) - self.arrived,
            first_token_seconds=(self.first_token or now) - self.arrived,
            law=self.law,
            lossless=self.lossless,
            drift=None if math.isnan(self.drift) else self.drift,
            seed=self.seed,
            reproducible=self.reproducible,
            adapter=self.params.adapter,
            cache_dtype=self.cache_dtype,
            slo=self.params.slo,
        )

    def event(
        self,
        num_new: int,
        num_accepted: int,
        reason: FinishReason | None,
        now: float,
        logprobs: Tokens[TokenLogprob] = (),
        error: str | None = None,
        error_code: str | None = None,
    ) -> Event:
        """The news of its last `num_new` tokens, the first `num_accepted` of which were guessed."""
        if reason is not None:
            self.text.finish()
        pieces = self.text.take()
        return Event(
            request_id=self.request_id,
            index=self.index,
            token_ids=tuple(self.tokens[len(self.tokens) - num_new :]),
            accepted=tuple(i < num_accepted for i in range(num_new)),
            text="".join(text for text, _ in pieces),
            pieces=pieces,
            finish_reason=reason,
            stats=self.stats(now),
            logprobs=tuple(logprobs[:num_new]),
            error=error,
            error_code=error_code,
            prompt_logprobs=self._news_of_prompt(),
        )

    def _news_of_prompt(self) -> tuple[TokenLogprob | None, ...]:
        """The prompt's log-probabilities, once, when they are complete."""
        if self._told_prompt or not self.prompt_logprobs or self._unscored:
            return ()
        self._told_prompt = True
        return tuple(self.prompt_logprobs[self.source_length :])
