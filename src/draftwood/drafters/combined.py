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

    def node(self, token: int, depth: int, word: float | None) -> _Node:
        """What is proposed at a depth with a word for its chance."""
        key = min(depth, DEEPEST), -1 if word is None else int(word * BINS)
        if key not in self._records:
            self._records[key] = [WEIGHT * (ASSUMED if word is None else word), WEIGHT]
        return _Node(token, self._records[key])

    def nodes(self, tree: HostTree, chances: Sequence[float] | None) -> list[_Node]:
        """The nodes behind the root, and those behind them."""
        tokens, parents = tree
        root: list[_Node] = []
        made, depths = [root], [0]
        for node in range(1, len(tokens)):
            above = parents[node]
            word = None if chances is None else min(chances[node] / max(chances[above], 1e-9), 1.0)
            depths.append(depths[above] + 1)
            one = self.node(tokens[node], depths[node], word)
            made[above].append(one)
            made.append(one.children)
        return root


def _observe(nodes: Sequence[_Node], news: Sequence[int]) -> None:
    """The text went on with `news`: count all nodes whose paths were right so far."""
    for token in news:
        following: Sequence[_Node] = ()
        for node in nodes:
            learn(node.record, node.token == token)
            if node.token == token:
                following = node.children
        nodes = following


def _agreed(behind: Sequence[Sequence[_Node]]) -> dict[int, tuple[float, list[list[_Node]]]]:
    """What the sources propose behind one path: tokens, the chance that not all that propose it are wrong, and what
    each of them proposes behind it.
    """
    wrong: dict[int, float] = {}
    onward: dict[int, list[list[_Node]]] = {}
    for nodes in behind:
        for node in nodes:
            wrong[node.token] = wrong.get(node.token, 1.0) * (1 - node.chance)
            onward.setdefault(node.token, []).append(node.children)
    return {token: (1 - chance, onward[token]) for token, chance in wrong.items()}


def merge(
    tree: PointTree, sources: Sequence[Sequence[_Node]], calibrations: Sequence[_Calibration], least: float
) -> list[_Node]:
    """Fill a tree with the likeliest nodes of all sources; what was considered behind the root, and behind that.

    Sources that agree are seldom independent, so what their agreement is worth is measured too, by how many agree.
    """
    heap: list[tuple[float, int, int, _Node, list[list[_Node]]]] = []
    arrived, considered = 0, _Node(tree.root, [1.0, 1.0])
    found: tuple[int, _Node, Sequence[Sequence[_Node]]] | None = (0, considered, sources)
    while found is not None:
        parent, above, behind = found
        depth = tree.depths[parent] + 1
        onwards = []
        for token, (word, onward) in _agreed(behind).items():
            above.children.append(calibrations[len(onward) - 1].node(token, depth, word))
            onwards.append(onward)
        total = max(sum(node.chance for node in above.children), 1.0)
        for node, onward in zip(above.children, onwards, strict=True):
            reached = node.chance / total * tree.chances[parent]
            if reached > least and depth <= tree.max_depth:
                heappush(heap, (-reached, arrived, parent, node, onward))
                arrived += 1
        if not heap or len(tree.tokens) > tree.max_nodes:
            break
        minus, _, parent, node, onward = heappop(heap)
        added = tree.add(parent, node.token, -minus)
        found = None if added is None else (added, node, onward)
    return considered.children


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
        self._agreements = [_Calibration() for _ in sources]  # of so many sources, less one
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
            tree = PointTree(tokens[-1], min(view.max_nodes[b], nodes), view.max_depth[b])
            considered = merge(tree, proposed, self._agreements, self.least) if tree.max_nodes > 0 else []
            self._last[seq_id] = len(tokens), [*proposed, considered]
            grown.append(tree)
        return HostTrees.of(grown)

    def release(self, seq_id: int) -> None:
        """All forget the sequence."""
        self._last.pop(seq_id, None)
        for source in self.sources:
            source.release(seq_id)
