"""The decoder in torch: whatever `spec.py` can say, for every device and dtype; the definition of all families.

Shapes: N rows of a forward · H heads · K key heads · D head size.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftwood.batch import ROUTES, AttentionShape, ForwardBatch, ForwardOutput, GivenRows, Pages
from draftwood.errors import IncompatibleParts
from draftwood.model.checkpoint import Checkpoint
from draftwood.model.experts import Experts
from draftwood.model.layers import (
    ACTIVATIONS,
    Norm,
    Rotary,
    gated,
    pair_adjacent,
    rotate,
    softcapped,
    tensors_of,
    write_over,
)
from draftwood.model.loading import WeightLoader
from draftwood.model.lora import Adapter, LowRank
from draftwood.model.lora_layers import AdaptedLinear, sites
from draftwood.model.mixers import Mixer, Recurrences, load_mixer
from draftwood.model.rope import RopeConfig, planes_of
from draftwood.model.sharding import ranks_of, share_of
from draftwood.model.spec import (
    ATTENTION_NORM,
    ATTENTION_OUTPUT_NORM,
    MLP_NORM,
    MLP_OUTPUT_NORM,
    NONE,
    AttentionSpec,
    ExpertsSpec,
    LayerSpec,
    MlpSpec,
    Sublayers,
)
from draftwood.model.streaming import ResidentLayers, load_layers, require_resident
from draftwood.model.weights import FORMATS, WeightFormat
from draftwood.ops import Attention, plan_attention
from draftwood.ops.linear import Linear
from draftwood.states import StagedTrees


@dataclass(frozen=True)
class Mlp:
    """Up and down, perhaps through a gate: `gate_up` is both, one below the other."""

    gate_up: Linear
    down: Linear
    activation: str
    is_gated: bool
    gate_scale: float = 1.0
    output_scale: float = 1.0

    def inner(self, x: Tensor) -> Tensor:
        """What `down` reads."""
        if not self.is_gated:
            return ACTIVATIONS[self.activation](self.gate_up(x))
        gate, up = self.gate_up(x).chunk(2, -1)
        return gated(self.activation, gate if self.gate_scale == 1.0 else gate * self.gate_scale, up)


@dataclass(frozen=True)
class AttentionWeights:
    """What attention is made of."""

    qkv: Linear  # -> [(H + 2 K) * D]
    head_norm: Norm | tuple[Norm, Norm] | None  # of queries and keys side by side; or of whole rows of either
    sinks: Tensor | None  # [H]
    gate: Linear | None  # -> [H * D]
    output: Linear


@dataclass(frozen=True)
class Layer:
    """The weights of one decoder layer, projections that share an input fused. Norms are None where there are none."""

    attention_norm: Norm | None
    attention: AttentionWeights | None
    mixer: Mixer | None
    attention_output_norm: Norm | None
    mlp_norm: Norm | None
    mlp: Mlp | Experts | None
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
        self.cached = _numbered([spec.attention for spec in self.specs])  # where its keys and values lie in the pages
        self.kept = _numbered([spec.recurrent for spec in self.specs])  # which of the recurrent states is its own
        self.final_norm = loader.norm("model.norm", config.final_norm)
        self.rotaries = {turn: self._rotary(*turn) for turn in (_turning(s.attention) for s in self.specs) if turn}
        self._adapters: list[tuple[list[LowRank | None], ...]] = []  # of each layer's four products

    @property
    def num_bytes(self) -> int:
        """Memory of all weights."""
        tensors = list(tensors_of([self.head, self.final_norm, self.embedding, self.positions, *self.layers.held]))
        return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values())

    def part(self, layers: Sequence[int], without: Sublayers = NONE) -> Transformer:
        """Some of its layers as a model, in the same memory."""
        part = copy.copy(self)
        part.config = self.config.part(layers, without)
        part.specs, part.layers = part.config.layer_specs, self.layers.part(layers)
        part.cached, part.kept = [self.cached[i] for i in layers], [self.kept[i] for i in layers]
        return part

    def without_attention(self) -> Transformer:
        """Its recurrent layers and MLPs alone as a model, in the same memory."""
        if not self.config.recurrent or not self.config.cache_shape[0]:
            raise IncompatibleParts("Only a model with attention and recurrent layers can leave its attention out.")
        part = copy.copy(self)
        part.specs = tuple(replace(spec, attention=None) for spec in self.specs)
        part.config = replace(self.config, layers=part.specs)
        whole = self.layers.part(range(len(self.specs))).resident
        part.layers = ResidentLayers([_without_attention(layer) for layer in whole])
        part.rotaries = {}
        return part

    def narrowed(self, allowed: Sequence[Tensor], top_k: int) -> Transformer:
        """The same with routers that pick `top_k` of each mixture's experts that are allowed."""
        require_resident(range(len(self.specs)), len(self.layers.resident))
        part, each = copy.copy(self), iter(allowed)
        part.layers = ResidentLayers(
            [
                replace(layer, mlp=layer.mlp.narrowed(next(each), top_k)) if isinstance(layer.mlp, Experts) else layer
                for layer in self.layers.resident
            ]
        )
        return part

    def substituted(self, checkpoint: Checkpoint, weights: WeightFormat) -> Transformer:
        """The same with layers in another format in place of those that are not on the device."""
        loader = WeightLoader(share_of(checkpoint, self._ranks, weights), self.dtype, self.device, weights)
        resident = self.layers.resident
        others = [_layer(loader, i, self.specs[i]) for i in range(len(resident), len(self.specs))]
        part = copy.copy(self)
        part.layers = ResidentLayers([*resident, *others])
        return part

    def adapt(self, adapters: Sequence[Adapter]) -> None:
        """Rows may have one of these from now on, by its place among them."""
        self._adapters = [self._factors(adapters, i) for i in range(self.config.num_layers)]

    def _factors(self, adapters: Sequence[Adapter], i: int) -> tuple[list[LowRank | None], ...]:
        attention, dim = self.specs[i].only_attention, self.config.head_dim

        def turning(rows: list[Tensor]) -> Tensor:  # as `WeightLoader.qkv` arranges them
            return torch.cat([*(pair_adjacent(part, dim, attention.rotated) for part in rows[:2]), rows[2]])

        def moved(part: LowRank | None) -> LowRank | None:
            place = {"device": self.device, "dtype": self.dtype}
            return None if part is None else LowRank(part.down.to(**place), part.up.to(**place))

        joins = (turning, torch.cat, torch.cat, torch.cat)
        return tuple(
            [moved(site.low_rank(adapter, i, join)) for adapter in adapters]
            for site, join in zip(sites(self.config, i), joins, strict=True)
        )

    def _adapted(self, layer: Layer, i: int, which: Tensor | None) -> Layer:
        """The layer with what adapters add for rows that have one."""
        attention, mlp = layer.attention, layer.mlp
        if which is None or not self._adapters or attention is None or not isinstance(mlp, Mlp):
            return layer
        qkv, output, gate_up, down = self._adapters[self.cached[i]]
        adapted = replace(
            attention,
            qkv=AdaptedLinear(attention.qkv, qkv, which),
            output=AdaptedLinear(attention.output, output, which),
        )
        inner = replace(
            mlp, gate_up=AdaptedLinear(mlp.gate_up, gate_up, which), down=AdaptedLinear(mlp.down, down, which)
        )  # fmt: skip
        return replace(layer, attention=adapted, mlp=inner)

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
        run = _Run(self, batch, cache)
        hidden = self._begin(batch) if given is None else given.residual
        features: dict[int, Tensor] = {}
        routes: list[Tensor] | None = [] if ROUTES in needs else None
        for i, spec in enumerate(self.specs):
            layer = self._adapted(self.layers.get(i), i, batch.adapters)
            self.layers.prefetch(i + 1)
            read = hidden if layer.attention_norm is None else layer.attention_norm(hidden)
            after = hidden
            if layer.attention is not None and spec.attention is not None:
                scale = spec.residual_scale * spec.attention.output_scale
                mixed = run.attention(self.cached[i], layer.attention, spec.attention, read)
                after = _added(after, layer.attention.output, mixed, layer.attention_output_norm, scale)
            if layer.mixer is not None and spec.recurrent is not None:
                scale = spec.residual_scale * spec.recurrent.output_scale
                mixed = run.recurrence(self.kept[i], layer.mixer, read)
                after = _added(after, layer.mixer.output, mixed, None, scale)
            hidden = self._finish(layer, spec, hidden, read, after, routes)
            if i in needs:
                features[i] = hidden
        if routes:
            features[ROUTES] = torch.stack(routes, 1)
        return ForwardOutput(self._logits(self.final_norm(hidden[batch.logit_rows])), features, run.staged)

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

    def _finish(
        self, layer: Layer, spec: LayerSpec, hidden: Tensor, read: Tensor, after: Tensor, routes: list[Tensor] | None
    ) -> Tensor:
        """The stream behind a layer, from what it is behind attention."""
        scale, mlp = spec.residual_scale, layer.mlp
        if mlp is None or spec.mlp is None:
            return after
        if not spec.wiring.parallel:
            read = after if layer.mlp_norm is None else layer.mlp_norm(after)
        elif layer.mlp_norm is not None:
            read = layer.mlp_norm(hidden)
        if isinstance(mlp, Experts):
            return _plus(after, mlp(read, routes), layer.mlp_output_norm, scale)
        return _added(after, mlp.down, mlp.inner(read), layer.mlp_output_norm, scale * mlp.output_scale)

    def project(
        self, layer: AttentionWeights, spec: AttentionSpec, read: Tensor, rotation: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Queries [N, H, D], and keys and values [N, 2 K, D], turned to their positions."""
        config, norms = self.config, spec.head_norm
        projected = layer.qkv(read)
        if norms is not None and not norms.after_rope:
            self._norm_heads(layer, projected)
        turned = projected if rotation is None else rotate(projected, rotation)
        if norms is not None and norms.after_rope:
            self._norm_heads(layer, turned)
        heads = turned.view(len(read), -1, config.head_dim)
        return heads.split_with_sizes((config.num_heads, 2 * config.num_kv_heads), 1)

    def _norm_heads(self, layer: AttentionWeights, projected: Tensor) -> None:
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

    def rotations(self, rotary: Rotary, batch: ForwardBatch) -> Tensor:
        """Those of all rows."""
        config = self.config
        turning = config.num_heads + config.num_kv_heads
        sections = config.rope.sections
        positions = batch.positions if not sections or batch.turns is None else batch.turns
        planes = planes_of(sections) if positions.dim() == 2 else None
        return rotary.at(positions, config.max_positions - 1, turning, config.num_kv_heads, planes)


class _Run:
    """What the layers of one forward share: plans, rotations, and which pages and states come next."""

    def __init__(self, model: Transformer, batch: ForwardBatch, cache: Pages) -> None:
        self._model, self._slots = model, batch.slots
        self._cache = cache
        shapes = {shape_of(spec.attention) for spec in model.specs if spec.attention is not None}
        self._plans = {shape: plan_attention(batch, cache, shape) for shape in shapes}
        self._rotations = {turn: model.rotations(rotary, batch) for turn, rotary in model.rotaries.items()}
        self._recurrences = Recurrences(batch, cache.states) if model.config.recurrent else None

    @property
    def staged(self) -> StagedTrees | None:
        """What recurrent layers have made of rows that are not committed."""
        return None if self._recurrences is None else self._recurrences.staged

    def attention(self, i: int, layer: AttentionWeights, spec: AttentionSpec, read: Tensor) -> Tensor:
        """What the `i`-th layer with attention mixes, keys and values written. [N, hidden] -> [N, H * D]."""
        turn = _turning(spec)
        rotation = None if turn is None else self._rotations[turn]
        query, key_value = self._model.project(layer, spec, read, rotation)
        self._cache.write(i, self._slots, key_value)
        mixed = _attend(self._plans[shape_of(spec)], i, query, layer.sinks)
        return mixed if layer.gate is None else mixed * torch.sigmoid(layer.gate(read))

    def recurrence(self, i: int, mixer: Mixer, read: Tensor) -> Tensor:
        """What the `i`-th recurrent layer mixes. [N, hidden] -> [N, width]."""
        assert self._recurrences is not None
        return self._recurrences.run(i, mixer, read)


def _without_attention(layer: Layer) -> Layer:
    return replace(layer, attention=None, attention_norm=layer.attention_norm if layer.mixer else None)


def _numbered(parts: Sequence[object | None]) -> list[int]:
    """How many there are before each."""
    return [sum(part is not None for part in parts[:i]) for i in range(len(parts))]


def _added(hidden: Tensor, part: Linear, x: Tensor, norm: Norm | None, scale: float) -> Tensor:
    """hidden + scale · norm(part(x)), in one pass where there is nothing between."""
    return part.add_to(hidden, x) if norm is None and scale == 1.0 else _plus(hidden, part(x), norm, scale)


def _plus(hidden: Tensor, made: Tensor, norm: Norm | None, scale: float) -> Tensor:
    normed = made if norm is None else norm(made)
    return hidden + (normed if scale == 1.0 else normed * scale)


def _attend(attention: Attention, layer: int, query: Tensor, sinks: Tensor | None) -> Tensor:
    return attention.run(layer, query) if sinks is None else attention.run(layer, query, sinks=sinks)


def shape_of(attention: AttentionSpec) -> AttentionShape:
    """What kernels need to know of it."""
    return AttentionShape(attention.window, attention.scale, attention.softcap, attention.sinks)


def _turning(attention: AttentionSpec | None) -> tuple[RopeConfig, int] | None:
    return None if attention is None or attention.rope is None else (attention.rope, attention.rotated)


def _layer(loader: WeightLoader, i: int, spec: LayerSpec) -> Layer:
    name = f"model.layers.{i}"

    def norm(which: str) -> Norm | None:
        return loader.norm(f"{name}.{which}", spec.norm) if which in spec.norms else None

    return Layer(
        attention_norm=norm(ATTENTION_NORM),
        attention=None if spec.attention is None else _attention(loader, f"{name}.self_attn", spec.attention),
        mixer=None if spec.recurrent is None else load_mixer(loader, name, spec.recurrent),
        attention_output_norm=norm(ATTENTION_OUTPUT_NORM),
        mlp_norm=norm(MLP_NORM),
        mlp=None if spec.mlp is None else _mlp(loader, f"{name}.mlp", spec.mlp),
        mlp_output_norm=norm(MLP_OUTPUT_NORM),
    )


def _attention(loader: WeightLoader, name: str, spec: AttentionSpec) -> AttentionWeights:
    return AttentionWeights(
        qkv=loader.qkv(name, spec),
        head_norm=loader.head_norm(name, spec),
        sinks=loader.tensor(f"{name}.sinks.weight") if spec.sinks else None,
        gate=loader.linear_of(f"{name}.gate_proj", spec.qkv_bias) if spec.gated else None,
        output=loader.summed(f"{name}.o_proj", spec.output_bias),
    )


def _mlp(loader: WeightLoader, name: str, mlp: MlpSpec | ExpertsSpec) -> Mlp | Experts:
    if isinstance(mlp, ExpertsSpec):
        return loader.experts(name, mlp)
    return Mlp(
        loader.gate_up(name, mlp), loader.summed(f"{name}.down_proj", mlp.bias), mlp.activation, mlp.gated,
        mlp.gate_scale, mlp.output_scale,
    )  # fmt: skip
