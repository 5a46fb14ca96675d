"""Static buffers from which captured graphs prefill: a few pieces of prompts of any lengths, in a fixed shape."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftwood.batch import ForwardBatch

SEQUENCES = 16  # of which a buffer may hold pieces


@dataclass(frozen=True)
class _Parts:
    """A buffer as tensors of R rows and S sequences: those of the pieces, and one for padding rows."""

    tokens: Tensor  # [R]
    positions: Tensor  # [R]
    slots: Tensor  # [R]
    visible: Tensor  # [R]
    offsets: Tensor  # [S + 1]
    ends: Tensor  # [S]
    states: Tensor  # [S]
    table: Tensor  # [S, P]

    @classmethod
    def of(cls, packed: Tensor, rows: int, pages: int) -> _Parts:
        """Views of it."""
        sequences = SEQUENCES + 1
        sizes = [rows] * 4 + [sequences + 1, sequences, sequences, sequences * pages]
        tokens, positions, slots, visible, offsets, ends, states, table = packed.split(sizes)
        return cls(tokens, positions, slots, visible, offsets, ends, states, table.view(sequences, pages))

    @staticmethod
    def size(rows: int, pages: int) -> int:
        """Numbers that a buffer needs."""
        return 4 * rows + 1 + (SEQUENCES + 1) * (3 + pages)


class PrefillBuffer:
    """Room for `rows` rows of sequences with at most `pages` pages; padding rows write to the scratch page."""

    def __init__(
        self,
        rows: int,
        pages: int,
        page_size: int,
        scratch_page: int,
        device: torch.device,
        scratch_state: int | None = None,
    ) -> None:
        self.rows, self.pages, self._keeps_states = rows, pages, scratch_state is not None
        self._empty = torch.zeros(_Parts.size(rows, pages), dtype=torch.int64)
        parts = _Parts.of(self._empty, rows, pages)
        parts.slots[:], parts.table[:] = scratch_page * page_size, scratch_page
        parts.visible[:] = parts.ends[:] = 1
        parts.offsets[-1] = rows
        parts.states[:] = scratch_state or 0
        self._packed = self._empty.to(device, copy=True)
        self._no_ancestors = torch.zeros(rows, 1, dtype=torch.int64, device=device)
        self._nowhere = torch.empty(0, dtype=torch.int64, device=device)

    def clear(self) -> None:
        """Only padding rows: the pages of the last pieces may belong to other sequences by now."""
        self._packed.copy_(self._empty)

    def fill(self, text: ForwardBatch) -> None:
        """Upload rows that were staged on the host, without waiting."""
        packed = self._empty.clone()
        parts = _Parts.of(packed, self.rows, self.pages)
        count, number, width = len(text.tokens), *text.block_table.shape
        for name in ("tokens", "positions", "slots", "visible"):
            getattr(parts, name)[:count] = getattr(text, name)
        parts.offsets[: number + 1], parts.offsets[number + 1 : -1] = text.row_offsets, count
        parts.ends[:number] = text.num_keys
        if text.states is not None:
            parts.states[:number] = text.states
        own = text.block_table >= 0
        parts.table[:number, :width][own] = text.block_table[own]
        self._packed.copy_(packed.pin_memory() if self._packed.is_cuda else packed, non_blocking=True)

    @property
    def batch(self) -> ForwardBatch:
        """The buffer as a batch without logits."""
        parts = _Parts.of(self._packed, self.rows, self.pages)
        return ForwardBatch(
            tokens=parts.tokens,
            positions=parts.positions,
            slots=parts.slots,
            visible=parts.visible,
            ancestors=self._no_ancestors,
            row_offsets=parts.offsets,
            tree_base=parts.ends,
            num_keys=parts.ends,
            block_table=parts.table,
            logit_rows=self._nowhere,
            max_rows=self.rows,
            linear=True,
            states=parts.states if self._keeps_states else None,
            is_text=True,
        )
