"""Encoder-decoder models of transformers: which classes compute them, what they read, how their answers begin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import IncompatibleParts
from .reading import SIZES
from .rope import require, shown
from .spec import EncoderSpec, FeatureShape

UNBOUNDED = 2048  # tokens of a source and of a text, where positions have no end (relative ones)
TEXT, FEATURES = "input_ids", "input_features"  # what encoders read, by transformers' names


def modules_of(config: Any) -> Any:
    """Transformers' class for a configuration with an encoder that reads text or features; None: there is none."""
    from transformers import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING

    mappings: tuple[Any, ...] = (MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING)
    found = [mapping[type(config)] for mapping in mappings if type(config) in mapping]
    return found[0] if found and found[0].main_input_name in (TEXT, FEATURES) else None


def encoder_of(config: Any, stated: Mapping[str, Any], modules: Any) -> EncoderSpec:
    """What its configuration says; `stated` are its files' own words, which know of how answers are to begin."""
    vocabulary = getattr(config, "vocab_size", None)
    words = getattr(config, "decoder_vocab_size", None) or vocabulary
    start = _token(stated, "decoder_start_token_id", words)
    if start is None:
        start = _token(vars(config), "decoder_start_token_id", words)
    require(start is not None, "it names no decoder_start_token_id, which every answer begins with")
    assert start is not None
    forced = _token(stated, "forced_bos_token_id", words)
    features = _features(config) if modules.main_input_name == FEATURES else None
    both = getattr(config, "max_position_embeddings", None)
    source, text = (getattr(config, name, None) or both for name in ("max_source_positions", "max_target_positions"))
    for name, size in (("source", source), ("text", text)):
        known = size is None or (isinstance(size, int) and 0 < size <= SIZES["max_positions"])
        require(known, f"its longest {name} is {shown(size)}")
    return EncoderSpec(
        max_source=source or UNBOUNDED,
        max_text=text or UNBOUNDED,
        start=start,
        opening=(start,) if forced is None else (start, forced),
        vocab_size=vocabulary or 0,
        same_words=features is None and getattr(config, "share_encoder_decoder_embeddings", True) is True,
        features=features,
    )


def _token(stated: Mapping[str, Any], name: str, vocabulary: Any) -> int | None:
    token = stated.get(name)
    if token is None:
        return None
    known = isinstance(token, int) and isinstance(vocabulary, int) and 0 <= token < vocabulary
    require(known, f"{name} is {shown(token)}, which is not in the vocabulary")
    return token


def _features(config: Any) -> FeatureShape:
    """Of Whisper's kind: a fixed number of frames, of which two make a state."""
    bins, states = (getattr(config, name, None) for name in ("num_mel_bins", "max_source_positions"))
    sizes = isinstance(bins, int) and isinstance(states, int) and bins > 0 and 0 < states <= SIZES["max_positions"]
    require(sizes, f"its encoder reads features of {shown(bins)} bins for {shown(states)} states")
    assert isinstance(bins, int)
    assert isinstance(states, int)
    return FeatureShape(bins, 2 * states)


def check_reads_as_much(draft: str, own: EncoderSpec | None, target: str, theirs: EncoderSpec | None) -> None:
    """Refuse a draft model whose encoder cannot read all that the target's can; one without reads sources as text."""
    if own is None:
        return
    if theirs is None:
        raise IncompatibleParts(
            f"'{draft}' cannot draft for '{target}': it has an encoder and the target has none, so requests bring "
            "nothing for it to read. Take a draft model without an encoder, or ngram."
        )
    if own.features != theirs.features or own.vocab_size < theirs.vocab_size or own.max_source < theirs.max_source:
        raise IncompatibleParts(
            f"'{draft}' cannot draft for '{target}': its encoder does not read all that the target's reads (sources of "
            f"up to {own.max_source} and {theirs.max_source}). Take another draft model, or ngram."
        )
