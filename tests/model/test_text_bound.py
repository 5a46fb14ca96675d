from __future__ import annotations

import random
import threading
import time
import unicodedata
from collections.abc import Callable
from typing import Literal

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from draftwood.model.text_bound import BYTE_ALPHABET
from draftwood.model.tokenizer import Conventions, Tokenizer

from .test_tokenizer import SPM_TEXTS, TEXTS, byte_level_fields, sentencepiece_fields

Change = Callable[[tokenizers.Tokenizer], None]


def byte_level(change: Change = lambda backend: None, without: str = "", **options: object) -> Tokenizer:
    """A vocabulary of all bytes and one long token."""
    alphabet = [character for character in BYTE_ALPHABET if character not in without]
    vocabulary = {token: index for index, token in enumerate([*alphabet, "aa", "aaaa", "<u>"])}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [("a", "a"), ("aa", "aa")], **options))  # type: ignore[arg-type]
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    change(backend)
    return Tokenizer(backend, Conventions())


@pytest.mark.parametrize(
    "tokenizer",
    [
        *(Tokenizer.from_gguf(byte_level_fields(rule)) for rule in ("smollm", "qwen2", "llama-bpe")),
        Tokenizer.from_gguf(sentencepiece_fields()),
    ],
    ids=["smollm", "qwen2", "llama-bpe", "sentencepiece"],
)
def test_no_text_is_longer_than_its_tokens_allow(tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    longest = max((tokenizer.piece(token, skip_special=False) for token in range(tokenizer.vocab_size)), key=len)
    texts = [*TEXTS, *SPM_TEXTS, "\u212b\u0344" * 40, longest.decode("utf-8", "replace") * 50]
    texts += [
        "".join(chr(rng.choice((rng.randrange(128), rng.randrange(0xD800)))) for _ in range(60)) for _ in range(60)
    ]
    for text in texts:
        tokens = len(tokenizer.encode(text, special=False))
        limit = tokenizer.max_bytes(tokens)
        assert limit is not None
        assert len(text.encode()) <= limit
        assert tokenizer.fewest_tokens(text) <= tokens


def test_unicode_forms_shrink_a_text_by_no_more_than_presumed() -> None:
    """The longest spelling of every character: each part of its decomposition by the longest character for it."""
    characters = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    forms: list[tuple[Literal["NFC", "NFKC"], Literal["NFD", "NFKD"]]] = [("NFC", "NFD"), ("NFKC", "NFKD")]
    for composed, decomposed in forms:
        parts = {character: unicodedata.normalize(decomposed, character) for character in characters}
        longest: dict[str, int] = {}
        for character, part in parts.items():
            longest[part] = max(longest.get(part, 0), len(character.encode()))
        for character, part in parts.items():
            size = len(character.encode())
            assert size <= 4 * len(part.encode())
            if len(part) > 1 and unicodedata.is_normalized(composed, character):
                assert sum(longest.get(piece, len(piece.encode())) for piece in part) <= 4 * size
    assert max(len(c.encode()) / len(c.lower().encode()) for c in characters) <= 3


def add_marker(backend: tokenizers.Tokenizer) -> None:
    backend.add_special_tokens([AddedToken("<|m|>", rstrip=True)])


def template_without_text(backend: tokenizers.Tokenizer) -> None:
    backend.post_processor = processors.TemplateProcessing(single="<u>", special_tokens=[("<u>", 258)])


def normalise(step: normalizers.Normalizer) -> Change:
    return lambda backend: setattr(backend, "normalizer", step)


def cut(step: pre_tokenizers.PreTokenizer) -> Change:
    return lambda backend: setattr(backend, "pre_tokenizer", pre_tokenizers.Sequence([step, backend.pre_tokenizer]))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (normalise(normalizers.Strip()), " " * 4000),
        (normalise(normalizers.StripAccents()), "\u0301" * 4000),
        (normalise(normalizers.Replace(Regex("b+"), "b")), "b" * 4000),
        (normalise(normalizers.Sequence([normalizers.NFC(), normalizers.Replace("b", "")])), "b" * 4000),
        (cut(pre_tokenizers.Split("b", "removed")), "b" * 4000),
        (cut(pre_tokenizers.WhitespaceSplit()), " " * 4000),
        (add_marker, "<|m|>" + " " * 4000),
        (template_without_text, "b" * 4000),
    ],
)
def test_there_is_no_bound_where_text_is_dropped(change: Change, text: str) -> None:
    tokenizer = byte_level(change)
    assert len(tokenizer.encode(text)) <= 1
    assert tokenizer.max_bytes(1) is None
    assert tokenizer.fewest_tokens(text) == 0


@pytest.mark.parametrize(
    ("change", "limit"),
    [
        (normalise(normalizers.NFC()), 4 * 4),
        (normalise(normalizers.Replace("bcd", "a")), 3 * 4),
        (normalise(normalizers.Replace(" ", "▁")), 4),
        (cut(pre_tokenizers.Split("b", "isolated")), 4),
        (lambda backend: backend.add_tokens(["<|marker|>"]), 10),
    ],
)
def test_the_bound_counts_what_a_normaliser_shrinks(change: Change, limit: int) -> None:
    assert byte_level(change).max_bytes(1) == limit
    assert byte_level(change).max_bytes(100) == limit * 100


def test_unknown_characters_are_bounded_if_each_becomes_a_token() -> None:
    assert byte_level(without="b").max_bytes(1) is None
    assert byte_level(without="b", unk_token="<u>", fuse_unk=True).max_bytes(1) is None
    each = byte_level(without="b", unk_token="<u>")
    assert len(each.encode("b" * 40)) == 40
    assert each.max_bytes(1) == 4


def test_bytes_without_a_token_are_not_counted() -> None:
    tokenizer = byte_level(without="b")
    assert tokenizer.encode("b" * 1000) == []
    assert tokenizer.fewest_tokens("b" * 1000) == 0
    assert tokenizer.fewest_tokens("ab" * 1000) == 250  # four characters in the longest token


def test_ids_outside_the_vocabulary_are_not_kept() -> None:
    tokenizer = byte_level()
    for token in (-1, tokenizer.vocab_size, 10**6, 2**32, 10**30):
        assert tokenizer.piece(token) == b""
    assert tokenizer.decode([*range(5000, 9000), 2**40]) == ""
    assert sum(map(len, tokenizer._pieces)) == 0


def test_a_long_text_has_the_same_tokens() -> None:
    for tokenizer in (byte_level(), Tokenizer.from_gguf(byte_level_fields("qwen2", ggml__add_bos_token=True))):
        text = " ".join(TEXTS) * 60
        assert len(text) > 10_000
        for special in (True, False):
            ids = tokenizer._backend.encode(text, add_special_tokens=special).ids
            assert tokenizer.encode(text, special=special)[-len(ids) :] == ids
    assert tokenizer.encode(text)[0] == 1


def test_other_threads_go_on_while_a_long_text_is_encoded() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_fields("smollm"))
    text = "The quick brown fox, 12345 jumps over the lazy dog.\n" * 20_000
    started, ended, ticks = threading.Event(), threading.Event(), 0

    def encode() -> None:
        started.set()
        tokenizer.encode(text)
        ended.set()

    thread = threading.Thread(target=encode)
    thread.start()
    started.wait()
    while not ended.is_set():
        time.sleep(0.005)
        ticks += 1
    thread.join()
    assert ticks > 8  # two when the GIL is held: one before, one after
