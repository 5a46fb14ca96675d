"""From a request to its answers in the making, on the engine's side of the border."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from draftwood.engine.orders import params_of, unpacked
from draftwood.engine.requests import EngineRequest
from draftwood.engine.sequence import Sequence
from draftwood.engine.text import TextStream
from draftwood.model.grammar import Grammars
from draftwood.model.spec import EncoderSpec
from draftwood.model.tokenizer import Detokenizer, Tokenizer
from draftwood.protocols import Constraint, Verifier
from draftwood.request import SamplingParams
from draftwood.rng import Purpose, fold_seed
from draftwood.verifiers import ByRequest


def decided_by_seed(law: Verifier, params: SamplingParams) -> bool:
    """Whether the tokens do not depend on the trees: by the law, or because nothing is drawn."""
    return law.reproducible or (law.lossless and params.greedy)


def stop_ids(params: SamplingParams, tokenizer: Tokenizer) -> frozenset[int]:
    """A grammar says when it is complete by nothing but the end of text, so that counts even if it is ignored."""
    ignored = params.ignore_eos and params.grammar is None
    return frozenset(params.stop_token_ids) | (frozenset() if ignored else tokenizer.eos_ids)


@dataclass
class AnswerMaker:
    """Makes the answers of requests. Calls may come from any thread."""

    tokenizer: Tokenizer
    grammars: Grammars
    laws: ByRequest
    max_length: int  # tokens of a prompt and its answer together
    strict: bool  # the target's logits do not depend on what else is computed in a step
    encoder: EncoderSpec | None = None
    adapters: tuple[str, ...] = ()  # by the number that rows have them by
    cache_dtype: str = "auto"
    members: Callable[[str | None], tuple[str, ...]] = lambda name: ()  # of the drafter of that name
    _sequence_ids: itertools.count[int] = field(default_factory=itertools.count)

    def answers(self, request: EngineRequest) -> list[Sequence]:
        """All `n` of them."""
        first = self._first(request)
        others = range(1, request.params.n)
        return [first, *(self._sibling(first, i, fold_seed(request.seed, Purpose.SAMPLE, i)) for i in others)]

    def unpacked(self, plain: Mapping[str, Any]) -> Sequence:
        """An answer that another rank has made."""
        params = params_of(plain)
        text = TextStream(Detokenizer(self.tokenizer), params.stop)
        return unpacked(plain, params, text, self._constraint(params))

    def _first(self, request: EngineRequest) -> Sequence:
        params, law = request.params, self.laws.law_of(request.params.law)
        before = () if request.source is None else request.source.tokens
        longest = self.max_length if self.encoder is None else min(self.max_length, len(before) + self.encoder.max_text)
        return Sequence(
            id=next(self._sequence_ids),
            request_id=request.id,
            index=0,
            tokens=[*before, *request.tokens],
            params=params,
            seed=request.seed,
            max_length=min(request.prompt_length + params.max_tokens, longest),
            stop_ids=stop_ids(params, self.tokenizer),
            bad_words=request.bad_words,
            text=TextStream(Detokenizer(self.tokenizer), params.stop),
            arrived=time.perf_counter(),
            law=law.name,
            lossless=law.lossless,
            reproducible=self.strict and decided_by_seed(law, params),
            prediction=request.prediction,
            constraint=self._constraint(params),
            adapter=-1 if params.adapter is None else self.adapters.index(params.adapter),
            cache_dtype=self.cache_dtype,
            members=self.members(params.drafter),
            source=request.source,
            images=request.images,
            tenant=request.tenant,
        )

    def _sibling(self, first: Sequence, index: int, seed: int) -> Sequence:
        """Another answer to the same prompt."""
        return replace(
            first,
            id=next(self._sequence_ids),
            index=index,
            tokens=list(first.tokens),
            seed=seed,
            text=TextStream(Detokenizer(self.tokenizer), first.params.stop),
            constraint=self._constraint(first.params),
        )

    def _constraint(self, params: SamplingParams) -> Constraint | None:
        return None if params.grammar is None else self.grammars.start(params.grammar)
