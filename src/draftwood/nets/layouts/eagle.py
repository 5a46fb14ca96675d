"""Readers of EAGLE-1, EAGLE-3 and multi-token prediction in every spelling they are published in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from draftwood.model.config import ModelConfig
from draftwood.nets.eagle import Eagle1, Eagle3, Eagle3Spec, MultiToken
from draftwood.nets.embeddings import TargetEmbeddings
from draftwood.nets.layouts.common import (
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
from draftwood.nets.layouts.files import DrafterFiles
from draftwood.nets.pard import Ahead, ParallelEagle
from draftwood.nets.parts import DraftHead, LowRankHead

_EAGLE_NAMES = {
    "midlayer.": "layers.0.",
    "draft_id_to_target_id": "d2t",
    "aux_norm_low.": "fc_norm.0.",  # SGLang's first names for them
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
    "fusion_fc.": "fc.",  # speculators before 0.4
    "transformer.": "layers.0.",
}
_HEADS = ("lm_head.", "head.")  # read apart, before the network is built
USUAL_GUESSES = 8  # what P-EAGLE is trained for where a file does not say
_ASSUMED = {  # what ModelOpt's switches must say for the network to be EAGLE-3
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}


def _eagle_name(name: str) -> str:
    return stripped(name.removeprefix("model."), _EAGLE_NAMES)


@dataclass(frozen=True)
class _Eagle3Facts:
    """What the dialects state in different places."""

    layers: Mapping[str, Any]  # the draft's layers as a Hugging Face configuration
    reads: tuple[int, ...]


def eagle3_speculators(files: DrafterFiles, target: ModelConfig, words: TargetEmbeddings) -> Eagle3:
    """`speculators_model_type: eagle3`, and ours."""
    reads = _aux_layers(files, files.config.get("eagle_aux_hidden_state_layer_ids"), target)
    return _eagle3(files, target, words, _Eagle3Facts(nested_layers(files), reads))


def eagle3_modelopt(files: DrafterFiles, target: ModelConfig, words: TargetEmbeddings) -> Eagle3:
    """NVIDIA Model-Optimizer: EAGLE-3 with an `eagle_config`."""
    switches = files.config["eagle_config"] or {}
    for name, expected in _ASSUMED.items():
        found = switches.get(name)
        if found is not None and bool(found) != expected:
            raise refused(files, f"its eagle_config has {name} = {found}; only {expected} is supported")
    if (switches.get("parallel_draft_step") or 1) > 1:
        raise refused(files, "it drafts in parallel (parallel_draft_step), which is recognised, but not supported yet")
    ids = switches.get("eagle_aux_hidden_state_layer_ids")
    if not ids or max(ids) >= target.num_layers:
        reads = _aux_layers(files, ids, target)
    else:  # ModelOpt hooks the outputs of these layers; an id as high as the target's depth can only be vLLM's count
        reads = read_layers(files, ids, 0, target)
    return _eagle3(files, target, words, _Eagle3Facts(files.config, reads))


def eagle3_official(files: DrafterFiles, target: ModelConfig, words: TargetEmbeddings) -> Eagle3:
    """SafeAILab's, SpecForge's and DeepSpec's."""
    if files.config.get("target_layer_ids"):  # DeepSpec: outputs of these layers
        reads = read_layers(files, files.config["target_layer_ids"], 0, target)
    else:
        reads = _aux_layers(files, files.config.get("eagle_aux_hidden_state_layer_ids"), target)
    return _eagle3(files, target, words, _Eagle3Facts(files.config, reads))


def _aux_layers(files: DrafterFiles, ids: object, target: ModelConfig) -> tuple[int, ...]:
    """EAGLE counts what enters a layer, so its k is our output k - 1."""
    depth = target.num_layers
    return read_layers(files, ids or [2, depth // 2, depth - 3], 1, target)


def nested_layers(files: DrafterFiles) -> Mapping[str, Any]:
    """The configuration of the draft's layers, where speculators puts it."""
    layers = files.config.get("transformer_layer_config")
    if not isinstance(layers, Mapping):
        raise refused(files, "its configuration has no transformer_layer_config")
    return layers


def peagle_speculators(files: DrafterFiles, target: ModelConfig, words: TargetEmbeddings) -> ParallelEagle:
    """`speculators_model_type: peagle`, and ours."""
    reads = _aux_layers(files, files.config.get("eagle_aux_hidden_state_layer_ids"), target)
    tensors = Tensors(files, _eagle_name)
    config, spec, head = _eagle3_parts(tensors, target, words, _Eagle3Facts(nested_layers(files), reads))
    ahead = Ahead(mask_token(files, files.config, target), _speculative_tokens(files))
    shape = (target.vocab_size, target.hidden_size)
    own = tensors.take("embed_tokens.weight", shape) if tensors.stored("embed_tokens.weight") else None
    net = ParallelEagle(config, spec, head, ahead, own)
    with torch.no_grad():
        net.mask_hidden.copy_(tensors.take("mask_hidden", (1, 1, len(net.mask_hidden))).view(-1))
    tensors.fill(net, skip=(*_HEADS, "mask_hidden", "embed_tokens."))
    tensors.finish()
    return net


def _speculative_tokens(files: DrafterFiles) -> int:
    """How many tokens a pass is meant to guess; the files say it among what they propose."""
    proposed = (files.config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return whole_number(files, {"speculative_tokens": USUAL_GUESSES, **proposed[0]}, "speculative_tokens")


def _eagle3(files: DrafterFiles, target: ModelConfig, words: TargetEmbeddings, facts: _Eagle3Facts) -> Eagle3:
    tensors = Tensors(files, _eagle_name)
    net = Eagle3(*_eagle3_parts(tensors, target, words, facts))
    tensors.fill(net, skip=_HEADS)
    check_embedding(tensors, words)
    tensors.finish()
    return net


def _eagle3_parts(
    tensors: Tensors, target: ModelConfig, words: TargetEmbeddings, facts: _Eagle3Facts
) -> tuple[ModelConfig, Eagle3Spec, DraftHead | LowRankHead]:
    files, given = tensors.files, tensors.files.config
    check_equal_hidden(files, target)
    config = draft_config(files, facts.layers, target, tensors)
    spec = Eagle3Spec(
        facts.reads,
        target.hidden_size,
        norm_before_residual=bool(given.get("norm_before_residual", False)),
        norm_output=bool(given.get("norm_output", False)),
        fc_norm=bool(given.get("fc_norm", given.get("use_aux_norm", "fc_norm.0.weight" in tensors))),
        norm_before_fc=_norm_before_fc(given, tensors),
    )
    if spec.fc_norm and spec.norm_before_fc:
        raise refused(files, "it asks for fc_norm and norm_before_fc at once")
    return config, spec, read_head(tensors, words, read_vocabulary(tensors, given, target))


def _norm_before_fc(given: Mapping[str, Any], tensors: Tensors) -> bool:
    nested = given.get("eagle_config") or {}
    return bool(given.get("norm_before_fc", nested.get("norm_before_fc", "input_norm.weight" in tensors)))


def check_equal_hidden(files: DrafterFiles, target: ModelConfig) -> None:
    """Refuse features of another width than the target's."""
    stated = files.config.get("target_hidden_size")
    if stated not in (None, target.hidden_size):
        raise misfit(files, f"its target_hidden_size is {stated}, the target's hidden size {target.hidden_size}")


def eagle1_speculators(files: DrafterFiles, target: ModelConfig, words: TargetEmbeddings) -> Eagle1:
    """`speculators_model_type: eagle`, as written until version 0.3."""
    if files.config.get("layernorms"):
        raise refused(files, "it is HASS with more norms (layernorms), which is recognised, but not supported yet")
    ours = files.config.get("draftwood") or {}
    layers = {**nested_layers(files), "num_hidden_layers": ours.get("layers", 1)}
    return _eagle1(files, target, words, layers, files.config.get("fusion_bias"))


def eagle1_official(files: DrafterFiles, target: ModelConfig, words: TargetEmbeddings) -> Eagle1:
    """SafeAILab's EAGLE-1 and 2."""
    return _eagle1(files, target, words, files.config, files.config.get("bias"))


def _eagle1(
    files: DrafterFiles, target: ModelConfig, words: TargetEmbeddings, layers: Mapping[str, Any], bias: bool | None
) -> Eagle1:
    tensors = Tensors(files, _eagle_name)
    config = draft_config(files, layers, target, tensors)
    head = read_head(tensors, words, read_vocabulary(tensors, files.config, target))
    net = Eagle1(config, target.num_layers - 1, head, bias="fc.bias" in tensors if bias is None else bias)
    tensors.fill(net, skip=_HEADS)
    check_embedding(tensors, words)
    tensors.finish()
    return net


_MTP_NAMES = {
    "mtp_layers.0.hidden_layernorm.": "hnorm.",
    "mtp_layers.0.token_layernorm.": "enorm.",
    "mtp_layers.0.input_proj.": "eh_proj.",
    "mtp_layers.0.final_layernorm.": "norm.",
    "mtp_layers.0.": "layers.0.",
    "mtp.fc.": "eh_proj.",
    "mtp.pre_fc_norm_embedding.": "enorm.",
    "mtp.pre_fc_norm_hidden.": "hnorm.",
    "mtp.norm.": "norm.",
    "mtp.layers.": "layers.",
}


def mtp_speculators(files: DrafterFiles, target: ModelConfig, words: TargetEmbeddings) -> MultiToken:
    """`speculators_model_type: mtp`."""
    tensors = Tensors(files, lambda name: stripped(name, _MTP_NAMES))
    return _mtp(files, target, words, nested_layers(files), tensors)


def mtp_inside_target(files: DrafterFiles, target: ModelConfig, words: TargetEmbeddings) -> MultiToken:
    """The layer that came with a target: Qwen's `mtp.*`, or DeepSeek's behind the last layer."""
    depth = files.config.get("num_hidden_layers")
    behind = f"model.layers.{depth}."
    if files.has(f"model.layers.{(depth or 0) + 1}.eh_proj."):
        raise refused(files, "it predicts with several layers of its own, which is recognised, but not supported yet")
    inside = {
        f"{behind}shared_head.norm.": "norm.",
        f"{behind}shared_head.head.": "lm_head.",
        f"{behind}embed_tokens.": "embed_tokens.",
        **{f"{behind}{part}.": f"{part}." for part in ("enorm", "hnorm", "eh_proj")},
        behind: "layers.0.",
    }

    def rename(name: str) -> str | None:
        ours = stripped(name, {**_MTP_NAMES, **inside})
        return None if ours == name else ours  # the rest is the target itself

    return _mtp(files, target, words, files.config, Tensors(files, rename))


def _mtp(
    files: DrafterFiles, target: ModelConfig, words: TargetEmbeddings, layers: Mapping[str, Any], tensors: Tensors
) -> MultiToken:
    config = draft_config(files, {**layers, "num_hidden_layers": 1, "layer_types": None}, target, tensors)
    head = read_head(tensors, words, read_vocabulary(tensors, {}, target))
    net = MultiToken(config, target.num_layers - 1, head)
    tensors.fill(net, skip=_HEADS)
    check_embedding(tensors, words)
    tensors.finish()
    return net
