"""Trees of the likeliest nodes as few kernels: the same as plain torch says, which is what the grower says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from draftwood.drafting import Front, State
from draftwood.growers import Beam
from draftwood.ops.beam import Chosen, Links, Offers, likeliest_tree_reference, offer_reference
from draftwood.ops.cuda.beam import likeliest_tree, offer
from draftwood.protocols import BatchView
from draftwood.rng import KeyedRng
from draftwood.shape import TreeShape
from draftwood.tree import TokenTree
from enumeration import view_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def logits_of(size: int, nodes: int, vocabulary: int, level: int) -> Tensor:
    generator = torch.Generator().manual_seed(level)
    return 3 * torch.randn(size, nodes, vocabulary, generator=generator)


def grown(
    make: Callable,
    link: Callable,
    shape: tuple[int, int, int],
    vocabulary: int,
    device: str,
    room: Tensor | None = None,
) -> Links:
    (width, depth, nodes), size = shape, 3
    offers = Offers.room(size, width, depth, torch.device(device), nodes)
    temperature = torch.linspace(0, 1.5, size, device=device)
    known = torch.arange(0, 3 * vocabulary, 3, device=device)
    above: Chosen | None = None
    for level in range(depth):
        logits = logits_of(size, 1 if above is None else width, vocabulary, level).to(device)
        above = make(offers, level, logits, temperature, known, above)
    offers = offers if room is None else offers.within(room.to(device))
    return link(offers, torch.arange(size, device=device) + 7, nodes)


@pytest.mark.parametrize(
    ("width", "depth", "nodes", "vocabulary"),
    [(4, 3, 20, 50), (3, 4, 30, 2500), (8, 6, 63, 300), (4, 6, 80, 41), (1, 3, 3, 19), (2, 1, 2, 9)],
)
def test_kernels_grow_the_same_trees(width: int, depth: int, nodes: int, vocabulary: int) -> None:
    shape = (width, depth, nodes)
    want = grown(offer_reference, likeliest_tree_reference, shape, vocabulary, "cpu")
    got = grown(offer, likeliest_tree, shape, vocabulary, DEVICE)
    for name, reference in vars(want).items():
        assert torch.equal(getattr(got, name).cpu(), reference), name


@pytest.mark.parametrize(("width", "depth", "nodes"), [(2, 3, 25), (3, 3, 12), (1, 2, 5)])
def test_kernels_agree_where_offers_are_too_few_or_impossible(width: int, depth: int, nodes: int) -> None:
    """Trees of more nodes than there are offers, and sequences that have no room for all levels."""
    shape, room = (width, depth, nodes), torch.tensor([9, 1, 0])
    want = grown(offer_reference, likeliest_tree_reference, shape, 50, "cpu", room)
    got = grown(offer, likeliest_tree, shape, 50, DEVICE, room)
    for name, reference in vars(want).items():
        assert torch.equal(getattr(got, name).cpu(), reference), name
    assert want.tokens.shape == (3 * (1 + nodes),)
    assert int(want.depth.max()) <= depth


def test_rows_of_nothing_but_nan_make_trees_all_the_same() -> None:
    offers = Offers.room(2, 4, 2, torch.device(DEVICE))
    temperature = torch.ones(2, device=DEVICE)
    nothing = torch.full((2, 1, 30), float("nan"), device=DEVICE)
    above = offer(offers, 0, nothing, temperature, None, None)
    assert bool((above.tokens >= 0).all() & (above.tokens < 30).all())
    offer(offers, 1, nothing.expand(2, 4, 30), temperature, None, above)
    links = likeliest_tree(offers, torch.tensor([1, 2], device=DEVICE), 12)
    assert bool((links.tokens >= 0).all() & (links.tokens < 30).all())
    assert bool((links.parents < torch.arange(26, device=DEVICE)).all())


class Net:
    """Logits that only depend on the token before and the depth."""

    def __init__(self, vocabulary: int) -> None:
        self.table = 3 * torch.randn(9, vocabulary, vocabulary, generator=torch.Generator().manual_seed(5))

    def begin(self, view: BatchView) -> tuple[Tensor, State]:
        return self.table[0, view.roots + torch.arange(len(view.roots))][:, None], ()

    def extend(self, view: BatchView, front: Front, state: State) -> tuple[Tensor, State]:
        return self.table[front.depth, front.tokens], state

    def vocabulary(self, level: int | None) -> None:
        return None


@pytest.mark.parametrize(("width", "depth", "nodes"), [(4, 4, 16), (3, 5, 38), (8, 2, 30)])
def test_they_are_the_growers_trees(width: int, depth: int, nodes: int) -> None:
    view, net = view_of(0.7, root=3, sequences=3), Net(11)
    tree = Beam(nodes, width, depth).grow(net, view, nodes, KeyedRng()).packed().tree
    offers, above = Offers.room(3, width, depth, torch.device("cpu")), None
    logits, _ = net.begin(view)
    for level in range(depth):
        above = offer_reference(offers, level, logits, view.temperature, None, above)
        logits = net.table[level + 1, above.tokens]
    links = likeliest_tree_reference(offers, view.roots, nodes)
    made = TokenTree.chosen(links.tokens, TreeShape.of(links.parents, torch.arange(4) * (1 + nodes)))
    made.validate()
    assert torch.equal(links.depth, made.depth)
    assert torch.equal(links.ancestors, made.shape.ancestors)
    assert torch.equal(links.tries[:, : made.tries.shape[1]], made.tries)
    assert bool((links.tries[:, made.tries.shape[1] :] == -1).all())
    assert _ways(made) == _ways(tree)


def _ways(tree: TokenTree) -> set[tuple[int, ...]]:
    """The texts to all nodes, and whose they are."""
    owner, tokens = tree.owner.tolist(), tree.tokens.tolist()
    ways = [tuple(tokens[node] for node in path if node >= 0) for path in tree.paths.tolist()]
    return {(b, *way) for b, way in zip(owner, ways, strict=True)}
