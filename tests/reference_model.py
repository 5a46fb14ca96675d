"""Two references for the decoder: transformers with our weights in it, and the same mathematics written out in float64.

transformers computes norms and rotations in float32 whatever the dtype, so it can vouch for six digits; the one written
out here has no cache, no pages, no masks but the triangle, and can vouch for twelve.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwood.model.checkpoint import Checkpoint
from tiny import tensor_names


def load_into_transformers(checkpoint: Checkpoint, config: dict, dtype: torch.dtype):
    """transformers' model of `config` (a config.json) with the checkpoint's tensors."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {k: v for k, v in config.items() if k != "model_type"}
    hf = AutoConfig.for_model(config["model_type"], **settings)
    hf._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(hf).to(dtype).eval()
    state = {name: checkpoint.tensor(name).to(dtype) for name in tensor_names(checkpoint.config)}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing
    model.tie_weights()
    return model


def written_out_logits(checkpoint: Checkpoint, tokens: list[int]) -> Tensor:
    """Logits after every token of one text. [T] -> [T, V] float64."""
    config = checkpoint.config

    def weight(name: str) -> Tensor:
        return checkpoint.tensor(name).double()

    def linear(x: Tensor, name: str, bias: bool) -> Tensor:
        return F.linear(x, weight(f"{name}.weight"), weight(f"{name}.bias") if bias else None)

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + config.norm_eps).sqrt() * weight(f"{name}.weight")

    length = len(tokens)
    frequencies, scale = config.rope.inverse_frequencies(config.head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies.double())
    cos, sin = (torch.cat([f(angles)] * 2, -1)[:, None] * scale for f in (torch.cos, torch.sin))

    def turn(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    distance = torch.arange(length)[:, None] - torch.arange(length)
    hidden = weight("model.embed_tokens.weight")[torch.tensor(tokens)]
    for i in range(config.num_layers):
        name = f"model.layers.{i}"
        x = norm(hidden, f"{name}.input_layernorm")
        q, k, v = (
            linear(x, f"{name}.self_attn.{p}_proj", config.qkv_bias).unflatten(-1, (-1, config.head_dim)) for p in "qkv"
        )
        if config.qk_norm:
            q, k = norm(q, f"{name}.self_attn.q_norm"), norm(k, f"{name}.self_attn.k_norm")
        group = config.num_heads // config.num_kv_heads
        q, k, v = turn(q), turn(k).repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("thd,shd->hts", q, k) * config.head_dim**-0.5
        seen = (distance >= 0) & (distance < (config.windows[i] or length + 1))
        mixed = torch.einsum("hts,shd->thd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v).flatten(1)
        hidden = hidden + linear(mixed, f"{name}.self_attn.o_proj", config.output_bias)
        x = norm(hidden, f"{name}.post_attention_layernorm")
        gate, up = (linear(x, f"{name}.mlp.{p}_proj", config.mlp_bias) for p in ("gate", "up"))
        hidden = hidden + linear(F.silu(gate) * up, f"{name}.mlp.down_proj", config.mlp_bias)
    head = "model.embed_tokens.weight" if config.tied_head else "lm_head.weight"
    return norm(hidden, "model.norm") @ weight(head).t()
