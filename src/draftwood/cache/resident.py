"""Drafters that live beside the target, under its pages; what a drafter is to rounds that run on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from draftwood.cache.batch_state import DeviceBatchView, SamplingMode
from draftwood.batch import ForwardBatch
from draftwood.protocols import BatchView, Drafter, Features, Randomness, Verifier
from draftwood.tree import DraftLaw, TokenTree

if TYPE_CHECKING:
    from draftwood.model.runner import ModelRunner


BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)


def round_batch(count: int) -> int:
    """Sequences of the smallest round that holds so many."""
    return next((batch for batch in BATCHES if batch >= count), count)


def round_sizes(most: int) -> list[int]:
    """Sizes of trees worth a graph of their own, up to `most`: with the root, as many rows as kernels are cut for."""
    rows = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
    return sorted({0, most, *(count - 1 for count in rows if count - 1 < most)})


class NeedsNothing:
    """The part of a resident drafter that does not look at the target's features."""

    needs: frozenset[int] = frozenset()

    def take_in(self, batch: ForwardBatch, features: Features) -> None:
        """Nobody asks."""

    def learn(self, view: DeviceBatchView, path: Tensor, features: Features) -> None:
        """Nobody asks."""


class ResidentDrafter(Protocol):
    """A drafter that guesses from what lies on the device, without asking the host.

    It shares the target's pages: whatever it keeps of a token lies in its own memory under the target's slots.
    """

    @property
    def law(self) -> DraftLaw:
        """How the nodes of every tree are chosen."""
        ...

    @property
    def reads(self) -> bool:
        """Whether it has to read every committed token once."""
        ...

    @property
    def waits(self) -> bool:
        """Whether its trees come from the host, which has to hear of the last round first."""
        ...

    @property
    def sizes(self) -> Sequence[int]:
        """The tree sizes it can propose, ascending, roots not counted."""
        ...

    def depth(self, nodes: int) -> int:
        """How deep a tree of so many nodes can be."""
        ...

    def suits(self, kind: SamplingMode, verifier: Verifier) -> bool:
        """Whether its trees can be verified by this law without the host."""
        ...

    def propose(self, view: DeviceBatchView, nodes: int, rng: Randomness) -> TokenTree:
        """A tree of so many draft nodes for every sequence, of the same shape every time; absent nodes hold -1."""
        ...

    def prepare(self, view: BatchView, size: int, nodes: int) -> None:
        """The host's part, if it waits, before a round of `size` sequences, of which `view` has the real ones."""
        ...

    @property
    def needs(self) -> frozenset[int]:
        """Layers of the target whose output it learns from."""
        ...

    def take_in(self, batch: ForwardBatch, features: Features) -> None:
        """What the target made of these rows of text; only asked of those who need something."""
        ...

    def learn(self, view: DeviceBatchView, path: Tensor, features: Features) -> None:
        """What the target made of the nodes of its trees, of which `path` [B, D + 1] was kept, root first; likewise."""
        ...

    def read(self, batch: ForwardBatch) -> None:
        """The target has run these rows, or will never run them again; no logits are wanted of them."""
        ...

    def keep(self, view: DeviceBatchView, tree: TokenTree, index: Tensor, length: Tensor) -> None:
        """Nodes `index` [B, D + 1] of each tree, root first, were accepted, as far as `length` [B] says."""
        ...


def attach(drafter: Drafter, target: ModelRunner) -> None:
    """Tell a drafter for whom it guesses, if it wants to know."""
    own = getattr(drafter, "attach", None)
    if own is not None:
        own(target)


def resident_of(drafter: Drafter, target: ModelRunner) -> ResidentDrafter | None:
    """What it is on the target's device, if it can live there."""
    make = getattr(drafter, "resident", None)
    return None if make is None else make(target)
