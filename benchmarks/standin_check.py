"""How often a stand-in finds the same token likeliest as the small model it is made of, by no engine's forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwood import LLM, EngineConfig, SamplingParams
from draftwood.model.checkpoint import Checkpoint, open_checkpoint
from draftwood.model.isa import avoid_broken_amx
from gpu_prompts import CHAT8, chats

NORMS = ("input_layernorm", "post_attention_layernorm")
MATRICES = tuple(f"self_attn.{p}_proj" for p in "qkvo") + tuple(f"mlp.{p}_proj" for p in ("gate", "up", "down"))
WANTED_AGREEMENT = 0.999
ANSWER = 128  # tokens the small model writes behind each prompt


@torch.inference_mode()
def written_out_logits(
    model: Checkpoint, texts: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """Logits after every token, layer by layer for all texts: no engine and one layer's weights at a time. [T, V]."""
    config = model.config
    frequencies, _ = config.rope.inverse_frequencies(config.head_dim)

    def read(name: str) -> Tensor:
        return model.tensor(f"{name}.weight").to(device=device, dtype=dtype)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + config.norm_eps)).to(dtype) * weight

    def turn(x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(len(x), device=device).double(), frequencies.double().to(device))
        cos, sin = (torch.cat([f(angles)] * 2, -1)[:, None].to(dtype) for f in (torch.cos, torch.sin))
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    def attend(x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        q, k, v = (F.linear(x, weights[p]).unflatten(-1, (-1, config.head_dim)) for p in "qkv")
        q, k, v = (part.transpose(0, 1)[None] for part in (turn(q), turn(k), v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return F.linear(mixed[0].transpose(0, 1).flatten(1), weights["o"])

    embedding = read("model.embed_tokens")
    streams = [embedding[torch.tensor(text, device=device)] for text in texts]
    for i in range(config.num_layers):
        name = f"model.layers.{i}"
        first, second = (read(f"{name}.{part}") for part in NORMS)
        weights = {part.split(".")[1].removesuffix("_proj"): read(f"{name}.{part}") for part in MATRICES}
        streams = [x + attend(norm(x, first), weights) for x in streams]
        for j, x in enumerate(streams):
            inner = norm(x, second)
            product = F.silu(F.linear(inner, weights["gate"])) * F.linear(inner, weights["up"])
            streams[j] = x + F.linear(product, weights["down"])
    final, head = read("model.norm"), embedding if config.tied_head else read("lm_head")
    return [F.linear(norm(x, final), head) for x in streams]


def agreement(
    small: Checkpoint, large: Checkpoint, texts: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device
) -> float:
    """Share of positions where both find the same token likeliest."""
    best = [[rows.argmax(-1) for rows in written_out_logits(m, texts, dtype, device)] for m in (small, large)]
    return float((torch.cat(best[0]) == torch.cat(best[1])).float().mean())


def answered(small: Checkpoint, number: int) -> list[list[int]]:
    """The benchmark's prompts with what the small model says to them: where it will be asked in the benchmark."""
    prompts = chats(small.tokenizer(), CHAT8, number)
    with LLM(small, config=EngineConfig(cache_tokens=4096, device="cpu")) as llm:
        results = llm.generate(prompts, SamplingParams(max_tokens=ANSWER, ignore_eos=True))
    return [[*prompt, *result.token_ids] for prompt, result in zip(prompts, results, strict=True)]


def check(small: Checkpoint, folder: Path, device: torch.device) -> bool:
    """Print how often the two agree; whether that is often enough in float32."""
    avoid_broken_amx()
    large, texts = open_checkpoint(folder), answered(small, len(CHAT8))
    shares = {t: agreement(small, large, texts, t, device) for t in (torch.float32, torch.bfloat16)}
    positions = sum(map(len, texts))
    for dtype, share in shares.items():
        print(f"same likeliest token in {dtype}: {share:.5f} of {positions} positions", flush=True)
    return shares[torch.float32] >= WANTED_AGREEMENT
