"""Trees that a drafter on another machine has drawn, each token from a row of a few tokens that comes with it.

The drafter's own tokens are a path. Beside each of them more can be drawn here, from what they leave of their rows.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftwood.drafters.grown import GrownDrafter
from draftwood.drafters.remote_link import Arrivals, Link
from draftwood.drafters.remote_protocol import MOST_ENTRIES, Guess
from draftwood.drafting import Front, Proposal, State
from draftwood.growers import StaticShape
from draftwood.growers.pickers import Children, Frontier, normalised
from draftwood.model.runner import ModelRunner
from draftwood.protocols import BatchView, HostView, Randomness
from draftwood.tree import Draw


class RowsFrame:
    """Tokens and rows of a step's guesses, in memory of the device that stays where it is. A `FrontierModel` whose
    logits are the rows, and a `ChildPicker`: the token that came, then draws from what it leaves.
    """

    draws = frozenset({Draw.WITHOUT_REPLACEMENT})

    def __init__(self, size: int, places: int, entries: int, vocab_size: int, like: Tensor) -> None:
        """For `size` sequences and `places` tokens of each; `like` has the type and the device of the rows."""
        self._vocab_size = vocab_size
        self._said = like.new_full((size, places), -1, dtype=torch.int64)  # [B, n]
        self._tokens = like.new_full((size, places, entries), -1, dtype=torch.int64)  # [B, n, E]
        self._weights = like.new_zeros(size, places, entries)  # [B, n, E] logarithms

    def fill(self, guesses: Sequence[Sequence[Guess]]) -> None:
        """The guesses of the first sequences; nothing for the others."""
        said, tokens = torch.full(self._said.shape, -1), torch.full(self._tokens.shape, -1)
        weights = torch.zeros(self._weights.shape, dtype=self._weights.dtype)
        for b, path in enumerate(guesses):
            for place, guess in enumerate(path):
                row = guess.row or ((guess.tokens[0], 0.0),)  # of chosen tokens
                said[b, place] = guess.tokens[0]
                tokens[b, place, : len(row)] = torch.tensor([token for token, _ in row])
                weights[b, place, : len(row)] = torch.tensor([weight for _, weight in row], dtype=weights.dtype)
        for part, new in ((self._said, said), (self._tokens, tokens), (self._weights, weights)):
            part.copy_(new)

    def begin(self, view: BatchView) -> tuple[Tensor, State]:
        """The first rows, as logits of all tokens."""
        return self._logits(0), ()

    def extend(self, view: BatchView, front: Front, state: State) -> tuple[Tensor, State]:
        """The rows of the next place."""
        assert front.level is not None
        return self._logits(front.level), ()

    def vocabulary(self, level: int | None) -> None:
        """All tokens."""

    def _logits(self, place: int) -> Tensor:
        """Nothing has a chance that is in no row; where there is no row, everything has. [B, 1, V]."""
        tokens, weights = self._tokens[:, place], self._weights[:, place]
        none = torch.where((tokens < 0).all(1, keepdim=True), 0.0, -torch.inf).to(weights.dtype)
        every = none.expand(-1, self._vocab_size + 1)
        at = torch.where(tokens < 0, self._vocab_size, tokens)
        return every.scatter(1, at, weights)[:, None, : self._vocab_size]

    def children(self, frontier: Frontier, width: int) -> Iterator[Children]:
        """Until what the drafter said leaves nothing of its row."""
        said = self._said.gather(1, frontier.depth)
        left = frontier.q
        for trial in range(width):
            q, exists = normalised(left)
            token = frontier.pick(q, trial) if trial else said.clamp(min=0)
            yield Children(token, exists & (said >= 0), Draw.WITHOUT_REPLACEMENT, q)
            left = left.scatter(-1, token[..., None], 0.0)


@dataclass
class _Present:
    """The frame of the present step, as a picker."""

    frame: RowsFrame | None = None
    draws = RowsFrame.draws

    def children(self, frontier: Frontier, width: int) -> Iterator[Children]:
        assert self.frame is not None
        return self.frame.children(frontier, width)


class RemoteSampler(GrownDrafter):
    """Trees of at most `nodes` tokens, `width` in each place, that come within `wait` milliseconds, drawn from rows of
    `draws` tokens.
    """

    waits = True

    def __init__(self, link: Link, nodes: int = 8, wait: float = 50.0, draws: int = 8, width: int = 1) -> None:
        if not 1 <= width <= nodes or wait < 0:
            raise ValueError("it needs room for a node in each place, and a wait of at least 0 milliseconds")
        if not width <= draws <= MOST_ENTRIES:
            raise ValueError(f"rows have between {width} (width) and {MOST_ENTRIES} tokens")
        self._places, self._present = nodes // width, _Present()
        shape = tuple((0,) * place + (rank,) for place in range(self._places) for rank in range(width))
        super().__init__(StaticShape(shape, self._present))
        self._arrivals = Arrivals(link, self._places, wait / 1000, draws)
        self._frames: dict[tuple[int, int], RowsFrame] = {}
        weakref.finalize(self, link.close)

    def attach(self, target: ModelRunner) -> None:
        """Rows have the vocabulary of the target, and the precision of its distributions."""
        self._vocab_size = target.model.config.vocab_size
        wide = torch.promote_types(target.model.dtype, torch.float32)
        self._like = torch.empty(0, dtype=wide, device=target.device)

    def prepare(self, view: HostView, size: int, nodes: int) -> None:
        """Take what has come when the deadline passes, or all that was asked for before."""
        frame = self._frame(size, nodes)
        frame.fill([])
        frame.fill(self._arrivals.take(view, self.grower.depth_of(nodes)))

    def propose(self, view: BatchView, nodes: int, rng: Randomness) -> Proposal:
        """What came, and draws beside it."""
        if not nodes:
            return Proposal.bare(view)
        self._present.frame = frame = self._frame(view.size, nodes)
        return self.grower.grow(frame, view, nodes, rng)

    def _frame(self, size: int, nodes: int) -> RowsFrame:
        key = size, nodes
        if key not in self._frames:
            entries = self._arrivals.entries
            self._frames[key] = RowsFrame(size, self.grower.depth_of(nodes), entries, self._vocab_size, self._like)
        return self._frames[key]

    def release(self, seq_id: int) -> None:
        """Tell the drafter that it may forget the text."""
        self._arrivals.drop(seq_id)
