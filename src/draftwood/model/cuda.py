"""The decoder on our own GPU kernels: the same function as `Transformer`, every forward fit for a CUDA graph.

Made strict, it sums every number in an order that does not depend on the other rows of a forward.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache as cached
from pathlib import Path

import torch
import triton
from torch import Tensor

from draftwood.batch import ROUTES, AttentionShape, ForwardBatch, ForwardOutput, GivenRows, Pages
from draftwood.errors import InvalidRequest
from draftwood.model.checkpoint import Checkpoint
from draftwood.model.cuda_loading import DENSE, CudaLoader, Layer
from draftwood.model.layers import Rotary, softcapped, write_over
from draftwood.model.native import Progress
from draftwood.model.rope import RopeConfig
from draftwood.model.sharding import ranks_of, share_of
from draftwood.model.spec import NONE, LayerSpec, Sublayers, Wiring
from draftwood.model.streaming import ResidentLayers, load_layers, require_resident
from draftwood.model.transformer import shape_of
from draftwood.model.weights import FORMATS, ON_ACCELERATORS, WeightFormat
from draftwood.ops import cuda
from draftwood.ops.cuda.attention import Apart, TreeAttention
from draftwood.ops.cuda.experts import CudaExperts
from draftwood.ops.cuda.linear import CudaLinear, Stream
from draftwood.ops.cuda.norm_act import rms_norm
from draftwood.ops.cuda.products import Norm
from draftwood.ops.cuda.rotary import Turning, rotate_and_store
from draftwood.ops.prefill import PrefillAttention

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Ahead:
    """How many bytes of a product's weights are asked for as the product before it ends."""

    output: int
    gate_up: int
    down: int
    next_layer: int


ONE_ROW = Ahead(1 << 20, 1 << 20, 2 << 20, 2 << 20)  # best on an H200: benchmarks/gpu_ahead.py
SEVERAL_ROWS = Ahead(0, 0, 0, 0)  # nothing is gained
_Attention = TreeAttention | PrefillAttention | Apart


class CudaTransformer:
    """Weights and the forward over paged keys and values."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        weights: WeightFormat = FORMATS["stored"],
        strict: bool = False,
        progress: Progress = lambda *_: None,
        offload: float = 0.0,
    ) -> None:
        _require_possible(dtype, weights)
        self.config = config = checkpoint.config
        self.dtype = dtype
        self.device = device
        self.weights = weights
        self.strict = strict
        self.implementation = implementation()
        self._specs = config.layer_specs
        self._ranks = ranks_of(checkpoint)
        loader = self._loader(checkpoint, progress)
        # The largest first: rounding them needs a second copy, which costs least while nothing else is there.
        self._head, self._embedding = loader.head_and_embedding()
        self._norms: dict[int, Norm | None] = {}  # of each layer's attention: the layer before it ends with it

        def layer(i: int) -> Layer:
            made = loader.layer(i)
            self._norms[i] = made.attention_norm
            return made

        self._layers = load_layers(layer, config.num_layers, offload, device)
        self._cached = list(range(config.num_layers))  # where in the pages each layer's keys and values lie
        self._final_norm = loader.norm("model.norm")
        self.num_bytes = loader.num_bytes
        self._rotations = {turning: self._table(*turning) for turning in {_turning(spec) for spec in self._specs}}
        scale = config.stream.embedding_scale
        self._embedding_scale = None if scale == 1.0 else torch.tensor(scale, dtype=dtype, device=device)

    def _table(self, rope: RopeConfig | None, rotated: int) -> Tensor:
        """Cosine and sine of all positions. [positions, D / 2, 2]."""
        dim, longest = self.config.head_dim, self.config.max_positions
        if rope is None:
            return torch.tensor([1.0, 0.0], device=self.device).expand(longest, dim // 2, 2).contiguous()
        frequencies, scale = rope.inverse_frequencies(rotated)
        rotary = Rotary(frequencies, scale, torch.float32, self.device, (dim - rotated) // 2)
        return torch.view_as_real(rotary.table(longest))

    def _loader(self, checkpoint: Checkpoint, progress: Progress = lambda *_: None) -> CudaLoader:
        return CudaLoader(checkpoint, self.dtype, self.device, self.weights, self.strict, progress)

    def part(self, layers: Sequence[int], without: Sublayers = NONE) -> CudaTransformer:
        """Some of its layers as a model, in the same memory."""
        part = copy.copy(self)
        part.config = self.config.part(layers, without)
        part._specs = part.config.layer_specs
        part._layers, part._cached = self._layers.part(layers), [self._cached[i] for i in layers]
        part._norms = {number: self._norms[i] for number, i in enumerate(layers)}
        return part

    def narrowed(self, allowed: Sequence[Tensor], top_k: int) -> CudaTransformer:
        """The same with routers that pick `top_k` of each mixture's experts that are allowed."""
        require_resident(range(len(self._specs)), len(self._layers.resident))
        part, each = copy.copy(self), iter(allowed)
        part._layers = ResidentLayers(
            [
                replace(layer, mlp=layer.mlp.narrowed(next(each), top_k))
                if isinstance(layer.mlp, CudaExperts)
                else layer
                for layer in self._layers.resident
            ]
        )
        return part

    def substituted(self, checkpoint: Checkpoint, weights: WeightFormat) -> CudaTransformer:
        """The same with layers in another format in place of those that are not on the device."""
        share = share_of(checkpoint, self._ranks, weights)
        loader = CudaLoader(share, self.dtype, self.device, weights, self.strict, lambda *_: None)
        resident = self._layers.resident
        others = [loader.layer(i) for i in range(len(resident), len(self._specs))]
        part = copy.copy(self)
        part._layers = ResidentLayers([*resident, *others])
        part.num_bytes = loader.num_bytes
        return part

    def refresh(self, checkpoint: Checkpoint) -> None:
        """Compute with the layers and the last norm of `checkpoint` from now on; words stay."""
        loader = self._loader(checkpoint)
        for i, layer in enumerate(self._layers.part(range(len(self._specs))).resident):
            write_over([layer], [loader.layer(i)])
        write_over([self._final_norm], [loader.norm("model.norm")])

    def views(self) -> dict[str, Tensor]:
        """Its weights under the names of a checkpoint, as views of what the kernels read; where they are no codes."""
        assert {self.weights.head, self.weights.layers} <= set(DENSE), self.weights.name
        assert self.config.is_plain, self.config.family
        named = {"model.norm.weight": self._final_norm.weight, "model.embed_tokens.weight": self._embedding}
        if not self.config.tied_head:
            named["lm_head.weight"] = self._head.weight.codes
        for i, layer in enumerate(self._layers.part(range(len(self._specs))).resident):
            named |= {f"model.layers.{i}.{name}": view for name, view in layer.views(self.config)}
        return named

    def forward(
        self, batch: ForwardBatch, cache: Pages, needs: frozenset[int] = frozenset(), given: GivenRows | None = None
    ) -> ForwardOutput:
        """Run the rows of `batch`, writing their keys and values to `cache`. Logits are float32."""
        shapes = [None if s.attention is None else shape_of(s.attention) for s in self._specs]
        attention = {shape: self._plan(batch, cache, shape) for shape in set(shapes) if shape is not None}
        first = self._begin(batch) if given is None else given.residual
        stream = Stream(first, self._norms[0])
        read = stream if given is None or given.wide is None else Stream(given.wide)
        features: dict[int, Tensor] = {}
        routes: list[Tensor] | None = [] if ROUTES in needs else None
        for i in range(len(self._specs)):
            layer = self._layers.get(i)
            self._layers.prefetch(i + 1)
            if (shape := shapes[i]) is None:
                read = stream = self._run_mlp(i, layer, stream.hidden, routes)
            else:
                turning = self._turning(i, layer, batch.positions, batch.slots, cache.store[self._cached[i]])
                run = self._run_plain if self._fused(i) else self._run_apart
                read = stream = run(i, layer, stream, read, turning, attention[shape], routes)
            if i in needs:  # the next layer may write over it
                features[i] = stream.hidden.clone() if i + 1 < len(self._specs) else stream.hidden
        if routes:
            features[ROUTES] = torch.stack(routes, 1)
        return ForwardOutput(self._logits(stream.each(batch.at_logits)), features)

    def _fused(self, i: int) -> bool:
        """Whether nothing stands between a layer's products and the sums they are part of."""
        spec = self._specs[i]
        plain = spec.wiring == Wiring.PRE and spec.residual_scale == 1.0 and spec.mlp is not None
        return plain and self._ranks.size == 1

    def _run_plain(
        self, i: int, layer: Layer, stream: Stream, read: Stream, turning: Turning, attention: _Attention,
        routes: list[Tensor] | None,
    ) -> Stream:  # fmt: skip
        """A layer whose products end with the sum and begin with the norm; each asks for the next one's weights."""
        next_norm, following = self._behind(i)
        ahead = ONE_ROW if len(stream.hidden) == 1 and not self.strict else SEVERAL_ROWS
        query = layer.qkv.turned(read, turning, layer.output.beginning(ahead.output))
        mixed = attention.run(self._cached[i], query, sinks=layer.sinks)
        then = layer.mlp.beginning(ahead.gate_up)
        stream = layer.output.add_to(stream.hidden, mixed, layer.mlp_norm, then)
        then = None if following is None else following.beginning(ahead.next_layer)
        return layer.mlp.add_to(stream, next_norm, ahead.down, then, routes)

    def _run_apart(
        self, i: int, layer: Layer, stream: Stream, read: Stream, turning: Turning, attention: _Attention,
        routes: list[Tensor] | None,
    ) -> Stream:  # fmt: skip
        """A layer with norms, a scale or a sum over ranks behind its products, or without an MLP."""
        mixed = attention.run(self._cached[i], layer.qkv.turned(read, turning), sinks=layer.sinks)
        made = self._ranks.sum(layer.output(Stream(mixed)))
        hidden = _added(stream.hidden, made, layer.attention_output_norm, self._specs[i].residual_scale)
        return self._run_mlp(i, layer, hidden, routes)

    def _run_mlp(self, i: int, layer: Layer, hidden: Tensor, routes: list[Tensor] | None) -> Stream:
        """The part of a layer behind attention, if it has any."""
        if self._specs[i].mlp is not None:
            made = self._ranks.sum(layer.mlp(Stream(hidden, layer.mlp_norm), routes))
            hidden = _added(hidden, made, layer.mlp_output_norm, self._specs[i].residual_scale)
        return Stream(hidden, self._behind(i)[0])

    def _behind(self, i: int) -> tuple[Norm | None, CudaLinear | None]:
        """The norm through which the stream behind a layer is read, and the product that reads it if it is there."""
        if i + 1 == len(self._specs):
            return self._final_norm, self._head
        resident = self._layers.resident
        return self._norms[i + 1], resident[i + 1].qkv if i + 1 < len(resident) else None

    def _begin(self, batch: ForwardBatch) -> Tensor:
        first = self._embedding.index_select(0, batch.tokens)
        return first if self._embedding_scale is None else first * self._embedding_scale

    def _logits(self, stream: Stream) -> Tensor:
        logits, around = self._head(stream, torch.float32), self.config.stream
        if logits.shape[1] < self.config.vocab_size:
            logits = self._ranks.side_by_side(logits)[:, : self.config.vocab_size]
        if around.logit_scale != 1.0:
            logits = logits * around.logit_scale
        return logits if around.logit_softcap is None else softcapped(logits, around.logit_softcap)

    def write_context(self, rows: Tensor, positions: Tensor, slots: Tensor, cache: Pages) -> None:
        """Write the keys and values that every layer makes of the same rows [N, hidden], not normed, to `slots`."""
        config = self.config
        for i in range(len(self._specs)):
            layer = self._layers.get(i)
            made = layer.qkv.outputs_from(config.num_heads * config.head_dim)(Stream(rows))
            rotate_and_store(made, self._turning(i, layer, positions, slots, cache.store[self._cached[i]], 0))

    def _turning(
        self, i: int, layer: Layer, positions: Tensor, slots: Tensor, store: Tensor, num_heads: int | None = None
    ) -> Turning:
        heads = self.config.num_heads if num_heads is None else num_heads
        norms = self._specs[i].only_attention.head_norm
        eps = self.config.norm_eps if norms is None else norms.norm.eps
        table = self._rotations[_turning(self._specs[i])]
        return Turning(positions, slots, store, table, heads, layer.head_norm, eps)

    def _plan(self, batch: ForwardBatch, cache: Pages, shape: AttentionShape) -> _Attention:
        if batch.parts:
            return Apart(tuple(self._plan_one(part, cache, shape) for part in batch.parts))
        return self._plan_one(batch, cache, shape)

    def _plan_one(self, batch: ForwardBatch, cache: Pages, shape: AttentionShape) -> TreeAttention | PrefillAttention:
        if not self.strict and PrefillAttention.suits(batch, shape):
            return PrefillAttention.plan(batch, cache, shape)
        return TreeAttention.plan(
            batch, cache, shape, linear=batch.linear, max_rows=batch.max_rows, max_depth=batch.max_depth,
            max_nodes=batch.max_nodes, exact=self.strict,
        )  # fmt: skip


def _turning(spec: LayerSpec) -> tuple[RopeConfig | None, int]:
    return spec.only_attention.rope, spec.only_attention.rotated


def _added(hidden: Tensor, made: Tensor, norm: Norm | None, scale: float) -> Tensor:
    normed = made if norm is None else rms_norm(made, norm)
    return torch.add(hidden, normed, alpha=scale)


@cached
def implementation() -> str:
    """A name that changes with the kernels' source and their compiler."""
    files = sorted(Path(cuda.__path__[0]).glob("*.py"))
    source = b"".join(file.read_bytes() for file in [*files, Path(__file__)])
    return f"triton-{triton.__version__}-{hashlib.blake2b(source, digest_size=6).hexdigest()}"


def _require_possible(dtype: torch.dtype, weights: WeightFormat) -> None:
    if dtype not in DTYPES:
        names = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        raise InvalidRequest(f"The GPU kernels compute in {names}, not {str(dtype).removeprefix('torch.')}.")
    if weights.name not in ON_ACCELERATORS:
        raise InvalidRequest(
            f"Weights stored as {weights.name} run on a CPU only; on a GPU choose one of {', '.join(ON_ACCELERATORS)}."
        )
