"""Keep the accepted path of each tree in the cache, without asking the host what was accepted."""
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

STEPS = 16  # of a path, moved together


@triton.jit(do_not_specialize=["num_steps", "table_width", "num_slots"])
def _keep_path(
    store, table, base, index, length, num_steps, table_width, num_slots,
    PAGE: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Move one sequence's path in one matrix [slots, DIM] of the store.

    A node's number is never below its depth and rises with it, so what is read here was not written by a step before;
    but a later step may write where an earlier one reads: within STEPS, all read before any writes.
    """
    sequence = tl.program_id(0).to(tl.int64)
    matrix = store + tl.program_id(1).to(tl.int64) * num_slots * DIM
    pages, start = table + sequence * table_width, tl.load(base + sequence)
    last = tl.minimum(tl.load(length + sequence), num_steps - 1)
    d = tl.arange(0, DIM_PADDED)[None, :]
    for begin in range(1, last + 1, STEPS):
        step = begin + tl.arange(0, STEPS)
        node = tl.load(index + sequence * num_steps + step, mask=step <= last, other=0)
        moves = (step <= last) & (node > step)
        source, target = start + node - 1, start + step - 1
        # A node that found no page lies on the last one of the table; see `ops/staging.py`.
        from_page = tl.load(pages + tl.minimum(source // PAGE, table_width - 1), mask=moves, other=0)
        to_page = tl.load(pages + tl.minimum(target // PAGE, table_width - 1), mask=moves, other=0)
        from_slot, to_slot = from_page * PAGE + source % PAGE, to_page * PAGE + target % PAGE
        mask = moves[:, None] & (d < DIM)
        moved = tl.load(matrix + from_slot[:, None] * DIM + d, mask=mask, other=0.0)
        tl.debug_barrier()
        tl.store(matrix + to_slot[:, None] * DIM + d, moved, mask=mask)


def keep_path(
    store: Tensor,  # [L, 2, K, slots, D], changed in place
    block_table: Tensor,  # [B, P] int64
    base: Tensor,  # [B] int64 index of the first staged key
    index: Tensor,  # [B, depth + 1] int64 nodes of the path, root first, numbered inside their own trees
    length: Tensor,  # [B] int64 how many count, the root aside
    page_size: int,
) -> None:
    """Move staged nodes `index` right behind `base`, in all layers: `KVCache.keep` on the device."""
    num_layers, two, heads, num_slots, dim = store.shape
    num_sequences, num_steps = index.shape
    if num_sequences == 0 or num_steps < 2:
        return
    _keep_path[(num_sequences, num_layers * two * heads)](
        store, block_table.contiguous(), base.contiguous(), index.contiguous(), length.contiguous(),
        num_steps, block_table.shape[1], num_slots,
        page_size, dim, triton.next_power_of_2(dim), STEPS, num_warps=4,
    )  # fmt: skip
