"""What a drafter is, and what a tree grower and a draft network are to each other.

A drafter keeps whatever it knows of a token under the target's cache slots. So nothing belongs to a sequence:
preemption, prefix sharing and release need no code of their own. A tree has a size that is known beforehand
(`sizes`); nodes that are not wanted are absent (`tree.py`). Nothing here looks at values, so all of it can be captured.

Legend: B sequences · M nodes of all trees · k nodes of one draft forward in each tree · R tokens a draft head knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from draftwood.batch import ForwardBatch
from draftwood.cache.kv import KVCache, Places, behind_last
from draftwood.model.runner import ModelRunner
from draftwood.protocols import BatchView, Features, HostView, Randomness
from draftwood.tree import DraftLaw, TokenTree, Verdict

BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
MOST_MEMBERS = 4  # drafters in one tree
MEMBER_BITS = 15  # of a column, for each of them: 1 + where it keeps a node that it has proposed
GRAFTED = 1 << MOST_MEMBERS * MEMBER_BITS  # is added to such columns
State = tuple[Tensor, ...]  # what a draft network needs of earlier forwards of the same round


def padded_batch(count: int) -> int:
    """Sequences of the smallest captured step that holds so many."""
    return next((batch for batch in BATCHES if batch >= count), count)


def tree_sizes(most: int) -> list[int]:
    """Sizes of trees worth a captured step of their own, up to `most`: with the root, rows that fill kernels' tiles."""
    rows = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
    return sorted({0, most, *(count - 1 for count in rows if count - 1 < most)})


@dataclass(frozen=True)
class Proposal:
    """What a drafter proposes for a step."""

    tree: TokenTree  # of one size for every sequence, absent nodes included
    # [M] the place behind the text where the drafter keeps its own state of each node, 1 …; 0: nowhere, or at the root.
    # None: at the node's local index.
    columns: Tensor | None = None
    survival: Tensor | None = None  # [M] the chance that each node is accepted, where the drafter knows

    @classmethod
    def bare(cls, view: BatchView) -> Proposal:
        """Nothing but the last committed tokens."""
        return cls(TokenTree.roots(view.roots))

    def packed(self) -> Proposal:
        """The same without absent nodes; looks at values."""
        tree, nodes = self.tree.packed()
        if nodes is None:
            return self
        columns = self.tree.local if self.columns is None else self.columns
        survival = None if self.survival is None else self.survival[nodes.whole]
        return replace(self, tree=tree, columns=columns[nodes.whole], survival=survival)

    def likeliest(
        self, count: int, real: Tensor, corrected: Tensor | None = None, need: Tensor | None = None
    ) -> Proposal:
        """The same with `count` draft nodes of all trees together, those most likely to be accepted, by their
        `corrected` chances [M] if given; absent ones only where there are no others. Trees of sequences that are not
        `real` [B] give way to all others. Of nodes whose chances are not known those nearest to the roots are taken.
        Does not look at values. First come those by which a sequence may expect as many tokens as it has `need` [B] of.

        Only for chosen nodes: whether a drawn node is scored must not depend on what was drawn.
        """
        tree = self.tree
        if tree.q is not None:
            raise ValueError("nodes that were drawn cannot be selected by their chances")
        if count >= tree.num_drafted:
            return self
        known = self.survival if corrected is None else corrected
        chance = -tree.depth.float() if known is None else known.float()
        chance = torch.where(tree.tokens >= 0, chance, -torch.inf).where(real[tree.owner], -torch.inf)
        chance = chance.masked_fill(tree.local == 0, torch.inf)
        paths = tree.shape.paths  # a node is no likelier than its parent, whatever a drafter says
        chance = chance[paths.clamp(min=0)].masked_fill(paths < 0, torch.inf).amin(1)
        if need is not None and known is not None:
            chance = chance + 2.0 * _needed(chance.view(tree.num_trees, -1), need).view(-1)
        # Equal ones stay in order, so that no node comes before its parent.
        ranked = chance.sort(descending=True, stable=True).indices
        kept = ranked[: tree.num_trees + count].sort().values
        columns = tree.local if self.columns is None else self.columns
        survival = None if self.survival is None else self.survival[kept]
        return Proposal(tree.of_nodes(kept), columns[kept], survival)

    def limited(self, view: BatchView) -> Proposal:
        """The same with nodes absent for which their sequence has no room; which these are depends on no draw."""
        if view.max_nodes is None or view.max_depth is None or not self.tree.num_drafted:
            return self
        owner = self.tree.owner
        beyond = (self.tree.local > view.max_nodes[owner]) | (self.tree.depth > view.max_depth[owner])
        columns = self.tree.local if self.columns is None else self.columns
        return replace(self, tree=self.tree.without(beyond), columns=columns)

    def within_pages(self, view: BatchView, cache: KVCache, staged: int) -> Proposal:
        """The same without nodes that a drafter has run where their sequence has no page: what it would keep of them
        may be another node's. Of drawn trees all or none: `staged` places are written to.
        """
        if self.columns is None:
            return self
        pages = ((view.block_table >= 0) & (view.block_table != cache.scratch_page)).sum(1)
        places = self.columns if self.tree.q is None else torch.full_like(self.columns, staged)
        beyond = places > (pages * cache.page_size - view.lengths)[self.tree.owner]
        if view.may_look and not bool(beyond.any()):
            return self
        return replace(self, tree=self.tree.without(beyond))

    @property
    def members(self) -> Tensor:
        """Which drafters of a combination have proposed each node. [M, MOST_MEMBERS] bool."""
        if self.columns is None:
            return torch.zeros(self.tree.num_nodes, MOST_MEMBERS, dtype=torch.bool, device=self.tree.tokens.device)
        digits = torch.stack([_digit(self.columns, member) for member in range(MOST_MEMBERS)], 1)
        return (digits > 0) & (self.columns >= GRAFTED)[:, None]

    def of_member(self, member: int) -> Proposal:
        """The same, with the columns of one drafter of a combination."""
        if self.columns is None:
            return self
        return replace(self, columns=(_digit(self.columns, member) - 1).clamp(min=0))

    def columns_of(self, path: Tensor) -> Tensor:
        """Where the drafter keeps the nodes on `path` [B, D + 1]; 0 where it ends."""
        columns = self.tree.local if self.columns is None else self.columns
        return columns[path.clamp(min=0)].masked_fill(path < 0, 0)


def _digit(columns: Tensor, member: int) -> Tensor:
    """1 + the column of one drafter of a combination, 0 where it has not proposed the node."""
    return columns >> MEMBER_BITS * member & (1 << MEMBER_BITS) - 1


def _needed(chance: Tensor, need: Tensor) -> Tensor:
    """The likeliest nodes of each tree, until their chances add up to its need [B]; roots are certain. [B, n] bool."""
    ranked = chance.sort(dim=1, descending=True, stable=True)
    gained = ranked.values.masked_fill(ranked.values > 1, 0.0).clamp(min=0)
    wanted = gained.cumsum(1) - gained < need[:, None]
    return torch.zeros_like(wanted).scatter(1, ranked.indices, wanted)


class Drafter(Protocol):
    """Guesses trees. Bare roots are always right: cold, without room, or out of ideas."""

    @property
    def law(self) -> DraftLaw:
        """How the nodes of every tree are chosen."""
        ...

    @property
    def max_nodes(self) -> int:
        """The largest tree it would like to propose for one sequence, the root not counted."""
        ...

    @property
    def sizes(self) -> Sequence[int]:
        """The tree sizes it can propose, ascending, from 0; roots not counted."""
        ...

    @property
    def surplus(self) -> int:
        """How many times as many nodes as a captured step has rows for it should propose: of all sequences' nodes the
        likeliest are scored. 1 where nodes that are not scored cost too much, and where nodes are drawn.
        """
        ...

    @property
    def needs(self) -> frozenset[int]:
        """Layers of the target whose output it keeps something of, `LOGITS` among them; usually none."""
        ...

    @property
    def reads(self) -> bool:
        """Whether it runs every committed token through a network of its own: when it was not used it falls behind."""
        ...

    @property
    def waits(self) -> bool:
        """Whether its trees come from the host (`prepare`), which has to know the outcome of the last step first."""
        ...

    @property
    def remembers(self) -> bool:
        """Whether `commit` needs what it keeps of the last proposal: then no other step may come between the two."""
        ...

    def attach(self, target: ModelRunner) -> None:
        """The target it drafts for; called once, before anything else."""
        ...

    def depth(self, nodes: int) -> int:
        """How deep a tree of so many nodes can be."""
        ...

    def staged(self, nodes: int) -> int:
        """Places behind the text that it writes to for a tree of so many nodes; the scheduler reserves their pages."""
        ...

    def prepare(self, view: HostView, size: int, nodes: int) -> None:
        """The host's part, if it waits or requests come with predictions, before a step of `size` sequences, of which
        `view` has the real ones.
        """
        ...

    def propose(self, view: BatchView, nodes: int, rng: Randomness) -> Proposal:
        """A tree of `nodes` draft nodes, one of `sizes`, for every sequence; absent where there is nothing to guess."""
        ...

    def ingest(self, batch: ForwardBatch, features: Features | None) -> None:
        """The target has run these rows of text. None: their features were given before, by this call or `commit`, and
        only the drafter's own network has not read them.
        """
        ...

    def commit(self, view: BatchView, proposal: Proposal, verdict: Verdict, features: Features) -> None:
        """What became of a proposal, or of bare roots; `features` of its nodes, in the tree's order."""
        ...

    def release(self, seq_id: int) -> None:
        """The sequence has ended; also called for sequences it never saw."""
        ...


@runtime_checkable
class ReadsForSome(Protocol):
    """Several drafters, one for each sequence."""

    def reads_for(self, name: str | None) -> bool:
        """Whether the one of that name `reads`."""
        ...


class Silent:
    """The parts of a drafter that most need nothing of."""

    needs: frozenset[int] = frozenset()
    surplus = 1
    reads = False
    waits = False
    remembers = False

    def attach(self, target: ModelRunner) -> None:
        """Nothing to know."""

    def staged(self, nodes: int) -> int:
        """Nothing is written."""
        return 0

    def prepare(self, view: HostView, size: int, nodes: int) -> None:
        """Nothing to ask the host for."""

    def ingest(self, batch: ForwardBatch, features: Features | None) -> None:
        """Nothing to read."""

    def commit(self, view: BatchView, proposal: Proposal, verdict: Verdict, features: Features) -> None:
        """Nothing to keep."""

    def release(self, seq_id: int) -> None:
        """Nothing to forget."""


class Vocabulary(Protocol):
    """The tokens that a draft head knows, where it does not know all."""

    @property
    def tokens(self) -> Tensor | None:
        """[R] ascending; None: all."""
        ...

    def spread(self, logits: Tensor) -> Tensor:
        """Logits over the whole vocabulary. [*, R] -> [*, V]."""
        ...


@dataclass(frozen=True)
class Front:
    """The nodes of one draft forward: k of each tree, whose children are next."""

    tokens: Tensor  # [B, k]
    depth: Tensor  # [B, k]
    level: int | None  # their depth, where all have the same
    parents: Tensor  # [B, k] where each one's parent stands among the nodes of the forward it was in
    forwards: Tensor | None  # [B, k] which forward that was, 0: the roots'; None: the last before this one
    earlier: tuple[Front, ...]  # the fronts before this one, the first behind the roots first
    places: Places  # where a network with a cache of its own keeps them, and what they see of each other

    @cached_property
    def asked(self) -> Tensor:
        """The nodes of all forwards up to this one. [B, n]."""
        return torch.cat([front.tokens for front in (*self.earlier, self)], 1)

    def behind_last(self, count: int) -> Places:
        """Places of the last `count` tokens of the text, and of the nodes of all forwards up to this one."""
        return behind_last([front.places for front in (*self.earlier, self)], count)

    def of_parents(self, outputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """What a network gave for the parents: rows of its outputs of one or all earlier forwards, each
        [B * k', width], the roots' first. Returns rows [n, width] and which of them each node's parent is [B * k].
        """
        size = self.tokens.shape[0]
        counts = [1, *(front.tokens.shape[1] for front in self.earlier)]
        if self.forwards is None:
            return outputs[-1], (self.parents + _firsts(size, counts[-1], self.parents.device)).view(-1)
        starts, widths = _starts(tuple(counts), self.parents.device)
        tree = _firsts(size, 1, self.parents.device)
        rows = size * starts[self.forwards] + tree * widths[self.forwards] + self.parents
        return torch.cat(list(outputs)), rows.view(-1)

    @cached_property
    def path(self) -> Tensor:
        """The tokens from below the root to each, as many as the deepest can have; 0 behind the end. [B, k, n]."""
        size = self.tokens.shape[0]
        if not self.earlier:
            return self.tokens[..., None]
        if self.forwards is None:
            above = self.earlier[-1].path
            way = above.gather(1, self.parents[..., None].expand(-1, -1, above.shape[-1]))
        else:
            length = len(self.earlier)
            pad = torch.nn.functional.pad
            every = [self.tokens.new_zeros(size, 1, length)]
            every += [pad(front.path, (0, length - front.path.shape[-1])) for front in self.earlier]
            counts = [1, *(front.tokens.shape[1] for front in self.earlier)]
            at = _starts(tuple(counts), self.parents.device)[0][self.forwards] + self.parents
            way = torch.cat(every, 1).gather(1, at[..., None].expand(-1, -1, length))
        way = torch.nn.functional.pad(way, (0, 1))
        return way.scatter(2, (self.depth - 1)[..., None], self.tokens[..., None])


# What follows from sizes alone is made once: a captured step cannot copy it from the host.
@lru_cache(maxsize=1024)
def _starts(counts: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Where the nodes of each of some forwards begin in one tree, and how many they are. 2 x [n]."""
    starts = [sum(counts[:i]) for i in range(len(counts))]
    return torch.tensor(starts, device=device), torch.tensor(counts, device=device)


@lru_cache(maxsize=1024)
def _firsts(size: int, count: int, device: torch.device) -> Tensor:
    """Where the nodes of each of `size` trees begin, if each has `count`. [B, 1]."""
    return count * torch.arange(size, device=device)[:, None]


class FrontierModel(Protocol):
    """What a draft network is to a grower: it gives logits at the nodes of a growing tree."""

    def begin(self, view: BatchView) -> tuple[Tensor, State]:
        """Logits at the roots [B, 1, R], and what later forwards need."""
        ...

    def extend(self, view: BatchView, front: Front, state: State) -> tuple[Tensor, State]:
        """Logits at the nodes of `front`. [B, k, R]."""
        ...

    def vocabulary(self, level: int | None) -> Vocabulary | None:
        """The tokens that logits at nodes of depth `level` are of; None: all, as always where depths differ (`level`
        None).
        """
        ...


class Grower(Protocol):
    """A tree shape; knows no network."""

    @property
    def law(self) -> DraftLaw:
        """How it chooses nodes."""
        ...

    @property
    def max_nodes(self) -> int:
        """Its largest tree, the root not counted."""
        ...

    @property
    def sizes(self) -> Sequence[int]:
        """The sizes its trees can have, ascending, from 0."""
        ...

    @property
    def surplus(self) -> int:
        """See `Drafter`: more than 1 where it says how likely nodes are."""
        ...

    @property
    def levels(self) -> int:
        """How deep its trees are at most."""
        ...

    def depth_of(self, nodes: int) -> int:
        """How deep a tree of so many nodes can be."""
        ...

    def staged(self, nodes: int) -> int:
        """Places behind the text that a network with a cache of its own writes to for a tree of so many nodes."""
        ...

    def within_depth(self, deepest: int) -> Grower:
        """The same for a network that guesses no more than `deepest` tokens ahead."""
        ...

    def grow(self, model: FrontierModel, view: BatchView, nodes: int, rng: Randomness) -> Proposal:
        """A tree of `nodes` draft nodes, one of `sizes`, for every sequence of the view."""
        ...
