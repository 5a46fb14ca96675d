"""Tiny models in the formats we read: written by the formats' own libraries."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from safetensors.torch import save_file

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FEED, LAYERS, VOCAB = 64, 4, 2, 16, 96, 2, 40

HF_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": FEED,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def hf_tensors(*, bias: bool = False, head: bool = True) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    tensors = {"model.embed_tokens.weight": draw(VOCAB, HIDDEN), "model.norm.weight": draw(HIDDEN)}
    if head:
        tensors["lm_head.weight"] = draw(VOCAB, HIDDEN)
    for layer in range(LAYERS):
        rows = {"q_proj": HEADS * HEAD_DIM, "k_proj": KV_HEADS * HEAD_DIM, "v_proj": KV_HEADS * HEAD_DIM}
        prefix = f"model.layers.{layer}."
        for name, size in rows.items():
            tensors[f"{prefix}self_attn.{name}.weight"] = draw(size, HIDDEN)
            if bias:
                tensors[f"{prefix}self_attn.{name}.bias"] = draw(size)
        tensors[f"{prefix}self_attn.o_proj.weight"] = draw(HIDDEN, HEADS * HEAD_DIM)
        tensors[f"{prefix}mlp.gate_proj.weight"] = draw(FEED, HIDDEN)
        tensors[f"{prefix}mlp.up_proj.weight"] = draw(FEED, HIDDEN)
        tensors[f"{prefix}mlp.down_proj.weight"] = draw(HIDDEN, FEED)
        tensors[f"{prefix}input_layernorm.weight"] = draw(HIDDEN)
        tensors[f"{prefix}post_attention_layernorm.weight"] = draw(HIDDEN)
    return tensors


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows as llama.cpp's converter orders them: written from its definition, one row at a time."""
    half = HEAD_DIM // 2
    order = [head * HEAD_DIM + part * half + i for head in range(heads) for i in range(half) for part in (0, 1)]
    return weight[order]


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def to_gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if not stem.startswith("model.layers."):
        return f"{GGUF_NAMES[stem]}.{kind}"
    layer, module = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{GGUF_NAMES[module]}.{kind}"


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., tuple[Path, dict[str, torch.Tensor]]]:
    def write(
        architecture: str = "llama",
        kind: GGMLQuantizationType = GGMLQuantizationType.F32,
        *,
        head: bool = True,
        extra: Callable[[GGUFWriter], None] = lambda writer: None,
    ) -> tuple[Path, dict[str, torch.Tensor]]:
        path = tmp_path / f"{architecture}-{kind.name}.gguf"
        writer = GGUFWriter(path, architecture)
        writer.add_block_count(LAYERS)
        writer.add_context_length(128)
        writer.add_embedding_length(HIDDEN)
        writer.add_feed_forward_length(FEED)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(10000.0)
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list([f"t{i}" for i in range(VOCAB)])
        writer.add_eos_token_id(2)
        extra(writer)
        tensors = hf_tensors(bias=architecture == "qwen2", head=head)
        for name, tensor in tensors.items():
            values = tensor.numpy()
            if architecture == "llama" and name.split(".")[-2] in ("q_proj", "k_proj"):
                values = interleave(values, HEADS if "q_proj" in name else KV_HEADS)
            if values.ndim == 1:
                writer.add_tensor(to_gguf_name(name), values)
            else:
                writer.add_tensor(to_gguf_name(name), quantize(values, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path, tensors

    return write


@pytest.fixture
def write_folder(tmp_path: Path) -> Callable[..., tuple[Path, dict[str, torch.Tensor]]]:
    def write(*, shards: int = 1, **changes: Any) -> tuple[Path, dict[str, torch.Tensor]]:
        folder = tmp_path / "model"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(HF_CONFIG | changes))
        tensors = hf_tensors()
        if shards == 1:
            save_file(tensors, folder / "model.safetensors")
            return folder, tensors
        weight_map = {name: f"model-{i % shards:05}.safetensors" for i, name in enumerate(tensors)}
        for shard in set(weight_map.values()):
            save_file({n: t for n, t in tensors.items() if weight_map[n] == shard}, folder / shard)
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return folder, tensors

    return write
