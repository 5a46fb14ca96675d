"""`match`: the target draws its own token at every node and looks for it among the children.

The emitted text is the target's own sample, the tree only a cache of its answers, so this is lossless for any
tree whatsoever. With noise keyed by position alone it is also the same text for a given seed whatever the drafter,
the tree, the batch or the schedule (Daliri, Musco, Suresh: drafter-invariant speculative decoding, 2024).
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftwood.links import may_look
from draftwood.ops.path import PathWalk, keep_chosen
from draftwood.ops.verdict import match
from draftwood.protocols import BatchView, Randomness
from draftwood.rng import KeyedRng, target_keys
from draftwood.tree import DraftLaw, TokenTree, Verdict
from draftwood.verifiers.law import Scope


class Match:
    """Accept a node when it is what the target itself draws there."""

    lossless = True
    reproducible = True
    scope = Scope()

    def __init__(self, name: str = "match") -> None:
        self.name = name

    def refuses(self, law: DraftLaw) -> str | None:
        """Exact for every tree."""
        return self.scope.refuses(law)

    def verify(self, tree: TokenTree, p: Tensor, view: BatchView, rng: Randomness) -> Verdict:
        """Walk down while the target's draw is in the tree."""
        if tree.num_drafted == 0:
            return Verdict.of_roots(tree, rng.race(p, target_keys(view.seeds, view.lengths))[:, 0])
        if view.mode.greedy:
            return keep_chosen(tree, p.argmax(-1))  # nothing is drawn: no need to ask node by node
        verdict = _at_once(tree, p, view, rng) if isinstance(rng, KeyedRng) else None
        return _step_by_step(tree, p, view, rng) if verdict is None else verdict


def _at_once(tree: TokenTree, p: Tensor, view: BatchView, rng: KeyedRng) -> Verdict | None:
    """Where values may not be looked at the target draws after every node, looked for or not."""
    if may_look(p):
        return match(tree, p, view.seeds, view.lengths)
    owner = tree.owner
    keys = target_keys(view.seeds[owner], view.lengths[owner] + tree.depth)
    return keep_chosen(tree, rng.race(p, keys)[:, 0])


def _step_by_step(tree: TokenTree, p: Tensor, view: BatchView, rng: Randomness) -> Verdict:
    """Where values may not be looked at, those that have left their tree draw the same token again."""
    walk, look = PathWalk(tree), may_look(p)
    bonus = torch.zeros_like(walk.node)
    for _ in range(tree.max_depth + 1):
        active = walk.active.nonzero()[:, 0] if look else torch.arange(tree.num_trees, device=p.device)
        if not len(active):
            break
        keys = target_keys(view.seeds[active], (view.lengths + walk.length)[active])
        bonus[active] = rng.race(p[walk.node[active]], keys)[:, 0]
        walk.descend(walk.child_with(bonus))
    return walk.verdict(bonus)
