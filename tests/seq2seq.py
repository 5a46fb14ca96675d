"""Tiny random encoder-decoder models, saved by transformers; what their encoders read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq

from draftwood.batch import Source
from draftwood.model.checkpoint import open_checkpoint
from draftwood.model.runner import ModelRunner
from parity.test_families import everything_wide
from tiny import CPU, save_tokenizer

VOCABULARY, START = 13, 3
WORDS = {
    "vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": START,
}  # fmt: skip
BART = {
    **WORDS, "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 128,
    "forced_eos_token_id": None,
}  # fmt: skip
T5 = {
    **WORDS, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_decoder_layers": 3, "num_heads": 4,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20,
}  # fmt: skip
TWO = {"decoder_vocab_size": VOCABULARY, "share_encoder_decoder_embeddings": False}
BINS, STATES = 8, 20
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("t5", T5),
    "flan-t5": ("t5", {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "d_kv": 6}),
    "mt5": ("mt5", {**T5, "num_layers": 2}),
    "umt5": ("umt5", T5),
    "bart": ("bart", BART),
    "mbart": ("mbart", BART),
    "marian": ("marian", {**BART, "scale_embedding": True, "decoder_vocab_size": VOCABULARY}),
    "marian, two vocabularies": ("marian", {**BART, **TWO, "vocab_size": 17}),
    "pegasus": ("pegasus", BART),
    "whisper": (
        "whisper",
        {
            **BART, "num_mel_bins": BINS, "max_source_positions": STATES, "max_target_positions": 64,
            "suppress_tokens": None, "begin_suppress_tokens": None,
        },
    ),
}  # fmt: skip


def seq2seq_model(name: str, seed: int = 2, noise: float = 0.0, **changes: object) -> Any:
    """Transformers' own model of a family with sharp random weights in float64, mixed with `noise` of others."""
    kind, settings = FAMILIES[name]
    config = AutoConfig.for_model(kind, **settings | changes)
    config._attn_implementation = "eager"
    auto = AutoModelForSpeechSeq2Seq if kind == "whisper" else AutoModelForSeq2SeqLM
    with everything_wide():
        model = auto.from_config(config).double().eval()
    first, second = (torch.Generator().manual_seed(number) for number in (seed, seed + 1000))
    for weight_name, weight in model.named_parameters():
        if not weight.requires_grad:  # sines and cosines, which files do not hold
            continue
        drawn, other = (torch.randn(weight.shape, generator=g, dtype=torch.float64) for g in (first, second))
        # Sharp enough that a wrong mask, slot or position changes the answer.
        spread = 0.2 if weight.dim() == 1 or "norm" in weight_name else 1.3 * weight.shape[-1] ** -0.5
        with torch.no_grad():
            weight.copy_(weight * (weight.dim() == 1) + spread * (drawn + noise * other))
    return model


def seq2seq_folder(path: Path, name: str, **settings: Any) -> Path:
    seq2seq_model(name, **settings).save_pretrained(path)
    return path


def seq2seq_texts(path: Path, name: str = "bart", **settings: Any) -> Path:
    """A folder that reads and writes bytes, with a token that ends texts and one that begins them."""
    vocabulary = save_tokenizer(path, special=("<|end|>", "<|start|>"))
    ends = {"vocab_size": vocabulary, "eos_token_id": vocabulary - 2, "decoder_start_token_id": vocabulary - 1}
    return seq2seq_folder(path, name, **ends, **settings)


def seq2seq_runner(folder: Path, dtype: torch.dtype = torch.float64, num_pages: int = 200, page_size: int = 4):
    return ModelRunner.load(open_checkpoint(folder), dtype, CPU, num_pages, page_size)


def source_of(name: str, number: int) -> Source:
    """Sources of 5, 9, 13 … tokens, or of features."""
    if name == "whisper":
        generator = torch.Generator().manual_seed(number)
        features = torch.randn(BINS, 2 * STATES, generator=generator, dtype=torch.float64).float()
        return Source((START,) * STATES, features)
    ids = [(7 * number + 3 * j * j + 4) % (VOCABULARY - 4) + 4 for j in range(5 + 4 * number)]
    shown = [START] * len(ids) if "two vocabularies" in name else ids
    return Source(tuple(shown), torch.tensor(ids))


def wanted_logits(model: Any, source: Source, tokens: Sequence[int]) -> torch.Tensor:
    """By the model's own forward, encoder and all."""
    inputs = source.inputs[None].double() if source.inputs.dim() > 1 else source.inputs[None]
    with torch.no_grad():
        given = {model.main_input_name: inputs, "decoder_input_ids": torch.tensor([tokens])}
        return model(**given, use_cache=False).logits[0]


def greedy(model: Any, source: Source, prompt: Sequence[int], count: int) -> list[int]:
    """The likeliest tokens, one by one."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(wanted_logits(model, source, tokens)[-1].argmax()))
    return tokens[len(prompt) :]
