"""One decoder for the Llama, SmolLM, Mistral, Qwen2 and Qwen3 families; their differences are configuration.

Shapes: N rows of a forward · H heads · K key heads · D head size.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftwood.batch import AttentionShape, ForwardBatch, ForwardOutput, Pages
from draftwood.model.checkpoint import Checkpoint
from draftwood.model.config import ModelConfig
from draftwood.model.layers import ACTIVATIONS, RMSNorm, Rotary, pair_adjacent, rotate, tensors_of, write_over
from draftwood.model.weights import FORMATS, Storage, WeightFormat, as_numbers, round_inputs, store_as
from draftwood.ops import plan_attention
from draftwood.ops.linear import Linear, RoundedInputs, make_linear, make_tied_head


@dataclass(frozen=True)
class Layer:
    """The weights of one decoder layer, projections that share an input fused."""

    attention_norm: RMSNorm
    qkv: Linear  # -> [(H + 2 K) * D]
    head_norm: RMSNorm | None  # of queries and keys, side by side
    output: Linear
    mlp_norm: RMSNorm
    gate_up: Linear
    down: Linear


class Transformer:
    """Weights and the forward over paged keys and values."""

    implementation = "torch"
    strict = False  # torch's products choose their order of summation by the number of rows

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        weights: WeightFormat = FORMATS["stored"],
    ) -> None:
        loader = _WeightLoader(checkpoint, dtype, device, weights)
        self.config = config = checkpoint.config
        self.dtype = dtype
        self.device = device
        self.weights = weights
        # The largest tensors first: reading them needs a second copy, which costs least while nothing else is there.
        self.head, self.embedding = loader.head_and_embedding()
        self.layers = [loader.layer(i) for i in range(config.num_layers)]
        self.final_norm = loader.norm("model.norm")
        frequencies, scale = config.rope.inverse_frequencies(config.head_dim)
        self.rotary = Rotary(frequencies, scale, dtype, device)
        self._activate = ACTIVATIONS[config.activation]

    @property
    def num_bytes(self) -> int:
        """Memory of all weights."""
        tensors = list(tensors_of([self.head, self.final_norm, self.embedding, *self.layers]))
        return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values())

    def first(self, count: int) -> Transformer:
        """Its first layers as a model, in the same memory."""
        part = copy.copy(self)
        part.config, part.layers = self.config.first(count), self.layers[:count]
        return part

    def refresh(self, checkpoint: Checkpoint) -> None:
        """Compute with the layers and the last norm of `checkpoint` from now on; words stay."""
        loader = _WeightLoader(checkpoint, self.dtype, self.device, self.weights)
        fresh = [loader.layer(i) for i in range(self.config.num_layers)]
        write_over([*self.layers, self.final_norm], [*fresh, loader.norm("model.norm")])

    def forward(self, batch: ForwardBatch, cache: Pages, needs: frozenset[int] = frozenset()) -> ForwardOutput:
        """Run the rows of `batch`, writing their keys and values to `cache`."""
        config = self.config
        attention = {
            window: plan_attention(batch, cache, AttentionShape(window, config.head_dim**-0.5))
            for window in set(config.windows)
        }
        turning = config.num_heads + config.num_kv_heads
        rotation = self.rotary.at(batch.positions, config.max_positions - 1, turning, config.num_kv_heads)
        hidden = self.embedding[batch.tokens]
        features: dict[int, Tensor] = {}
        for i, layer in enumerate(self.layers):
            query, key_value = self._project(layer, hidden, rotation)
            cache.layers[i].index_copy_(1, batch.slots, key_value.transpose(0, 1))
            mixed = attention[config.windows[i]].run(i, query)
            hidden = layer.output.add_to(hidden, mixed)
            hidden = self._feed_forward(layer, hidden)
            if i in needs:
                features[i] = hidden
        return ForwardOutput(self.head(self.final_norm(hidden[batch.logit_rows])), features)

    def _project(self, layer: Layer, hidden: Tensor, rotation: Tensor) -> tuple[Tensor, ...]:
        """Queries [N, H, D], and keys and values [N, 2 K, D], turned to their positions."""
        projected = layer.qkv(layer.attention_norm(hidden))
        if layer.head_norm is not None:
            heads = projected.view(hidden.shape[0], -1, self.config.head_dim)[:, : -self.config.num_kv_heads]
            heads.copy_(layer.head_norm(heads))
        turned = rotate(projected, rotation).view(hidden.shape[0], -1, self.config.head_dim)
        return turned.split_with_sizes((self.config.num_heads, 2 * self.config.num_kv_heads), 1)

    def _feed_forward(self, layer: Layer, hidden: Tensor) -> Tensor:
        gate, up = layer.gate_up(layer.mlp_norm(hidden)).chunk(2, -1)
        return layer.down.add_to(hidden, self._activate(gate).mul_(up))


class _WeightLoader:
    """Reads a checkpoint tensor by tensor into the layout the forward wants.

    Quantised formats are rounded and then held as the numbers they stand for: the definition of what they compute,
    not a way to save memory. That is what `NativeTransformer` is for.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, weights: WeightFormat) -> None:
        self.checkpoint = checkpoint
        self.config: ModelConfig = checkpoint.config
        self.dtype = dtype
        self.device = device
        self.weights = weights

    def tensor(self, name: str) -> Tensor:
        return self.checkpoint.tensor(name).to(device=self.device, dtype=self.dtype)

    def matrix(self, name: str, storage: Storage | None) -> Tensor:
        weight = self.checkpoint.matrix(name)
        rounded = as_numbers(weight if storage is None else store_as(storage, weight))
        return rounded[:, : weight.shape[1]].to(device=self.device, dtype=self.dtype)

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return self._with_inputs_rounded(make_linear(weight, bias))

    def _with_inputs_rounded(self, linear: Linear) -> Linear:
        return RoundedInputs(linear, round_inputs) if self.weights.byte_activations else linear

    def maybe(self, name: str, present: bool) -> Tensor | None:
        return self.tensor(name) if present else None

    def norm(self, name: str) -> RMSNorm:
        return RMSNorm(self.tensor(f"{name}.weight"), self.config.norm_eps)

    def head_and_embedding(self) -> tuple[Linear, Tensor]:
        """The output head and the token embedding [V, hidden], sharing memory where they are tied and can."""
        embedding = self.matrix("model.embed_tokens.weight", self.weights.head)
        if self.config.tied_head:
            head, embedding = make_tied_head(embedding)
            return self._with_inputs_rounded(head), embedding
        return self.linear(self.matrix("lm_head.weight", self.weights.head)), embedding

    def layer(self, i: int) -> Layer:
        name = f"model.layers.{i}"
        return Layer(
            attention_norm=self.norm(f"{name}.input_layernorm"),
            qkv=self._fused_qkv(f"{name}.self_attn"),
            head_norm=self._head_norm(f"{name}.self_attn"),
            output=self._linear(f"{name}.self_attn.o_proj", self.config.output_bias),
            mlp_norm=self.norm(f"{name}.post_attention_layernorm"),
            gate_up=self._fused_gate_up(f"{name}.mlp"),
            down=self._linear(f"{name}.mlp.down_proj", self.config.mlp_bias),
        )

    def _linear(self, name: str, bias: bool) -> Linear:
        return self.linear(self.matrix(f"{name}.weight", self.weights.layers), self.maybe(f"{name}.bias", bias))

    def _fused_gate_up(self, name: str) -> Linear:
        weights = [self.matrix(f"{name}.{part}_proj.weight", self.weights.layers) for part in ("gate", "up")]
        biases = [self.maybe(f"{name}.{part}_proj.bias", self.config.mlp_bias) for part in ("gate", "up")]
        return self.linear(torch.cat(weights), _joined(biases))

    def _fused_qkv(self, name: str) -> Linear:
        weights = [
            self._turning(self.matrix(f"{name}.{part}_proj.weight", self.weights.layers), part) for part in "qkv"
        ]
        present = "qkv" if self.config.qkv_bias else ""
        biases = [self._turning(self.tensor(f"{name}.{part}_proj.bias"), part) for part in present]
        return self.linear(torch.cat(weights), _joined(biases))

    def _turning(self, rows: Tensor, part: str) -> Tensor:
        return rows if part == "v" else pair_adjacent(rows, self.config.head_dim)

    def _head_norm(self, name: str) -> RMSNorm | None:
        if not self.config.qk_norm:
            return None
        config = self.config
        query = pair_adjacent(self.tensor(f"{name}.q_norm.weight"), config.head_dim)
        key = pair_adjacent(self.tensor(f"{name}.k_norm.weight"), config.head_dim)
        weights = [query.expand(config.num_heads, -1), key.expand(config.num_kv_heads, -1)]
        return RMSNorm(torch.cat(weights), config.norm_eps)


def _joined(biases: Sequence[Tensor | None]) -> Tensor | None:
    present = [bias for bias in biases if bias is not None]
    return torch.cat(present) if present else None
