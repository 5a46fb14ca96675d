"""Trees of several drafters in one: what each proposes, by how often such proposals of it were right.

Every node is a chosen token, so every law for such trees is exact, whichever of them are taken. Which are taken follows
from committed text alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from draftwood.drafters.points import HostDrafter, HostTree, HostTrees, PointTree
from draftwood.drafters.successors import learn
from draftwood.protocols import HostView

BINS = 10  # of a source's own chances
DEEPEST = 4  # depths that are told apart
WEIGHT, ASSUMED = 4.0, 0.5  # trials that a source's word counts for beforehand, and its word where it gives none


@dataclass(frozen=True)
class _Node:
    """What a source proposes behind a path, and the hits and trials of such proposals."""

    token: int
    record: list[float]
    children: list[_Node] = field(default_factory=list)

    @property
    def chance(self) -> float:
        """That it is accepted if the path is."""
        return self.record[0] / self.record[1]


class _Calibration:
    """How often the proposals of one source were right, by depth and its own word; bounded."""

    def __init__(self) -> None:
        self._records: dict[tuple[int, int], list[float]] = {}

    def nodes(self, tree: HostTree, chances: Sequence[float] | None) -> list[_Node]:
        """The nodes behind the root, and those behind them."""
        tokens, parents = tree
        root: list[_Node] = []
        made, depths = [root], [0]
        for node in range(1, len(tokens)):
            above = parents[node]
            word = None if chances is None else min(chances[node] / max(chances[above], 1e-9), 1.0)
            depths.append(depths[above] + 1)
            one = _Node(tokens[node], self._record(depths[node], word))
            made[above].append(one)
            made.append(one.children)
        return root

    def _record(self, depth: int, word: float | None) -> list[float]:
        key = min(depth, DEEPEST), -1 if word is None else int(word * BINS)
        if key not in self._records:
            self._records[key] = [WEIGHT * (ASSUMED if word is None else word), WEIGHT]
        return self._records[key]


def _observe(nodes: Sequence[_Node], news: Sequence[int]) -> None:
    """The text went on with `news`: count all nodes whose paths were right so far."""
    for token in news:
        following: Sequence[_Node] = ()
        for node in nodes:
            learn(node.record, node.token == token)
            if node.token == token:
                following = node.children
        nodes = following


def _offers(behind: Sequence[Sequence[_Node]]) -> dict[int, tuple[float, list[list[_Node]]]]:
    """What the sources propose behind one path: tokens, their chances, and what they propose behind each.

    Where sources agree, the chance is that not all of them are wrong; together no more than 1.
    """
    wrong: dict[int, float] = {}
    onward: dict[int, list[list[_Node]]] = {}
    for nodes in behind:
        for node in nodes:
            wrong[node.token] = wrong.get(node.token, 1.0) * (1 - node.chance)
            onward.setdefault(node.token, []).append(node.children)
    total = max(sum(1 - chance for chance in wrong.values()), 1.0)
    return {token: ((1 - chance) / total, onward[token]) for token, chance in wrong.items()}


def merge(tree: PointTree, sources: Sequence[Sequence[_Node]], least: float) -> None:
    """Fill a tree with the likeliest nodes of all sources."""
    heap: list[tuple[float, int, int, int, list[list[_Node]]]] = []
    arrived = 0
    found: tuple[int, Sequence[Sequence[_Node]]] | None = (0, sources)
    while found is not None:
        parent, behind = found
        for token, (chance, onward) in _offers(behind).items():
            reached = chance * tree.chances[parent]
            if reached > least and tree.depths[parent] < tree.max_depth:
                heappush(heap, (-reached, arrived, parent, token, onward))
                arrived += 1
        if not heap or len(tree.tokens) > tree.max_nodes:
            return
        minus, _, parent, token, onward = heappop(heap)
        node = tree.add(parent, token, -minus)
        found = None if node is None else (node, onward)


class CombinedDrafter(HostDrafter):
    """The likeliest nodes of several host drafters' trees, at most `nodes`; less likely ones than `least` stay out."""

    scores = True

    def __init__(self, sources: Sequence[HostDrafter], nodes: int = 8, least: float = 0.2) -> None:
        if len(sources) < 2 or len({id(source) for source in sources}) < len(sources):
            raise ValueError("a combined drafter needs at least two different ones")
        if nodes < 1 or not 0 <= least < 1:
            raise ValueError("a combined drafter needs at least one node and 0 <= least < 1")
        self.max_nodes = nodes
        self.sources = tuple(sources)
        self.least = least
        self._calibrations = [_Calibration() for _ in sources]
        self._last: dict[int, tuple[int, list[list[_Node]]]] = {}  # length of each text, and what was proposed behind

    def scored(self, view: HostView, nodes: int) -> HostTrees:
        """The trees of all, merged by path."""
        for seq_id, tokens in zip(view.seq_ids, view.tokens, strict=True):
            length, proposed = self._last.pop(seq_id, (0, []))
            for source in proposed:
                _observe(source, tokens[length:])
        made = [source.scored(view, min(nodes, source.max_nodes)) for source in self.sources]
        grown = []
        for b, (seq_id, tokens) in enumerate(zip(view.seq_ids, view.tokens, strict=True)):
            proposed = [
                calibration.nodes(own.trees[b], None if own.chances is None else own.chances[b])
                for calibration, own in zip(self._calibrations, made, strict=True)
            ]
            self._last[seq_id] = len(tokens), proposed
            tree = PointTree(tokens[-1], min(view.max_nodes[b], nodes), view.max_depth[b])
            if tree.max_nodes > 0:
                merge(tree, proposed, self.least)
            grown.append(tree)
        return HostTrees.of(grown)

    def release(self, seq_id: int) -> None:
        """All forget the sequence."""
        self._last.pop(seq_id, None)
        for source in self.sources:
            source.release(seq_id)
