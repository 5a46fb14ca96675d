"""Reads a checkpoint tensor by tensor straight into a GPU's memory, in the layout of our kernels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from draftwood.model.checkpoint import Checkpoint
from draftwood.model.config import ModelConfig
from draftwood.model.native import Progress
from draftwood.model.spec import (
    ATTENTION_NORM,
    ATTENTION_OUTPUT_NORM,
    MLP_NORM,
    MLP_OUTPUT_NORM,
    ExpertsSpec,
    MlpSpec,
)
from draftwood.model.weights import (
    Float8,
    Matrix,
    Quantised,
    Storage,
    WeightFormat,
    as_numbers,
    quantise_float8,
    store_as,
)
from draftwood.ops.cuda.experts import MLP, CudaExperts, CudaMlp
from draftwood.ops.cuda.linear import CudaLinear, pack
from draftwood.ops.cuda.products import Norm

DENSE = (None, Storage.BFLOAT16, Storage.FLOAT32)
Rows = TypeVar("Rows", Tensor, Quantised, Matrix)
_FORGET_EVERY = 16  # matrices


@dataclass(frozen=True)
class Layer:
    """The weights of one decoder layer, projections that share an input fused."""

    attention_norm: Norm | None
    qkv: CudaLinear  # -> [(H + 2 K) * D]
    head_norm: tuple[Tensor, Tensor] | None  # of queries and of keys, [D] each
    output: CudaLinear
    mlp_norm: Norm | None
    mlp: MLP
    attention_output_norm: Norm | None = None
    mlp_output_norm: Norm | None = None
    sinks: Tensor | None = None  # [H]

    def views(self, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
        """Its parts by the names that checkpoints have for them."""
        own, shared = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        inner = config.intermediate_size
        assert self.attention_norm is not None
        assert self.mlp_norm is not None
        yield "input_layernorm.weight", self.attention_norm.weight
        yield "post_attention_layernorm.weight", self.mlp_norm.weight
        for part, weight in zip("qk", self.head_norm or (), strict=False):
            yield f"self_attn.{part}_norm.weight", weight
        yield from _split("self_attn", self.qkv, {"q_proj": own, "k_proj": shared, "v_proj": shared})
        yield from _split("self_attn", self.output, {"o_proj": config.hidden_size})
        assert isinstance(self.mlp, CudaMlp)
        yield from _split("mlp", self.mlp.gate_up, {"gate_proj": inner, "up_proj": inner})
        yield from _split("mlp", self.mlp.down, {"down_proj": config.hidden_size})


def _split(place: str, linear: CudaLinear, outputs: Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
    """What lies one below the other in a matrix, each under its own name."""
    for kind, whole in (("weight", linear.weight.codes), ("bias", linear.bias)):
        if whole is not None:
            names = [f"{place}.{name}.{kind}" for name in outputs]
            yield from zip(names, whole.split(list(outputs.values())), strict=True)


class CudaLoader:
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
        self._steps = sum(_products(spec.only_mlp) for spec in self._config.layer_specs) + (
            1 if self._config.tied_head else 2
        )
        self._rotated = self._config.head_dim  # dimensions of a head that turn, in the layer that is being read
        self.num_bytes = 0

    def head_and_embedding(self) -> tuple[CudaLinear, Tensor]:
        """The output head and the token embedding [V, hidden], one tensor where they are tied and can."""
        storage = self._weights.head
        embedding = self._matrices(["model.embed_tokens.weight"], storage)
        if not self._config.tied_head:
            self._count(embedding := [self._numbers(part) for part in embedding])
            return self._linear(["lm_head"], storage, False), embedding[0]
        head = self._pack(embedding, None)
        if storage in DENSE:
            return head, head.weight.codes
        self._count(numbers := [self._numbers(part) for part in embedding])
        return head, numbers[0]

    def layer(self, i: int) -> Layer:
        """The i-th layer."""
        name, config, storage = f"model.layers.{i}", self._config, self._weights.layers
        own, spec = f"{name}.self_attn", config.layer_specs[i]
        attention = spec.only_attention
        self._rotated = attention.rotated
        normed = attention.head_norm is not None
        head_norms = [self._vector(f"{own}.{part}_norm.weight") for part in ("qk" if normed else "")]
        norms = {which: self.norm(f"{name}.{which}") for which in spec.wiring.norms}
        return Layer(
            attention_norm=norms.get(ATTENTION_NORM),
            qkv=self._linear([f"{own}.{part}_proj" for part in "qkv"], storage, attention.qkv_bias),
            head_norm=(head_norms[0], head_norms[1]) if normed else None,
            output=self._linear([f"{own}.o_proj"], storage, attention.output_bias),
            mlp_norm=norms.get(MLP_NORM),
            mlp=self._mlps(f"{name}.mlp", spec.only_mlp),
            attention_output_norm=norms.get(ATTENTION_OUTPUT_NORM),
            mlp_output_norm=norms.get(MLP_OUTPUT_NORM),
            sinks=self._vector(f"{own}.sinks.weight") if attention.sinks else None,
        )

    def _mlps(self, name: str, spec: MlpSpec | ExpertsSpec) -> MLP:
        """One, or a mixture; what weighs rows is never rounded."""
        if isinstance(spec, MlpSpec):
            return self._mlp([name], spec)
        router = self._linear([f"{name}.router"], None, spec.router_bias)
        experts = self._mlp([f"{name}.experts.{i}" for i in range(spec.count)], spec.expert)
        if spec.shared is None:
            return CudaExperts(spec, router, experts.gate_up, experts.down)
        shared, strength = (
            self._mlp([f"{name}.shared"], spec.shared),
            self._linear([f"{name}.shared_gate"], None, False),
        )
        return CudaExperts(spec, router, experts.gate_up, experts.down, shared, strength)

    def _mlp(self, names: Sequence[str], spec: MlpSpec) -> CudaMlp:
        """Gate and up of each, one below the other, and the downs."""
        storage, openings = self._weights.layers, [f"{name}.{part}_proj" for name in names for part in ("gate", "up")]
        gate_up = self._linear(openings, storage, spec.bias)
        return CudaMlp(
            gate_up, self._linear([f"{name}.down_proj" for name in names], storage, spec.bias), spec.activation
        )

    def norm(self, name: str) -> Norm:
        """A norm's weight."""
        return Norm(self._vector(f"{name}.weight"), self._config.norm_eps)

    def _vector(self, name: str) -> Tensor:
        # Beyond plain models, as precise as norms are computed: 1 + w, folded, has too many digits for bfloat16.
        dtype = self._dtype if self._config.is_plain else torch.float32
        vector = self._turning(name, self._checkpoint.tensor(name).to(self._device).to(dtype))
        self._count([vector])
        return vector

    def _linear(self, names: Sequence[str], storage: Storage | None, bias: bool) -> CudaLinear:
        matrices = self._matrices([f"{name}.weight" for name in names], storage)
        biases = [self._bias(name) for name in names if bias]
        return self._pack(matrices, torch.cat(biases) if biases else None)

    def _bias(self, name: str) -> Tensor:
        bias = self._checkpoint.tensor(f"{name}.bias").to(self._device).to(self._dtype)
        return self._turning(f"{name}.bias", bias)

    def _turning(self, name: str, rows: Rows) -> Rows:
        """Rows of queries and keys in the order in which they are turned, i with i + D / 2; others as they are."""
        dim, turned = self._config.head_dim, self._rotated
        if turned == dim or name.split(".")[-2] not in ("q_proj", "k_proj", "q_norm", "k_norm"):
            return rows
        half, still = turned // 2, (dim - turned) // 2
        begins, sizes = (0, turned, half, turned + still), (half, still, half, still)
        head = torch.cat([torch.arange(begin, begin + size) for begin, size in zip(begins, sizes, strict=True)])
        heads = torch.arange(0, rows.shape[0], dim)
        return rows[(heads[:, None] + head).flatten()]

    def _pack(self, matrices: Sequence[Matrix | Float8], bias: Tensor | None) -> CudaLinear:
        packed = pack(matrices, self._inputs)
        self._count([t for t in (packed.codes, packed.scale, packed.minimum, bias) if t is not None])
        return CudaLinear(packed, bias, self._strict)

    def _matrices(self, names: Sequence[str], storage: Storage | None) -> list[Matrix | Float8]:
        """Matrices that share their inputs, on the device; dense ones already one below the other."""
        parts = [self._turning(name, self._checkpoint.matrix(name)) for name in names]
        self._inputs = parts[0].shape[1]
        if storage in DENSE:
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
        self._progress(self._loaded, self._steps)

    def _count(self, tensors: Sequence[Tensor]) -> None:
        self.num_bytes += sum(tensor.nbytes for tensor in tensors)


def _products(mlp: MlpSpec | ExpertsSpec) -> int:
    """Matrices of a layer as they are read: two of attention, and those of its MLPs."""
    return 4 if isinstance(mlp, MlpSpec) else 5 if mlp.shared is None else 8


def _moved(matrix: Matrix, device: torch.device) -> Matrix:
    if isinstance(matrix, Quantised):
        return matrix.each(lambda part: part.to(device))
    return matrix.to(device)


def _rounded(storage: Storage | None, matrix: Matrix) -> Matrix | Float8:
    if storage == Storage.FLOAT8:
        return quantise_float8(as_numbers(matrix))
    return matrix if storage is None else store_as(storage, matrix)
