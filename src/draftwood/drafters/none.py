"""Plain decoding: the drafter that proposes nothing. The baseline of every comparison is the same engine with this."""

from __future__ import annotations

from collections.abc import Sequence

from draftwood.drafting import Proposal, Silent
from draftwood.protocols import BatchView, Randomness
from draftwood.tree import POINT_CHAIN


class NoDrafter(Silent):
    """Bare roots."""

    law = POINT_CHAIN
    max_nodes = 0
    sizes: Sequence[int] = (0,)

    def depth(self, nodes: int) -> int:
        """There is nothing below the root."""
        return 0

    def propose(self, view: BatchView, nodes: int, rng: Randomness) -> Proposal:
        """Nothing but the last committed token."""
        return Proposal.bare(view)
