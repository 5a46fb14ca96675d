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

from dataclasses import dataclass, field, replace
from enum import IntEnum

import torch
from torch import Tensor

from draftwood.links import may_look
from draftwood.shape import NodeMap, TreeShape, packed_left


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
    grown: bool = False  # where nodes are drawn follows from what was drawn before them
    grafted: bool = False  # which chosen nodes stand beside and behind drawn ones may depend on what was drawn

    def __or__(self, other: DraftLaw) -> DraftLaw:
        """Of trees of either kind."""
        return DraftLaw(
            self.draws | other.draws,
            chain=self.chain and other.chain,
            paths=self.paths or other.paths,
            grown=self.grown or other.grown,
            grafted=self.grafted or other.grafted,
        )


POINT_CHAIN = DraftLaw(frozenset({Draw.POINT}), chain=True)
POINT_TREE = DraftLaw(frozenset({Draw.POINT}), chain=False)


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
    def first_tries(self) -> Tensor:
        """`tries`, with -1 where a node comes again. [M, C]."""
        again = (self.tries[:, :, None] == self.tries[:, None, :]).tril(-1).any(-1)
        return self.tries.masked_fill(again, -1)

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

    def of_nodes(self, nodes: Tensor) -> TokenTree:
        """These nodes [m] alone, rising; see `TreeShape.of_nodes`."""
        shape, _ = self.shape.of_nodes(nodes)
        return TokenTree(self.tokens[nodes], shape, self.draw[nodes], self.q_row[nodes], self.q)

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
            shape = replace(shape.linked(packed_left(self.first_tries), shape.parents), repeats=False)
        return TokenTree.chosen(self.tokens, shape)

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

    @property
    def ends(self) -> Tensor:
        """The last accepted node of each tree. [B]."""
        return self.path.gather(1, self.length[:, None])[:, 0]


@dataclass(frozen=True)
class HostVerdict:
    """A verdict as plain lists: what streaming, stopping and the next schedule need."""

    tokens: list[list[int]]  # accepted draft tokens, then the bonus token
    accepted: list[int]
    drafted: list[int]
    drift: list[float]
    usable: list[bool]  # whether the bonus token had a distribution
    members: list[list[int]] = field(default_factory=list)  # see `StepOutput`; none without a combination

    def take(self, rows: list[int]) -> HostVerdict:
        """The same of some of the sequences."""
        return HostVerdict(
            [self.tokens[b] for b in rows],
            [self.accepted[b] for b in rows],
            [self.drafted[b] for b in rows],
            [self.drift[b] for b in rows],
            [self.usable[b] for b in rows],
            [self.members[b] for b in rows if self.members],
        )


def nodes_on(tree: TokenTree, path: Tensor, there: Tensor) -> Tensor:
    """Nodes on `path` [B, D + 1], where it is `there`. [M] int64, 1 or 0."""
    marks = torch.zeros(tree.num_nodes + 1, dtype=torch.int64, device=path.device)
    return marks.index_fill_(0, torch.where(there, path, tree.num_nodes).view(-1), 1)[:-1]
