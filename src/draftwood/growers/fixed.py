"""Trees whose shape is fixed before anything is known: level by level, or as a list of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from draftwood.cache.kv import Places
from draftwood.drafting import Front, FrontierModel, Proposal
from draftwood.growers.pickers import Best, ChildPicker, Children, Frontier
from draftwood.protocols import BatchView, Randomness
from draftwood.shape import TreeShape
from draftwood.tree import DraftLaw, TokenTree

MAX_NODES = 2048


@dataclass(frozen=True)
class _LevelPlan:
    """How one level of a fixed tree comes about: which nodes get children, and which of these are in the tree.

    Children of k nodes are numbered rank by rank: the first of every node, then the second of every node, …
    """

    columns: Tensor  # [B, k] the nodes that get children
    depth: Tensor  # [B, k]
    parents: Tensor  # [B, k] where in the level above their parents stand
    sources: Tensor | None  # [B, k] which of the nodes added last these are; None: all of them, in order
    places: Places | None  # where a network with a cache of its own keeps them; None: at the roots
    width: int  # children of each
    taken: Tensor | None  # [n] which children are nodes of the tree; None: all


@dataclass(frozen=True)
class _Chosen:
    """How the nodes of a fixed tree were chosen: the same in every step."""

    draw: Tensor  # [M]
    q_row: Tensor  # [M]


class _FixedTree:
    """A fixed tree for a batch: everything that is known of it before a token is."""

    def __init__(self, levels: list[list[tuple[int, int]]], size: int, device: torch.device) -> None:
        """`levels`: (parent's column, rank among its siblings) of every node, by column."""
        every = [(-1, 0), *(node for level in levels for node in level)]
        one = TreeShape.of_lists([([0] * len(every), [parent for parent, _ in every])], None)[1]
        self.shape = one.tiled(size, device).known()
        self.levels = self._level_plans(levels, one, size, device)
        self.chosen: _Chosen | None = None  # known once tokens have been chosen

    def _level_plans(
        self, levels: list[list[tuple[int, int]]], one: TreeShape, size: int, device: torch.device
    ) -> list[_LevelPlan]:
        def everywhere(numbers: list[int]) -> Tensor:
            return torch.tensor(numbers, device=device).expand(size, -1).contiguous()

        plans, before, first = [], [0], 0  # columns whose children came last, the first column of the level above
        for number, level in enumerate(levels):
            inner = sorted({parent for parent, _ in level})
            width = 1 + max(rank for _, rank in level)
            children = [rank * len(inner) + inner.index(parent) for parent, rank in level]
            above = [before.index(int(one.parents[column])) for column in inner] if number else [0]
            sources = [column - first for column in inner]
            every_source = number == 0 or sources == list(range(len(levels[number - 1])))
            every_child = children == list(range(width * len(inner)))
            plans.append(
                _LevelPlan(
                    columns=everywhere(inner),
                    depth=everywhere(one.depth[inner].tolist()),
                    parents=everywhere(above),
                    sources=None if every_source else everywhere(sources),
                    places=self._places(one, inner, size, device) if number else None,
                    width=width,
                    taken=None if every_child else torch.tensor(children, device=device),
                )
            )
            before, first = inner, first + (len(levels[number - 1]) if number else 1)
        return plans

    def _places(self, one: TreeShape, columns: list[int], size: int, device: torch.device) -> Places:
        index = torch.tensor(columns, device=device).expand(size, -1) - 1
        position = one.depth[columns].to(device).expand(size, -1) - 1
        if one.tries.shape[1] == 1:
            return Places(index.contiguous(), position.contiguous())  # a chain is a piece of text
        bits = one.ancestors[columns].to(device).repeat(size, 1)
        deepest = int(one.depth[columns].max())
        return Places(index.contiguous(), position.contiguous(), bits, deepest + 1, max(columns))

    def grow(self, picker: ChildPicker, model: FrontierModel, view: BatchView, rng: Randomness) -> Proposal:
        """Choose or draw the tokens, level by level."""
        tokens, missing, picked = [view.roots[:, None]], [], []
        fronts: tuple[Front, ...] = ()
        logits, state = model.begin(view)
        for number, level in enumerate(self.levels):
            if level.places is not None:
                inner = tokens[-1] if level.sources is None else tokens[-1].gather(1, level.sources)
                front = Front(inner.clamp(min=0), level.depth, number, level.parents, None, fronts, level.places)
                logits, state = model.extend(view, front, state)
                fronts += (front,)
            frontier = Frontier(level.columns, level.depth, logits, view, rng, model.vocabulary(number))
            children = list(picker.children(frontier, level.width))
            picked.append(children)
            tokens.append(_taken([child.tokens for child in children], level))
            missing.append(_missing(children, level))
        if self.chosen is None:
            self.chosen = self._how_chosen(picked)
        laws = [child.q.flatten(0, 1) for children in picked for child in _with_laws(children) if child.q is not None]
        every = torch.cat(tokens, 1).view(-1)
        tree = TokenTree(every, self.shape, self.chosen.draw, self.chosen.q_row, torch.cat(laws) if laws else None)
        if any(part is not None for part in missing):
            parts = [torch.zeros_like(tokens[0], dtype=torch.bool)]
            parts += [
                torch.zeros_like(own, dtype=torch.bool) if part is None else part
                for own, part in zip(tokens[1:], missing, strict=True)
            ]
            tree = tree.without(torch.cat(parts, 1).view(-1))
        return Proposal(tree).limited(view)

    def _how_chosen(self, picked: list[list[Children]]) -> _Chosen:
        """The draw and the row of q of every node; laws lie one behind the other, as they were made."""
        size, device = self.shape.num_trees, self.shape.parents.device
        draws, rows = [torch.zeros(size, 1)], [torch.full((size, 1), -1)]
        start = 0
        for children, level in zip(picked, self.levels, strict=True):
            count = level.columns.shape[1]
            own = torch.arange(size * count).view(size, count)
            drawn, named = [], []
            law: Tensor | None = None
            for child in children:
                if child.q is not None and child.q is not law:
                    start, law = start + (0 if law is None else size * count), child.q
                drawn.append(torch.full((size, count), int(child.draw)))
                named.append(torch.full((size, count), -1) if child.q is None else own + start)
            start += 0 if law is None else size * count
            draws.append(_taken(drawn, level, short=0))
            rows.append(_taken(named, level))
        both = (torch.cat(parts, 1).view(-1).long().to(device) for parts in (draws, rows))
        return _Chosen(*both)


def _with_laws(children: list[Children]) -> list[Children]:
    """The first child of each law."""
    return [child for i, child in enumerate(children) if i == 0 or child.q is not children[i - 1].q]


def _taken(parts: list[Tensor], level: _LevelPlan, short: int = -1) -> Tensor:
    """Something that all children have, of those that are in the tree; `short` where there are fewer children than
    asked for. width x [B, k] -> [B, n].
    """
    count = level.columns.shape[1]
    joined = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    lacking = level.width * count - joined.shape[1]
    if lacking:
        joined = torch.nn.functional.pad(joined, (0, lacking), value=short)
    return joined if level.taken is None else joined.index_select(1, level.taken.to(joined.device))


def _missing(children: list[Children], level: _LevelPlan) -> Tensor | None:
    """Which nodes could not be drawn; None where none can be missing. [B, n] bool."""
    if len(children) == level.width and all(child.exists is None for child in children):
        return None
    gone = [
        torch.zeros_like(child.tokens, dtype=torch.bool) if child.exists is None else ~child.exists
        for child in children
    ]
    return _taken(gone, level, short=True)


@dataclass(frozen=True)
class _Fixed:
    """What trees of a fixed shape have in common; subclasses say which nodes there are, and how they are chosen."""

    _trees: dict[tuple[int, int, torch.device], _FixedTree] = field(
        default_factory=dict, init=False, repr=False, compare=False, kw_only=True
    )
    surplus = 1

    @property
    def chosen_by(self) -> ChildPicker:
        """How children are chosen."""
        raise NotImplementedError

    def plan(self) -> list[list[tuple[int, int]]]:
        """(parent's column, rank among its siblings) of every node, level by level."""
        raise NotImplementedError

    @cached_property
    def _sizes(self) -> list[int]:
        """Whole levels."""
        sizes = [0]
        for level in self.plan():
            sizes.append(sizes[-1] + len(level))
        return sizes

    @property
    def sizes(self) -> Sequence[int]:
        """Whole levels."""
        return self._sizes

    @property
    def max_nodes(self) -> int:
        """All nodes of all levels."""
        return self.sizes[-1]

    @property
    def levels(self) -> int:
        """How deep a tree is at most."""
        return len(self.sizes) - 1

    def depth_of(self, nodes: int) -> int:
        """As many levels as have so many nodes."""
        return sum(0 < size <= nodes for size in self.sizes)

    def staged(self, nodes: int) -> int:
        """Every node at its column."""
        return nodes

    def grow(self, model: FrontierModel, view: BatchView, nodes: int, rng: Randomness) -> Proposal:
        """Level by level."""
        if not nodes:
            return Proposal.bare(view)
        key = view.size, nodes, view.roots.device
        if key not in self._trees:
            self._trees[key] = _FixedTree(self.plan()[: self.sizes.index(nodes)], key[0], key[2])
        return self._trees[key].grow(self.chosen_by, model, view, rng)


@dataclass(frozen=True)
class Levels(_Fixed):
    """A fixed number of children at every node of a level: `widths[d]` at depth d; (1, 1, 1, 1) is a chain of four."""

    widths: tuple[int, ...]
    picker: ChildPicker

    def __post_init__(self) -> None:
        if not self.widths or min(self.widths) < 1:
            raise ValueError("a tree needs at least one level, and every level at least one child a node")
        total, level = 0, 1
        for width in self.widths:
            level *= width
            total += level
        if total > MAX_NODES:
            raise ValueError(f"a tree of {total} nodes is over the limit of {MAX_NODES}")

    @property
    def law(self) -> DraftLaw:
        """A chain where no node has two children."""
        return DraftLaw(self.picker.draws, chain=max(self.widths) == 1)

    @property
    def chosen_by(self) -> ChildPicker:
        """The picker."""
        return self.picker

    def plan(self) -> list[list[tuple[int, int]]]:
        """The first children of all nodes of the level above, then the second ones, …"""
        above, count, levels = [0], 1, []
        for width in self.widths:
            levels.append([(parent, rank) for rank in range(width) for parent in above])
            above = list(range(count, count + len(levels[-1])))
            count += len(levels[-1])
        return levels

    def within_depth(self, deepest: int) -> Levels:
        """Its first levels."""
        return Levels(self.widths[:deepest], self.picker)


@dataclass(frozen=True)
class StaticShape(_Fixed):
    """A fixed tree of ranks: node (0, 2) is the third child of the first one; by the `picker` the third likeliest token
    (Medusa, EAGLE-1), or the third drawn (Sequoia).
    """

    nodes: tuple[tuple[int, ...], ...]
    picker: ChildPicker = field(default_factory=Best)

    def __post_init__(self) -> None:
        known = set(self.nodes)
        if not known or len(known) != len(self.nodes) or len(known) > MAX_NODES:
            raise ValueError(f"a static shape has between 1 and {MAX_NODES} different nodes")
        for node in self.nodes:
            if not node or min(node) < 0 or (len(node) > 1 and node[:-1] not in known):
                raise ValueError(f"node {node} of the static shape has no parent in it, or a negative rank")

    @property
    def law(self) -> DraftLaw:
        """A chain where all are first children."""
        return DraftLaw(self.picker.draws, chain=all(rank == 0 for node in self.nodes for rank in node))

    @property
    def chosen_by(self) -> ChildPicker:
        """The picker."""
        return self.picker

    def plan(self) -> list[list[tuple[int, int]]]:
        """Siblings in falling order of likelihood."""
        columns: dict[tuple[int, ...], int] = {(): 0}
        levels = []
        for depth in range(1, 1 + max(map(len, self.nodes))):
            level = sorted(node for node in self.nodes if len(node) == depth)
            columns |= {node: len(columns) + i for i, node in enumerate(level)}
            levels.append([(columns[node[:-1]], node[-1]) for node in level])
        return levels

    def within_depth(self, deepest: int) -> StaticShape:
        """Its first levels."""
        return StaticShape(tuple(node for node in self.nodes if len(node) <= deepest), self.picker)


def chain(depth: int) -> Levels:
    """The likeliest token, `depth` times."""
    return Levels((1,) * depth, Best())
