"""What encoders are given: a request's `encoder_input`, checked and made a source."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftwood.batch import Source
from draftwood.engine.images import Conversation
from draftwood.errors import ContextLengthExceeded, InvalidRequest
from draftwood.model.spec import EncoderSpec

PlainPrompt = str | Sequence[int] | Sequence[Mapping[str, object]]  # a text, its tokens, or a conversation
EncoderInput = Any  # a text, token ids, or an array of features [bins, frames] (NumPy, torch)


@dataclass(frozen=True, eq=False)
class WithSource:
    """A prompt of a model with an encoder: what that reads, and how the decoder's text begins."""

    encoder_input: EncoderInput
    prompt: PlainPrompt | None = None  # None: as the model says


Prompt = PlainPrompt | WithSource | Conversation


def with_source(prompt: Prompt | None, encoder_input: EncoderInput | None) -> Prompt:
    """Both as one."""
    if encoder_input is not None and not isinstance(prompt, WithSource | Conversation):
        return WithSource(encoder_input, prompt)
    if prompt is None:
        raise InvalidRequest("There is no prompt. Give one, or, to a model with an encoder, an encoder_input.")
    return prompt


def paired(prompts: str | Sequence[PlainPrompt] | None, encoder_input: EncoderInput) -> tuple[list[Prompt], bool]:
    """Prompts with what their encoder reads; and whether it is one, not a list. One of either goes with all others."""
    if prompts is None or isinstance(prompts, str):
        if is_one(encoder_input):
            return [with_source(prompts, encoder_input)], True
        return [WithSource(own, prompts) for own in encoder_input], False
    if is_one(encoder_input):
        return [with_source(prompt, encoder_input) for prompt in prompts], False
    inputs, each = list(encoder_input), list(prompts)
    if len(each) != len(inputs):
        raise InvalidRequest(f"{len(each)} prompts came with {len(inputs)} encoder inputs: give one, or one each.")
    return [WithSource(*both) for both in zip(inputs, each, strict=True)], False


def is_one(encoder_input: EncoderInput) -> bool:
    """Whether it is what one encoder reads: a text, a list of token ids, an array; not a list of such."""
    if isinstance(encoder_input, list | tuple):
        return all(isinstance(item, int) for item in encoder_input)
    return True


@dataclass(frozen=True)
class SourceReader:
    """Makes sources for a model."""

    spec: EncoderSpec | None
    encode: Callable[[str], list[int]]

    def read(self, prompt: Prompt) -> Source | None:
        """What the encoder is to read for a prompt; None where the model has no encoder."""
        given = prompt.encoder_input if isinstance(prompt, WithSource) else None
        if self.spec is None:
            if isinstance(prompt, WithSource):
                raise InvalidRequest("This model has no encoder, so it reads no encoder_input: put it into the prompt.")
            return None
        if given is None:
            raise InvalidRequest(
                "This model has an encoder and answers what that reads: give it as encoder_input (in Python and in the "
                "body of /v1/completions) or --encoder-input; the prompt only begins the answer."
            )
        if self.spec.features is not None:
            return self._of_features(self.spec, given)
        return self._of_tokens(self.spec, self._tokens(given))

    @property
    def smallest(self) -> Prompt:
        """A prompt that the model can be asked."""
        if self.spec is None:
            return [0]
        shape = self.spec.features
        return WithSource([0] if shape is None else torch.zeros(shape.bins, shape.frames))

    def _tokens(self, given: EncoderInput) -> list[int]:
        if isinstance(given, str):
            return self.encode(given)
        if isinstance(given, list | tuple) and all(type(item) is int for item in given):
            return list(given)
        raise InvalidRequest(f"encoder_input is a text or a list of token ids here, not {_kind(given)}.")

    def _of_tokens(self, spec: EncoderSpec, ids: list[int]) -> Source:
        if not ids:
            raise InvalidRequest("encoder_input is empty: give the encoder at least one token to read.")
        if len(ids) > spec.max_source:
            raise ContextLengthExceeded(
                f"encoder_input has {len(ids)} tokens and the encoder reads at most {spec.max_source}. Shorten it, or "
                "send it in parts."
            )
        outside = next((token for token in ids if not 0 <= token < spec.vocab_size), None)
        if outside is not None:
            raise InvalidRequest(
                f"Token {outside} in encoder_input is not in the encoder's vocabulary (0 to {spec.vocab_size - 1})."
            )
        shown = tuple(ids) if spec.same_words else (spec.start,) * len(ids)
        return Source(shown, torch.tensor(ids))

    def _of_features(self, spec: EncoderSpec, given: EncoderInput) -> Source:
        assert spec.features is not None
        wanted = (spec.features.bins, spec.features.frames)
        shape = getattr(given, "shape", None)
        if shape is None:
            raise InvalidRequest(
                f"This model's encoder reads features: encoder_input is an array of {wanted[0]} bins by {wanted[1]} "
                f"frames, as transformers' feature extractors make it, not {_kind(given)}. It is taken in Python only."
            )
        try:
            features = torch.as_tensor(given).detach().to("cpu", torch.float32)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InvalidRequest(f"encoder_input is no array of numbers: {error}.") from error
        return Source((spec.start,) * spec.max_source, _checked(features, wanted))


def _checked(features: Tensor, wanted: tuple[int, int]) -> Tensor:
    alone = features[0] if features.dim() == 3 and len(features) == 1 else features  # a batch of one
    if tuple(alone.shape) != wanted:
        raise InvalidRequest(
            f"encoder_input has the shape {tuple(features.shape)}; this model reads {wanted[0]} bins by {wanted[1]} "
            "frames. Pad or cut it with the model's feature extractor."
        )
    if not bool(alone.isfinite().all()):
        raise InvalidRequest("encoder_input has numbers that are not finite.")
    return alone.clone()


def _kind(given: object) -> str:
    return f"a {type(given).__name__}"
