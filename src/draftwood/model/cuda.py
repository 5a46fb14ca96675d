"""The decoder on our own GPU kernels: the same function as `Transformer`, every forward fit for a CUDA graph.

Made strict, it sums every number in an order that does not depend on the other rows of a forward.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache as cached
from pathlib import Path

import torch
import triton
from torch import Tensor

from draftwood.batch import AttentionShape, ForwardBatch, ForwardOutput, GivenRows, Pages
from draftwood.errors import InvalidRequest
from draftwood.model.checkpoint import Checkpoint
from draftwood.model.config import ModelConfig
from draftwood.model.layers import Rotary, write_over
from draftwood.model.native import Progress
from draftwood.model.weights import (
    FORMATS,
    ON_ACCELERATORS,
    Float8,
    Matrix,
    Quantised,
    Storage,
    WeightFormat,
    as_numbers,
    quantise_float8,
    store_as,
)
from draftwood.ops import cuda
from draftwood.ops.cuda.attention import Apart, TreeAttention
from draftwood.ops.cuda.linear import CudaLinear, Stream, pack
from draftwood.ops.cuda.products import Norm
from draftwood.ops.cuda.rotary import Turning, rotate_and_store

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_FORGET_EVERY = 16  # matrices
_DENSE = (None, Storage.BFLOAT16, Storage.FLOAT32)


@dataclass(frozen=True)
class Ahead:
    """How many bytes of a product's weights are asked for as the product before it ends."""

    output: int
    gate_up: int
    down: int
    next_layer: int


ONE_ROW = Ahead(1 << 20, 1 << 20, 2 << 20, 2 << 20)  # best on an H200: benchmarks/gpu_ahead.py
SEVERAL_ROWS = Ahead(0, 0, 0, 0)  # nothing is gained


@dataclass(frozen=True)
class Layer:
    """The weights of one decoder layer, projections that share an input fused."""

    attention_norm: Norm
    qkv: CudaLinear  # -> [(H + 2 K) * D]
    head_norm: tuple[Tensor, Tensor] | None  # of queries and of keys, [D] each
    output: CudaLinear
    mlp_norm: Norm
    gate_up: CudaLinear
    down: CudaLinear

    def views(self, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
        """Its parts by the names that checkpoints have for them."""
        own, shared = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        inner = config.intermediate_size
        yield "input_layernorm.weight", self.attention_norm.weight
        yield "post_attention_layernorm.weight", self.mlp_norm.weight
        for part, weight in zip("qk", self.head_norm or (), strict=False):
            yield f"self_attn.{part}_norm.weight", weight
        yield from _split("self_attn", self.qkv, {"q_proj": own, "k_proj": shared, "v_proj": shared})
        yield from _split("self_attn", self.output, {"o_proj": config.hidden_size})
        yield from _split("mlp", self.gate_up, {"gate_proj": inner, "up_proj": inner})
        yield from _split("mlp", self.down, {"down_proj": config.hidden_size})


def _split(place: str, linear: CudaLinear, outputs: Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
    """What lies one below the other in a matrix, each under its own name."""
    for kind, whole in (("weight", linear.weight.codes), ("bias", linear.bias)):
        if whole is not None:
            names = [f"{place}.{name}.{kind}" for name in outputs]
            yield from zip(names, whole.split(list(outputs.values())), strict=True)


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
    ) -> None:
        _require_possible(dtype, weights)
        self.config = config = checkpoint.config
        self.dtype = dtype
        self.device = device
        self.weights = weights
        self.strict = strict
        self.implementation = implementation()
        loader = self._loader(checkpoint, progress)
        # The largest first: rounding them needs a second copy, which costs least while nothing else is there.
        self._head, self._embedding = loader.head_and_embedding()
        self._layers = [loader.layer(i) for i in range(config.num_layers)]
        self._final_norm = loader.norm("model.norm")
        self.num_bytes = loader.num_bytes
        frequencies, scale = config.rope.inverse_frequencies(config.head_dim)
        rotary = Rotary(frequencies, scale, torch.float32, device)
        self._rotations = torch.view_as_real(rotary.table(config.max_positions))  # [positions, D / 2, 2]

    def _loader(self, checkpoint: Checkpoint, progress: Progress = lambda *_: None) -> _Loader:
        return _Loader(checkpoint, self.dtype, self.device, self.weights, self.strict, progress)

    def first(self, count: int) -> CudaTransformer:
        """Its first layers as a model, in the same memory."""
        part = copy.copy(self)
        part.config, part._layers = self.config.first(count), self._layers[:count]
        return part

    def refresh(self, checkpoint: Checkpoint) -> None:
        """Compute with the layers and the last norm of `checkpoint` from now on; words stay."""
        loader = self._loader(checkpoint)
        for i, layer in enumerate(self._layers):
            write_over([layer], [loader.layer(i)])
        write_over([self._final_norm], [loader.norm("model.norm")])

    def views(self) -> dict[str, Tensor]:
        """Its weights under the names of a checkpoint, as views of what the kernels read; where they are no codes."""
        assert {self.weights.head, self.weights.layers} <= set(_DENSE), self.weights.name
        named = {"model.norm.weight": self._final_norm.weight, "model.embed_tokens.weight": self._embedding}
        if not self.config.tied_head:
            named["lm_head.weight"] = self._head.weight.codes
        for i, layer in enumerate(self._layers):
            named |= {f"model.layers.{i}.{name}": view for name, view in layer.views(self.config)}
        return named

    def forward(
        self, batch: ForwardBatch, cache: Pages, needs: frozenset[int] = frozenset(), given: GivenRows | None = None
    ) -> ForwardOutput:
        """Run the rows of `batch`, writing their keys and values to `cache`. Logits are float32."""
        config = self.config
        attention = {window: self._plan(batch, cache, window) for window in set(config.windows)}
        norms = [layer.attention_norm for layer in self._layers[1:]] + [self._final_norm]
        following, n = [layer.qkv for layer in self._layers[1:]] + [self._head], len(batch.tokens)
        ahead = ONE_ROW if n == 1 and not self.strict else SEVERAL_ROWS
        first = self._embedding.index_select(0, batch.tokens) if given is None else given.residual
        stream = Stream(first, self._layers[0].attention_norm)
        read = stream if given is None or given.wide is None else Stream(given.wide)
        features: dict[int, Tensor] = {}
        for i, layer in enumerate(self._layers):
            turning = self._turning(layer, batch.positions, batch.slots, cache.store[i])
            query = layer.qkv.turned(read, turning, layer.output.beginning(ahead.output))
            mixed = attention[config.windows[i]].run(i, query)
            then = layer.gate_up.beginning(ahead.gate_up, gated=True)
            stream = layer.output.add_to(stream.hidden, mixed, layer.mlp_norm, then)
            wide = layer.gate_up.gated(stream, config.activation, layer.down.beginning(ahead.down))
            then = following[i].beginning(ahead.next_layer)
            read = stream = layer.down.add_to(stream.hidden, wide, norms[i], then)
            if i in needs:  # the next layer may write over it
                features[i] = stream.hidden.clone() if i + 1 < len(self._layers) else stream.hidden
        return ForwardOutput(self._head(stream.each(batch.at_logits), torch.float32), features)

    def write_context(self, rows: Tensor, positions: Tensor, slots: Tensor, cache: Pages) -> None:
        """Write the keys and values that every layer makes of the same rows [N, hidden], not normed, to `slots`."""
        config = self.config
        for i, layer in enumerate(self._layers):
            made = layer.qkv.outputs_from(config.num_heads * config.head_dim)(Stream(rows))
            rotate_and_store(made, self._turning(layer, positions, slots, cache.store[i], 0))

    def _turning(
        self, layer: Layer, positions: Tensor, slots: Tensor, store: Tensor, num_heads: int | None = None
    ) -> Turning:
        heads = self.config.num_heads if num_heads is None else num_heads
        return Turning(positions, slots, store, self._rotations, heads, layer.head_norm, self.config.norm_eps)

    def _plan(self, batch: ForwardBatch, cache: Pages, window: int | None) -> TreeAttention | Apart:
        if batch.parts:
            return Apart(tuple(self._plan_one(part, cache, window) for part in batch.parts))
        return self._plan_one(batch, cache, window)

    def _plan_one(self, batch: ForwardBatch, cache: Pages, window: int | None) -> TreeAttention:
        shape = AttentionShape(window, self.config.head_dim**-0.5)
        return TreeAttention.plan(
            batch, cache, shape, linear=batch.linear, max_rows=batch.max_rows, max_depth=batch.max_depth,
            max_nodes=batch.max_nodes, exact=self.strict,
        )  # fmt: skip


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


class _Loader:
    """Reads a checkpoint tensor by tensor straight into the device's memory, fusing on the way."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        weights: WeightFormat,
        strict: bool,
        progress: Progress,
    ) -> None:
        self._checkpoint = checkpoint
        self._config: ModelConfig = checkpoint.config
        self._dtype = dtype
        self._device = device
        self._weights = weights
        self._strict = strict
        self._progress = progress
        self._loaded = 0
        self.num_bytes = 0

    def head_and_embedding(self) -> tuple[CudaLinear, Tensor]:
        """The output head and the token embedding [V, hidden], one tensor where they are tied and can."""
        storage = self._weights.head
        embedding = self._matrices(["model.embed_tokens.weight"], storage)
        if not self._config.tied_head:
            self._count(embedding := [self._numbers(part) for part in embedding])
            return self._linear(["lm_head"], storage, False), embedding[0]
        head = self._pack(embedding, None)
        if storage in _DENSE:
            return head, head.weight.codes
        self._count(numbers := [self._numbers(part) for part in embedding])
        return head, numbers[0]

    def layer(self, i: int) -> Layer:
        """The i-th layer."""
        name, config, storage = f"model.layers.{i}", self._config, self._weights.layers
        attention, mlp = f"{name}.self_attn", f"{name}.mlp"
        head_norms = [self._vector(f"{attention}.{part}_norm.weight") for part in ("qk" if config.qk_norm else "")]
        return Layer(
            attention_norm=self.norm(f"{name}.input_layernorm"),
            qkv=self._linear([f"{attention}.{part}_proj" for part in "qkv"], storage, config.qkv_bias),
            head_norm=(head_norms[0], head_norms[1]) if head_norms else None,
            output=self._linear([f"{attention}.o_proj"], storage, config.output_bias),
            mlp_norm=self.norm(f"{name}.post_attention_layernorm"),
            gate_up=self._linear([f"{mlp}.gate_proj", f"{mlp}.up_proj"], storage, config.mlp_bias),
            down=self._linear([f"{mlp}.down_proj"], storage, config.mlp_bias),
        )

    def norm(self, name: str) -> Norm:
        """A norm's weight."""
        return Norm(self._vector(f"{name}.weight"), self._config.norm_eps)

    def _vector(self, name: str) -> Tensor:
        vector = self._checkpoint.tensor(name).to(self._device).to(self._dtype)
        self._count([vector])
        return vector

    def _linear(self, names: Sequence[str], storage: Storage | None, bias: bool) -> CudaLinear:
        matrices = self._matrices([f"{name}.weight" for name in names], storage)
        biases = [self._checkpoint.tensor(f"{name}.bias").to(self._device).to(self._dtype) for name in names if bias]
        return self._pack(matrices, torch.cat(biases) if biases else None)

    def _pack(self, matrices: Sequence[Matrix | Float8], bias: Tensor | None) -> CudaLinear:
        packed = pack(matrices, self._inputs)
        self._count([t for t in (packed.codes, packed.scale, packed.minimum, bias) if t is not None])
        return CudaLinear(packed, bias, self._strict)

    def _matrices(self, names: Sequence[str], storage: Storage | None) -> list[Matrix | Float8]:
        """Matrices that share their inputs, on the device; dense ones already one below the other."""
        parts = [self._checkpoint.matrix(name) for name in names]
        self._inputs = parts[0].shape[1]
        if storage in _DENSE:
            matrices: list[Matrix | Float8] = [self._dense(parts, storage)]
        else:
            matrices = [_rounded(storage, _moved(part, self._device)) for part in parts]
        self._heard()
        return matrices

    def _dense(self, parts: Sequence[Matrix], storage: Storage | None) -> Tensor:
        """Each part copied to its place: no second copy of the whole is ever made."""
        outputs = sum(part.shape[0] for part in parts)
        whole = torch.empty(outputs, self._inputs, dtype=self._dtype, device=self._device)
        for part, place in zip(parts, whole.split([part.shape[0] for part in parts]), strict=True):
            if isinstance(part, Tensor) and part.dtype == self._dtype and storage is None:
                place.copy_(part, non_blocking=True)
                continue
            numbers = as_numbers(_moved(part, self._device))[:, : self._inputs]
            place.copy_(numbers if storage != Storage.BFLOAT16 else numbers.to(torch.bfloat16))
        return whole

    def _numbers(self, matrix: Matrix | Float8) -> Tensor:
        return as_numbers(matrix)[:, : self._inputs].to(self._dtype).contiguous()

    def _heard(self) -> None:
        self._loaded += 1
        if self._loaded % _FORGET_EVERY == 0:
            self._checkpoint.forget()
        self._progress(self._loaded, 4 * self._config.num_layers + (1 if self._config.tied_head else 2))

    def _count(self, tensors: Sequence[Tensor]) -> None:
        self.num_bytes += sum(tensor.nbytes for tensor in tensors)


def _moved(matrix: Matrix, device: torch.device) -> Matrix:
    if isinstance(matrix, Quantised):
        return matrix.each(lambda part: part.to(device))
    return matrix.to(device)


def _rounded(storage: Storage | None, matrix: Matrix) -> Matrix | Float8:
    if storage == Storage.FLOAT8:
        return quantise_float8(as_numbers(matrix))
    return matrix if storage is None else store_as(storage, matrix)
