"""What a step did for those who want to watch: the tree, how likely each of its tokens was, and which were kept.

Facts are gathered on the device in the tree's order, without asking the host, so that steps can be captured with them.
Nothing here is asked for where no request is traced, and nothing of it reaches a law: tokens are the same either way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from draftwood.drafting import MOST_MEMBERS, Proposal
from draftwood.protocols import BatchView
from draftwood.request import GuessedTree, StepTrace, TokenKind, TracedToken
from draftwood.sampling import shown_distribution
from draftwood.tree import TokenTree, Verdict


class Fact(NamedTuple):
    """What can be said of a node. As a row of numbers, nan stands for what there is not."""

    token: float  # -1: the node is absent
    parent: float  # inside its own tree, -1 at the root
    accepted: float
    p: float
    q: float
    after: float  # the target's probability, behind this node, of the token that its answer got last
    members: float  # bit i: drafter i of a combination has proposed it


NUM_FACTS = len(Fact._fields)


def facts(logits: Tensor, proposal: Proposal, verdict: Verdict, view: BatchView) -> Tensor:
    """A `Fact` of every node, by edited logits [M, V]. [M, 7] float64, in which a token's number is exact."""
    tree = proposal.tree
    p = shown_distribution(logits, tree, view)
    is_root, above, tokens = tree.parents < 0, tree.parents.clamp(min=0), tree.tokens.clamp(min=0)
    own = torch.arange(tree.num_nodes, device=tokens.device)
    columns = (  # in the order of `Fact`
        tree.tokens,
        torch.where(is_root, -1, tree.local[above]),
        _accepted(tree, verdict),
        p[above, tokens].masked_fill(is_root, math.nan),
        _drafted(tree, tokens),
        p[own, verdict.bonus[tree.owner]],
        (proposal.members.long() << _numbers(tokens)).sum(1),
    )
    return torch.stack([column.double() for column in columns], 1)


def members_told(proposal: Proposal, verdict: Verdict) -> Tensor:
    """How many nodes each drafter of a combination has proposed for each sequence, and how many of these were accepted.
    [B, 2 * MOST_MEMBERS].
    """
    tree, path = proposal.tree, verdict.path
    theirs = (proposal.members & (tree.tokens >= 0)[:, None]).long()
    drafted = theirs.new_zeros(tree.num_trees, MOST_MEMBERS).index_add_(0, tree.owner, theirs)
    steps = torch.arange(path.shape[1], device=path.device)
    kept = theirs[path.clamp(min=0)].masked_fill((steps > verdict.length[:, None])[..., None], 0).sum(1)
    return torch.cat([drafted, kept], 1)


def _numbers(like: Tensor) -> Tensor:
    return torch.arange(MOST_MEMBERS, device=like.device)


def _accepted(tree: TokenTree, verdict: Verdict) -> Tensor:
    steps = torch.arange(verdict.path.shape[1], device=tree.tokens.device)
    nowhere = tree.num_nodes
    path = torch.where(steps <= verdict.length[:, None], verdict.path, nowhere)
    return torch.zeros(nowhere + 1, dtype=torch.bool, device=path.device).scatter(0, path.view(-1), True)[:-1]


def _drafted(tree: TokenTree, tokens: Tensor) -> Tensor:
    """The probability each token was drawn with; nan where it was chosen. [M]."""
    if tree.q is None:
        return torch.full(tokens.shape, math.nan, device=tokens.device)
    return tree.q[tree.q_row.clamp(min=0), tokens].masked_fill(tree.q_row < 0, math.nan)


def step_trace(
    rows: Sequence[Sequence[float]], bonus: int, num_sequences: int, num_rows: int, members: Sequence[str] = ()
) -> StepTrace:
    """What the facts of one tree's nodes come to, absent ones left out; `members` of a combination by name."""
    there = {i: Fact(*row) for i, row in enumerate(rows) if row[0] >= 0}
    number = {-1: -1} | {i: number for number, i in enumerate(there)}
    nodes = list(there.values())
    path = [i for i, node in enumerate(nodes) if node.accepted]
    tree = GuessedTree(
        tokens=tuple(int(node.token) for node in nodes),
        parents=tuple(number[int(node.parent)] for node in nodes),
        p=tuple(_known(node.p) for node in nodes),
        q=tuple(_known(node.q) for node in nodes),
        accepted=tuple(bool(node.accepted) for node in nodes),
        members=tuple(tuple(name for i, name in enumerate(members) if int(node.members) >> i & 1) for node in nodes),
    )
    kept = [
        TracedToken(tree.tokens[i], TokenKind.ACCEPTED, depth, i, tree.p[i], tree.q[i])
        for depth, i in enumerate(path[1:], 1)
    ]
    last = TracedToken(bonus, _kind(tree, path[-1]), len(path), None, _known(nodes[path[-1]].after), None)
    return StepTrace(tree if len(nodes) > 1 else None, (*kept, last), num_sequences, num_rows)


def _kind(tree: GuessedTree, end: int) -> TokenKind:
    """Of the target's own token behind node `end`."""
    if len(tree.tokens) == 1:
        return TokenKind.PLAIN
    return TokenKind.CORRECTION if end in tree.parents else TokenKind.BONUS


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
