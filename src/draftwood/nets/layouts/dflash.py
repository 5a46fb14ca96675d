"""Readers of DFlash, DSpark and TreeFlash: by speculators, z-lab and DeepSpec."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from draftwood.model.config import ModelConfig
from draftwood.nets.dflash import BlockNet, BlockSpec, Confidence, Corrector, HiddenCorrection, Markov
from draftwood.nets.embeddings import TargetEmbeddings
from draftwood.nets.layouts.common import (
    EMBEDDING_ROUNDING,
    DraftVocabulary,
    Tensors,
    check_embedding,
    draft_config,
    mask_token,
    misfit,
    read_head,
    read_layers,
    read_vocabulary,
    refused,
    stripped,
    whole_number,
)
from draftwood.nets.layouts.eagle import check_equal_hidden, nested_layers
from draftwood.nets.layouts.files import DrafterFiles
from draftwood.nets.parts import VocabularyHead

_NAMES = {"confidence_proj.": "confidence_head.proj.", "mask_embedding.weight": "mask_embedding"}
_READ_APART = ("head.", "markov_head.", "confidence_head.", "mask_embedding")


@dataclass(frozen=True)
class _BlockFacts:
    """What the dialects state in different places."""

    layers: Mapping[str, Any]  # the draft's layers as a Hugging Face configuration
    reads: tuple[int, ...]
    sizes: Mapping[str, Any]  # where block_size and mask_token_id are
    from_anchor: bool
    heads: Mapping[str, Any] = field(default_factory=dict)  # where DSpark's switches are


def block_speculators(files: DrafterFiles, target: ModelConfig, words: TargetEmbeddings) -> BlockNet:
    """`speculators_model_type: dflash` or `dspark`, and ours."""
    given = files.config
    reads = read_layers(files, given.get("aux_hidden_state_layer_ids"), 1, target)
    anchor = given.get("sample_from_anchor", given["speculators_model_type"] == "dspark")
    return _block(files, target, words, _BlockFacts(nested_layers(files), reads, given, bool(anchor), given))


def block_zlab(files: DrafterFiles, target: ModelConfig, words: TargetEmbeddings) -> BlockNet:
    """With a `dflash_config`: z-lab's DFlash, and what was built on it."""
    given, inner = files.config, files.config["dflash_config"] or {}
    for switch in ("causal", "causal_head", "use_swa", "attention_sink_bias"):
        if inner.get(switch):
            raise refused(files, f"its dflash_config has {switch}, which is recognised, but not supported yet")
    depth = given.get("num_target_layers")
    if depth not in (None, target.num_layers):
        raise misfit(files, f"it was trained for a target of {depth} layers, and this one has {target.num_layers}")
    ids = inner.get("target_layer_ids") or _spread(target.num_layers, whole_number(files, given, "num_hidden_layers"))
    sizes = {"block_size": given.get("block_size") or inner.get("block_size"), **_mask_of(given, inner)}
    heads = {**given, **inner}
    anchor = bool(heads.get("sample_from_anchor", files.has("markov_head.")))
    return _block(files, target, words, _BlockFacts(given, read_layers(files, ids, 0, target), sizes, anchor, heads))


def block_deepspec(files: DrafterFiles, target: ModelConfig, words: TargetEmbeddings) -> BlockNet:
    """DeepSpec: everything at the top of the configuration, and the anchor guesses, whether DSpark or DFlash."""
    given = files.config
    reads = read_layers(files, given["target_layer_ids"], 0, target)
    return _block(files, target, words, _BlockFacts(given, reads, given, True, given))


def _mask_of(*places: Mapping[str, Any]) -> Mapping[str, Any]:
    found = [place["mask_token_id"] for place in places if place.get("mask_token_id") is not None]
    return {"mask_token_id": found[-1]} if found else {}


def _spread(depth: int, count: int) -> list[int]:
    """z-lab's choice where a file does not say: evenly from the second layer to the third last."""
    if count == 1:
        return [depth // 2]
    return [round(1 + i * (depth - 4) / (count - 1)) for i in range(count)]


def _block(files: DrafterFiles, target: ModelConfig, words: TargetEmbeddings, facts: _BlockFacts) -> BlockNet:
    check_equal_hidden(files, target)
    tensors = Tensors(files, lambda name: stripped(name.removeprefix("model."), _NAMES))
    config = draft_config(files, facts.layers, target, tensors)
    vocabulary = read_vocabulary(tensors, files.config, target)
    head = read_head(tensors, words, vocabulary)
    published = "ar_approximation.ug.weight" in tensors
    size = whole_number(files, facts.sizes, "block_size")
    mask = _mask_token(files, facts.sizes, tensors, target)
    own_mask = _mask_row(tensors, words, mask)
    spec = BlockSpec(
        facts.reads,
        target.hidden_size,
        size,
        mask if own_mask is None else None,
        facts.from_anchor,
        norm_in_head=published,
    )
    if spec.guesses < 1:
        raise refused(files, f"its block of {spec.block_size} guesses nothing")
    corrector = _corrector(tensors, config, head, vocabulary, facts.heads)
    net = BlockNet(config, spec, head, corrector, _confidence(tensors, config, corrector, facts.heads))
    if published:
        net.markov_head = _treeflash(tensors, net)
    if net.mask_embedding is not None:
        with torch.no_grad():
            net.mask_embedding.copy_(_mask_embedding(tensors, target.hidden_size) if own_mask is None else own_mask)
    tensors.fill(net, skip=_READ_APART)
    check_embedding(tensors, words, but=None if own_mask is None else mask)
    tensors.finish()
    return net


def _mask_token(files: DrafterFiles, sizes: Mapping[str, Any], tensors: Tensors, target: ModelConfig) -> int | None:
    return None if "mask_embedding" in tensors else mask_token(files, sizes, target)


def _mask_row(tensors: Tensors, words: TargetEmbeddings, mask: int | None) -> Tensor | None:
    """The mask's row of an embedding that is the target's but for it: engines read a learnt mask there. [hidden]."""
    if mask is None or not tensors.stored("embed_tokens.weight"):
        return None
    shape = (words.config.vocab_size, words.config.hidden_size)
    theirs = words.embed(torch.tensor([mask], device=words.device))[0].to("cpu", torch.float32)
    row = tensors.take("embed_tokens.weight", shape)[mask]
    return None if bool((row - theirs).norm() <= EMBEDDING_ROUNDING * theirs.norm()) else row


def _mask_embedding(tensors: Tensors, hidden: int) -> Tensor:
    """[hidden]; some write it as a table of one row."""
    shape = (1, hidden) if len(tensors.shape("mask_embedding")) == 2 else (hidden,)
    return tensors.take("mask_embedding", shape).view(hidden)


def _corrector(
    tensors: Tensors, config: ModelConfig, head: VocabularyHead, vocabulary: DraftVocabulary, given: Mapping[str, Any]
) -> Corrector | None:
    if "hidden_correction.down_proj.weight" in tensors:
        inner = tensors.shape("hidden_correction.down_proj.weight")[1]
        correction = HiddenCorrection(config, head, inner)
        tensors.fill(correction, "hidden_correction.")
        return correction
    stored = any(name.startswith("markov_head.") for name in tensors.names())
    rank = given.get("markov_rank", 0)
    if not stored and not rank:
        return None
    kind = given.get("markov_head_type", "vanilla")
    if kind != "vanilla":
        raise refused(tensors.files, f"its markov_head_type is {kind}, which is recognised, but not supported yet")
    tensors.require(["markov_head.markov_w1.weight", "markov_head.markov_w2.weight"])
    rank = rank or tensors.shape("markov_head.markov_w1.weight")[1]
    tensors.take("markov_head.markov_w1.weight", (config.vocab_size, rank))  # refused before memory is taken for it
    table = Markov(config.vocab_size, head.size, rank)
    tensors.fill(table, "markov_head.")
    with torch.no_grad():
        table.markov_w2.weight.copy_(vocabulary.rows(table.markov_w2.weight.clone()))
    return table


def _confidence(
    tensors: Tensors, config: ModelConfig, corrector: Corrector | None, given: Mapping[str, Any]
) -> Confidence | None:
    name = "confidence_head.proj.weight"
    if not given.get("enable_confidence_head", name in tensors):
        return None
    tensors.require([name])
    wide = given.get("confidence_head_with_markov", tensors.shape(name)[1] != config.hidden_size)
    if wide and not isinstance(corrector, Markov):
        raise refused(tensors.files, "its confidence head reads a Markov table that is not there")
    confidence = Confidence(config.hidden_size, corrector if wide and isinstance(corrector, Markov) else None)
    tensors.fill(confidence, "confidence_head.")
    return confidence


def _treeflash(tensors: Tensors, net: BlockNet) -> HiddenCorrection:
    """Published in one piece: the upper half of `ug` goes up, the lower half is the gate."""
    hidden = net.config.hidden_size
    inner = tensors.shape("ar_approximation.ug.weight")[0] // 2
    correction = HiddenCorrection(net.config, net.head, inner, backbone_norm=net.norm)
    with torch.no_grad():
        up, gate = tensors.take("ar_approximation.ug.weight", (2 * inner, 2 * hidden)).chunk(2)
        correction.up_proj.weight.copy_(up)
        correction.gate_proj.weight.copy_(gate)
        up, gate = tensors.take("ar_approximation.ug.bias", (2 * inner,)).chunk(2)
        correction.up_proj.bias.copy_(up)
        correction.gate_proj.bias.copy_(gate)
        correction.down_proj.weight.copy_(tensors.take("ar_approximation.d.weight", (hidden, inner)))
        correction.embed_norm.weight.copy_(tensors.take("ar_approximation.norm.weight", (hidden,)))
    return correction
