"""Recurrences over whole trees: what node by node gives, without a look at values, with rows missing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftwood.batch import ForwardBatch
from draftwood.ops.recurrence import (
    BLOCK,
    advanced,
    convolved,
    delta_values,
    path_totals,
    read,
    scanned,
    text_blocks,
    tree_block,
)
from draftwood.states import Block, Carried, Deposit, StagedRows
from draftwood.tree import TokenTree
from no_sync import no_looking

HEADS, GROUPS, VALUE, KEY, KERNEL, CHANNELS = 4, 2, 3, 5, 4, 6
SHAPES = [[-1, 0, 0, 1, 1, 3, 5, 5, 2, 8], [-1], [-1, 0, 1, 2, 2, 0]]


def parents_of(kind: str) -> list[list[int]]:
    if kind == "wide":  # more nodes than a word of ancestors has bits
        return [[-1, *(i if i % 3 else i // 2 for i in range(69))], [-1, 0]]
    return [list(range(-1, 6)), [-1], list(range(-1, 2))] if kind == "chain" else SHAPES


def batch_of(parents: list[list[int]], chain: bool) -> ForwardBatch:
    tree = TokenTree.of_points([([0] * len(own), own) for own in parents])
    rows, trees = tree.num_nodes, tree.num_trees
    zeros = torch.zeros(rows, dtype=torch.int64)
    return ForwardBatch(
        tokens=zeros, positions=zeros, slots=zeros, visible=zeros,
        ancestors=zeros[:, None] if chain else tree.shape.ancestors, row_offsets=tree.offsets,
        tree_base=zeros[:trees], num_keys=zeros[:trees], block_table=zeros[:trees, None], logit_rows=zeros[:0],
        max_rows=tree.widest, linear=chain,
    )  # fmt: skip


class Rows:
    """Random rows of a block, and states before it."""

    def __init__(self, block: Block) -> None:
        sequences, count = block.there.shape
        draw = torch.Generator().manual_seed(4)

        def random(*shape: int) -> Tensor:
            return torch.randn(sequences, *shape, generator=draw, dtype=torch.float64)

        self.block, here = block, block.there[:, None, :, None]
        self.log_decay = -random(count, HEADS).exp() * block.there[..., None]
        self.keys, self.queries = random(GROUPS, count, KEY), random(GROUPS, count, KEY)
        self.values = random(HEADS, count, VALUE) * here
        self.learn = torch.sigmoid(random(HEADS, count)) * here[..., 0]
        self.inputs = random(count, CHANNELS)
        self.states = Carried(random(KERNEL - 1, CHANNELS), random(HEADS, VALUE, KEY))
        self.weight = torch.randn(KERNEL, CHANNELS, generator=draw, dtype=torch.float64)

    def node_by_node(self, s: int, parents: list[int], delta: bool) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Outputs, and the memory and the last inputs behind every node."""
        assert self.states.memory is not None
        outputs, memories, tails = [], [], []
        for i, parent in enumerate(parents):
            memory = self.states.memory[s] if parent < 0 else memories[parent]
            tail = self.states.tail[s] if parent < 0 else tails[parent]
            memory = memory * self.log_decay[s, i].exp()[:, None, None]
            key, query = (part[s, :, i].repeat_interleave(HEADS // GROUPS, 0) for part in (self.keys, self.queries))
            value = self.values[s, :, i]
            if delta:
                value = self.learn[s, :, i, None] * (value - (memory @ key[..., None])[..., 0])
            memories.append(memory + value[..., None] * key[:, None])
            tails.append(torch.cat([tail, self.inputs[s, i][None]])[1:])
            outputs.append((memories[-1] @ query[..., None])[..., 0])
        return torch.stack(outputs, 1), memories, tails

    def deposit(self, delta: bool) -> Deposit:
        assert self.states.memory is not None
        total, values = path_totals(self.log_decay, self.block), self.values
        if delta:
            values = delta_values(self.states.memory, total, self.block, self.keys, values, self.learn)
        return Deposit(total, self.keys, values)


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("kind", ["tree", "chain", "wide"])
def test_a_tree_at_once_is_node_by_node(kind: str, delta: bool) -> None:
    """Outputs at every node, and states behind the path to any of them; nothing looks at values."""
    parents = parents_of(kind)
    batch = batch_of(parents, kind == "chain")
    with no_looking():
        block = tree_block(batch)
        block.windows(KERNEL)
    rows = Rows(block)
    deposit = rows.deposit(delta)
    assert rows.states.memory is not None
    with no_looking():
        found = read(rows.states.memory, deposit, block, rows.queries)
        mixed = convolved(rows.states.tail, rows.inputs, block, rows.weight, None)
    for s, own in enumerate(parents):
        outputs, memories, tails = rows.node_by_node(s, own, delta)
        assert (found[s, :, : len(own)] - outputs).abs().max() < 1e-12
        for node, parent in enumerate(own):
            before = rows.states.tail[s] if parent < 0 else tails[parent]
            window = torch.cat([before, rows.inputs[s, node][None]])
            assert (mixed[s, node] - (window * rows.weight).sum(0)).abs().max() < 1e-12
            last = torch.tensor([min(node, len(other) - 1) for other in parents])
            with no_looking():
                states = advanced(rows.states, StagedRows(rows.inputs, deposit), block, last)
            assert states.memory is not None
            assert (states.memory[s] - memories[node]).abs().max() < 1e-12
            assert (states.tail[s] - tails[node]).abs().max() == 0


@pytest.mark.parametrize("kind", ["tree", "chain"])
def test_a_scan_of_a_tree_is_node_by_node(kind: str) -> None:
    """Where each number has a decay of its own: outputs at every node, and memories behind the path to any of them."""
    parents, draw = parents_of(kind), torch.Generator().manual_seed(5)
    block = tree_block(batch_of(parents, kind == "chain"))
    sequences, count = block.there.shape

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    steps = random(sequences, count, HEADS).exp() * block.there[..., None]
    keys, queries = random(sequences, 1, count, KEY), random(sequences, 1, count, KEY)
    memory, rates = random(sequences, HEADS, 1, KEY), -random(HEADS, KEY).exp()
    values = (random(sequences, count, HEADS) * block.there[..., None]).transpose(1, 2)[..., None]
    with no_looking():
        deposit = Deposit(path_totals(steps, block), keys, values, rates)
        found = scanned(memory, deposit, steps, block, queries)
    for s, own in enumerate(parents):
        memories: list[Tensor] = []
        for i, parent in enumerate(own):
            before = memory[s, :, 0] if parent < 0 else memories[parent]
            memories.append(before * (steps[s, i, :, None] * rates).exp() + values[s, :, i] * keys[s, :, i])
            assert (found[s, i] - memories[i] @ queries[s, 0, i]).abs().max() < 1e-12
            last = torch.tensor([min(i, len(other) - 1) for other in parents])
            states = Carried(random(sequences, KERNEL - 1, CHANNELS), memory)
            with no_looking():
                states = advanced(states, StagedRows(random(sequences, count, CHANNELS), deposit), block, last)
            assert states.memory is not None
            assert (states.memory[s, :, 0] - memories[i]).abs().max() < 1e-12


def test_decay_that_is_long_past_costs_no_digits() -> None:
    """In float32 sums of logarithms would: what is left of e^-2000 is nothing, what came behind it is all there."""
    parents = [list(range(-1, 40))]
    rows = Rows(tree_block(batch_of(parents, chain=True)))
    rows.log_decay[:, 1] = -2000
    rows.log_decay[:, 2:] /= 100
    outputs, *_ = rows.node_by_node(0, parents[0], delta=False)
    assert rows.states.memory is not None
    narrow = Deposit(path_totals(rows.log_decay, rows.block), rows.keys.float(), rows.values.float())
    found = read(rows.states.memory.float(), narrow, rows.block, rows.queries.float())
    assert (found - outputs).abs().max() / outputs.abs().max() < 1e-6


def test_text_in_blocks_is_one_long_chain() -> None:
    """Sequences of any lengths, some of which end in the first block, and one of which has no rows."""
    lengths = [2 * BLOCK + 5, 3, BLOCK]
    parents = [list(range(-1, length - 1)) for length in lengths]
    batch = batch_of(parents, chain=True)
    rows = Rows(tree_block(batch))
    assert rows.states.memory is not None
    whole = read(rows.states.memory, rows.deposit(True), rows.block, rows.queries)
    last = torch.tensor([length - 1 for length in lengths])
    end = advanced(rows.states, StagedRows(rows.inputs, rows.deposit(True)), rows.block, last)
    states, start = rows.states, 0
    for block in text_blocks(batch):
        part = Rows(block)
        columns = slice(start, start + block.there.shape[1])
        part.log_decay, part.learn = rows.log_decay[:, columns], rows.learn[..., columns]
        part.keys, part.queries, part.values = (
            p[:, :, columns] for p in (rows.keys, rows.queries, rows.values)
        )  # fmt: skip
        part.states = states
        deposit = part.deposit(True)
        assert states.memory is not None
        found = read(states.memory, deposit, block, part.queries)
        there = block.there[:, None, :, None]
        assert ((found - whole[:, :, columns]) * there).abs().max() < 1e-12
        ends = (block.there.sum(1) - 1).clamp(min=0)
        states = advanced(states, StagedRows(rows.inputs[:, columns], deposit), block, ends)
        start = columns.stop
    assert states.memory is not None
    assert end.memory is not None
    assert (states.memory - end.memory).abs().max() < 1e-12
    assert torch.equal(states.tail, end.tail)


def test_a_sequence_without_rows_stays_as_it_is() -> None:
    """Captured prefills have room for more sequences than there are."""
    batch = batch_of([[-1, 0], [-1]], chain=True)
    offsets = torch.tensor([0, 3, 3])
    block = tree_block(ForwardBatch(**{**vars(batch), "row_offsets": offsets, "max_rows": 3}))
    rows = Rows(block)
    states = advanced(rows.states, StagedRows(rows.inputs, rows.deposit(False)), block, torch.tensor([2, 0]))
    assert states.memory is not None
    assert rows.states.memory is not None
    assert torch.equal(states.tail[1], rows.states.tail[1])
    assert torch.equal(states.memory[1], rows.states.memory[1])
