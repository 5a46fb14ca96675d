"""The way down a batch of trees that top-down laws share: where each sequence stands, and where it came from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftwood.links import may_look
from draftwood.tree import TokenTree, Verdict


def keep_chosen(tree: TokenTree, choices: Tensor) -> Verdict:
    """Down every tree along the tokens chosen after its nodes [M]; on the host only where that may look at them."""
    if choices.is_cuda:
        from draftwood.ops.cuda.verdict import follow as launch

        return launch(tree, choices)
    if may_look(choices):
        return follow(tree, choices.tolist())
    walk = PathWalk(tree)
    for _ in range(tree.max_depth):
        walk.descend(walk.child_with(choices[walk.node]))
    return walk.verdict(choices[walk.node])


def follow(tree: TokenTree, choices: Sequence[int]) -> Verdict:
    """Down every tree along what was chosen after each of its nodes [M]; on the host, where small trees are quick."""
    tokens, parents, owner = tree.tokens.tolist(), tree.parents.tolist(), tree.owner.tolist()
    paths: list[list[int]] = [[] for _ in range(tree.num_trees)]
    for node, (token, parent, b) in enumerate(zip(tokens, parents, owner, strict=True)):
        # Parents come before children, so a node that continues its path is the first of its kind.
        if parent < 0 or (paths[b][-1] == parent and token == choices[parent]):
            paths[b].append(node)
    longest = tree.max_depth + 1
    ways = torch.tensor([path + [-1] * (longest - len(path)) for path in paths], device=tree.tokens.device)
    ends = torch.tensor([[len(path) - 1, choices[path[-1]]] for path in paths], device=tree.tokens.device)
    return Verdict(ways, ends[:, 0], ends[:, 1])


class PathWalk:
    """One walker a tree. Walkers that leave their tree stay where they are."""

    def __init__(self, tree: TokenTree) -> None:
        self.tree = tree
        self.node = tree.offsets[:-1]  # [B] where each stands
        self.active = torch.ones_like(self.node, dtype=torch.bool)  # [B] still on the way
        self._path = [self.node]

    @property
    def length(self) -> Tensor:
        """Nodes accepted. [B]."""
        return self.tree.depth[self.node]

    def child_with(self, tokens: Tensor) -> Tensor:
        """The first child of every walker that holds its one of `tokens`, or -1. [B] -> [B]."""
        tries = self.tree.tries[self.node]
        hit = (tries >= 0) & (self.tree.tokens[tries.clamp(min=0)] == tokens[:, None])
        first = tries.gather(1, hit.long().argmax(1, keepdim=True))[:, 0]
        return torch.where(hit.any(1), first, -1)

    def descend(self, child: Tensor) -> None:
        """Active walkers step to `child` [B]; those with -1 stop for good."""
        self.active = self.active & (child >= 0)
        self.node = torch.where(self.active, child, self.node)
        self._path.append(torch.where(self.active, child, -1))

    def verdict(self, bonus: Tensor) -> Verdict:
        """Everything walked so far, and the target's next token."""
        behind = torch.full_like(self.node, -1)
        path = (self._path + [behind] * self.tree.max_depth)[: self.tree.max_depth + 1]
        return Verdict(torch.stack(path, 1), self.length, bonus)
