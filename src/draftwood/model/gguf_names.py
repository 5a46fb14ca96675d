"""Our names of tensors in GGUF files, and the order of rows there."""

from __future__ import annotations

import torch
from torch import Tensor

from .config import ModelConfig
from .families.base import LAYER_NAME
from .gguf import GgufFile

_GGUF_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_GGUF_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "attention_output_norm": "post_attention_norm",
    "mlp_output_norm": "post_ffw_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str | None:
    """The GGUF name of a Hugging Face tensor name, None where GGUF has no such thing."""
    match = LAYER_NAME.fullmatch(name)
    if match is None:
        return _GGUF_TOP.get(name)
    layer, module, kind = match.groups()
    return f"blk.{layer}.{_GGUF_LAYER[module]}.{kind}" if module in _GGUF_LAYER else None


def embedding_rows(file: GgufFile) -> int | None:
    """Tokens of the vocabulary, by the embedding's shape."""
    embedding = file.tensors.get("token_embd.weight")
    return embedding.shape[0] if embedding else None


def row_order(name: str, config: ModelConfig) -> Tensor | None:
    """Which row of a GGUF tensor each row of ours is, None if that is the same.

    llama.cpp rotates neighbouring rows (0, 1), (2, 3) ... of a Llama head, Hugging Face rows i and i + d/2;
    its converter therefore interleaves the two halves of each q and k head. Qwen's files keep the order.
    """
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.split(".")[-2])
    if config.family != "llama" or heads is None:
        return None
    return torch.arange(heads * config.head_dim).view(heads, -1, 2).transpose(1, 2).flatten()
