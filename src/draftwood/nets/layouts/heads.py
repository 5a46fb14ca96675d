"""Readers of Medusa and Hydra. The tensors say how many heads there are: published configurations can be wrong."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from draftwood.model.config import ModelConfig
from draftwood.nets.embeddings import TargetEmbeddings
from draftwood.nets.layouts.common import (
    DraftVocabulary,
    Tensors,
    check_equal,
    check_tokens,
    read_head,
    refused,
    shared_head,
)
from draftwood.nets.layouts.files import DrafterFiles
from draftwood.nets.medusa import HeadStack
from draftwood.nets.parts import DraftHead, VocabularyHead

_MEDUSA = re.compile(r"(?:medusa_heads?\.)?(\d+)\.(\d+)\.(linear\.)?(weight|bias)")
_VLLM = re.compile(r"(?:medusa_heads\.)?blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
_BLOCK = re.compile(r"blocks\.(\d+)\.(\d+)\.")


def medusa_official(files: DrafterFiles, target: ModelConfig, words: TargetEmbeddings) -> HeadStack:
    """FasterDecoding's: `{head}.{layer}.linear.*`, and the head's own matrix behind its layers."""

    def rename(name: str) -> str:
        match = _MEDUSA.fullmatch(name)
        if match is None:
            return name
        head, layer, inner, kind = match.groups()
        return f"blocks.{head}.{layer}.linear.{kind}" if inner else f"lm_heads.{head}.{kind}"

    return _stack(files, target, words, Tensors(files, rename), DraftVocabulary(None), grounded=False)


def medusa_vllm(files: DrafterFiles, target: ModelConfig, words: TargetEmbeddings) -> HeadStack:
    """vLLM's: `blocks.{head}.layers.{layer}.*`, `lm_heads.{head}.weight`, perhaps a `token_map`; and ours."""

    def rename(name: str) -> str:
        match = _VLLM.fullmatch(name)
        if match is None:
            return name.removeprefix("medusa_heads.")
        return "blocks.{}.{}.linear.{}".format(*match.groups())

    tensors = Tensors(files, rename)
    _check_sizes(files, files.config, target)
    return _stack(files, target, words, tensors, _token_map(tensors, files.config, target), grounded=False)


def _check_sizes(files: DrafterFiles, given: Mapping[str, Any], target: ModelConfig) -> None:
    for what, key, expected in (
        ("hidden size", "hidden_size", target.hidden_size),
        ("vocabulary", "vocab_size", target.vocab_size),
    ):
        if given.get(key) is not None:
            check_equal(files, what, given[key], expected)


def _token_map(tensors: Tensors, given: Mapping[str, Any], target: ModelConfig) -> DraftVocabulary:
    """Ids themselves, unlike `d2t`."""
    size = given.get("truncated_vocab_size") or target.vocab_size
    if "token_map" not in tensors:
        if size != target.vocab_size:
            raise refused(tensors.files, f"it guesses {size} of {target.vocab_size} tokens, but has no token_map")
        return DraftVocabulary(None)
    tokens = tensors.raw("token_map").long().flatten()
    check_tokens(tensors.files, tokens, target.vocab_size)
    if len(tokens) == target.vocab_size:
        return DraftVocabulary(None)
    if given.get("truncated_vocab_size") not in (None, len(tokens)):
        raise refused(tensors.files, f"token_map lists {len(tokens)} tokens where truncated_vocab_size is {size}")
    return DraftVocabulary.of(tokens)


def hydra(files: DrafterFiles, target: ModelConfig, words: TargetEmbeddings) -> HeadStack:
    """zankner's multilayer perceptrons: `hydra_mlp.{head}.{layer}.*` and `hydra_lm_head.{head}.*`; and ours."""
    given = files.config
    kind = given.get("hydra_head_arch", "mlp")
    if kind != "mlp":
        raise refused(files, f"its hydra_head_arch is {kind}, which is recognised, but not supported yet")
    if given.get("hidden_state_offset"):
        raise refused(files, "it reads another layer than the last (hidden_state_offset), which is not supported yet")

    def rename(name: str) -> str:
        return name.replace("hydra_mlp.", "blocks.", 1).replace("hydra_lm_head.", "lm_heads.", 1)

    tensors = Tensors(files, rename)
    _check_sizes(files, given, target)
    grounded = bool(given.get("grounded_heads", "blocks.0.0.res_connection.weight" in tensors))
    return _stack(files, target, words, tensors, _token_map(tensors, given, target), grounded=grounded)


def _stack(
    files: DrafterFiles,
    target: ModelConfig,
    words: TargetEmbeddings,
    tensors: Tensors,
    vocabulary: DraftVocabulary,
    *,
    grounded: bool,
) -> HeadStack:
    heads, layers = _count(tensors)
    ends = _ends(tensors, words, vocabulary, heads)
    net = HeadStack(target.hidden_size, target.num_layers - 1, layers, ends, grounded)
    # vLLM's layers have no bias unless medusa_fc_bias says so.
    biases = [f"blocks.{name}" for name, _ in net.blocks.named_parameters() if name.endswith("linear.bias")]
    absent = [] if files.config.get("medusa_fc_bias") else [name for name in biases if name not in tensors]
    if absent != biases and absent:
        tensors.require(absent)
    tensors.fill(net.blocks, "blocks.", skip=tuple(absent))
    with torch.no_grad():
        for name in absent:
            net.get_parameter(name).zero_()
    tensors.finish()
    return net


def _count(tensors: Tensors) -> tuple[int, int]:
    """Heads, and layers of each."""
    found = {tuple(map(int, match.groups())) for name in tensors.names() if (match := _BLOCK.match(name))}
    if not found:
        raise refused(tensors.files, "it has no heads: no tensor is named as one")
    heads, layers = (max(number[i] for number in found) + 1 for i in (0, 1))
    tensors.require([f"blocks.{head}.{layer}.linear.weight" for head in range(heads) for layer in range(layers)])
    return heads, layers


def _ends(tensors: Tensors, words: TargetEmbeddings, vocabulary: DraftVocabulary, heads: int) -> list[VocabularyHead]:
    """The matrices behind the heads: of each its own, one for all, or the target's."""
    ours = tensors.files.config.get("draftwood") or {}
    if ours.get("shared_head"):
        return [shared_head(words, vocabulary.tokens)] * heads
    single = "lm_head" if "lm_head.weight" in tensors else "lm_heads.0"
    if tensors.files.config.get("original_lm_head") or single == "lm_head":
        _require_ends(tensors, [single])
        return [_end(tensors, words, vocabulary, single)] * heads
    names = [f"lm_heads.{head}" for head in range(heads)]
    _require_ends(tensors, names)
    return [_end(tensors, words, vocabulary, name) for name in names]


def _require_ends(tensors: Tensors, names: list[str]) -> None:
    tensors.require([f"{name}.weight" for name in names if f"{name}.down.weight" not in tensors])


def _end(tensors: Tensors, words: TargetEmbeddings, vocabulary: DraftVocabulary, name: str) -> VocabularyHead:
    """A head may be stored whole beside a `token_map`, which then chooses its rows."""
    tokens, whole = vocabulary.tokens, words.config.vocab_size
    if tokens is not None and tensors.shape(f"{name}.weight") == (whole, words.config.hidden_size):
        every = tensors.take(f"{name}.weight", (whole, words.config.hidden_size))
        return DraftHead(every[tokens], tokens, whole, own=True)
    return read_head(tensors, words, vocabulary, name)
