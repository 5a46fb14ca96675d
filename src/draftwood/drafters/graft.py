"""Grafting: the trees of several sources as one, keyed by path, as large as there is room.

A node is as likely as its sources have been right when they said so; where several propose it, it is as unlikely as
that all of them are wrong, and what such agreement is worth is measured too. The likeliest nodes are taken. Chosen
tokens may be taken or left for any reason. Drawn tokens are not judged: of one source that draws all nodes are kept, in
the order and with the laws that they were drawn by, and tried before chosen ones (docs/adr/0040).

Legend: B sequences · S sources · C nodes of all sources in one tree · D levels · N nodes that are taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from draftwood.drafters.calibration import Calibration
from draftwood.drafting import GRAFTED, MEMBER_BITS, Proposal
from draftwood.growers.ranked import linked_proposal
from draftwood.ops.beam import linked, ranked_offers
from draftwood.protocols import BatchView
from draftwood.tree import TokenTree, Verdict

SURE = 2.0  # above every chance: nodes that are taken in any case


@dataclass(frozen=True)
class Candidates:
    """The draft nodes of all sources side by side."""

    tokens: Tensor  # [B, C] int64, -1: absent
    ways: Tensor  # [B, C, D] int64 the tokens from below the root to each, -1 behind it
    parents: Tensor  # [B, C] int64 which candidate each stands behind, -1: the root
    depth: Tensor  # [B, C] int64
    words: Tensor  # [B, C] float64 its source's word for its chance, if its parent is right; nan: unknown
    columns: Tensor  # [B, C] int64 1 + where its source keeps it, as a digit of its own
    draw: Tensor  # [B, C] int64
    q_row: Tensor  # [B, C] int64
    source: Tensor  # [C] int64
    widest: int  # children of a node at most

    @classmethod
    def of(cls, proposals: Sequence[Proposal]) -> Candidates:
        """From one proposal a source, of which only the first may be drawn."""
        parts = [_Spread.of(proposal, number) for number, proposal in enumerate(proposals)]
        deepest = max(part.ways.shape[2] for part in parts)
        starts = [sum(part.tokens.shape[1] for part in parts[:number]) for number in range(len(parts))]
        parents = [torch.where(p.parents > 0, p.parents - 1 + at, -1) for p, at in zip(parts, starts, strict=True)]
        device = parts[0].tokens.device
        sources = [torch.full((p.tokens.shape[1],), n, device=device) for n, p in enumerate(parts)]
        return cls(
            tokens=torch.cat([part.tokens for part in parts], 1),
            ways=torch.cat([pad(part.ways, (0, deepest - part.ways.shape[2]), value=-1) for part in parts], 1),
            parents=torch.cat(parents, 1),
            depth=torch.cat([part.depth for part in parts], 1),
            words=torch.cat([part.words for part in parts], 1),
            columns=torch.cat([1 + part.columns << MEMBER_BITS * n for n, part in enumerate(parts)], 1),
            draw=torch.cat([part.draw for part in parts], 1),
            q_row=torch.cat([part.q_row for part in parts], 1),
            source=torch.cat(sources),
            widest=sum(part.widest for part in parts),
        )

    @property
    def real(self) -> Tensor:
        """[B, C] bool."""
        return self.tokens >= 0

    def alike(self) -> Tensor:
        """Which candidates are one and the same node: those of one path, but for drawn ones, each of which is a node of
        its own. [B, C, C] bool.
        """
        same = self.real[:, :, None] & self.real[:, None]
        for way in self.ways.unbind(2):
            same = same & (way[:, :, None] == way[:, None])
        drawn = self.draw > 0
        itself = torch.eye(same.shape[1], dtype=torch.bool, device=same.device)
        return same & (itself | ~(drawn[:, :, None] & drawn[:, None]))


@dataclass(frozen=True)
class _Spread:
    """The draft nodes of one proposal by their place in their trees."""

    tokens: Tensor  # [B, n], -1: absent
    ways: Tensor  # [B, n, D]
    parents: Tensor  # [B, n] place in the tree, 0: the root
    depth: Tensor  # [B, n]
    words: Tensor  # [B, n]
    columns: Tensor  # [B, n]
    draw: Tensor  # [B, n]
    q_row: Tensor  # [B, n]
    widest: int

    @classmethod
    def of(cls, proposal: Proposal, number: int) -> _Spread:
        """Trees of fewer nodes than others have absent ones."""
        tree = proposal.tree
        size, rows, device = tree.num_trees, tree.widest, tree.tokens.device
        way = tree.paths[:, 1:]
        ways = torch.where(way >= 0, tree.tokens[way.clamp(min=0)], -1)
        columns = tree.local if proposal.columns is None else proposal.columns
        above = tree.local[tree.parents.clamp(min=0)]
        numbers = torch.cat([torch.stack([tree.tokens, above, tree.depth, columns, tree.draw, tree.q_row]), ways.mT])
        place = tree.owner * rows + tree.local
        table = torch.full((len(numbers), size * rows), -1, device=device)
        table = table.index_copy_(1, place, numbers).view(len(numbers), size, rows)[:, :, 1:]
        words = torch.full((size * rows,), torch.nan, dtype=torch.float64, device=device)
        words = words.index_copy_(0, place, _words(proposal)).view(size, rows)[:, 1:]
        tokens, parents, depth, columns, draw, q_row = table[:6].unbind(0)
        # One draws, and then it comes first: rows of its laws stay what they are.
        draw, q_row = (draw.clamp(min=0), q_row) if number == 0 else (draw * 0, draw * 0 - 1)
        return cls(tokens, table[6:].permute(1, 2, 0), parents, depth, words, columns, draw, q_row, tree.tries.shape[1])


def _words(proposal: Proposal) -> Tensor:
    """The chance of each node if its parent is right, as far as the source knows. [M]."""
    if proposal.survival is None:
        return torch.full_like(proposal.tree.tokens, torch.nan, dtype=torch.float64)
    survival = proposal.survival.double()
    above = survival[proposal.tree.parents.clamp(min=0)]
    return (survival / above.clamp(min=1e-9)).clamp(0, 1)


@dataclass(frozen=True)
class Rated:
    """Candidates, which of them are nodes, and how likely these are."""

    candidates: Candidates
    alike: Tensor  # [B, C, C] bool
    first: Tensor  # [B, C] bool of all that are one node, the first: it stands for them
    above: Tensor  # [B, C] int64 the candidate that stands for the parent of each, -1: the root
    chance: Tensor  # [B, C] float64 that the whole way to it is accepted, 0 for those that stand for nothing
    cells: Tensor  # [2, B, C] int64 where each is counted: what its source said, and what its agreement was worth

    @classmethod
    def of(cls, candidates: Candidates, calibration: Calibration, sources: int) -> Rated:
        """By what is known of the `sources`."""
        made, depth = candidates, candidates.depth
        alike, itself = made.alike(), torch.arange(made.tokens.shape[1], device=made.tokens.device)
        stands = torch.where(alike, itself, len(itself)).amin(2).clamp(max=len(itself) - 1)
        first = made.real & (stands == itself)
        above = torch.where(made.parents >= 0, stands.gather(1, made.parents.clamp(min=0)), -1)
        own = calibration.cells(made.source.expand_as(depth), depth, made.words)
        chance = calibration.chances(own, made.words)
        word = 1 - torch.where(alike, (1 - chance)[:, None], 1).prod(2)
        agreed = calibration.cells(sources + alike.sum(2).clamp(1, sources) - 1, depth, word)
        chance = torch.where(first, calibration.chances(agreed, word), 0)
        siblings = first[:, None] & (above[:, None] == above[:, :, None])
        chance = chance / torch.where(siblings, chance[:, None], 0).sum(2).clamp(min=1)
        whole = chance
        for _ in range(made.ways.shape[2] - 1):
            whole = chance * pad(whole, (1, 0), value=1.0).gather(1, above + 1)
        nowhere = calibration.nowhere
        cells = torch.stack([own.where(made.real, nowhere), agreed.where(first, nowhere)])
        return cls(made, alike, first, above, whole, cells)

    def taken(
        self, view: BatchView, nodes: int, least: float, q: Tensor | None, *, whole_first: bool = False
    ) -> Proposal:
        """Trees of the `nodes` likeliest that are at least that likely, behind all nodes of the first source if these
        were drawn from `q`, or `whole_first`.
        """
        made = self.candidates
        sure = self.first & (made.source == 0) & (whole_first or q is not None)
        rank = torch.where(sure, SURE, self.chance.masked_fill(self.chance < least, 0))
        missing = max(0, nodes - rank.shape[1])
        columns = torch.where(self.alike, made.columns[:, None], 0).sum(2)
        every = torch.stack([made.tokens, made.depth, columns, made.draw, made.q_row])
        rank, every, above = pad(rank, (0, missing)), pad(every, (0, missing)), pad(self.above, (0, missing), value=-1)
        order, place = ranked_offers(rank)
        kept = order[:, :nodes]
        tokens, depth, columns, draw, q_row = every.gather(2, kept.expand(5, -1, -1)).unbind(0)
        rank, above = rank.gather(1, kept), above.gather(1, kept)
        there = rank > 0
        parents = torch.where((above >= 0) & there, place.gather(1, above.clamp(min=0)) + 1, 0)
        deepest = made.ways.shape[2]
        links = linked(
            view.roots, tokens, parents, torch.where(there, depth, 1), kept, min(made.widest, nodes), deepest
        )
        scores = rank.clamp(max=1).log()
        known = torch.where(there, GRAFTED + columns, 0)
        whole = linked_proposal(links, scores, known, view, deepest, certain=False)
        return whole if q is None else replace(whole, tree=_with_draws(whole.tree, draw, q_row, q))

    def waiting(self, view: BatchView) -> Waiting:
        """What is to be counted once it is known what followed."""
        return Waiting(view.rows, _counts_for(view), self.candidates, self.cells)


@dataclass(frozen=True)
class Waiting:
    """Candidates whose outcome is not known yet."""

    rows: Tensor  # [B] int64 of the sequences
    counted: Tensor  # [B] bool: not one that only fills the batch up
    candidates: Candidates
    cells: Tensor  # [2, B, C]

    def learn(self, calibration: Calibration, view: BatchView, tree: TokenTree, verdict: Verdict) -> None:
        """Count every candidate whose parent was right."""
        length, steps = verdict.length[:, None], torch.arange(verdict.path.shape[1], device=verdict.path.device)
        said = tree.tokens[verdict.path[:, 1:].clamp(min=0)]
        said = pad(said, (0, 1)).scatter(1, length, verdict.bonus[:, None]).masked_fill(steps > length, -2)
        # The step may have more sequences than there were proposals for.
        every = torch.full((view.history.shape[0], said.shape[1] + 1), -2, device=said.device)
        every = every.index_copy_(0, view.rows, torch.cat([said, length], 1))[self.rows]
        said, known = every[:, :-1], every[:, -1:] + 1
        made, levels = self.candidates, self.candidates.ways.shape[2]
        said = pad(said, (0, max(0, levels - said.shape[1])), value=-2)[:, None, :levels]
        right = (made.ways == said).long().cumprod(2).sum(2)
        trial = made.real & (right >= made.depth - 1) & (made.depth <= known) & self.counted[:, None]
        cells = self.cells.where(trial, calibration.nowhere)
        calibration.learn(cells.view(-1), (right >= made.depth).expand_as(cells).reshape(-1))


def _counts_for(view: BatchView) -> Tensor:
    """Sequences that are real. [B] bool."""
    return torch.ones_like(view.rows, dtype=torch.bool) if view.salts is None else view.salts[view.rows] >= 0


def _with_draws(tree: TokenTree, draw: Tensor, q_row: Tensor, q: Tensor) -> TokenTree:
    """The same with the nodes [B, N] drawn as they were."""
    there = tree.tokens >= 0
    return replace(
        tree,
        draw=pad(draw, (1, 0)).view(-1).where(there, 0),
        q_row=pad(q_row, (1, 0), value=-1).view(-1).where(there & (pad(draw, (1, 0)).view(-1) > 0), -1),
        q=q,
    )


def spread_ways(tree: TokenTree) -> tuple[Tensor, Tensor]:
    """The nodes of each tree, -1 behind the last and where they are absent, and the tokens on the way to each.
    [B, n], [B, n, D], -1 behind the end.
    """
    size, rows = tree.num_trees, tree.widest
    way = tree.paths[:, 1:]
    ways = torch.where(way >= 0, tree.tokens[way.clamp(min=0)], -1)
    every = torch.arange(tree.num_nodes, device=way.device)
    numbers = torch.cat([torch.where(tree.tokens >= 0, every, -1)[None], ways.mT])
    table = torch.full((len(numbers), size * rows), -1, device=way.device)
    table = table.index_copy_(1, tree.owner * rows + tree.local, numbers).view(len(numbers), size, rows)
    return table[0], table[1:].permute(1, 2, 0)
