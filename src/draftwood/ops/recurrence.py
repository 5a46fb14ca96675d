"""Recurrences over whole trees at once: no loop over nodes, no state of any node.

With a decay a_i at each row and L_i the sum of log a along the path to row i, a memory S that gains a value times a
key in every row, S_i = a_i S_parent + x_i b_iᵀ, is read by

    y_i = S_i c_i = exp(L_i) S c_i + Σ exp(L_i - L_j) (c_i · b_j) x_j    over the rows j on the path to i,

attention over ancestors with a decay. Keeping the path to row l folds it into S once:

    S ← exp(L_l) S + Σ exp(L_l - L_j) x_j b_jᵀ                           over the rows j on the path to l.

A delta rule's values depend on what the memory holds before them, x_i = β_i (v_i - a_i S_parent b_i): a triangular
system, since rows lie behind their parents. Text is the same with rows that lie behind each other, a block at a time.

Where each number of S has a decay of its own (Mamba), pairs of rows would be as many numbers as a state each: there the
states of a block's rows are made one after the other (`scanned`). What is kept of a path is folded in as above.

Sums of logarithms are taken in float64: their differences must not depend on what has decayed long ago.
Shapes: S sequences, R rows of each, H heads in G groups, P numbers of a value, N of a key.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftwood.batch import ForwardBatch
from draftwood.links import BITS
from draftwood.states import Block, Carried, Deposit, StagedRows

BLOCK = 64  # rows of text at a time


def tree_block(batch: ForwardBatch) -> Block:
    """All rows of a batch of trees or of chains."""
    rows = len(batch.tokens) if batch.max_rows is None else batch.max_rows
    index, there = _rows(batch, 0, rows)
    if batch.linear:
        return _chain(batch, index, there)
    columns = _columns(batch, index)
    bit, words = columns.clamp(min=0)[:, None].expand(-1, rows, -1), batch.ancestors[index]
    bits = (words.gather(2, (bit // BITS).clamp(max=words.shape[-1] - 1)) >> (bit % BITS)) & 1
    known = bits.bool() & (bit < words.shape[-1] * BITS) & (columns >= 0)[:, None]
    before = (columns < 0)[:, None] & (columns[:, None] <= columns[:, :, None])  # the text, which has no bits
    return _block(index, there, columns, known | before | torch.eye(rows, dtype=torch.bool, device=index.device))


def text_blocks(batch: ForwardBatch) -> list[Block]:
    """Rows of text, cut into blocks."""
    rows = len(batch.tokens) if batch.max_rows is None else batch.max_rows
    starts = range(0, rows, BLOCK)
    return [_chain(batch, *_rows(batch, start, min(BLOCK, rows - start))) for start in starts]


def _rows(batch: ForwardBatch, start: int, count: int) -> tuple[Tensor, Tensor]:
    """Up to `count` rows of each sequence from its row `start` on, and which of them there are. Twice [S, R]."""
    offsets = batch.row_offsets
    index = offsets[:-1, None] + torch.arange(start, start + count, device=offsets.device)
    there, index = index < offsets[1:, None], index.clamp(max=len(batch.tokens) - 1)
    return index, there if batch.taken_in is None else there & ~batch.taken_in[index]


def _columns(batch: ForwardBatch, index: Tensor) -> Tensor:
    """Places behind the text of rows `index` [S, R]."""
    if batch.columns is not None:
        return batch.columns[index]
    return torch.arange(-1, index.shape[1] - 1, device=index.device).expand_as(index)


def _chain(batch: ForwardBatch, index: Tensor, there: Tensor) -> Block:
    every = torch.ones(index.shape[1], index.shape[1], dtype=torch.bool, device=index.device)
    return _block(index, there, _columns(batch, index), every)


def _block(index: Tensor, there: Tensor, columns: Tensor, above: Tensor) -> Block:
    sees = above.tril() & there[:, :, None] & there[:, None, :]
    return Block(index, there, columns, sees, (sees.sum(-1) - 1).clamp(min=0))


def convolved(tail: Tensor, inputs: Tensor, block: Block, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Each channel's sum over the last inputs along a row's path. [S, K - 1, C], [S, R, C], [K, C] -> [S, R, C]."""
    windows = block.windows(len(weight))
    known = torch.cat([tail, inputs], 1).to(weight.dtype)
    summed = (_picked(known, windows.flatten(1)).unflatten(1, windows.shape[1:]) * weight).sum(2)
    return summed if bias is None else summed + bias


def _picked(rows: Tensor, numbers: Tensor) -> Tensor:
    """Some rows of each sequence. [S, T, C], [S, n] -> [S, n, C]."""
    first = torch.arange(len(rows), device=rows.device)[:, None] * rows.shape[1]
    return rows.flatten(0, 1).index_select(0, (numbers + first).flatten()).view(*numbers.shape, -1)


def path_totals(log_decay: Tensor, block: Block) -> Tensor:
    """L. [S, R, H] -> [S, H, R] float64."""
    return (block.sees.double() @ log_decay.double()).transpose(1, 2)


def _between(total: Tensor, block: Block, dtype: torch.dtype) -> Tensor:
    """The decay from row j to row i, 0 off its path. [S, H, R, R]."""
    apart = total[..., :, None] - total[..., None, :]
    return apart.masked_fill(~block.sees[:, None], -torch.inf).exp().to(dtype)


def _by_heads(scores: Tensor, between: Tensor) -> Tensor:
    """Scores of groups times decays of their heads. [S, G, R, R], [S, H, R, R] -> [S, H, R, R]."""
    groups = scores.shape[1]
    return (scores[:, :, None] * between.unflatten(1, (groups, -1))).flatten(1, 2)


def _recalled(memory: Tensor, rows: Tensor, total: Tensor) -> Tensor:
    """exp(L_i) S r_i. [S, H, P, N], [S, G, R, N], [S, H, R] -> [S, H, R, P]."""
    groups = rows.shape[1]
    grouped = memory.unflatten(1, (groups, -1)).flatten(2, 3)  # [S, G, H / G * P, N]
    found = (rows @ grouped.transpose(-1, -2)).unflatten(-1, (-1, memory.shape[2]))  # [S, G, R, H / G, P]
    return found.transpose(2, 3).flatten(1, 2) * total.exp().to(memory.dtype)[..., None]


def read(memory: Tensor, deposit: Deposit, block: Block, queries: Tensor) -> Tensor:
    """y. [S, H, P, N], queries [S, G, R, N] -> [S, H, R, P]."""
    between = _between(deposit.total, block, memory.dtype)
    scores = queries @ deposit.keys.transpose(-1, -2)
    return _by_heads(scores, between) @ deposit.values + _recalled(memory, queries, deposit.total)


def delta_values(memory: Tensor, total: Tensor, block: Block, keys: Tensor, values: Tensor, strength: Tensor) -> Tensor:
    """What a delta rule adds: β (v - what the memory holds for its key). Strength [S, H, R]; -> [S, H, R, P]."""
    between = _between(total, block, memory.dtype)
    overlap = _by_heads(keys @ keys.transpose(-1, -2), between) * strength[..., None]
    surprise = (values - _recalled(memory, keys, total)) * strength[..., None]
    # The diagonal is taken as ones, and what lies above it is not read.
    return torch.linalg.solve_triangular(overlap, surprise, upper=False, unitriangular=True)


def scanned(memory: Tensor, deposit: Deposit, steps: Tensor, block: Block, queries: Tensor) -> Tensor:
    """y where L = rates · the sum of `steps` [S, R, H] on a path. [S, H, 1, N], queries [S, 1, R, N] -> [S, R, H]."""
    assert deposit.rates is not None
    sequences, rows = block.there.shape
    decay = (steps[..., None] * deposit.rates).exp()  # [S, R, H, N]
    gained = deposit.values.transpose(1, 2) * deposit.keys.transpose(1, 2)
    parent = ((block.sees.tril(-1)) * torch.arange(1, rows + 1, device=steps.device)).amax(2)  # [S, R] 0: none
    first = torch.arange(sequences, device=steps.device)
    states = memory.new_empty(rows + 1, sequences, *decay.shape[2:])
    states[0] = memory[:, :, 0]
    flat = states.view(-1, *decay.shape[2:])
    for row in range(rows):
        before = states[row] if row == 0 else flat.index_select(0, parent[:, row] * sequences + first)
        torch.addcmul(gained[:, row], before, decay[:, row], out=states[row + 1])
    return (states[1:].transpose(0, 1) @ queries.transpose(1, 2).transpose(-1, -2))[..., 0]


def _decays(deposit: Deposit, apart: Tensor, dtype: torch.dtype) -> Tensor:
    """Decays over `apart` of the totals. [S, H, R] -> [S, H, R, 1], or of each number of a key [S, H, R, N]."""
    if deposit.rates is None:
        return apart.exp().to(dtype)[..., None]
    return (apart.to(dtype)[..., None] * deposit.rates[:, None]).exp()


def _folded(memory: Tensor, deposit: Deposit, path: Tensor, last: Tensor) -> Tensor:
    """S behind the rows in `path` [S, R] bool, of which `last` [S] is the last one."""
    heads = deposit.total.shape[1]
    end = deposit.total.gather(2, last[:, None, None].expand(-1, heads, 1)).masked_fill(~path.any(1)[:, None, None], 0)
    left = _decays(deposit, end - deposit.total, memory.dtype).masked_fill(~path[:, None, :, None], 0)
    keys = deposit.keys[:, :, None].expand(-1, -1, heads // deposit.keys.shape[1], -1, -1).flatten(1, 2)
    return memory * _decays(deposit, end, memory.dtype) + deposit.values.transpose(-1, -2) @ (keys * left)


def advanced(states: Carried, staged: StagedRows, block: Block, last: Tensor) -> Carried:
    """The states behind the path to row `last` [S] of each sequence; as they were where it has no rows."""
    kernel = states.tail.shape[1] + 1
    row = last[:, None, None]
    window = block.windows(kernel).gather(1, row.expand(-1, 1, kernel))[:, 0, 1:]
    there = block.there.any(1)
    unchanged = torch.arange(kernel - 1, device=last.device)
    window = torch.where(there[:, None], window, unchanged)
    known = torch.cat([states.tail, staged.inputs.to(states.tail.dtype)], 1)
    tail = _picked(known, window)
    if states.memory is None or staged.deposit is None:
        return Carried(tail, None)
    path = block.sees.gather(1, row.expand(-1, 1, block.sees.shape[2]))[:, 0]
    return Carried(tail, _folded(states.memory, staged.deposit, path, last))
