"""Tiny GGUF files of every family, as llama.cpp's converter writes them, and the logits that transformers gives.

python tests/model/gguf_files/make.py LLAMA_CPP_CHECKOUT

Random weights, without a vocabulary, in float16. Test data were made with llama.cpp b21e4de745 (22 August 2026) and
transformers 5.23; the converter is not needed to run the tests.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).parent
TEXT = [5, 3, 9, 12, 0, 1, 1, 7, 8, 2, 11, 4, 6, 10]
_LLAMA: dict[str, Any] = {
    "vocab_size": 13, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
_GEMMA = {"head_dim": 6, "sliding_window": 5, "query_pre_attn_scalar": 6}
_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
_STRETCHED = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32, "rope_theta": 500000.0,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 16, "rope_theta": 150000.0,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-stretched": {"model_type": "llama", "rope_parameters": _STRETCHED},
    "qwen2": {},
    "qwen3": {"head_dim": 6},
    "gemma": {"head_dim": 6},
    "gemma2": {**_GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "phi3": {"sliding_window": 6, "original_max_position_embeddings": 64},
    "phi4-mini": {"model_type": "phi3", "partial_rotary_factor": 0.5, "tie_word_embeddings": True,
                  "original_max_position_embeddings": 64},
    "smollm3": {"num_hidden_layers": 4},
    "olmo2": {},
    "granite": {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.4,
                "attention_multiplier": 0.3},
    "starcoder2": {"sliding_window": None},
    "gpt_neox": {"num_key_value_heads": None, "rotary_pct": 0.5},
    "gpt_neox-in-turn": {"model_type": "gpt_neox", "num_key_value_heads": None, "rotary_pct": 0.5,
                         "use_parallel_residual": False},
    "cohere": {"use_qk_norm": False, "logit_scale": 0.5},
    "cohere-normed": {"model_type": "cohere", "use_qk_norm": True, "logit_scale": 0.5},
    "cohere2": {"num_hidden_layers": 4, "sliding_window": 5, "rotary_pct": 1.0},
    "stablelm": {"partial_rotary_factor": 0.5, "use_qkv_bias": True},
    "stablelm-parallel": {"model_type": "stablelm", "partial_rotary_factor": 0.5, "use_parallel_residual": True},
    "glm4": {"head_dim": 8, "partial_rotary_factor": 0.5},
    "exaone4": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "seed_oss": {"head_dim": 6},
    "hunyuan": {"model_type": "hunyuan_v1_dense", "head_dim": 4},
    "nemotron": {},
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {**_EXPERTS, "head_dim": 6, "norm_topk_prob": True},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 5,
                "rope_parameters": _YARN},
}  # fmt: skip


def model_of(name: str) -> tuple[Any, dict[str, Any]]:
    """A model of transformers, with sharp random weights that float16 can hold."""
    from transformers import AutoConfig, AutoModelForCausalLM

    stated = {**_LLAMA, "model_type": name, **CONFIGS[name]}
    given = {key: value for key, value in stated.items() if key != "num_key_value_heads" or value is not None}
    config = AutoConfig.for_model(given.pop("model_type"), **given)
    config._attn_implementation = config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(sum(name.encode()))
    for kind, weight in model.named_parameters():
        spread = 0.2 if weight.dim() == 1 or "norm" in kind else 1.3 * weight.shape[-1] ** -0.5
        noise = spread * torch.randn(weight.shape, generator=generator)
        with torch.no_grad():
            weight.copy_((weight * (weight.dim() == 1) + noise).half().float())
    return model, stated


def convert(folder: Path, target: Path) -> None:
    """By the converter, which is to find every entry that it reads in config.json."""
    import conversion
    import gguf
    from conversion.base import ModelBase, ModelType

    ModelBase.load_hparams = staticmethod(lambda at, *_, **__: json.loads((at / "config.json").read_text()))
    stated = ModelBase.load_hparams(folder)
    maker = conversion.get_model_class(conversion.get_model_architecture(stated, ModelType.TEXT))
    maker.set_vocab = lambda self: None
    maker(folder, gguf.LlamaFileType.MOSTLY_F16, target).write()


def main() -> None:
    sys.path[:0] = [sys.argv[1], f"{sys.argv[1]}/gguf-py"]
    logits = {}
    for name in CONFIGS:
        model, stated = model_of(name)
        with tempfile.TemporaryDirectory() as place, torch.inference_mode():
            model.save_pretrained(place)
            path = Path(place) / "config.json"
            path.write_text(json.dumps({**json.loads(path.read_text()), "rotary_pct": stated.get("rotary_pct", 1.0)}))
            (Path(place) / "tokenizer.json").write_text("{}")
            convert(Path(place), HERE / f"{name}.gguf")
            logits[name] = model(torch.tensor([TEXT])).logits[0].numpy().astype(np.float32)
    np.savez_compressed(HERE / "logits.npz", **logits)


if __name__ == "__main__":
    main()
