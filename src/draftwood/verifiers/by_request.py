"""Several laws in one batch: each request may bring its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from draftwood.links import may_look
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
        """Each law verifies the trees of its own requests; where values may not be looked at, those of all others too,
        and what it says of them does not count.
        """
        laws = [self.law_of(name) for name in view.mode.laws]
        if view.law is None or len(laws) == 1:
            return laws[0].verify(tree, p, view, rng)
        if view.may_look and may_look(p):
            return _each_on_its_own(laws, view.law, tree, p, view, rng)
        return _all_on_all(laws, view.law, tree, p, view, rng)


def _each_on_its_own(
    laws: Sequence[Verifier], law: Tensor, tree: TokenTree, p: Tensor, view: BatchView, rng: Randomness
) -> Verdict:
    asked = sorted(set(law.tolist()))
    if len(asked) == 1:
        return laws[asked[0]].verify(tree, p, view, rng)
    joined = _columns(Verdict.of_roots(tree, torch.zeros_like(tree.sizes)), tree)
    for number in asked:
        rows = (law == number).nonzero()[:, 0]
        part, nodes = tree.take(rows)
        own = laws[number].verify(part, p[nodes.whole], view.take(rows), rng)
        for column, values in zip(joined, _columns(nodes.in_whole(own), tree), strict=True):
            column[rows] = values
    return Verdict(*joined)


def _all_on_all(
    laws: Sequence[Verifier], law: Tensor, tree: TokenTree, p: Tensor, view: BatchView, rng: Randomness
) -> Verdict:
    joined = _columns(laws[0].verify(tree, p, view, rng), tree)
    for number, verifier in enumerate(laws[1:], 1):
        every = _columns(verifier.verify(tree, p, view, rng), tree)
        chosen = (law == number)[:, None]
        joined = tuple(
            torch.where(chosen if new.ndim == 2 else chosen[:, 0], new, old)
            for new, old in zip(every, joined, strict=True)
        )
    return Verdict(*joined)


def _columns(verdict: Verdict, tree: TokenTree) -> tuple[Tensor, ...]:
    """Paths as long as those of the whole batch, lengths, tokens after them, and drift: 0 where a law is lossless."""
    path = pad(verdict.path, (0, tree.max_depth + 1 - verdict.path.shape[1]), value=-1)
    drift = torch.zeros(len(path), dtype=torch.float64, device=path.device)
    if verdict.drift is not None:
        drift = verdict.drift.double()
    return path, verdict.length, verdict.bonus, drift
