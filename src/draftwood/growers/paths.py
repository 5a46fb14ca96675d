"""Independent paths, merged where they agree (SpecTr, SpecInfer, GBV), perhaps behind one trunk (delayed expansion)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftwood.growers.levels import MAX_NODES, limits_of, start
from draftwood.growers.pickers import Frontier
from draftwood.protocols import BatchView, Budget, FrontierModel, Randomness
from draftwood.tree import DraftLaw, Draw
from draftwood.treebuilder import TreeBuilder


@dataclass(frozen=True)
class Paths:
    """`trunk` drawn tokens, then `paths` independent continuations of `depth` tokens each."""

    paths: int
    depth: int
    trunk: int = 0

    def __post_init__(self) -> None:
        if self.paths < 1 or self.depth < 1 or self.trunk < 0:
            raise ValueError("there must be at least one path of at least one token, and no negative trunk")
        if self.max_nodes > MAX_NODES:
            raise ValueError(f"a tree of {self.max_nodes} nodes is over the limit of {MAX_NODES}")

    @property
    def law(self) -> DraftLaw:
        """Independent paths; one path is a chain."""
        return DraftLaw(frozenset({Draw.IID}), chain=self.paths == 1, paths=True)

    @property
    def max_nodes(self) -> int:
        """Where no two paths agree."""
        return self.trunk + self.paths * self.depth

    def grow(self, model: FrontierModel, view: BatchView, budget: Budget, rng: Randomness) -> TreeBuilder:
        """One token of every path at a time, as deep as there is room if no two paths agree: how deep a tree goes must
        not depend on what was drawn."""
        builder = start(view)
        columns = torch.zeros_like(builder.root_tokens)[:, None]  # [B, k] the nodes the paths end at, repeats dead
        place = torch.zeros_like(columns)  # [B, paths] which of them is whose
        for depth in range(self.trunk + self.depth):
            width = 1 if depth < self.trunk else self.paths
            place = place.expand(-1, width) if place.shape[1] != width else place
            most = min(depth + 1, self.trunk) + self.paths * max(0, depth + 1 - self.trunk)
            fits = (limits_of(view, budget) >= most) & (view.max_depth > depth)
            if not bool(fits.any()):
                break
            logits = model.extend(builder, columns) if depth else model.begin(view)[:, None]
            frontier = Frontier(columns, builder.depth.gather(1, columns), logits, view, rng)
            columns, place = _draw_level(builder, frontier, place, fits)
        return builder


def _draw_level(builder: TreeBuilder, frontier: Frontier, place: Tensor, fits: Tensor) -> tuple[Tensor, Tensor]:
    """The next token of every path: the columns it gave, and for each path which of them it stands at. [B, paths]."""
    parents = frontier.columns.gather(1, place)
    q = frontier.q.gather(1, place[..., None].expand(-1, -1, frontier.q.shape[-1]))
    tokens = frontier.pick_for_each(q, parents)
    laws = builder.add_laws(frontier.q).gather(1, place)
    columns = builder.add_drawn(parents, tokens, fits[:, None].expand_as(tokens), Draw.IID, laws)
    agrees = (parents[:, :, None] == parents[:, None, :]) & (tokens[:, :, None] == tokens[:, None, :])
    first = agrees.long().argmax(-1)  # the earliest path with the same parent and token
    if place.shape[1] > 1:
        builder.merge(columns, columns.gather(1, first))
    return columns, first
