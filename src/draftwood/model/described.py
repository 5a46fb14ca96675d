"""What a model's files hold and what they will need, from their headers alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .blocks import NUMBERS
from .folder import open_safetensors
from .gguf import read_gguf

_EXPANDED = 4  # bytes of a weight that is dequantised
# How much larger quantised safetensors lie in our blocks: each 32 weights with their own scale.
_BLOCKS = {"I32": 19 / 16, "I8": 36 / 32, "F8_E4M3": 36 / 32, "U8": 20 / 16}
_SAYS = {
    "U8": "4-bit codes in bytes",
    "I32": "whole numbers in 32-bit words",
    "I8": "8-bit whole numbers",
    "F8_E4M3": "8-bit floats (e4m3)",
}


@dataclass(frozen=True)
class Held:
    """The matrices of one type."""

    type: str
    matrices: int
    stored: int  # bytes in the files
    loaded: int  # bytes in memory, on a CPU as `stored`
    expanded: bool = False


def held_formats(files: Sequence[Path]) -> list[Held]:
    """By type, largest first."""
    found: dict[str, Held] = {}
    for file in files:
        for held in _of_gguf(file) if file.suffix == ".gguf" else _of_safetensors(file):
            before = found.get(held.type, Held(held.type, 0, 0, 0))
            found[held.type] = Held(
                held.type, before.matrices + held.matrices, before.stored + held.stored, before.loaded + held.loaded,
                held.expanded,
            )  # fmt: skip
    return sorted(found.values(), key=lambda held: -held.stored)


def _of_gguf(file: Path) -> Iterator[Held]:
    for tensor in read_gguf(file).tensors.values():
        matrix, kept = len(tensor.shape) > 1, tensor.type in NUMBERS
        weights = 1
        for size in tensor.shape:
            weights *= size
        loaded = tensor.data.nbytes if matrix and kept else _EXPANDED * weights
        yield Held(tensor.type, int(matrix), tensor.data.nbytes, loaded, matrix and not kept)


def _of_safetensors(file: Path) -> Iterator[Held]:
    opened = open_safetensors(file)
    for name in opened.keys():  # noqa: SIM118
        part = opened.get_slice(name)
        shape, kind = part.get_shape(), str(part.get_dtype())
        size = _SIZES.get(kind, 1)
        for length in shape:
            size *= length
        matrix = len(shape) > 1 and name.endswith((".weight", ".qweight", ".weight_packed"))
        yield Held(_SAYS.get(kind, kind), int(matrix), size, int(size * (_BLOCKS.get(kind, 1) if matrix else 1)))


_SIZES = {"F64": 8, "F32": 4, "I32": 4, "U32": 4, "I64": 8, "U64": 8, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
