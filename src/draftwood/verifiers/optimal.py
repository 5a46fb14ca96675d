"""`optimal`: the best rule there is for the draws behind one node, by linear programming. A reference for toys.

Every way the draws can fall is a source of its own probability, every token a sink of the target's; a draw that falls
on x may be kept at no cost. The transport that keeps most is found by scipy's HiGHS. Independent draws only, and so few
tokens and draws that all the ways they can fall are written down; elsewhere the rule is that of `walk`.
"""

from __future__ import annotations

import itertools
import math
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftwood.errors import DraftwoodError
from draftwood.links import may_look
from draftwood.tree import DraftLaw, Draw, TokenTree
from draftwood.verifiers.law import Scope
from draftwood.verifiers.rules import Rejection, Weighed, draws_behind
from draftwood.verifiers.walk import TopDown

MOST_WAYS = 2000


class OptimalTransport:
    """Keep as much of the draws as any lossless rule can; where they can fall in too many ways, try them in turn."""

    scope = Scope(frozenset({Draw.POINT, Draw.IID, Draw.TAIL}))

    def weigh(self, tree: TokenTree, p: Tensor, nodes: Tensor, weight: Tensor) -> Weighed:
        """Node by node: one linear program each."""
        if not may_look(p):
            raise DraftwoodError("The law 'optimal' asks a solver on the host at every node: it runs on a CPU only")
        draws = draws_behind(tree, nodes)
        fallback = Rejection().weigh(tree, p, nodes, weight)
        taken, left = fallback.taken.clone(), fallback.left().double()
        target = p[nodes].double() * weight[:, None]
        for row, exists in enumerate(draws.exists.tolist()):
            child = draws.child[row][draws.exists[row]]
            laws = tree.law_rows(child, target[:1].expand(len(child), -1)).tolist()
            if not exists[0] or _ways(laws) > MOST_WAYS:
                continue
            kept, average = _transport(target[row].tolist(), laws, tree.tokens[child].tolist())
            for place, token in enumerate(tree.tokens[child].tolist()):
                taken[row, place] = kept.pop(token, 0.0)  # the first draw of a token stands for all of them
            left[row] = (target[row] - left.new_tensor(average)).clamp(min=0)
        return Weighed(_as_chances(taken), left.sum(-1), left.gather(1, draws.tokens), lambda: left.to(p.dtype))


class Optimal(TopDown):
    """The best sibling rule at every node, top down."""

    def __init__(self) -> None:
        super().__init__("optimal", OptimalTransport())

    def refuses(self, law: DraftLaw) -> str | None:
        """Also where there is no solver, or siblings hang together."""
        if find_spec("scipy") is None:
            return "it needs scipy, which is not installed (pip install 'draftwood[lab]')"
        if law.grafted:
            return "its rule asks what else could have been drawn, and combined trees would have had other nodes then"
        return super().refuses(law)


def _ways(laws: list[list[float]]) -> int:
    return math.prod(sum(q > 0 for q in law) for law in laws)


def _as_chances(taken: Tensor) -> Tensor:
    before = 1 - (taken.cumsum(1) - taken)
    return torch.where(before > 0, taken / torch.where(before > 0, before, 1), 1).clamp(0, 1)


def _transport(target: list[float], laws: list[list[float]], drawn: list[int]) -> tuple[dict[int, float], list[float]]:
    """What each token among `drawn` is kept with, given these draws; and the mass kept of each token on the average."""
    combinations: dict[frozenset[int], float] = {}
    for tokens in itertools.product(*([t for t, q in enumerate(law) if q > 0] for law in laws)):
        chance = 1.0
        for law, token in zip(laws, tokens, strict=True):
            chance *= law[token]
        combinations[frozenset(tokens)] = combinations.get(frozenset(tokens), 0.0) + chance
    flows = [(held, token) for held in combinations for token in sorted(held)]
    amounts = _solve(flows, combinations, target)
    average = [0.0] * len(target)
    for (_, token), amount in zip(flows, amounts, strict=True):
        average[token] += amount
    own = frozenset(drawn)
    given = {token: a / combinations[own] for (held, token), a in zip(flows, amounts, strict=True) if held == own}
    return given, average


def _solve(
    flows: list[tuple[frozenset[int], int]], combinations: dict[frozenset[int], float], target: list[float]
) -> Any:
    """The amounts kept: as much in all as the draws can carry and the target can take."""
    from scipy.optimize import linprog
    from scipy.sparse import csr_array

    sources = {held: row for row, held in enumerate(combinations)}
    rows = [sources[held] for held, _ in flows] + [len(sources) + token for _, token in flows]
    columns = [*range(len(flows)), *range(len(flows))]
    limits = csr_array(([1.0] * len(rows), (rows, columns)), shape=(len(sources) + len(target), len(flows)))
    bounds = np.array([*combinations.values(), *target])
    found = linprog([-1.0] * len(flows), A_ub=limits, b_ub=bounds, method="highs")
    if found.status != 0:
        raise DraftwoodError(f"The linear program of the law 'optimal' was not solved: {found.message}")
    # A solver's tolerance would show in the law: nothing may be kept that was not drawn or is not wanted.
    kept = found.x.clip(min=0)
    totals = limits @ kept
    shrink = np.divide(bounds, totals, out=np.ones(len(bounds)), where=totals > bounds)
    return kept * np.minimum(shrink[rows[: len(flows)]], shrink[rows[len(flows) :]])
