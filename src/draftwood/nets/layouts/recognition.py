"""Trained drafters as they are published: which layout a folder is, and the network it holds.

Everything is checked against the target before a network is handed out. What a file says and we do not understand is
refused, because a drafter that is nearly right guesses badly and nothing would ever tell.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwood.errors import CheckpointError
from draftwood.model.config import ModelConfig
from draftwood.model.rope import refusing_malformed
from draftwood.nets.dflash import BlockNet
from draftwood.nets.eagle import Eagle1, Eagle3, MultiToken
from draftwood.nets.embeddings import TargetEmbeddings
from draftwood.nets.kangaroo import Kangaroo
from draftwood.nets.layouts.common import misfit, refused
from draftwood.nets.layouts.dflash import block_deepspec, block_speculators, block_zlab
from draftwood.nets.layouts.eagle import (
    eagle1_official,
    eagle1_speculators,
    eagle3_modelopt,
    eagle3_official,
    eagle3_speculators,
    mtp_inside_target,
    mtp_speculators,
    peagle_speculators,
)
from draftwood.nets.layouts.files import DrafterFiles
from draftwood.nets.layouts.heads import hydra, medusa_official, medusa_vllm
from draftwood.nets.layouts.kangaroo import kangaroo
from draftwood.nets.medusa import HeadStack

DraftNet = Eagle3 | Eagle1 | MultiToken | BlockNet | HeadStack | Kangaroo


class Layout(StrEnum):
    """The ways in which drafters are published."""

    SPECULATORS_EAGLE3 = "speculators eagle3"
    SPECULATORS_PEAGLE = "speculators peagle"
    SPECULATORS_EAGLE1 = "speculators eagle"
    SPECULATORS_BLOCK = "speculators dflash or dspark"
    SPECULATORS_MTP = "speculators mtp"
    MODELOPT_EAGLE3 = "ModelOpt EAGLE-3"
    ZLAB_BLOCK = "z-lab DFlash, DSpark or TreeFlash"
    DEEPSPEC_BLOCK = "DeepSpec DSpark or DFlash"
    PARD = "PARD"
    MEDUSA = "Medusa"
    MEDUSA_VLLM = "Medusa for vLLM"
    HYDRA = "Hydra"
    KANGAROO = "Kangaroo"
    EAGLE3 = "EAGLE-3"
    EAGLE1 = "EAGLE-1"
    MTP = "multi-token prediction inside a target"
    STUDENT = "a student without words of its own"
    MASKED_STUDENT = "a student that guesses behind masks, without words of its own"
    LANGUAGE_MODEL = "a language model"


_BUILDERS: dict[Layout, Callable[[DrafterFiles, ModelConfig, TargetEmbeddings], DraftNet]] = {
    Layout.SPECULATORS_EAGLE3: eagle3_speculators,
    Layout.SPECULATORS_PEAGLE: peagle_speculators,
    Layout.SPECULATORS_EAGLE1: eagle1_speculators,
    Layout.SPECULATORS_BLOCK: block_speculators,
    Layout.SPECULATORS_MTP: mtp_speculators,
    Layout.MODELOPT_EAGLE3: eagle3_modelopt,
    Layout.ZLAB_BLOCK: block_zlab,
    Layout.DEEPSPEC_BLOCK: block_deepspec,
    Layout.MEDUSA: medusa_official,
    Layout.MEDUSA_VLLM: medusa_vllm,
    Layout.HYDRA: hydra,
    Layout.KANGAROO: kangaroo,
    Layout.EAGLE3: eagle3_official,
    Layout.EAGLE1: eagle1_official,
    Layout.MTP: mtp_inside_target,
}
_SPECULATORS = {
    "eagle3": Layout.SPECULATORS_EAGLE3,
    "peagle": Layout.SPECULATORS_PEAGLE,
    "eagle": Layout.SPECULATORS_EAGLE1,
    "dflash": Layout.SPECULATORS_BLOCK,
    "dspark": Layout.SPECULATORS_BLOCK,
    "mtp": Layout.SPECULATORS_MTP,
}
_LATER_SPECULATORS = {"dflash2": "DFlash2", "xpress": "XPress", "mlp": "an MLP speculator"}
_LATER_TENSORS = {
    "candidate_selector.": "DFlash2",
    "prefix_gru.": "Domino",
    "lilicorr": "LiLiCorr",
    "refiner_head.": "XPress",
    "layer_fusion_weights": "DFlare or DFly",
}


def recognise(files: DrafterFiles) -> Layout:
    """Which layout it is; kinds that we know of and cannot run yet are refused by name."""
    with refusing_malformed(f"the config.json of {files.name}"):
        return _recognise(files)


def _recognise(files: DrafterFiles) -> Layout:
    config = files.config
    ours = config.get("draftwood")
    if isinstance(ours, dict) and ours.get("student"):
        return Layout.MASKED_STUDENT if "pard_token" in config else Layout.STUDENT
    kind = config.get("speculators_model_type")
    if kind in _SPECULATORS:
        return _SPECULATORS[kind]
    if kind is not None:
        raise _later(files, _LATER_SPECULATORS.get(kind, f"a speculator of type {kind!r}"))
    if "eagle_config" in config:
        return Layout.MODELOPT_EAGLE3
    if "dflash_config" in config:
        return _zlab(files)
    if any(key in config for key in ("pard_token", "spd_type", "pard2")):
        return Layout.PARD
    return _by_model_type(files) or _by_tensors(files)


def _later(files: DrafterFiles, what: str) -> CheckpointError:
    return refused(files, f"it is {what}, which is recognised, but not supported yet")


def _zlab(files: DrafterFiles) -> Layout:
    inner = files.config["dflash_config"] or {}
    projector = str(inner.get("projector_type") or "").lower()
    for name, what in (("domino", "Domino"), ("lilicorr", "LiLiCorr")):
        if name in projector:
            raise _later(files, what)
    if files.config.get("model_arch") == "dflare":
        raise _later(files, "DFlare")
    for prefix, what in _LATER_TENSORS.items():
        if files.has(prefix) or files.has(f"model.{prefix}"):
            raise _later(files, what)
    return Layout.ZLAB_BLOCK


def _by_model_type(files: DrafterFiles) -> Layout | None:
    kind = files.config.get("model_type")
    if kind == "mlp_speculator":
        raise _later(files, "an MLP speculator")
    if kind == "hydra" or "hydra_num_heads" in files.config or files.has("hydra_mlp."):
        return Layout.HYDRA
    if files.has("blocks.0.layers.") or files.has("medusa_heads.blocks."):
        return Layout.MEDUSA_VLLM
    if kind == "medusa" or "medusa_num_heads" in files.config or files.has("0.0.linear."):
        return Layout.MEDUSA
    return None


def _by_tensors(files: DrafterFiles) -> Layout:
    config, shapes = files.config, files.shapes
    named = " ".join(config.get("architectures") or [])
    if "block_size" in config and "target_layer_ids" in config:
        return Layout.DEEPSPEC_BLOCK
    if files.has("layers.0.self_attn.") and not files.has("layers.0.mlp."):
        return Layout.KANGAROO
    eagle3 = any(files.has(name) for name in ("midlayer.", "model.midlayer.", "d2t", "draft_id_to_target_id"))
    if eagle3 or "Eagle3" in named or files.has("layers.0.hidden_norm."):
        return Layout.EAGLE3
    fused = shapes.get("fc.weight") or shapes.get("model.fc.weight")
    if fused is not None and len(fused) == 2 and fused[1] == 2 * fused[0]:
        return Layout.EAGLE1
    if files.has("mtp.") or files.has(f"model.layers.{config.get('num_hidden_layers')}.eh_proj."):
        return Layout.MTP
    return Layout.LANGUAGE_MODEL


def build_net(files: DrafterFiles, target: ModelConfig, words: TargetEmbeddings) -> DraftNet:
    """The network of a drafter's files for a target, in float32 and on the CPU, with all of its tensors loaded."""
    layout = recognise(files)
    if layout not in _BUILDERS:
        raise refused(files, f"it is {layout}, a model of its own and no network on a target; use it as a draft model")
    if words.config.vocab_size != target.vocab_size or words.config.hidden_size != target.hidden_size:
        raise misfit(files, "the target's words and its configuration are of two different targets")
    with refusing_malformed(f"the config.json of {files.name}"):
        return _BUILDERS[layout](files, target, words)


def self_test(net: nn.Module, words: TargetEmbeddings) -> None:
    """Run a network on a few random rows, and refuse it if anything comes out that is no number."""
    first = next(net.parameters())
    rows = _Rows(words, first.dtype, first.device)
    with torch.no_grad():
        if isinstance(net, BlockNet):
            outputs = _try_block(net, rows)
        elif isinstance(net, HeadStack):
            outputs = _try_heads(net, rows)
        elif isinstance(net, Kangaroo):
            outputs = _try_shallow(net, rows)
        elif isinstance(net, Eagle3 | Eagle1 | MultiToken):
            outputs = _try_recurrent(net, rows)
        else:
            raise CheckpointError(f"A {type(net).__name__} is no network of a drafter.")
    for what, value in outputs.items():
        broken = int((~value.isfinite()).sum())
        if broken:
            raise CheckpointError(
                f"The drafter cannot be used: {broken} of {value.numel()} numbers of its {what} are NaN or infinite on "
                "random input. Its weights are damaged, or it needs another precision."
            )


class _Rows:
    """Random input, the same every time."""

    def __init__(self, words: TargetEmbeddings, dtype: torch.dtype, device: torch.device) -> None:
        self.words, self.dtype, self.device = words, dtype, device
        self._random = torch.Generator().manual_seed(0)

    def features(self, count: int, width: int) -> Tensor:
        """[count, width]."""
        return torch.randn(count, width, generator=self._random).to(self.device, self.dtype)

    def tokens(self, *shape: int) -> Tensor:
        """[*shape]."""
        return torch.randint(self.words.config.vocab_size, shape, generator=self._random).to(self.words.device)

    def embedded(self, tokens: Tensor) -> Tensor:
        """[*] -> [*, hidden]."""
        return self.words.embed(tokens).to(self.device, self.dtype)


def _attention(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    """[N, H, D], [M, K, D], [M, K, D] -> [N, H * D]."""
    query, key, value = (part.transpose(0, 1)[None] for part in (query, key, value))
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=True)
    return mixed[0].transpose(0, 1).flatten(1)


def _causal(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return _attention(query, key, value, causal=True)


def _try_recurrent(net: Eagle3 | Eagle1 | MultiToken, rows: _Rows) -> dict[str, Tensor]:
    features = rows.features(4, len(net.reads) * rows.words.config.hidden_size)
    fused = net.fuse(features)
    embedded, positions = rows.embedded(rows.tokens(4)), torch.arange(4, device=rows.device)
    once = net.run(embedded, fused, positions, _causal)
    twice = net.run(embedded, once, positions, _causal)  # on its own outputs, as it will be from the second token on
    return {"fused features": fused, "outputs": twice, "logits": net.logits(twice)}


def _try_shallow(net: Kangaroo, rows: _Rows) -> dict[str, Tensor]:
    features, positions = rows.features(4, rows.words.config.hidden_size), torch.arange(4, device=rows.device)
    output = net.run(features, positions, _causal)
    return {"outputs": output, "logits": net.head(output)}


def _try_block(net: BlockNet, rows: _Rows) -> dict[str, Tensor]:
    size = net.spec.block_size
    context = net.context(rows.features(3, len(net.reads) * rows.words.config.hidden_size))
    before = torch.arange(3, device=rows.device)

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        known = net.keys_values(layer, context, before)
        return _attention(query, torch.cat([known[0], key]), torch.cat([known[1], value]), causal=False)

    tokens = rows.tokens(size)
    embedded = rows.embedded(tokens)
    output = net.run(embedded, torch.arange(3, 3 + size, device=rows.device), attend)
    logits = net.corrected(output, net.head(output), tokens.to(rows.device), embedded)
    found = {"context": context, "outputs": output, "logits": logits}
    if net.confidence_head is not None:
        found["confidence"] = net.confidence_head(output, tokens.to(rows.device))
    return found


def _try_heads(net: HeadStack, rows: _Rows) -> dict[str, Tensor]:
    feature = rows.features(2, net.hidden)
    return {
        f"head {number}": net.logits(number, feature, rows.embedded(rows.tokens(2, number + 1)))
        for number in range(net.guesses)
    }
