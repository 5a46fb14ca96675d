"""Trees whose shape is fixed before anything is known: level by level, or as a list of ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftwood.growers.pickers import Best, ChildPicker, Frontier
from draftwood.protocols import BatchView, Budget, ChainModel, FrontierModel, Randomness
from draftwood.tree import POINT_CHAIN, POINT_TREE, DraftLaw
from draftwood.treebuilder import TreeBuilder

MAX_NODES = 2048


def start(view: BatchView) -> TreeBuilder:
    """Bare roots."""
    return TreeBuilder(view.roots)


def limits_of(view: BatchView, budget: Budget) -> Tensor:
    """Draft nodes each tree may have. [B]."""
    return view.max_nodes.clamp(max=budget.max_nodes)


@dataclass(frozen=True)
class Levels:
    """A fixed number of children at every node of a level: `widths[d]` at depth d; (1, 1, 1, 1) is a chain of four."""

    widths: tuple[int, ...]
    picker: ChildPicker

    def __post_init__(self) -> None:
        if not self.widths or min(self.widths) < 1:
            raise ValueError("a tree needs at least one level, and every level at least one child a node")
        if self.max_nodes > MAX_NODES:
            raise ValueError(f"a tree of {self.max_nodes} nodes is over the limit of {MAX_NODES}")

    @property
    def law(self) -> DraftLaw:
        """A chain where no node has two children."""
        return DraftLaw(self.picker.draws, chain=max(self.widths) == 1)

    @property
    def max_nodes(self) -> int:
        """All nodes of all levels."""
        total, level = 0, 1
        for width in self.widths:
            level *= width
            total += level
        return total

    def within(self, nodes: int) -> Levels | None:
        """Its first levels, as many as have at most so many nodes."""
        prefixes = [Levels(self.widths[:n], self.picker) for n in range(1, len(self.widths) + 1)]
        return max((p for p in prefixes if p.max_nodes <= nodes), key=lambda p: p.max_nodes, default=None)

    def grow(self, model: FrontierModel, view: BatchView, budget: Budget, rng: Randomness) -> TreeBuilder:
        """Level by level, until the shape, the budget or the room ends."""
        builder = start(view)
        if self.law == POINT_CHAIN and isinstance(self.picker, Best) and isinstance(model, ChainModel):
            lengths = torch.minimum(limits_of(view, budget), view.max_depth).clamp(0, len(self.widths))
            longest = int(lengths.max())
            if longest and (tokens := model.chain(view, longest)) is not None:
                builder.add_chain(tokens, lengths)
                return builder
        columns = torch.zeros_like(builder.root_tokens)[:, None]
        for depth, width in enumerate(self.widths):
            parents_alive = builder.alive.gather(1, columns) & (view.max_depth > depth)[:, None]
            room = limits_of(view, budget) - builder.sizes
            if not bool((parents_alive.any(1) & (room > 0)).any()):
                break
            logits = model.extend(builder, columns) if depth else model.begin(view)[:, None]
            frontier = Frontier(columns, builder.depth.gather(1, columns), logits, view, rng)
            columns = self._add_children(builder, frontier, width, parents_alive, limits_of(view, budget))
        return builder

    def _add_children(
        self, builder: TreeBuilder, frontier: Frontier, width: int, parents_alive: Tensor, limits: Tensor
    ) -> Tensor:
        added, q, laws = [], None, None
        for child in self.picker.children(frontier, width):
            wanted = parents_alive if child.exists is None else child.exists & parents_alive
            # Room is shared out by place, never by what was drawn.
            fits = wanted & (wanted.cumsum(1) <= (limits - builder.sizes)[:, None])
            if child.q is None:
                added.append(builder.add(frontier.columns, child.tokens, fits))
                continue
            if laws is None or child.q is not q:
                q, laws = child.q, builder.add_laws(child.q)
            added.append(builder.add_drawn(frontier.columns, child.tokens, fits, child.draw, laws))
        return torch.cat(added, 1)


@dataclass(frozen=True)
class StaticShape:
    """A fixed tree of ranks: node (0, 2) is the third likeliest token after the likeliest one (Medusa, EAGLE-1)."""

    nodes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        known = set(self.nodes)
        if not known or len(known) != len(self.nodes) or len(known) > MAX_NODES:
            raise ValueError(f"a static shape has between 1 and {MAX_NODES} different nodes")
        for node in self.nodes:
            if not node or min(node) < 0 or (len(node) > 1 and node[:-1] not in known):
                raise ValueError(f"node {node} of the static shape has no parent in it, or a negative rank")

    @property
    def law(self) -> DraftLaw:
        """Chosen by rank."""
        return POINT_CHAIN if all(rank == 0 for node in self.nodes for rank in node) else POINT_TREE

    @property
    def max_nodes(self) -> int:
        """As many as are listed."""
        return len(self.nodes)

    def grow(self, model: FrontierModel, view: BatchView, budget: Budget, rng: Randomness) -> TreeBuilder:
        """One level of the shape after the other; siblings in falling order of likelihood."""
        builder = start(view)
        column: dict[tuple[int, ...], int] = {(): 0}
        for depth in range(max(map(len, self.nodes))):
            level = sorted(node for node in self.nodes if len(node) == depth + 1 and node[:-1] in column)
            parents = sorted({node[:-1] for node in level})
            if not level or not bool(((view.max_depth > depth) & (limits_of(view, budget) > builder.sizes)).any()):
                break
            columns = _everywhere(builder, [column[parent] for parent in parents])
            logits = model.extend(builder, columns) if depth else model.begin(view)[:, None]
            ranked = logits.topk(min(1 + max(node[-1] for node in level), logits.shape[-1]), -1).indices
            level = [node for node in level if node[-1] < ranked.shape[-1]]
            if not level:
                break
            tokens = torch.stack([ranked[:, parents.index(node[:-1]), node[-1]] for node in level], 1)
            wanted = (view.max_depth > depth)[:, None].expand_as(tokens)
            fits = wanted & (wanted.cumsum(1) <= (limits_of(view, budget) - builder.sizes)[:, None])
            above = _everywhere(builder, [column[node[:-1]] for node in level])
            for node, at in zip(level, builder.add(above, tokens, fits)[0].tolist(), strict=True):
                column[node] = at
        return builder


def _everywhere(builder: TreeBuilder, columns: list[int]) -> Tensor:
    return torch.tensor(columns, device=builder.tokens.device).expand(builder.num_trees, -1)


def chain(depth: int) -> Levels:
    """The likeliest token, `depth` times."""
    return Levels((1,) * depth, Best())
