"""Drafters that draft from what the host knows, without a network: their trees are made there, node by node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from draftwood.drafting import Proposal, Silent
from draftwood.protocols import BatchView, HostView, Randomness
from draftwood.shape import TreeShape, follow, num_words
from draftwood.tree import POINT_TREE, DraftLaw, TokenTree

HostTree = tuple[list[int], list[int]]  # tokens, the root's first, and parents inside the tree


@dataclass(frozen=True)
class HostTrees:
    """The trees of a step, one for every sequence."""

    trees: list[HostTree]
    chances: list[list[float]] | None = None  # that each node is accepted, 1 at roots, less along a path; None: unknown

    @classmethod
    def of(cls, trees: Sequence[PointTree]) -> HostTrees:
        """Trees whose nodes came with their chances."""
        return cls([(tree.tokens, tree.parents) for tree in trees], [tree.chances for tree in trees])

    @property
    def flat(self) -> list[float]:
        """The chances of all nodes."""
        return [chance for own in self.chances or () for chance in own]

    def proposal(self) -> Proposal:
        """Trees of the sizes they have, on the host."""
        survival = None if self.chances is None else torch.tensor(self.flat, dtype=torch.float64)
        return Proposal(TokenTree.of_points(self.trees), survival=survival)

    def likely(self, least: float) -> HostTrees:
        """Without nodes that are less likely than `least`."""
        if self.chances is None or least <= 0:
            return self
        parts = [_likely(*tree, own, least) for tree, own in zip(self.trees, self.chances, strict=True)]
        return HostTrees([part[:2] for part in parts], [part[2] for part in parts])


@runtime_checkable
class ListsTrees(Protocol):
    """A drafter whose trees are lists of the host, where that may look, before they are tensors."""

    def listed(self, view: BatchView, nodes: int) -> HostTrees:
        """The trees of a step, as `propose` would propose them; none: bare roots."""
        ...


def _likely(
    tokens: list[int], parents: list[int], chances: list[float], least: float
) -> tuple[list[int], list[int], list[float]]:
    number: dict[int, int] = {-1: -1}
    for node, (parent, chance) in enumerate(zip(parents, chances, strict=True)):
        if node == 0 or (chance >= least and parent in number):
            number[node] = len(number) - 1
    kept = [node for node in number if node >= 0]
    return [tokens[n] for n in kept], [number[parents[n]] for n in kept], [chances[n] for n in kept]


@dataclass
class PointTree:
    """One sequence's tree of chosen tokens, within its limits."""

    root: int
    max_nodes: int
    max_depth: int
    tokens: list[int] = field(init=False)
    parents: list[int] = field(init=False)
    depths: list[int] = field(init=False)
    chances: list[float] = field(init=False)  # that each node is accepted, where its drafter knows
    _children: dict[tuple[int, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tokens, self.parents, self.depths, self.chances = [self.root], [-1], [0], [1.0]

    def add(self, parent: int, token: int, chance: float = 1.0) -> int | None:
        """The child of `parent` with `token`, new or known; None where there is no room for it."""
        known = self._children.get((parent, token))
        if known is not None:
            return known
        if len(self.tokens) > self.max_nodes or self.depths[parent] >= self.max_depth:
            return None
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.chances.append(chance)
        self._children[(parent, token)] = len(self.tokens) - 1
        return len(self.tokens) - 1

    def add_path(self, tokens: Sequence[int]) -> None:
        """Follow `tokens` from the root, adding what is missing, as far as there is room."""
        node: int | None = 0
        for token in tokens:
            node = self.add(node, token)
            if node is None:
                return


class HostDrafter(Silent):
    """Base of drafters whose trees the host makes, of chosen tokens. A launch waits for no others.

    Where the host may look, a step takes the trees as they are. A captured step reads them from a frame: padded to one
    size, in memory that stays where it is, and that every launch fills before.
    """

    law: DraftLaw = POINT_TREE
    max_nodes: int
    surplus = 5  # made on the host: rows of the frame cost nothing until they are scored
    waits = True
    scores = False  # whether its trees come with chances

    def trees(self, view: HostView, nodes: int) -> list[HostTree]:
        """A tree of at most `nodes` draft nodes for every sequence, within the limits that the view gives it."""
        raise NotImplementedError

    def scored(self, view: HostView, nodes: int) -> HostTrees:
        """The trees, with the chance of every node where it is known. Drafters that `scores` override it."""
        return HostTrees(self.trees(view, nodes))

    @property
    def sizes(self) -> Sequence[int]:
        """Any."""
        return range(self.max_nodes + 1)

    def depth(self, nodes: int) -> int:
        """Any tree may be a chain."""
        return nodes

    def prepare(self, view: HostView, size: int, nodes: int) -> None:
        """Make the trees of a step, and bring them to where it reads them. If that fails, bare roots lie there."""
        self._prepared.clear()
        try:
            self._prepared[size, nodes] = self.scored(view, nodes)
        finally:
            frame = self._frames.get((size, nodes))
            if frame is not None:
                frame.fill(self._prepared.get((size, nodes), HostTrees([])))

    def propose(self, view: BatchView, nodes: int, rng: Randomness) -> Proposal:
        """What was prepared for a step of this size; bare roots where nothing was."""
        if view.may_look or nodes == 0:
            made = self.listed(view, nodes)
            return made.proposal() if nodes and made.trees else Proposal.bare(view)
        key = view.size, nodes
        made = self._prepared.pop(key, HostTrees([]))  # roots of any other step would be wrong
        frame = self._frames.get(key)
        if frame is None:  # a graph is about to be captured, or nothing is
            width = 1 if self.law.chain else nodes
            frame = self._frames[key] = _Frame(*key, width, view.roots.device)
            frame.fill(made)
        tree = frame.behind(view.roots)
        if not self.scores:
            return Proposal(tree)
        least = view.min_accept_prob
        return Proposal(tree.without(frame.chances < least) if least > 0 else tree, survival=frame.chances)

    def listed(self, view: BatchView, nodes: int) -> HostTrees:
        """What was prepared for a step of this size, without unlikely nodes."""
        return self._prepared.pop((view.size, nodes), HostTrees([])).likely(view.min_accept_prob)

    # Made when they are first used: classes derived from this one need not call its constructor.
    @cached_property
    def _prepared(self) -> dict[tuple[int, int], HostTrees]:
        """The trees of the step that was prepared last, by its number of sequences and nodes."""
        return {}

    @cached_property
    def _frames(self) -> dict[tuple[int, int], _Frame]:
        return {}


class PointDrafter(HostDrafter):
    """Base of drafters that fill a `PointTree` for one sequence at a time; they override `fill`."""

    def fill(self, tree: PointTree, seq_id: int, tokens: Sequence[int]) -> None:
        """Add drafts of what follows `tokens`."""
        raise NotImplementedError

    def trees(self, view: HostView, nodes: int) -> list[HostTree]:
        """Filled one by one; bare roots where there is no room."""
        trees = []
        for seq_id, tokens, room, depth in zip(view.seq_ids, view.tokens, view.max_nodes, view.max_depth, strict=True):
            tree = PointTree(tokens[-1], min(room, nodes), depth)
            if tree.max_nodes > 0 and depth > 0:
                self.fill(tree, seq_id, tokens)
            trees.append((tree.tokens, tree.parents))
        return trees


class _Frame:
    """Trees of one size in memory of the device: all that differs from step to step in one piece, copied at once."""

    def __init__(self, size: int, nodes: int, width: int, device: torch.device) -> None:
        """Room for `size` trees of `nodes` draft nodes, none of which has more than `width` children."""
        self._size, self._rows = size, nodes + 1
        count, words = size * self._rows, num_words(self._rows)
        self._widths = [1, 1, 1, words, width, 1]
        every = torch.arange(count)
        owner, local = every // self._rows, every % self._rows
        self._empty = torch.full((count * sum(self._widths),), -1)
        _, depth, parents, ancestors, _, chances = self._parts(self._empty)
        depth[:, 0], ancestors[:] = local.clamp(max=1), 0
        parents[:, 0] = torch.where(local > 0, every, -1)  # an absent node is its own parent
        chances.view(torch.float64)[:, 0] = (local == 0).double()
        self._packed = self._empty.to(device, copy=True)
        tokens, depth, parents, ancestors, tries, chances = self._parts(self._packed)
        self.chances = chances.view(torch.float64)[:, 0]  # [M]
        self._tokens, self._chosen = tokens[:, 0], TokenTree.chosen(every.to(device), TreeShape(
            parents[:, 0], torch.arange(0, count + 1, self._rows, device=device), owner.to(device), local.to(device),
            depth[:, 0], ancestors, tries, max_depth=nodes, widest=self._rows,
        ))  # fmt: skip

    def _parts(self, packed: Tensor) -> list[Tensor]:
        """Tokens, depths, parents, ancestors, tries and chances of all nodes, as views. Each [M, columns]; the bits of
        a chance are those of a float64.
        """
        count = self._size * self._rows
        parts = packed.split([count * width for width in self._widths])
        return [part.view(count, width) for part, width in zip(parts, self._widths, strict=True)]

    def fill(self, made: HostTrees) -> None:
        """Trees of the first sequences; bare roots for the others."""
        packed = self._empty.clone()
        if made.trees:
            tokens, shape = TreeShape.of_lists(made.trees, None)
            at = shape.owner * self._rows + shape.local
            columns = tokens, shape.depth, follow(at, shape.parents), shape.ancestors, follow(at, shape.tries)
            for part, values in zip(self._parts(packed)[:-1], columns, strict=True):
                values = values.view(len(at), -1)
                part[at, : values.shape[1]] = values
            if made.chances is not None:
                self._parts(packed)[-1].view(torch.float64)[at, 0] = torch.tensor(made.flat, dtype=torch.float64)
        if self._packed.is_cuda:
            packed = packed.pin_memory()
        self._packed.copy_(packed, non_blocking=True)

    def behind(self, roots: Tensor) -> TokenTree:
        """The trees that lie here when this runs, behind `roots` [B]."""
        tokens = torch.cat([roots[:, None], self._tokens.view(self._size, self._rows)[:, 1:]], 1).view(-1)
        # A new shape: what is found out about it holds for one step only.
        return replace(self._chosen, tokens=tokens, shape=replace(self._chosen.shape))
