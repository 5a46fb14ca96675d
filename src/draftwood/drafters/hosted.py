"""Trees that the host has made, in rounds that run on the device: any shape, padded to the round's size."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from draftwood.cache.resident import NeedsNothing, round_sizes
from draftwood.cache.seats import Kind, SeatedView
from draftwood.drafters.growth import only_compares
from draftwood.model.batch import ForwardBatch
from draftwood.protocols import BatchView, Budget, Drafter, Randomness, Verifier
from draftwood.rng import KeyedRng
from draftwood.tree import BITS, TokenTree, follow

HEAD = 3  # columns before the ancestors


@dataclass(frozen=True)
class _Frame:
    """Device memory for the trees of one size of round; a captured graph reads them from here."""

    packed: Tensor  # [B, N + 1, 3 + W + T] token, depth, parent, ancestor words, children
    tree: TokenTree  # without anything that changes from round to round

    @classmethod
    def make(cls, size: int, nodes: int, width: int, device: torch.device) -> _Frame:
        """Room for trees with at most `width` children a node."""
        packed = torch.full((size, nodes + 1, HEAD + _words(nodes) + width), -1, device=device)
        offsets = torch.arange(size + 1, device=device) * (nodes + 1)
        none = torch.full((size * (nodes + 1),), -1, device=device)
        tree = TokenTree(none, none, offsets, torch.zeros_like(none), none)
        tree.__dict__.update(max_depth=nodes, widest=nodes + 1)
        tree.sizes, tree.owner, tree.local  # noqa: B018  (a graph cannot find out)
        return cls(packed, tree)

    @cached_property
    def empty(self) -> Tensor:
        """What lies there when nothing was guessed: nodes without a token, right behind the root. On the host."""
        size, rows, _ = self.packed.shape
        packed = torch.full(self.packed.shape, -1)
        packed[:, :, 1 : HEAD + _words(rows - 1)] = 0
        packed[:, 1:, 2] = torch.arange(0, size * rows, rows)[:, None]
        packed[:, 0, 2] = -1
        return packed

    def filled(self, roots: Tensor) -> TokenTree:
        """The trees that lie here now, behind `roots` [B]."""
        size, rows, _ = self.packed.shape
        words = _words(rows - 1)
        tokens = torch.cat([roots[:, None], self.packed[:, 1:, 0]], 1).view(-1)
        flat = self.packed.view(size * rows, -1)
        parts = flat.split_with_sizes([1, 1, 1, words, flat.shape[1] - HEAD - words], 1)
        _, depth, parents, ancestors, tries = (part.contiguous() for part in parts)
        tree = replace(self.tree, tokens=tokens, parents=parents[:, 0])
        known = {name: getattr(self.tree, name) for name in ("sizes", "owner", "local", "max_depth", "widest")}
        tree.__dict__.update(known | {"depth": depth[:, 0], "ancestors": ancestors, "tries": tries})
        return tree


def _words(nodes: int) -> int:
    return max(1, -(-nodes // BITS))


class ResidentHosted(NeedsNothing):
    """Any drafter that chooses its nodes on the host."""

    reads = False
    waits = True

    def __init__(self, drafter: Drafter, device: torch.device) -> None:
        self.law = drafter.law
        self.sizes = round_sizes(drafter.max_nodes)
        self._drafter = drafter
        self._device = device
        self._frames: dict[tuple[int, int], _Frame] = {}

    def depth(self, nodes: int) -> int:
        """Any tree may be a chain."""
        return nodes

    def suits(self, kind: Kind, verifier: Verifier) -> bool:
        """Rounds are filled up with nodes that hold no token."""
        return only_compares(kind, verifier)

    def prepare(self, view: BatchView, size: int, nodes: int) -> None:
        """Ask the drafter, and bring its trees to the device."""
        tree = self._drafter.propose(view, Budget(nodes), KeyedRng())
        frame = self._frame(size, nodes)
        packed = frame.empty.clone()
        rows, at = packed.view(size * (nodes + 1), -1), tree.owner * (nodes + 1) + tree.local
        head = torch.stack([tree.tokens, tree.depth, follow(at, tree.parents)], 1)
        rows[at, : HEAD + tree.ancestors.shape[1]] = torch.cat([head, tree.ancestors], 1)
        start = HEAD + _words(nodes)
        rows[at, start : start + tree.tries.shape[1]] = follow(at, tree.tries)
        if self._device.type == "cuda":
            packed = packed.pin_memory()
        frame.packed.copy_(packed, non_blocking=True)

    def _frame(self, size: int, nodes: int) -> _Frame:
        if (size, nodes) not in self._frames:
            width = 1 if self.law.chain else nodes
            self._frames[size, nodes] = _Frame.make(size, nodes, width, self._device)
        return self._frames[size, nodes]

    def propose(self, view: SeatedView, nodes: int, rng: Randomness) -> TokenTree:
        """What was prepared."""
        return self._frame(len(view.rows), nodes).filled(view.roots)

    def read(self, batch: ForwardBatch) -> None:
        """The host knows every token."""

    def keep(self, view: SeatedView, tree: TokenTree, index: Tensor, length: Tensor) -> None:
        """The drafter will see it in the text."""
