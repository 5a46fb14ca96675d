"""What all drafters share whose trees a grower shapes."""

from __future__ import annotations

from collections.abc import Sequence

from draftwood.drafting import Grower, Silent
from draftwood.tree import DraftLaw


class GrownDrafter(Silent):
    """Base: everything about the size of trees is the grower's."""

    def __init__(self, grower: Grower) -> None:
        self.grower = grower

    @property
    def law(self) -> DraftLaw:
        """The grower's."""
        return self.grower.law

    @property
    def max_nodes(self) -> int:
        """The grower's."""
        return self.grower.max_nodes

    @property
    def sizes(self) -> Sequence[int]:
        """The grower's."""
        return self.grower.sizes

    @property
    def surplus(self) -> int:
        """The grower's."""
        return self.grower.surplus

    def depth(self, nodes: int) -> int:
        """The grower's."""
        return self.grower.depth_of(nodes)
