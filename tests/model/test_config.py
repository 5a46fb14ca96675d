from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from draftwood.errors import CheckpointError
from draftwood.model.config import ModelConfig, RopeConfig, gguf_eos_ids

from .conftest import HF_CONFIG

HALF = 8  # head_dim 16

SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "attention_factor": 1.25},
    {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 512,
        "mscale": 0.7,
        "mscale_all_dim": 1.1,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
    },
    {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "short_factor": [1.0 + i / 10 for i in range(HALF)],
        "long_factor": [2.0 + i for i in range(HALF)],
    },
    {
        "rope_type": "longrope",
        "factor": 1.0,
        "original_max_position_embeddings": 128,
        "short_factor": [1.0 + i / 10 for i in range(HALF)],
        "long_factor": [2.0 + i for i in range(HALF)],
    },
]


def hf(**changes: Any) -> ModelConfig:
    return ModelConfig.from_hf(HF_CONFIG | changes)


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: scaling["rope_type"])
def test_inverse_frequencies_are_those_of_transformers(scaling: dict[str, Any]) -> None:
    ours = hf(rope_parameters={"rope_theta": 5000.0, **scaling}, rope_theta=None)
    fields = {k: v for k, v in HF_CONFIG.items() if k != "rope_theta"}
    theirs = LlamaConfig(**fields, rope_parameters={"rope_theta": 5000.0, **scaling})
    seq_len = ours.max_positions if scaling["rope_type"] == "longrope" else None
    expected, scale = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs, "cpu", seq_len=seq_len)
    frequencies, attention = ours.rope.inverse_frequencies(16)
    assert frequencies.dtype == torch.float64
    torch.testing.assert_close(frequencies.float(), expected, rtol=2e-6, atol=0)
    assert attention == pytest.approx(scale, rel=1e-12)


def test_default_frequencies_fall_geometrically() -> None:
    frequencies, attention = RopeConfig(theta=10_000.0).inverse_frequencies(4)
    assert frequencies.tolist() == pytest.approx([1.0, 0.01])
    assert attention == 1.0


def test_old_and_new_spelling_of_rope_are_one() -> None:
    scaling = {"factor": 4.0, "original_max_position_embeddings": 32}
    old = hf(rope_theta=5000.0, rope_scaling={"type": "yarn", **scaling})
    new = hf(rope_theta=None, rope_parameters={"rope_type": "yarn", "rope_theta": 5000.0, **scaling})
    assert old == new


def test_dynamic_rope_stops_where_its_base_would_move() -> None:
    scaling = {"type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 64}
    assert hf(rope_scaling=scaling).max_positions == 64


def test_yarn_reaches_its_scaled_length() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert hf(rope_scaling=scaling).max_positions == 512


def test_longrope_with_wrong_number_of_factors_is_refused() -> None:
    scaling = {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}
    with pytest.raises(CheckpointError, match="1 factors where the head has 8"):
        hf(rope_scaling=scaling)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_every_family_agrees_with_transformers_own_defaults(family: str) -> None:
    """Fields that a file leaves out have another default in each family."""
    theirs = AutoConfig.for_model(family, num_hidden_layers=30)
    ours = ModelConfig.from_hf(theirs.to_dict())
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert ours.head_dim == head_dim
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.windows[0] == (4096 if family == "mistral" else None)
    assert ours.qkv_bias == (family == "qwen2")
    assert ours.qk_norm == (family == "qwen3")


def test_qwen_slides_only_its_upper_layers() -> None:
    sliding = {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 16,
        "max_window_layers": 1,
    }
    assert hf(**sliding).windows == (None, 16)
    assert hf(**sliding, layer_types=["sliding_attention", "full_attention"]).windows == (16, None)
    assert hf(**sliding | {"use_sliding_window": False}).windows == (None, None)


def test_mistral_without_window_attends_to_everything() -> None:
    assert hf(model_type="mistral", sliding_window=None).windows == (None, None)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "rwkv"}, "supported are llama, mistral, qwen2, qwen3"),
        ({"model_type": None}, "architecture is None"),
        ({"hidden_act": "mish"}, "activation 'mish'"),
        ({"rope_scaling": {"type": "mrope"}}, "'mrope' is not supported"),
        ({"num_local_experts": 8}, "mixture of experts"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "no language-model head"),
        ({"hidden_size": "64"}, "hidden_size = '64'"),
        ({"hidden_size": None}, "hidden_size = None"),
        ({"num_attention_heads": 0}, "num_heads is 0"),
        ({"num_key_value_heads": 3}, "evenly"),
        ({"head_dim": 15}, "even one"),
        ({"partial_rotary_factor": 0.5}, "50%"),
        ({"rms_norm_eps": 0}, "norm_eps"),
        ({"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["chunked"]}, "chunked"),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        hf(**changes)


GGUF_FIELDS: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 128,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": 40,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.bos_token_id": 1,
}


def test_gguf_and_hugging_face_describe_the_same_model() -> None:
    ours, theirs = ModelConfig.from_gguf(GGUF_FIELDS, ["output.weight"]), hf()
    assert replace(ours, rope=theirs.rope) == theirs
    assert torch.equal(ours.rope.inverse_frequencies(16)[0], theirs.rope.inverse_frequencies(16)[0])


def test_gguf_rope_factors_give_llama3_frequencies() -> None:
    """GGUF states Llama 3.1's scaling as a tensor of divisors, and nothing else."""
    llama3 = SCALINGS[2]
    expected, _ = hf(rope_scaling=llama3).rope.inverse_frequencies(16)
    plain, _ = RopeConfig().inverse_frequencies(16)
    factors = (plain / expected).tolist()
    config = ModelConfig.from_gguf(GGUF_FIELDS, [], {"rope_freqs.weight": factors})
    frequencies, attention = config.rope.inverse_frequencies(16)
    torch.testing.assert_close(frequencies, expected)
    assert attention == 1.0


def test_gguf_yarn_has_the_scale_of_hugging_face_yarn() -> None:
    fields = GGUF_FIELDS | {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 32,
    }
    ours = ModelConfig.from_gguf(fields, []).rope.inverse_frequencies(16)
    theirs = hf(rope_scaling=SCALINGS[3]).rope.inverse_frequencies(16)
    torch.testing.assert_close(ours[0], theirs[0])
    assert ours[1] == pytest.approx(theirs[1])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"general.architecture": "mamba"}, "architecture is 'mamba'"),
        ({"llama.expert_count": 8}, "expert_used_count = None"),
        ({"general.architecture": "granite", "expert_count": 8}, "mixture of experts"),
        ({"llama.attention.head_count_kv": [2, 1]}, "one whole number"),
        ({"llama.rope.dimension_count": 8}, "50% of each head"),
        ({"llama.rope.scaling.type": "spiral"}, "'spiral'"),
    ],
)
def test_gguf_files_that_cannot_run_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        ModelConfig.from_gguf(GGUF_FIELDS | changes, [])


def test_gguf_end_tokens_include_known_control_tokens() -> None:
    fields = {
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.tokens": ["<|endoftext|>", "<|im_end|>", "</s>"],
        "tokenizer.ggml.token_type": [3, 3, 1],
    }
    assert gguf_eos_ids(fields) == (0, 1)
