"""What a draft network says while it drafts, with the texts it says it of."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from draftwood.drafting import Front, Proposal, State
from draftwood.protocols import BatchView, Randomness

Said = tuple[tuple[int, ...], int, Tensor]  # committed tokens and the path behind them, its length, logits [V]


class Listening:
    """A grower that writes down what it hears of texts that have room for drafts, and at least two tokens: of one token
    networks have seen nothing. `padding`: the row of sequences that only fill a batch up.
    """

    def __init__(self, grower: Any, padding: int) -> None:
        self.grower, self.padding = grower, padding
        self.heard: list[Said] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.grower, name)

    def grow(self, model: Any, view: BatchView, nodes: int, rng: Randomness) -> Proposal:
        return self.grower.grow(_Ear(model, self), view, nodes, rng)


class _Ear:
    def __init__(self, model: Any, owner: Listening) -> None:
        self.model, self.owner, self.vocabulary = model, owner, model.vocabulary

    def begin(self, view: BatchView) -> tuple[Tensor, State]:
        logits, state = self.model.begin(view)
        self._hear(view, None, logits)
        return logits, state

    def extend(self, view: BatchView, front: Front, state: State) -> tuple[Tensor, State]:
        logits, state = self.model.extend(view, front, state)
        self._hear(view, front, logits)
        return logits, state

    def _hear(self, view: BatchView, front: Front | None, logits: Tensor) -> None:
        known = self.vocabulary(0 if front is None else front.level)
        spread = logits if known is None else known.spread(logits)
        drafts = (view.rows != self.owner.padding) & (view.lengths > 1)
        if view.max_nodes is not None and view.max_depth is not None:
            drafts &= (view.max_nodes > 0) & (view.max_depth > 0)
        for b in drafts.nonzero()[:, 0].tolist():
            text = tuple(view.history[view.rows[b], : view.lengths[b]].tolist())
            for k in range(logits.shape[1]):
                path = [] if front is None else front.path[b, k, : front.depth[b, k]].tolist()
                self.owner.heard.append(((*text, *path), len(path), spread[b, k].clone()))


def listen(harness: Any) -> list[Said]:
    """What the network of a harness's drafter will say."""
    drafter = harness.engine.drafter
    drafter.grower = listening = Listening(drafter.grower, harness.engine.runner.state.padding_row)
    return listening.heard
