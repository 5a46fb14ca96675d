"""How trees grow on a device: always of one size, level by level, without the host.

Whoever guesses gives logits: at the roots (`begin`), then at each level (`extend`). A `Growth` decides which nodes
there are: of one fixed shape, or wherever the draft is likeliest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Protocol

import torch
from torch import Tensor

from draftwood.cache.batch_state import DeviceBatchView, SamplingMode
from draftwood.cache.kv import Places
from draftwood.growers.pickers import Guessable
from draftwood.protocols import BatchView, Randomness, Verifier
from draftwood.tree import DraftLaw, TokenTree

State = tuple[Tensor, ...]  # what a level of a tree leaves for the next one


def only_compares(kind: SamplingMode, verifier: Verifier) -> bool:
    """Whether a node that holds no token is refused like any wrong one: the law looks at nothing but equality."""
    return verifier.name == "match" or (kind.greedy and verifier.lossless)


def known(tree: TokenTree) -> TokenTree:
    """The same tree without laws, once everything about its structure has been looked at: a graph cannot look."""
    return tree.refilled(tree.tokens)


@dataclass(frozen=True)
class Front:
    """The nodes of one level below the roots, whose children are next."""

    number: int  # how deep they are
    tokens: Tensor  # [B, k]
    parents: Tensor  # [B, k] where in the level above their parents stand
    above: Front | None  # None: the roots

    @cached_property
    def places(self) -> Places:
        """Where a network with a cache of its own keeps them, and what they see of each other."""
        raise NotImplementedError

    @cached_property
    def sources(self) -> Tensor:
        """Where their parents stand among the nodes of all trees in the level above. [B * k]."""
        count = 1 if self.above is None else self.above.tokens.shape[1]
        return (self.parents + _firsts(len(self.parents), count, self.parents.device)).view(-1)

    @cached_property
    def path(self) -> Tensor:
        """The tokens from below the root to each. [B, k, number]."""
        if self.above is None:
            return self.tokens[..., None]
        way = self.above.path.gather(1, self.parents[..., None].expand(-1, -1, self.number - 1))
        return torch.cat([way, self.tokens[..., None]], -1)


# What follows from sizes alone is made once: in a captured round every small kernel is launched again and again.
@lru_cache(maxsize=1024)
def _firsts(size: int, count: int, device: torch.device) -> Tensor:
    """Where the nodes of each of `size` trees begin, if each has `count`. [B, 1]."""
    return count * torch.arange(size, device=device)[:, None]


class Guesser(Protocol):
    """Gives logits of a tree that grows."""

    def begin(self, view: DeviceBatchView) -> tuple[Tensor, State]:
        """Logits at the roots [B, 1, R], and whatever the next level needs of it."""
        ...

    def extend(self, view: DeviceBatchView, front: Front, state: State) -> tuple[Tensor, State]:
        """Logits at the nodes of a level. [B, k, R]."""
        ...

    def among(self, number: int) -> Guessable | None:
        """The tokens that logits at level `number` are of; None: all."""
        ...


class Growth(Protocol):
    """Which nodes there are."""

    @property
    def law(self) -> DraftLaw:
        """How they are chosen."""
        ...

    @property
    def levels(self) -> int:
        """How deep a tree is at most."""
        ...

    def asked(self, nodes: int) -> int:
        """How many nodes a network is asked about for a tree of so many, the roots not counted."""
        ...

    @property
    def sizes(self) -> Sequence[int]:
        """The sizes its trees can have, ascending, roots not counted."""
        ...

    def depth(self, nodes: int) -> int:
        """How deep a tree of so many nodes can be."""
        ...

    def suits(self, kind: SamplingMode, verifier: Verifier) -> bool:
        """Whether its trees can be verified by this law without the host."""
        ...

    def grow(self, guesser: Guesser, view: DeviceBatchView, nodes: int, rng: Randomness) -> TokenTree:
        """A tree of so many draft nodes for every sequence."""
        ...


class GrownTrees:
    """The part of a resident drafter that a growth decides. Subclasses are guessers."""

    waits = False

    def __init__(self, growth: Growth) -> None:
        self.growth = growth

    @property
    def law(self) -> DraftLaw:
        """The growth's."""
        return self.growth.law

    @cached_property
    def sizes(self) -> Sequence[int]:
        """Asked for in every round."""
        return self.growth.sizes

    def depth(self, nodes: int) -> int:
        """As the growth says."""
        return self.growth.depth(nodes)

    def suits(self, kind: SamplingMode, verifier: Verifier) -> bool:
        """As the growth says."""
        return self.growth.suits(kind, verifier)

    def prepare(self, view: BatchView, size: int, nodes: int) -> None:
        """Nothing to ask the host for."""

    def propose(self, view: DeviceBatchView, nodes: int, rng: Randomness) -> TokenTree:
        """Level by level."""
        return self.growth.grow(self, view, nodes, rng)

    def among(self, number: int) -> Guessable | None:
        """All tokens."""
        return None

    def begin(self, view: DeviceBatchView) -> tuple[Tensor, State]:
        """See `Guesser`."""
        raise NotImplementedError

    def extend(self, view: DeviceBatchView, front: Front, state: State) -> tuple[Tensor, State]:
        """See `Guesser`."""
        raise NotImplementedError
