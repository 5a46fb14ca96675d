"""`walk`: the lossless walk that knows how each node was drawn.

At every node the children are tried in order. A child x drawn from q is accepted with probability
min(1, p(x) / q(x)), target over draft; after a rejection p becomes the normalised positive part of p - q, and the
next child is tried against that. A point mass is the case q = 1 at x. The token after the last accepted node is
drawn from what is left of p.

One step maps p to p whatever q is, as long as x was drawn from q *given everything before it*; so the composition is
exact for independent draws (SpecInfer's multi-step rule), draws without replacement (RSD, Sequoia), the hybrid of
fixed children and one tail sample (tried first: then it is the optimal rule for that draw), and any mixture.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftwood.protocols import BatchView, Randomness
from draftwood.rng import Purpose, derive
from draftwood.tree import DraftLaw, TokenTree, Verdict
from draftwood.verifiers.path import PathWalk


class Walk:
    """Recursive rejection sampling, top down."""

    name = "walk"
    lossless = True

    def refuses(self, law: DraftLaw) -> str | None:
        """Exact for every draw a node can carry."""
        return None

    def verify(self, tree: TokenTree, p: Tensor, view: BatchView, rng: Randomness) -> Verdict:
        """Walk down while a child is accepted; the residual of the last node gives the next token."""
        walk = PathWalk(tree)
        seeds = derive(view.seeds, view.lengths)
        left = p[walk.node]
        while True:
            rows = walk.active.nonzero().view(-1)
            target = p[walk.node[rows]]
            accepted, residual = self._try_children(tree, target, walk.node[rows], seeds[rows], rng)
            left[rows] = residual
            if not walk.descend(rows, accepted):
                return walk.verdict(rng.pick(left, derive(seeds, Purpose.RESIDUAL)))

    def _try_children(
        self, tree: TokenTree, target: Tensor, node: Tensor, seeds: Tensor, rng: Randomness
    ) -> tuple[Tensor, Tensor]:
        """Try the children of `node` [k] against `target` [k, V]: the accepted one or -1, and what is left of it."""
        child = tree.first_child[node]
        accepted = torch.full_like(child, -1)
        while True:
            rows = (child >= 0).nonzero().view(-1)
            if rows.numel() == 0:
                return accepted, target
            tried = child[rows]
            ratio = target[rows, tree.tokens[tried]] / tree.drawn_probability(tried, target.dtype)
            takes = rng.flip(ratio, derive(seeds[rows], Purpose.ACCEPT, tree.local[tried]))
            accepted[rows] = torch.where(takes, tried, -1)
            rejected = rows[~takes]
            target[rejected] = residual_after(tree, child[rejected], target[rejected])
            child[rows] = torch.where(takes, -1, tree.next_sibling[tried])


def residual_after(tree: TokenTree, nodes: Tensor, p: Tensor) -> Tensor:
    """What is left of `p` [k, V] once `nodes` [k] were rejected: the positive part of p - q, normalised.

    It can only be empty where rejection has probability zero, up to rounding; then p stays as it is, so that no
    mass is invented.
    """
    left = (p - tree.law_rows(nodes, p)).clamp_(min=0)
    total = left.sum(-1, keepdim=True)
    return torch.where(total > 0, left / torch.where(total > 0, total, 1), p)
