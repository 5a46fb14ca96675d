"""Lookahead decoding: the target itself guesses, at places where it does not know yet what comes before (Jacobi).

    root ── a0 ── a1 ── a2      level 0: guesses for the next tokens
             │     │     │
             b0    b1    b2     level 1: what the target said behind level 0 in the last step, and so on

A node sees its column of the levels and the trunk up to it, so the window is a tree, and its nodes are guesses like any
other. What the target says behind the last level makes each column an n-gram, which is kept under its first token; the
levels move up. N-grams that begin with the last token of a text are branches of its tree beside the window.

Everything is on the device. N-grams are kept for requests of one salt, as in `recycling.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from draftwood.drafters.calibration import Calibration
from draftwood.drafters.graft import Candidates, Rated, Waiting, spread_ways
from draftwood.drafting import Proposal, Silent
from draftwood.model.runner import ModelRunner
from draftwood.ops.choice import likeliest
from draftwood.protocols import LOGITS, BatchView, Features, Randomness
from draftwood.shape import TreeShape
from draftwood.tree import POINT_TREE, TokenTree, Verdict


class _Pool:
    """Continuations of tokens, by salt: so many of each, the oldest replaced first."""

    def __init__(self, vocab_size: int, kept: int, length: int, device: torch.device) -> None:
        self._rows = 1 << (vocab_size - 1).bit_length()  # each token of one salt has a row of its own
        rows = self._rows + 1  # the last takes what is to be dropped
        self.kept = kept
        self._grams = torch.full((rows * kept, length), -1, dtype=torch.int64, device=device)
        self._next = torch.zeros(rows, dtype=torch.int64, device=device)
        self._salts = torch.full((rows,), -2, dtype=torch.int64, device=device)

    def behind(self, tokens: Tensor, salts: Tensor) -> Tensor:
        """What followed `tokens` [n] in texts of `salts` [n]; -1 where nothing is known. [n, kept, length]."""
        rows = (tokens + salts) & (self._rows - 1)
        found = self._grams.view(self._rows + 1, self.kept, -1)[rows]
        return found.masked_fill((self._salts[rows] != salts)[:, None, None], -1)

    def keep(self, tokens: Tensor, grams: Tensor, salts: Tensor, there: Tensor) -> None:
        """Keep `grams` [n, length] behind `tokens` [n] where that is wanted, unless they are known."""
        known = (self.behind(tokens.clamp(min=0), salts) == grams[:, None]).all(2).any(1)
        wanted = there & ~known & (salts >= 0)
        rows = torch.where(wanted, (tokens + salts) & (self._rows - 1), self._rows)
        order = rows.argsort(stable=True)
        rows = rows[order]
        rows = torch.where(pad(rows[1:] != rows[:-1], (0, 1), value=True), rows, self._rows)  # one for each row
        grams, salts = grams[order], salts[order]
        stranger = (self._salts[rows] != salts)[:, None, None] & (rows < self._rows)[:, None, None]
        slots = rows[:, None] * self.kept + torch.arange(self.kept, device=rows.device)
        kept = self._grams[slots].masked_fill(stranger, -1)
        here = (self._next[rows] % self.kept)[:, None] == torch.arange(self.kept, device=rows.device)
        kept = torch.where(here[..., None], grams[:, None], kept)
        self._grams.index_copy_(0, slots.view(-1), kept.flatten(0, 1))
        self._next.index_copy_(0, rows, self._next[rows] + 1)
        self._salts.index_copy_(0, rows, torch.where(rows < self._rows, salts, -2))


@dataclass(frozen=True)
class _Step:
    """What was proposed, until it is known what became of it."""

    rows: Tensor  # [B]
    window: Tensor  # [B, levels, width]
    waiting: Waiting


class LookaheadDrafter(Silent):
    """A window of `width` columns of n-grams of `length` tokens, and at most `guesses` of those that are known."""

    law = POINT_TREE
    needs = frozenset({LOGITS})
    remembers = True

    def __init__(self, width: int = 5, length: int = 4, guesses: int = 5) -> None:
        if width < 1 or length < 2 or guesses < 1:
            raise ValueError("lookahead needs a width and guesses of at least 1, and n-grams of at least 2 tokens")
        self._width, self._levels, self._guesses = width, length - 1, guesses
        self.max_nodes = self._levels * (width + guesses)
        self._calibration = Calibration(4)
        self._step: _Step | None = None
        self._shapes: dict[tuple[int, int, torch.device], TreeShape] = {}
        self._windows: tuple[Tensor, Tensor] | None = None  # by row of the batch state, and the length they are for

    @property
    def sizes(self) -> Sequence[int]:
        """Any: with less room there are fewer guesses, then fewer levels."""
        return range(self.max_nodes + 1)

    def attach(self, target: ModelRunner) -> None:
        """N-grams of its vocabulary."""
        self._pool = _Pool(target.model.config.vocab_size, self._guesses, self._levels, target.device)
        self._calibration.to(target.device)

    def depth(self, nodes: int) -> int:
        """The trunk and the levels below its end."""
        return min(nodes, self._width + self._levels - 1)

    def propose(self, view: BatchView, nodes: int, rng: Randomness) -> Proposal:
        """The window, and what is known to follow the last token."""
        self._step = None
        if nodes == 0:
            return Proposal.bare(view)
        window = self._window(view)
        known = self._pool.behind(view.roots, _salts(view))
        parts = [self._tree(view, window, 0), self._tree(view, known.mT, 1)]
        rated = Rated.of(Candidates.of(parts), self._calibration, 2)
        self._step = _Step(view.rows, window, rated.waiting(view))
        whole = rated.taken(view, nodes, 0.0, None, whole_first=True)
        return Proposal(whole.tree)  # how likely the window's nodes are does not matter

    def commit(self, view: BatchView, proposal: Proposal, verdict: Verdict, features: Features) -> None:
        """Take what the target said behind the last level, keep the n-grams, and move the window."""
        if self._step is None:
            return
        step, self._step = self._step, None
        step.waiting.learn(self._calibration, view, proposal.tree, verdict)
        place = torch.zeros(view.history.shape[0], dtype=torch.int64, device=view.rows.device)
        at = place.scatter(0, view.rows, torch.arange(view.size, device=view.rows.device))[step.rows]
        said = self._said(proposal.tree, step, at, likeliest(features[LOGITS]))
        there = said >= 0
        grams = torch.cat([step.window[:, 1:], said[:, None]], 1).mT  # [B, width, levels]
        salts = _salts(view)[at][:, None].expand_as(said).reshape(-1)
        self._pool.keep(step.window[:, 0].reshape(-1), grams.flatten(0, 1), salts, there.view(-1))
        moved = torch.cat([step.window[:, 1:], torch.where(there, said, step.window[:, -1])[:, None]], 1)
        gained = verdict.length[at]
        column = torch.arange(self._width, device=at.device) + gained[:, None]
        inside = (column < self._width)[:, None].expand_as(moved)
        column = column.clamp(max=self._width - 1)[:, None].expand_as(moved)
        moved = torch.where(inside, moved.gather(2, column), self._from_text(view)[at])
        windows, lengths = self._kept(view)
        windows.index_copy_(0, step.rows, moved)
        lengths.index_copy_(0, step.rows, view.lengths[at] + gained + 1)

    def _said(self, tree: TokenTree, step: _Step, at: Tensor, best: Tensor) -> Tensor:
        """What the target holds likeliest behind the last level's nodes, -1 where these are not in the tree. [B, W]."""
        nodes, ways = spread_ways(tree)
        nodes, ways = nodes[at], ways[at]
        last = step.waiting.candidates.ways[:, (self._levels - 1) * self._width : self._levels * self._width]
        deepest = max(last.shape[2], ways.shape[2])
        ways, last = (pad(part, (0, deepest - part.shape[2]), value=-1) for part in (ways, last))
        same = (nodes >= 0)[:, None] & (ways[:, None] == last[:, :, None]).all(3)
        node = torch.where(same, nodes[:, None], -1).amax(2)
        return torch.where(node >= 0, best[node.clamp(min=0)], -1)

    def _window(self, view: BatchView) -> Tensor:
        """The windows of sequences; tokens of their texts where there are none yet. [B, levels, width]."""
        windows, lengths = self._kept(view)
        known = lengths[view.rows] == view.lengths
        return torch.where(known[:, None, None], windows[view.rows], self._from_text(view))

    def _from_text(self, view: BatchView) -> Tensor:
        """Some tokens of each text. [B, levels, width]."""
        place = self._strides % view.lengths.clamp(min=1)[:, None]
        return view.history[view.rows[:, None], place].view(view.size, self._levels, self._width)

    @cached_property
    def _strides(self) -> Tensor:
        cells = torch.arange(self._levels * self._width, device=self._calibration.counts.device)
        return cells * 7919 + 1

    def _kept(self, view: BatchView) -> tuple[Tensor, Tensor]:
        """Windows of all rows of the batch state, and the lengths of text that they are for."""
        if self._windows is None:
            rows, device = view.history.shape[0], view.rows.device
            window = torch.zeros(rows, self._levels, self._width, dtype=torch.int64, device=device)
            self._windows = window, torch.zeros(rows, dtype=torch.int64, device=device)
        return self._windows

    def _tree(self, view: BatchView, tokens: Tensor, kind: int) -> Proposal:
        """Trees of levels [B, levels, columns]: the first is a trunk (`kind` 0), or every column stands by itself."""
        columns, device = tokens.shape[2], view.roots.device
        key = view.size, kind, device
        if key not in self._shapes:
            cells = self._levels * columns
            parents = [cell - columns + 1 if cell >= columns else 0 if kind else cell for cell in range(cells)]
            one = TreeShape.of_lists([([0] * (cells + 1), [-1, *parents])], None)[1]
            self._shapes[key] = one.tiled(view.size, device).known()
        every = torch.cat([view.roots[:, None], tokens.flatten(1)], 1).view(-1)
        tree = TokenTree.chosen(every, self._shapes[key])
        return Proposal(tree.without(every < 0) if kind else tree)


def _salts(view: BatchView) -> Tensor:
    """The salt of each sequence. [B]."""
    return torch.zeros_like(view.rows) if view.salts is None else view.salts[view.rows]
