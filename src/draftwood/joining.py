"""Several batches of trees as one: all of their trees, or for every sequence the tree of one of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from draftwood.shape import NodeMap, TreeShape, follow, num_words
from draftwood.tree import TokenTree


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
