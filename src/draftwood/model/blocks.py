"""Matrices in the block formats of GGUF files, byte for byte as they are stored.

Our kernels decode a block each time they multiply by it (ops/native/decode.c), so a model takes no more memory than its
file. A decoded weight is the float32 that the format defines.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from draftwood.model.gguf import GgufTensor, read_groups
from draftwood.model.weights import GROUP, Matrix
from draftwood.ops.native import Kernels

log = logging.getLogger(__name__)

NUMBERS: Mapping[str, int] = {  # of what the kernels multiply as it is stored; see ops/native/blocks.h
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11, "Q4_K": 12,
    "Q5_K": 13, "Q6_K": 14, "IQ4_NL": 20, "IQ4_XS": 23, "BF16": 30, "MXFP4": 39,
    # Ours, for quantised safetensors (model/quantised.py):
    "INT4_F16": 64, "INT4_BF16": 65, "INT8": 66, "FP8": 67, "NF4": 68, "FP4": 69,
}  # fmt: skip
PANELS = ("F32", "BF16", "Q8_0", "Q4_0", "Q4_1")  # have a storage of ours that is as small and as exact
_PLAIN = {"F32": 4, "F16": 2, "BF16": 2}  # bytes of a number: their rows may end within a block


@dataclass(frozen=True)
class Blocks:
    """A matrix as a GGUF file has it."""

    kind: str  # GGML's name, such as "Q4_K"
    data: np.ndarray  # [out, bytes of a row] uint8, perhaps a view of the file
    inputs: int

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return len(self.data), self.inputs

    @property
    def stride(self) -> int:
        """Bytes of a row that is filled up with zero weights to a multiple of 32."""
        missing = -self.inputs % GROUP
        return self.data.shape[1] + missing * _PLAIN[self.kind] if missing else self.data.shape[1]

    def __getitem__(self, rows: slice | Tensor) -> Blocks:
        return Blocks(self.kind, self.data[rows.numpy() if isinstance(rows, Tensor) else rows], self.inputs)

    def numbers(self, library: Kernels) -> Tensor:
        """All of it decoded: float32 [out, in]."""
        if self.inputs % GROUP:
            padded = np.zeros((len(self.data), self.stride), dtype=np.uint8)
            padded[:, : self.data.shape[1]] = self.data
            return Blocks(self.kind, padded, self.inputs + -self.inputs % GROUP).numbers(library)[:, : self.inputs]
        rows = np.ascontiguousarray(self.data)
        out = torch.empty(len(rows), self.inputs)
        library.dw_decode_rows(NUMBERS[self.kind], rows.ctypes.data, rows.shape[1], *out.shape, out.data_ptr())
        return out

    def matrix(self, library: Kernels) -> Matrix:
        """In groups of whole numbers if the blocks are such groups, else decoded."""
        groups = read_groups(GgufTensor("", self.shape, self.kind, self.data))
        return self.numbers(library) if groups is None else groups


@runtime_checkable
class BlockSource(Protocol):
    """A checkpoint that can hand matrices out as blocks."""

    def blocks(self, name: str) -> Blocks | None:
        """The matrix of this Hugging Face name, None where it is in nothing that the kernels multiply."""
        ...


def stay_blocks(parts: Iterable[Blocks | None]) -> bool:
    """Whether matrices that share their inputs are multiplied from their blocks: not where panels are as small."""
    kinds = {None if part is None else part.kind for part in parts}
    return None not in kinds and not (len(kinds) == 1 and kinds.issubset(PANELS))


def warn_of_expanded(name: str, tensors: Iterable[GgufTensor]) -> None:
    """Say once what of a file will take more memory than the file has for it."""
    found = Counter(t.type for t in tensors if len(t.shape) > 1 and t.type not in NUMBERS)
    if found:
        kinds = ", ".join(f"{count} in {kind}" for kind, count in found.most_common())
        log.warning(
            "%s has matrices in types that are not multiplied as they are stored (%s): they are dequantised, and take "
            "four bytes a weight. A file in Q4_K_M, IQ4_XS or Q8_0 needs less memory.", name, kinds,
        )  # fmt: skip
