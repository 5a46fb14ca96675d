"""The decoder on our own CPU kernels: the same function as `Transformer`, in one call of C a forward.

Every number is summed in an order that does not depend on the other rows of a forward, so a row's logits are the same,
bit for bit, whatever tree, batch or chunk it is computed in.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftwood.batch import ROUTES, ForwardBatch, ForwardOutput, GivenRows, Pages
from draftwood.model.checkpoint import Checkpoint
from draftwood.model.config import ModelConfig
from draftwood.model.layers import Rotary
from draftwood.model.lora import Adapter
from draftwood.model.native_lora import NO_ADAPTERS, NativeAdapters
from draftwood.model.native_scratch import Scratch
from draftwood.model.packing import Arena, Packer, Progress, address
from draftwood.model.rope import RopeConfig
from draftwood.model.row_file import embedding_file
from draftwood.model.spec import (
    ATTENTION_NORM,
    ATTENTION_OUTPUT_NORM,
    CLAMPED,
    MLP_NORM,
    MLP_OUTPUT_NORM,
    NONE,
    ExpertsSpec,
    HeadNorms,
    MlpSpec,
    Sublayers,
)
from draftwood.model.weights import Storage, WeightFormat
from draftwood.ops.native import Kernels, structs

ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_pytorch_tanh": 2, "relu": 3, "relu2": 4, CLAMPED: 5}
_HEAD_NORMS = {HeadNorms.EACH: 0, HeadNorms.OWN: 1, HeadNorms.WHOLE: 2}
Turning = tuple[RopeConfig, int]  # and how many dimensions of a head it turns


def refuses(config: ModelConfig) -> str | None:
    """What these kernels cannot compute of a model, if there is something."""
    for layer in config.layers:
        if layer.unusual is not None:
            return layer.unusual
        mlp = layer.only_mlp.expert if isinstance(layer.only_mlp, ExpertsSpec) else layer.only_mlp
        if mlp.activation == CLAMPED and not mlp.gated:
            return "clamped activations without a gate"
    return None


class NativeTransformer:
    """Packed weights and the forward over paged keys and values."""

    dtype = torch.float32
    device = torch.device("cpu")
    strict = True
    _whole: NativeTransformer | None = None  # what it is a part of, whose memory its layers point to
    _allowed: tuple[Tensor, ...] = ()  # what its routers point to

    def __init__(
        self, library: Kernels, checkpoint: Checkpoint, weights: WeightFormat, progress: Progress = lambda *_: None
    ) -> None:
        self.config = config = checkpoint.config
        self.weights = weights
        self.implementation = Path(library._name).stem
        self._library = library
        self._arenas: tuple[Arena, ...] = (Arena(), Arena())  # of words, and of all else
        self._words = self._pack_words(checkpoint, progress)
        self._model = self._pack_layers(checkpoint, progress)
        self._scratch = Scratch(library, self._model)
        turnings = _turnings(config)
        self._rotaries = [_rotary(turning) for turning in turnings]
        self._rotations = [torch.empty(0, rotated) for _, rotated in turnings]
        self._adapters: NativeAdapters | None = None

    @property
    def num_bytes(self) -> int:
        """Memory of all weights."""
        return sum(arena.num_bytes for arena in self._arenas)

    def part(self, layers: Sequence[int], without: Sublayers = NONE) -> NativeTransformer:
        """Some of its layers as a model, in the same memory."""
        part = copy.copy(self)
        part.config, part._model = self.config.part(layers, without), structs.Model.from_buffer_copy(self._model)
        part._layers = (structs.Layer * len(layers))(*(self._layers[i] for i in layers))
        for i, layer in zip(layers, part._layers, strict=True):
            if i in without.attention:
                layer.output = structs.Matrix()
            if i in without.mlp:
                layer.down, layer.mixture = structs.Matrix(), None
        part._model.layers, part._model.num_layers = part._layers, len(layers)
        part._whole = self
        return part

    def narrowed(self, allowed: Sequence[Tensor], top_k: int) -> NativeTransformer:
        """The same with routers that pick `top_k` of each mixture's experts that are allowed."""
        part, each = self.part(range(self.config.num_layers)), iter(allowed)
        for layer in part._layers:
            if layer.mixture:
                mixture = structs.Mixture.from_buffer_copy(layer.mixture.contents)
                mixture.allowed, mixture.top_k = next(each).data_ptr(), top_k
                layer.mixture = ctypes.pointer(mixture)
        part._allowed = tuple(allowed)
        return part

    def adapt(self, adapters: Sequence[Adapter]) -> None:
        """Rows may have one of these from now on, by its place among them."""
        self._adapters = NativeAdapters(adapters, self.config, self._model)

    def refresh(self, checkpoint: Checkpoint) -> None:
        """Compute with the layers and the last norm of `checkpoint` from now on, packed over its own; words stay."""
        self._arenas[1].rewind()
        self._model = self._pack_layers(checkpoint)

    def refresh_words(self, checkpoint: Checkpoint) -> None:
        """The same of embedding and head."""
        self._arenas[0].rewind()
        self._words = self._pack_words(checkpoint)
        self._model.embedding, self._model.head = self._words

    def _pack_words(
        self, checkpoint: Checkpoint, progress: Progress = lambda *_: None
    ) -> tuple[structs.Matrix, structs.Matrix]:
        """Embedding and head; an embedding that is no head stays in its file, where it can."""
        packer = Packer(self._library, checkpoint, self._arenas[0], progress)
        self._embedding = embedding_file(checkpoint)
        if self._embedding is not None:
            return structs.Matrix(), packer.matrix(["lm_head"], self.weights.head)
        embedding = packer.matrix(["model.embed_tokens"], self.weights.head)
        return embedding, embedding if self.config.tied_head else packer.matrix(["lm_head"], self.weights.head)

    def _pack_layers(self, checkpoint: Checkpoint, progress: Progress = lambda *_: None) -> structs.Model:
        """The whole model: words that are there already, and layers."""
        config, weights = self.config, self.weights
        packer = Packer(self._library, checkpoint, self._arenas[1], progress, 1 if config.tied_head else 2)
        # The model points to these arrays, so they must live as long.
        self._layers = (structs.Layer * config.num_layers)(*self._pack_each(packer, checkpoint, progress))
        stream = config.stream
        return structs.Model(
            *self._words, self._layers, packer.norm("model.norm", config.final_norm),
            packer.floats("model.embed_positions.weight", stream.learned_positions), config.num_layers,
            config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size,
            weights.byte_activations, stream.embedding_scale, stream.logit_scale, stream.logit_softcap or 0,
            (ctypes.c_int64 * 3)(*config.rope.sections),
        )  # fmt: skip

    def _pack_each(self, packer: Packer, checkpoint: Checkpoint, progress: Progress) -> list[structs.Layer]:
        return [pack_layer(packer, self.config, self.weights.layers, i) for i in range(self.config.num_layers)]

    def forward(
        self, batch: ForwardBatch, cache: Pages, needs: frozenset[int] = frozenset(), given: GivenRows | None = None
    ) -> ForwardOutput:
        """Run the rows of `batch`, writing their keys and values to `cache`."""
        num_keys = int(batch.num_keys.max())
        num_nodes = num_keys - int(batch.tree_base.min())
        routes = self._room_for_routes(len(batch.tokens)) if ROUTES in needs else None
        needs -= {ROUTES}
        wanted = torch.tensor(sorted(needs), dtype=torch.int64)
        logits = torch.empty(len(batch.logit_rows), self.config.vocab_size)
        features = torch.empty(len(needs), len(batch.tokens), self.config.hidden_size)
        arrays = [getattr(batch, name).contiguous() for name in _ARRAYS]
        tables = self._tables(max(num_keys, 1 + int(batch.positions.max())))  # a draft may leave keys out
        adapted = NO_ADAPTERS if self._adapters is None else self._adapters.of(batch.adapters)
        unpacked = self._scratch.unpacked(num_keys) if cache.packed_as else None
        turns = None if batch.turns is None else batch.turns.contiguous()
        which, embeds = _given(batch)
        words = self._looked_up(batch.tokens) if given is None or given.residual is None else None
        struct = structs.Batch(
            len(batch.tokens), len(batch.tree_base), batch.ancestors.shape[1], batch.block_table.shape[1],
            len(batch.logit_rows), *(array.data_ptr() for array in arrays), ctypes.addressof(tables),
            cache.store.data_ptr(), cache.store.shape[3], cache.page_size, logits.data_ptr(), wanted.data_ptr(),
            len(needs), features.data_ptr(), address(given and given.residual), address(given and given.wide),
            *adapted, cache.packed_as, address(unpacked), 0 if unpacked is None else unpacked.shape[1],
            address(turns), address(which), address(embeds), address(words), address(routes),
        )  # fmt: skip
        scratch = self._scratch.fit(len(batch.tokens), num_keys, num_nodes)
        self._library.dw_forward(ctypes.byref(self._model), ctypes.byref(struct), ctypes.byref(scratch))
        found = dict(zip(sorted(needs), features, strict=True))
        return ForwardOutput(logits, found if routes is None else found | {ROUTES: routes})

    def _room_for_routes(self, rows: int) -> Tensor:
        mixtures = self.config.mixtures
        return torch.empty(rows, len(mixtures), mixtures[0].top_k, dtype=torch.int64)

    def _looked_up(self, tokens: Tensor) -> Tensor | None:
        """The tokens' embeddings, where these are not in memory. [N, hidden]."""
        if self._embedding is None:
            return None
        return self._embedding.numbers(self._library, tokens, self.weights.head)

    def products_alone(self, rows: int) -> None:
        """The matrix products of a forward and nothing else, on whatever numbers there are: a yardstick."""
        scratch = self._scratch.fit(rows, 1, 0)
        logits = torch.empty(rows, self.config.vocab_size)
        self._library.dw_products(ctypes.byref(self._model), ctypes.byref(scratch), rows, logits.data_ptr())

    def _tables(self, length: int) -> ctypes.Array[ctypes.c_void_p]:
        """For each way of turning: cosines, then sines, of all positions below `length` and more."""
        for i, rotary in enumerate(self._rotaries):
            if length > len(self._rotations[i]):
                table = torch.view_as_real(rotary.table(length))
                self._rotations[i] = table.transpose(1, 2).flatten(1).contiguous()
        return (ctypes.c_void_p * len(self._rotations))(*(table.data_ptr() for table in self._rotations))


def _given(batch: ForwardBatch) -> tuple[Tensor | None, Tensor | None]:
    """Which of the given embeddings each row begins with, -1 where it is its token's, and these. [N], [K, hidden]."""
    if batch.embed_rows is None or batch.embeds is None:
        return None, None
    which = torch.full((len(batch.tokens),), -1)
    which[batch.embed_rows] = torch.arange(len(batch.embed_rows))
    return which, batch.embeds.float().contiguous()


def _turnings(config: ModelConfig) -> list[Turning]:
    """The ways in which layers turn queries and keys."""
    found = ((own.rope, own.rotated) for own in (layer.only_attention for layer in config.layer_specs))
    return list(dict.fromkeys((rope, rotated) for rope, rotated in found if rope is not None))


def _rotary(turning: Turning) -> Rotary:
    rope, rotated = turning
    return Rotary(*rope.inverse_frequencies(rotated), torch.float32, torch.device("cpu"))


_ARRAYS = (
    "tokens", "positions", "slots", "visible", "ancestors", "row_offsets", "tree_base", "num_keys", "block_table",
    "logit_rows",
)  # fmt: skip


def _mlp(packer: Packer, name: str, mlp: MlpSpec, storage: Storage | None) -> tuple[structs.Matrix, structs.Matrix]:
    """Gate and up, and down."""
    gates = [f"{name}.gate_proj", f"{name}.up_proj"]
    first = packer.gated(gates, storage, mlp.bias) if mlp.gated else packer.matrix(gates[1:], storage, mlp.bias)
    return first, packer.matrix([f"{name}.down_proj"], storage, mlp.bias)


def _mixture(packer: Packer, name: str, spec: ExpertsSpec, storage: Storage | None) -> structs.Mixture:
    """Router and experts; what weighs rows is never rounded."""
    router = packer.matrix([f"{name}.router"], None, spec.router_bias)
    experts = (structs.Expert * spec.count)(
        *(structs.Expert(*_mlp(packer, f"{name}.experts.{i}", spec.expert, storage)) for i in range(spec.count))
    )
    gate = packer.matrix([f"{name}.shared_gate"], None) if spec.shared else structs.Matrix()
    return structs.Mixture(router, gate, experts, spec.count, spec.top_k, spec.normalised)


def _mlps(
    packer: Packer, name: str, mlp: MlpSpec | ExpertsSpec, storage: Storage | None
) -> tuple[structs.Matrix, structs.Matrix, MlpSpec, Any]:
    """The MLP that every row runs, of what kind it and experts are, and the mixture of these, if they are one."""
    if isinstance(mlp, MlpSpec):
        return *_mlp(packer, name, mlp, storage), mlp, None
    mixture = ctypes.pointer(_mixture(packer, name, mlp, storage))
    if mlp.shared is None:
        return structs.Matrix(), structs.Matrix(), mlp.expert, mixture
    return *_mlp(packer, f"{name}.shared", mlp.shared, storage), mlp.expert, mixture


def pack_layer(packer: Packer, config: ModelConfig, storage: Storage | None, i: int) -> structs.Layer:
    """One layer as the kernels read it."""
    name, spec = f"model.layers.{i}", config.layer_specs[i]
    attention, heads = spec.only_attention, spec.only_attention.head_norm
    own = f"{name}.self_attn"
    gate_up, down, expert, mixture = _mlps(packer, f"{name}.mlp", spec.only_mlp, storage)
    norms = [packer.norm(f"{name}.{norm}", spec.norm if norm in spec.wiring.norms else None) for norm in _LAYER_NORMS]
    return structs.Layer(
        packer.matrix([f"{own}.{part}_proj" for part in "qkv"], storage, attention.qkv_bias),
        packer.matrix([f"{own}.o_proj"], storage, attention.output_bias),
        gate_up, down, *norms,
        *(packer.norm(f"{own}.{part}_norm", heads and heads.norm) for part in "qk"),
        _HEAD_NORMS[heads.over] if heads else 0, bool(heads and heads.after_rope), attention.window or 0,
        _turnings(config).index((attention.rope, attention.rotated)) if attention.rope else -1, attention.rotated,
        expert.gated, ACTIVATIONS[expert.activation], spec.wiring.parallel,
        attention.scale, attention.softcap or 0, spec.residual_scale,
        packer.floats(f"{own}.sinks.weight", attention.sinks), mixture, i,
    )  # fmt: skip


_LAYER_NORMS = (ATTENTION_NORM, ATTENTION_OUTPUT_NORM, MLP_NORM, MLP_OUTPUT_NORM)  # in the struct's order
