"""How often proposals turned out right, by who made them, how deep they stand and what was said of their chances."""

from __future__ import annotations

import torch
from torch import Tensor

DEEPEST = 4  # depths that are told apart
BINS = 10  # of what is said of a chance; one more where nothing is said
WEIGHT, ASSUMED = 4.0, 0.5  # trials that a word counts for beforehand, and the word where there is none
MEMORY = 1000.0  # trials after which old ones count half


class Calibration:
    """Hits and trials of `tables` kinds of proposals, each by depth and by its word for its own chance.

    What depends on nothing but committed text is counted, so that no token depends on who else is served, with laws
    whose tokens depend on no tree.
    """

    def __init__(self, tables: int) -> None:
        # The last cell takes what does not count.
        self.counts = torch.zeros(2, tables * DEEPEST * (BINS + 1) + 1, dtype=torch.float64)  # hits, trials

    def to(self, device: torch.device) -> None:
        """Count there."""
        self.counts = self.counts.to(device)

    @property
    def nowhere(self) -> int:
        """The cell of what does not count."""
        return self.counts.shape[1] - 1

    def cells(self, table: Tensor, depth: Tensor, word: Tensor) -> Tensor:
        """Where proposals are counted. `word`: the chance of each if its parent is right, nan if unknown. Any shape."""
        place = torch.where(word.isnan(), BINS, (word * BINS).nan_to_num(0.0).long().clamp(max=BINS - 1))
        return (table * DEEPEST + depth.clamp(1, DEEPEST) - 1) * (BINS + 1) + place

    def chances(self, cells: Tensor, word: Tensor) -> Tensor:
        """The chance of each, measured; its own word where little is known. Any shape."""
        hits, trials = self.counts[:, cells]
        return (hits + WEIGHT * word.nan_to_num(ASSUMED)) / (trials + WEIGHT)

    def learn(self, cells: Tensor, hits: Tensor) -> None:
        """Count trials [n], of which some were `hits` [n] bool."""
        hits = hits.double()
        self.counts.index_add_(1, cells, torch.stack([hits, torch.ones_like(hits)]))
        self.counts.mul_(torch.where(self.counts[1] > MEMORY, 0.5, 1.0))

    def reader(self) -> HostReader:
        """The same numbers for the host."""
        return HostReader(*self.counts.tolist())


class HostReader:
    """What a calibration says at one moment, number by number."""

    def __init__(self, hits: list[float], trials: list[float]) -> None:
        self._hits, self._trials = hits, trials

    def chance(self, table: int, depth: int, word: float | None) -> tuple[float, int]:
        """The chance of a proposal, and the cell where it is counted."""
        place = BINS if word is None else min(int(word * BINS), BINS - 1)
        cell = (table * DEEPEST + min(depth, DEEPEST) - 1) * (BINS + 1) + place
        said = WEIGHT * (ASSUMED if word is None else word)
        return (self._hits[cell] + said) / (self._trials[cell] + WEIGHT), cell
