"""From a prompt to a request: everything it can be refused for is found here, before it runs."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace

from draftwood.engine.answers import decided_by_seed, stop_ids
from draftwood.engine.client import EngineCard
from draftwood.engine.engine import check_exact
from draftwood.engine.images import Conversation, ImageReader
from draftwood.engine.requests import EngineRequest
from draftwood.engine.sources import PlainPrompt, Prompt, SourceReader, WithSource
from draftwood.errors import ContextLengthExceeded, IncompatibleParts, InvalidRequest
from draftwood.model.checkpoint import Checkpoint
from draftwood.model.grammar import Grammars
from draftwood.protocols import Verifier
from draftwood.request import SamplingParams
from draftwood.tree import POINT_TREE, DraftLaw
from draftwood.verifiers import AUTO, ByRequest, default_law

__all__ = ["Guessers", "Intake", "Prompt"]


class Guessers:
    """Which drafters and laws requests may name, and which suit each other."""

    def __init__(self, card: EngineCard, laws: ByRequest) -> None:
        self.laws = laws
        self._card = card
        # The engine's law was chosen for its drafter, so a request with other guesses gets another.
        self._suits_itself = card.law == AUTO

    def fitted(self, params: SamplingParams) -> SamplingParams:
        """The same with a law that is exact for the guesses it will get; refused where there is none."""
        drafts = self._drafts(params)
        if self._card.offers is not None and self._card.drafter_of(params.drafter).is_default:
            params = replace(params, drafter=None)  # no wish of its own: it runs in the same steps as others
        if params.law == AUTO or (params.law is None and self._suits_itself):
            params = replace(params, law=self._suited_law(params, drafts))
        law = self.laws.law_of(params.law)
        check_exact(law, drafts)
        self._check_lossless(law, params)
        return params

    def _suited_law(self, params: SamplingParams, drafts: DraftLaw) -> str | None:
        """The law for a request that names none; None: the engine's own.

        With a seed it is one whose tokens do not depend on the tree: budgets, and so trees, follow load and timings.
        """
        suits = self._suits_itself and self.laws.default.refuses(drafts) is None
        name = None if suits else default_law(drafts)
        if params.seed is None or decided_by_seed(self.laws.law_of(name), params):
            return name
        return "match"

    def _drafts(self, params: SamplingParams) -> DraftLaw:
        if self._card.offers is None:
            if params.drafter or params.prediction:
                raise InvalidRequest(
                    "This engine has one drafter for all and takes no predictions; make it with LLM(…, offers=[])."
                )
            return self._card.drafter.law
        chosen = self._card.drafter_of(params.drafter)
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


class Intake:
    """Makes requests, and refuses what cannot run. Needs a tokenizer and an engine's card, but no engine."""

    def __init__(self, checkpoint: Checkpoint, card: EngineCard, laws: ByRequest, images: ImageReader) -> None:
        self.tokenizer = checkpoint.tokenizer()
        self.max_length = card.max_length
        self.vocab_size = checkpoint.config.vocab_size
        self.grammars = Grammars(self.tokenizer, self.vocab_size)
        self._limits = (
            f"the model's context window is {checkpoint.config.max_positions} and the cache holds {card.capacity}"
        )
        self._guessers = Guessers(card, laws)
        self._adapters = card.adapters
        self._config = checkpoint.config
        self.images = images
        self.sources = SourceReader(checkpoint.config.encoder, self.encode_text)
        self._request_ids = itertools.count()

    @property
    def default_law(self) -> str:
        """The name of the law of requests that name none."""
        return self._guessers.laws.default.name

    def request(self, prompt: Prompt, params: SamplingParams, tenant: str = "") -> tuple[str | None, EngineRequest]:
        """The prompt as a text, where it is one, and the request that `tenant` makes with it."""
        source = self.sources.read(prompt)
        plain, files = self._without_images(prompt)
        text, tokens = self._text(plain, files)
        tokens, images = self.images.place(tokens, files)
        self._check_tokens(tokens, params, 0 if source is None else len(source))
        self._check_adapter(params.adapter)
        params = self._guessers.fitted(params)
        if params.min_tokens and not (params.stop or stop_ids(params, self.tokenizer)):
            params = replace(params, min_tokens=0)  # nothing can end it early: it runs where others do
        prediction = tuple(self.encode_text(params.prediction, special=False)) if params.prediction else ()
        bad_words = tuple(tuple(ids) for word in params.bad_words for ids in self._spellings(word))
        if params.grammar is not None:
            self.grammars.start(params.grammar)  # refuses what cannot be compiled
        seed = secrets.randbits(63) if params.seed is None else params.seed
        return text, EngineRequest(
            next(self._request_ids), tuple(tokens), params, seed, tenant, prediction, bad_words, source, images
        )

    def _without_images(self, prompt: Prompt) -> tuple[PlainPrompt | WithSource, list[bytes]]:
        """A conversation without the images in it, and their files; anything else as it is."""
        if isinstance(prompt, Conversation):
            return prompt.tokens, list(prompt.files)
        if isinstance(prompt, str | WithSource) or not all(isinstance(item, Mapping) for item in prompt):
            return prompt, []
        return self.images.apart([item for item in prompt if isinstance(item, Mapping)])

    def _text(self, prompt: PlainPrompt | WithSource, files: Sequence[bytes]) -> tuple[str | None, list[int]]:
        """What the decoder begins with; behind an encoder, the token that its texts begin with goes before all else."""
        begun = prompt.prompt if isinstance(prompt, WithSource) else prompt
        spec = self._config.encoder
        if spec is not None and not begun:
            return "" if begun == "" else None, list(spec.opening)
        assert begun is not None
        if spec is None:
            return self.encode(begun, files)
        text, tokens = (begun, self.encode_text(begun, special=False)) if isinstance(begun, str) else self.encode(begun)
        return text, tokens if tokens[:1] == [spec.start] else [spec.start, *tokens]

    def encode(self, prompt: PlainPrompt, files: Sequence[bytes] = ()) -> tuple[str | None, list[int]]:
        """The tokens of a text, of a conversation with the images `files`, or themselves."""
        if isinstance(prompt, str):
            return prompt, self.encode_text(prompt)
        messages = [item for item in prompt if isinstance(item, Mapping)]
        if messages and len(messages) == len(prompt):
            text = self.images.framed(self.tokenizer.render_chat(messages), files, self.tokenizer)
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

    def _check_adapter(self, name: str | None) -> None:
        if name is not None and name not in self._adapters:
            there = f"there are {', '.join(self._adapters)}" if self._adapters else "there are none: LLM(…, adapters=…)"
            raise InvalidRequest(f"The adapter '{name}' is not loaded; {there}.")

    def _check_tokens(self, tokens: list[int], params: SamplingParams, source: int) -> None:
        vocabulary = self.vocab_size
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
