"""A matrix that stays in its file: an embedding is looked up token by token, so it need not lie in memory.

Rows are read by the system and not through a mapping: a file that is cut while it is in use is an error then, and not
the end of the process, and pages of the file do not count as ours.
"""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from draftwood.errors import CheckpointError
from draftwood.model.blocks import NUMBERS, Blocks
from draftwood.model.gguf import row_bytes
from draftwood.model.weights import Storage, as_numbers, store_as
from draftwood.ops.native import Kernels

if TYPE_CHECKING:
    from draftwood.model.checkpoint import Checkpoint


class RowFile:
    """Rows of a matrix, read whenever they are asked for."""

    def __init__(self, path: Path, offset: int, kind: str, shape: tuple[int, int]) -> None:
        self._path, self._offset, self._kind = path, offset, kind
        self._inputs, self._stride = shape[1], row_bytes(kind, shape[1])
        self.num_bytes = shape[0] * self._stride
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        self._state = self._seen()

    def numbers(self, library: Kernels, rows: Tensor, storage: Storage | None) -> Tensor:
        """Rows in float32, rounded as `storage` rounds them; None: as they are stored. [N, inputs]."""
        data = [os.pread(self._file, self._stride, self._offset + row * self._stride) for row in rows.tolist()]
        if any(len(row) != self._stride for row in data) or self._seen() != self._state:
            raise CheckpointError(
                f"{self._path} has been changed while the model ran, which reads its embedding there; load it again."
            )
        found = np.frombuffer(bytearray().join(data), dtype=np.uint8).reshape(len(data), self._stride)
        blocks = Blocks(self._kind, found, self._inputs)
        if storage is None:
            return blocks.numbers(library).contiguous()
        return as_numbers(store_as(storage, blocks.matrix(library)))[:, : self._inputs].float().contiguous()

    def _seen(self) -> tuple[int, int]:
        state = os.fstat(self._file)
        return state.st_size, state.st_mtime_ns


@runtime_checkable
class RowFileSource(Protocol):
    """A checkpoint whose matrices can stay in their files."""

    def row_file(self, name: str) -> RowFile | None:
        """The matrix of this Hugging Face name, None where its rows are not rows of a file."""
        ...


def embedding_file(checkpoint: Checkpoint) -> RowFile | None:
    """The token embedding, where it stays in its file: one that is the head, too, is read in every step."""
    if checkpoint.config.tied_head or not isinstance(checkpoint, RowFileSource):
        return None
    return checkpoint.row_file("model.embed_tokens.weight")


def row_file(path: Path, offset: int, kind: str | None, shape: tuple[int, ...]) -> RowFile | None:
    """The matrix at a place in a file, None where the kernels do not decode its type or the system cannot read so."""
    if kind is None or kind not in NUMBERS or not hasattr(os, "pread"):
        return None
    return RowFile(path, offset, kind, (shape[0], shape[1]))
