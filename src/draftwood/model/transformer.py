"""One decoder for the Llama, SmolLM, Mistral, Qwen2 and Qwen3 families; their differences are configuration.

Shapes: N rows of a forward · H heads · K key heads · D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftwood.model.batch import AttentionShape, ForwardBatch, ForwardOutput
from draftwood.model.checkpoint import Checkpoint
from draftwood.model.config import ModelConfig
from draftwood.model.layers import ACTIVATIONS, Linear, RMSNorm, Rotary, pair_adjacent, rotate
from draftwood.ops import Attention, plan_attention


@dataclass(frozen=True)
class Layer:
    """The weights of one decoder layer, projections that share an input fused."""

    attention_norm: RMSNorm
    qkv: Linear  # -> [(H + 2 K) * D]
    query_norm: RMSNorm | None
    key_norm: RMSNorm | None
    output: Linear
    mlp_norm: RMSNorm
    gate_up: Linear
    down: Linear


class Transformer:
    """Weights and the forward over paged keys and values."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        loader = _WeightLoader(checkpoint, dtype, device)
        self.config = config = checkpoint.config
        self.dtype = dtype
        self.device = device
        # The largest tensor first: reading it needs a second copy, which costs least while nothing else is there.
        self.head, self.embedding = loader.head_and_embedding()
        self.layers = [loader.layer(i) for i in range(config.num_layers)]
        self.final_norm = loader.norm("model.norm")
        frequencies, scale = config.rope.inverse_frequencies(config.head_dim)
        self.rotary = Rotary(frequencies, scale, dtype, device)

    @property
    def num_bytes(self) -> int:
        """Memory of all weights."""
        found: dict[int, int] = {}
        holders = [self.head, self.final_norm, *(part for layer in self.layers for part in vars(layer).values())]
        for holder in holders:
            for value in vars(holder).values() if holder is not None else ():
                if isinstance(value, Tensor):
                    found[value.data_ptr()] = value.numel() * value.element_size()
        if self.embedding is not None:
            found[self.embedding.data_ptr()] = self.embedding.numel() * self.embedding.element_size()
        return sum(found.values())

    def embed(self, tokens: Tensor) -> Tensor:
        """[N] -> [N, hidden]."""
        if self.embedding is None:
            return self.head.weight.index_select(1, tokens).t().contiguous()
        return self.embedding[tokens]

    def forward(
        self, batch: ForwardBatch, store: Tensor, page_size: int, needs: frozenset[int] = frozenset()
    ) -> ForwardOutput:
        """Run the rows of `batch`, writing their keys and values to `store` [L, 2, K, slots, D]."""
        scale = self.config.head_dim**-0.5
        attention = {
            window: plan_attention(batch, AttentionShape(page_size, window, scale, self.dtype))
            for window in set(self.config.windows)
        }
        rotation = self.rotary.at(batch.positions, self.config.max_positions - 1)
        hidden = self.embed(batch.tokens)
        features: dict[int, Tensor] = {}
        for i, layer in enumerate(self.layers):
            hidden = self._attend(layer, hidden, rotation, store[i], batch.slots, attention[self.config.windows[i]])
            hidden = self._feed_forward(layer, hidden)
            if i in needs:
                features[i] = hidden[batch.logit_rows]
        wanted = self.final_norm(hidden[batch.logit_rows])
        return ForwardOutput(self.head(wanted), features)

    def _attend(
        self, layer: Layer, hidden: Tensor, rotation: Tensor, store: Tensor, slots: Tensor, attention: Attention
    ) -> Tensor:
        heads, kv_heads, dim = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        qkv = layer.qkv(layer.attention_norm(hidden)).view(-1, heads + 2 * kv_heads, dim)
        turning, value = qkv.split((heads + kv_heads, kv_heads), 1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = turning.split((heads, kv_heads), 1)
            turning = torch.cat([layer.query_norm(query), layer.key_norm(key)], 1)
        turned = rotate(turning, rotation)
        store[0].index_copy_(1, slots, turned[:, heads:].transpose(0, 1))
        store[1].index_copy_(1, slots, value.transpose(0, 1))
        mixed = attention.run(turned[:, :heads], store[0], store[1])
        return layer.output.add_to(hidden, mixed.reshape(-1, heads * dim))

    def _feed_forward(self, layer: Layer, hidden: Tensor) -> Tensor:
        gate, up = layer.gate_up(layer.mlp_norm(hidden)).chunk(2, -1)
        return layer.down.add_to(hidden, ACTIVATIONS[self.config.activation](gate).mul_(up))


class _WeightLoader:
    """Reads a checkpoint tensor by tensor into the layout the forward wants."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self.checkpoint = checkpoint
        self.config: ModelConfig = checkpoint.config
        self.dtype = dtype
        self.device = device

    def tensor(self, name: str) -> Tensor:
        return self.checkpoint.tensor(name).to(device=self.device, dtype=self.dtype)

    def maybe(self, name: str, present: bool) -> Tensor | None:
        return self.tensor(name) if present else None

    def norm(self, name: str) -> RMSNorm:
        return RMSNorm(self.tensor(f"{name}.weight"), self.config.norm_eps)

    def head_and_embedding(self) -> tuple[Linear, Tensor | None]:
        if self.config.tied_head:
            return Linear.of_rows(self.tensor("model.embed_tokens.weight")), None
        return Linear.of_rows(self.tensor("lm_head.weight")), self.tensor("model.embed_tokens.weight")

    def layer(self, i: int) -> Layer:
        name = f"model.layers.{i}"
        query_norm, key_norm = self._head_norms(f"{name}.self_attn")
        return Layer(
            attention_norm=self.norm(f"{name}.input_layernorm"),
            qkv=self._fused_qkv(f"{name}.self_attn"),
            query_norm=query_norm,
            key_norm=key_norm,
            output=self._linear(f"{name}.self_attn.o_proj", self.config.output_bias),
            mlp_norm=self.norm(f"{name}.post_attention_layernorm"),
            gate_up=self._fused_gate_up(f"{name}.mlp"),
            down=self._linear(f"{name}.mlp.down_proj", self.config.mlp_bias),
        )

    def _linear(self, name: str, bias: bool) -> Linear:
        return Linear.of_rows(self.tensor(f"{name}.weight"), self.maybe(f"{name}.bias", bias))

    def _fused_gate_up(self, name: str) -> Linear:
        parts = [self._linear(f"{name}.{part}_proj", self.config.mlp_bias) for part in ("gate", "up")]
        return _side_by_side(parts)

    def _fused_qkv(self, name: str) -> Linear:
        return _side_by_side([self._projection(name, part) for part in "qkv"])

    def _projection(self, name: str, part: str) -> Linear:
        weight = self.tensor(f"{name}.{part}_proj.weight")
        bias = self.maybe(f"{name}.{part}_proj.bias", self.config.qkv_bias)
        if part != "v":
            weight = pair_adjacent(weight, self.config.head_dim)
            bias = None if bias is None else pair_adjacent(bias, self.config.head_dim)
        return Linear.of_rows(weight, bias)

    def _head_norms(self, name: str) -> tuple[RMSNorm, RMSNorm] | tuple[None, None]:
        if not self.config.qk_norm:
            return None, None
        query = pair_adjacent(self.tensor(f"{name}.q_norm.weight"), self.config.head_dim)
        key = pair_adjacent(self.tensor(f"{name}.k_norm.weight"), self.config.head_dim)
        return RMSNorm(query, self.config.norm_eps), RMSNorm(key, self.config.norm_eps)


def _side_by_side(parts: list[Linear]) -> Linear:
    biases = [part.bias for part in parts if part.bias is not None]
    return Linear(torch.cat([part.weight for part in parts], 1), torch.cat(biases) if biases else None)
