"""Trees that the host grows where they are likeliest, node by node."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from heapq import heappop, heappush
from typing import TypeVar

from draftwood.drafters.points import PointTree

Place = TypeVar("Place")


def grow(
    tree: PointTree,
    root: Place,
    successors: Callable[[Place, float], Mapping[int, float]],
    follow: Callable[[Place, int], Place],
    least: float,
) -> None:
    """Fill `tree` with the likeliest nodes, each behind its parent, none of them as unlikely as `least`.

    `successors` gives the chance of tokens that may come behind a place, and need not give those that are less likely
    than its second argument; `follow` gives the place behind one of them.
    """
    offers: list[tuple[float, int, int, int]] = []  # minus chance, order of arrival, parent, token
    places = [root]
    arrived = 0

    def offer(node: int) -> None:
        nonlocal arrived
        above = tree.chances[node]
        if tree.depths[node] >= tree.max_depth or above <= least:
            return
        for token, chance in successors(places[node], least / above).items():
            reached = chance * above
            if reached > least:
                heappush(offers, (-reached, arrived, node, token))
                arrived += 1

    offer(0)
    while offers and len(tree.tokens) <= tree.max_nodes:
        chance, _, parent, token = heappop(offers)
        node = tree.add(parent, token, -chance)
        if node is None:
            return
        if len(tree.tokens) <= tree.max_nodes:
            places.append(follow(places[parent], token))
            offer(node)
