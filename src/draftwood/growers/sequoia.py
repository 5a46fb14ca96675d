"""Sequoia's tree: the fixed shape that gains most, by how often the first, the second, … child is accepted."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from draftwood.growers.fixed import StaticShape
from draftwood.growers.pickers import ChildPicker, WithoutReplacement

MOST = 512  # nodes that a shape is searched for


def sequoia(nodes: int, depth: int, rates: Sequence[int], picker: ChildPicker | None = None) -> StaticShape:
    """The best shape of so many nodes, no deeper than `depth`. `rates`: of a hundred accepted nodes, how many have
    their first child accepted, their second, … (the same at any depth).
    """
    shares = tuple(rate / 100 for rate in rates)
    if not shares or min(shares) <= 0 or sum(shares) > 1 + 1e-9:
        raise ValueError("rates are percentages of accepted children, above 0 and 100 in all, such as 60x15x8")
    if not 1 <= nodes <= MOST or depth < 1:
        raise ValueError(f"a tree has 1 to {MOST} nodes and at least one level")
    return StaticShape(best_shape(nodes, depth, shares), picker or WithoutReplacement())


@cache
def best_shape(nodes: int, depth: int, shares: tuple[float, ...]) -> tuple[tuple[int, ...], ...]:
    """The nodes of it, by the ranks on the way to each."""
    table = _Table(nodes, depth, shares)
    if not torch.isfinite(table.gain[nodes]):
        raise ValueError(f"no tree of {nodes} nodes has {depth} levels and {len(shares)} children a node at most")
    return tuple(sorted(table.nodes_of(nodes, 0, depth), key=lambda node: (len(node), node)))


class _Table:
    """`gain[d][k][n]`: what n nodes give below a node, if they are its children from rank k on and these have subtrees
    no deeper than d levels in all; `first`: how many of them the best choice gives to the subtree of child k.
    """

    def __init__(self, nodes: int, depth: int, shares: tuple[float, ...]) -> None:
        self.shares = shares
        none = torch.full((1 + nodes,), -torch.inf, dtype=torch.float64)  # what n nodes give where none have room
        none[0] = 0.0
        self.first: list[list[Tensor]] = [[]]
        below = none  # what n nodes give below the child, by n
        for _ in range(depth):
            behind, lines = none, []  # there is no child beyond the last rank
            for share in reversed(shares):
                own, first = none.clone(), torch.zeros(1 + nodes, dtype=torch.int64)
                for count in range(1, 1 + nodes):
                    with_child = share * (1 + below[:count]) + behind[:count].flip(0)  # the child and 0, 1, … below it
                    best = with_child.max(0)
                    own[count], first[count] = best.values, best.indices + 1
                behind = own
                lines.append(first)
            below = behind
            self.first.append(lines[::-1])
            self.gain = below

    def nodes_of(self, count: int, rank: int, depth: int) -> list[tuple[int, ...]]:
        """Of `count` nodes below one whose children are taken from `rank` on."""
        if count == 0:
            return []
        size = int(self.first[depth][rank][count])
        inside = [(rank, *node) for node in self.nodes_of(size - 1, 0, depth - 1)] if depth > 1 else []
        return [(rank,), *inside, *self.nodes_of(count - size, rank + 1, depth)]
