"""How likely drafts really are: the chances that drafters give, corrected by what became of nodes, on the device.

For each drafter and depth, isotonic regression of whether a node was accepted on the chance it was given. Corrected
chances decide which nodes of a batch are scored, and so are for chosen nodes only: whether a drawn node is scored must
not depend on what was drawn. They follow from past steps alone. Nothing here looks at values.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftwood.drafting import Proposal
from draftwood.protocols import BatchView
from draftwood.tree import Verdict

DEPTHS = 12  # deeper nodes count as these
BINS = 16  # of chances, evenly by their log-odds
WIDEST = 6.0  # log-odds of the first and last
MEMORY = 0.99  # what a step counts after the next one
PRIOR = 4.0  # nodes for which a drafter's own chances count
RAW = 1e-6  # nodes alike by correction are ranked as the drafter ranks them


@dataclass
class SurvivalCalibration:
    """What became of nodes so far, for each drafter."""

    _counts: dict[str | None, Tensor] = field(default_factory=dict)  # [2, DEPTHS, BINS] nodes, and accepted ones

    def chances(self, proposal: Proposal, view: BatchView) -> Tensor | None:
        """The corrected chance of each node of trees that were chosen; None where none are known. [M]."""
        raw = proposal.survival
        if raw is None:
            return None
        table = torch.stack([fitted(self._of(name, raw.device)) for name in view.mode.drafters]).flatten(0, 1)
        place = (_odds(raw) + WIDEST) / STEP
        left = place.floor().clamp(0, BINS - 2)
        low = table[self._lines(proposal, view), left.long()]
        high = table[self._lines(proposal, view), left.long() + 1]
        return torch.sigmoid(low + (place - left) * (high - low)) + RAW * raw.float()

    def learn(self, proposal: Proposal, view: BatchView, verdict: Verdict, real: Tensor) -> None:
        """What became of the nodes of a step; sequences that are not `real` [B] only fill it up."""
        raw, tree = proposal.survival, proposal.tree
        if raw is None or tree.q is not None or not tree.num_drafted:
            return
        count = tree.num_nodes
        there = ((tree.tokens >= 0) & (tree.local > 0) & real[tree.owner]).float()
        ends = torch.where(verdict.path >= 0, verdict.path, count).flatten()
        accepted = torch.zeros(count + 1, device=raw.device).scatter(0, ends, 1.0)[:count]
        cells = self._lines(proposal, view) * BINS + ((_odds(raw) + WIDEST) / STEP).round().long().clamp(0, BINS - 1)
        found = torch.zeros(2, len(view.mode.drafters) * DEPTHS * BINS, device=raw.device)
        found = found.index_add(1, cells, torch.stack([there, there * accepted]))
        for number, name in enumerate(view.mode.drafters):
            own = found.view(2, -1, DEPTHS, BINS)[:, number]
            counts = self._of(name, raw.device)
            counts.copy_(MEMORY * counts + own)

    def _of(self, name: str | None, device: torch.device) -> Tensor:
        if name not in self._counts:
            self._counts[name] = torch.zeros(2, DEPTHS, BINS, device=device)
        return self._counts[name]

    def _lines(self, proposal: Proposal, view: BatchView) -> Tensor:
        """The line of the table for each node: its drafter's, for its depth. [M]."""
        depth = (proposal.tree.depth - 1).clamp(0, DEPTHS - 1)
        return depth if view.drafter is None else depth + DEPTHS * view.drafter[proposal.tree.owner]


STEP = 2 * WIDEST / (BINS - 1)


def _odds(chance: Tensor) -> Tensor:
    """Log-odds, within the bins."""
    return torch.logit(chance.float(), eps=1e-6).clamp(-WIDEST, WIDEST)


def fitted(counts: Tensor) -> Tensor:
    """Log-odds of nodes in each bin by isotonic regression, so that no depth ranks its nodes otherwise than the drafter
    does. [2, D, BINS] -> [D, BINS].
    """
    centres = torch.sigmoid(torch.arange(BINS, device=counts.device) * STEP - WIDEST)
    weight = (counts[0] + PRIOR).cumsum(-1)
    hits = (counts[1] + PRIOR * centres).cumsum(-1)
    before = torch.nn.functional.pad
    # Of all runs of bins from j to k their mean; a bin's value is the largest, over j up to it, of the smallest, over k
    # from it on.
    runs = hits[:, None] - before(hits, (1, 0))[:, :-1, None]
    runs = runs / (weight[:, None] - before(weight, (1, 0))[:, :-1, None]).clamp(min=PRIOR / 2)
    known = torch.ones(BINS, BINS, dtype=torch.bool, device=counts.device).triu()
    smallest = runs.masked_fill(~known, torch.inf).flip(-1).cummin(-1).values.flip(-1)
    mean = smallest.masked_fill(~known, -torch.inf).amax(1)
    return torch.logit(mean, eps=1e-6)
