"""`gbv`: greedy multi-path block verification (Thomas, Pal 2026), with two amendments.

Of K independent paths the greatest is kept, tokens being ordered by p / q at every node and paths like words in a
dictionary, and block verification is run on it against the law of the greatest of K:

    of(x) = ((below + joint (lo(x) + q(x)))^K - (below + joint lo(x))^K) / ((below + joint)^K - below^K)

with lo(x) the draft's mass below x, `joint` the chance that a path comes this way and `below` that it ranks lower.

- Fallback: the greatest of K good guesses is a bad guess. Where the first token would be accepted less often than by
  one path alone (sum min(p, of) < sum min(p, q): rows only, no drawn token is looked at) the first path is verified.
- Recycling: the paths not kept were never looked at below the node where they part. If the token after the accepted
  path is one of their nodes, they are fresh independent paths from there, and the same is done again.
Only about the `RANKED` likeliest tokens under q are ordered by p / q; all others rank below them, by number. Any fixed
order is lossless, and whole vocabularies are slow to sort.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftwood.links import may_look
from draftwood.tree import Draw, TokenTree
from draftwood.verifiers.law import NodeLaw, Odds, Scope, mass_of, ratio, value_at
from draftwood.verifiers.walk import without_children

RANKED = 256
NUM_BINS = 256  # of chances: an eighth of a power of two wide, all below 2^-24 in the lowest
BIN_SHIFT = 20  # a float's bits without the last: its exponent and three more
LOWEST_BIN = (127 - 24) << 3


@dataclass
class _Standing:
    """Where the kept path stands at every node, seen from the node its part of the tree begins at. The last entry is
    of no node.
    """

    below: Tensor  # [M + 1] float64
    joint: Tensor  # [M + 1] float64
    paths: Tensor  # [M + 1] K, 1 where the first path is kept
    weight: Tensor  # [M + 1] float64, as in block verification
    kept: Tensor  # [M + 1] the child on the kept path, -1 at a leaf


class GreedyPaths(NodeLaw):
    """Keep the greatest of several independent paths, and verify it as a block."""

    name = "gbv"
    scope = Scope(frozenset({Draw.IID}), paths=True)

    def odds(self, tree: TokenTree, p: Tensor) -> Odds:
        """All kept paths of all parts of the tree at once: from every node the path that would be kept from there."""
        ones = torch.ones(tree.num_nodes + 1, dtype=torch.float64, device=p.device)
        counts = torch.nn.functional.pad((tree.tries >= 0).sum(1), (0, 1))
        at = _Standing(0 * ones, ones.clone(), counts.clone(), ones.clone(), torch.full_like(counts, -1))
        taken, hits = ones.clone(), torch.zeros_like(ones)  # hits: share of a node's residual on another path's node
        for nodes in tree.levels:
            has_draws = counts[nodes] > 0
            inner = nodes[has_draws] if may_look(p) else torch.where(has_draws, nodes, -1)
            taken[nodes] = at.weight[nodes]  # a leaf; inner nodes follow
            if inner.numel():
                law = self._settle(tree, p, at, inner)
                residual = _left_of(p, at, inner, law)
                mass = mass_of(residual)
                taken[inner] = ratio(mass, mass + (1 - at.weight[inner]))
                _share_residual(tree, at, inner, residual, mass, hits)
        return Odds(_stops(tree, at, taken, hits), lambda nodes: self._left(tree, p, at, nodes))

    def _settle(self, tree: TokenTree, p: Tensor, at: _Standing, nodes: Tensor) -> Tensor:
        """Choose the kept child of `nodes`, and set where it and its siblings stand; returns its law. [n, V]."""
        q = tree.law_rows(tree.tries[nodes, 0].clamp(min=0), p[nodes])
        rank, lower = _order(p[nodes], q)
        fresh = (at.joint[nodes] == 1) & (at.paths[nodes] > 1)
        law = _law_of_greatest(q, lower, at, nodes, tree.tries.shape[1])
        loses = torch.minimum(p[nodes], law).sum(-1) < torch.minimum(p[nodes], q).sum(-1)
        at.paths[nodes] = torch.where(fresh & loses, 1, at.paths[nodes])
        law = torch.where((fresh & loses)[:, None], q, law)
        tries = tree.tries[nodes]
        tokens = tree.tokens[tries.clamp(min=0)]
        standing = torch.where(tries >= 0, rank.gather(1, tokens), -p.shape[1] - 1)
        best = torch.where(at.paths[nodes] > 1, standing.argmax(1), 0)[:, None]
        kept, token = tries.gather(1, best)[:, 0], tokens.gather(1, best)[:, 0]
        at.kept[nodes] = kept
        gain = ratio(value_at(p[nodes], token), value_at(law, token))
        at.weight[kept] = (at.weight[nodes] * gain).clamp(max=1)
        many = (tries == kept[:, None]).sum(1)  # paths that come this way; new ones may begin here
        goes_on = (tree.tries[kept] >= 0).sum(1) == many
        at.paths[kept] = torch.where(goes_on, at.paths[nodes], at.paths[kept])
        below = at.below[nodes] + at.joint[nodes] * value_at(lower, token)
        at.below[kept] = torch.where(goes_on, below, 0)
        at.joint[kept] = torch.where(goes_on, at.joint[nodes] * value_at(q, token), 1)
        return law

    def _residual(self, tree: TokenTree, p: Tensor, at: _Standing, nodes: Tensor) -> Tensor:
        """(w p - law of the kept child)+ at inner `nodes`. [n, V]."""
        q = tree.law_rows(tree.tries[nodes, 0].clamp(min=0), p[nodes])
        law = _law_of_greatest(q, _order(p[nodes], q)[1], at, nodes, tree.tries.shape[1])
        return _left_of(p, at, nodes, law)

    def _left(self, tree: TokenTree, p: Tensor, at: _Standing, nodes: Tensor) -> Tensor:
        inner = at.kept[nodes] >= 0
        rows = p[nodes]
        if not may_look(p):
            left = without_children(tree, nodes, self._residual(tree, p, at, nodes))
            return torch.where(inner[:, None], left, rows)
        if bool(inner.any()):
            left = self._residual(tree, p, at, nodes[inner])
            rows[inner] = without_children(tree, nodes[inner], left)
        return rows


def _left_of(p: Tensor, at: _Standing, nodes: Tensor, law: Tensor) -> Tensor:
    """(w p - law)+. [n, V]."""
    return (at.weight[nodes].to(p.dtype)[:, None] * p[nodes] - law).clamp_(min=0)


def _order(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Where each token ranks, and the draft's mass below it. [n, V], [n, V] float64."""
    vocabulary = q.shape[1]
    ranked = _likely(q)
    likely = q.topk(min(RANKED, vocabulary), -1).indices.sort(-1).values
    ratios = torch.where(ranked, p / q, -1).gather(1, likely)  # those that are not ranked come first
    order = likely.gather(1, ratios.argsort(dim=-1, stable=True))  # ties by number
    places = torch.arange(order.shape[1], device=q.device).expand_as(order)
    by_number = torch.arange(-vocabulary, 0, device=q.device).repeat(len(q), 1)
    rank = torch.where(ranked, by_number.scatter(1, order, places), by_number)
    unranked = torch.where(ranked, 0, q).double()
    lower = unranked.cumsum(-1) - unranked
    own = torch.where(ranked, q, 0).double().gather(1, order)
    below = unranked.sum(-1, keepdim=True) + own.cumsum(-1) - own
    return rank, torch.where(ranked, lower.scatter(1, order, below), lower)


def _likely(q: Tensor) -> Tensor:
    """Which tokens are in the highest bins of q that hold at most `RANKED` of them. [n, V]."""
    bins = ((q.float().view(torch.int32) >> BIN_SHIFT) - LOWEST_BIN).clamp(0, NUM_BINS - 1).long()
    counts = torch.zeros(len(q), NUM_BINS, dtype=torch.int64, device=q.device).scatter_add_(1, bins, (q > 0).long())
    at_least = counts.flip(1).cumsum(1).flip(1)
    return (q > 0) & (bins >= (at_least > RANKED).sum(1, keepdim=True))


def _law_of_greatest(q: Tensor, lower: Tensor, at: _Standing, nodes: Tensor, most: int) -> Tensor:
    """The law of the kept path's next token at `nodes`, of at most `most` paths. [n, V], typed as `q`."""
    below, joint, paths = (x[nodes][:, None] for x in (at.below, at.joint, at.paths))
    low = below + joint * lower
    high = low + joint * q.double()
    if may_look(q):
        most = int(paths.max())
    if most == 1:
        return q
    # a^K - b^K = (a - b) sum_i a^i b^(K-1-i): no difference of nearly equal powers.
    above = _sum_of_powers(high, low, paths, most)
    return (q.double() * above / _sum_of_powers(below + joint, below, paths, most)).to(q.dtype)


def _sum_of_powers(a: Tensor, b: Tensor, counts: Tensor, most: int) -> Tensor:
    """sum_i a^i b^(K-1-i) for i < K, K being `counts`: at least 1 and at most `most`."""
    total, power = torch.ones_like(a), torch.ones_like(b)
    for i in range(1, most):
        power = power * b
        total = torch.where(i < counts, total * a + power, total)
    return total


def _share_residual(
    tree: TokenTree, at: _Standing, nodes: Tensor, residual: Tensor, mass: Tensor, hits: Tensor
) -> None:
    """Set how much of each node's residual lies on each child off the kept path."""
    for child in tree.tries[nodes].unbind(1):
        known = child >= 0
        other = known & (child != at.kept[nodes])
        value = value_at(residual, tree.tokens[child.clamp(min=0)])
        share = torch.where(mass > 0, value / torch.where(mass > 0, mass, 1), 0)
        hits[torch.where(other, child, -1)] = torch.where(other, share, 0)


def _stops(tree: TokenTree, at: _Standing, taken: Tensor, hits: Tensor) -> Tensor:
    """Block verification's chances along every kept path, handed on to the paths that begin where others end. [M]."""
    heads = torch.ones_like(taken, dtype=torch.bool).scatter(0, at.kept % len(taken), value=False)
    taken = torch.where(heads, 1, taken)
    missed = torch.ones_like(taken)  # that nothing deeper on the path is taken
    for nodes in reversed(tree.levels):
        kept = at.kept[nodes]
        deeper = (1 - taken[kept]) * missed[kept]
        missed[nodes] = torch.where(kept >= 0, deeper, 1)
    enters = torch.ones_like(taken)
    ends = taken * missed
    for nodes in tree.levels[1:]:
        above = torch.where(nodes >= 0, tree.parents[nodes], -1) % len(taken)
        enters[nodes] = enters[above] * torch.where(heads[nodes], (taken * missed)[above] * hits[nodes], 1)
        ends.index_add_(0, above, -(taken * missed)[above] * torch.where(heads[nodes], hits[nodes], 0))
    return (enters * ends.clamp(min=0))[:-1]
