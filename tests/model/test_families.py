"""What families read out of configurations and files: defaults, GGUF, 4-bit floats, and what they refuse."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from rich.console import Console
from safetensors.torch import save_file
from transformers import AutoConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from draftwood.cli.about import about_table
from draftwood.engine.memory import weight_bytes
from draftwood.errors import CheckpointError
from draftwood.model.checkpoint import GgufCheckpoint, SafetensorsCheckpoint
from draftwood.model.config import ModelConfig
from draftwood.model.families import FAMILIES as KNOWN
from draftwood.model.families.gpt_oss import dequantise_mxfp4
from draftwood.model.names import count_active_parameters, count_parameters, tensor_shapes
from draftwood.model.transformer import Transformer
from draftwood.model.weights import FORMATS
from draftwood.ops.native import kernels
from families import FAMILIES
from tiny import CPU, TinyCheckpoint

SIZES = {  # of each family's defaults in transformers, in millions: all, and those a token makes use of
    "gemma2": (2614, 2614),
    "mixtral": (46703, 12880),
    "gpt_oss": (116829, 5713),
    "qwen2_moe": (14316, 2689),
    "gpt2": (124, 124),
    "opt": (125, 125),
    "phi3": (3821, 3821),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_file_leaves_out_means_what_it_means_to_transformers(name: str) -> None:
    raw = FAMILIES[name]
    whole = AutoConfig.for_model(raw["model_type"], **{k: v for k, v in raw.items() if k != "model_type"}).to_dict()
    theirs = ModelConfig.from_hf(whole)
    ours = replace(ModelConfig.from_hf(raw), eos_token_ids=theirs.eos_token_ids, bos_token_id=theirs.bos_token_id)
    assert ours == theirs


@pytest.mark.parametrize("family", SIZES)
def test_published_models_have_their_size(family: str) -> None:
    config = ModelConfig.from_hf(AutoConfig.for_model(family).to_dict())
    millions = [round(count(config) / 1e6) for count in (count_parameters, count_active_parameters)]
    assert millions == pytest.approx(SIZES[family], rel=0.01)


def test_every_family_has_its_file() -> None:
    elsewhere = {"llama", "mistral", "qwen2", "qwen3", "gemma3", "llava", "qwen2_vl", "qwen2_5_vl"}
    assert {raw["model_type"] for raw in FAMILIES.values()} | elsewhere == set(KNOWN)


@pytest.mark.parametrize("name", ["gemma2", "gpt2", "gpt_oss", "qwen2_moe"])
def test_memory_is_planned_for_every_family(name: str) -> None:
    checkpoint = TinyCheckpoint(ModelConfig.from_hf(FAMILIES[name]))
    planned = weight_bytes(checkpoint.config, "stored", torch.float64)
    assert planned == pytest.approx(Transformer(checkpoint, torch.float64, CPU).num_bytes, rel=0.06)


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("opt", {"do_layer_norm_before": False}, "norms stand behind"),
        ("opt", {"word_embed_proj_dim": 16}, "projected"),
        ("gemma3", {"use_bidirectional_attention": True}, "looks ahead"),
        ("gpt2", {"add_cross_attention": True}, "cross"),
        ("stablelm", {"qk_layernorm": True}, "qk_layernorm"),
        ("mixtral", {"num_experts_per_tok": 9}, "9 of 4 experts"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit"),
        ("gpt_oss", {"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ("gemma2", {"layer_types": ["chunked_attention", "full_attention"]}, "chunked"),
        ("gemma2", {"attn_logit_softcapping": -1.0}, "softcap"),
        ("granite", {"logits_scaling": 0}, "logits_scaling"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers"),
        ("glm", {"partial_rotary_factor": 3.0}, "partial_rotary_factor"),
        ("qwen2_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ("hunyuan", {"rope_scaling": {"type": "dynamic", "alpha": 1000.0}}, "alpha"),
        ("exaone4", {"sliding_window_pattern": 1.5, "layer_types": None}, "sliding_window_pattern"),
    ],
)
def test_what_a_family_cannot_be_is_refused_with_the_reason(name: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        ModelConfig.from_hf(FAMILIES[name] | changes)


def test_four_bit_floats_are_dequantised_as_transformers_does() -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (6, 3, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(120, 134, (6, 3), generator=generator, dtype=torch.uint8)
    want = convert_moe_packed_tensors(blocks[None], scales[None])[0]  # [in, out]
    assert torch.equal(dequantise_mxfp4(blocks, scales), want.t())


def test_packed_experts_are_read_from_a_folder(tmp_path: Path) -> None:
    """Gates and ups in turn, as gpt-oss has them; each expert's entry alone is read."""
    raw = FAMILIES["gpt_oss"] | {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    raw["quantization_config"] = {"quant_method": "mxfp4"}
    generator = torch.Generator().manual_seed(1)

    def bytes_of(*shape: int) -> torch.Tensor:
        return torch.randint(120, 130, shape, generator=generator, dtype=torch.uint8)

    name = "model.layers.0.mlp.experts"
    blocks, scales = bytes_of(4, 64, 1, 16), bytes_of(4, 64, 1)
    tensors = {f"{name}.gate_up_proj_blocks": blocks, f"{name}.gate_up_proj_scales": scales}
    save_file({**tensors, "lm_head.weight": torch.zeros(13, 32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    checkpoint = SafetensorsCheckpoint(tmp_path)
    whole = dequantise_mxfp4(blocks[2], scales[2])
    assert torch.equal(checkpoint.tensor(f"{name}.2.gate_proj.weight"), whole[::2])
    assert torch.equal(checkpoint.tensor(f"{name}.2.up_proj.weight"), whole[1::2])
    with pytest.raises(CheckpointError, match=r"no tensor .*down_proj"):
        checkpoint.tensor(f"{name}.2.down_proj.weight")
    library = kernels()
    if library is not None:  # which multiply them as they are stored
        for part, rows in (("gate", slice(0, None, 2)), ("up", slice(1, None, 2))):
            packed = checkpoint.blocks(f"{name}.2.{part}_proj.weight")
            assert packed is not None
            assert torch.equal(packed.numbers(library), whole[rows].float())
            assert packed.data.nbytes == 32 * 17


def test_a_tensor_that_cannot_be_taken_apart_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["gpt_neox"]))
    fused = "gpt_neox.layers.0.attention.query_key_value.weight"
    save_file({fused: torch.zeros(95, 32), "embed_out.weight": torch.zeros(13, 32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"query_key_value.weight is malformed"):
        SafetensorsCheckpoint(tmp_path).tensor("model.layers.0.self_attn.q_proj.weight")


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "attention_output_norm": "post_attention_norm",
    "mlp_output_norm": "post_ffw_norm",
    "self_attn.o_proj": "attn_output",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_a_gguf_file_is_the_folder_of_it(tmp_path: Path, family: str) -> None:
    """The same configuration, but for what GGUF does not say; norms hold the one already."""
    raw = FAMILIES[family] | {"num_hidden_layers": 6, "layer_types": None, "query_pre_attn_scalar": 12}
    theirs = ModelConfig.from_hf(raw | {"rope_theta": 1e6})
    source = TinyCheckpoint(theirs)
    writer = GGUFWriter(tmp_path / "g.gguf", family)
    if family == "gemma2":
        writer.add_attn_logit_softcapping(2.0)
        writer.add_final_logit_softcapping(3.0)
    writer.add_block_count(6)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(12)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_sliding_window(5)
    for name in tensor_shapes(theirs):
        module = name.removesuffix(".weight")
        layer = module.split(".")[2] if "layers" in module else None
        own = module.removeprefix(f"model.layers.{layer}.")
        target = GGUF_NAMES[own] if layer is None else f"blk.{layer}.{GGUF_NAMES[own]}"
        writer.add_tensor(f"{target}.weight", source.tensor(name).float().numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours = GgufCheckpoint(tmp_path / "g.gguf")
    for mine, other in zip(ours.config.layer_specs, theirs.layer_specs, strict=True):
        assert mine.wiring == other.wiring
        assert mine.attention.window == other.attention.window
        assert mine.attention.softcap == other.attention.softcap
        assert mine.attention.scale == pytest.approx(other.attention.scale)
        assert mine.attention.rope is not None
        assert other.attention.rope is not None
        assert mine.attention.rope.theta == other.attention.rope.theta
    assert ours.config.stream == theirs.stream
    assert ours.config.tied_head
    for name in tensor_shapes(theirs):
        assert torch.equal(ours.tensor(name), source.tensor(name).float()), name
    assert Transformer(ours, torch.float32, CPU, FORMATS["stored"]).num_bytes > 0


def test_a_model_is_described_before_it_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["mixtral"]))
    save_file({"lm_head.weight": torch.zeros(13, 32)}, tmp_path / "model.safetensors")
    console = Console(file=StringIO(), width=200)
    console.print(about_table(str(tmp_path)))
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert re.search(r"family +mixtral", said)
    assert "2 with a sliding window, 2 with 2 of 4 experts" in said
    assert "on a CPU" in said
    assert re.search(r"on a CPU +our own kernels", said)
