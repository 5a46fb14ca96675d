"""Trees in flight: while later stages run some nodes of a sequence's tree, this one runs the next ones.

What a law that goes by seed, prompt and model takes behind a node does not depend on the rest of the tree. So nodes are
launched a few levels at a time, and each time a slice comes back, the text goes on as far as is known. The drafter
proposes again behind its new end: of the new tree those nodes need not be run that are on their way already, by the
same tokens. All others of the old one are forgotten, and their keys written over.

A key never lies before its token's place in the text, so nothing is written over when a path moves to its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draftwood.batch import ForwardBatch
from draftwood.drafting import Proposal
from draftwood.links import BITS, table_of, words_of
from draftwood.protocols import BatchView
from draftwood.tree import Verdict


@dataclass
class Row:
    """A node that was launched."""

    key: int  # where its key lies, counted from the beginning of the text
    taken: tuple[int, bool] | None = None  # the target's own token behind it, and if there was one; None: not known yet


@dataclass(frozen=True)
class Step:
    """How far the text goes on."""

    verdict: Verdict
    usable: bool
    index: list[int]  # where the rows of its path lie, counted from the root
    end: int | None  # the node that the text now ends with; None: it is none, or was not launched


class TreeAhead:
    """The proposal for one sequence, and which of its nodes were launched."""

    def __init__(self, view: BatchView, proposal: Proposal, room: int) -> None:
        self.view, self.proposal = view, proposal
        self._room = room  # keys that the view's pages have room for, counted from the beginning of the text
        self.root = int(view.lengths[0]) - 1  # where the root's key lies
        self.drafted = 0  # nodes that were launched for this proposal
        tree = proposal.tree
        self._tokens, self._parents, self._depth = tree.tokens.tolist(), tree.parents.tolist(), tree.depth.tolist()
        self._child = {(self._parents[i], self._tokens[i]): i for i in reversed(range(len(self._tokens)))}
        self._rows: list[Row | None] = [None] * len(self._tokens)

    @property
    def is_launched(self) -> bool:
        """Whether no node is left."""
        return None not in self._rows

    def adopt(self, old: TreeAhead, end: int) -> None:
        """Take the rows of another tree behind its node `end`, which is the root here."""
        there = {0: end}
        for i, parent in enumerate(self._parents):
            if parent in there and (found := old._child.get((there[parent], self._tokens[i]))) is not None:
                there[i] = found
        for i, node in there.items():
            if i == self._child.get((self._parents[i], self._tokens[i])):
                self._rows[i] = old._rows[node]

    def launch(self, levels: int) -> list[int]:
        """The nodes to be launched next: some `levels` more, as far as there is room for their keys."""
        taken = {row.key for row in self._rows if row is not None}
        deepest = max((d for d, row in zip(self._depth, self._rows, strict=True) if row is not None), default=0)
        chosen = []
        for i, depth in enumerate(self._depth):
            if self._rows[i] is not None or depth > deepest + levels or (depth and not self._rows[self._parents[i]]):
                continue
            key = next((key for key in range(self.root + depth, self._room) if key not in taken), None)
            if key is not None:
                self._rows[i] = Row(key)
                taken.add(key)
                chosen.append(i)
        self.drafted += len(chosen) - (0 in chosen)
        return chosen

    def rows(self, nodes: Sequence[int]) -> list[Row]:
        """Those of launched nodes."""
        return [row for node in nodes if (row := self._rows[node]) is not None]

    def lengths(self, nodes: Sequence[int]) -> list[int]:
        """Tokens up to each node."""
        return [self.root + 1 + self._depth[node] for node in nodes]

    def staged(self, nodes: Sequence[int], page_size: int, max_positions: int) -> ForwardBatch:
        """Rows of launched nodes, with logits at each."""
        view, device, length = self.view, self.view.lengths.device, self.root + 1
        keys = [row.key for row in self.rows(nodes)]
        sets = [sum(1 << (key - length) for key in self._keys_above(node)) for node in nodes]
        last = max(length - 1, *(row.key for row in self._rows if row is not None))
        ancestors = table_of(words_of(sets, max(1, -(-(last + 1 - length) // BITS))), device)
        places = [min(self.root + self._depth[node], max_positions - 1) for node in nodes]
        tokens, positions, key = table_of([[self._tokens[node] for node in nodes], places, keys], device)
        count, every = len(nodes), torch.arange(len(nodes), device=device)
        return ForwardBatch(
            tokens=tokens,
            positions=positions,
            slots=view.block_table[0, key // page_size] * page_size + key % page_size,
            visible=torch.full_like(tokens, length),
            ancestors=ancestors,
            row_offsets=torch.tensor([0, count], device=device),
            tree_base=view.lengths,
            num_keys=torch.tensor([last + 1], device=device),
            block_table=view.block_table,
            logit_rows=every,
            max_rows=count,
            max_nodes=last + 1 - length,
            logits_in_order=True,
        )

    def _keys_above(self, node: int) -> list[int]:
        """Of the node and those between it and the root."""
        path = []
        while node > 0:
            path.append(node)
            node = self._parents[node]
        return [row.key for row in self.rows(path)]

    def step(self) -> Step | None:
        """As far as is known; None if that is nowhere."""
        path, index, usable, node = [], [], True, 0
        while (row := self._rows[node]) is not None and row.taken is not None:
            path.append(node)
            index.append(row.key - self.root)
            token, known = row.taken
            usable, child = usable and known, self._child.get((node, token))
            if child is None:
                return Step(self._verdict(path, token), usable, index, None)
            node = child
        if not path:
            return None
        if row is not None:
            index.append(row.key - self.root)
            row.key = self.root + self._depth[node]
        return Step(self._verdict(path, self._tokens[node]), usable, index, None if row is None else node)

    def _verdict(self, path: list[int], bonus: int) -> Verdict:
        device = self.view.lengths.device
        length, token = (torch.tensor([number], device=device) for number in (len(path) - 1, bonus))
        return Verdict(torch.tensor([path], device=device), length, token)
