"""Several laws in one batch: each request may bring its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from draftwood.protocols import BatchView, Randomness, Verifier
from draftwood.tree import DraftLaw, TokenTree, Verdict


class ByRequest:
    """The law each request names, and a default for those that name none."""

    def __init__(self, default: Verifier, find: Callable[[str], Verifier]) -> None:
        self.default = default
        self.name = default.name
        self.lossless = default.lossless
        self.reproducible = default.reproducible
        self._find = lru_cache(maxsize=256)(find)

    def refuses(self, law: DraftLaw) -> str | None:
        """What the default refuses; a request's own law is asked when the request comes."""
        return self.default.refuses(law)

    def law_of(self, name: str | None) -> Verifier:
        """The law of a request that names `name`."""
        return self.default if name is None else self._find(name)

    def verify(self, tree: TokenTree, p: Tensor, view: BatchView, rng: Randomness) -> Verdict:
        """Each law verifies the trees of its own requests."""
        names = [params.law for params in view.params]
        if len(set(names)) == 1:
            return self.law_of(names[0]).verify(tree, p, view, rng)
        path = torch.full((tree.num_trees, tree.max_depth + 1), -1, device=tree.tokens.device)
        length, bonus = torch.zeros_like(tree.sizes), torch.zeros_like(tree.sizes)
        drift = torch.zeros(tree.num_trees, dtype=torch.float64, device=tree.tokens.device)
        for name in dict.fromkeys(names):
            rows = torch.tensor([b for b, other in enumerate(names) if other == name], device=tree.tokens.device)
            part, nodes = tree.take(rows)
            verdict = self.law_of(name).verify(part, p[nodes], view.take(rows.tolist()), rng)
            way = torch.where(verdict.path >= 0, nodes[verdict.path.clamp(min=0)], -1)
            path[rows, : way.shape[1]] = way
            length[rows], bonus[rows] = verdict.length, verdict.bonus
            drift[rows] = 0.0 if verdict.drift is None else verdict.drift.double()
        return Verdict(path, length, bonus, drift)
