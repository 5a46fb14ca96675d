"""Trained drafters to files, in layouts that others read too, where those can say what the network is.

What is the target's is never written: no embedding, and no rows of its head. What only we understand stands in
config.json under `draftwood`.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from draftwood.errors import CheckpointError, InvalidRequest
from draftwood.model.config import ModelConfig
from draftwood.nets.dflash import BlockNet, HiddenCorrection, Markov
from draftwood.nets.eagle import Eagle1, Eagle3, Eagle3Spec, MultiToken
from draftwood.nets.kangaroo import Kangaroo
from draftwood.nets.layouts import Layout, open_drafter, recognise
from draftwood.nets.medusa import HeadStack
from draftwood.nets.pard import ParallelEagle
from draftwood.nets.parts import DraftHead, LowRankHead, NormedHead, VocabularyHead
from draftwood.nets.student import MaskedStudent, Student

SPECULATORS_VERSION = "0.9.0"
PRECISIONS = (torch.bfloat16, torch.float16, torch.float32)
_NO_DRAFTER = (Layout.LANGUAGE_MODEL, Layout.MTP, Layout.PARD)
_SPECULATIVE_TOKENS = 5  # what speculators' files propose for networks that can guess any number

Written = tuple[dict[str, Any], dict[str, Tensor]]  # config.json, and the tensors


def export(
    net: nn.Module,
    folder: str | Path,
    target_name: str,
    info: Mapping[str, Any],
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Write a network to a folder that `open_drafter` and its layout's own readers open.

    `info` goes into config.json as it is. A folder that holds anything else than a drafter is left alone.
    """
    if dtype not in PRECISIONS:
        raise InvalidRequest(f"A drafter is written as bfloat16, float16 or float32, not as {dtype}.")
    path = Path(folder).expanduser()
    refuse_to_overwrite(path)
    config, tensors = written(net, target_name)
    config["draftwood"] = {**config.get("draftwood", {}), "info": dict(info)}
    write_drafter(path, config, tensors, dtype)
    return path


def written(net: nn.Module, target_name: str) -> Written:
    """A network's configuration and tensors, without anything of the target's."""
    writer = next((write for kind, write in _WRITERS.items() if isinstance(net, kind)), None)
    if writer is None:
        raise InvalidRequest(f"A {type(net).__name__} is no network of a drafter, so there is no layout for it.")
    return writer(net, target_name)


def write_drafter(path: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """A folder of config.json and model.safetensors, each of which appears whole or not at all."""
    stored = {
        name: value.detach().to("cpu", dtype if value.is_floating_point() else value.dtype).contiguous().clone()
        for name, value in tensors.items()
    }
    _write(path, {**config, "torch_dtype": str(dtype).removeprefix("torch.")}, stored)


def refuse_to_overwrite(path: Path) -> None:
    """A folder that holds anything else than a drafter is left alone."""
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{path} is a file; a drafter is written to a folder.")
    if not (path / "config.json").exists():
        others = sorted(file.name for pattern in ("*.safetensors", "*.gguf", "*.bin") for file in path.glob(pattern))
        if others:
            raise CheckpointError(f"{path} holds {others[0]} and no config.json; choose another folder.")
        return
    try:
        layout = recognise(open_drafter(path, allow_pickle=False))
    except CheckpointError as error:
        raise CheckpointError(
            f"{path} holds something that is no drafter of ours ({error}); choose another."
        ) from error
    if layout in _NO_DRAFTER:
        raise CheckpointError(f"{path} holds {layout}, which is not overwritten by a drafter; choose another folder.")
    others = sorted(file.name for file in path.glob("*.safetensors*") if file.name != "model.safetensors")
    if others:
        raise CheckpointError(f"{path} holds {others[0]} too, which would be read beside the drafter; remove it first.")


def _write(path: Path, config: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
    """Each file appears whole or not at all."""
    try:
        text = json.dumps(config, indent=2) + "\n"
    except TypeError as error:
        raise InvalidRequest(f"The drafter's info cannot be written as JSON: {error}.") from error
    path.mkdir(parents=True, exist_ok=True)
    weights, description = path / f".model.{os.getpid()}.tmp", path / f".config.{os.getpid()}.tmp"
    try:
        save_file(tensors, weights, metadata={"format": "pt"})
        description.write_text(text, encoding="utf-8")
        os.replace(weights, path / "model.safetensors")
        os.replace(description, path / "config.json")
    finally:
        for left in (weights, description):
            left.unlink(missing_ok=True)


def layer_config(config: ModelConfig) -> dict[str, Any]:
    """A network's layers as a Hugging Face configuration."""
    plain = "qwen2" if config.qkv_bias and not config.output_bias else "llama"
    return {
        "model_type": "qwen3" if config.qk_norm else plain,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "rope_scaling": _rope_scaling(config),
        "hidden_act": config.activation,
        "attention_bias": config.qkv_bias and config.output_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "layer_types": ["full_attention"] * config.num_layers,
    }


def _rope_scaling(config: ModelConfig) -> dict[str, Any] | None:
    rope = config.rope
    if rope.kind == "default":
        return None
    given = dataclasses.asdict(rope)
    scaling = {key: value for key, value in given.items() if value is not None and value != ()}
    for key in ("theta", "kind", "original_max_positions", "max_positions"):
        scaling.pop(key, None)
    return {"rope_type": rope.kind, "original_max_position_embeddings": rope.original_max_positions, **scaling}


def speculators_config(kind: str, architecture: str, net_config: ModelConfig, target_name: str, guesses: int) -> dict:
    """config.json of a drafter in speculators' format."""
    return {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_version": SPECULATORS_VERSION,
        "transformer_layer_config": layer_config(net_config),
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": guesses,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target_name, "architectures": []},
        },
    }


def own_parameters(net: nn.Module, skip: tuple[str, ...]) -> dict[str, Tensor]:
    """Those whose names do not begin with one of `skip`."""
    return {name: value for name, value in net.named_parameters() if not name.startswith(skip)}


def _head_tensors(head: VocabularyHead, name: str) -> dict[str, Tensor]:
    """What is the network's own of a head."""
    if isinstance(head, LowRankHead):
        return {f"{name}.down.weight": head.down.weight, f"{name}.up.weight": head.up.weight}
    if not isinstance(head, DraftHead):
        raise InvalidRequest(f"A head of the kind {type(head).__name__} cannot be exported.")
    parts = {"weight": head.weight, "bias": head.bias}
    return {f"{name}.{part}": value for part, value in parts.items() if value is not None}


def _is_shared(head: VocabularyHead) -> bool:
    return isinstance(head, DraftHead) and not head.own


def _with_head(head: VocabularyHead, config: dict[str, Any], tensors: dict[str, Tensor]) -> Written:
    """Add a head, and which tokens it guesses: offsets, and a mask over the target's vocabulary."""
    tensors = {**tensors, **_head_tensors(head, "lm_head")}
    if head.tokens is not None:
        tokens = head.tokens.cpu()
        tensors["d2t"] = tokens - torch.arange(len(tokens))
        tensors["t2d"] = torch.zeros(head.vocabulary, dtype=torch.bool).index_fill(0, tokens, True)
    ours = {"shared_head": _is_shared(head), "tokens": "all" if head.tokens is None else "draft_tokens"}
    size = head.vocabulary if head.tokens is None else len(head.tokens)
    return {**config, "draft_vocab_size": size, "draftwood": {**config.get("draftwood", {}), **ours}}, tensors


def _eagle3(net: Eagle3, target_name: str) -> Written:
    named = speculators_config("eagle3", "Eagle3Speculator", net.config, target_name, _SPECULATIVE_TOKENS)
    config = {**named, **eagle3_switches(net.spec), "embed_requires_grad": False}
    return _with_head(net.head, config, own_parameters(net, ("lm_head.", "head.")))


def _peagle(net: ParallelEagle, target_name: str) -> Written:
    config = {
        **speculators_config("peagle", "PEagleSpeculator", net.config, target_name, net.ahead.guesses),
        **eagle3_switches(net.spec),
        "mask_token_id": net.ahead.mask_token,
        "embed_requires_grad": net.embed_tokens is not None,
    }
    tensors = own_parameters(net, ("lm_head.", "head."))
    return _with_head(net.head, config, {**tensors, "mask_hidden": net.mask_hidden.view(1, 1, -1)})


def eagle3_switches(spec: Eagle3Spec) -> dict[str, Any]:
    """The conventions of an EAGLE-3, under speculators' names."""
    return {
        "norm_before_residual": spec.norm_before_residual,
        "norm_before_fc": spec.norm_before_fc,
        "fc_norm": spec.fc_norm,
        "norm_output": spec.norm_output,
        "target_hidden_size": spec.target_hidden,
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in spec.reads],
    }


def _eagle1(net: Eagle1, target_name: str) -> Written:
    config = {
        **speculators_config("eagle", "EagleSpeculator", net.config, target_name, _SPECULATIVE_TOKENS),
        "fusion_bias": net.fc.bias is not None,
        "layernorms": False,
        "draftwood": {"layers": net.config.num_layers},
    }
    parts = own_parameters(net, ("head.",))
    named = {_renamed(name, {"fc.": "fusion_fc.", "layers.0.": "transformer."}): part for name, part in parts.items()}
    return _with_head(net.head, config, named)


def _mtp(net: MultiToken, target_name: str) -> Written:
    if net.config.num_layers != 1 or net.head.tokens is not None:
        raise InvalidRequest("Multi-token prediction is exported with one layer and the whole vocabulary.")
    config = {
        **speculators_config("mtp", "MTPDraftModel", net.config, target_name, _SPECULATIVE_TOKENS),
        "num_nextn_predict_layers": 1,
    }
    names = {
        "hnorm.": "mtp_layers.0.hidden_layernorm.",
        "enorm.": "mtp_layers.0.token_layernorm.",
        "eh_proj.": "mtp_layers.0.input_proj.",
        "norm.": "mtp_layers.0.final_layernorm.",
        "layers.0.": "mtp_layers.0.",
    }
    parts = {_renamed(name, names): part for name, part in own_parameters(net, ("head.",)).items()}
    return _with_head(net.head, config, parts)


def _renamed(name: str, prefixes: Mapping[str, str]) -> str:
    old = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
    return prefixes.get(old, "") + name.removeprefix(old)


def _block(net: BlockNet, target_name: str) -> Written:
    spec, table, sure = net.spec, net.markov_head, net.confidence_head
    kind = "dspark" if isinstance(table, Markov) or sure is not None else "dflash"
    architecture = {"dspark": "DSparkSpeculator", "dflash": "DFlashSpeculator"}[kind]
    config = {
        **speculators_config(kind, architecture, net.config, target_name, spec.guesses),
        "block_size": spec.block_size,
        "target_hidden_size": spec.target_hidden,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in spec.reads],
        "mask_token_id": spec.mask_token,
        "sliding_window_non_causal": False,
        "sample_from_anchor": spec.from_anchor,
    }
    if kind == "dspark":
        wide = sure is not None and sure.proj.in_features > net.config.hidden_size
        config |= {
            "markov_rank": table.markov_w1.embedding_dim if isinstance(table, Markov) else 0,
            "markov_head_type": "vanilla",
            "enable_confidence_head": sure is not None,
            "confidence_head_with_markov": wide,
        }
    tensors = own_parameters(net, ("head.", "markov_head."))
    if isinstance(table, Markov):
        tensors |= {f"markov_head.{name}": part for name, part in table.named_parameters()}
    elif isinstance(table, HiddenCorrection):
        tensors |= _correction_tensors(table)
    head = net.head.head if isinstance(net.head, NormedHead) else net.head
    return _with_head(head, config, tensors)


def _correction_tensors(correction: HiddenCorrection) -> dict[str, Tensor]:
    if correction.hidden_norm is not None:
        return {f"hidden_correction.{name}": part for name, part in correction.named_parameters()}
    up, gate = correction.up_proj, correction.gate_proj  # as TreeFlash publishes it
    return {
        "ar_approximation.ug.weight": torch.cat([up.weight, gate.weight]),
        "ar_approximation.ug.bias": torch.cat([up.bias, gate.bias]),
        "ar_approximation.d.weight": correction.down_proj.weight,
        "ar_approximation.norm.weight": correction.embed_norm.weight,
    }


def _heads(net: HeadStack, target_name: str) -> Written:
    first = net.heads[0]
    shared = _is_shared(first)
    if any(_is_shared(head) != shared for head in net.heads):
        raise InvalidRequest("Heads of which some are the target's and some their own cannot be exported together.")
    single = not shared and all(head is first for head in net.heads)
    tensors = block_tensors(net)
    for number, head in enumerate(net.heads[:1] if single else net.heads):
        tensors |= _head_tensors(head, f"{'hydra_lm_head' if net.grounded else 'lm_heads'}.{number}")
    if first.tokens is not None:
        tensors["token_map"] = first.tokens.cpu()
    config = {
        "hidden_size": net.hidden,
        "vocab_size": first.vocabulary,
        "truncated_vocab_size": first.vocabulary if first.tokens is None else len(first.tokens),
        "original_lm_head": single,
        "base_model_name_or_path": target_name,
        "draftwood": {"shared_head": shared, "tokens": "all" if first.tokens is None else "token_map"},
    }
    return {**config, **stack_config(net)}, tensors


def block_tensors(net: HeadStack) -> dict[str, Tensor]:
    """Layers of the heads, under vLLM's names for Medusa and under Hydra's own."""
    tensors: dict[str, Tensor] = {}
    for name, value in net.blocks.named_parameters():
        head, layer, rest = name.split(".", 2)
        medusa = f"blocks.{head}.layers.{layer}.{rest.removeprefix('linear.')}"
        tensors[f"hydra_mlp.{name}" if net.grounded else medusa] = value
    return tensors


def stack_config(net: HeadStack) -> dict[str, Any]:
    """Which heads they are, and how many."""
    heads, layers = len(net.heads), len(net.blocks[0])  # type: ignore[arg-type]
    if net.grounded:
        numbers = {"hydra_num_heads": heads, "hydra_num_layers": layers}
        return {"model_type": "hydra", "hydra_head_arch": "mlp", "grounded_heads": True, **numbers}
    numbers = {"num_heads": heads, "num_hidden_layers": layers}
    return {"model_type": "medusa", "architectures": ["MedusaModel"], "medusa_fc_bias": True, **numbers}


def _kangaroo(net: Kangaroo, target_name: str) -> Written:
    config = {
        **layer_config(net.config),
        "architectures": ["KangarooAdapter"],
        "exit_layer": net.exit_layer,
        "base_model_name_or_path": target_name,
    }
    return _with_head(net.head, config, own_parameters(net, ("head.",)))


def _masked_student(net: MaskedStudent, target_name: str) -> Written:
    """As PARD's own, but for the words."""
    config, tensors = _student(net, target_name)
    ours = {**config["draftwood"], "guesses": net.guesses}
    return {**config, "spd_type": "pard", "pard_token": net.mask_token, "draftwood": ours}, tensors


def _student(net: Student, target_name: str) -> Written:
    """As a Llama checkpoint, but for the words."""
    layers = layer_config(net.config)
    architecture = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}.get(layers["model_type"])
    config = {
        **layers,
        "architectures": [architecture or "LlamaForCausalLM"],
        "tie_word_embeddings": net.config.tied_head,
        "draftwood": {"student": True, "target": target_name},
    }
    return config, own_parameters(net, ())


_WRITERS: dict[type[nn.Module], Callable[[Any, str], Written]] = {
    ParallelEagle: _peagle,
    Eagle3: _eagle3,
    Eagle1: _eagle1,
    MultiToken: _mtp,
    BlockNet: _block,
    HeadStack: _heads,
    Kangaroo: _kangaroo,
    MaskedStudent: _masked_student,
    Student: _student,
}
