"""Trained drafters as vLLM, SGLang and speculators load them: `draftwood export DRAFTER --for vllm`.

Our own export leaves out what is the target's. An engine that starts from an empty head drafts from nothing, so here
the rows of the head are written, low ranks multiplied out. What an engine computes differently is refused with
that difference: a drafter that is nearly right guesses badly and nothing would ever tell.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftwood.errors import InvalidRequest
from draftwood.model.tokenizer import Tokenizer
from draftwood.nets.dflash import BlockNet, Independent, Markov
from draftwood.nets.eagle import Eagle1, Eagle3, MultiToken
from draftwood.nets.embeddings import TargetEmbeddings
from draftwood.nets.export import (
    PRECISIONS,
    Written,
    layer_config,
    own_parameters,
    refuse_to_overwrite,
    write_drafter,
    written,
)
from draftwood.nets.kangaroo import Kangaroo
from draftwood.nets.medusa import HeadStack
from draftwood.nets.pard import ParallelEagle
from draftwood.nets.parts import DraftHead, LowRankHead, VocabularyHead
from draftwood.nets.student import MaskedStudent, Student


class Destination(StrEnum):
    """Who is to load it."""

    VLLM = "vllm"
    SGLANG = "sglang"
    SPECULATORS = "speculators"


@dataclass(frozen=True)
class Target:
    """The model it drafts for: what its users call it, its words, and the token that stands for a mask.

    The mask matters only to a block head that learnt an embedding of its own for it; its row is then replaced. The
    tokenizer is written beside drafters that are language models.
    """

    name: str
    words: TargetEmbeddings
    mask_token: int | None = None
    tokenizer: Tokenizer | None = None


@dataclass(frozen=True)
class Exported:
    """Where it lies, and how the engine is told of it."""

    folder: Path
    usage: str


def export_for(
    destination: Destination, net: nn.Module, folder: str | Path, target: Target, *, dtype: torch.dtype = torch.bfloat16
) -> Exported:
    """Write a network to a folder that `destination` loads, and our own loader too."""
    if dtype not in PRECISIONS:
        raise InvalidRequest(f"A drafter is written as bfloat16, float16 or float32, not as {dtype}.")
    writer = next((write for kind, write in _WRITERS[destination].items() if isinstance(net, kind)), None)
    if writer is None:
        raise _refused(destination, net, _missing(destination, net))
    path = Path(folder).expanduser()
    refuse_to_overwrite(path)
    config, tensors = writer(net, target)
    write_drafter(path, config, tensors, dtype)
    if isinstance(net, Student) and target.tokenizer is not None:
        target.tokenizer.save(path)
    return Exported(path, _usage(destination, net, path, target))


def _refused(destination: Destination, net: nn.Module, why: str) -> InvalidRequest:
    return InvalidRequest(f"This {_NAMES[type(net)]} cannot be exported for {_SPOKEN[destination]}: {why}.")


_SPOKEN = {Destination.VLLM: "vLLM", Destination.SGLANG: "SGLang", Destination.SPECULATORS: "speculators"}
_NAMES: Mapping[type, str] = {
    ParallelEagle: "P-EAGLE drafter",
    Eagle3: "EAGLE-3 drafter",
    Eagle1: "EAGLE-1 drafter",
    MultiToken: "multi-token-prediction layer",
    BlockNet: "block drafter",
    HeadStack: "stack of heads",
    Kangaroo: "Kangaroo adapter",
    MaskedStudent: "masked student",
    Student: "student",
}


def _missing(destination: Destination, net: nn.Module) -> str:
    """Why an engine has no place for a kind of network."""
    if isinstance(net, Kangaroo):
        return "the engine has no drafters that leave the target early"
    if isinstance(net, HeadStack):
        return "the engine has no such heads on the target's last feature"
    if isinstance(net, MultiToken):
        return "the engine reads such a layer from the target's own files only"
    if isinstance(net, Student) and destination is Destination.SPECULATORS:
        return "it is a language model; export it for vLLM or SGLang, which take such drafters"
    return "the engine has no such drafters"


def _require(met: bool, destination: Destination, net: nn.Module, why: str) -> None:
    if not met:
        raise _refused(destination, net, why)


# --- heads


def _rows(head: VocabularyHead, destination: Destination, net: nn.Module) -> Tensor:
    """The head as one matrix. [R, hidden]."""
    if isinstance(head, LowRankHead):
        return (head.up.weight @ head.down.weight).detach()
    _require(isinstance(head, DraftHead), destination, net, f"its head is a {type(head).__name__}, and no matrix")
    assert isinstance(head, DraftHead)
    _require(head.bias is None, destination, net, "its head has a bias, and the engine's heads have none")
    return head.matrix.detach()


def _is_whole_and_shared(head: VocabularyHead) -> bool:
    return isinstance(head, DraftHead) and not head.own and head.tokens is None and head.bias is None


def _with_rows(done: Written, head: VocabularyHead, destination: Destination, net: nn.Module) -> Written:
    """The head's rows in place of what we would have written of it."""
    config, tensors = done
    kept = {name: value for name, value in tensors.items() if not name.startswith("lm_head.")}
    return config, {**kept, "lm_head.weight": _rows(head, destination, net)}


def _plain_projections(net: Any, destination: Destination) -> None:
    """The biases that the engines' layers have are those of all projections of attention, or none."""
    config = net.config
    _require(config.qkv_bias == config.output_bias, destination, net, "only some of its projections have biases")
    _require(not (config.mlp_bias and config.qk_norm), destination, net, "its MLP has biases, which Qwen3's has not")


# --- speculators' format, which vLLM reads too


def _eagle3(destination: Destination) -> Callable[[Any, Target], Written]:
    def write(net: Eagle3, target: Target) -> Written:
        _plain_projections(net, destination)
        config, tensors = _with_rows(written(net, target.name), net.head, destination, net)
        # vLLM takes these from the layers' configuration; without the first it counts three features.
        spec = net.spec
        told = {"num_aux_hidden_states": len(spec.reads), "fc_norm": spec.fc_norm, "norm_output": spec.norm_output}
        layers = {**config["transformer_layer_config"], **(told if destination is Destination.VLLM else {})}
        return {**config, "transformer_layer_config": layers}, tensors

    return write


def _block(destination: Destination) -> Callable[[Any, Target], Written]:
    def write(net: BlockNet, target: Target) -> Written:
        _check_block(net, destination)
        config, tensors = _with_rows(written(net, target.name), net.head, destination, net)
        tensors.pop("mask_embedding", None)
        mask = net.spec.mask_token
        if net.mask_embedding is not None:
            mask = _mask_of(target)
            tensors["embed_tokens.weight"] = _with_row(target.words, mask, net.mask_embedding)
        return {**config, "mask_token_id": mask, "sliding_window_non_causal": True}, tensors

    return write


def _check_block(net: BlockNet, destination: Destination) -> None:
    corrected = isinstance(net.markov_head, Markov | Independent)
    _require(corrected and not net.spec.norm_in_head, destination, net, "the engine has no correction as TreeFlash's")
    _require(
        net.config.qk_norm,
        destination,
        net,
        "its layers do not norm queries and keys, and the engine's block layers (Qwen3's) always do",
    )
    _require(not net.config.mlp_bias, destination, net, "its MLP has biases, and the engine's block layers have none")
    _require(
        net.confidence_head is None or isinstance(net.markov_head, Markov),
        destination,
        net,
        "it has a confidence head and no Markov table, and the engine's DSpark needs both",
    )
    _plain_projections(net, destination)


def _mask_of(target: Target) -> int:
    """The vocabulary's last token unless another is wanted: one that pads it, or the rarest of all."""
    size = target.words.config.vocab_size
    mask = size - 1 if target.mask_token is None else target.mask_token
    if not 0 <= mask < size:
        raise InvalidRequest(f"The mask token is {mask}, and the target has {size} tokens.")
    return mask


def _with_row(words: TargetEmbeddings, token: int, row: Tensor) -> Tensor:
    """The target's embedding with another row for one token. [V, hidden]."""
    table = words.embed(torch.arange(words.config.vocab_size)).detach().clone()
    table[token] = row.detach().to(table.dtype)
    return table


# --- vLLM's others


def _eagle1(destination: Destination) -> Callable[[Any, Target], Written]:
    """As SafeAILab publishes it; both engines take embedding and head from the target."""
    vllm = destination is Destination.VLLM

    def write(net: Eagle1, target: Target) -> Written:
        shared = isinstance(net.head, DraftHead) and not net.head.own and net.head.bias is None
        _require(shared, destination, net, "its head is its own, and the engine takes the target's")
        _require(not net.config.qk_norm, destination, net, "its layers norm queries and keys, and the engine's do not")
        _plain_projections(net, destination)
        tensors = own_parameters(net, ("head.",))
        bias = tensors.get("fc.bias")
        _require(
            not vllm or bias is None or not bool(bias.any()),
            destination,
            net,
            "its input projection has a bias, and the engine's has none",
        )
        tensors.pop("fc.bias", None)
        if not vllm:  # the engine has one, and would leave it as it was initialised
            tensors["fc.bias"] = torch.zeros(net.config.hidden_size) if bias is None else bias
        architecture = "LlamaForCausalLM" if vllm else "LlamaForCausalLMEagle"
        return {**layer_config(net.config), **_of(target), "architectures": [architecture], "bias": not vllm}, tensors

    return write


def _of(target: Target) -> dict[str, Any]:
    return {"base_model_name_or_path": target.name}


def _medusa(net: HeadStack, target: Target) -> Written:
    """Each head, or the one for all of them, with the rows it has."""
    _require(
        not net.grounded, Destination.VLLM, net, "its heads see the tokens in between (Hydra), and Medusa's do not"
    )
    config, tensors = written(net, target.name)
    kept = {name: value for name, value in tensors.items() if not name.startswith("lm_heads.")}
    one = all(_is_same(head, net.heads[0]) for head in net.heads)
    for number, head in enumerate(net.heads[:1] if one else net.heads):
        kept[f"lm_heads.{number}.weight"] = _rows(head, Destination.VLLM, net)
    ours = {**config["draftwood"], "shared_head": False}
    return {**config, "original_lm_head": one, "draftwood": ours}, kept


def _is_same(head: VocabularyHead, other: VocabularyHead) -> bool:
    return head is other or all(isinstance(one, DraftHead) and not one.own for one in (head, other))


def _student(destination: Destination) -> Callable[[Any, Target], Written]:
    """A language model like any other: the words are written too."""

    def write(net: Student, target: Target) -> Written:
        masked = isinstance(net, MaskedStudent)
        _require(
            not masked or destination is Destination.VLLM,
            destination,
            net,
            "the engine has no models that guess behind masks",
        )
        config, tensors = written(net, target.name)
        words = {"model.embed_tokens.weight": target.words.embed(torch.arange(target.words.config.vocab_size))}
        if not net.config.tied_head:
            words["lm_head.weight"] = target.words.head()
        plain = {key: value for key, value in config.items() if key != "draftwood"}
        ours = {"draftwood": {"guesses": net.guesses, "target": target.name}} if isinstance(net, MaskedStudent) else {}
        return {**plain, **_of(target), **ours}, {**tensors, **words}

    return write


# --- SGLang's others


def _sglang_eagle3(net: Eagle3, target: Target) -> Written:
    """Its own arrangement: everything at the top of the configuration; layers are counted by their outputs."""
    here, spec = Destination.SGLANG, net.spec
    _require(not isinstance(net, ParallelEagle), here, net, "the engine has no such drafters")
    _require(net.config.num_layers == 1, here, net, "its further layers norm their input elsewhere")
    _require(
        not spec.norm_before_residual,
        here,
        net,
        "it adds the input after its norm (norm_before_residual), and SGLang's layer adds it before",
    )
    _require(not net.config.qk_norm, here, net, "its layer norms queries and keys, and SGLang's does not")
    _require(not net.config.qkv_bias and not net.config.output_bias, here, net, "its projections have biases")
    _reads_within(net, spec.reads, target)
    done, tensors = _with_rows(written(net, target.name), net.head, here, net)
    config = {
        **layer_config(net.config),
        **_of(target),
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": done["draft_vocab_size"],
        "target_hidden_size": spec.target_hidden,
        "norm_before_fc": spec.norm_before_fc,
        "fc_norm": spec.fc_norm,
        "norm_output": spec.norm_output,
        "norm_before_residual": False,
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(spec.reads)},
    }
    return config, tensors


def _reads_within(net: nn.Module, reads: tuple[int, ...], target: Target) -> None:
    last = target.words.config.num_layers - 1
    _require(
        last not in reads, Destination.SGLANG, net, f"it reads the output of the last layer ({last}), which is not kept"
    )


def _sglang_block(net: BlockNet, target: Target) -> Written:
    """SGLang takes words and head from the target, the mask's among them."""
    here = Destination.SGLANG
    _check_block(net, here)
    _reads_within(net, net.reads, target)
    _require(
        net.mask_embedding is None, here, net, "its mask is an embedding of its own, and SGLang reads the target's"
    )
    _require(
        _is_whole_and_shared(net.head),
        here,
        net,
        "its head is its own or guesses a part of the vocabulary, and SGLang takes the target's whole",
    )
    spark = isinstance(net.markov_head, Markov)
    _require(
        spark == net.spec.from_anchor, here, net, "SGLang's DSpark guesses from the anchor, and its DFlash does not"
    )
    done, tensors = written(net, target.name)
    switches = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
    config = {
        **layer_config(net.config),
        **_of(target),
        "architectures": ["Qwen3DSparkModel" if spark else "DFlashDraftModel"],
        "block_size": net.spec.block_size,
        "num_target_layers": target.words.config.num_layers,
        "dflash_config": {"mask_token_id": net.spec.mask_token, "target_layer_ids": list(net.reads)},
        **{key: done[key] for key in switches if key in done},
    }
    return config, tensors


_Writers = Mapping[type[nn.Module], Callable[[Any, Target], Written]]
_WRITERS: Mapping[Destination, _Writers] = {  # derived kinds before those that they derive from
    Destination.VLLM: {
        Eagle3: _eagle3(Destination.VLLM),
        Eagle1: _eagle1(Destination.VLLM),
        BlockNet: _block(Destination.VLLM),
        HeadStack: _medusa,
        Student: _student(Destination.VLLM),
    },
    Destination.SGLANG: {
        Eagle3: _sglang_eagle3,
        Eagle1: _eagle1(Destination.SGLANG),
        BlockNet: _sglang_block,
        Student: _student(Destination.SGLANG),
    },
    Destination.SPECULATORS: {
        Eagle3: _eagle3(Destination.SPECULATORS),
        MultiToken: lambda net, target: _with_rows(written(net, target.name), net.head, Destination.SPECULATORS, net),
        BlockNet: _block(Destination.SPECULATORS),
    },
}
_METHODS: Mapping[type[nn.Module], tuple[str, str]] = {  # what vLLM and SGLang call them
    ParallelEagle: ("eagle3", ""),
    Eagle3: ("eagle3", "EAGLE3"),
    Eagle1: ("eagle", "EAGLE"),
    HeadStack: ("medusa", ""),
    Student: ("draft_model", "STANDALONE"),
}


def _usage(destination: Destination, net: nn.Module, path: Path, target: Target) -> str:
    """The command that loads it."""
    if destination is Destination.SPECULATORS:
        return f'SpeculatorModel.from_pretrained("{path}")'
    method, algorithm = next((m for kind, m in _METHODS.items() if isinstance(net, kind)), _block_methods(net))
    guesses = net.guesses if isinstance(net, HeadStack | MaskedStudent) else _guesses(net)
    if destination is Destination.SGLANG:
        return f"--model-path {target.name} --speculative-algorithm {algorithm} --speculative-draft-model-path {path}"
    told = {"method": method, "model": str(path), "num_speculative_tokens": guesses}
    parallel = {"parallel_drafting": True} if isinstance(net, ParallelEagle | MaskedStudent) else {}
    return f"vllm serve {target.name} --speculative-config '{json.dumps(told | parallel)}'"


def _block_methods(net: nn.Module) -> tuple[str, str]:
    spark = isinstance(net, BlockNet) and isinstance(net.markov_head, Markov)
    return ("dspark", "DSPARK") if spark else ("dflash", "DFLASH")


def _guesses(net: nn.Module) -> int:
    if isinstance(net, ParallelEagle):
        return net.ahead.guesses
    return net.spec.guesses if isinstance(net, BlockNet) else 5
