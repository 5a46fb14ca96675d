"""Every law on recorded rows: expected tokens a step, given the tree, without drawing anything."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from draftwood.drafting import Grower
from draftwood.growers import Best, Hybrid, Levels, Paths, WithoutReplacement
from draftwood.lab.rows import Rows
from draftwood.tree import DraftLaw, Draw, TokenTree
from draftwood.verifiers import LAWS, NodeLaw

# Not replayed: what needs a solver, what no expectation can be given for, and other names of the same walk.
LEFT_OUT = {"optimal", "coupled", "walk"}


def growers(depth: int, paths: int) -> dict[str, Grower]:
    """The trees to record; those with fewer paths are parts of them, but for the hybrid, whose tail differs."""
    chain = (1,) * (depth - 1)
    trunk = max(1, depth // 3)
    trees: dict[str, Grower] = {
        "paths": Paths(paths, depth),
        "delayed": Paths(paths, depth - trunk, trunk),
        "without-replacement": Levels((paths, *chain), WithoutReplacement()),
        "chosen": Levels((paths, *chain), Best()),
    }
    return trees | {f"hybrid-{k}": Levels((k, *chain), Hybrid()) for k in range(2, paths + 1)}


@dataclass(frozen=True)
class Sample:
    """A tree as one family of trees would have drawn it with `paths` branches."""

    family: str
    paths: int
    law: DraftLaw
    tree: TokenTree
    p: Tensor  # [M, V]


def samples(rows: Rows, depth: int, paths: int) -> Iterator[Sample]:
    """All trees contained in a recorded one."""
    grower = growers(depth, paths)[rows.family]
    if rows.family.startswith("hybrid"):
        yield Sample("hybrid", int(rows.family.removeprefix("hybrid-")), grower.law, rows.tree, rows.p)
        return
    for k in range(1, paths + 1):
        if k == 1 and rows.family not in ("paths", "chosen"):
            continue  # one path is a sampled or a chosen chain, whatever it might have become
        law = replace(grower.law, chain=k == 1)
        tree, nodes = first_paths(rows.tree, k)
        yield Sample(rows.family, k, law, tree, rows.p[nodes])


def first_paths(tree: TokenTree, count: int) -> tuple[TokenTree, Tensor]:
    """The part of one tree that its first `count` paths make up, and which of its nodes those are."""
    draws = [[node for node in row if node >= 0] for row in tree.tries.tolist()]
    visits: Counter[int] = Counter()
    keep = torch.zeros(tree.num_nodes, dtype=torch.bool)
    for _ in range(count):
        node: int | None = 0
        while node is not None:
            keep[node] = True
            # Every path has a draw of its own behind a node, but for a trunk's, where one draw is that of all.
            own = min(visits[node], len(draws[node]) - 1)
            visits[node] += 1
            node = draws[node][own] if draws[node] else None
    place = torch.arange(tree.tries.shape[1])
    tried = torch.tensor([visits[node] for node in range(tree.num_nodes)])
    tries = torch.where(place < tried[:, None], tree.tries.cpu(), -1).to(tree.tokens.device)
    whole = replace(tree, shape=tree.shape.linked(tries, tree.parents))
    part, nodes = whole.part(keep.to(tree.tokens.device))
    return part, nodes.whole


def laws_for(sample: Sample) -> list[str]:
    """Laws that are exact for a tree, each under one name; lossy ones on independent paths only."""
    if sample.law.draws <= {Draw.POINT}:
        return ["match"]  # no lossless law accepts more of chosen tokens, or less
    found = {name: entry() for name, entry in LAWS.items() if name not in LEFT_OUT}
    names = [name for name, law in found.items() if law.refuses(sample.law) is None]
    if sample.law.chain:  # on one path most laws are one of two
        names = [n for n in names if n in ("match", "token", "block") or not found[n].lossless]
    return [n for n in names if found[n].lossless or sample.family == "paths"]


def expected_tokens(name: str, sample: Sample) -> float:
    """Tokens a step to be expected from one law on one tree."""
    tree = sample.tree
    law = LAWS[name]()
    if not isinstance(law, NodeLaw):  # match: the target's own draw, wherever it falls; as if all were chosen
        law, tree = LAWS["walk"](), tree.forget_draws()
        assert isinstance(law, NodeLaw)
    return 1 + float(law.odds(tree, sample.p).expected_length(tree)[0])


@dataclass
class Results:
    """Expected tokens a step by context: what the table and the claims are made of."""

    tokens: dict[tuple[float, str, int, str], dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    nodes: dict[tuple[float, str, int], list[int]] = field(default_factory=lambda: defaultdict(list))

    def add(self, rows: Rows, depth: int, paths: int) -> None:
        """Replay every law on every tree in `rows`."""
        for sample in samples(rows, depth, paths):
            self.nodes[(rows.temperature, sample.family, sample.paths)].append(sample.tree.num_drafted)
            for name in laws_for(sample):
                key = (rows.temperature, sample.family, sample.paths, name)
                self.tokens[key][rows.context] = expected_tokens(name, sample)

    def cells(self) -> list[dict[str, object]]:
        """One record for each temperature, tree and law."""
        return [
            {
                "temperature": temperature,
                "tree": family,
                "paths": paths,
                "law": law,
                "lossless": LAWS[law]().lossless,
                "tokens": statistics.mean(found.values()),
                "error": standard_error(list(found.values())),
                "nodes": statistics.mean(self.nodes[(temperature, family, paths)]),
                "contexts": len(found),
            }
            for (temperature, family, paths, law), found in self.tokens.items()
        ]

    def gain(self, temperature: float, family: str, paths: int, law: str, over: str) -> tuple[float, float, float]:
        """Mean tokens with `law`, with `over`, and the standard error of their difference in the same contexts."""
        mine, others = (self.tokens[(temperature, family, paths, name)] for name in (law, over))
        shared = sorted(mine.keys() & others.keys())
        if not shared:
            nan = float("nan")
            return nan, nan, nan
        differences = [mine[c] - others[c] for c in shared]
        return (
            statistics.mean(mine[c] for c in shared),
            statistics.mean(others[c] for c in shared),
            standard_error(differences),
        )


def standard_error(values: list[float]) -> float:
    """Of the mean; nothing is known from one value."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
