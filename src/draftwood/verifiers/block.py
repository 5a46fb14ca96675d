"""`block`: block verification, the optimal lossless law for one draft path (Sun et al., 2024).

With w_0 = 1 and w_i = min(1, w_{i-1} p(x_i) / q(x_i)), the block may end after any of its tokens: position i is taken
with probability h_i = S_i / (S_i + 1 - w_i), S_i the sum of the residual (w_i p - q)+, and the *last* position taken
counts: a rejection in the middle does not end the block. The token after it comes from that residual.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftwood.protocols import BatchView, Randomness
from draftwood.rng import Purpose, derive
from draftwood.tree import DraftLaw, TokenTree, Verdict


class Block:
    """Verify a whole chain at once."""

    name = "block"
    lossless = True

    def refuses(self, law: DraftLaw) -> str | None:
        """Chains only: the law of one path."""
        if law.chain:
            return None
        return "block verification is made for one path, and this drafter proposes trees; use a chain or the law 'walk'"

    def verify(self, tree: TokenTree, p: Tensor, view: BatchView, rng: Randomness) -> Verdict:
        """Find the last position taken, looking from the end of each chain."""
        roots = tree.offsets[:-1]
        size = tree.sizes
        weight = _path_weights(tree, p)  # [M] w_i
        seeds = derive(view.seeds, view.lengths)
        length = torch.zeros_like(roots)
        open_ = torch.ones_like(roots, dtype=torch.bool)
        left = p[roots]
        for back in range(tree.max_depth + 1):
            rows = (open_ & (size > back)).nonzero().view(-1)
            node = roots[rows] + size[rows] - 1 - back
            residual, mass = _residual(tree, p, weight, node)
            rest = mass + 1 - weight[node]
            # 0 / 0: nothing can be left over and nothing can be lost, so the position is taken.
            taken = torch.where(rest > 0, mass / torch.where(rest > 0, rest, 1), 1)
            taken = torch.where(tree.local[node] == 0, 1, taken)
            takes = rng.flip(taken, derive(seeds[rows], Purpose.ACCEPT, tree.local[node]))
            done = rows[takes]
            length[done] = tree.local[node[takes]]
            left[done] = residual[takes]
            open_[done] = False
        steps = torch.arange(tree.max_depth + 1, device=roots.device)
        path = torch.where(steps <= length[:, None], roots[:, None] + steps, -1)
        return Verdict(path, length, rng.pick(left, derive(seeds, Purpose.RESIDUAL)))


def _path_weights(tree: TokenTree, p: Tensor) -> Tensor:
    """w of every node: how far the target still affords the path up to it. [M]."""
    weight = torch.ones(tree.num_nodes, dtype=p.dtype, device=p.device)
    for step in range(1, tree.max_depth + 1):
        nodes = (tree.local == step).nonzero().view(-1)
        parents = tree.parents[nodes]
        ratio = p[parents, tree.tokens[nodes]] / tree.drawn_probability(nodes, p.dtype)
        weight[nodes] = (weight[parents] * ratio).clamp(max=1)
    return weight


def _residual(tree: TokenTree, p: Tensor, weight: Tensor, node: Tensor) -> tuple[Tensor, Tensor]:
    """(w p - q)+ at `node` [k] and its mass, q being the law of its child; a leaf keeps all of w p."""
    scaled = weight[node][:, None] * p[node]
    inner = (tree.first_child[node] >= 0).nonzero().view(-1)
    scaled[inner] -= tree.law_rows(tree.first_child[node[inner]], scaled[inner])
    scaled.clamp_(min=0)
    mass = scaled.sum(-1)
    empty = mass <= 0
    return torch.where(empty[:, None], p[node], scaled), mass
