"""Weights in the layout that our CPU kernels multiply: packed by panels, or blocks as a file has them, in one arena."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwood.machine import zeroed_memory
from draftwood.model.blocks import NUMBERS, Blocks, BlockSource, stay_blocks
from draftwood.model.checkpoint import Checkpoint
from draftwood.model.folder import RowSource, StoredRows
from draftwood.model.spec import ExpertsSpec, MlpSpec, NormSpec
from draftwood.model.weights import (
    GROUP,
    Matrix,
    Quantised,
    Storage,
    as_numbers,
    exact_storage,
    join_rows,
    store_as,
)
from draftwood.ops.native import Kernels, structs

Progress = Callable[[int, int], None]  # matrices packed, of how many
_ARENA = 32 << 20
_FORGET_AFTER = 8 << 20  # bytes read
_CHUNK = 1 << 18  # weights packed at a time: bounds the memory that quantising needs


Memory = Callable[[int], mmap.mmap]
Part = Matrix | Blocks | StoredRows


def large_pages(num_bytes: int) -> mmap.mmap:
    """Memory in large pages."""
    return zeroed_memory(num_bytes, large_pages=True)


class Arena:
    """Memory for weights, in large pages where the system has them: fewer misses when all of it is read every step."""

    def __init__(self, memory: Memory = large_pages, smallest: int = _ARENA) -> None:
        self._memory, self._smallest = memory, smallest
        self._blocks: list[Tensor] = []  # the kernels know addresses only: this keeps them valid
        self._mapped: list[mmap.mmap] = []
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
        self._mapped.append(self._memory(max(size, self._smallest)))
        self._blocks.append(torch.frombuffer(self._mapped[-1], dtype=torch.uint8))
        return self._blocks[-1]

    def will_need(self) -> None:
        """Have the system read what is not in memory, without waiting for it."""
        if hasattr(mmap, "MADV_WILLNEED"):
            for mapped in self._mapped:
                mapped.madvise(mmap.MADV_WILLNEED)


class Packer:
    """Turns a checkpoint's tensors into the structs that the kernels read, in the memory of an arena."""

    def __init__(
        self, library: Kernels, checkpoint: Checkpoint, arena: Arena, progress: Progress, packed: int = 0
    ) -> None:
        self._library = library
        self._checkpoint = checkpoint
        self._arena = arena
        self._progress = progress
        self.packed = packed  # matrices, those of others included
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

    def dense(self, weight: Tensor, bias: Tensor | None) -> structs.Matrix:
        """A matrix that is there already, in the smallest of floats that loses nothing."""
        packed = self._in_panels([weight], None, None)
        if bias is not None:
            packed.bias = self._keep(F.pad(bias.float(), (0, packed.outputs - len(bias))))
        return packed

    def _pack(
        self, names: Sequence[str], storage: Storage | None, bias: bool, panel: int | None = None
    ) -> structs.Matrix:
        weights = [f"{name}.weight" for name in names]
        source = self._checkpoint
        blocks = [source.blocks(name) if isinstance(source, BlockSource) else None for name in weights]
        if storage is None and stay_blocks(blocks):
            packed = self._in_blocks([part for part in blocks if part is not None], panel)
        else:
            parts = [self._part(name, part) for name, part in zip(weights, blocks, strict=True)]
            packed = self._in_panels(parts, storage, panel)
        if bias:
            biases = join_rows([source.tensor(f"{name}.bias").float()[:, None] for name in names], panel)
            packed.bias = self._keep(F.pad(as_numbers(biases)[:, 0], (0, packed.outputs - biases.shape[0])))
        self._heard()
        return packed

    def _part(self, name: str, blocks: Blocks | None) -> Part:
        """A matrix in what can be taken apart by rows."""
        source = self._checkpoint
        rows = source.rows(name) if blocks is None and isinstance(source, RowSource) else None
        return blocks or rows or source.matrix(name)

    def _numbers(self, rows: Matrix | Blocks) -> Matrix:
        """Our kernels decode blocks many times as fast as the checkpoint does."""
        return rows.matrix(self._library) if isinstance(rows, Blocks) else rows

    def _in_panels(self, parts: Sequence[Part], storage: Storage | None, panel: int | None) -> structs.Matrix:
        """`storage` None keeps them in the smallest that loses nothing."""
        if storage is None:
            exact = {exact_storage(self._numbers(p[:1]) if isinstance(p, Blocks) else p) for p in parts}
            storage = exact.pop() if len(exact) == 1 else Storage.FLOAT32
        turn = panel or 1
        outputs = sum(-(-part.shape[0] // turn) * turn for part in parts)
        packed = self._allocate(storage, padded(outputs), padded(parts[0].shape[1]))
        count = max(GROUP, _CHUNK // parts[0].shape[1] // GROUP * GROUP)
        for start in range(0, outputs, count):
            cut = [self._numbers(part) for part in _cut(parts, start, count, panel)]
            self._fill(packed, join_rows([store_as(storage, part) for part in cut], panel), start)
            self._has_read(sum(part.nbytes if isinstance(part, Tensor) else part.codes.nbytes for part in cut))
        return packed

    def _in_blocks(self, parts: Sequence[Blocks], panel: int | None) -> structs.Matrix:
        """Blocks as they are: the kernels get a table of where each output's begin, and in which format they are."""
        addresses, kinds = [], []
        for part in parts:
            rows, used = part.data.shape
            own = self._arena.take(rows * part.stride).view(rows, part.stride).numpy()
            own[:, used:] = 0
            count = -(-_CHUNK // used)
            for start in range(0, rows, count):
                own[start : start + count, :used] = part.data[start : start + count]
                self._has_read(count * used)
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
        self.packed += 1
        config = self._checkpoint.config
        in_layers = sum(2 + _matrices(layer.only_mlp) for layer in config.layer_specs)
        self._progress(self.packed, in_layers + (1 if config.tied_head else 2))

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
                packed.storage, codes.data_ptr(), scale.data_ptr(), address(minimum), rows.shape[0], packed.inputs,
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


def _cut(parts: Sequence[Part], start: int, count: int, panel: int | None) -> Iterator[Matrix | Blocks]:
    """What `count` rows of matrices joined are of each; with `panel`, they take turns."""
    if panel is not None:
        yield from (part[start // len(parts) : (start + count) // len(parts)] for part in parts)
        return
    for part in parts:
        rows = slice(max(0, start), start + count)
        if rows.start < part.shape[0] and rows.stop > 0:
            yield part[rows]
        start -= part.shape[0]


def _matrices(mlp: MlpSpec | ExpertsSpec) -> int:
    """Packed ones."""
    if not isinstance(mlp, ExpertsSpec):
        return 2
    return 1 + 2 * mlp.count + (0 if mlp.shared is None else 3)


_BITS = {Storage.FLOAT32: 32, Storage.BFLOAT16: 16, Storage.INT8: 8, Storage.INT4: 4}


def padded(size: int) -> int:
    """Inputs or outputs as kernels want them: multiples of 32."""
    return -(-size // GROUP) * GROUP


def address(tensor: Tensor | None) -> int | None:
    """Where a tensor's numbers lie."""
    return None if tensor is None else tensor.data_ptr()
