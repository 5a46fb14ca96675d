"""An enumerating source of randomness, and the exact criterion of losslessness.

`law_of(run)` replays `run(rng)` through every outcome of its coin flips and draws, depth first, so the shipped control
flow itself is what is measured. `assert_lossless` checks criterion (1): with h(s) the probability that a round emits
the string s, the sum over the prefixes s of y of h(s) p(y | s) is p(y), for every string y one longer than the tree.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from draftwood.protocols import BatchView, Budget, Grower, Verifier
from draftwood.request import SamplingParams
from draftwood.tree import TokenTree
from draftwood.treebuilder import TreeBuilder

Row = tuple[float, ...]
Rows = Callable[[tuple[int, ...]], Row]  # prefix -> distribution of the next token


@dataclass
class Enumerator:
    """Follows a script of choices and writes down where it could have gone instead."""

    script: list[int]
    options: list[int] = field(default_factory=list)  # outcomes there were at each choice
    weight: float = 1.0
    used: set[int] = field(default_factory=set)

    def _choose(self, weights: Sequence[float], key: int) -> int:
        possible = [i for i, w in enumerate(weights) if w > 0]
        if len(possible) < 2:
            return possible[0] if possible else 0
        assert key not in self.used, "two draws share a key: they would not be independent"
        self.used.add(key)
        at = len(self.options)
        if at == len(self.script):
            self.script.append(0)
        self.options.append(len(possible))
        chosen = possible[self.script[at]]
        self.weight *= weights[chosen] / sum(weights)
        return chosen

    def pick(self, weights: Tensor, keys: Tensor) -> Tensor:
        assert bool((weights >= -1e-15).all()), "a weight is negative"
        assert bool(torch.isfinite(weights).all()), "a weight is not a number"
        rows = weights.clamp(min=0).tolist()
        return torch.tensor([self._choose(w, k) for w, k in zip(rows, keys.tolist(), strict=True)], dtype=torch.int64)

    def race(self, weights: Tensor, keys: Tensor, winners: int = 1) -> Tensor:
        """A race ends like draws without replacement; that two races share noise is not modelled here."""
        left, places = weights.clone(), []
        for place in range(winners):
            places.append(self.pick(left, keys * 1000 + place))
            left = left.scatter(1, places[-1][:, None], 0.0)
        return torch.stack(places, 1)


def law_of(run: Callable[[Enumerator], Hashable]) -> dict[Hashable, float]:
    """The exact law of what `run` returns."""
    law: dict[Hashable, float] = defaultdict(float)
    script: list[int] = []
    while True:
        rng = Enumerator(script)
        law[run(rng)] += rng.weight
        script = rng.script[: len(rng.options)]
        while script and script[-1] + 1 == rng.options[len(script) - 1]:
            script.pop()
        if not script:
            return dict(law)
        script[-1] += 1


def view_of(temperature: float = 1.0, nodes: int = 100, depth: int = 100, root: int = 0) -> BatchView:
    return BatchView(
        seq_ids=(0,),
        tokens=[[root]],
        prompt_lengths=(1,),
        params=(SamplingParams(temperature=temperature),),
        bad_words=((),),
        lengths=torch.tensor([1]),
        seeds=torch.tensor([7]),
        temperature=torch.tensor([temperature]),
        max_nodes=torch.tensor([nodes]),
        max_depth=torch.tensor([depth]),
    )


@dataclass(frozen=True)
class TableModel:
    """A drafter's network as a table: the logits are the logarithms of its rows."""

    rows: Rows

    def begin(self, view: BatchView) -> Tensor:
        return self._logits([()])

    def extend(self, builder: TreeBuilder, columns: Tensor) -> Tensor:
        return self._logits([path_to(builder, int(c)) for c in columns[0]])[None]

    def _logits(self, prefixes: list[tuple[int, ...]]) -> Tensor:
        return torch.tensor([self.rows(prefix) for prefix in prefixes], dtype=torch.float64).log()


def path_to(builder: TreeBuilder, column: int) -> tuple[int, ...]:
    path: list[int] = []
    while column > 0:
        path.append(int(builder.tokens[0, column]))
        column = int(builder.parents[0, column])
    return tuple(reversed(path))


def target_rows(tree: TokenTree, p: Rows) -> Tensor:
    prefixes = [tuple(tree.tokens[[n for n in path if n >= 0]].tolist()[1:]) for path in tree.paths.tolist()]
    return torch.tensor([p(prefix) for prefix in prefixes], dtype=torch.float64)


def emitted(tree: TokenTree, verdict) -> tuple[int, ...]:
    return tuple(verdict.to_host(tree).tokens[0])


def round_law(grower: Grower, verifier: Verifier, p: Rows, q: Rows, view: BatchView | None = None):
    """h(s): the law of what one round of the shipped grower and verifier emits."""
    view = view or view_of()

    def run(rng: Enumerator) -> tuple[int, ...]:
        tree, _ = grower.grow(TableModel(q), view, Budget(100), rng).build()
        tree.validate()
        return emitted(tree, verifier.verify(tree, target_rows(tree, p), view, rng))

    return law_of(run)


def law_error(h: dict, p: Rows, vocabulary: int) -> float:
    """The largest violation of criterion (1) over all strings one longer than anything the tree can hold."""
    longest = max(len(s) for s in h)
    worst = abs(sum(h.values()) - 1)
    for y in itertools.product(range(vocabulary), repeat=longest):
        reached = sum(h.get(y[:n], 0.0) * continuation(p, y, n) for n in range(1, longest + 1))
        worst = max(worst, abs(reached - continuation(p, y, 0)))
    return worst


def continuation(p: Rows, y: tuple[int, ...], start: int) -> float:
    """p(y[start:] | y[:start])."""
    chance = 1.0
    for i in range(start, len(y)):
        chance *= p(y[:i])[y[i]]
    return chance


def assert_lossless(h: dict, p: Rows, vocabulary: int, tolerance: float = 1e-12) -> None:
    error = law_error(h, p, vocabulary)
    assert error <= tolerance, f"criterion (1) is violated by {error:.2e}"


def dirichlet(rng: random.Random, vocabulary: int, alpha: float) -> Row:
    gammas = [rng.gammavariate(alpha, 1) + 1e-9 for _ in range(vocabulary)]
    return tuple(g / sum(gammas) for g in gammas)


def random_rows(seed: int, vocabulary: int, alpha: float = 1.0) -> Rows:
    return cache(lambda prefix: dirichlet(random.Random(f"{seed}/{prefix}"), vocabulary, alpha))


def aligned_rows(p: Rows, seed: int, vocabulary: int, mix: float) -> Rows:
    noise = random_rows(seed + 10_000, vocabulary)
    return cache(lambda v: tuple(mix * a + (1 - mix) * b for a, b in zip(p(v), noise(v), strict=True)))


def constant(*row: float) -> Rows:
    return lambda prefix: tuple(x / sum(row) for x in row)
