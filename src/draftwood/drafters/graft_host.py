"""Grafting where the host may look: what `graft.py` computes, node by node, which takes less time for small trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from draftwood.drafters.calibration import Calibration, HostReader
from draftwood.drafters.graft import SURE
from draftwood.drafters.points import HostTree
from draftwood.drafting import GRAFTED, MEMBER_BITS, Proposal
from draftwood.protocols import BatchView
from draftwood.tree import TokenTree, Verdict


@dataclass(slots=True)
class _Node:
    """A node of several sources' trees."""

    token: int
    parent: int
    depth: int
    wrong: float = 1.0  # the chance that all that propose it are
    cells: list[int] = field(default_factory=list)  # where it is counted
    columns: int = 0
    draw: int = 0
    q_row: int = -1
    sure: bool = False
    rank: float = SURE
    children: list[_Node] = field(default_factory=list)


@dataclass(frozen=True)
class Listed:
    """A source's trees as lists of the host."""

    trees: list[HostTree]
    chances: list[list[float]] | None
    kept: list[list[list[int]]] | None = (
        None  # columns, draws and rows of q of each tree's nodes; None: chosen, as listed
    )
    q: Tensor | None = None

    @classmethod
    def of(cls, proposal: Proposal) -> Listed:
        """Looks at all of it."""
        tree = proposal.tree
        columns = tree.local if proposal.columns is None else proposal.columns
        above = tree.local[tree.parents.clamp(min=0)].masked_fill(tree.parents < 0, -1)
        tokens, parents, *kept = torch.stack([tree.tokens, above, columns, tree.draw, tree.q_row]).tolist()
        survival = None if proposal.survival is None else proposal.survival.tolist()
        bounds = list(pairwise(tree.offsets.tolist()))
        return cls(
            [(tokens[start:end], parents[start:end]) for start, end in bounds],
            None if survival is None else [survival[start:end] for start, end in bounds],
            [[column[start:end] for column in kept] for start, end in bounds],
            tree.q,
        )


def _merged(sources: Sequence[Listed], b: int, known: HostReader, *, drawn: bool) -> list[_Node]:
    """The nodes of all sources behind one sequence's text, each behind its parent; the root first."""
    nodes, by_path = [_Node(-1, -1, 0)], dict[tuple[int, int], int]()
    for number, source in enumerate(sources):
        if not source.trees:
            continue
        (tokens, parents), place = source.trees[b], [0]
        chances = None if source.chances is None else source.chances[b]
        columns, draws, q_rows = source.kept[b] if source.kept is not None else (range(len(tokens)), None, None)
        sure = drawn and number == 0
        for own in range(1, len(tokens)):
            above, token = place[parents[own]], tokens[own]
            at = by_path.get((above, token))
            if at is None or (sure and draws is not None and draws[own]):
                at = len(nodes)
                one = _Node(token, above, nodes[above].depth + 1, sure=sure)
                nodes.append(one)
                nodes[above].children.append(one)
                by_path.setdefault((above, token), at)
                if sure and draws is not None and q_rows is not None:
                    one.draw, one.q_row = draws[own], q_rows[own]
            one = nodes[at]
            word = None if chances is None else min(chances[own] / max(chances[parents[own]], 1e-9), 1.0)
            chance, cell = known.chance(number, one.depth, word)
            one.wrong *= 1 - chance
            one.cells.append(cell)
            one.columns += 1 + columns[own] << MEMBER_BITS * number
            place.append(at)
    return nodes


def _rate(nodes: list[_Node], known: HostReader, sources: int) -> None:
    """How likely the way to each is: what agreement is worth, shared among siblings that would be more than certain."""
    chances = [1.0]
    for node in nodes[1:]:
        word = 1 - node.wrong
        chance, cell = known.chance(sources + min(len(node.cells), sources) - 1, node.depth, word)
        node.cells.append(cell)
        chances.append(chance)
    sums = [0.0] * len(nodes)
    for node, chance in zip(nodes[1:], chances[1:], strict=True):
        sums[node.parent] += chance
    totals = [max(total, 1.0) for total in sums]
    ways = [1.0]
    for node, chance in zip(nodes[1:], chances[1:], strict=True):
        way = chance / totals[node.parent] * ways[node.parent]
        ways.append(way)
        node.rank = SURE if node.sure else way


def graft_on_host(
    sources: Sequence[Listed], calibration: Calibration, view: BatchView, nodes: int, least: float
) -> tuple[Proposal, HostWaiting]:
    """The trees of all sources as one, and what is to be counted; see `Rated.taken`."""
    known, q = calibration.reader(), sources[0].q
    rooms = [nodes] * view.size if view.max_nodes is None else view.max_nodes.clamp(max=nodes).tolist()
    roots, waiting, kept = view.roots.tolist(), {}, []
    trees: list[tuple[list[int], list[int]]] = []
    for b, (row, room) in enumerate(zip(view.rows.tolist(), rooms, strict=True)):
        merged = _merged(sources, b, known, drawn=q is not None)
        _rate(merged, known, len(sources))
        waiting[row] = merged[0]
        places = [n for n in range(1, len(merged)) if merged[n].rank >= least and merged[n].rank > 0]
        places = [0, *sorted(places, key=lambda n: -merged[n].rank)[:room]]
        number = {n: local for local, n in enumerate(places)} | {-1: -1}
        chosen = [merged[n] for n in places]
        trees.append(([roots[b], *(node.token for node in chosen[1:])], [number[node.parent] for node in chosen]))
        kept += chosen
    columns = [GRAFTED + node.columns if node.depth else 0 for node in kept]
    survival = torch.tensor([min(node.rank, 1.0) for node in kept], dtype=torch.float64)
    tree = TokenTree.of_points(trees)
    if q is not None:
        tree = replace(
            tree, draw=torch.tensor([n.draw for n in kept]), q_row=torch.tensor([n.q_row for n in kept]), q=q
        )
    return Proposal(tree, torch.tensor(columns), survival), HostWaiting(waiting)


@dataclass(frozen=True)
class HostWaiting:
    """Nodes whose outcome is not known yet: the root of each tree, by the sequence's row."""

    roots: dict[int, _Node]

    def learn(self, calibration: Calibration, view: BatchView, tree: TokenTree, verdict: Verdict) -> None:
        """Count every node whose parent was right."""
        cells: list[int] = []
        hits: list[bool] = []
        paths = tree.tokens[verdict.path[:, 1:].clamp(min=0)].tolist()
        ends = zip(view.rows.tolist(), paths, verdict.length.tolist(), verdict.bonus.tolist(), strict=True)
        for row, path, length, bonus in ends:
            behind = [self.roots[row]] if row in self.roots else []
            for token in (*path[:length], bonus):
                tried = [node for above in behind for node in above.children]
                for node in tried:
                    cells += node.cells
                    hits += [node.token == token] * len(node.cells)
                behind = [node for node in tried if node.token == token]
        if cells:
            calibration.learn(torch.tensor(cells), torch.tensor(hits))
