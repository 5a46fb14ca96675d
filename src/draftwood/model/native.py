"""The decoder on our own CPU kernels: the same function as `Transformer`, in one call of C a forward.

Every number is summed in an order that does not depend on the other rows of a forward, so a row's logits are the same,
bit for bit, whatever tree, batch or chunk it is computed in.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwood.batch import ForwardBatch, ForwardOutput, GivenRows, Pages
from draftwood.errors import InvalidRequest
from draftwood.machine import zeroed_memory
from draftwood.model.blocks import NUMBERS, Blocks, BlockSource, stay_blocks
from draftwood.model.checkpoint import Checkpoint, RowSource
from draftwood.model.config import ModelConfig
from draftwood.model.folder import StoredRows
from draftwood.model.layers import Rotary
from draftwood.model.lora import Adapter
from draftwood.model.native_lora import NO_ADAPTERS, NativeAdapters
from draftwood.model.native_scratch import Scratch, padded
from draftwood.model.rope import RopeConfig
from draftwood.model.spec import (
    ATTENTION_NORM,
    ATTENTION_OUTPUT_NORM,
    MLP_NORM,
    MLP_OUTPUT_NORM,
    ExpertsSpec,
    HeadNorms,
    NormSpec,
)
from draftwood.model.weights import (
    GROUP,
    Matrix,
    Quantised,
    Storage,
    WeightFormat,
    as_numbers,
    exact_storage,
    join_rows,
    store_as,
)
from draftwood.ops.native import Kernels, structs

ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_pytorch_tanh": 2, "relu": 3, "relu2": 4}
_HEAD_NORMS = {HeadNorms.EACH: 0, HeadNorms.OWN: 1, HeadNorms.WHOLE: 2}
Turning = tuple[RopeConfig, int]  # and how many dimensions of a head it turns
Progress = Callable[[int, int], None]  # matrices packed, of how many


def refuses(config: ModelConfig) -> str | None:
    """What these kernels cannot compute of a model, if there is something."""
    if config.has_experts:
        return "mixtures of experts"
    if any(layer.attention.sinks for layer in config.layers):
        return "attention sinks"
    return None


_ARENA = 32 << 20
_FORGET_AFTER = 8 << 20  # bytes read
_CHUNK = 1024  # rows packed at a time: bounds the memory that quantising needs


class _Arena:
    """Memory for weights, in large pages where the system has them: fewer misses when all of it is read every step."""

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []  # the kernels know addresses only: this keeps them valid
        self.rewind()

    def rewind(self) -> None:
        """Hand the same memory out again: who asks for the same in the same order gets the same addresses."""
        self.num_bytes = 0
        self._again = iter(tuple(self._blocks))
        self._free = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """Some bytes, aligned to a cache line: zeros, or what lay there before the arena was rewound."""
        size = -(-num_bytes // 64) * 64
        if size > len(self._free):
            self._free = self._next_block(size)
        taken, self._free = self._free[:num_bytes], self._free[size:]
        self.num_bytes += num_bytes
        return taken

    def _next_block(self, size: int) -> Tensor:
        known = next(self._again, None)
        if known is not None and len(known) >= size:
            return known
        self._blocks.append(torch.frombuffer(zeroed_memory(max(size, _ARENA), large_pages=True), dtype=torch.uint8))
        return self._blocks[-1]


class _Packer:
    """Turns a checkpoint's tensors into the structs that the kernels read, in the memory of an arena."""

    def __init__(
        self, library: Kernels, checkpoint: Checkpoint, arena: _Arena, progress: Progress, packed: int = 0
    ) -> None:
        self._library = library
        self._checkpoint = checkpoint
        self._arena = arena
        self._progress = progress
        self._packed = packed  # matrices, those of others included
        self._read = 0  # bytes, since the file was forgotten last

    def floats(self, name: str, present: bool = True) -> int | None:
        """A vector in float32, by its address."""
        return self._keep(self._checkpoint.tensor(name).float()) if present else None

    def norm(self, name: str, spec: NormSpec | None) -> structs.Norm:
        """A norm, or none."""
        if spec is None:
            return structs.Norm(None, None, 0, 0.0)
        return structs.Norm(
            self.floats(f"{name}.weight"), self.floats(f"{name}.bias", spec.bias), spec.centred, spec.eps
        )  # fmt: skip

    def matrix(self, names: Sequence[str], storage: Storage | None, bias: bool = False) -> structs.Matrix:
        """Matrices that share their inputs, one below the other; `storage` None keeps them as they are stored."""
        return self._pack(names, storage, bias)

    def gated(self, names: Sequence[str], storage: Storage | None, bias: bool) -> structs.Matrix:
        """Gate and up in turn by half panels, so that one tile of the product has what belongs together."""
        return self._pack(names, storage, bias, structs.PANEL // 2)

    def _pack(
        self, names: Sequence[str], storage: Storage | None, bias: bool, panel: int | None = None
    ) -> structs.Matrix:
        weights = [f"{name}.weight" for name in names]
        source = self._checkpoint
        blocks = [source.blocks(name) if isinstance(source, BlockSource) else None for name in weights]
        if storage is None and stay_blocks(blocks):
            packed = self._in_blocks([part for part in blocks if part is not None], panel)
        elif len(blocks) == 1:
            packed = self._in_panels(self._alone(weights[0], blocks[0]), storage)
        else:
            parts = [self._numbers(name, part) for name, part in zip(weights, blocks, strict=True)]
            packed = self._in_panels(join_rows(parts, panel), storage)
        if bias:
            biases = join_rows([source.tensor(f"{name}.bias").float()[:, None] for name in names], panel)
            packed.bias = self._keep(F.pad(as_numbers(biases)[:, 0], (0, packed.outputs - biases.shape[0])))
        self._heard()
        return packed

    def _alone(self, name: str, blocks: Blocks | None) -> Matrix | Blocks | StoredRows:
        """A matrix of its own, in what can be taken apart by rows."""
        source = self._checkpoint
        rows = source.rows(name) if blocks is None and isinstance(source, RowSource) else None
        return (source.matrix(name) if rows is None else rows) if blocks is None else blocks

    def _numbers(self, name: str, blocks: Blocks | None) -> Matrix:
        """Our kernels decode blocks many times as fast as the checkpoint does."""
        return self._checkpoint.matrix(name) if blocks is None else blocks.matrix(self._library)

    def _in_panels(self, weights: Matrix | Blocks | StoredRows, storage: Storage | None) -> structs.Matrix:
        """`storage` None keeps them in the smallest that loses nothing."""
        if storage is None:
            storage = exact_storage(weights if not isinstance(weights, Blocks) else weights[:1].matrix(self._library))
        packed = self._allocate(storage, padded(weights.shape[0]), padded(weights.shape[1]))
        for start in range(0, weights.shape[0], _CHUNK):
            rows = weights[start : start + _CHUNK]
            rows = rows.matrix(self._library) if isinstance(rows, Blocks) else rows
            self._fill(packed, store_as(storage, rows), start)
            self._has_read(rows.nbytes if isinstance(rows, Tensor) else rows.codes.nbytes)
        return packed

    def _in_blocks(self, parts: Sequence[Blocks], panel: int | None) -> structs.Matrix:
        """Blocks as they are: the kernels get a table of where each output's begin, and in which format they are."""
        addresses, kinds = [], []
        for part in parts:
            rows, used = part.data.shape
            own = self._arena.take(rows * part.stride).view(rows, part.stride).numpy()
            own[:, used:] = 0
            for start in range(0, rows, _CHUNK):
                own[start : start + _CHUNK, :used] = part.data[start : start + _CHUNK]
                self._has_read(_CHUNK * used)
            addresses.append(own.ctypes.data + torch.arange(rows)[:, None] * part.stride)
            kinds.append(torch.full((rows, 1), NUMBERS[part.kind]))
        table = [as_numbers(join_rows(column, panel))[:, 0] for column in (addresses, kinds)]
        table = [F.pad(column, (0, -len(column) % structs.PANEL)) for column in table]
        outputs = len(table[0])
        return structs.Matrix(
            Storage.BLOCKS, outputs, padded(parts[0].inputs), None, None, None, None,
            self._keep(table[0]), self._keep(table[1].to(torch.uint8)),
        )  # fmt: skip

    def _has_read(self, num_bytes: int) -> None:
        """Pages of the file would count as our memory until another process needs it."""
        self._read += num_bytes
        if self._read > _FORGET_AFTER:
            self._read = 0
            self._checkpoint.forget()

    def _heard(self) -> None:
        self._packed += 1
        config = self._checkpoint.config
        self._progress(self._packed, 4 * config.num_layers + (1 if config.tied_head else 2))

    def _allocate(self, storage: Storage, outputs: int, inputs: int) -> structs.Matrix:
        halves = outputs * inputs // GROUP * 2
        scale = self._arena.take(halves).data_ptr() if storage >= Storage.INT8 else None
        minimum = self._arena.take(halves).data_ptr() if storage == Storage.INT4 else None
        words = self._arena.take(outputs * inputs * _BITS[storage] // 8).data_ptr()
        return structs.Matrix(storage, outputs, inputs, words, scale, minimum, None)

    def _fill(self, packed: structs.Matrix, rows: Matrix, start: int) -> None:
        """Pack rows from number `start` on, which begins a panel."""
        panels = -(-rows.shape[0] // structs.PANEL)
        words = packed.words + start * packed.inputs * _BITS[packed.storage] // 8
        if isinstance(rows, Quantised):
            at = start * (packed.inputs // GROUP) * 2
            minimum = None if rows.minimum is None else rows.minimum.contiguous()
            codes, scale = rows.codes.contiguous(), rows.scale.contiguous()
            self._library.dw_pack_codes(
                packed.storage, codes.data_ptr(), scale.data_ptr(), _address(minimum), rows.shape[0], packed.inputs,
                words, packed.scale + at, packed.minimum + at if minimum is not None else None, panels,
            )  # fmt: skip
        else:
            numbers = rows.float().contiguous()
            self._library.dw_pack_floats(
                packed.storage, numbers.data_ptr(), *numbers.shape, packed.inputs, words, panels
            )

    def _keep(self, tensor: Tensor) -> int:
        own = self._arena.take(tensor.nbytes).view(tensor.dtype)
        own.copy_(tensor.flatten())
        return own.data_ptr()


_BITS = {Storage.FLOAT32: 32, Storage.BFLOAT16: 16, Storage.INT8: 8, Storage.INT4: 4}


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class NativeTransformer:
    """Packed weights and the forward over paged keys and values."""

    dtype = torch.float32
    device = torch.device("cpu")
    strict = True

    def __init__(
        self, library: Kernels, checkpoint: Checkpoint, weights: WeightFormat, progress: Progress = lambda *_: None
    ) -> None:
        self.config = config = checkpoint.config
        self.weights = weights
        self.implementation = Path(library._name).stem
        self._library = library
        self._arenas = _Arena(), _Arena()  # of words, and of all else
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

    def first(self, count: int) -> NativeTransformer:
        """Its first layers as a model, in the same memory."""
        part = copy.copy(self)
        part.config, part._model = self.config.first(count), structs.Model.from_buffer_copy(self._model)
        part._model.num_layers = count
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
        packer = _Packer(self._library, checkpoint, self._arenas[0], progress)
        embedding = packer.matrix(["model.embed_tokens"], self.weights.head)
        return embedding, embedding if self.config.tied_head else packer.matrix(["lm_head"], self.weights.head)

    def _pack_layers(self, checkpoint: Checkpoint, progress: Progress = lambda *_: None) -> structs.Model:
        """The whole model: words that are there already, and layers."""
        config, weights = self.config, self.weights
        packer = _Packer(self._library, checkpoint, self._arenas[1], progress, 1 if config.tied_head else 2)
        # The model points to this array, so it must live as long.
        self._layers = (structs.Layer * config.num_layers)(
            *(_layer(packer, config, weights.layers, i) for i in range(config.num_layers))
        )
        stream = config.stream
        return structs.Model(
            *self._words, self._layers, packer.norm("model.norm", config.final_norm),
            packer.floats("model.embed_positions.weight", stream.learned_positions), config.num_layers,
            config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size,
            weights.byte_activations, stream.embedding_scale, stream.logit_scale, stream.logit_softcap or 0,
        )  # fmt: skip

    def forward(
        self, batch: ForwardBatch, cache: Pages, needs: frozenset[int] = frozenset(), given: GivenRows | None = None
    ) -> ForwardOutput:
        """Run the rows of `batch`, writing their keys and values to `cache`."""
        num_keys = int(batch.num_keys.max())
        num_nodes = num_keys - int(batch.tree_base.min())
        wanted = torch.tensor(sorted(needs), dtype=torch.int64)
        logits = torch.empty(len(batch.logit_rows), self.config.vocab_size)
        features = torch.empty(len(needs), len(batch.tokens), self.config.hidden_size)
        arrays = [getattr(batch, name).contiguous() for name in _ARRAYS]
        tables = self._tables(num_keys)
        adapted = NO_ADAPTERS if self._adapters is None else self._adapters.of(batch.adapters)
        unpacked = self._scratch.unpacked(num_keys) if cache.packed_as else None
        struct = structs.Batch(
            len(batch.tokens), len(batch.tree_base), batch.ancestors.shape[1], batch.block_table.shape[1],
            len(batch.logit_rows), *(array.data_ptr() for array in arrays), ctypes.addressof(tables),
            cache.store.data_ptr(), cache.store.shape[3], cache.page_size, logits.data_ptr(), wanted.data_ptr(),
            len(needs), features.data_ptr(), _address(given and given.residual), _address(given and given.wide),
            *adapted, cache.packed_as, _address(unpacked), 0 if unpacked is None else unpacked.shape[1],
        )  # fmt: skip
        scratch = self._scratch.fit(len(batch.tokens), num_keys, num_nodes)
        self._library.dw_forward(ctypes.byref(self._model), ctypes.byref(struct), ctypes.byref(scratch))
        return ForwardOutput(logits, dict(zip(sorted(needs), features, strict=True)))

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


def _turnings(config: ModelConfig) -> list[Turning]:
    """The ways in which layers turn queries and keys."""
    found = ((layer.attention.rope, layer.attention.rotated) for layer in config.layer_specs)
    return list(dict.fromkeys((rope, rotated) for rope, rotated in found if rope is not None))


def _rotary(turning: Turning) -> Rotary:
    rope, rotated = turning
    return Rotary(*rope.inverse_frequencies(rotated), torch.float32, torch.device("cpu"))


_ARRAYS = (
    "tokens", "positions", "slots", "visible", "ancestors", "row_offsets", "tree_base", "num_keys", "block_table",
    "logit_rows",
)  # fmt: skip


def _layer(packer: _Packer, config: ModelConfig, storage: Storage | None, i: int) -> structs.Layer:
    name, spec = f"model.layers.{i}", config.layer_specs[i]
    attention, heads = spec.attention, spec.attention.head_norm
    own, inner = f"{name}.self_attn", f"{name}.mlp"
    if isinstance(spec.mlp, ExpertsSpec):
        raise InvalidRequest("The kernels for a CPU do not run mixtures of experts; torch's operations do.")
    mlp, gates = spec.mlp, [f"{inner}.gate_proj", f"{inner}.up_proj"]
    norms = [packer.norm(f"{name}.{norm}", spec.norm if norm in spec.wiring.norms else None) for norm in _LAYER_NORMS]
    return structs.Layer(
        packer.matrix([f"{own}.{part}_proj" for part in "qkv"], storage, attention.qkv_bias),
        packer.matrix([f"{own}.o_proj"], storage, attention.output_bias),
        packer.gated(gates, storage, mlp.bias) if mlp.gated else packer.matrix(gates[1:], storage, mlp.bias),
        packer.matrix([f"{inner}.down_proj"], storage, mlp.bias),
        *norms,
        *(packer.norm(f"{own}.{part}_norm", heads and heads.norm) for part in "qk"),
        _HEAD_NORMS[heads.over] if heads else 0, bool(heads and heads.after_rope), attention.window or 0,
        _turnings(config).index((attention.rope, attention.rotated)) if attention.rope else -1, attention.rotated,
        mlp.gated, ACTIVATIONS[mlp.activation], spec.wiring.parallel,
        attention.scale, attention.softcap or 0, spec.residual_scale,
    )  # fmt: skip


_LAYER_NORMS = (ATTENTION_NORM, ATTENTION_OUTPUT_NORM, MLP_NORM, MLP_OUTPUT_NORM)  # in the struct's order
