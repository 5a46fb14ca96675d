"""The one currency of the engine: a packed batch of token trees, and what a verifier says about it.

    a tree of one sequence          tokens    t  a  b  c        node 0 is the root: the last committed token,
        root t ── a ── b            parents  -1  0  1  1        never a guess. Parents come before children,
                   └── c            depth     0  1  2  2        siblings in the order a verifier tries them.

A chain is a tree; plain decoding is the tree of one node. How nodes hang together is a `TreeShape`, computed once and
shared by all trees that look alike.

A captured step has trees of one size: there a node may be *absent*. It holds the token -1, is its own parent, and is
no node's child: no draw behind any node names it. `packed` drops absent nodes where the host may look.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property

import torch
from torch import Tensor

from draftwood.links import BITS, HostLinks, may_look, table_of


class Draw(IntEnum):
    """How a node's token was chosen. A sampled node names the row of `q` it was drawn from."""

    POINT = 0  # chosen, not drawn: always exact to verify as such
    IID = 1  # drawn from q, independently of its siblings
    WITHOUT_REPLACEMENT = 2  # drawn from q with the earlier siblings removed and renormalised
    TAIL = 3  # drawn from q with its deterministic siblings removed: the hybrid law


@dataclass(frozen=True)
class DraftLaw:
    """What a drafter promises of every tree it proposes; a verifier refuses what it is not exact for."""

    draws: frozenset[Draw]
    chain: bool  # no node has two children
    paths: bool = False  # whole independent paths, merged where they agree; perhaps behind a trunk they share


POINT_CHAIN = DraftLaw(frozenset({Draw.POINT}), chain=True)
POINT_TREE = DraftLaw(frozenset({Draw.POINT}), chain=False)


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
        """The nodes of each depth, roots first. Each [n]; where values may not be looked at [M], and -1 instead of nodes
        of other depths.
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
        """The shape of the nodes in `keep` [M], of some `trees` [b] alone or of all; no node may outlive its parent."""
        nodes = keep.nonzero()[:, 0]
        number = torch.where(keep, keep.cumsum(0) - 1, -1)
        counts = torch.bincount(self.owner[nodes], minlength=self.num_trees)
        if trees is not None:
            counts = counts[trees]
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        owner = torch.repeat_interleave(
            torch.arange(len(counts), device=nodes.device), counts, output_size=nodes.shape[0]
        )
        local = torch.arange(nodes.shape[0], device=nodes.device) - offsets[owner]
        tries = packed_left(follow(number, self.tries[nodes]))
        tries = tries[:, : max(1, int((tries >= 0).any(0).sum()))].contiguous()
        paths = follow(number, self.paths[nodes])
        ancestors = ancestor_words(paths, local, self.ancestors.shape[1])
        parents = follow(number, self.parents[nodes])
        merged = self.merged if trees is None or self.merged is None else self.merged[trees]
        shape = replace(
            self, parents=parents, offsets=offsets, owner=owner, local=local, depth=self.depth[nodes],
            ancestors=ancestors, tries=tries, merged=merged,
        )  # fmt: skip
        return shape, NodeMap(nodes, number)


@dataclass(frozen=True)
class NodeMap:
    """Which node of a whole batch of trees each node of a part of it is."""

    whole: Tensor  # [m] the node of the whole that each node of the part is
    part: Tensor  # [M] the node of the part that each node of the whole is, -1: none

    def in_whole(self, verdict: Verdict) -> Verdict:
        """A verdict about the part in the whole's numbers."""
        return replace(verdict, path=follow(self.whole, verdict.path))

    def in_part(self, verdict: Verdict) -> Verdict:
        """A verdict about the whole in the part's numbers; -1 where it is about other nodes."""
        return replace(verdict, path=follow(self.part, verdict.path))


@dataclass(frozen=True)
class TokenTree:
    """A packed batch of B trees with M nodes in all: tokens, and how each was chosen."""

    tokens: Tensor  # [M] int64
    shape: TreeShape
    draw: Tensor  # [M] int64, a `Draw`
    q_row: Tensor  # [M] int64, row of `q` a sampled node was drawn from, -1 for a point mass
    q: Tensor | None = None  # [R, V] the laws of the sampled nodes, given their earlier siblings

    @classmethod
    def chosen(cls, tokens: Tensor, shape: TreeShape) -> TokenTree:
        """Point masses."""
        return cls(tokens, shape, torch.zeros_like(tokens), torch.full_like(tokens, -1))

    @classmethod
    def roots(cls, tokens: Tensor) -> TokenTree:
        """Nothing but the last committed token of each sequence. [B]."""
        return cls.chosen(tokens, TreeShape.roots(len(tokens), tokens.device))

    @classmethod
    def of_points(cls, trees: list[tuple[list[int], list[int]]], device: torch.device | None = None) -> TokenTree:
        """Deterministic trees from host lists: (tokens, parents inside the own tree) for each sequence."""
        return cls.chosen(*TreeShape.of_lists(trees, device))

    @property
    def parents(self) -> Tensor:
        """See `TreeShape`; so for what follows. [M]."""
        return self.shape.parents

    @property
    def offsets(self) -> Tensor:
        """[B + 1]."""
        return self.shape.offsets

    @property
    def owner(self) -> Tensor:
        """[M]."""
        return self.shape.owner

    @property
    def local(self) -> Tensor:
        """[M]."""
        return self.shape.local

    @property
    def depth(self) -> Tensor:
        """[M]."""
        return self.shape.depth

    @property
    def paths(self) -> Tensor:
        """[M, D + 1]."""
        return self.shape.paths

    @property
    def tries(self) -> Tensor:
        """[M, C]."""
        return self.shape.tries

    @property
    def levels(self) -> list[Tensor]:
        """Each [n]."""
        return self.shape.levels

    @property
    def sizes(self) -> Tensor:
        """[B]."""
        return self.shape.sizes

    @property
    def max_depth(self) -> int:
        """D."""
        return self.shape.max_depth

    @property
    def widest(self) -> int:
        """Nodes of the largest tree, root included."""
        return self.shape.widest

    @property
    def num_trees(self) -> int:
        """B."""
        return self.shape.num_trees

    @property
    def num_nodes(self) -> int:
        """M, roots included."""
        return self.tokens.shape[0]

    @property
    def num_drafted(self) -> int:
        """Nodes that are guesses, absent ones included."""
        return self.num_nodes - self.num_trees

    @property
    def _first_tries(self) -> Tensor:
        """`tries`, with -1 where a node comes again. [M, C]."""
        again = (self.tries[:, :, None] == self.tries[:, None, :]).tril(-1).any(-1)
        return self.tries.masked_fill(again, -1)

    @property
    def _merged_siblings(self) -> Tensor:
        """Independently drawn nodes no sibling of which holds their token: repeats were merged. [M] bool."""
        tokens = torch.where(self.tries >= 0, self.tokens[self.tries.clamp(min=0)], -1)
        twins = (tokens[:, :, None] == tokens[:, None, :]) & (self.tries[:, :, None] != self.tries[:, None, :])
        apart = (twins & (self.tries >= 0)[:, :, None]).any(-1).any(-1)  # [M] has children with the same token
        siblings = (self.draw == Draw.IID) & ~apart[self.parents.clamp(min=0)]
        return siblings if self.shape.merged is None else siblings & self.shape.merged[self.owner]

    def distinct(self) -> TokenTree:
        """Every node tried once: what is left of repeated independent draws are draws without replacement.

        Whether another different token comes at all depends only on the draws before it, so this is admissible.
        """
        if not self.shape.repeats or self.q is None:
            return self
        rows = torch.where(self.q_row[:, None] >= 0, self.q[self.q_row.clamp(min=0)], 0)  # [M, V] a law of its own each
        merged, first = self._merged_siblings, self._first_tries
        for place, child in enumerate(self.tries.unbind(1)):
            token = torch.where(child >= 0, self.tokens[child.clamp(min=0)], 0)
            for later in first[:, place + 1 :].unbind(1):
                at = (later.clamp(min=0), token)  # no node twice, but for the first root, whose row is empty
                rows[at] = torch.where((later >= 0) & merged[at[0]], 0, rows[at])
        rows = rows / rows.sum(-1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)
        draw = torch.where(merged, int(Draw.WITHOUT_REPLACEMENT), self.draw)
        own = torch.arange(self.num_nodes, device=self.tokens.device)
        shape = replace(self.shape.linked(packed_left(first), self.parents), repeats=False)
        return TokenTree(self.tokens, shape, draw, torch.where(self.q_row >= 0, own, -1), rows)

    def drawn_probability(self, nodes: Tensor, dtype: torch.dtype) -> Tensor:
        """q(x) of each node's own token, one for a point mass. [k] -> [k]."""
        row = self.q_row[nodes]
        if self.q is None:
            return torch.ones(nodes.shape, dtype=dtype, device=nodes.device)
        return torch.where(row >= 0, self.q[row.clamp(min=0), self.tokens[nodes]].to(dtype), 1)

    def law_rows(self, nodes: Tensor, like: Tensor) -> Tensor:
        """The law each of `nodes` [k] was drawn from, a point mass written out, shaped and typed as `like` [k, V]."""
        row = self.q_row[nodes]
        if self.q is None:
            return torch.zeros_like(like).scatter_(1, self.tokens[nodes][:, None], 1.0)
        rows = self.q[row.clamp(min=0)].to(like.dtype)
        if may_look(like) and bool((row >= 0).all()):
            return rows
        chosen = row < 0
        return rows.masked_fill_(chosen[:, None], 0).scatter_add_(
            1, self.tokens[nodes][:, None], chosen[:, None].to(like.dtype)
        )

    def part(self, keep: Tensor, trees: Tensor | None = None) -> tuple[TokenTree, NodeMap]:
        """The nodes in `keep` [M], of some `trees` [b] alone or of all; see `TreeShape.part`."""
        shape, nodes = self.shape.part(keep, trees)
        kept = nodes.whole
        return TokenTree(self.tokens[kept], shape, self.draw[kept], self.q_row[kept], self.q), nodes

    def take(self, trees: Tensor) -> tuple[TokenTree, NodeMap]:
        """The batch of some trees [b], rising."""
        wanted = torch.zeros(self.num_trees, dtype=torch.bool, device=self.tokens.device)
        wanted[trees] = True
        return self.part(wanted[self.owner], trees)

    def select(self, keep: Tensor, *, judged: bool) -> TokenTree:
        """The tree of the nodes in `keep` [M]; roots always stay, and no node may outlive its parent.

        `judged`: the choice looked at drawn tokens. Then no sampled node is a fair draw any more, kept ones
        included, and all of them become point masses; that is exact again (see docs/adr/0002).
        """
        keep = keep | (self.parents < 0)
        orphaned = keep & (self.parents >= 0) & ~keep[self.parents]
        if bool(orphaned.any()):
            raise ValueError("select() would keep a node whose parent it drops")
        kept = self.part(keep)[0]
        return kept.forget_draws() if judged else kept

    def without(self, absent: Tensor) -> TokenTree:
        """The same batch with the nodes in `absent` [M] absent, and all behind them; without looking at values.

        Which nodes these are must not depend on what was drawn.
        """
        gone = absent & (self.parents >= 0)
        for _ in range(self.max_depth - 1):
            gone = gone | gone[self.parents.clamp(min=0)] & (self.parents >= 0)
        own = torch.arange(self.num_nodes, device=gone.device)
        tries = self.tries.masked_fill((self.tries >= 0) & gone[self.tries.clamp(min=0)], -1)
        shape = self.shape.linked(packed_left(tries), torch.where(gone, own, self.parents))
        return replace(self, tokens=self.tokens.masked_fill(gone, -1), shape=shape)

    def packed(self) -> tuple[TokenTree, NodeMap | None]:
        """The same without absent nodes; None where there are none. Looks at values."""
        there = self.tokens >= 0
        return (self, None) if bool(there.all()) else self.part(there)

    def forget_draws(self) -> TokenTree:
        """The same tokens as point masses."""
        shape = self.shape
        if shape.repeats:
            shape = replace(shape.linked(packed_left(self._first_tries), shape.parents), repeats=False)
        return TokenTree.chosen(self.tokens, shape)

    def refilled(self, tokens: Tensor, q: Tensor | None = None) -> TokenTree:
        """The same trees with other tokens and laws."""
        return replace(self, tokens=tokens, q=q)

    def validate(self) -> None:
        """Raise ValueError unless the packed arrays describe B well-formed trees."""
        if self.offsets.tolist()[:: self.num_trees] != [0, self.num_nodes]:
            raise ValueError("offsets do not start at 0 and end at M")
        index = torch.arange(self.num_nodes, device=self.tokens.device)
        is_root, absent = self.parents < 0, self.tokens < 0
        problems = {
            "a tree has no root at its first node": not torch.equal(index[is_root], self.offsets[:-1]),
            "a parent comes after its child": bool((self.parents >= index)[~absent].any()),
            "an absent node has another parent than itself": bool((self.parents != index)[absent].any()),
            "a parent lies in another tree": bool(
                (self.owner[self.parents.clamp(min=0)] != self.owner)[~is_root].any()
            ),
            "a sampled node names no law": bool(((self.draw != Draw.POINT) & (self.q_row < 0)).any()),
            "a point mass names a law": bool(((self.draw == Draw.POINT) & (self.q_row >= 0)).any()),
            "a node was never drawn": not torch.equal(self.tries[self.tries >= 0].unique(), index[~(is_root | absent)]),
            "a law is named that is not there": bool((self.q_row >= (0 if self.q is None else self.q.shape[0])).any()),
        }
        wrong = [text for text, broken in problems.items() if broken]
        if wrong:
            raise ValueError("; ".join(wrong))


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


def offsets_of(owner: Tensor, num_trees: int) -> Tensor:
    """Where each tree begins, from the tree every node belongs to. [M] -> [B + 1]."""
    counts = torch.bincount(owner, minlength=num_trees)
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def ancestor_words(paths: Tensor, local: Tensor, words: int) -> Tensor:
    """Bit sets over local node indices for the nodes on `paths`, in any order. [M, D + 1] -> [M, words] int64."""
    table = torch.zeros(paths.shape[0], words, dtype=torch.int64, device=paths.device)
    for step in range(paths.shape[1]):
        node = torch.where(paths[:, step] >= 0, local[paths[:, step].clamp(min=0)], 0) - 1
        present = node >= 0
        bit = torch.ones_like(node) << (node.clamp(min=0) % BITS)
        word = (node.clamp(min=0) // BITS).unsqueeze(1)
        # Every step of a path is another node, so adding a bit is setting it.
        table.scatter_add_(1, word, torch.where(present, bit, 0).unsqueeze(1))
    return table


@dataclass(frozen=True)
class Verdict:
    """What a verifier keeps of each tree: a path from the root, and the target's own next token."""

    path: Tensor  # [B, D + 1] int64 global nodes, root first, -1 padded
    length: Tensor  # [B] int64 accepted draft tokens, 0 … D
    bonus: Tensor  # [B] int64
    drift: Tensor | None = None  # [B] how far from the model's own law these tokens may be; nan: unknown; None: 0

    @classmethod
    def of_roots(cls, tree: TokenTree, bonus: Tensor) -> Verdict:
        """Nothing was guessed, so nothing is accepted."""
        return cls(tree.offsets[:-1, None], torch.zeros_like(bonus), bonus)

    def to_host(self, tree: TokenTree) -> HostVerdict:
        """The tokens each sequence gains, as lists; waits for them."""
        safe = self.path[:, 1:].clamp(min=0)
        there = ((tree.tokens >= 0) & (tree.parents >= 0)).long()
        drafted = torch.zeros_like(self.length).index_add_(0, tree.owner, there)
        packed = torch.cat([self.length[:, None], self.bonus[:, None], drafted[:, None], tree.tokens[safe]], 1).tolist()
        return HostVerdict(
            tokens=[[*row[3 : 3 + row[0]], row[1]] for row in packed],
            accepted=[row[0] for row in packed],
            drafted=[row[2] for row in packed],
            drift=[0.0] * len(packed) if self.drift is None else self.drift.tolist(),
            usable=[True] * len(packed),
        )


@dataclass(frozen=True)
class HostVerdict:
    """A verdict as plain lists: what streaming, stopping and the next schedule need."""

    tokens: list[list[int]]  # accepted draft tokens, then the bonus token
    accepted: list[int]
    drafted: list[int]
    drift: list[float]
    usable: list[bool]  # whether the bonus token had a distribution

    def take(self, rows: list[int]) -> HostVerdict:
        """The same of some of the sequences."""
        columns = (self.tokens, self.accepted, self.drafted, self.drift, self.usable)
        return HostVerdict(*([column[b] for b in rows] for column in columns))


def join(trees: Sequence[TokenTree], places: Sequence[Tensor]) -> tuple[TokenTree, list[NodeMap]]:
    """One batch of several, the trees of each of which stand at its `places` [b] in the whole; and where the nodes of
    each went.
    """
    count, widest = sum(tree.num_nodes for tree in trees), max(tree.widest for tree in trees)
    sizes = torch.cat([tree.sizes for tree in trees])
    sizes = torch.empty_like(sizes).scatter_(0, torch.cat(list(places)), sizes)
    offsets = torch.nn.functional.pad(sizes.cumsum(0), (1, 0))
    wholes = [offsets[own][tree.owner] + tree.local for tree, own in zip(trees, places, strict=True)]
    every = torch.arange(count, device=sizes.device)
    order = torch.empty_like(every).scatter_(0, torch.cat(wholes), every)
    width, words = max(tree.tries.shape[1] for tree in trees), num_words(widest)
    merged = _merged_trees(trees)

    def ordered(parts: Iterable[Tensor]) -> Tensor:
        return torch.cat(list(parts))[order]

    shape = TreeShape(
        parents=ordered(follow(whole, tree.parents) for tree, whole in zip(trees, wholes, strict=True)),
        offsets=offsets,
        owner=ordered(own[tree.owner] for tree, own in zip(trees, places, strict=True)),
        local=ordered(tree.local for tree in trees),
        depth=ordered(tree.depth for tree in trees),
        ancestors=ordered(_as_wide(tree.shape.ancestors, words, 0) for tree in trees),
        tries=ordered(_as_wide(follow(w, tree.tries), width, -1) for tree, w in zip(trees, wholes, strict=True)),
        max_depth=max(tree.max_depth for tree in trees),
        widest=widest,
        repeats=any(tree.shape.repeats for tree in trees),
        merged=None if merged is None else torch.empty_like(merged).scatter_(0, torch.cat(list(places)), merged),
    )
    q, q_rows = _laws_of(trees)
    whole = TokenTree(ordered(t.tokens for t in trees), shape, ordered(t.draw for t in trees), ordered(q_rows), q)
    own = [every[: tree.num_nodes] for tree in trees]
    return whole, [
        NodeMap(places, torch.full_like(every, -1).scatter(0, places, numbers))
        for places, numbers in zip(wholes, own, strict=True)
    ]


def choose(trees: Sequence[TokenTree], which: Tensor) -> tuple[TokenTree, Tensor]:
    """Of several batches, each with trees of one size, the tree of batch `which` [B] for every sequence.

    Trees are as large as the largest, with absent nodes at the end. Also which node of its batch each node is, -1 where
    it is none of them. [M]. Does not look at values.
    """
    rows, device = max(tree.widest for tree in trees), which.device
    width = max(tree.tries.shape[1] for tree in trees)
    every = torch.arange(len(which) * rows, device=device)
    owner, local = every // rows, every % rows
    batch = which[owner]

    def chosen(parts: list[Tensor]) -> Tensor:
        return torch.stack(parts)[batch, every]

    def padded(tree: TokenTree, values: Tensor, fill: int) -> Tensor:
        wide = values.reshape(len(which), tree.widest, -1)
        missing = rows - tree.widest
        return torch.nn.functional.pad(wide, (0, 0, 0, missing), value=fill).view(len(every), *values.shape[1:])

    def moved(tree: TokenTree, links: Tensor) -> Tensor:
        return torch.where(links < 0, -1, links // tree.widest * rows + links % tree.widest)

    merged = _merged_trees(trees)
    links = [padded(tree, moved(tree, tree.parents), -1) for tree in trees]
    there = [local < tree.widest for tree in trees]
    shape = TreeShape(
        parents=chosen([torch.where(own, up, every) for own, up in zip(there, links, strict=True)]),
        offsets=torch.arange(len(which) + 1, device=device) * rows,
        owner=owner,
        local=local,
        depth=chosen([padded(tree, tree.depth, 1) for tree in trees]),
        ancestors=chosen([padded(tree, _as_wide(tree.shape.ancestors, num_words(rows), 0), 0) for tree in trees]),
        tries=chosen([padded(tree, _as_wide(moved(tree, tree.tries), width, -1), -1) for tree in trees]),
        max_depth=max(tree.max_depth for tree in trees),
        widest=rows,
        repeats=any(tree.shape.repeats for tree in trees),
        merged=None if merged is None else merged.view(len(trees), -1).gather(0, which[None])[0],
    )
    q, q_rows = _laws_of(trees)
    tokens, draw, q_row = (
        chosen([padded(tree, own, fill) for tree, own in zip(trees, column, strict=True)])
        for column, fill in (([t.tokens for t in trees], -1), ([t.draw for t in trees], 0), (q_rows, -1))
    )
    numbers = [padded(tree, torch.arange(tree.num_nodes, device=device), -1) for tree in trees]
    return TokenTree(tokens, shape, draw, q_row, q), chosen(numbers)


def _merged_trees(trees: Sequence[TokenTree]) -> Tensor | None:
    """Which trees of several batches, one behind the other, have merged draws; None where all or none are such."""
    if all(tree.shape.repeats and tree.shape.merged is None for tree in trees):
        return None
    if not any(tree.shape.repeats for tree in trees):
        return None
    own = [tree.shape.merged for tree in trees]
    every = [torch.full_like(tree.sizes, tree.shape.repeats, dtype=torch.bool) for tree in trees]
    return torch.cat([all_of if some is None else some for some, all_of in zip(own, every, strict=True)])


def _as_wide(table: Tensor, width: int, fill: int) -> Tensor:
    """The same with more columns. [n, C] -> [n, width]."""
    return torch.nn.functional.pad(table, (0, width - table.shape[1]), value=fill)


def _laws_of(trees: Sequence[TokenTree]) -> tuple[Tensor | None, list[Tensor]]:
    """The laws of all trees one behind the other, and the row that each node of each batch was drawn from."""
    laws, rows, start = [], [], 0
    for tree in trees:
        rows.append(torch.where(tree.q_row < 0, -1, tree.q_row + start))
        if tree.q is not None:
            laws.append(tree.q)
            start += len(tree.q)
    return torch.cat(laws) if laws else None, rows
