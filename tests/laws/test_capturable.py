"""Every law without a look at values, on trees of one size: the very verdict it gives of the same trees as they are."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from draftwood.assembly import build_verifier
from draftwood.drafting import Front, Grower, State
from draftwood.growers import (
    Beam,
    Best,
    BestFirst,
    Coupled,
    Greedy,
    Hybrid,
    Independent,
    Levels,
    Paths,
    StaticShape,
    WithoutReplacement,
    chain,
)
from draftwood.ops.native import kernels
from draftwood.protocols import BatchView, StepMode, Verifier
from draftwood.rng import KeyedRng
from draftwood.shape import NodeMap
from draftwood.tree import TokenTree, Verdict
from draftwood.verifiers import LAWS, ByRequest
from no_sync import no_looking

VOCABULARY, COUNT = 40, 12
GROWERS: dict[str, Grower] = {
    "chosen chain": chain(4),
    "chosen": Levels((3, 2), Best()),
    "static": StaticShape(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))),
    "beam": Beam(nodes=8, width=3, depth=3),
    "best-first": BestFirst(nodes=8, width=2, forwards=4),
    "sampled chain": Levels((1,) * 4, Independent()),
    "independent": Levels((3, 2), Independent()),
    "greedy": Greedy(7, 3),
    "without replacement": Levels((3, 2, 1), WithoutReplacement()),
    "hybrid": Levels((3, 2), Hybrid()),
    "coupled": Levels((2, 2), Coupled()),
    "path": Paths(1, 4),
    "paths": Paths(4, 3),
    "paths behind a trunk": Paths(3, 2, trunk=2),
}
PAIRS = [
    (tree, law)
    for tree, grower in GROWERS.items()
    for law, entry in LAWS.items()
    if law != "optimal" and entry().refuses(grower.law) is None  # which asks a solver on the host
]


class Net:
    """Random logits; few tokens are likely, so that paths agree for a while."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.generator = dtype, torch.Generator().manual_seed(3)

    def begin(self, view: BatchView) -> tuple[Tensor, State]:
        return self.logits(view.size, 1), ()

    def extend(self, view: BatchView, front: Front, state: State) -> tuple[Tensor, State]:
        return self.logits(*front.tokens.shape), ()

    def vocabulary(self, level: int | None) -> None:
        return None

    def logits(self, *shape: int) -> Tensor:
        return 3 * torch.randn(*shape, VOCABULARY, generator=self.generator, dtype=torch.float64).to(self.dtype)


def view_of(*, greedy: bool = False) -> BatchView:
    """Some have little room for drafts, or none."""
    number = torch.arange(COUNT)
    return BatchView(
        lengths=number + 1,
        seeds=number * 7919,
        roots=number,
        temperature=torch.zeros(COUNT) if greedy else 1 + number / COUNT,
        rows=number,
        history=number[:, None],
        block_table=number[:, None],
        mode=StepMode(greedy=greedy, limited=True),
        max_nodes=torch.tensor([100, 3, 0, 100, 5, 100, 100, 1, 100, 2, 100, 100]),
        max_depth=torch.tensor([100, 100, 100, 1, 100, 2, 0, 100, 3, 2, 100, 100]),
        may_look=True,
    )


@cache
def trees(name: str, dtype: torch.dtype) -> tuple[TokenTree, Tensor]:
    """Trees of one size, and a target that mostly agrees with the draft."""
    net, grower = Net(dtype), GROWERS[name]
    tree = grower.grow(net, view_of(), grower.max_nodes, KeyedRng()).tree
    tree.validate()
    assert tree.sizes.tolist() == [1 + grower.max_nodes] * COUNT
    p = torch.softmax(net.logits(tree.num_nodes), -1)
    first = tree.tries[:, 0].clamp(min=0)
    drawn = torch.zeros_like(p).scatter_(1, tree.tokens[first].clamp(min=0)[:, None], 1.0)
    said = drawn if tree.q is None else torch.where(tree.q_row[first, None] >= 0, tree.q[tree.q_row[first]], drawn)
    return tree, torch.where(tree.tries[:, :1] >= 0, 0.4 * p + 0.6 * said, p)


def both(law: Verifier, tree: TokenTree, p: Tensor, view: BatchView) -> tuple[Verdict, Verdict]:
    """Blindly on the trees as they are, and on the same without absent nodes, in the numbers of the former."""
    with no_looking():
        blind = law.verify(tree, p, replace(view, may_look=False), KeyedRng())
    packed, nodes = tree.packed()
    assert isinstance(nodes, NodeMap), "no node is absent: nothing is tested"
    return blind, nodes.in_whole(law.verify(packed, p[nodes.whole], view, KeyedRng()))


def assert_same(got: Verdict, want: Verdict) -> None:
    assert got.length.tolist() == want.length.tolist()
    assert got.bonus.tolist() == want.bonus.tolist()
    short = min(got.path.shape[1], want.path.shape[1])
    assert got.path[:, :short].tolist() == want.path[:, :short].tolist()
    assert bool((got.path[:, short:] < 0).all())
    assert bool((want.path[:, short:] < 0).all())
    drifts = [torch.zeros(COUNT).double() if v.drift is None else v.drift for v in (got, want)]
    assert torch.allclose(*drifts, rtol=1e-5, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize(("tree", "law"), PAIRS)
def test_absent_nodes_and_a_law_that_may_not_look(tree: str, law: str) -> None:
    """By odds in double precision, which no kernel takes."""
    got, want = both(LAWS[law](), *trees(tree, torch.float64), view_of())
    assert_same(got, want)
    assert bool((trees(tree, torch.float64)[0].tokens[got.path.clamp(min=0)] >= 0).all())


@pytest.mark.skipif(kernels() is None, reason="no C compiler")
@pytest.mark.parametrize(("tree", "law"), PAIRS)
def test_kernels_take_absent_nodes(tree: str, law: str) -> None:
    """Whole verdicts in one call, in single precision."""
    assert_same(*both(LAWS[law](), *trees(tree, torch.float32), view_of()))


@pytest.mark.parametrize("tree", GROWERS)
@pytest.mark.parametrize("law", ["match", "walk", "traversal", "layer", "typical"])
def test_without_chance(tree: str, law: str) -> None:
    assert_same(*both(LAWS[law](), *trees(tree, torch.float64), view_of(greedy=LAWS[law]().lossless)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tree", GROWERS)
def test_many_laws_in_one_batch(tree: str, dtype: torch.dtype) -> None:
    """Each sequence gets what its law gives it alone, though all laws see all trees where they may not be looked at."""
    suits = [law for name, law in PAIRS if name == tree]
    names = (None, "match", *suits[::2], "mixture:weight=0.5")
    law = torch.arange(COUNT) * 5 % len(names)
    view = replace(view_of(), law=law, mode=replace(view_of().mode, laws=names))
    laws = ByRequest(LAWS["walk"](), build_verifier)
    got, want = both(laws, *trees(tree, dtype), view)
    assert_same(got, want)
    for number, name in enumerate(names):
        alone = both(laws.law_of(name), *trees(tree, dtype), view)[0]
        mine = law == number
        assert got.bonus[mine].tolist() == alone.bonus[mine].tolist()
        assert got.length[mine].tolist() == alone.length[mine].tolist()
        assert got.path[mine].tolist() == alone.path[mine].tolist()


def test_laws_that_do_not_suit_the_trees_of_others_harm_no_one() -> None:
    """Chosen tokens, and laws for independent draws: of other sequences, which one engine may draft for otherwise."""
    for tree in ("chosen", "hybrid", "without replacement"):
        for dtype in (torch.float32, torch.float64):
            batch, p = trees(tree, dtype)
            names = (None, "kseq", "layer-kseq", "gbv", "block", "rrs")
            view = replace(view_of(), law=torch.zeros(COUNT, dtype=torch.int64), may_look=False)
            view = replace(view, mode=StepMode(laws=names, limited=True))
            with no_looking():
                got = ByRequest(LAWS["walk"](), build_verifier).verify(batch, p, view, KeyedRng())
            assert_same(got, LAWS["walk"]().verify(batch, p, view_of(), KeyedRng()))
