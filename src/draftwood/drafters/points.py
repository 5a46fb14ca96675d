"""Drafters that guess from what they know, without a network: their trees are built on the host, node by node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from draftwood.cache.resident import ResidentDrafter
from draftwood.drafters.hosted import ResidentHosted
from draftwood.model.runner import ModelRunner
from draftwood.protocols import BatchView, Budget, Features, Randomness, Span
from draftwood.tree import POINT_TREE, DraftLaw, TokenTree, Verdict


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


class PointDrafter:
    """Base of drafters that fill a `PointTree` for one sequence at a time; they override `fill`."""

    law: DraftLaw = POINT_TREE
    max_nodes: int
    needs: frozenset[int] = frozenset()

    def fill(self, tree: PointTree, seq_id: int, tokens: Sequence[int]) -> None:
        """Add guesses for what follows `tokens`."""
        raise NotImplementedError

    def propose(self, view: BatchView, budget: Budget, rng: Randomness) -> TokenTree:
        """A tree of chosen tokens for each sequence."""
        rooms = view.max_nodes.clamp(max=min(budget.max_nodes, self.max_nodes)).tolist()
        depths = view.max_depth.tolist()
        trees = []
        for seq_id, tokens, room, depth in zip(view.seq_ids, view.tokens, rooms, depths, strict=True):
            tree = PointTree(tokens[-1], room, depth)
            if room > 0 and depth > 0:
                self.fill(tree, seq_id, tokens)
            trees.append((tree.tokens, tree.parents))
        return TokenTree.of_points(trees, view.lengths.device)

    def resident(self, target: ModelRunner) -> ResidentDrafter | None:
        """Its trees in rounds on the device."""
        return ResidentHosted(self, target.device)

    def read(self, spans: Sequence[Span], features: Features) -> None:
        """It needs nothing."""

    def observe(self, view: BatchView, tree: TokenTree, verdict: Verdict, features: Features) -> None:
        """Nothing to learn: committed tokens come with the next view."""

    def release(self, seq_id: int) -> None:
        """Nothing to forget."""
