"""The one currency of the engine: a packed batch of token trees, and what a verifier says about it.

    a tree of one sequence          tokens    t  a  b  c        node 0 is the root: the last committed token,
        root t ── a ── b            parents  -1  0  1  1        never a guess. Parents come before children,
                   └── c            depth     0  1  2  2        siblings in the order a verifier tries them.

A chain is a tree; plain decoding is the tree of one node.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property

import torch
from torch import Tensor

from draftwood.links import BITS, HostLinks, table_of

Turn = tuple[Tensor, Tensor]  # (which node of a level, which of the draws behind it), one for each tree


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
class TokenTree:
    """A packed batch of B trees with M nodes in all. Indices are global (0 … M-1) unless said otherwise."""

    tokens: Tensor  # [M] int64
    parents: Tensor  # [M] int64, global index, -1 at a root
    offsets: Tensor  # [B + 1] int64
    draw: Tensor  # [M] int64, a `Draw`
    q_row: Tensor  # [M] int64, row of `q` a sampled node was drawn from, -1 for a point mass
    q: Tensor | None = None  # [R, V] the laws of the sampled nodes, given their earlier siblings
    # [E] the node of every draw in the order drawn, where independent draws gave some node twice; None: each once
    drawn: Tensor | None = None

    @classmethod
    def roots(cls, tokens: Tensor) -> TokenTree:
        """Nothing but the last committed token of each sequence. [B]."""
        num = tokens.shape[0]
        steps = torch.arange(num + 1, device=tokens.device)
        zeros, none = torch.zeros_like(tokens), torch.full_like(tokens, -1)
        tree = cls(tokens, none, steps, zeros, none)
        # Plain decoding should not pay for finding out that there is nothing to find out.
        own = steps[:-1]
        tree.__dict__.update(sizes=zeros + 1, owner=own, local=zeros, depth=zeros, max_depth=0, widest=1, inner=own[:0])
        tree.__dict__.update(
            paths=own[:, None], tries=none[:, None], ancestors=zeros[:, None], levels=[own], turns=[[]]
        )
        return tree

    @classmethod
    def of_points(cls, trees: list[tuple[list[int], list[int]]], device: torch.device | None = None) -> TokenTree:
        """Deterministic trees from host lists: (tokens, parents inside the own tree) for each sequence."""
        links = HostLinks()
        for tokens, parents in trees:
            links.add_tree(tokens, parents)
        columns = [links.tokens, links.parents, links.owner, links.local, links.depth]
        tokens, parents, owner, local, depth = table_of(columns, device)
        offsets = table_of(links.offsets, device)
        tree = cls(tokens, parents, offsets, torch.zeros_like(tokens), torch.full_like(tokens, -1))
        # The host knows the structure already; finding it again would take dozens of small operations.
        tree.__dict__.update(owner=owner, local=local, depth=depth, max_depth=max(links.depth, default=0))
        tree.__dict__.update(tries=table_of(links.tries(), device), ancestors=table_of(links.words(), device))
        return tree

    @property
    def num_trees(self) -> int:
        """B."""
        return self.offsets.shape[0] - 1

    @property
    def num_nodes(self) -> int:
        """M, roots included."""
        return self.tokens.shape[0]

    @property
    def num_drafted(self) -> int:
        """Nodes that are guesses."""
        return self.num_nodes - self.num_trees

    @cached_property
    def sizes(self) -> Tensor:
        """Nodes of each tree, root included. [B]."""
        return self.offsets[1:] - self.offsets[:-1]

    @cached_property
    def owner(self) -> Tensor:
        """The tree a node belongs to. [M]."""
        trees = torch.arange(self.num_trees, device=self.tokens.device)
        return torch.repeat_interleave(trees, self.sizes, output_size=self.num_nodes)

    @cached_property
    def local(self) -> Tensor:
        """Index of a node inside its own tree, 0 at the root. [M]."""
        return torch.arange(self.num_nodes, device=self.tokens.device) - self.offsets[self.owner]

    @cached_property
    def paths(self) -> Tensor:
        """The nodes from the root to each node, root first, -1 padded. [M, D + 1]."""
        upwards = [torch.arange(self.num_nodes, device=self.tokens.device)]
        while bool((up := follow(self.parents, upwards[-1])).ge(0).any()):
            upwards.append(up)
        climb = torch.stack(upwards, 1)  # self, parent, grandparent, …, -1
        steps = torch.arange(climb.shape[1], device=climb.device)
        source = (climb >= 0).sum(1, keepdim=True) - 1 - steps
        return climb.gather(1, source.clamp(min=0)).masked_fill(source < 0, -1)

    @cached_property
    def depth(self) -> Tensor:
        """Distance from the root. [M]."""
        return (self.paths >= 0).sum(1) - 1

    @cached_property
    def max_depth(self) -> int:
        """D, the depth of the deepest node of the batch."""
        return int(self.depth.max())

    @cached_property
    def ancestors(self) -> Tensor:
        """The draft nodes on the way to each node, itself included, as bits over local indices. [M, W] int64.

        Bit i of word w is local node 64 w + i + 1: the root is an ordinary committed token and needs no bit.
        """
        return ancestor_words(self.paths, self.local, max(1, -(-(self.widest - 1) // BITS)))

    @cached_property
    def widest(self) -> int:
        """Nodes of the largest tree, root included."""
        return int(self.sizes.max()) if self.num_trees else 1

    @cached_property
    def inner(self) -> Tensor:
        """Nodes something was drawn behind. [n]."""
        return (self.tries[:, 0] >= 0).nonzero().view(-1)

    @cached_property
    def turns(self) -> list[list[Turn]]:
        """The draws behind each level, one a tree at a time: whose turn it is, and with which of its draws."""
        return [self._turns_behind(nodes) for nodes in self.levels]

    def _turns_behind(self, nodes: Tensor) -> list[Turn]:
        row, place = (self.tries[nodes] >= 0).nonzero(as_tuple=True)
        whose = self.owner[nodes[row]]
        counts = torch.bincount(whose, minlength=self.num_trees)
        turn = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[whose]
        return [(row[turn == i], place[turn == i]) for i in range(int(counts.max()) if len(row) else 0)]

    @cached_property
    def levels(self) -> list[Tensor]:
        """The nodes of each depth, roots first. Each [n]."""
        return [(self.depth == depth).nonzero().view(-1) for depth in range(self.max_depth + 1)]

    @cached_property
    def tries(self) -> Tensor:
        """The nodes drawn behind each node, in the order a verifier tries them, -1 padded. [M, W], W at least 1."""
        drawn = torch.arange(self.num_nodes, device=self.tokens.device) if self.drawn is None else self.drawn
        above = self.parents[drawn]
        order = torch.argsort(above, stable=True)
        order = order[above[order] >= 0]
        above, drawn = above[order], drawn[order]
        counts = torch.bincount(above, minlength=self.num_nodes)
        rank = torch.arange(len(order), device=drawn.device) - (counts.cumsum(0) - counts)[above]
        table = torch.full((self.num_nodes, max(1, int(counts.max()))), -1, device=drawn.device)
        table[above, rank] = drawn
        return table

    @property
    def _first_tries(self) -> Tensor:
        """`tries`, with -1 where a node comes again. [M, W]."""
        again = (self.tries[:, :, None] == self.tries[:, None, :]).tril(-1).any(-1)
        return self.tries.masked_fill(again, -1)

    @property
    def _merged_siblings(self) -> Tensor:
        """Independently drawn nodes no sibling of which holds their token: repeats were merged. [M] bool."""
        tokens = torch.where(self.tries >= 0, self.tokens[self.tries.clamp(min=0)], -1)
        twins = (tokens[:, :, None] == tokens[:, None, :]) & (self.tries[:, :, None] != self.tries[:, None, :])
        apart = (twins & (self.tries >= 0)[:, :, None]).any(-1).any(-1)  # [M] has children with the same token
        return (self.draw == Draw.IID) & ~apart[self.parents.clamp(min=0)]

    def distinct(self) -> TokenTree:
        """Every node tried once: what is left of repeated independent draws are draws without replacement.

        Whether another different token comes at all depends only on the draws before it, so this is admissible.
        """
        if self.drawn is None or self.q is None:
            return self
        rows = torch.where(self.q_row[:, None] >= 0, self.q[self.q_row.clamp(min=0)], 0)  # [M, V] a law of its own each
        merged = self._merged_siblings
        for place, child in enumerate(self.tries.unbind(1)):
            for later in self._first_tries[:, place + 1 :].unbind(1):
                known = ((later >= 0) & merged[later.clamp(min=0)]).nonzero().view(-1)
                rows[later[known], self.tokens[child[known]]] = 0
        rows = rows / rows.sum(-1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)
        draw = torch.where(merged, int(Draw.WITHOUT_REPLACEMENT), self.draw)
        own = torch.arange(self.num_nodes, device=self.tokens.device)
        return replace(self, draw=draw, q_row=torch.where(self.q_row >= 0, own, -1), q=rows, drawn=None)

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
        if like.device.type == "cpu" and bool((row >= 0).all()):
            return rows
        chosen = row < 0
        return rows.masked_fill_(chosen[:, None], 0).scatter_add_(
            1, self.tokens[nodes][:, None], chosen[:, None].to(like.dtype)
        )

    def take(self, trees: Tensor) -> tuple[TokenTree, Tensor]:
        """The batch of some trees [b], rising, and where its nodes [m] are in this one."""
        wanted = torch.zeros(self.num_trees, dtype=torch.bool, device=self.tokens.device)
        wanted[trees] = True
        keep = wanted[self.owner]
        offsets = torch.cat([self.sizes.new_zeros(1), self.sizes[trees].cumsum(0)])
        return replace(self._keep(keep), offsets=offsets), keep.nonzero()[:, 0]

    def select(self, keep: Tensor, *, judged: bool) -> TokenTree:
        """The tree of the nodes in `keep` [M]; roots always stay, and no node may outlive its parent.

        `judged`: the choice looked at drawn tokens. Then no sampled node is a fair draw any more, kept ones
        included, and all of them become point masses; that is exact again (see docs/adr/0002).
        """
        keep = keep | (self.parents < 0)
        orphaned = keep & (self.parents >= 0) & ~keep[self.parents]
        if bool(orphaned.any()):
            raise ValueError("select() would keep a node whose parent it drops")
        kept = replace(self._keep(keep), offsets=offsets_of(self.owner[keep], self.num_trees))
        return kept.forget_draws() if judged else kept

    def _keep(self, keep: Tensor) -> TokenTree:
        """The nodes in `keep` [M], renumbered; the offsets are the caller's to mend."""
        renumbered = keep.cumsum(0) - 1
        parents = self.parents[keep]
        return replace(
            self,
            tokens=self.tokens[keep],
            parents=torch.where(parents >= 0, renumbered[parents], -1),
            draw=self.draw[keep],
            q_row=self.q_row[keep],
            drawn=None if self.drawn is None else renumbered[self.drawn[keep[self.drawn]]],
        )

    def forget_draws(self) -> TokenTree:
        """The same tokens as point masses."""
        none = torch.full_like(self.q_row, -1)
        return replace(self, draw=torch.zeros_like(self.draw), q_row=none, q=None, drawn=None)

    def refilled(self, tokens: Tensor, q: Tensor | None = None) -> TokenTree:
        """The same trees with other tokens and laws; what is known of their structure stays known."""
        tree = replace(self, tokens=tokens, q=q)
        tree.__dict__.update({name: getattr(self, name) for name in _STRUCTURE})
        return tree

    def relinked(self, tokens: Tensor, parents: Tensor, depth: Tensor, ancestors: Tensor, tries: Tensor) -> TokenTree:
        """As many nodes in as many trees that hang together otherwise, no deeper than these."""
        tree = replace(self, tokens=tokens, parents=parents)
        kept = {name: getattr(self, name) for name in ("sizes", "owner", "local", "widest", "max_depth")}
        tree.__dict__.update(kept, depth=depth, ancestors=ancestors, tries=tries)
        return tree

    def validate(self) -> None:
        """Raise ValueError unless the packed arrays describe B well-formed trees."""
        if self.offsets.tolist()[:: self.num_trees] != [0, self.num_nodes]:
            raise ValueError("offsets do not start at 0 and end at M")
        index = torch.arange(self.num_nodes, device=self.tokens.device)
        is_root = self.parents < 0
        problems = {
            "a tree has no root at its first node": not torch.equal(index[is_root], self.offsets[:-1]),
            "a parent comes after its child": bool((self.parents >= index).any()),
            "a parent lies in another tree": bool(
                (self.owner[self.parents.clamp(min=0)] != self.owner)[~is_root].any()
            ),
            "a sampled node names no law": bool(((self.draw != Draw.POINT) & (self.q_row < 0)).any()),
            "a point mass names a law": bool(((self.draw == Draw.POINT) & (self.q_row >= 0)).any()),
            "a node was never drawn": self.drawn is not None and not torch.equal(self.drawn.unique(), index),
            "a law is named that is not there": bool((self.q_row >= (0 if self.q is None else self.q.shape[0])).any()),
        }
        wrong = [text for text, broken in problems.items() if broken]
        if wrong:
            raise ValueError("; ".join(wrong))


_STRUCTURE = [name for name, value in vars(TokenTree).items() if isinstance(value, cached_property)]


def follow(links: Tensor, at: Tensor) -> Tensor:
    """Where `links` lead from the nodes `at`; from no node (-1) to none."""
    return torch.where(at >= 0, links[at.clamp(min=0)], -1)


def offsets_of(owner: Tensor, num_trees: int) -> Tensor:
    """Where each tree begins, from the tree every node belongs to. [M] -> [B + 1]."""
    counts = torch.bincount(owner, minlength=num_trees)
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def ancestor_words(paths: Tensor, local: Tensor, num_words: int) -> Tensor:
    """Bit sets over local node indices for the nodes on `paths`. [M, D + 1] -> [M, num_words] int64."""
    words = torch.zeros(paths.shape[0], num_words, dtype=torch.int64, device=paths.device)
    for step in range(paths.shape[1]):
        node = torch.where(paths[:, step] >= 0, local[paths[:, step].clamp(min=0)], 0) - 1
        present = node >= 0
        bit = torch.ones_like(node) << (node.clamp(min=0) % BITS)
        word = (node.clamp(min=0) // BITS).unsqueeze(1)
        # Every step of a path is another node, so adding a bit is setting it.
        words.scatter_add_(1, word, torch.where(present, bit, 0).unsqueeze(1))
    return words


@dataclass(frozen=True)
class Verdict:
    """What a verifier keeps of each tree: a path from the root, and the target's own next token."""

    path: Tensor  # [B, D + 1] int64 global nodes, root first, -1 padded
    length: Tensor  # [B] int64 accepted draft tokens, 0 … D
    bonus: Tensor  # [B] int64
    drift: Tensor | None = None  # [B] how far from the model's own law these tokens may be; nan: nobody knows; None: 0

    def to_host(self, tree: TokenTree) -> HostVerdict:
        """The step's one copy to the host: the tokens each sequence gains."""
        safe = self.path[:, 1:].clamp(min=0)
        drafted = (tree.sizes - 1).unsqueeze(1)
        packed = torch.cat([self.length[:, None], self.bonus[:, None], drafted, tree.tokens[safe]], 1).tolist()
        return HostVerdict(
            tokens=[[*row[3 : 3 + row[0]], row[1]] for row in packed],
            accepted=[row[0] for row in packed],
            drafted=[row[2] for row in packed],
            drift=[0.0] * len(packed) if self.drift is None else self.drift.tolist(),
        )

    @classmethod
    def of_roots(cls, tree: TokenTree, bonus: Tensor) -> Verdict:
        """Nothing was guessed, so nothing is accepted."""
        return cls(tree.offsets[:-1, None], torch.zeros_like(bonus), bonus)


@dataclass(frozen=True)
class HostVerdict:
    """A verdict as plain lists: what streaming, stopping and the next schedule need."""

    tokens: list[list[int]]  # accepted draft tokens, then the bonus token
    accepted: list[int]
    drafted: list[int]
    drift: list[float]
