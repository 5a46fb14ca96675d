"""From a prompt to answers in the making: everything a request can be refused for is found here, before it runs."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from draftwood.batch import Source
from draftwood.drafters.by_request import OfferedDrafters
from draftwood.engine.engine import check_exact
from draftwood.engine.images import Conversation, ImageReader
from draftwood.engine.orders import params_of, unpacked
from draftwood.engine.sequence import Sequence as Answer
from draftwood.engine.sources import PlainPrompt, Prompt, SourceReader, WithSource
from draftwood.engine.text import TextStream
from draftwood.errors import ContextLengthExceeded, IncompatibleParts, InvalidRequest
from draftwood.model.checkpoint import Checkpoint
from draftwood.model.grammar import Grammars
from draftwood.model.tokenizer import Detokenizer
from draftwood.protocols import Constraint, Verifier
from draftwood.request import SamplingParams
from draftwood.rng import Purpose, fold_seed
from draftwood.tree import POINT_TREE, DraftLaw
from draftwood.verifiers import AUTO, ByRequest, default_law

__all__ = ["Guessers", "Intake", "Prompt"]


@dataclass(frozen=True)
class Guessers:
    """Who guesses, and by which laws."""

    drafts: DraftLaw  # of the engine's own drafter
    offered: OfferedDrafters | None  # whom a request may name; None: none, and no predictions either
    laws: ByRequest
    suits_itself: bool  # the engine's law was chosen for its drafter, so a request with other guesses gets another
    strict: bool  # the target's logits do not depend on what else is computed in a step

    def fitted(self, params: SamplingParams) -> SamplingParams:
        """The same with a law that is exact for the guesses it will get; refused where there is none."""
        drafts = self._drafts(params)
        if self.offered is not None and self.offered.drafter_of(params.drafter) is self.offered.default:
            params = replace(params, drafter=None)  # no wish of its own: it runs in the same steps as others
        if params.law == AUTO or (params.law is None and self.suits_itself):
            params = replace(params, law=self._suited_law(params, drafts))
        law = self.laws.law_of(params.law)
        check_exact(law, drafts)
        self._check_lossless(law, params)
        return params

    def _suited_law(self, params: SamplingParams, drafts: DraftLaw) -> str | None:
        """The law for a request that names none; None: the engine's own.

        With a seed it is one whose tokens do not depend on the tree: budgets, and so trees, follow load and timings.
        """
        suits = self.suits_itself and self.laws.default.refuses(drafts) is None
        name = None if suits else default_law(drafts)
        if params.seed is None or _decided_by_seed(self.laws.law_of(name), params):
            return name
        return "match"

    def reproducible(self, params: SamplingParams) -> bool:
        """Whether fitted `params` give the same tokens for a seed, whatever the load and the other requests."""
        return self.strict and _decided_by_seed(self.laws.law_of(params.law), params)

    def _drafts(self, params: SamplingParams) -> DraftLaw:
        if self.offered is None:
            if params.drafter or params.prediction:
                raise InvalidRequest(
                    "This engine has one drafter for all and takes no predictions; make it with LLM(…, offers=[])."
                )
            return self.drafts
        chosen = self.offered.drafter_of(params.drafter)
        if params.max_nodes is not None and not params.prediction and params.max_nodes > chosen.max_nodes:
            raise InvalidRequest(
                f"max_nodes is {params.max_nodes}, and the drafter never proposes more than {chosen.max_nodes} nodes."
            )
        return POINT_TREE if params.prediction else chosen.law

    def _check_lossless(self, law: Verifier, params: SamplingParams) -> None:
        """A lossy law may keep a token whose probability is 0."""
        forbidding = "a grammar forbids" if params.grammar is not None else "min_tokens forbids"
        if (params.grammar is not None or params.min_tokens) and not law.lossless:
            raise IncompatibleParts(
                f"The law '{law.name}' may keep tokens that {forbidding}; use a lossless one, such as match."
            )


def _decided_by_seed(law: Verifier, params: SamplingParams) -> bool:
    """Whether the tokens do not depend on the trees: by the law, or because nothing is drawn."""
    return law.reproducible or (law.lossless and params.greedy)


class Intake:
    """Checks requests, and makes their answers."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        guessers: Guessers,
        max_length: int,
        capacity: int,
        images: ImageReader,
    ) -> None:
        self.tokenizer = checkpoint.tokenizer()
        self.max_length = max_length
        self._config = checkpoint.config
        self._guessers = guessers
        self._capacity = capacity
        self.images = images
        self.sources = SourceReader(checkpoint.config.encoder, self.encode_text)
        self._grammars = Grammars(self.tokenizer, checkpoint.config.vocab_size)
        self._request_ids = itertools.count()
        self._sequence_ids = itertools.count()

    def answers(self, prompt: Prompt, params: SamplingParams, tenant: str = "") -> tuple[str | None, list[Answer]]:
        """The prompt as a text, where it is one, and its answers in the making, on behalf of `tenant`."""
        source = self.sources.read(prompt)
        prompt, files = self._without_images(prompt)
        text, tokens = self._text(prompt)
        tokens, images = self.images.place(tokens, files)
        self._check_tokens(tokens, params, 0 if source is None else len(source))
        params = self._guessers.fitted(params)
        if params.min_tokens and not (params.stop or self._stop_ids(params)):
            params = replace(params, min_tokens=0)  # nothing can end it early: it runs where others do
        request_id = next(self._request_ids)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        first = replace(self._answer(request_id, source, tokens, params, seed, tenant), images=images)
        others = range(1, params.n)
        return text, [first, *(self._sibling(first, i, fold_seed(seed, Purpose.SAMPLE, i)) for i in others)]

    def unpacked(self, plain: Mapping[str, Any]) -> Answer:
        """An answer that another rank's intake has made."""
        params = params_of(plain)
        text = TextStream(Detokenizer(self.tokenizer), params.stop)
        return unpacked(plain, params, text, self._constraint(params))

    def _without_images(self, prompt: Prompt) -> tuple[Prompt, list[bytes]]:
        """A conversation without the images in it, and their files; anything else as it is."""
        if isinstance(prompt, Conversation):
            return prompt.tokens, list(prompt.files)
        if isinstance(prompt, str | WithSource) or not all(isinstance(item, Mapping) for item in prompt):
            return prompt, []
        return self.images.apart([item for item in prompt if isinstance(item, Mapping)])

    def _text(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """What the decoder begins with; behind an encoder, the token that its texts begin with goes before all else."""
        begun = prompt.prompt if isinstance(prompt, WithSource) else prompt
        spec = self._config.encoder
        if spec is not None and not begun:
            return "" if begun == "" else None, list(spec.opening)
        assert begun is not None
        if spec is None:
            return self.encode(begun)
        text, tokens = (begun, self.encode_text(begun, special=False)) if isinstance(begun, str) else self.encode(begun)
        return text, tokens if tokens[:1] == [spec.start] else [spec.start, *tokens]

    def encode(self, prompt: PlainPrompt) -> tuple[str | None, list[int]]:
        """The tokens of a text, of a conversation, or themselves."""
        if isinstance(prompt, str):
            return prompt, self.encode_text(prompt)
        messages = [item for item in prompt if isinstance(item, Mapping)]
        if messages and len(messages) == len(prompt):
            text = self.tokenizer.render_chat(messages)
            return text, self.encode_text(text, special=False)
        if all(isinstance(item, int) for item in prompt):
            return None, [item for item in prompt if isinstance(item, int)]
        raise InvalidRequest("A prompt is a text, a list of token ids, or a list of chat messages.")

    def encode_text(self, text: str, *, special: bool = True) -> list[int]:
        """The tokens of a text; one that is certain not to fit is refused before it is encoded."""
        fewest = self.tokenizer.fewest_tokens(text)
        if fewest >= self.max_length:
            raise ContextLengthExceeded(
                f"The text has {len(text)} characters, which are more than {fewest - 1} tokens, and the limit is "
                f"{self.max_length - 1}: {self._limits}. Shorten the text."
            )
        return self.tokenizer.encode(text, special=special)

    @property
    def _limits(self) -> str:
        return f"the model's context window is {self._config.max_positions} and the cache holds {self._capacity}"

    def _answer(
        self,
        request_id: int,
        source: Source | None,
        tokens: list[int],
        params: SamplingParams,
        seed: int,
        tenant: str,
    ) -> Answer:
        spec, before = self._config.encoder, [] if source is None else list(source.tokens)
        longest = self.max_length if spec is None else min(self.max_length, len(before) + spec.max_text)
        law = self._guessers.laws.law_of(params.law)
        return Answer(
            id=next(self._sequence_ids),
            request_id=request_id,
            index=0,
            tokens=[*before, *tokens],
            params=params,
            seed=seed,
            max_length=min(len(before) + len(tokens) + params.max_tokens, longest),
            stop_ids=self._stop_ids(params),
            bad_words=tuple(tuple(ids) for word in params.bad_words for ids in self._spellings(word)),
            text=TextStream(Detokenizer(self.tokenizer), params.stop),
            arrived=time.perf_counter(),
            law=law.name,
            lossless=law.lossless,
            reproducible=self._guessers.reproducible(params),
            prediction=tuple(self.encode_text(params.prediction, special=False)) if params.prediction else (),
            constraint=self._constraint(params),
            source=source,
            tenant=tenant,
        )

    def _sibling(self, first: Answer, index: int, seed: int) -> Answer:
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

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        """A grammar says when it is complete by nothing but the end of text, so that counts even if it is ignored."""
        ignored = params.ignore_eos and params.grammar is None
        return frozenset(params.stop_token_ids) | (frozenset() if ignored else self.tokenizer.eos_ids)

    def _constraint(self, params: SamplingParams) -> Constraint | None:
        return None if params.grammar is None else self._grammars.start(params.grammar)

    def _check_tokens(self, tokens: list[int], params: SamplingParams, source: int) -> None:
        vocabulary = self._config.vocab_size
        if not tokens:
            raise InvalidRequest("The prompt is empty: give the model at least one token to continue from.")
        longest = self.max_length - (params.max_tokens > 0) - source
        if self._config.encoder is not None:
            longest = min(longest, self._config.encoder.max_text - (params.max_tokens > 0))
            self._check_room(source, longest)
        if len(tokens) > longest:
            raise ContextLengthExceeded(
                f"The prompt has {len(tokens)} tokens and the limit is {longest}: {self._limits}. Shorten the "
                "prompt or raise cache_tokens."
            )
        for name, ids in (
            ("the prompt", tokens),
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", params.logit_bias),
        ):
            outside = next((token for token in ids if not 0 <= token < vocabulary), None)
            if outside is not None:
                raise InvalidRequest(f"Token {outside} in {name} is not in the vocabulary (0 to {vocabulary - 1}).")

    def _check_room(self, source: int, longest: int) -> None:
        if longest < 1:
            raise ContextLengthExceeded(
                f"encoder_input takes {source} places, which leaves none for an answer: {self._limits}. Shorten it or "
                "raise cache_tokens."
            )

    def _spellings(self, word: str) -> list[list[int]]:
        """A word at the start of a text and inside one are different tokens; both are meant."""
        found = [self.tokenizer.encode(text, special=False) for text in (word, f" {word}")]
        return [ids for ids in found if ids]
