"""The best any lossless verifier can do on a toy problem, by linear programming.

A verifier sees a draft tree and returns one of its nodes and a correction token. So the program shares out the
probability of every tree among the nodes of that tree; losslessness is linear in the shares.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_array

from draftwood.drafting import Grower
from enumeration import Prefix, Rows, drafts_of

Nodes = frozenset[Prefix]
Terms = dict[Any, float]  # name of a variable -> its coefficient


def tree_law(grower: Grower, q: Rows) -> dict[Nodes, float]:
    """Every draft tree the shipped grower can draw, as the set of its nodes' prefixes, with its probability.

    Siblings that repeat a token become one.
    """
    drafts = drafts_of(grower, q)
    bounds = drafts.tree.offsets.tolist()
    law: dict[Nodes, float] = defaultdict(float)
    for begin, end, chance in zip(bounds[:-1], bounds[1:], drafts.chance.tolist(), strict=True):
        law[frozenset(drafts.prefixes[begin:end])] += chance
    return dict(law)


def optimal_acceptance(trees: dict[Nodes, float], p: Rows, vocabulary: int) -> float:
    """The largest E[tau] of all lossless verifiers that return a node of the tree and one correction token."""
    # The variables are probabilities: ("f", T, u) that the tree is T and its node u is returned, ("A", u) that the
    # returned node is u or below it, ("c", u, x) that u is returned with the correction x.
    program = _Program()
    for tree, chance in trees.items():
        program.equate({("f", tree, u): 1.0 for u in tree}, chance)
    nodes = frozenset().union(*trees)
    for u in nodes:
        children = [(*u, x) for x in range(vocabulary) if (*u, x) in nodes]
        returned = {("f", tree, u): -1.0 for tree in trees if u in tree}
        program.equate({("A", u): 1.0} | {("A", child): -1.0 for child in children} | returned, 0.0)
        # What is emitted after u follows p, accepted or corrected. Summed over x this also says that every return of
        # u comes with a correction, as the row of p sums to one.
        for x, chance in enumerate(p(u)):
            accepted = {("A", (*u, x)): 1.0} if (*u, x) in nodes else {}
            program.equate({("A", u): -chance, ("c", u, x): 1.0} | accepted, 0.0)
    return program.maximum({("f", tree, u): float(len(u)) for tree in trees for u in tree})


@dataclass
class _Program:
    """Linear equations between named variables that are not negative."""

    columns: dict[Any, int] = field(default_factory=dict)
    rows: list[Terms] = field(default_factory=list)
    right: list[float] = field(default_factory=list)

    def equate(self, terms: Terms, value: float) -> None:
        """Demand that the sum of coefficient times variable is `value`."""
        for name in terms:
            self.columns.setdefault(name, len(self.columns))
        self.rows.append(terms)
        self.right.append(value)

    def maximum(self, objective: Terms) -> float:
        """The largest value of `objective`."""
        cost = np.zeros(len(self.columns))
        for name, coefficient in objective.items():
            cost[self.columns[name]] = -coefficient
        # The default tolerances of 1e-7 are coarser than what the answer is compared to.
        precise = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
        solved = linprog(cost, A_eq=self._matrix(), b_eq=self.right, bounds=(0, None), method="highs", options=precise)
        assert solved.success, solved.message
        return -float(solved.fun)

    def _matrix(self) -> csr_array:
        entries = [(i, self.columns[name], value) for i, row in enumerate(self.rows) for name, value in row.items()]
        at_row, at_column, values = zip(*entries, strict=True)
        return csr_array((values, (at_row, at_column)), shape=(len(self.rows), len(self.columns)))
