"""How much to guess."""

from __future__ import annotations

from draftwood.protocols import Budget, Load, StepReport


class FixedBudget:
    """The same number of nodes in every step."""

    def __init__(self, max_nodes: int) -> None:
        if max_nodes < 0:
            raise ValueError("a budget cannot be negative")
        self._budget = Budget(max_nodes)

    def budget(self, load: Load) -> Budget:
        """Always the same."""
        return self._budget

    def observe(self, report: StepReport) -> None:
        """Nothing to learn."""
