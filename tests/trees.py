"""Trees written down by hand, and trees with absent nodes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftwood.joining import join
from draftwood.shape import TreeShape
from draftwood.tree import Draw, TokenTree, Verdict


def tree_of(
    tokens: Sequence[int],
    parents: Sequence[int],
    offsets: Sequence[int],
    draw: Sequence[int] | None = None,
    q_row: Sequence[int] | None = None,
    q: Tensor | None = None,
    drawn: Sequence[int] | None = None,
) -> TokenTree:
    """A batch by its columns, nodes counted from its first; `drawn`: the node of every draw where some came twice."""
    shape = TreeShape.of(torch.tensor(parents), torch.tensor(offsets), None if drawn is None else torch.tensor(drawn))
    rows = torch.full((len(tokens),), -1) if q_row is None else torch.tensor(q_row)
    kinds = torch.where(rows >= 0, int(Draw.IID), int(Draw.POINT)) if draw is None else torch.tensor(draw)
    return TokenTree(torch.tensor(tokens), shape, kinds, rows, q)


def padded(tree: TokenTree, size: int, seed: int = 0) -> tuple[TokenTree, Tensor]:
    """The same trees, each with `size` nodes: absent ones lie between the others wherever `seed` puts them. And which
    node of the new batch each of the old one is. [M].
    """
    luck = torch.Generator().manual_seed(seed)
    places = [torch.randperm(size - 1, generator=luck)[: count - 1].sort().values + 1 for count in tree.sizes.tolist()]
    starts = size * torch.arange(tree.num_trees)
    moved = torch.cat([start + torch.cat([start.new_zeros(1), own]) for start, own in zip(starts, places, strict=True)])
    count = size * tree.num_trees
    index = torch.arange(count)

    def spread(values: Tensor, filling: Tensor | int) -> Tensor:
        table = torch.zeros(count, *values.shape[1:], dtype=values.dtype) + filling
        return table.index_copy_(0, moved, values)

    def renumbered(links: Tensor) -> Tensor:
        return torch.where(links >= 0, moved[links.clamp(min=0)], -1)

    # Depths of absent nodes are any; so are their draws.
    some = torch.randint(0, tree.max_depth + 1, (count,), generator=luck).clamp(min=min(1, tree.max_depth))
    local = index % size
    depth = spread(tree.depth, some)
    parents = spread(renumbered(tree.parents), index)
    shape = TreeShape(
        parents=parents,
        offsets=size * torch.arange(tree.num_trees + 1),
        owner=index // size,
        local=local,
        depth=depth,
        ancestors=torch.zeros(count, max(1, -(-(size - 1) // 64)), dtype=torch.int64),  # only attention reads these
        tries=spread(renumbered(tree.tries), -1),
        max_depth=tree.max_depth,
        widest=size,
        repeats=tree.shape.repeats,
        merged=tree.shape.merged,
    )
    drawn = spread(tree.draw, int(Draw.IID) if tree.q is not None else 0)
    rows = spread(tree.q_row, 0 if tree.q is not None else -1)
    return TokenTree(spread(tree.tokens, -1), shape, drawn, rows, tree.q), moved


def pack(trees: Sequence[TokenTree]) -> TokenTree:
    """Several batches as one, in this order."""
    every = torch.arange(sum(tree.num_trees for tree in trees))
    return join(trees, every.split([tree.num_trees for tree in trees]))[0]


def pruned(tree: TokenTree, keep: Tensor) -> TokenTree:
    """Its roots and the nodes in `keep` [M]."""
    return tree.part(keep | (tree.parents < 0))[0]


def gained(tree: TokenTree, verdict: Verdict) -> list[list[int]]:
    """The tokens of each sequence: accepted ones, then the bonus."""
    paths = zip(verdict.path.tolist(), verdict.length.tolist(), verdict.bonus.tolist(), strict=True)
    return [[*tree.tokens[path[1 : 1 + length]].tolist(), bonus] for path, length, bonus in paths]
