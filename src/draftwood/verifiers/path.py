"""The way down a batch of trees that top-down laws share: where each sequence stands, and where it came from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftwood.tree import TokenTree, Verdict


def keep_chosen(tree: TokenTree, choices: Tensor) -> Verdict:
    """Down every tree along the tokens chosen after its nodes [M]; on CUDA without waiting for the host."""
    if choices.is_cuda:
        from draftwood.ops.cuda.verdict import follow as launch

        return launch(tree, choices)
    return follow(tree, choices.tolist())


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
    """One walker a tree. Sequences that leave their tree stay where they are."""

    def __init__(self, tree: TokenTree) -> None:
        self.tree = tree
        self.node = tree.offsets[:-1].clone()  # [B] where each stands
        self.length = torch.zeros_like(self.node)  # [B] nodes accepted
        self.active = torch.ones_like(self.node, dtype=torch.bool)  # [B] still on the way
        self.path = torch.full((tree.num_trees, tree.max_depth + 1), -1, device=self.node.device)
        self.path[:, 0] = self.node

    def child_with(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """The first child of walkers `rows` that holds `tokens`, or -1. [k], [k] -> [k]."""
        tries = self.tree.tries[self.node[rows]]
        hit = (tries >= 0) & (self.tree.tokens[tries.clamp(min=0)] == tokens[:, None])
        first = tries.gather(1, hit.long().argmax(1, keepdim=True))[:, 0]
        return torch.where(hit.any(1), first, -1)

    def descend(self, rows: Tensor, child: Tensor) -> bool:
        """Walkers `rows` step to `child`; those with -1 stop for good. Whether anybody still walks."""
        moved = child >= 0
        self.active[rows] = moved
        rows, child = rows[moved], child[moved]
        self.node[rows] = child
        self.length[rows] += 1
        self.path[rows, self.length[rows]] = child
        return rows.numel() > 0

    def verdict(self, bonus: Tensor) -> Verdict:
        """Everything walked so far, and the target's next token."""
        return Verdict(self.path, self.length, bonus)
