"""Plain decoding: the drafter that never guesses. The baseline of every comparison is the same engine with this."""

from __future__ import annotations

from collections.abc import Sequence

from draftwood.drafters.resident import ResidentNone
from draftwood.model.runner import ModelRunner
from draftwood.protocols import BatchView, Budget, Features, Randomness, Span
from draftwood.tree import POINT_CHAIN, TokenTree, Verdict


class NoDrafter:
    """Bare roots."""

    law = POINT_CHAIN
    max_nodes = 0
    needs: frozenset[int] = frozenset()

    def propose(self, view: BatchView, budget: Budget, rng: Randomness) -> TokenTree:
        """Nothing but the last committed token."""
        return TokenTree.roots(view.roots)

    def read(self, spans: Sequence[Span], features: Features) -> None:
        """It needs nothing."""

    def observe(self, view: BatchView, tree: TokenTree, verdict: Verdict, features: Features) -> None:
        """Nothing to learn."""

    def release(self, seq_id: int) -> None:
        """Nothing to forget."""

    def resident(self, target: ModelRunner) -> ResidentNone:
        """Bare roots, on the device."""
        return ResidentNone()
