"""Small drafters written as they are published, and what they compute, straight from the raw tensors in float64."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from draftwood.nets.embeddings import TargetEmbeddings
from draftwood.nets.layouts import build_net, open_drafter, self_test
from tiny import CPU, TinyCheckpoint, hf_config, tiny_config

VOCABULARY, HIDDEN, INNER, LAYERS, HEADS, KV, DIM, EPS, THETA = 13, 32, 48, 8, 4, 2, 8, 1e-5, 10000.0
TARGET = tiny_config(layers=LAYERS)
CHECKPOINT = TinyCheckpoint(TARGET)
WORDS = TargetEmbeddings(CHECKPOINT, CPU, torch.float32)
EMBEDDING = CHECKPOINT.tensor("model.embed_tokens.weight")
HEAD = CHECKPOINT.tensor("lm_head.weight")
Raw = Mapping[str, Tensor]


def layer_config(layers: int = 1, family: str = "llama", **changes: object) -> dict[str, object]:
    return {**hf_config(family, VOCABULARY, layers), "head_dim": DIM, **changes}


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(hash((shape, seed)) % 2**31)
    value = torch.randn(shape, generator=generator)
    return value * shape[-1] ** -0.5 if len(shape) > 1 else 1 + 0.1 * value


def layer_tensors(prefix: str, seed: int = 0, width: int = HIDDEN, qk_norm: bool = False) -> dict[str, Tensor]:
    shapes = {
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
        "self_attn.q_proj.weight": (HEADS * DIM, width),
        "self_attn.k_proj.weight": (KV * DIM, width),
        "self_attn.v_proj.weight": (KV * DIM, width),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * DIM),
        "mlp.gate_proj.weight": (INNER, HIDDEN),
        "mlp.up_proj.weight": (INNER, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, INNER),
        **({"self_attn.q_norm.weight": (DIM,), "self_attn.k_norm.weight": (DIM,)} if qk_norm else {}),
    }
    return {prefix + name: random(*shape, seed=seed + i) for i, (name, shape) in enumerate(shapes.items())}


def write(folder: Path, config: Mapping[str, object], tensors: Raw) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    return folder


def load(folder: Path, **options: bool):
    """Through the whole of the loader."""
    net = build_net(open_drafter(folder, **options), TARGET, WORDS)
    self_test(net, WORDS)
    assert {parameter.dtype for parameter in net.parameters()} == {torch.float32}
    return net


def rms(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x @ weight.double().T + (0 if bias is None else bias.double())


def silu(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


def rotated(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Pairs (i, i + D / 2) as complex numbers. [N, heads, D]."""
    angles = positions[:, None].double() * theta ** (-2 * torch.arange(DIM // 2).double() / DIM)
    turned = (
        torch.complex(x[..., : DIM // 2], x[..., DIM // 2 :]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    )
    return torch.cat([turned.real, turned.imag], -1)


def attention(
    raw: Raw, p: str, rows: Tensor, positions: Tensor, mask: Tensor, context: Tensor | None = None, theta: float = THETA
) -> Tensor:
    """Rows see, under a mask [N, M + N], M rows of context at positions 0 ... M - 1 and each other."""
    every = rows if context is None else torch.cat([context, rows])
    places = positions if context is None else torch.cat([torch.arange(len(context)), positions])
    query = linear(rows, raw[f"{p}q_proj.weight"]).view(-1, HEADS, DIM)
    key = linear(every, raw[f"{p}k_proj.weight"]).view(-1, KV, DIM)
    value = linear(every, raw[f"{p}v_proj.weight"]).view(-1, KV, DIM)
    if f"{p}q_norm.weight" in raw:
        query, key = rms(query, raw[f"{p}q_norm.weight"]), rms(key, raw[f"{p}k_norm.weight"])
    query, key = rotated(query, positions, theta), rotated(key, places, theta)
    heads = []
    for h in range(HEADS):
        shared = h * KV // HEADS
        scores = (query[:, h] @ key[:, shared].T / DIM**0.5).masked_fill(~mask, float("-inf"))
        heads.append(scores.softmax(-1) @ value[:, shared])
    return linear(torch.cat(heads, -1), raw[f"{p}o_proj.weight"])


def mlp(raw: Raw, p: str, x: Tensor) -> Tensor:
    gate, up = linear(x, raw[f"{p}gate_proj.weight"]), linear(x, raw[f"{p}up_proj.weight"])
    return linear(silu(gate) * up, raw[f"{p}down_proj.weight"])


def decoder(raw: Raw, p: str, x: Tensor, positions: Tensor, mask: Tensor, **options) -> Tensor:
    x = x + attention(raw, f"{p}self_attn.", rms(x, raw[f"{p}input_layernorm.weight"]), positions, mask, **options)
    return x + mlp(raw, f"{p}mlp.", rms(x, raw[f"{p}post_attention_layernorm.weight"]))


def causal(n: int) -> Tensor:
    return torch.ones(n, n).tril().bool()


def causal_attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return plain_attend(query, key, value, causal(len(query)))


def plain_attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """What our networks are given for attention here. [N, H, D], [M, K, D] -> [N, H * D]."""
    key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], 1) for part in (key, value))
    scores = torch.einsum("nhd,mhd->hnm", query, key) / query.shape[-1] ** 0.5
    return torch.einsum("hnm,mhd->nhd", scores.masked_fill(~mask, float("-inf")).softmax(-1), value).flatten(1)


def same(ours: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(ours.double(), expected.double(), atol=3e-5, rtol=1e-4)
