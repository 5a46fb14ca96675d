"""Chains that a model says several tokens at a time, checking trees that lie behind them; nothing is committed.

The rows of every forward lie in places of their own behind the text, one forward's behind the other's. What was said is
seen through their bits, so nothing has to be moved in between.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftwood.cache.kv import Places
from draftwood.ops.path import keep_chosen
from draftwood.protocols import BatchView
from draftwood.shape import ancestor_words, num_words
from draftwood.tree import TokenTree


@dataclass(frozen=True)
class Rows:
    """The rows of a forward: the last token said, and a tree behind it. Columns are places behind the text, from 1."""

    tokens: Tensor  # [B, 1 + k]
    depth: Tensor  # [B, 1 + k] tokens behind the text
    bits: Tensor  # [B, 1 + k, W]
    node_bits: Tensor  # [M, W] the same of the tree's nodes
    at: Tensor  # [M] which row each node is
    base: int  # the first row's column; 0: it is the root, which lies in the text

    def places(self, start: int) -> Places:
        """Of the rows from number `start` on."""
        size, count, words = self.bits.shape
        columns = torch.arange(self.base + start, self.base + count, device=self.at.device)
        bits = self.bits[:, start:].reshape(-1, words)
        most = max(self.base + count - 1, 0)
        return Places(columns.expand(size, -1) - 1, self.depth[:, start:] - 1, bits, most, most)

    def columns(self, nodes: Tensor) -> Tensor:
        """Of nodes of the tree. Any shape."""
        return self.base + self.at[nodes] % self.tokens.shape[1]


@dataclass
class Chains:
    """What has been said behind each text, and in which columns that was run."""

    tokens: Tensor  # [B, n + 1] -1 where nothing has been said; the last place takes what is too much
    columns: Tensor  # [B, n + 1] 0: nowhere
    said: Tensor  # [B, n + 1] which row of all forwards said each token
    count: Tensor  # [B] tokens said
    bits: Tensor  # [B, W] the columns of all that has been said and run
    last: Tensor  # [B] the last token said, which has not been run; at first the root
    used: int = 0  # columns
    asked: int = 0  # rows of the forwards so far

    @classmethod
    def empty(cls, view: BatchView, most: int, columns: int) -> Chains:
        """Nothing has been said; `most` tokens will be kept, and so many columns used."""
        nothing = torch.full((view.size, most + 1), -1, dtype=torch.int64, device=view.roots.device)
        bits = nothing.new_zeros(view.size, num_words(1 + columns))
        zeros = torch.zeros_like(nothing)
        return cls(nothing, zeros, zeros.clone(), torch.zeros_like(view.lengths), bits, view.roots)

    def rows(self, tree: TokenTree, *, first: bool) -> Rows:
        """Rows of the last token and the `tree` behind it."""
        size, count, base = tree.num_trees, tree.widest, 0 if first else self.used + 1
        at = tree.owner * count + tree.local
        own = ancestor_words(tree.paths, tree.local + base, self.bits.shape[1])
        absent = tree.tokens < 0  # which are their own parents
        own = own.masked_fill(absent[:, None], 0) | self.bits[tree.owner]
        tokens = tree.tokens.new_zeros(size * count).index_copy_(0, at, tree.tokens.clamp(min=0)).view(size, count)
        tokens = torch.cat([self.last[:, None], tokens[:, 1:]], 1)
        depth = torch.zeros_like(tokens).view(-1).index_copy_(0, at, tree.depth).view(size, count)
        bits = own.new_zeros(size * count, own.shape[1]).index_copy_(0, at, own).view(size, count, -1)
        return Rows(tokens, depth + self.count[:, None], bits, own, at, base)

    def follow(self, tree: TokenTree, rows: Rows, choices: Tensor) -> None:
        """Go on along the tree as far as its rows [B * (1 + k)] choose the same, then with the last choice."""
        verdict = keep_chosen(tree, choices[rows.at])
        nodes, length = verdict.path.clamp(min=0), verdict.length
        if rows.base:
            self._place(self.columns, (self.count - 1)[:, None], torch.full_like(length, rows.base)[:, None])
        every = torch.arange(nodes.shape[1], device=nodes.device)
        at = torch.where(every <= length[:, None], self.count[:, None] + every, self.tokens.shape[1])
        self._place(self.said, at, self.asked + rows.at[nodes])
        self.asked += rows.tokens.numel()
        steps = every[:-1]
        at = torch.where(steps < length[:, None], self.count[:, None] + steps, self.tokens.shape[1])
        self._place(self.tokens, at, tree.tokens[nodes[:, 1:]])
        self._place(self.columns, at, rows.columns(nodes[:, 1:]))
        self._place(self.tokens, (self.count + length)[:, None], verdict.bonus[:, None])
        self.bits = rows.node_bits[nodes.gather(1, length[:, None])[:, 0]]
        self.count, self.last = self.count + length + 1, verdict.bonus
        self.used = rows.base + rows.tokens.shape[1] - 1
        self.tokens[:, -1:] = -1
        self.columns[:, -1:] = 0

    @staticmethod
    def _place(table: Tensor, at: Tensor, values: Tensor) -> None:
        """Write values to a table's places; those beyond its end to the last one."""
        table.scatter_(1, at.clamp(max=table.shape[1] - 1), values)

    def behind(self, view: BatchView) -> BatchView:
        """The view as if all of this were committed; without limits, and pages."""
        history = view.history.index_select(0, view.rows)
        steps = torch.arange(self.tokens.shape[1] - 1, device=history.device)
        at = (view.lengths[:, None] + steps).clamp(max=history.shape[1] - 1)
        history.scatter_(1, at, self.tokens[:, :-1].clamp(min=0))
        return replace(
            view,
            lengths=(view.lengths + self.count).clamp(max=history.shape[1]),
            roots=self.last,
            rows=torch.arange(view.size, device=history.device),
            history=history,
            salts=None if view.salts is None else view.salts[view.rows],
            max_nodes=None,
            max_depth=None,
            edits=None,
            gained=None,
        )
