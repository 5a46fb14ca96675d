"""The decoder in torch: whatever `spec.py` can say, for every device and dtype; the definition of all families.

Shapes: N rows of a forward · H heads · K key heads · D head size.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftwood.batch import AttentionShape, ForwardBatch, ForwardOutput, GivenRows, Pages
from draftwood.model.checkpoint import Checkpoint
from draftwood.model.experts import Experts
from draftwood.model.layers import ACTIVATIONS, Norm, Rotary, gated, rotate, softcapped, tensors_of, write_over
from draftwood.model.loading import WeightLoader
from draftwood.model.rope import RopeConfig, planes_of
from draftwood.model.sharding import ranks_of, share_of
from draftwood.model.spec import (
    ATTENTION_NORM,
    ATTENTION_OUTPUT_NORM,
    MLP_NORM,
    MLP_OUTPUT_NORM,
    AttentionSpec,
    ExpertsSpec,
    LayerSpec,
)
from draftwood.model.streaming import ResidentLayers, load_layers
from draftwood.model.weights import FORMATS, WeightFormat
from draftwood.ops import Attention, plan_attention
from draftwood.ops.linear import Linear


@dataclass(frozen=True)
class Mlp:
    """Up and down, perhaps through a gate: `gate_up` is both, one below the other."""

    gate_up: Linear
    down: Linear
    activation: str
    is_gated: bool

    def inner(self, x: Tensor) -> Tensor:
        """What `down` reads."""
        if not self.is_gated:
            return ACTIVATIONS[self.activation](self.gate_up(x))
        gate, up = self.gate_up(x).chunk(2, -1)
        return gated(self.activation, gate, up)


@dataclass(frozen=True)
class Layer:
    """The weights of one decoder layer, projections that share an input fused. Norms are None where there are none."""

    attention_norm: Norm | None
    qkv: Linear  # -> [(H + 2 K) * D]
    head_norm: Norm | tuple[Norm, Norm] | None  # of queries and keys side by side; or of whole rows of either
    sinks: Tensor | None  # [H]
    output: Linear
    attention_output_norm: Norm | None
    mlp_norm: Norm | None
    mlp: Mlp | Experts
    mlp_output_norm: Norm | None


class Transformer:
    """Weights and the forward over paged keys and values."""

    implementation = "torch-2"
    strict = False  # torch's products choose their order of summation by the number of rows

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        weights: WeightFormat = FORMATS["stored"],
        offload: float = 0.0,
    ) -> None:
        self.config = config = checkpoint.config
        self.dtype = dtype
        self.device = device
        self.weights = weights
        self.specs = config.layer_specs
        self._ranks = ranks_of(checkpoint)
        loader = WeightLoader(checkpoint, dtype, device, weights)
        # The largest tensors first: reading them needs a second copy, which costs least while nothing else is there.
        self.head, self.embedding = loader.head_and_embedding()
        self.positions = loader.positions()
        self.layers = load_layers(lambda i: _layer(loader, i, self.specs[i]), len(self.specs), offload, device)
        self.cached = list(range(config.num_layers))  # where in the pages each layer's keys and values lie
        self.final_norm = loader.norm("model.norm", config.final_norm)
        self.rotaries = {turn: self._rotary(*turn) for turn in map(_turning, self.specs) if turn is not None}

    @property
    def num_bytes(self) -> int:
        """Memory of all weights."""
        tensors = list(tensors_of([self.head, self.final_norm, self.embedding, self.positions, *self.layers.held]))
        return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values())

    def part(self, layers: Sequence[int]) -> Transformer:
        """Some of its layers as a model, in the same memory."""
        part = copy.copy(self)
        part.config, part.specs = self.config.part(layers), tuple(self.specs[i] for i in layers)
        part.layers, part.cached = self.layers.part(layers), [self.cached[i] for i in layers]
        return part

    def substituted(self, checkpoint: Checkpoint, weights: WeightFormat) -> Transformer:
        """The same with layers in another format in place of those that are not on the device."""
        loader = WeightLoader(share_of(checkpoint, self._ranks, weights), self.dtype, self.device, weights)
        resident = self.layers.resident
        others = [_layer(loader, i, self.specs[i]) for i in range(len(resident), len(self.specs))]
        part = copy.copy(self)
        part.layers = ResidentLayers([*resident, *others])
        return part

    def refresh(self, checkpoint: Checkpoint) -> None:
        """Compute with the layers and the last norm of `checkpoint` from now on; words stay."""
        loader = WeightLoader(checkpoint, self.dtype, self.device, self.weights)
        fresh = [_layer(loader, i, spec) for i, spec in enumerate(self.specs)]
        write_over(
            [*self.layers.part(range(len(self.specs))).resident, self.final_norm],
            [*fresh, loader.norm("model.norm", self.config.final_norm)],
        )

    def forward(
        self, batch: ForwardBatch, cache: Pages, needs: frozenset[int] = frozenset(), given: GivenRows | None = None
    ) -> ForwardOutput:
        """Run the rows of `batch`, writing their keys and values to `cache`."""
        if given is not None and given.wide is not None:
            raise ValueError("torch's operations begin with a residual stream alone")
        shapes = [_shape(spec.attention) for spec in self.specs]
        attention = {shape: plan_attention(batch, cache, shape) for shape in set(shapes)}
        rotations = {turn: self._rotations(rotary, batch) for turn, rotary in self.rotaries.items()}
        hidden = self._begin(batch) if given is None else given.residual
        features: dict[int, Tensor] = {}
        for i, spec in enumerate(self.specs):
            layer = self.layers.get(i)
            self.layers.prefetch(i + 1)
            turn = _turning(spec)
            read = hidden if layer.attention_norm is None else layer.attention_norm(hidden)
            query, key_value = self._project(layer, spec, read, None if turn is None else rotations[turn])
            at = self.cached[i]
            cache.layers[at].index_copy_(1, batch.slots, key_value.transpose(0, 1))
            mixed = _attend(attention[shapes[i]], at, query, layer.sinks)
            hidden = self._finish(layer, spec, hidden, read, mixed)
            if i in needs:
                features[i] = hidden
        return ForwardOutput(self._logits(self.final_norm(hidden[batch.logit_rows])), features)

    def _begin(self, batch: ForwardBatch) -> Tensor:
        """The residual stream before the first layer. [N, hidden]."""
        hidden, scale = self.embedding[batch.tokens], self.config.stream.embedding_scale
        if scale != 1.0:
            hidden = hidden * torch.tensor(scale, dtype=self.dtype)  # rounded to the model's type, as in training
        if batch.embed_rows is not None and batch.embeds is not None:
            hidden = hidden.index_copy(0, batch.embed_rows, batch.embeds.to(hidden.dtype))
        return hidden if self.positions is None else hidden + self.positions[batch.positions]

    def _logits(self, hidden: Tensor) -> Tensor:
        logits, stream = self.head(hidden), self.config.stream
        if logits.shape[1] < self.config.vocab_size:
            logits = self._ranks.side_by_side(logits)[:, : self.config.vocab_size]
        if stream.logit_scale != 1.0:
            logits = logits * stream.logit_scale
        return logits if stream.logit_softcap is None else softcapped(logits, stream.logit_softcap)

    def _finish(self, layer: Layer, spec: LayerSpec, hidden: Tensor, read: Tensor, mixed: Tensor) -> Tensor:
        """The stream behind a layer, from what attention has mixed."""
        scale = spec.residual_scale
        after = _added(hidden, layer.output, mixed, layer.attention_output_norm, scale)
        if not spec.wiring.parallel:
            read = after if layer.mlp_norm is None else layer.mlp_norm(after)
        elif layer.mlp_norm is not None:
            read = layer.mlp_norm(hidden)
        if isinstance(layer.mlp, Experts):
            return _added(after, layer.mlp, read, layer.mlp_output_norm, scale)
        return _added(after, layer.mlp.down, layer.mlp.inner(read), layer.mlp_output_norm, scale)

    def _project(self, layer: Layer, spec: LayerSpec, read: Tensor, rotation: Tensor | None) -> tuple[Tensor, ...]:
        """Queries [N, H, D], and keys and values [N, 2 K, D], turned to their positions."""
        config, norms = self.config, spec.attention.head_norm
        projected = layer.qkv(read)
        if norms is not None and not norms.after_rope:
            self._norm_heads(layer, projected)
        turned = projected if rotation is None else rotate(projected, rotation)
        if norms is not None and norms.after_rope:
            self._norm_heads(layer, turned)
        heads = turned.view(len(read), -1, config.head_dim)
        return heads.split_with_sizes((config.num_heads, 2 * config.num_kv_heads), 1)

    def _norm_heads(self, layer: Layer, projected: Tensor) -> None:
        """Norm queries and keys in place. [N, (H + 2 K) * D]."""
        config = self.config
        if isinstance(layer.head_norm, tuple):
            queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
            for part, norm in zip(projected.split_with_sizes((queries, keys, keys), 1), layer.head_norm, strict=False):
                part.copy_(norm(part))
        elif layer.head_norm is not None:
            heads = projected.view(len(projected), -1, config.head_dim)[:, : -config.num_kv_heads]
            heads.copy_(layer.head_norm(heads))

    def _rotary(self, rope: RopeConfig, rotated: int) -> Rotary:
        frequencies, scale = rope.inverse_frequencies(rotated)
        return Rotary(frequencies, scale, self.dtype, self.device, (self.config.head_dim - rotated) // 2)

    def _rotations(self, rotary: Rotary, batch: ForwardBatch) -> Tensor:
        config = self.config
        turning = config.num_heads + config.num_kv_heads
        sections = config.rope.sections
        positions = batch.positions if not sections or batch.turns is None else batch.turns
        planes = planes_of(sections) if positions.dim() == 2 else None
        return rotary.at(positions, config.max_positions - 1, turning, config.num_kv_heads, planes)


def _added(hidden: Tensor, part: Linear | Experts, x: Tensor, norm: Norm | None, scale: float) -> Tensor:
    """hidden + scale · norm(part(x)), in one pass where there is nothing between."""
    if norm is None and scale == 1.0 and not isinstance(part, Experts):
        return part.add_to(hidden, x)
    made = part(x) if norm is None else norm(part(x))
    return hidden + (made if scale == 1.0 else made * scale)


def _attend(attention: Attention, layer: int, query: Tensor, sinks: Tensor | None) -> Tensor:
    return attention.run(layer, query) if sinks is None else attention.run(layer, query, sinks=sinks)


def _shape(attention: AttentionSpec) -> AttentionShape:
    return AttentionShape(attention.window, attention.scale, attention.softcap, attention.sinks)


def _turning(spec: LayerSpec) -> tuple[RopeConfig, int] | None:
    attention = spec.attention
    return None if attention.rope is None else (attention.rope, attention.rotated)


def _layer(loader: WeightLoader, i: int, spec: LayerSpec) -> Layer:
    name = f"model.layers.{i}"

    def norm(which: str) -> Norm | None:
        return loader.norm(f"{name}.{which}", spec.norm) if which in spec.wiring.norms else None

    return Layer(
        attention_norm=norm(ATTENTION_NORM),
        qkv=loader.qkv(f"{name}.self_attn", spec.attention),
        head_norm=loader.head_norm(f"{name}.self_attn", spec.attention),
        sinks=loader.tensor(f"{name}.self_attn.sinks.weight") if spec.attention.sinks else None,
        output=loader.summed(f"{name}.self_attn.o_proj", spec.attention.output_bias),
        attention_output_norm=norm(ATTENTION_OUTPUT_NORM),
        mlp_norm=norm(MLP_NORM),
        mlp=_mlp(loader, f"{name}.mlp", spec),
        mlp_output_norm=norm(MLP_OUTPUT_NORM),
    )


def _mlp(loader: WeightLoader, name: str, spec: LayerSpec) -> Mlp | Experts:
    mlp = spec.mlp
    if isinstance(mlp, ExpertsSpec):
        return loader.experts(name, mlp)
    return Mlp(loader.gate_up(name, mlp), loader.summed(f"{name}.down_proj", mlp.bias), mlp.activation, mlp.gated)
