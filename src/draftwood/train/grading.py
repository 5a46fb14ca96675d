"""How guesses are judged by the target's law, and how the depths of a draft make one loss.

Shapes: N places that count · R draft vocabulary · D drafts of a batch · K depths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from draftwood.nets.parts import VocabularyHead
from draftwood.train.losses import Mix, agreement, chain_loss, dpace, rows_of_chunk


@dataclass(frozen=True)
class Graded:
    """One depth of all drafts of a batch: what was lost, and how they would have fared."""

    losses: Tensor  # [N]
    accept: Tensor  # [N] the chance that a drawn guess is accepted; its gradient only where the mix has `e2e`
    agrees: Tensor  # [N] bool: the likeliest guess is the target's likeliest token
    drafts: Tensor  # [N] int64: which of the batch's drafts each is of
    num_drafts: int

    def mean(self, of: Tensor) -> Tensor:
        """Of numbers of its places; 0 without any, where answers are short."""
        return of.sum() / max(len(of), 1)


@dataclass(frozen=True)
class Truth:
    """The target's law of tokens it wrote, as far as a draft could guess them. Found once, read at every depth."""

    logits: Tensor  # [N, R]
    outside: Tensor | None  # [N] its probability of all that cannot be guessed; None: everything can
    within: Tensor | None  # [N] bool: its likeliest token can be guessed

    @classmethod
    def of(cls, head: VocabularyHead, logits: Tensor) -> Truth:
        """Of the target's logits over its whole vocabulary, [N, V]."""
        if head.tokens is None:
            return cls(logits, None, None)
        narrow = head.narrow(logits)
        chunk = rows_of_chunk(logits.shape[1], logits.device)
        whole = torch.cat([part.float().logsumexp(-1) for part in logits.split(chunk)])
        outside = 1 - (narrow.float().logsumexp(-1) - whole).exp()
        return cls(narrow, outside, narrow.amax(-1) >= logits.amax(-1))

    def at(self, rows: Tensor) -> Truth:
        """Some of it, in another order."""
        outside, within = (None if part is None else part[rows] for part in (self.outside, self.within))
        return Truth(self.logits[rows], outside, within)


@dataclass
class Grader:
    """Compares draft logits with the target's where they count."""

    mix: Mix
    head: VocabularyHead

    def __call__(self, logits: Tensor, truth: Truth, tokens: Tensor, drafts: Tensor, num_drafts: int) -> Graded:
        """Draft logits [N, R], the target's, the tokens that came [N], and which drafts of how many they are of [N]."""
        losses, accept = self.mix.graded(truth.logits, logits, self.head.places(tokens), truth.outside)
        agrees = agreement(truth.logits, logits.detach())
        agrees = agrees if truth.within is None else agrees & truth.within
        return Graded(losses, accept, agrees, drafts, num_drafts)


class Weighing(Protocol):
    """How much each depth of a draft counts."""

    def __call__(self, graded: Sequence[Graded]) -> Tensor:
        """The losses of all depths as one. Scalar."""
        ...


@dataclass(frozen=True)
class Fixed:
    """Each depth by a weight of its own, whatever has been learnt."""

    weights: Tensor  # [K]

    def __call__(self, graded: Sequence[Graded]) -> Tensor:
        """Means of the depths, weighted."""
        shares = (self.weights / self.weights.sum()).tolist()
        means = [share * grade.mean(grade.losses) for share, grade in zip(shares, graded, strict=True)]
        return torch.stack(means).sum()


class Paced:
    """D-PACE: each guess by what its failure would cost its draft, as acceptance is now.

    The paper takes exp(-ce) for the chance of a guess; here it is the acceptance itself, which is known.
    """

    def __call__(self, graded: Sequence[Graded]) -> Tensor:
        """The mean of all guesses, weighted."""
        losses, _ = together(graded, [grade.losses for grade in graded])
        accept, counts = together(graded, [grade.accept for grade in graded])
        weights = dpace(accept, mask=counts)
        return (weights * losses).sum() / weights.sum().clamp_min(1e-12)


def together(graded: Sequence[Graded], numbers: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Numbers of each depth's places side by side by draft, and where there are any. [D, K], [D, K] bool."""
    size = graded[0].num_drafts
    columns = [n.new_zeros(size).index_copy(0, grade.drafts, n) for grade, n in zip(graded, numbers, strict=True)]
    there = [
        torch.zeros(size, dtype=torch.bool, device=n.device).index_fill(0, grade.drafts, True)
        for grade, n in zip(graded, numbers, strict=True)
    ]
    return torch.stack(columns, 1), torch.stack(there, 1)


def whole_loss(graded: Sequence[Graded], mix: Mix, weigh: Weighing) -> Tensor:
    """Of guesses one by one and, where the mix has `e2e`, of drafts: how much of them is not accepted, at most 1."""
    total = weigh(graded)
    if not mix.end_to_end:
        return total
    accept, counts = together(graded, [grade.accept for grade in graded])
    lost = counts.sum(1) + chain_loss(accept, counts)  # [D] guesses
    return total + mix.end_to_end * lost.sum() / (counts.any(1).sum().clamp_min(1) * len(graded))


def summed(graded: Sequence[Graded], mix: Mix, weigh: Weighing) -> dict[str, Tensor]:
    """The loss of all depths, and what one would hear of them while training."""
    total = whole_loss(graded, mix, weigh)
    alive = length = torch.ones_like(total.detach())
    report = {}
    for depth, grade in enumerate(graded, 1):
        if not len(grade.drafts):
            break  # nothing is known of it, nor of what lies deeper
        agreed = grade.mean(grade.agrees)
        alive = alive * agreed
        length = length + alive
        report[f"agree_{depth}"] = agreed
        report[f"accept_{depth}"] = grade.mean(grade.accept.detach())
    rows = torch.full((), float(len(graded[0].drafts)), device=total.device)
    return {"loss": total, "chain": length, "tokens": rows, **report}
