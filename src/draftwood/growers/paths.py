"""Independent paths, merged where they agree (SpecTr, SpecInfer, GBV), perhaps behind one trunk (delayed expansion)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from draftwood.cache.kv import Places
from draftwood.drafting import Front, FrontierModel, Proposal
from draftwood.growers.fixed import MAX_NODES
from draftwood.growers.pickers import Frontier
from draftwood.protocols import BatchView, Randomness
from draftwood.shape import TreeShape, num_words, own_bits, packed_left
from draftwood.tree import DraftLaw, Draw, TokenTree


@dataclass(frozen=True)
class Paths:
    """`trunk` drawn tokens, then `paths` independent continuations of `depth` tokens each."""

    paths: int
    depth: int
    trunk: int = 0

    surplus = 1

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
    def levels(self) -> int:
        """Trunk and paths."""
        return self.trunk + self.depth

    @cached_property
    def _sizes(self) -> list[int]:
        """Whole levels, as if no two paths agreed: how deep a tree goes must not depend on what was drawn."""
        depths = range(self.levels + 1)
        return [min(depth, self.trunk) + self.paths * max(0, depth - self.trunk) for depth in depths]

    @property
    def sizes(self) -> Sequence[int]:
        """Whole levels."""
        return self._sizes

    @property
    def max_nodes(self) -> int:
        """Where no two paths agree."""
        return self.trunk + self.paths * self.depth

    def depth_of(self, nodes: int) -> int:
        """As many levels as have so many nodes."""
        return sum(0 < size <= nodes for size in self.sizes)

    def staged(self, nodes: int) -> int:
        """Every node at its column."""
        return nodes

    def within_depth(self, deepest: int) -> Paths:
        """Shorter paths, then a shorter trunk."""
        depth = max(1, min(self.depth, deepest - self.trunk))
        return Paths(self.paths, depth, min(self.trunk, deepest - depth))

    def grow(self, model: FrontierModel, view: BatchView, nodes: int, rng: Randomness) -> Proposal:
        """One token of every path at a time."""
        if not nodes:
            return Proposal.bare(view)
        growing = _Growing(self, view, nodes)
        logits, state = model.begin(view)
        for level in range(self.depth_of(nodes)):
            if level:
                logits, state = model.extend(view, growing.front(level), state)
            frontier = Frontier(*growing.ends(level), logits, view, rng, model.vocabulary(level))
            growing.draw(level, frontier)
        return growing.proposal()


# What follows from sizes alone is made once, and stays: captured steps read it where it was when they were captured.
@cache
def _numbers(size: int, first: int, end: int, device: torch.device) -> Tensor:
    """`first` … `end` - 1 for every sequence. [B, n]."""
    return torch.arange(first, end, device=device).expand(size, -1).contiguous()


@cache
def _bits(size: int, first: int, end: int, words: int, device: torch.device) -> Tensor:
    """Their own bits in ancestor sets. [B, n, W]."""
    return own_bits(_numbers(size, first, end, device), words)


@cache
def _level_numbers(grower: Paths, size: int, nodes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The level of every node, and the last node of that level. 2 x [B, 1 + nodes]."""
    ends = grower.sizes[: grower.depth_of(nodes) + 1]
    levels = [0] + [level for level in range(1, len(ends)) for _ in range(ends[level] - ends[level - 1])]
    depth = torch.tensor(levels, device=device).expand(size, -1).contiguous()
    return depth, torch.tensor(ends, device=device)[depth]


class _Growing:
    """Trees of paths while they grow; nodes are numbered level by level, path by path."""

    def __init__(self, grower: Paths, view: BatchView, nodes: int) -> None:
        self.grower, self.view, self.nodes = grower, view, nodes
        self.size, self.device, self.words = view.size, view.roots.device, num_words(nodes + 1)
        root = self._columns(0, 1)
        self.tokens, self.parents, self.same, self.q_rows = [view.roots[:, None]], [root - 1], [root], [root - 1]
        self.bits = [self._own_bits(0)]
        self.trees = _numbers(1, 0, self.size, self.device).t()  # [B, 1]
        self.tries: list[Tensor] = []
        self.laws: list[Tensor] = []
        self.place = root  # [B, paths] which of the nodes drawn last each path stands at
        self.fronts: tuple[Front, ...] = ()

    def _columns(self, first: int, end: int) -> Tensor:
        return _numbers(self.size, first, end, self.device)

    def _level(self, level: int) -> Tensor:
        """The nodes of a level, merged ones too. [B, k]."""
        return self._columns(self.grower.sizes[level - 1] + 1 if level else 0, self.grower.sizes[level] + 1)

    def _own_bits(self, level: int) -> Tensor:
        """Of the nodes of a level in ancestor sets. [B, k, W]."""
        first = self.grower.sizes[level - 1] + 1 if level else 0
        return _bits(self.size, first, self.grower.sizes[level] + 1, self.words, self.device)

    def ends(self, level: int) -> tuple[Tensor, Tensor]:
        """The nodes of a level, and their depth. 2 x [B, k]."""
        columns = self._level(level)
        return columns, torch.full_like(columns, level)

    def front(self, level: int) -> Front:
        """The nodes drawn last, for a network."""
        columns, depth = self.ends(level)
        places = Places(columns - 1, depth - 1)
        if not self.grower.law.chain:
            bits = self.bits[-1].flatten(0, 1)
            places = Places(columns - 1, depth - 1, bits, level + 1, self.grower.sizes[level])
        above = self.parents[-1] - self._level(level - 1)[:, :1]
        front = Front(self.tokens[-1], depth, level, above, None, self.fronts, places)
        self.fronts += (front,)
        return front

    def draw(self, level: int, frontier: Frontier) -> None:
        """The next token of every path."""
        above, columns = frontier.columns, self._level(level + 1)
        place = self.place.expand(-1, columns.shape[1])
        parents = above.gather(1, place)
        law = self.trees * above.shape[1] + place
        q = frontier.q.flatten(0, 1)
        tokens = frontier.pick_for_each(q.index_select(0, law.view(-1)).view(*law.shape, -1), parents)
        agrees = (parents[:, :, None] == parents[:, None, :]) & (tokens[:, :, None] == tokens[:, None, :])
        first = agrees.long().argmax(-1)  # [B, paths] the earliest path with the same parent and token
        same = columns.gather(1, first)
        self.tries.append(self._tries(above, parents, same))
        self.bits.append(
            self.bits[-1].gather(1, place[..., None].expand(-1, -1, self.words)) | self._own_bits(level + 1)
        )
        self.q_rows.append(law + sum(len(rows) for rows in self.laws))
        self.laws.append(q)
        for parts, new in ((self.tokens, tokens), (self.parents, parents), (self.same, same)):
            parts.append(new)
        self.place = first

    def _tries(self, above: Tensor, parents: Tensor, same: Tensor) -> Tensor:
        """The nodes that were drawn behind each node of a level, as often as they were drawn. [B, k, paths]."""
        behind = torch.where(parents[:, None, :] == above[:, :, None], same[:, None, :], -1)
        packed = packed_left(behind.flatten(0, 1)).view_as(behind)
        return torch.nn.functional.pad(packed, (0, self.grower.paths - packed.shape[2]), value=-1)

    def proposal(self) -> Proposal:
        """The trees; merged nodes are absent, and so are levels for which a sequence has no room."""
        view, local = self.view, self._columns(0, 1 + self.nodes)
        depth, level_ends = _level_numbers(self.grower, self.size, self.nodes, self.device)
        absent = torch.cat(self.same, 1) != local
        if view.max_nodes is not None and view.max_depth is not None:
            absent = absent | (level_ends > view.max_nodes[:, None]) | (depth > view.max_depth[:, None])
        drawn = torch.where(local == 0, int(Draw.POINT), int(Draw.IID)).view(-1)
        tokens, rows = (torch.cat(parts, 1).view(-1) for parts in (self.tokens, self.q_rows))
        tree = TokenTree(tokens, self._shape(local, depth), drawn, rows, torch.cat(self.laws))
        return Proposal(tree.without(absent.view(-1)))

    def _shape(self, local: Tensor, depth: Tensor) -> TreeShape:
        rows = local.shape[1]
        number = _numbers(1, 0, self.size + 1, self.device)[0]
        start = self.trees * rows
        leaves = torch.full_like(self._level(self.grower.depth_of(self.nodes)), -1)
        tries = torch.cat([*self.tries, leaves[..., None].expand(-1, -1, self.grower.paths)], 1)
        parents = torch.cat(self.parents, 1)
        return TreeShape(
            parents=torch.where(parents < 0, -1, parents + start).view(-1),
            offsets=number * rows,
            owner=self.trees.expand_as(local).reshape(-1),
            local=local.view(-1),
            depth=depth.view(-1),
            ancestors=torch.cat(self.bits, 1).flatten(0, 1),
            tries=torch.where(tries < 0, -1, tries + start[..., None]).flatten(0, 1),
            max_depth=len(self.tokens) - 1,
            widest=rows,
            repeats=self.grower.paths > 1,
        )
