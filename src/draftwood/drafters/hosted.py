"""Trees that the host has made, in rounds that run on the device: any shape, padded to the round's size."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from draftwood.cache.batch_state import DeviceBatchView, SamplingMode
from draftwood.cache.resident import NeedsNothing, round_sizes
from draftwood.drafters.growth import only_compares
from draftwood.batch import ForwardBatch
from draftwood.protocols import BatchView, Budget, Drafter, Randomness, Verifier
from draftwood.rng import KeyedRng
from draftwood.tree import BITS, TokenTree, follow


@dataclass(frozen=True)
class _Parts:
    """A buffer cut into what it says of its trees' nodes, of which there are M."""

    tokens: Tensor  # [M]
    depth: Tensor  # [M]
    parents: Tensor  # [M]
    ancestors: Tensor  # [M, words]
    tries: Tensor  # [M, width] children

    @classmethod
    def of(cls, packed: Tensor, num_nodes: int, words: int) -> _Parts:
        """Views of it."""
        width = packed.numel() // num_nodes - 3 - words
        parts = packed.split([num_nodes * columns for columns in (1, 1, 1, words, width)])
        return cls(*parts[:3], *(part.view(num_nodes, -1) for part in parts[3:]))


@dataclass(frozen=True)
class _Frame:
    """Device memory for the trees of one size of round; a captured graph reads them from here."""

    packed: Tensor  # all that differs from round to round, in one piece that travels at once
    size: int  # trees
    rows: int  # of each, with its root
    tree: TokenTree  # whose parts lie in `packed`

    @classmethod
    def make(cls, size: int, nodes: int, width: int, device: torch.device) -> _Frame:
        """Room for trees with at most `width` children a node."""
        rows, words = nodes + 1, max(1, -(-nodes // BITS))
        packed = torch.full((size * rows * (3 + words + width),), -1, device=device)
        parts = _Parts.of(packed, size * rows, words)
        offsets, none = torch.arange(size + 1, device=device) * rows, torch.full_like(parts.tokens, -1)
        tree = TokenTree(parts.tokens, parts.parents, offsets, torch.zeros_like(none), none)
        tree.__dict__.update(max_depth=nodes, widest=rows)
        tree.__dict__.update(depth=parts.depth, ancestors=parts.ancestors, tries=parts.tries)
        tree.sizes, tree.owner, tree.local  # noqa: B018  (a graph cannot find out)
        return cls(packed, size, rows, tree)

    @cached_property
    def empty(self) -> Tensor:
        """What lies there when nothing was guessed: nodes without a token, right behind the root. On the host."""
        packed = torch.full(self.packed.shape, -1)
        parts = self.parts(packed)
        parts.depth.zero_()
        parts.ancestors.zero_()
        parts.parents.view(self.size, self.rows)[:, 1:] = torch.arange(0, self.size * self.rows, self.rows)[:, None]
        return packed

    def parts(self, packed: Tensor) -> _Parts:
        """Of a buffer like this one's."""
        return _Parts.of(packed, self.size * self.rows, self.tree.ancestors.shape[1])

    def filled(self, roots: Tensor) -> TokenTree:
        """The trees that lie here now, behind `roots` [B]; a copy, so that what is found out about them is not kept."""
        self.tree.tokens.view(self.size, self.rows)[:, 0] = roots
        return copy.copy(self.tree)


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

    def suits(self, kind: SamplingMode, verifier: Verifier) -> bool:
        """Rounds are filled up with nodes that hold no token."""
        return only_compares(kind, verifier)

    def prepare(self, view: BatchView, size: int, nodes: int) -> None:
        """Ask the drafter, and bring its trees to the device."""
        tree = self._drafter.propose(view, Budget(nodes), KeyedRng())
        frame = self._frame(size, nodes)
        packed, at = frame.empty.clone(), tree.owner * (nodes + 1) + tree.local
        parts = frame.parts(packed)
        parts.tokens[at], parts.depth[at], parts.parents[at] = tree.tokens, tree.depth, follow(at, tree.parents)
        parts.ancestors[at, : tree.ancestors.shape[1]] = tree.ancestors
        parts.tries[at, : tree.tries.shape[1]] = follow(at, tree.tries)
        if self._device.type == "cuda":
            packed = packed.pin_memory()
        frame.packed.copy_(packed, non_blocking=True)

    def _frame(self, size: int, nodes: int) -> _Frame:
        if (size, nodes) not in self._frames:
            width = 1 if self.law.chain else nodes
            self._frames[size, nodes] = _Frame.make(size, nodes, width, self._device)
        return self._frames[size, nodes]

    def propose(self, view: DeviceBatchView, nodes: int, rng: Randomness) -> TokenTree:
        """What was prepared."""
        return self._frame(len(view.rows), nodes).filled(view.roots)

    def read(self, batch: ForwardBatch) -> None:
        """The host knows every token."""

    def keep(self, view: DeviceBatchView, tree: TokenTree, index: Tensor, length: Tensor) -> None:
        """The drafter will see it in the text."""
