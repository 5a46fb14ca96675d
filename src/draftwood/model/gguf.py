"""GGUF files: a quick header reader, tensors as views of the memory-mapped file.

The `gguf` package parses each metadata element into its own NumPy view, which takes seconds for a vocabulary;
here the header is plain `struct` over one buffer. Block formats are still that package's business: we
dequantise through it, except for the few formats where the same arithmetic is worth doing on whole tensors.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import CheckpointError
from .weights import Quantised, Storage

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies: `data` views the file as bytes, [rows..., bytes of a row]."""

    name: str
    shape: tuple[int, ...]  # torch order: slowest dimension first
    type: str  # GGML's name, such as "Q4_1"
    data: np.ndarray  # uint8

    def entry(self, index: int) -> GgufTensor:
        """One entry of the first dimension."""
        if not self.shape or index >= self.shape[0]:
            raise CheckpointError(f"Tensor {self.name} has shape {self.shape}, without an entry {index}.")
        return GgufTensor(self.name, self.shape[1:], self.type, self.data[index])


@dataclass(frozen=True, slots=True)
class GgufFile:
    """An open GGUF file. Nothing of a tensor is read before `dequantize` asks for it."""

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, GgufTensor]
    mapped: tuple[mmap.mmap, ...]  # its parts, nearly always one

    def dequantize(self, tensor: GgufTensor) -> np.ndarray:
        """A tensor's values in float32, as a new array that does not keep the file open."""
        quick = _QUICK.get(tensor.type)
        values = quick(tensor.data) if quick else _by_gguf_package(tensor, self.path)
        return np.ascontiguousarray(values.reshape(tensor.shape), dtype=np.float32)

    def place(self, tensor: GgufTensor) -> tuple[int, int]:
        """Which part a tensor lies in, and where it begins there."""
        address = tensor.data.ctypes.data
        begins = [np.frombuffer(part, dtype=np.uint8).ctypes.data for part in self.mapped]
        ends = [begin + len(part) for begin, part in zip(begins, self.mapped, strict=True)]
        part = next(i for i, (begin, end) in enumerate(zip(begins, ends, strict=True)) if begin <= address < end)
        return part, address - begins[part]

    def forget_lists(self) -> None:
        """Drop the lists among the metadata: a vocabulary as Python's objects is larger than the tokenizer."""
        for key in [key for key, value in self.fields.items() if isinstance(value, list)]:
            del self.fields[key]

    def forget(self) -> None:
        """Let the system have the memory of everything read so far; what is asked for again is read again."""
        for buffer in self.mapped:
            if hasattr(buffer, "madvise"):
                buffer.madvise(mmap.MADV_DONTNEED)


def read_gguf(path: str | Path) -> GgufFile:
    """Read the header and map the tensors; anything out of place is a `CheckpointError` that says what."""
    path = Path(path)
    buffer = _map(path)
    cursor = _Cursor(path, buffer)
    num_tensors, num_fields = _preamble(cursor)
    fields = {cursor.string(): cursor.value(cursor.scalar("I")) for _ in range(num_fields)}
    places = [_tensor_place(cursor) for _ in range(num_tensors)]
    alignment = fields.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise _broken(path, f"it states an alignment of {alignment!r}")
    start = -(-cursor.position // alignment) * alignment
    everything = np.frombuffer(buffer, dtype=np.uint8)
    tensors = {place.name: _view(path, everything, start, place) for place in places}
    return GgufFile(path, fields, tensors, (buffer,))


def _broken(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is not a readable GGUF file: {reason}. If it was downloaded, download it again; "
        "if you converted it, convert it again with a current converter."
    )


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise _broken(path, "it is empty") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened: {error.strerror or error}.") from error


class _Cursor:
    """A position in the header; every read is checked against the end of the file first."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self.path = path
        self.buffer = buffer
        self.position = 0
        self.size = len(buffer)

    def advance(self, num_bytes: int) -> int:
        start = self.position
        if num_bytes > self.size - start:
            raise _broken(self.path, f"it ends in its header, after {self.size:,} bytes: it is truncated")
        self.position = start + num_bytes
        return start

    def scalar(self, code: str) -> Any:
        code = "<" + code
        return struct.unpack_from(code, self.buffer, self.advance(struct.calcsize(code)))[0]

    def string(self) -> str:
        num_bytes = self.scalar("Q")
        start = self.advance(num_bytes)
        return self.buffer[start : start + num_bytes].decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(self.scalar("I"), self.scalar("Q"))
        if kind not in _SCALARS:
            raise _broken(self.path, f"a metadata value has the unknown type {kind}")
        return self.scalar(_SCALARS[kind])

    def _array(self, kind: int, count: int) -> list[Any]:
        if kind == _STRING:
            return self._strings(count)
        if kind in _SCALARS:
            code = _SCALARS[kind]
            start = self.advance(count * struct.calcsize("<" + code))
            return list(struct.unpack_from(f"<{count}{code}", self.buffer, start))
        raise _broken(self.path, f"a metadata array has elements of the unknown type {kind}")

    def _strings(self, count: int) -> list[str]:
        # A vocabulary is 10^5 strings: this loop is most of the time of reading a header.
        buffer, position, size = self.buffer, self.position, self.size
        length = struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(count):
            start = position + 8
            if start > size:
                break
            position = start + length(buffer, position)[0]
            if position > size:
                break
            strings.append(buffer[start:position].decode("utf-8", "replace"))
        if len(strings) != count:
            raise _broken(self.path, f"it ends in its header, after {size:,} bytes: it is truncated")
        self.position = position
        return strings


@dataclass(frozen=True, slots=True)
class _Place:
    name: str
    shape: tuple[int, ...]
    type: int
    offset: int


def _preamble(cursor: _Cursor) -> tuple[int, int]:
    start = cursor.advance(4)
    if cursor.buffer[start : start + 4] != MAGIC:
        raise _broken(cursor.path, "it does not start with the letters GGUF")
    version = cursor.scalar("I")
    if version not in VERSIONS:
        kind = "a big-endian file" if version & 0xFFFF == 0 else f"version {version}"
        raise _broken(cursor.path, f"it is {kind}; little-endian versions 2 and 3 are supported")
    return cursor.scalar("Q"), cursor.scalar("Q")


def _tensor_place(cursor: _Cursor) -> _Place:
    name = cursor.string()
    num_dimensions = cursor.scalar("I")
    if num_dimensions > _MAX_DIMENSIONS:
        raise _broken(cursor.path, f"tensor {name} has {num_dimensions} dimensions")
    dimensions = tuple(cursor.scalar("Q") for _ in range(num_dimensions))
    return _Place(name, dimensions[::-1], cursor.scalar("I"), cursor.scalar("Q"))


def _view(path: Path, everything: np.ndarray, start: int, place: _Place) -> GgufTensor:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        kind = GGMLQuantizationType(place.type)
        block_size, block_bytes = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        raise CheckpointError(
            f"Tensor {place.name} in {path} has type {place.type}, unknown to the installed `gguf` package; "
            "upgrade it (pip install -U gguf) or use a file in a common type such as Q8_0."
        ) from None
    width = place.shape[-1] if place.shape else 1
    if width % block_size:
        raise _broken(path, f"rows of {place.name} have {width} values, no multiple of {block_size}")
    row_bytes = width // block_size * block_bytes
    shape = (*place.shape[:-1], row_bytes)
    begin = start + place.offset
    end = begin + _product(shape)
    if end > everything.size:
        raise _broken(
            path,
            f"{place.name} should end at byte {end:,} and the file has {everything.size:,}: it is truncated",
        )
    return GgufTensor(place.name, place.shape, kind.name, everything[begin:end].reshape(shape))


def row_bytes(kind: str, width: int) -> int:
    """Bytes of a row of so many values in a type of GGML."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    size, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return width // size * num_bytes


def _product(shape: tuple[int, ...]) -> int:
    product = 1  # in Python integers: a hostile header must not overflow the bounds check
    for size in shape:
        product *= size
    return product


def _by_gguf_package(tensor: GgufTensor, path: Path) -> np.ndarray:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        return dequantize(tensor.data, GGMLQuantizationType[tensor.type])
    except NotImplementedError:
        raise CheckpointError(
            f"Tensor {tensor.name} in {path} has type {tensor.type}, which cannot be dequantised; "
            "use a file in a type such as Q8_0, Q4_K or F16."
        ) from None


def _f32(data: np.ndarray) -> np.ndarray:
    return data.copy().view("<f4")


def _f16(data: np.ndarray) -> np.ndarray:
    return data.copy().view("<f2").astype(np.float32)


def _bf16(data: np.ndarray) -> np.ndarray:
    # bfloat16 is the upper half of a float32.
    return (data.copy().view("<u2").astype(np.uint32) << 16).view(np.float32)


def _halves(blocks: np.ndarray, first: int) -> np.ndarray:
    """The float16 at byte `first` of each block, as a float32 column."""
    return blocks[:, first : first + 2].copy().view("<f2").astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """[blocks, 16] bytes to [blocks, 32] float32 of 0..15: low nibbles first, then high ones."""
    values = np.empty((len(packed), 32), dtype=np.float32)
    np.copyto(values[:, :16], packed & 15)
    np.copyto(values[:, 16:], packed >> 4)
    return values


def _q4_0(data: np.ndarray) -> np.ndarray:
    blocks = data.reshape(-1, 18)
    values = _nibbles(blocks[:, 2:])
    values -= 8
    values *= _halves(blocks, 0)
    return values


def _q4_1(data: np.ndarray) -> np.ndarray:
    blocks = data.reshape(-1, 20)
    values = _nibbles(blocks[:, 4:])
    values *= _halves(blocks, 0)
    values += _halves(blocks, 2)
    return values


def _q8_0(data: np.ndarray) -> np.ndarray:
    blocks = data.reshape(-1, 34)
    values = blocks[:, 2:].view(np.int8).astype(np.float32)
    values *= _halves(blocks, 0)
    return values


# Bit for bit what the `gguf` package computes (a test holds them together), several times as fast.
_QUICK: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
}


def read_groups(tensor: GgufTensor) -> Quantised | None:
    """The tensor's own codes and scales, where its blocks are groups of ours: Q8_0, Q4_0 and Q4_1."""
    reader = _GROUPS.get(tensor.type)
    if reader is None or len(tensor.shape) != 2:
        return None
    storage, codes, scale, minimum = reader(tensor.data)
    rows = tensor.shape[0]
    return Quantised(
        storage,
        torch.from_numpy(codes.reshape(rows, -1)),
        torch.from_numpy(scale.reshape(rows, -1)),
        None if minimum is None else torch.from_numpy(minimum.reshape(rows, -1)),
    )


_Groups = tuple[Storage, np.ndarray, np.ndarray, np.ndarray | None]


def _half_column(blocks: np.ndarray, first: int) -> np.ndarray:
    return blocks[:, first : first + 2].copy().view(np.float16)[:, 0]


def _nibble_codes(packed: np.ndarray) -> np.ndarray:
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _q8_0_groups(data: np.ndarray) -> _Groups:
    blocks = data.reshape(-1, 34)
    return Storage.INT8, blocks[:, 2:] ^ 128, _half_column(blocks, 0), None  # two's complement to 128 too high


def _q4_0_groups(data: np.ndarray) -> _Groups:
    blocks = data.reshape(-1, 18)
    scale = _half_column(blocks, 0)
    return Storage.INT4, _nibble_codes(blocks[:, 2:]), scale, scale * np.float16(-8)  # exact: a power of two


def _q4_1_groups(data: np.ndarray) -> _Groups:
    blocks = data.reshape(-1, 20)
    return Storage.INT4, _nibble_codes(blocks[:, 4:]), _half_column(blocks, 0), _half_column(blocks, 2)


_GROUPS: dict[str, Callable[[np.ndarray], _Groups]] = {
    "Q8_0": _q8_0_groups,
    "Q4_0": _q4_0_groups,
    "Q4_1": _q4_1_groups,
}


def embedding_rows(file: GgufFile) -> int | None:
    """Tokens of the vocabulary, by the embedding's shape."""
    embedding = file.tensors.get("token_embd.weight")
    return embedding.shape[0] if embedding else None
