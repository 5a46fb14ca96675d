"""Drafters that draft from what the host knows, without a network: their trees are made there, node by node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from draftwood.drafting import Proposal, Silent
from draftwood.protocols import BatchView, HostView, Randomness
from draftwood.shape import TreeShape, follow, num_words
from draftwood.tree import POINT_TREE, DraftLaw, TokenTree

HostTree = tuple[list[int], list[int]]  # tokens, the root's first, and parents inside the tree


@dataclass
class PointTree:
    """One sequence's tree of chosen tokens, within its limits."""

    root: int
    max_nodes: int
    max_depth: int
    tokens: list[int] = field(init=False)
    parents: list[int] = field(init=False)
    depths: list[int] = field(init=False)
    _children: dict[tuple[int, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tokens, self.parents, self.depths = [self.root], [-1], [0]

    def add(self, parent: int, token: int) -> int | None:
        """The child of `parent` with `token`, new or known; None where there is no room for it."""
        known = self._children.get((parent, token))
        if known is not None:
            return known
        if len(self.tokens) > self.max_nodes or self.depths[parent] >= self.max_depth:
            return None
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
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
    waits = True

    def trees(self, view: HostView, nodes: int) -> list[HostTree]:
        """A tree of at most `nodes` draft nodes for every sequence, within the limits that the view gives it."""
        raise NotImplementedError

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
            self._prepared[size, nodes] = self.trees(view, nodes)
        finally:
            frame = self._frames.get((size, nodes))
            if frame is not None:
                frame.fill(self._prepared.get((size, nodes), []))

    def propose(self, view: BatchView, nodes: int, rng: Randomness) -> Proposal:
        """What was prepared for a step of this size; bare roots where nothing was."""
        key = view.size, nodes
        trees = self._prepared.pop(key, [])  # roots of any other step would be wrong
        if view.may_look or nodes == 0:
            return Proposal(TokenTree.of_points(trees)) if nodes and trees else Proposal.bare(view)
        frame = self._frames.get(key)
        if frame is None:  # a graph is about to be captured, or nothing is
            width = 1 if self.law.chain else nodes
            frame = self._frames[key] = _Frame(*key, width, view.roots.device)
            frame.fill(trees)
        return Proposal(frame.behind(view.roots))

    # Made when they are first used: classes derived from this one need not call its constructor.
    @cached_property
    def _prepared(self) -> dict[tuple[int, int], list[HostTree]]:
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
        self._widths = [1, 1, 1, words, width]
        every = torch.arange(count)
        owner, local = every // self._rows, every % self._rows
        self._empty = torch.full((count * sum(self._widths),), -1)
        _, depth, parents, ancestors, _ = self._parts(self._empty)
        depth[:, 0], ancestors[:] = local.clamp(max=1), 0
        parents[:, 0] = torch.where(local > 0, every, -1)  # an absent node is its own parent
        self._packed = self._empty.to(device, copy=True)
        tokens, depth, parents, ancestors, tries = self._parts(self._packed)
        self._tokens, self._chosen = tokens[:, 0], TokenTree.chosen(every.to(device), TreeShape(
            parents[:, 0], torch.arange(0, count + 1, self._rows, device=device), owner.to(device), local.to(device),
            depth[:, 0], ancestors, tries, max_depth=nodes, widest=self._rows,
        ))  # fmt: skip

    def _parts(self, packed: Tensor) -> list[Tensor]:
        """Tokens, depths, parents, ancestors and tries of all nodes, as views. Each [M, columns]."""
        count = self._size * self._rows
        parts = packed.split([count * width for width in self._widths])
        return [part.view(count, width) for part, width in zip(parts, self._widths, strict=True)]

    def fill(self, trees: list[HostTree]) -> None:
        """Trees of the first sequences; bare roots for the others."""
        packed = self._empty.clone()
        if trees:
            tokens, shape = TreeShape.of_lists(trees, None)
            at = shape.owner * self._rows + shape.local
            columns = tokens, shape.depth, follow(at, shape.parents), shape.ancestors, follow(at, shape.tries)
            for part, values in zip(self._parts(packed), columns, strict=True):
                values = values.view(len(at), -1)
                part[at, : values.shape[1]] = values
        if self._packed.is_cuda:
            packed = packed.pin_memory()
        self._packed.copy_(packed, non_blocking=True)

    def behind(self, roots: Tensor) -> TokenTree:
        """The trees that lie here when this runs, behind `roots` [B]."""
        tokens = torch.cat([roots[:, None], self._tokens.view(self._size, self._rows)[:, 1:]], 1).view(-1)
        # A new shape: what is found out about it holds for one step only.
        return replace(self._chosen, tokens=tokens, shape=replace(self._chosen.shape))
