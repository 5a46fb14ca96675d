"""Prompt lookup on the device: what followed the last few tokens when they stood in the text before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from draftwood.drafting import Proposal, Silent
from draftwood.ops.lookup import suffix_lookup
from draftwood.protocols import BatchView, Randomness
from draftwood.tree import POINT_CHAIN, TokenTree

CHANCES = (0.0, 0.25, 0.4, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85)  # of a token behind so many alike


def check_settings(nodes: int, longest: int, shortest: int, branches: int) -> None:
    """Refuse settings that an n-gram drafter can do nothing with."""
    if longest < 1 or not 0 <= shortest <= longest:
        raise ValueError("an n-gram drafter needs 0 <= shortest <= longest, and longest at least 1")
    if nodes < 1 or branches < 1:
        raise ValueError("an n-gram drafter needs at least one node and one branch")


class LookupDrafter(Silent):
    """Looks the last `longest` … `shortest` tokens up in the sequence itself: longest match first, most recent first.

    `shortest` 0: one, since captured trees have one size, and where rows are run in any case a poor reason for a draft
    is better than none.
    """

    law = POINT_CHAIN
    surplus = 5  # looking up costs next to nothing

    def __init__(self, nodes: int = 4, longest: int = 4, shortest: int = 0) -> None:
        check_settings(nodes, longest, shortest, 1)
        self.max_nodes = nodes
        self.longest = longest
        self.shortest = shortest or 1

    @property
    def sizes(self) -> Sequence[int]:
        """Any."""
        return range(self.max_nodes + 1)

    def depth(self, nodes: int) -> int:
        """A chain."""
        return nodes

    def propose(self, view: BatchView, nodes: int, rng: Randomness) -> Proposal:
        """A chain of what followed; absent from where nothing did, or there is no room."""
        if nodes == 0:
            return Proposal.bare(view)
        found, alike = suffix_lookup(view.history, view.rows, view.lengths, nodes, self.longest, self.shortest)
        if view.max_nodes is not None and view.max_depth is not None:
            room = torch.minimum(view.max_nodes, view.max_depth)
            found = found.masked_fill(torch.arange(nodes, device=found.device) >= room[:, None], -1)
        survival = _survival(self.longest, nodes, view.roots.device)[alike].view(-1)
        return Proposal(chains_behind(view.roots, found), survival=survival)


def chains_behind(roots: Tensor, tokens: Tensor) -> TokenTree:
    """A chain of `tokens` [B, n] behind each root, absent from the first -1 on."""
    every = torch.cat([roots[:, None], tokens], 1).view(-1)
    chain = _chains(*tokens.shape, every.device)
    gone = every < 0
    # Behind an absent node of a chain all are absent.
    tries = chain.tries.masked_fill(gone[chain.tries.clamp(min=0)], -1)
    parents = torch.where(gone, torch.arange(len(every), device=every.device), chain.parents)
    return replace(chain, tokens=every, shape=chain.shape.linked(tries, parents))


@lru_cache(maxsize=1024)
def _survival(longest: int, nodes: int, device: torch.device) -> Tensor:
    """The chance that each node of a chain is accepted, by how many tokens were alike before it; every accepted one is
    one more. Rough, and the same for all texts: it tells chains apart. [longest + 1, 1 + nodes].
    """
    most = len(CHANCES) - 1
    chances = [[1.0, *(CHANCES[min(alike + node, most)] for node in range(nodes))] for alike in range(longest + 1)]
    return torch.tensor(chances).cumprod(1).to(device)


@lru_cache(maxsize=1024)
def _chains(size: int, nodes: int, device: torch.device) -> TokenTree:
    """Chains for so many sequences, whose tokens are yet to come."""
    one = [0] * (nodes + 1), list(range(-1, nodes))
    tree = TokenTree.of_points([one])
    shape = tree.shape.tiled(size, device).known()
    return TokenTree.chosen(tree.tokens.repeat(size).to(device), shape)
