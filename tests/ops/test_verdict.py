"""Verdicts as few kernels: the decisions of plain torch on the same random numbers."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from draftwood.drafting import Front, State
from draftwood.growers import Hybrid, Independent, Levels, Paths, WithoutReplacement
from draftwood.ops.kseq import kseq_bar_reference
from draftwood.ops.path import follow
from draftwood.protocols import BatchView
from draftwood.rng import KeyedRng
from draftwood.shape import TreeShape
from draftwood.tree import TokenTree, Verdict
from draftwood.verifiers import LAWS, NodeLaw
from draftwood.verifiers.block import distinct
from draftwood.verifiers.lossy import Mixture
from draftwood.verifiers.rules import draws_behind

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs Triton", allow_module_level=True)

from draftwood.ops.cuda import distinct as triton_distinct
from draftwood.ops.cuda import kseq as triton_kseq
from draftwood.ops.cuda import pooled as triton_pooled
from draftwood.ops.cuda import rejection as triton_draws
from draftwood.ops.cuda import verdict as triton_verdict

VOCABULARY = 37
COUNT = 50 if torch.cuda.is_available() else 3  # the interpreter is slow
GROWERS = {
    "chain": Levels((1,) * 5, Independent()),
    "iid": Levels((2, 2, 1), Independent()),
    "without-replacement": Levels((3, 2), WithoutReplacement()),
    "hybrid": Levels((3, 2), Hybrid()),
    "paths": Paths(3, 3),
    "delayed": Paths(3, 2, trunk=1),
}
BUSHY = ([9, 1, 2, 1, 3, 3, 0, 2], [-1, 0, 0, 1, 1, 2, 3, 6])
CHAIN = ([8, 2, 2, 2, 1], [-1, 0, 1, 2, 3])


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _several_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even of a small vocabulary: rows are shared by several programs, and nodes are looked at a few at a time."""
    sizes = {"SLICE": 16, "BAR_SLICE": 16, "POOL_SLICE": 16, "NODES": 8}
    for module in (triton_draws, triton_kseq, triton_pooled, triton_verdict):
        for name, size in sizes.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, size)


@pytest.mark.parametrize("shapes", [[BUSHY, CHAIN, ([4], [-1])], [CHAIN], [([4], [-1]), ([5], [-1])]])
@pytest.mark.parametrize("again", [[], [2, 3, 3]])
def test_the_longest_match_is_that_of_the_host(shapes: list, again: list[int], device: torch.device) -> None:
    tree = TokenTree.of_points(shapes, device)
    if again and tree.num_nodes > 3:
        draws = torch.tensor([*range(tree.num_nodes), *again], device=device)
        tree = replace(tree, shape=TreeShape.of(tree.parents, tree.offsets, draws))
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        choices = torch.randint(1, 4, (tree.num_nodes,), generator=generator)
        want, got = follow(tree, choices.tolist()), triton_verdict.follow(tree, choices.to(device))
        assert torch.equal(got.path, want.path)
        assert torch.equal(got.length, want.length)
        assert torch.equal(got.bonus, want.bonus)


@pytest.mark.parametrize("kept", [0, 31, 32, 33, 69])
def test_a_long_match_ends_where_the_host_ends_it(kept: int, device: torch.device) -> None:
    tree = TokenTree.of_points([([5] * 70, [-1, *range(69)]), BUSHY], device)
    choices = torch.full((tree.num_nodes,), 6)
    choices[:kept] = 5
    want, got = follow(tree, choices.tolist()), triton_verdict.follow(tree, choices.to(device))
    assert want.length[0] == kept
    assert torch.equal(got.path, want.path)
    assert torch.equal(got.length, want.length)
    assert torch.equal(got.bonus, want.bonus)


class Net:
    """Random logits."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.generator = device, torch.Generator().manual_seed(3)

    def begin(self, view: BatchView) -> tuple[Tensor, State]:
        return self.logits(view.size, 1), ()

    def extend(self, view: BatchView, front: Front, state: State) -> tuple[Tensor, State]:
        return self.logits(*front.tokens.shape), ()

    def vocabulary(self, level: int | None) -> None:
        return None

    def logits(self, *shape: int) -> Tensor:
        return 3 * torch.randn(*shape, VOCABULARY, generator=self.generator).to(self.device)


def batch_of(device: torch.device) -> BatchView:
    ones, number = torch.ones(COUNT, dtype=torch.int64, device=device), torch.arange(COUNT, device=device)
    return BatchView(
        lengths=ones,
        seeds=number * 7919,
        roots=number % VOCABULARY,
        temperature=ones.float(),
        rows=number,
        history=number[:, None],
        block_table=number[:, None],
        max_nodes=100 * ones,
        max_depth=number % 4 + 2,
    )


@pytest.fixture(params=["packed", "padded"])
def absent(request: pytest.FixtureRequest) -> bool:
    """Whether trees keep their absent nodes: those of levels without room, and of paths that agree."""
    return request.param == "padded"


def drawn(name: str, device: torch.device, *, absent: bool = False) -> tuple[TokenTree, Tensor, BatchView]:
    """Drawn trees, and a target that mostly agrees with their draft."""
    net, view, grower = Net(device), batch_of(device), GROWERS[name]
    tree = grower.grow(net, view, grower.max_nodes, KeyedRng()).tree
    tree = tree if absent else tree.packed()[0]
    p = torch.softmax(net.logits(tree.num_nodes), -1)
    first = tree.tries[:, 0]
    known = (first >= 0) & (tree.q_row[first.clamp(min=0)] >= 0)
    assert tree.q is not None
    p[known] = 0.3 * p[known] + 0.7 * tree.q[tree.q_row[first[known]]]
    return tree, p, view


def by_odds(law: str, tree: TokenTree, p: Tensor, view: BatchView, **settings: float) -> Verdict:
    verifier = LAWS[law](**settings)
    assert isinstance(verifier, NodeLaw)
    verifier.at_once = lambda *_: None  # type: ignore[method-assign]
    return verifier.verify(tree, p, view, KeyedRng())


def assert_same(got: Verdict, want: Verdict) -> None:
    assert got.length.tolist() == want.length.tolist()
    assert got.path.tolist() == want.path.tolist()
    assert got.bonus.tolist() == want.bonus.tolist()


@pytest.mark.parametrize(
    ("name", "tried"),
    [(name, None) for name in GROWERS if name not in ("iid", "delayed")] + [("hybrid", 1), ("paths", 1)],
)
def test_a_walk_ends_where_its_odds_say(name: str, tried: int | None, device: torch.device, absent: bool) -> None:
    tree, p, view = drawn(name, device, absent=absent)
    got = triton_verdict.walk(tree, p, view.seeds, view.lengths, tried or tree.tries.shape[1])
    assert_same(got, by_odds("naive" if tried else "walk", tree, p, view))


@pytest.mark.parametrize("name", ["chain", "iid", "without-replacement", "hybrid", "paths"])
def test_a_search_ends_where_its_odds_say(name: str, device: torch.device, absent: bool) -> None:
    tree, p, view = drawn(name, device, absent=absent)
    assert (tree.shape.repeats) == (name == "paths")
    got = triton_verdict.search(tree, p, view.seeds, view.lengths)
    assert_same(got, by_odds("block" if name == "chain" else "traversal", tree, p, view))


def test_repeated_draws_become_draws_without_replacement(device: torch.device) -> None:
    tree, _, _ = drawn("paths", device)
    assert tree.q is not None
    want, got = distinct(tree), triton_distinct.distinct(tree, tree.q)
    assert want.q is not None
    assert got.q is not None
    sampled = tree.q_row >= 0
    assert torch.allclose(got.q[sampled], want.q[sampled], rtol=1e-5, atol=1e-8)
    assert torch.equal(got.draw, want.draw)
    assert torch.equal(got.q_row, want.q_row)


@pytest.mark.parametrize(
    ("name", "law"),
    [
        ("without-replacement", "layer-proportional"),
        ("hybrid", "layer-proportional"),
        ("paths", "layer-proportional"),
        ("iid", "layer-kseq"),
        ("paths", "layer-kseq"),
    ],
)
def test_layers_end_where_their_odds_say(name: str, law: str, device: torch.device, absent: bool) -> None:
    tree, p, view = drawn(name, device, absent=absent)
    got = triton_verdict.layers(tree, p, view.seeds, view.lengths, kseq=law == "layer-kseq")
    assert_same(got, by_odds(law, tree, p, view))


@pytest.mark.parametrize("name", ["without-replacement", "hybrid", "paths"])
def test_pooled_layers_end_where_their_odds_say(name: str, device: torch.device, absent: bool) -> None:
    tree, p, view = drawn(name, device, absent=absent)
    got = triton_verdict.pooled_layers(tree, p, view.seeds, view.lengths)
    assert_same(got, by_odds("layer", tree, p, view))


@pytest.mark.parametrize("name", ["without-replacement", "paths"])
def test_layers_that_have_not_settled_are_finished(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a single try for each layer most of them have not."""
    monkeypatch.setattr(triton_pooled, "TIMES", 1)
    tree, p, view = drawn(name, device)
    got = triton_verdict.pooled_layers(tree, p, view.seeds, view.lengths)
    assert_same(got, by_odds("layer", tree, p, view))


@pytest.mark.parametrize("name", ["iid", "paths"])
def test_a_walk_with_lowered_bars_ends_where_its_odds_say(name: str, device: torch.device, absent: bool) -> None:
    tree, p, view = drawn(name, device, absent=absent)
    got = triton_verdict.kseq_walk(tree, p, view.seeds, view.lengths)
    assert_same(got, by_odds("kseq", tree, p, view))


@pytest.mark.parametrize("name", ["chain", "paths", "points"])
def test_walks_that_are_not_lossless_end_where_their_odds_say(name: str, device: torch.device, absent: bool) -> None:
    """With lower bars, and on rows that were mixed before."""
    tree, p, view = drawn("hybrid" if name == "points" else name, device, absent=absent)
    tree = tree.forget_draws() if name == "points" else tree
    lenient = triton_verdict.walk(tree, p, view.seeds, view.lengths, tree.tries.shape[1], 0.4)
    assert_same(lenient, by_odds("lenient", tree, p, view, lenience=0.4))
    mixed, drift = Mixture(0.3).mixed(tree, p)
    got, want = (
        triton_verdict.walk(tree, mixed, view.seeds, view.lengths, tree.tries.shape[1]),
        by_odds("mixture", tree, p, view, weight=0.3),
    )
    assert_same(got, want)
    assert want.drift is not None
    assert torch.allclose(drift[got.ends], want.drift, rtol=1e-5)
    assert int(want.length.max()) > 0


def test_bars_are_the_references(device: torch.device) -> None:
    """The draws behind some nodes, offered less than all of p."""
    tree, p, _ = drawn("iid", device)
    nodes = tree.shape.inner[:2]
    weight, draws = torch.tensor([0.2, 0.6], dtype=torch.float64, device=device), draws_behind(tree, nodes)
    rows, count = tree.q_row[draws.child[:, 0]].clamp(min=0), draws.exists.sum(1)
    bars = triton_kseq.kseq_bar(p, tree.q, nodes, weight, rows, count)
    assert torch.allclose(
        torch.stack(bars), torch.stack(kseq_bar_reference(p, tree.q, nodes, weight, rows, count)), atol=1e-4
    )
