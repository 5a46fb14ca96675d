"""How the children of a node are chosen or drawn. Shapes: B sequences · k frontier nodes · V vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from draftwood.drafting import Vocabulary
from draftwood.ops.choice import ranked
from draftwood.protocols import BatchView, Randomness
from draftwood.rng import Purpose, derive, round_keys, target_keys
from draftwood.sampling import draft_distribution
from draftwood.tree import Draw


@dataclass(frozen=True)
class Children:
    """One child for each of k frontier nodes, and how it was chosen."""

    tokens: Tensor  # [B, k]
    exists: Tensor | None  # [B, k] bool; None: all of them
    draw: Draw
    q: Tensor | None = None  # [B, k, V]; the same tensor as that of a sibling drawn from the same law


@dataclass(frozen=True)
class Frontier:
    """The nodes whose children are to be chosen."""

    columns: Tensor  # [B, k]
    depth: Tensor  # [B, k]
    logits: Tensor  # [B, k, R]
    view: BatchView
    rng: Randomness
    vocabulary: Vocabulary | None = None  # the tokens these logits are of; None: all

    @cached_property
    def spread(self) -> Tensor:
        """Logits of all tokens. [B, k, V]."""
        return self.logits if self.vocabulary is None else self.vocabulary.spread(self.logits)

    @cached_property
    def q(self) -> Tensor:
        """The draft law after each node. [B, k, V]."""
        temperature = self.view.temperature[:, None].expand_as(self.columns)
        return draft_distribution(self.spread.flatten(0, 1), temperature.reshape(-1)).view_as(self.spread)

    def best(self, count: int) -> Tensor:
        """The likeliest tokens after each node, at most `count`, likeliest first. [B, k, count]."""
        if self.vocabulary is None or count > self.logits.shape[-1]:
            return ranked(self.spread, min(count, self.spread.shape[-1]))
        return ranked(self.logits, count, self.vocabulary.tokens)

    def pick(self, weights: Tensor, trial: int) -> Tensor:
        """A token for each node in proportion to `weights` [B, k, V]; `trial` tells its siblings apart. [B, k]."""
        rounds = round_keys(self.view.seeds, self.view.lengths, Purpose.DRAFT)
        keys = derive(rounds[:, None].expand_as(self.columns), self.columns, trial)
        return self.rng.pick(weights.flatten(0, 1), keys.reshape(-1)).view_as(self.columns)

    def pick_for_each(self, q: Tensor, parents: Tensor) -> Tensor:
        """A token for each of several draws behind the same nodes, `parents` [B, n] columns, `q` [B, n, V]. [B, n]."""
        rounds = round_keys(self.view.seeds, self.view.lengths, Purpose.DRAFT)
        number = torch.arange(parents.shape[1], device=parents.device).expand_as(parents)
        keys = derive(rounds[:, None].expand_as(parents), parents, number)
        return self.rng.pick(q.flatten(0, 1), keys.reshape(-1)).view_as(parents)

    def race(self, winners: int) -> Tensor:
        """What the target would draw after each node if it were the draft: its own noise, on q. [B, k, winners]."""
        positions = self.view.lengths[:, None] + self.depth
        keys = target_keys(self.view.seeds[:, None].expand_as(positions), positions)
        raced = self.rng.race(self.q.flatten(0, 1), keys.reshape(-1), winners)
        return raced.view(*self.columns.shape, winners)


class ChildPicker(Protocol):
    """How the children of a node are chosen, in the order a verifier will try them."""

    @property
    def draws(self) -> frozenset[Draw]:
        """All the ways it may choose."""
        ...

    def children(self, frontier: Frontier, width: int) -> Iterator[Children]:
        """Up to `width` children for every frontier node, one at a time."""
        ...


class Best:
    """The likeliest tokens: chosen, not drawn."""

    draws = frozenset({Draw.POINT})

    def children(self, frontier: Frontier, width: int) -> Iterator[Children]:
        """In falling order of likelihood."""
        for token in frontier.best(width).unbind(-1):
            yield Children(token, None, Draw.POINT)


class Independent:
    """Independent draws; the same token may come twice."""

    draws = frozenset({Draw.IID})

    def children(self, frontier: Frontier, width: int) -> Iterator[Children]:
        """In the order drawn."""
        for trial in range(width):
            token = frontier.pick(frontier.q, trial)
            yield Children(token, None, Draw.IID, frontier.q)


class WithoutReplacement:
    """Draws that never repeat a sibling: each from what the earlier ones left of q (RSD, Sequoia)."""

    draws = frozenset({Draw.WITHOUT_REPLACEMENT})

    def children(self, frontier: Frontier, width: int) -> Iterator[Children]:
        """In the order drawn, until the support is exhausted."""
        left = frontier.q
        for trial in range(width):
            q, exists = normalised(left)
            token = frontier.pick(q, trial)
            yield Children(token, exists, Draw.WITHOUT_REPLACEMENT, q)
            left = left.scatter(-1, token[..., None], 0.0)


class Hybrid:
    """The likeliest width - 1 tokens, and one drawn from the rest of q (Hu et al. 2025).

    The drawn one comes first: tried against the whole of p, with the chosen ones catching the residual, the plain
    walk is the optimal rule for this draw.
    """

    draws = frozenset({Draw.POINT, Draw.TAIL})

    def children(self, frontier: Frontier, width: int) -> Iterator[Children]:
        """The tail draw, then the chosen ones in falling order."""
        fixed = frontier.best(width - 1)
        q, exists = normalised(frontier.q.scatter(-1, fixed, 0.0))
        yield Children(frontier.pick(q, 0), exists, Draw.TAIL, q)
        for token in fixed.unbind(-1):
            yield Children(token, None, Draw.POINT)


class Coupled:
    """What the target's own noise makes of q: chosen, not drawn, because the same noise decides what is accepted.

    With one child this is drafter-invariant coupling (Daliri et al. 2024), with several its list version.
    """

    draws = frozenset({Draw.POINT})

    def children(self, frontier: Frontier, width: int) -> Iterator[Children]:
        """The winners of the race, first to last."""
        for token in frontier.race(min(width, frontier.q.shape[-1])).unbind(-1):
            yield Children(token, None, Draw.POINT)


def normalised(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Rows that sum to one, and whether there was anything to share out."""
    total = weights.sum(-1, keepdim=True)
    exists = total > 0
    return weights / torch.where(exists, total, 1), exists.squeeze(-1)
