"""A tiny configuration of every family, as transformers spells it, that leaves no part of it out."""

from __future__ import annotations

from typing import Any

_LLAMA_LIKE: dict[str, Any] = {
    "vocab_size": 13,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_OTHER = {key: value for key, value in _LLAMA_LIKE.items() if key != "num_key_value_heads"}
_SLIDING = ["sliding_attention", "full_attention"]
_GEMMA = {"head_dim": 12, "sliding_window": 5, "query_pre_attn_scalar": 20, "layer_types": _SLIDING}
_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

_MAMBA = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2,
    "mamba_n_groups": 2, "mamba_chunk_size": 4,
}  # fmt: skip
_DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4, "head_dim": 16,
}  # fmt: skip
_TURNS = ["linear_attention", "full_attention"]
RECURRENT: dict[str, dict[str, Any]] = {
    "mamba2": {
        "model_type": "mamba2", "vocab_size": 13, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4,
        "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 4, "conv_kernel": 4, "expand": 2,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    },
    "mamba": {
        "model_type": "mamba", "vocab_size": 13, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8,
        "time_step_rank": 5, "use_bias": True, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    },
    "falcon_mamba": {
        "model_type": "falcon_mamba", "vocab_size": 13, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    },
    "jamba": {
        "model_type": "jamba", **_LLAMA_LIKE, "num_hidden_layers": 3, "attn_layer_period": 2, "attn_layer_offset": 1,
        "num_experts": 4, "expert_layer_period": 3, "expert_layer_offset": 2, "mamba_d_state": 8, "mamba_dt_rank": 4,
    },
    "bamba": {"model_type": "bamba", **_LLAMA_LIKE, **_MAMBA, "attn_layer_indices": [1]},
    "granitemoehybrid": {
        "model_type": "granitemoehybrid", **_LLAMA_LIKE, **_MAMBA, "layer_types": _TURNS, "num_local_experts": 0,
        "shared_intermediate_size": 40, "position_embedding_type": "rope", "embedding_multiplier": 3.0,
        "logits_scaling": 2.0, "residual_multiplier": 0.4, "attention_multiplier": 0.3,
    },
    "granitemoehybrid-experts": {
        "model_type": "granitemoehybrid", **_LLAMA_LIKE, **_MAMBA, "layer_types": _TURNS, "num_local_experts": 4,
        "num_experts_per_tok": 2, "shared_intermediate_size": 40, "mamba_n_groups": 1,
    },
    "falcon_h1": {
        "model_type": "falcon_h1", **_LLAMA_LIKE, **_MAMBA, "mamba_d_ssm": 64, "mlp_multipliers": [0.7, 1.3],
        "key_multiplier": 0.6, "attention_in_multiplier": 1.2, "attention_out_multiplier": 0.9,
        "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7], "ssm_in_multiplier": 1.1, "ssm_out_multiplier": 0.8,
        "embedding_multiplier": 2.0, "lm_head_multiplier": 0.9,
    },
    "falcon_h1-normed": {
        "model_type": "falcon_h1", **_LLAMA_LIKE, **_MAMBA, "mamba_d_ssm": 48, "mamba_d_head": 12,
        "mamba_rms_norm": True,
    },
    "lfm2": {
        "model_type": "lfm2", **_LLAMA_LIKE, "layer_types": ["conv", "full_attention"], "conv_L_cache": 3,
        "block_multiple_of": 8,
    },
    "nemotron_h": {
        "model_type": "nemotron_h", **_LLAMA_LIKE, "head_dim": 8, "mamba_num_heads": 4, "mamba_head_dim": 16,
        "ssm_state_size": 8, "n_groups": 2, "conv_kernel": 4, "chunk_size": 4, "expand": 2,
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
    },
    "qwen3_next": {
        "model_type": "qwen3_next", **_LLAMA_LIKE, **_DELTA, "layer_types": _TURNS, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
        "decoder_sparse_step": 2,
    },
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe_text", **_LLAMA_LIKE, **_DELTA, "layer_types": _TURNS, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    },
    "qwen3_5": {
        "model_type": "qwen3_5_text", **_LLAMA_LIKE, **_DELTA, "layer_types": _TURNS,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_interleaved": True,
            "mrope_section": [2, 1, 1],
        },
    },
}  # fmt: skip

FAMILIES: dict[str, dict[str, Any]] = {
    "gemma": {"model_type": "gemma", **_LLAMA_LIKE, "head_dim": 12},
    "gemma2": {
        "model_type": "gemma2",
        **_LLAMA_LIKE,
        **_GEMMA,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3": {"model_type": "gemma3_text", **_LLAMA_LIKE, **_GEMMA},
    "phi3": {
        "model_type": "phi3",
        **_LLAMA_LIKE,
        "sliding_window": 6,
        "original_max_position_embeddings": 64,
    },
    "phi4-mini": {
        "model_type": "phi3",
        **_LLAMA_LIKE,
        "partial_rotary_factor": 0.5,
        "tie_word_embeddings": True,
        "original_max_position_embeddings": 64,
    },
    "smollm3": {"model_type": "smollm3", **_LLAMA_LIKE, "no_rope_layers": [1, 0]},
    "olmo2": {"model_type": "olmo2", **_LLAMA_LIKE},
    "granite": {
        "model_type": "granite",
        **_LLAMA_LIKE,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.3,
    },
    "starcoder2": {"model_type": "starcoder2", **_LLAMA_LIKE, "sliding_window": 7},
    "gpt_neox": {"model_type": "gpt_neox", **_OTHER, "rotary_pct": 0.5},
    "gpt_neox-in-turn": {"model_type": "gpt_neox", **_OTHER, "rotary_pct": 0.25, "use_parallel_residual": False},
    "opt": {
        "model_type": "opt",
        **{key: value for key, value in _OTHER.items() if key not in ("intermediate_size", "pad_token_id")},
        "ffn_dim": 48,
        "pad_token_id": 1,
    },
    "gpt2": {"model_type": "gpt2", "vocab_size": 13, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "cohere": {"model_type": "cohere", **_LLAMA_LIKE, "use_qk_norm": True, "logit_scale": 0.5},
    "cohere2": {"model_type": "cohere2", **_LLAMA_LIKE, "sliding_window": 5, "layer_types": _SLIDING},
    "stablelm": {"model_type": "stablelm", **_LLAMA_LIKE, "partial_rotary_factor": 0.5, "use_qkv_bias": True},
    "stablelm-parallel": {
        "model_type": "stablelm",
        **_LLAMA_LIKE,
        "use_parallel_residual": True,
    },
    "glm": {"model_type": "glm", **_LLAMA_LIKE, "head_dim": 12, "partial_rotary_factor": 0.5},
    "glm4": {"model_type": "glm4", **_LLAMA_LIKE, "head_dim": 8, "partial_rotary_factor": 0.5},
    "mixtral": {"model_type": "mixtral", **_LLAMA_LIKE, "num_local_experts": 4, "sliding_window": 9},
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        **_LLAMA_LIKE,
        **_EXPERTS,
        "shared_expert_intermediate_size": 16,
        "decoder_sparse_step": 2,
    },
    "qwen3_moe": {"model_type": "qwen3_moe", **_LLAMA_LIKE, **_EXPERTS, "head_dim": 12, "norm_topk_prob": True},
    "gpt_oss": {
        "model_type": "gpt_oss",
        **_LLAMA_LIKE,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "sliding_window": 5,
        "rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 16, "rope_theta": 150000.0,
        },
    },
    "exaone4": {"model_type": "exaone4", **_LLAMA_LIKE, "sliding_window": 5, "layer_types": _SLIDING},
    "seed_oss": {"model_type": "seed_oss", **_LLAMA_LIKE, "head_dim": 12},
    "hunyuan": {"model_type": "hunyuan_v1_dense", **_LLAMA_LIKE, "head_dim": 8},
    "nemotron": {"model_type": "nemotron", **_LLAMA_LIKE},
    "granite-4": {
        "model_type": "granitemoehybrid", **_LLAMA_LIKE, **_MAMBA, "layer_types": ["full_attention"] * 2,
        "num_local_experts": 0, "shared_intermediate_size": 40, "position_embedding_type": "rope",
        "residual_multiplier": 0.4,
    },
    **RECURRENT,
}  # fmt: skip
