"""What drafters made of several drafters have in common: each behind a guard of its own, all told what they keep."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

from draftwood.batch import ForwardBatch
from draftwood.drafting import Drafter
from draftwood.faults import DrafterHealth, GuardedDrafter
from draftwood.model.runner import ModelRunner
from draftwood.protocols import LOGITS, Features


def fitting(drafter: Drafter, nodes: int) -> int:
    """The largest tree that a drafter can propose with so many nodes."""
    return drafter.sizes[bisect_right(drafter.sizes, nodes) - 1]


class Several:
    """Drafters by name, of which one that fails leaves the others alone."""

    def __init__(self, drafters: Mapping[str, Drafter]) -> None:
        self.guards = tuple(GuardedDrafter(drafter, name) for name, drafter in drafters.items())

    @property
    def health_of_members(self) -> Sequence[DrafterHealth]:
        """Of each drafter."""
        return [health for guard in self.guards for health in guard.health]

    @property
    def needs(self) -> frozenset[int]:
        """What any of them needs."""
        return frozenset().union(*(guard.needs for guard in self.guards))

    @property
    def reads(self) -> bool:
        """Whether any of them does."""
        return any(guard.reads for guard in self.guards)

    @property
    def waits(self) -> bool:
        """Whether any of them does."""
        return any(guard.waits for guard in self.guards)

    @property
    def remembers(self) -> bool:
        """Whether any of them does."""
        return any(guard.remembers for guard in self.guards)

    def attach(self, target: ModelRunner) -> None:
        """Tell all of them."""
        for guard in self.guards:
            guard.attach(target)

    def depth(self, nodes: int) -> int:
        """The deepest of all trees."""
        return max(guard.depth(fitting(guard, nodes)) for guard in self.guards)

    def staged(self, nodes: int) -> int:
        """The most that any of them writes."""
        return max(guard.staged(fitting(guard, nodes)) for guard in self.guards)

    def ingest(self, batch: ForwardBatch, features: Features | None) -> None:
        """Texts go to all that keep something of them."""
        for guard in self.guards:
            if features is None and guard.reads:
                guard.ingest(batch, None)
            elif features is not None and (guard.reads or guard.needs):
                guard.ingest(batch, {layer: features[layer] for layer in guard.needs - {LOGITS}})

    def release(self, seq_id: int) -> None:
        """All of them forget it."""
        for guard in self.guards:
            guard.release(seq_id)
