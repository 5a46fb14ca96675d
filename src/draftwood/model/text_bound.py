"""How many bytes of text one token can stand for: long texts are refused by their length before they are encoded.

The bound holds if no step of the pipeline removes an unlimited amount of text. Steps are listed here one by one; a step
that is not listed may remove text, and then there is no bound.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from tokenizers import Tokenizer, models

_CHARACTER = 4  # bytes of the longest character in UTF-8
_NEVER_IN_UTF8 = {0xC0, 0xC1, *range(0xF5, 0x100)}
# Bytes of a text for each byte of its normalised form, at most: U+0390 has a spelling of 7 bytes and one of 2.
_SHRINKING = {"NFC": 4, "NFD": 4, "NFKC": 4, "NFKD": 4, "Lowercase": 3, "Prepend": 1, "ByteLevel": 1}
_KEEP_BYTES = ("Prepend", "ByteLevel")  # normalisers after which the text's own bytes are still there
_PRE_TOKENIZERS = ("ByteLevel", "Digits", "FixedLength", "Metaspace", "UnicodeScripts")  # these keep every character
_SPLITTERS = ("Split", "Punctuation")  # so do these, unless they are told to remove what they find
_POST_PROCESSORS = ("BertProcessing", "ByteLevel", "RobertaProcessing")

_Step = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TextBound:
    """Each token stands for at most so many bytes of text, not counting bytes that the vocabulary has no token for."""

    bytes_per_token: int
    dropped: bytes = b""  # bytes of UTF-8 that encoding leaves out, any number of them

    def max_bytes(self, tokens: int) -> int | None:
        """The longest text, in bytes, that can have this many tokens or fewer; None if there is no longest."""
        return None if self.dropped else tokens * self.bytes_per_token

    def fewest_tokens(self, text: str) -> int:
        """A number of tokens that `text` certainly has, found without encoding it."""
        data = text.encode("utf-8", "surrogatepass")
        kept = data.translate(None, self.dropped) if self.dropped else data
        return -(-len(kept) // self.bytes_per_token)


def text_bound(backend: Tokenizer) -> TextBound | None:
    """The bound that holds for this pipeline; None if a text of any length can become a few tokens."""
    before = _steps(backend.normalizer, "normalizers")
    words = _steps(backend.pre_tokenizer, "pretokenizers")
    shrinking = [_shrinking(step) for step in before]
    if any(factor is None for factor in shrinking) or not all(_keeps_text(step) for step in words):
        return None
    if not all(_keeps_tokens(step) for step in _steps(backend.post_processor, "processors")):
        return None
    byte_level = any(step["type"] == "ByteLevel" for step in (*before, *words))
    dropped = _dropped_bytes(backend) if byte_level and _is_plain_bpe(backend) else b""
    if dropped and any(step["type"] not in _KEEP_BYTES for step in before):
        return None
    lengths = [_longest_token(backend, byte_level), _longest_marker(backend), _longest_unknown(backend, byte_level)]
    if any(length is None for length in lengths):
        return None
    return TextBound(math.prod(factor or 1 for factor in shrinking) * max(length or 1 for length in lengths), dropped)


class _Component(Protocol):
    def __getstate__(self) -> Any: ...


def _steps(component: _Component | None, key: str) -> list[_Step]:
    return [] if component is None else list(_flatten(json.loads(component.__getstate__()), key))


def _flatten(step: _Step, key: str) -> Iterable[_Step]:
    if step["type"] != "Sequence":
        yield step
        return
    for part in step[key]:
        yield from _flatten(part, key)


def _shrinking(step: _Step) -> int | None:
    if step["type"] != "Replace":
        return _SHRINKING.get(step["type"])
    found, content = step["pattern"].get("String"), step["content"]
    if not found or not content:  # a regular expression can match a text of any length
        return None
    return max(1, math.ceil(len(found.encode()) / len(content.encode())))


def _keeps_text(step: _Step) -> bool:
    if step["type"] in _SPLITTERS:
        return step["behavior"] != "Removed"
    return step["type"] in _PRE_TOKENIZERS


def _keeps_tokens(step: _Step) -> bool:
    if step["type"] == "TemplateProcessing":
        return any("Sequence" in piece for piece in step["single"])
    return step["type"] in _POST_PROCESSORS


def _longest_token(backend: Tokenizer, byte_level: bool) -> int:
    """Bytes of normalised text in one token of the vocabulary; a byte-level token has a character for each byte."""

    def size(token: str) -> int:
        return len(token) if byte_level else len(token.encode())

    # One by one: the vocabulary as a dictionary would be the largest thing in memory but the model.
    count = backend.get_vocab_size(with_added_tokens=False)
    spelled = [size(token) for token in map(backend.model.id_to_token, range(count)) if token is not None]
    if len(spelled) < count:  # ids with gaps
        spelled = [size(token) for token in backend.get_vocab(with_added_tokens=False)]
    return max(spelled, default=1)


def _longest_marker(backend: Tokenizer) -> int | None:
    """Bytes of an added token; None if one of them takes the spaces around it with it."""
    added = backend.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        return None
    contents = [token.content for token in added]
    normalised = [backend.normalizer.normalize_str(text) for text in contents] if backend.normalizer else []
    return max((len(text.encode()) for text in (*contents, *normalised)), default=1)


def _longest_unknown(backend: Tokenizer, byte_level: bool) -> int | None:
    """Bytes of a character outside the vocabulary, for each token that it becomes; None if it may become none."""
    model = backend.model
    if isinstance(model, models.Unigram):
        return 1 if json.loads(model.__getstate__())["byte_fallback"] and _has_byte_tokens(backend) else None
    if not _is_plain_bpe(backend):
        return None
    if byte_level or (model.byte_fallback and _has_byte_tokens(backend)):
        return 1
    return _CHARACTER if _names_unknowns(model) else None


def _is_plain_bpe(backend: Tokenizer) -> bool:
    model = backend.model
    return isinstance(model, models.BPE) and not model.continuing_subword_prefix and not model.end_of_word_suffix


def _names_unknowns(model: models.BPE) -> bool:
    """Whether every unknown character becomes a token."""
    return model.unk_token is not None and model.token_to_id(model.unk_token) is not None and not model.fuse_unk


def _has_byte_tokens(backend: Tokenizer) -> bool:
    used = (byte for byte in range(256) if byte not in _NEVER_IN_UTF8)
    return all(backend.model.token_to_id(f"<0x{byte:02X}>") is not None for byte in used)


def _dropped_bytes(backend: Tokenizer) -> bytes:
    """Bytes without a token of their own in a byte-level vocabulary: SmolLM2 has none for U+0004."""
    if _names_unknowns(backend.model):
        return b""
    missing = (byte for character, byte in BYTE_ALPHABET.items() if backend.model.token_to_id(character) is None)
    return bytes(sorted(byte for byte in missing if byte not in _NEVER_IN_UTF8))


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: visible Latin-1 characters are themselves, the rest follow from U+0100."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + rank): byte for rank, byte in enumerate(hidden)}


BYTE_ALPHABET = _byte_alphabet()
