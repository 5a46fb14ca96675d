"""The target drafts for itself (SubSpec): its layers on the device as they are, low-bit copies of those that are away.

Nothing is trained. It is the drafter for models that do not fit: a step of the target waits for its layers to come,
so that a large tree is worth many forwards of the copies.
"""

from __future__ import annotations

from draftwood.drafters.model import CausalDrafter
from draftwood.drafting import Grower
from draftwood.errors import IncompatibleParts
from draftwood.model.checkpoint import Checkpoint
from draftwood.model.runner import ModelRunner, Streamed
from draftwood.model.weights import WeightFormat


class SubstituteDrafter(CausalDrafter):
    """Drafts with the target's resident layers and others in `weights` in place of the rest."""

    def __init__(self, checkpoint: Checkpoint, weights: WeightFormat, grower: Grower) -> None:
        super().__init__(grower)
        self._checkpoint, self._weights = checkpoint, weights

    def attach(self, target: ModelRunner) -> None:
        """Whose layers it shares."""
        if not isinstance(target.model, Streamed):
            raise IncompatibleParts("This drafter shares layers with the target, and this target shares none.")
        tables = target.cache.tables
        model = target.model.substituted(self._checkpoint, self._weights)
        self.runner = ModelRunner(model, tables.pool.num_pages, tables.page_size, target.cache.num_states)
        super().attach(target)
        self._checkpoint.forget()
