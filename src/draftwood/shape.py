"""How the nodes of a batch of trees hang together: links between them, and what follows from links alone.

A node may be *absent* (`tree.py`): it is its own parent, and no draw behind any node names it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftwood.links import BITS, HostLinks, may_look, table_of

if TYPE_CHECKING:
    from draftwood.tree import Verdict


@dataclass(frozen=True)
class TreeShape:
    """How the nodes of B trees hang together, M nodes in all. Indices are global (0 … M-1) unless said otherwise."""

    parents: Tensor  # [M] int64, -1 at a root
    offsets: Tensor  # [B + 1] int64 where each tree begins
    owner: Tensor  # [M] int64 the tree a node belongs to
    local: Tensor  # [M] int64 index inside the own tree, 0 at the root
    depth: Tensor  # [M] int64 distance from the root
    # [M, W] int64 the draft nodes on the way to each node, itself included, as bits over local indices. Bit i of word w
    # is local node 64 w + i + 1: the root is an ordinary committed token and needs no bit.
    ancestors: Tensor
    tries: Tensor  # [M, C] int64 the nodes drawn behind each node, in the order a verifier tries them, -1 padded
    max_depth: int  # D: no node is deeper
    widest: int  # no tree has more nodes, root included
    repeats: bool = False  # independent draws gave some node twice: `tries` names it as often
    merged: Tensor | None = None  # [B] bool the trees that is so of, where a batch has both kinds; None: all

    @classmethod
    def of(cls, parents: Tensor, offsets: Tensor, drawn: Tensor | None = None) -> TreeShape:
        """From parents alone, by looking at them; `drawn` [E]: the node of every draw in the order drawn, where
        independent draws gave some node twice.
        """
        count = parents.shape[0]
        index = torch.arange(count, device=parents.device)
        sizes = offsets[1:] - offsets[:-1]
        trees = torch.arange(len(sizes), device=parents.device)
        owner = torch.repeat_interleave(trees, sizes, output_size=count)
        local = index - offsets[owner]
        climb = [index]
        while bool((up := follow(parents, climb[-1])).ge(0).any()):
            climb.append(up)
        paths = torch.stack(climb, 1)
        widest = int(sizes.max()) if len(sizes) else 1
        return cls(
            parents=parents,
            offsets=offsets,
            owner=owner,
            local=local,
            depth=(paths >= 0).sum(1) - 1,
            ancestors=ancestor_words(paths, local, num_words(widest)),
            tries=_tries(parents, index if drawn is None else drawn),
            max_depth=len(climb) - 1,
            widest=widest,
            repeats=drawn is not None,
        )

    @classmethod
    def of_lists(
        cls, trees: list[tuple[list[int], list[int]]], device: torch.device | None
    ) -> tuple[Tensor, TreeShape]:
        """From host lists, (tokens, parents inside the own tree) for each sequence; and the tokens. One pass."""
        links = HostLinks()
        for tokens, parents in trees:
            links.add_tree(tokens, parents)
        columns = [links.tokens, links.parents, links.owner, links.local, links.depth]
        tokens, parents, owner, local, depth = table_of(columns, device)
        offsets, tries, ancestors = (table_of(part, device) for part in (links.offsets, links.tries(), links.words()))
        deepest, widest = max(links.depth, default=0), max(links.local, default=0) + 1
        return tokens, cls(parents, offsets, owner, local, depth, ancestors, tries, deepest, widest)

    @classmethod
    def roots(cls, count: int, device: torch.device) -> TreeShape:
        """Bare roots."""
        steps = torch.arange(count + 1, device=device)
        own, zeros = steps[:-1], torch.zeros(count, dtype=torch.int64, device=device)
        none = torch.full_like(zeros, -1)
        shape = cls(none, steps, own, zeros, zeros, zeros[:, None], none[:, None], 0, 1)
        # Plain decoding should not pay for finding out that there is nothing to find out.
        shape.__dict__.update(sizes=zeros + 1, paths=own[:, None], inner=own[:0], levels=[own], turns=[], widths=[0])
        return shape

    def tiled(self, count: int, device: torch.device) -> TreeShape:
        """The shape of this batch `count` times, one behind the other."""
        moved = {name: getattr(self, name).to(device) for name in ("parents", "depth", "local", "ancestors", "tries")}
        nodes, trees = self.num_nodes, self.num_trees
        number = torch.arange(count, device=device)[:, None]

        def shifted(links: Tensor, by: int) -> Tensor:
            every = links.view(1, -1) + by * number
            return torch.where(links.view(1, -1) < 0, -1, every).reshape(-1, *links.shape[1:])

        starts = shifted(self.offsets[:-1].to(device), nodes)
        return replace(
            self,
            parents=shifted(moved["parents"], nodes),
            offsets=torch.nn.functional.pad(starts, (0, 1), value=count * nodes),
            owner=shifted(self.owner.to(device), trees),
            local=moved["local"].repeat(count),
            depth=moved["depth"].repeat(count),
            ancestors=moved["ancestors"].repeat(count, 1),
            tries=shifted(moved["tries"], nodes),
        )

    @property
    def num_trees(self) -> int:
        """B."""
        return self.offsets.shape[0] - 1

    @property
    def num_nodes(self) -> int:
        """M, roots included."""
        return self.parents.shape[0]

    @cached_property
    def sizes(self) -> Tensor:
        """Nodes of each tree, root included. [B]."""
        return self.offsets[1:] - self.offsets[:-1]

    @cached_property
    def paths(self) -> Tensor:
        """The nodes from the root to each node, root first, -1 padded. [M, D + 1]."""
        climb = [torch.arange(self.num_nodes, device=self.parents.device)]
        for _ in range(self.max_depth):
            climb.append(follow(self.parents, climb[-1]))
        upwards = torch.stack(climb, 1)  # self, parent, grandparent, …, -1
        steps = torch.arange(upwards.shape[1], device=upwards.device)
        source = self.depth[:, None] - steps
        return upwards.gather(1, source.clamp(min=0)).masked_fill(source < 0, -1)

    @cached_property
    def inner(self) -> Tensor:
        """Nodes something was drawn behind; all nodes where values may not be looked at. [n]."""
        return self._inner(may_look(self.tries))

    @cached_property
    def levels(self) -> list[Tensor]:
        """The nodes of each depth, roots first. Each [n]; where values may not be looked at [M], with -1 for nodes of
        other depths.
        """
        return self._levels(may_look(self.depth))

    @cached_property
    def turns(self) -> list[Tensor]:
        """All draws, one of each tree at a time, those behind a level before those behind the next: places in the
        flattened `tries`. Each [n]; where values may not be looked at [B], -1 where a tree has no more.
        """
        return self._turns(may_look(self.tries))

    @cached_property
    def widths(self) -> list[int]:
        """The most draws behind a node of each depth, or more where values may not be looked at."""
        return self._widths(may_look(self.tries))

    def _inner(self, look: bool) -> Tensor:
        index = torch.arange(self.num_nodes, device=self.tries.device)
        return index[(self.tries >= 0).any(1)] if look else index

    def _levels(self, look: bool) -> list[Tensor]:
        index = torch.arange(self.num_nodes, device=self.depth.device)
        depths = range(self.max_depth + 1)
        return [index[self.depth == d] if look else torch.where(self.depth == d, index, -1) for d in depths]

    def _turns(self, look: bool) -> list[Tensor]:
        nodes, width = self.tries.shape
        place = torch.arange(nodes * width, device=self.tries.device)
        there, row = self.tries.view(-1) >= 0, place // width
        column = self.local[row] * width + place % width
        known = torch.full((self.num_trees, self.widest * width), -1, device=place.device)
        known = known.index_put((self.owner[row], column), torch.where(there, place, -1))
        depth = torch.where(known >= 0, self.depth[known.clamp(min=0) // width], self.max_depth + 1)
        ordered = known.gather(1, depth.argsort(dim=1, stable=True))
        if look:
            return [turn[turn >= 0] for turn in ordered.unbind(1) if bool((turn >= 0).any())]
        return list(ordered.unbind(1))[: None if self.repeats else self.widest - 1]

    def _widths(self, look: bool) -> list[int]:
        width, most = self.tries.shape[1], torch.zeros(self.max_depth + 1, dtype=torch.int64, device=self.tries.device)
        if not look:
            return [width] * (self.max_depth + 1)
        return most.scatter_reduce(0, self.depth, (self.tries >= 0).sum(1), "amax").tolist()

    def known(self) -> TreeShape:
        """The same, once everything about it has been looked at: a captured graph cannot look."""
        looked = {
            "inner": self._inner(True), "levels": self._levels(True), "turns": self._turns(True),
            "widths": self._widths(True),
        }  # fmt: skip
        self.__dict__.update(looked, sizes=self.sizes, paths=self.paths)
        return self

    def linked(self, tries: Tensor, parents: Tensor) -> TreeShape:
        """The same nodes where some have become absent: other parents, no draws that were not there before, and those
        that are left packed to the left. What is known of levels and draws stays known, absent nodes included.
        """
        shape = replace(self, tries=tries, parents=parents)
        names = ("sizes", "paths", "inner", "levels", "turns", "widths")
        shape.__dict__.update({name: self.__dict__[name] for name in names if name in self.__dict__})
        return shape

    def part(self, keep: Tensor, trees: Tensor | None = None) -> tuple[TreeShape, NodeMap]:
        """The shape of the nodes in `keep` [M], of some `trees` [b] alone or of all; no node may outlive its parent.
        Looks at values.
        """
        shape, nodes = self.of_nodes(keep.nonzero()[:, 0])
        tries = shape.tries[:, : max(1, int((shape.tries >= 0).any(0).sum()))].contiguous()
        if trees is None:
            return replace(shape, tries=tries), nodes
        number = trees.new_empty(self.num_trees).scatter_(0, trees, torch.arange(len(trees), device=trees.device))
        ends = torch.cat([shape.offsets[trees], shape.offsets[-1:]])
        merged = None if self.merged is None else self.merged[trees]
        return replace(shape, tries=tries, offsets=ends, owner=number[shape.owner], merged=merged), nodes

    def of_nodes(self, nodes: Tensor) -> tuple[TreeShape, NodeMap]:
        """The shape of these nodes [m] alone, rising; no node may outlive its parent. Does not look at values."""
        every = torch.arange(len(nodes), device=nodes.device)
        number = torch.full_like(self.parents, -1).scatter_(0, nodes, every)
        owner = self.owner[nodes]
        offsets = torch.searchsorted(owner, torch.arange(self.num_trees + 1, device=nodes.device))
        local = every - offsets[owner]
        paths = follow(number, self.paths[nodes])
        shape = replace(
            self,
            parents=follow(number, self.parents[nodes]),
            offsets=offsets,
            owner=owner,
            local=local,
            depth=self.depth[nodes],
            ancestors=ancestor_words(paths, local, self.ancestors.shape[1]),
            tries=packed_left(follow(number, self.tries[nodes])),
        )
        return shape, NodeMap(nodes, number)


@dataclass(frozen=True)
class NodeMap:
    """Which node of a whole batch of trees each node of a part of it is."""

    whole: Tensor  # [m] the node of the whole that each node of the part is
    part: Tensor  # [M] the node of the part that each node of the whole is, -1: none

    def in_whole(self, verdict: Verdict) -> Verdict:
        """A verdict about the part in the whole's numbers."""
        return replace(verdict, path=follow(self.whole, verdict.path))


def follow(links: Tensor, at: Tensor) -> Tensor:
    """Where `links` lead from the nodes `at`; from no node (-1) to none."""
    return torch.where(at >= 0, links[at.clamp(min=0)], -1)


def num_words(widest: int) -> int:
    """Words of an ancestor set for trees of so many nodes, root included."""
    return max(1, -(-(widest - 1) // BITS))


def own_bits(local: Tensor, words: int) -> Tensor:
    """The bit of each node in ancestor sets, by its local index; none for a root. [...] -> [..., words]."""
    place = local - 1
    word = torch.arange(words, device=local.device)
    bit = torch.ones_like(place) << (place.clamp(min=0) % BITS)
    return torch.where((place >= 0)[..., None] & (place[..., None] // BITS == word), bit[..., None], 0)


def packed_left(table: Tensor) -> Tensor:
    """Rows with their -1 entries behind all others, which keep their order. [n, C]."""
    if table.shape[1] == 1:
        return table
    return table.gather(1, (table < 0).long().argsort(dim=1, stable=True))


def _tries(parents: Tensor, drawn: Tensor) -> Tensor:
    """The nodes drawn behind each node, in the order drawn, -1 padded. [M], [E] -> [M, C], C at least 1."""
    above = parents[drawn]
    order = torch.argsort(above, stable=True)
    order = order[above[order] >= 0]
    above, drawn = above[order], drawn[order]
    counts = torch.bincount(above, minlength=parents.shape[0])
    rank = torch.arange(len(order), device=drawn.device) - (counts.cumsum(0) - counts)[above]
    table = torch.full((parents.shape[0], max(1, int(counts.max()) if len(counts) else 1)), -1, device=drawn.device)
    table[above, rank] = drawn
    return table


def ancestor_words(paths: Tensor, local: Tensor, words: int) -> Tensor:
    """Bit sets over local node indices for the nodes on `paths`, in any order. [M, D + 1] -> [M, words] int64."""
    place = torch.where(paths >= 0, local[paths.clamp(min=0)], 0) - 1
    bit = torch.ones_like(place) << (place.clamp(min=0) % BITS)
    word = torch.where(place >= 0, place // BITS, -1)
    # Every step of a path is another node, so adding a bit is setting it.
    return torch.stack([torch.where(word == number, bit, 0).sum(1) for number in range(words)], 1)
