"""What nearly all laws have in common: the odds of ending at each node, then two draws.

Given the tree and the target's rows, a law says how likely the accepted path ends at each node, and what is left of
the target there for the token after it. Nothing of that depends on earlier coins, so a verdict is one pick among the
nodes and one in the vocabulary, and the odds are also what the laboratory reads expectations from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from draftwood.links import may_look
from draftwood.ops.path import keep_chosen
from draftwood.protocols import BatchView, Randomness
from draftwood.rng import KeyedRng, Purpose, round_keys
from draftwood.tree import DraftLaw, Draw, TokenTree, Verdict

EVERY_DRAW = frozenset(Draw)

DRAW_NAMES = {
    Draw.POINT: "chosen tokens",
    Draw.IID: "independent draws",
    Draw.WITHOUT_REPLACEMENT: "draws without replacement",
    Draw.TAIL: "a tail draw beside chosen tokens",
}


@dataclass(frozen=True)
class Odds:
    """Where the accepted path ends, and what the next token is drawn from."""

    stop: Tensor  # [M] float64; sums to one over each tree, anything at absent nodes
    left: Callable[[Tensor], Tensor]  # nodes [k] -> rows [k, V], in proportion to the law of the token after each
    drift: Tensor | None = None  # [M] what ending there may have moved the law of the emitted tokens; None: nothing

    def expected_length(self, tree: TokenTree) -> Tensor:
        """Accepted tokens to be expected from each tree. [B]."""
        zeros = torch.zeros(tree.num_trees, dtype=self.stop.dtype, device=self.stop.device)
        return zeros.index_add(0, tree.owner, self.ends(tree) * tree.depth)

    def ends(self, tree: TokenTree) -> Tensor:
        """`stop`, and no chance for absent nodes. [M]."""
        return self.stop.masked_fill(tree.tokens < 0, 0)


@dataclass(frozen=True)
class Scope:
    """Which trees a law is exact for."""

    draws: frozenset[Draw] = EVERY_DRAW
    chain: bool = False  # chains only
    paths: bool = False  # whole independent paths only

    def refuses(self, law: DraftLaw) -> str | None:
        """Why such trees lie outside, or None."""
        strange = law.draws - self.draws
        if strange:
            names = " and ".join(DRAW_NAMES[draw] for draw in sorted(strange))
            return f"it is not made for {names}"
        if self.chain and not law.chain:
            return "it is made for one path, and this drafter proposes trees"
        if self.paths and not law.paths:
            return "it needs whole independent paths (--tree paths), and this drafter proposes something else"
        return None

    def __str__(self) -> str:
        shape = "one path" if self.chain else "independent paths" if self.paths else ""
        draws = "" if self.draws == EVERY_DRAW else ", ".join(DRAW_NAMES[draw] for draw in sorted(self.draws))
        return ": ".join(filter(None, [shape, draws])) or "every tree"


class NodeLaw:
    """A law that is told by its odds."""

    name: str
    scope = Scope()
    lossless = True
    reproducible = False  # its draws depend on the tree, and the tree on budgets, which depend on load and timings

    def refuses(self, law: DraftLaw) -> str | None:
        """Whatever lies outside its scope."""
        return self.scope.refuses(law)

    def odds(self, tree: TokenTree, p: Tensor) -> Odds:
        """Where the path ends, given the target's rows `p` [M, V]."""
        raise NotImplementedError

    def at_once(self, tree: TokenTree, p: Tensor, view: BatchView) -> Verdict | None:
        """The verdict these odds lead to with keyed randomness, where there are kernels for all of it."""
        return None

    def verify(self, tree: TokenTree, p: Tensor, view: BatchView, rng: Randomness) -> Verdict:
        """Pick the last accepted node of each tree, then the token after it."""
        if self.lossless and view.mode.greedy:
            return keep_chosen(tree, p.argmax(-1))  # without chance every lossless law keeps the longest match
        verdict = self.at_once(tree, p, view) if isinstance(rng, KeyedRng) else None
        if verdict is not None:
            return verdict
        odds = self.odds(tree, p)
        accept = round_keys(view.seeds, view.lengths, Purpose.ACCEPT)
        node = tree.offsets[:-1] + rng.pick(by_tree(tree, odds.ends(tree)), accept)
        residual = round_keys(view.seeds, view.lengths, Purpose.RESIDUAL)
        bonus = rng.pick(_or_else(odds.left(node), p, node), residual)
        drift = None if odds.drift is None else odds.drift[node]
        return Verdict(tree.paths[node], tree.depth[node], bonus, drift)


def _or_else(left: Tensor, p: Tensor, node: Tensor) -> Tensor:
    """`left` [B, V], and p where it is empty: ending there has no chance, up to rounding, and no mass is invented."""
    some = left.amax(-1, keepdim=True) > 0
    if may_look(left) and bool(some.all()):
        return left  # looking is cheaper than another pass over the rows
    return torch.where(some, left, p[node])


def by_tree(tree: TokenTree, values: Tensor) -> Tensor:
    """Values of nodes [M] as one row a tree, zero padded. [B, N]."""
    if tree.num_trees == 1:
        return values[None]
    table = torch.zeros(tree.num_trees, tree.widest, dtype=values.dtype, device=values.device)
    return table.index_put((tree.owner, tree.local), values)


def ratio(part: Tensor, whole: Tensor) -> Tensor:
    """part / whole, one where both are nothing: nothing to lose there, so it is taken."""
    return torch.where(whole > 0, part / torch.where(whole > 0, whole, 1), 1)


def value_at(rows: Tensor, tokens: Tensor) -> Tensor:
    """rows[i, tokens[i]] in float64. [n, V], [n] -> [n]."""
    return rows.gather(1, tokens[:, None])[:, 0].double()


def mass_of(rows: Tensor) -> Tensor:
    """Row sums in float64. [n, V] -> [n]."""
    return rows.sum(-1, dtype=torch.float64)
