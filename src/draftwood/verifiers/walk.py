"""The top-down lift: at each node a sibling rule, and down into whatever child the target's token turns out to be.

`walk` (recursive rejection) is exact for every draw; `token`, `rrs`, `rrsw` and `hybrid` are its names in the
literature, where it is restricted to one path, independent draws, draws without replacement, or the hybrid draw.
`naive` and `kseq` are the same walk with another sibling rule.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftwood.ops.verdict import kseq_walk, walk
from draftwood.protocols import BatchView
from draftwood.tree import TokenTree, Verdict
from draftwood.verifiers.law import NodeLaw, Odds, Scope
from draftwood.verifiers.rules import KSeq, Rejection, SiblingRule


class TopDown(NodeLaw):
    """Walk down while a child is the target's next token, node by node."""

    def __init__(self, name: str, rule: SiblingRule, scope: Scope | None = None) -> None:
        self.name = name
        self.rule = rule
        self.scope = scope or rule.scope

    def odds(self, tree: TokenTree, p: Tensor) -> Odds:
        """Every node is weighed once; the way to it is the product of the ways before."""
        passes = torch.zeros(tree.num_nodes + 1, dtype=torch.float64, device=p.device)  # the last one: no node
        ends = torch.ones_like(passes)
        inner = tree.shape.inner
        tries, onward, ends[inner] = self._outcomes(tree, p, inner)
        passes.index_add_(0, tries.flatten() % len(passes), onward.flatten())
        reach = torch.ones_like(passes)
        for nodes in tree.levels[1:]:
            reach[nodes] = reach[tree.parents[nodes]] * passes[nodes]
        return Odds((reach * ends)[:-1], lambda nodes: self._left(tree, p, nodes))

    def at_once(self, tree: TokenTree, p: Tensor, view: BatchView) -> Verdict | None:
        """There are kernels for the two rules of production."""
        if type(self.rule) is Rejection:
            return walk(tree, p, view.seeds, view.lengths, self.rule.tried)
        return kseq_walk(tree, p, view.seeds, view.lengths) if type(self.rule) is KSeq else None

    def _outcomes(self, tree: TokenTree, p: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The draws behind `nodes`, the chance that each is passed on to, and that none is. [n, W], [n, W], [n]."""
        weighed = self.rule.weigh(tree, p, nodes, _whole(nodes))
        tries = tree.tries[nodes]
        hit = first_of_its_token(tree, tries) * weighed.values
        # What is left is drawn from only after all draws were rejected; landing on a child is going there all the same.
        share = torch.where(weighed.mass > 0, weighed.rest / torch.where(weighed.mass > 0, weighed.mass, 1), 0)
        onward = hit * share[:, None] + weighed.taken
        missed = weighed.mass - hit.sum(1)
        return tries, onward, torch.where(weighed.mass > 0, share * missed, weighed.rest).clamp(min=0)

    def _left(self, tree: TokenTree, p: Tensor, nodes: Tensor) -> Tensor:
        """What is left at `nodes`, without the tokens of their children."""
        return without_children(tree, nodes, self.rule.weigh(tree, p, nodes, _whole(nodes)).left())


def _whole(nodes: Tensor) -> Tensor:
    return torch.ones(len(nodes), dtype=torch.float64, device=nodes.device)


def without_children(tree: TokenTree, nodes: Tensor, rows: Tensor) -> Tensor:
    """`rows` [k, V] with nothing on the tokens that are children of `nodes` [k]. Changes them."""
    tries = tree.tries[nodes]
    for child in tries.unbind(1):
        token = tree.tokens[child.clamp(min=0)][:, None]
        rows.scatter_(1, token, torch.where(child[:, None] >= 0, 0, rows.gather(1, token)))
    return rows


def first_of_its_token(tree: TokenTree, tries: Tensor) -> Tensor:
    """Which draws are the first with their token among the draws behind a node. [n, W] bool."""
    tokens = torch.where(tries >= 0, tree.tokens[tries.clamp(min=0)], -1)
    again = (tokens[:, :, None] == tokens[:, None, :]).tril(-1).any(-1)
    return (tries >= 0) & ~again
