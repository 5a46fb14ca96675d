"""A batch of trees while it grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from draftwood.tree import BITS, Draw, TokenTree, Verdict, ancestor_words, offsets_of


@dataclass
class TreeBuilder:
    """A batch of trees while it grows, level by level, on the device.

    All trees share one numbering: column c of [B, C] is node c of every tree, and `alive` says in which trees it
    exists. Packing at the end drops dead columns; that is an oblivious edit, for they were never drawn.
    """

    root_tokens: Tensor  # [B]
    whole: bool = False  # every node exists in every tree: the packed tree is known without looking
    tokens: Tensor = field(init=False)  # [B, C]
    parents: Tensor = field(init=False)  # [B, C] columns
    depth: Tensor = field(init=False)  # [B, C]
    alive: Tensor = field(init=False)  # [B, C] bool
    draw: Tensor = field(init=False)  # [B, C]
    q_row: Tensor = field(init=False)  # [B, C]
    same: Tensor = field(init=False)  # [B, C] the column that stands for a repeated draw, its own otherwise
    laws: list[Tensor] = field(default_factory=list)  # each [rows, V]
    repeats: bool = False  # whether any draw may have come twice

    def __post_init__(self) -> None:
        column = self.root_tokens[:, None]
        self.tokens = column
        self.parents = torch.full_like(column, -1)
        self.depth = torch.zeros_like(column)
        self.alive = torch.ones_like(column, dtype=torch.bool)
        self.draw = torch.zeros_like(column)
        self.q_row = torch.full_like(column, -1)
        self.same = torch.zeros_like(column)

    @property
    def num_trees(self) -> int:
        """B."""
        return self.tokens.shape[0]

    @property
    def num_columns(self) -> int:
        """Nodes numbered so far, the root included."""
        return self.tokens.shape[1]

    @property
    def sizes(self) -> Tensor:
        """Living draft nodes of each tree, the root not counted. [B]."""
        return self.alive.sum(1) - 1

    def add(self, parents: Tensor, tokens: Tensor, alive: Tensor) -> Tensor:
        """Append k point-mass nodes to every tree; returns their columns. All [B, k]."""
        return self._append(parents, tokens, alive, Draw.POINT, torch.full_like(tokens, -1))

    def add_chain(self, tokens: Tensor, lengths: Tensor) -> None:
        """Append a chain of point-mass nodes to every bare root, the first `lengths` [B] of `tokens` [B, k]."""
        steps = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        ahead = steps + 1
        self.tokens = torch.cat([self.tokens, tokens], 1)
        self.parents = torch.cat([self.parents, steps], 1)
        self.depth = torch.cat([self.depth, ahead], 1)
        self.alive = torch.cat([self.alive, steps < lengths[:, None]], 1)
        self.draw = torch.cat([self.draw, torch.full_like(tokens, int(Draw.POINT))], 1)
        self.q_row = torch.cat([self.q_row, torch.full_like(tokens, -1)], 1)
        self.same = torch.cat([self.same, ahead], 1)

    def add_laws(self, q: Tensor) -> Tensor:
        """Laws [B, k, V] to draw nodes from, as many as one likes from each; returns their numbers. [B, k]."""
        first = sum(law.shape[0] for law in self.laws)
        self.laws.append(q.reshape(-1, q.shape[-1]))
        return first + torch.arange(len(self.laws[-1]), device=q.device).view(q.shape[:2])

    def add_drawn(self, parents: Tensor, tokens: Tensor, alive: Tensor, draw: Draw, laws: Tensor) -> Tensor:
        """Append k nodes, each drawn from the law with its number in `laws`; returns their columns. All [B, k]."""
        return self._append(parents, tokens, alive, draw, laws)

    def merge(self, columns: Tensor, into: Tensor) -> None:
        """The draws at `columns` [B, k] gave the nodes at columns `into` [B, k]: others' where they repeat, else own.

        The node stays one, but it was drawn once more, and laws for independent draws need to know.
        """
        self.same = self.same.scatter(1, columns, into)
        self.alive = self.alive.scatter(1, columns, self.alive.gather(1, columns) & (columns == into))
        self.repeats = True

    def _append(self, parents: Tensor, tokens: Tensor, alive: Tensor, draw: Draw, rows: Tensor) -> Tensor:
        first = self.num_columns
        alive = alive & self.alive.gather(1, parents)
        self.tokens = torch.cat([self.tokens, tokens], 1)
        self.parents = torch.cat([self.parents, parents], 1)
        self.depth = torch.cat([self.depth, self.depth.gather(1, parents) + 1], 1)
        self.alive = torch.cat([self.alive, alive], 1)
        self.draw = torch.cat([self.draw, torch.full_like(tokens, int(draw))], 1)
        self.q_row = torch.cat([self.q_row, rows], 1)
        columns = torch.arange(first, self.num_columns, device=tokens.device).expand_as(tokens)
        self.same = torch.cat([self.same, columns], 1)
        return columns

    def ancestors(self, columns: Tensor) -> Tensor:
        """Bit sets over columns of the nodes on the way to `columns` [B, k]. [B, k, W]."""
        num_words = max(1, -(-(self.num_columns - 1) // BITS))
        steps = [columns]
        for _ in range(int(self.depth.max())):
            steps.append(torch.where(steps[-1] > 0, self.parents.gather(1, steps[-1].clamp(min=0)), 0))
        climb = torch.stack(steps, -1).view(-1, len(steps))
        local = torch.arange(self.num_columns, device=columns.device)
        climb = torch.where(climb > 0, climb, -1)
        return ancestor_words(climb, local, num_words).view(*columns.shape, num_words)

    def keep_only(self, keep: Tensor) -> None:
        """Kill every column outside `keep` [B, C] because of what it holds: all draws are forgotten with it."""
        self.alive = self.alive & keep
        self.alive[:, 0] = True
        self.draw = torch.zeros_like(self.draw)
        self.q_row = torch.full_like(self.q_row, -1)
        self.laws = []
        self.repeats = False

    def build(self) -> tuple[TokenTree, Tensor]:
        """The packed tree, and the column each of its nodes had. Siblings stay in column order."""
        if self.whole:
            return self._build_whole()
        owner, columns = self.alive.nonzero(as_tuple=True)
        renumbered = (self.alive.view(-1).cumsum(0) - 1).view_as(self.alive)
        parents = self.parents[owner, columns]
        tree = TokenTree(
            tokens=self.tokens[owner, columns],
            parents=torch.where(parents >= 0, renumbered[owner, parents.clamp(min=0)], -1),
            offsets=offsets_of(owner, self.num_trees),
            draw=self.draw[owner, columns],
            q_row=self.q_row[owner, columns],
            q=torch.cat(self.laws) if self.laws else None,
            drawn=self._drawn(renumbered) if self.repeats else None,
        )
        return tree, columns

    def _build_whole(self) -> tuple[TokenTree, Tensor]:
        offsets = torch.arange(self.num_trees + 1, device=self.tokens.device) * self.num_columns
        parents = torch.where(self.parents >= 0, self.parents + offsets[:-1, None], -1)
        packed = (self.tokens, parents, self.draw, self.q_row)
        tokens, parents, draw, q_row = (part.reshape(-1) for part in packed)
        laws = torch.cat(self.laws) if self.laws else None
        columns = torch.arange(self.num_columns, device=tokens.device).repeat(self.num_trees)
        return TokenTree(tokens, parents, offsets, draw, q_row, laws), columns

    def _drawn(self, renumbered: Tensor) -> Tensor:
        """The node of every draw, in the order drawn. [E]."""
        happened = self.alive.gather(1, self.same)
        return renumbered.gather(1, self.same)[happened]


@dataclass(frozen=True)
class Woven:
    """Batches of trees as one batch, each tree at its own place; and the way back to each of them."""

    parts: Sequence[TokenTree]
    places: Sequence[Sequence[int]]  # of the trees of each part in the whole batch; together 0 ... B - 1

    @cached_property
    def _order(self) -> Tensor:
        """Nodes of all parts, one part behind the other, in the order of the whole. [M]."""
        owner = torch.cat(
            [
                torch.tensor(list(places), device=part.tokens.device)[part.owner]
                for part, places in zip(self.parts, self.places, strict=True)
            ]
        )
        return torch.argsort(owner, stable=True)

    @cached_property
    def _place(self) -> Tensor:
        """Where each of those nodes lies in the whole. [M]."""
        return torch.argsort(self._order)

    @cached_property
    def _starts(self) -> list[int]:
        starts = [0]
        for part in self.parts:
            starts.append(starts[-1] + part.num_nodes)
        return starts

    @cached_property
    def tree(self) -> TokenTree:
        """The whole batch."""
        parents, drawn, q_row, laws, rows = [], [], [], [], 0
        for part, start in zip(self.parts, self._starts, strict=False):
            own = torch.arange(part.num_nodes, device=part.tokens.device)
            parents.append(torch.where(part.parents >= 0, self._place[(part.parents + start).clamp(min=0)], -1))
            drawn.append(self._place[(own if part.drawn is None else part.drawn) + start])
            q_row.append(torch.where(part.q_row >= 0, part.q_row + rows, -1))
            if part.q is not None:
                laws.append(part.q)
                rows += part.q.shape[0]
        sizes = torch.empty(sum(map(len, self.places)), dtype=torch.int64, device=self._order.device)
        for part, places in zip(self.parts, self.places, strict=True):
            sizes[list(places)] = part.sizes
        return TokenTree(
            tokens=torch.cat([part.tokens for part in self.parts])[self._order],
            parents=torch.cat(parents)[self._order],
            offsets=torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]),
            draw=torch.cat([part.draw for part in self.parts])[self._order],
            q_row=torch.cat(q_row)[self._order],
            q=torch.cat(laws) if laws else None,
            drawn=torch.cat(drawn) if any(part.drawn is not None for part in self.parts) else None,
        )

    def nodes(self, index: int) -> Tensor:
        """Where the nodes of a part lie in the whole. [m]."""
        return self._place[self._starts[index] : self._starts[index + 1]]

    def verdict(self, index: int, whole: Verdict) -> Verdict:
        """What was said about the trees of a part, in its own numbers."""
        trees, width = list(self.places[index]), self.parts[index].max_depth + 1
        path = whole.path[trees, :width]
        path = torch.where(path >= 0, self._order[path.clamp(min=0)] - self._starts[index], -1)
        drift = None if whole.drift is None else whole.drift[trees]
        return replace(whole, path=path, length=whole.length[trees], bonus=whole.bonus[trees], drift=drift)
