"""Other engines on the same weights."""

from __future__ import annotations

from draftwood.model.checkpoint import Checkpoint

SMOLLM2 = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}


def transformers_model(checkpoint: Checkpoint):
    """SmolLM2 in transformers, float32, with our checkpoint's weights and its default attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**SMOLLM2)).eval()
    names = [name for name in model.state_dict() if name != "lm_head.weight"]
    model.load_state_dict({name: checkpoint.tensor(name) for name in names}, strict=False)
    model.tie_weights()
    return model
