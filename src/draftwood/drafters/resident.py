"""Drafters as they live on a device: every proposal is made from the seats, in one fixed shape, without the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftwood.cache.batch_state import DeviceBatchView, SamplingMode
from draftwood.cache.kv import Places, stage_behind
from draftwood.cache.resident import NeedsNothing, round_sizes
from draftwood.drafters.growth import Front, GrownTrees, Growth, State, known, only_compares
from draftwood.batch import ForwardBatch
from draftwood.model.runner import ModelRunner
from draftwood.ops.lookup import suffix_lookup
from draftwood.protocols import BatchView, Randomness, Verifier
from draftwood.tree import POINT_CHAIN, TokenTree


class ResidentNone(NeedsNothing):
    """Bare roots."""

    law = POINT_CHAIN
    reads = False
    waits = False
    sizes: Sequence[int] = (0,)

    def depth(self, nodes: int) -> int:
        """There is nothing below the root."""
        return 0

    def suits(self, kind: SamplingMode, verifier: Verifier) -> bool:
        """There is nothing to verify; what a lossy law has to say about that, it says step by step."""
        return verifier.lossless

    def propose(self, view: DeviceBatchView, nodes: int, rng: Randomness) -> TokenTree:
        """Nothing but the last committed token."""
        return TokenTree.roots(view.roots)

    def prepare(self, view: BatchView, size: int, nodes: int) -> None:
        """Nothing to ask the host for."""

    def read(self, batch: ForwardBatch) -> None:
        """Nothing to read."""

    def keep(self, view: DeviceBatchView, tree: TokenTree, index: Tensor, length: Tensor) -> None:
        """Nothing to keep."""


class ResidentLookup(NeedsNothing):
    """What followed the last few tokens when they stood in the text before; see `ngram.py`."""

    law = POINT_CHAIN
    reads = False
    waits = False

    def __init__(self, nodes: int, longest: int, shortest: int) -> None:
        self.sizes = round_sizes(nodes)
        self.longest = longest
        self.shortest = shortest
        self._chains: dict[tuple[int, int], TokenTree] = {}

    def depth(self, nodes: int) -> int:
        """A chain."""
        return nodes

    def suits(self, kind: SamplingMode, verifier: Verifier) -> bool:
        """Where nothing is found the chain is filled up with tokens that only a comparison can refuse."""
        return only_compares(kind, verifier)

    def propose(self, view: DeviceBatchView, nodes: int, rng: Randomness) -> TokenTree:
        """A chain of what followed; -1 where nothing did."""
        found = suffix_lookup(view.history, view.rows, view.lengths, nodes, self.longest, self.shortest)
        return self._chain(len(view.rows), nodes, found.device).refilled(
            torch.cat([view.roots[:, None], found], 1).view(-1)
        )

    def _chain(self, size: int, nodes: int, device: torch.device) -> TokenTree:
        key = size, nodes
        if key not in self._chains:
            one = ([0] * (nodes + 1), list(range(-1, nodes)))
            self._chains[key] = known(TokenTree.of_points([one] * size, device))
        return self._chains[key]

    def prepare(self, view: BatchView, size: int, nodes: int) -> None:
        """Nothing to ask the host for."""

    def read(self, batch: ForwardBatch) -> None:
        """The seats hold all there is to know."""

    def keep(self, view: DeviceBatchView, tree: TokenTree, index: Tensor, length: Tensor) -> None:
        """Nothing to keep."""


class ResidentModel(GrownTrees, NeedsNothing):
    """A small model of the target's vocabulary and a tree of fixed shape; its cache lies under the target's pages.

    Whatever an accepted path ends with it may not have run; so a round begins with the last two committed tokens.
    """

    reads = True

    def __init__(self, runner: ModelRunner, growth: Growth) -> None:
        super().__init__(growth)
        self.runner = runner
        self._ends: dict[int, tuple[Places, Tensor]] = {}

    def begin(self, view: DeviceBatchView) -> tuple[Tensor, State]:
        """Logits at the roots, once the token before each has been run again."""
        places, last = self._last_two(len(view.rows))
        tokens = view.history[view.rows[:, None], (view.lengths[:, None] + places.index).clamp(min=0)]
        return self._run(view, tokens, places, last)[:, None], ()

    def extend(self, view: DeviceBatchView, front: Front, state: State) -> tuple[Tensor, State]:
        """The cache knows their parents."""
        return self._run(view, front.tokens, front.places).view(*front.tokens.shape, -1), state

    def _last_two(self, size: int) -> tuple[Places, Tensor]:
        """Where the last two committed tokens lie, and which rows are the last."""
        if size not in self._ends:
            device = self.runner.device
            steps = torch.arange(-2, 0, device=device).expand(size, 2).contiguous()
            self._ends[size] = Places(steps, steps), torch.arange(1, 2 * size, 2, device=device)
        return self._ends[size]

    def _run(self, view: DeviceBatchView, tokens: Tensor, places: Places, logit_rows: Tensor | None = None) -> Tensor:
        highest = self.runner.model.config.max_positions
        page_size = self.runner.cache.page_size
        batch = stage_behind(view.lengths, view.block_table, tokens, places, page_size, highest, logit_rows)
        return self.runner.forward(batch).logits

    def read(self, batch: ForwardBatch) -> None:
        """The same rows through the small model, for its cache alone."""
        self.runner.forward(batch)

    def keep(self, view: DeviceBatchView, tree: TokenTree, index: Tensor, length: Tensor) -> None:
        """Move what was accepted, as the target does."""
        self.runner.cache.keep(view.block_table, view.lengths, index, length, chain=self.law.chain)
