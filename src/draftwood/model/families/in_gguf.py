"""How families lie in GGUF files: metadata as the entries of a `config.json`, and tensors under GGUF's names.

A file's metadata are translated into the entries that the family's own reader knows (`usual_entries`, then the form's
`entries`), so that what a family is stands in one place. Tensors are rows of GGUF's: one expert of all, some rows of a
fused matrix, rows in another order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..config import ModelConfig
from ..reading import integer, layer_count, number, optional_integer
from ..spec import ATTENTION_NORM, ATTENTION_OUTPUT_NORM, MLP_NORM, MLP_OUTPUT_NORM
from .base import EXPERT, LAYER_NAME, TURNED, Change, halves_of_pairs, lower_half, upper_half

USUAL = {
    ATTENTION_NORM: "attn_norm",
    MLP_NORM: "ffn_norm",
    ATTENTION_OUTPUT_NORM: "post_attention_norm",
    MLP_OUTPUT_NORM: "post_ffw_norm",
    "self_attn.o_proj": "attn_output",
    "self_attn.sinks": "attn_sinks",
    "mlp.router": "ffn_gate_inp",
    "mlp.shared_gate": "ffn_gate_inp_shexp",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    **{f"mlp.shared.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    **{f"mlp.experts.*.{part}_proj": f"ffn_{part}_exps" for part in ("gate", "up", "down")},
}
_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "model.norm.bias": "output_norm.bias",
    "lm_head.weight": "output.weight",
}


@dataclass(frozen=True)
class Rows:
    """Some rows of a tensor that holds more than one of ours."""

    name: str
    pick: Change | None = None  # (config, all of it) -> rows; None: all


FUSED_GATE_UP = {"mlp.gate_proj": Rows("ffn_up", upper_half), "mlp.up_proj": Rows("ffn_up", lower_half)}


@dataclass(frozen=True)
class GgufPlace:
    """Where one tensor of ours lies: in which tensor, which entry of its first dimension, which rows of that."""

    name: str
    entry: int | None
    picks: tuple[Change, ...]


def _no_entries(own: Mapping[str, Any]) -> dict[str, Any]:
    return {}


def _plain(own: Mapping[str, Any]) -> bool:
    return not own.get("expert_count")


def has_experts(own: Mapping[str, Any]) -> bool:
    """Whether metadata are those of a mixture of experts."""
    return bool(own.get("expert_count"))


@dataclass(frozen=True)
class GgufForm:
    """A family in GGUF files."""

    architecture: str
    entries: Callable[[Mapping[str, Any]], dict[str, Any]] = _no_entries  # of a config.json, beyond the usual ones
    tensors: Mapping[str, str | Rows] = field(default_factory=dict)  # our modules of a layer, where not the usual names
    interleaved: bool = False  # rotates neighbours, 0 with 1
    fits: Callable[[Mapping[str, Any]], bool] = _plain  # where families share an architecture, whether it is this one

    def place(self, name: str, config: ModelConfig) -> GgufPlace | None:
        """Where a tensor of ours lies, None where GGUF has no such thing."""
        match = LAYER_NAME.fullmatch(name)
        if match is None:
            return GgufPlace(_TOP[name], None, ()) if name in _TOP else None
        layer, module, kind = match.groups()
        expert = EXPERT.search(f".{module}.")
        pattern = module if expert is None else EXPERT.sub(".experts.*.", f".{module}.").strip(".")
        theirs = self.tensors.get(pattern, USUAL.get(pattern))
        if theirs is None:
            return None
        rows = theirs if isinstance(theirs, Rows) else Rows(theirs)
        turned = _in_halves if self.interleaved and module in TURNED else None
        picks = tuple(pick for pick in (rows.pick, turned) if pick is not None)
        entry = None if expert is None else int(expert[1])
        return GgufPlace(f"blk.{layer}.{rows.name}.{kind}", entry, picks)


def _in_halves(config: ModelConfig, rows: Any) -> Any:
    """Rows of queries or keys that turn neighbours, in the order in which we turn them."""
    rotated = config.layer_specs[0].attention.rotated
    return rows[halves_of_pairs(torch.arange(rows.shape[0]), config.head_dim, rotated)]


def usual_entries(
    own: Mapping[str, Any], names: Collection[str], vectors: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    """The entries of a `config.json` that most families read. `vectors`: the values of tensors that scale rotation."""
    heads, hidden = integer(own, "attention.head_count"), integer(own, "embedding_length")
    head_dim = integer(own, "attention.key_length", hidden // max(heads, 1))
    rotated = optional_integer(own, "rope.dimension_count") or head_dim
    eps = number(own, "attention.layer_norm_rms_epsilon", own.get("attention.layer_norm_epsilon"))
    biases = "blk.0.attn_q.bias" in names or "blk.0.attn_qkv.bias" in names
    # Readers round the product down again: it must not be a hair below what is meant.
    share = 1.0 if rotated == head_dim else math.nextafter(rotated / max(head_dim, 1), 2)
    entries = {
        "hidden_size": hidden,
        "intermediate_size": integer(own, "feed_forward_length"),
        "num_hidden_layers": layer_count(own, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": integer(own, "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": integer(own, "context_length"),
        "sliding_window": optional_integer(own, "attention.sliding_window") or None,
        "tie_word_embeddings": "output.weight" not in names,
        "attention_bias": biases,
        "use_qkv_bias": biases,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in names,
        "attention_out_bias": "blk.0.attn_output.bias" in names,
        "mlp_bias": "blk.0.ffn_up.bias" in names,
        "rope_theta": number(own, "rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(own, vectors),
    }
    entries |= dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "norm_eps"), eps)
    return entries | dict.fromkeys(("partial_rotary_factor", "rotary_pct"), share)


def _rope_scaling(own: Mapping[str, Any], vectors: Mapping[str, Sequence[float]]) -> dict[str, Any] | None:
    """Rotary embedding as a `config.json` would describe it."""
    context = integer(own, "context_length")
    original = optional_integer(own, "rope.scaling.original_context_length") or context
    stretched = vectors.get("rope_freqs.weight")
    if stretched is not None:  # Llama 3.1's scaling, already worked out for every pair
        return _longrope(stretched, stretched, original, 1.0)
    long, short = vectors.get("rope_factors_long.weight"), vectors.get("rope_factors_short.weight")
    if long is not None and short is not None:
        return _longrope(short, long, original, own.get("rope.scaling.attn_factor"))
    kind = str(own.get("rope.scaling.type") or "none")
    factor = number(own, "rope.scaling.factor", number(own, "rope.scale_linear", 0) or 1.0)
    if kind == "yarn":
        # GGUF's factor of attention multiplies the paper's, Hugging Face's replaces it.
        attention = number(own, "rope.scaling.attn_factor", 1.0) * (1 + 0.1 * math.log(max(factor, 1.0)))
        betas = {name: own.get(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
        return {
            "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original,
            "attention_factor": attention, **betas,
        }  # fmt: skip
    if kind in ("none", "linear"):
        return None if factor == 1.0 else {"rope_type": "linear", "factor": factor}
    return {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}


def _longrope(
    short: Sequence[float], long: Sequence[float], original: int, attention: float | None
) -> dict[str, Any]:  # fmt: skip
    return {
        "rope_type": "longrope", "short_factor": list(short), "long_factor": list(long),
        "original_max_position_embeddings": original, "attention_factor": attention,
    }  # fmt: skip
