"""Tokenizers of two kinds that have some tokens in common, and models for them."""

from __future__ import annotations

import json
from functools import cache

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from draftwood.model.tokenizer import Conventions, Tokenizer

WORDS = ("the", "then", "there", "other", "cat", "catch", "patch", "ing", "naïve", "été", "日本", "x = x + 1")
TEXT = " ".join(word for i in range(60) for word in (WORDS[i % 12], WORDS[i * 5 % 12], WORDS[i * 7 % 11]))


@cache
def byte_level(size: int = 330) -> Tokenizer:
    """As GPT-2's: `<end>` is token 0."""
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator([TEXT], trainer)
    return Tokenizer(made, Conventions(eos_ids=frozenset({0})))


@cache
def with_byte_fallback(size: int = 60) -> Tokenizer:
    """As Llama's: markers, single bytes, pieces that begin with a space, `</s>` is token 2."""
    trainer = trainers.BpeTrainer(vocab_size=size, show_progress=False)
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator([TEXT[: len(TEXT) // 2]], trainer)
    model = json.loads(trained.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].__getitem__)
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    merges = [tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ")) for merge in model["merges"]]
    numbers = {piece: number for number, piece in enumerate(vocabulary)}
    made = tokenizers.Tokenizer(models.BPE(numbers, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(made, Conventions(eos_ids=frozenset({2})))
