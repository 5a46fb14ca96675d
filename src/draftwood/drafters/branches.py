"""Trees that get one more branch each: tokens that another source expects, merged with the tree where they agree.

Nothing here looks at values.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from draftwood.drafting import Proposal
from draftwood.shape import TreeShape, follow, num_words, own_bits, packed_left
from draftwood.tree import TokenTree


def as_points(tree: TokenTree, which: Tensor, *, may_repeat: bool) -> TokenTree:
    """The same batch with the nodes of the trees `which` [B] as chosen tokens, no two siblings of which are alike;
    `may_repeat`: draws may have given a token twice.
    """
    if tree.q is None:
        return tree
    those, forgotten = which[tree.owner], tree.forget_draws()
    shape = tree.shape
    if shape.repeats:
        shape = shape.linked(torch.where(those[:, None], forgotten.tries, tree.tries), tree.parents)
    draw = torch.where(those, forgotten.draw, tree.draw)
    points = TokenTree(tree.tokens, shape, draw, torch.where(those, forgotten.q_row, tree.q_row), tree.q)
    return points.without(_later_twins(points) & those) if may_repeat else points


def _later_twins(tree: TokenTree) -> Tensor:
    """Nodes with the token of an earlier sibling. [M] bool."""
    tries, none = tree.tries, tree.num_nodes
    tokens = torch.where(tries >= 0, tree.tokens[tries.clamp(min=0)], -1)
    alike = (tokens[:, :, None] == tokens[:, None, :]) & (tries[:, :, None] != tries[:, None, :])
    later = (alike & (tries >= 0)[:, :, None]).tril(-1).any(-1)
    marks = torch.zeros(none + 1, dtype=torch.bool, device=tries.device)
    return marks.scatter(0, torch.where(later, tries, none).view(-1), True)[:none]


def _shared_beginning(tree: TokenTree, paths: Tensor) -> tuple[Tensor, Tensor]:
    """How many tokens of each of the `paths` [B, P] their trees have from the root on, and the node there. 2 x [B]."""
    at = tree.offsets[:-1]
    count, going = torch.zeros_like(at), torch.ones_like(at, dtype=torch.bool)
    for token in paths.unbind(1)[: tree.max_depth]:
        children = tree.tries[at]
        same = (children >= 0) & (tree.tokens[children.clamp(min=0)] == token[:, None])
        going = going & same.any(1)
        child = children.gather(1, same.long().argmax(1, keepdim=True))[:, 0]
        at, count = torch.where(going, child, at), count + going
    return count, at


def with_branches(own: Proposal, paths: Tensor) -> Proposal:
    """A proposal with a branch along each of `paths` [B, P], -1 padded, tried first where it leaves the tree.

    Nodes of a branch stand behind those of its tree, or, so that they have its room, before them where all of them are
    absent. As many nodes of a branch as the tree shares with it are absent.
    """
    tree, (size, length) = own.tree, paths.shape
    if length == 0:
        return own
    device, every = paths.device, torch.arange(tree.num_nodes + size * length, device=paths.device)
    trees, step = every[:size], every[:length]
    shared, at = _shared_beginning(tree, paths)
    there = (paths >= 0) & (step >= shared[:, None])
    bare = (tree.tries[tree.offsets[:-1]] < 0).all(1)
    offsets = tree.offsets + every[: size + 1] * length
    local = torch.where(bare, 1, tree.sizes)[:, None] + step
    own_local = tree.local + length * (bare[tree.owner] & (tree.local > 0))
    before = offsets[tree.owner] + own_local  # [M] where the tree's own nodes come to stand
    behind = offsets[:-1, None] + local  # [B, P] where the branches' nodes do
    order = torch.empty_like(every).scatter_(0, torch.cat([before, behind.view(-1)]), every)

    def both(nodes: Tensor, branches: Tensor) -> Tensor:
        """Something of the tree's nodes [M, *] and of the branches' [B, P, *], in the order of the whole."""
        return torch.cat([nodes, branches.expand(size, length, *nodes.shape[1:]).flatten(0, 1)])[order]

    goes_on = pad(there[:, 1:], (0, 1), value=False)
    head = torch.where(there & (step == shared[:, None]), behind, -1).amax(1)
    first = torch.full_like(tree.owner, -1).scatter(0, at, head)[:, None]
    tries = first if not tree.num_drafted else torch.cat([first, follow(before, tree.tries)], 1)
    onward = torch.where(goes_on, behind + 1, -1)[..., None]
    words = num_words(tree.widest + length)
    ancestors = pad(tree.shape.ancestors, (0, words - tree.shape.ancestors.shape[1]))
    bits = own_bits(local, words).masked_fill(~there[..., None], 0).cumsum(1) + ancestors[at][:, None]
    above = torch.where(step == shared[:, None], before[at][:, None], behind - 1)
    shape = TreeShape(
        parents=both(follow(before, tree.parents), torch.where(there, above, behind)),
        offsets=offsets,
        owner=both(tree.owner, trees[:, None]),
        local=both(own_local, local),
        depth=both(tree.depth, step + 1),
        ancestors=both(ancestors, bits),
        tries=packed_left(both(tries, pad(onward, (0, tries.shape[1] - 1), value=-1))),
        max_depth=max(tree.max_depth, length),
        widest=tree.widest + length,
        repeats=tree.shape.repeats,
        merged=tree.shape.merged,
    )
    zero = torch.zeros(1, 1, dtype=torch.int64, device=device)
    whole = TokenTree(
        both(tree.tokens, torch.where(there, paths, -1)),
        shape,
        both(tree.draw, zero),
        both(tree.q_row, zero - 1),
        tree.q,
    )
    columns = tree.local if own.columns is None else own.columns
    survival = None if own.survival is None else both(own.survival, torch.ones_like(own.survival[:1, None]))
    return Proposal(whole, both(columns, zero), survival)
