"""What only a single row of a batch sees: its own ancestors in the tree, found once for all layers."""
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwood.batch import ForwardBatch
from draftwood.ops.cuda.attention_kernels import last_at_most, slot_of
from draftwood.ops.cuda.online_softmax import BLOCK
from draftwood.ops.cuda.pdl import OVERLAPPING, wait_for_predecessors

_BLOCK = tl.constexpr(BLOCK)


@dataclass(frozen=True)
class Tails:
    """What only a single row sees: its keys from the last block border below its tree on."""

    slots: Tensor  # [N, T] int32, undefined behind a row's last key
    lengths: Tensor  # [N] int64 keys of a row in all


def tails_of(batch: ForwardBatch, page_size: int, max_depth: int) -> Tails:
    """Tails of rows whose trees are at most `max_depth` deep, without asking the host."""
    num_rows, num_words = batch.ancestors.shape
    width = BLOCK + max_depth
    slots = torch.empty(num_rows, width, dtype=torch.int32, device=batch.tokens.device)
    lengths = torch.empty_like(batch.visible)
    find_tails[(num_rows,)](
        batch.ancestors.contiguous(), batch.row_offsets, batch.visible, batch.tree_base, batch.block_table,
        slots, lengths, batch.tree_base.shape[0], num_words, batch.block_table.stride(0), width, page_size,
        **OVERLAPPING,
    )  # fmt: skip
    return Tails(slots, lengths)


@triton.jit(do_not_specialize=["num_sequences", "num_words", "table_width", "tail_width"])
def find_tails(
    ancestors, offsets, visible, tree_base, table, tails, lengths,
    num_sequences, num_words, table_width, tail_width, PAGE: tl.constexpr,
):  # fmt: skip
    """For one row: how many keys it has, and the slots of those from the last block border below its tree on."""
    wait_for_predecessors()
    row = tl.program_id(0).to(tl.int64)
    seen = tl.load(visible + row)
    sequence = last_at_most(offsets, num_sequences, row, 1, 0)
    pages = table + sequence.to(tl.int64) * table_width
    base = tl.load(tree_base + sequence)
    begin = seen // _BLOCK * _BLOCK
    own = tails + row * tail_width
    i = tl.arange(0, _BLOCK).to(tl.int64)
    linear = begin + i < seen
    tl.store(own + i, slot_of(pages, begin + i, linear, PAGE).to(tl.int32), mask=linear)
    count = seen - begin
    for word in range(num_words):
        bit = (tl.load(ancestors + row * num_words + word) >> i) & 1
        place = count + tl.cumsum(bit, 0) - 1
        there = (bit == 1) & (place < tail_width)
        tl.store(own + place, slot_of(pages, base + word * 64 + i, there, PAGE).to(tl.int32), mask=there)
        count += tl.sum(bit, 0)
    tl.store(lengths + row, begin + tl.minimum(count, tail_width))
