"""Single precision and other devices: the decisions of the float64 reference, and a law that stays where it was."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import pytest
import torch

from draftwood.drafting import Front, State
from draftwood.growers import Hybrid, Independent, Levels, Paths, WithoutReplacement
from draftwood.ops.kseq import kseq_bar, kseq_bar_reference
from draftwood.ops.native import kernels
from draftwood.ops.residual import Residual
from draftwood.protocols import BatchView
from draftwood.rng import KeyedRng
from draftwood.shape import TreeShape
from draftwood.tree import Draw, TokenTree, Verdict
from draftwood.verifiers import LAWS, NodeLaw
from trees import pack

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
GROWERS = {
    "chain": Levels((1,) * 5, Independent()),
    "iid": Levels((2, 2, 1), Independent()),
    "without-replacement": Levels((3, 2, 1), WithoutReplacement()),
    "pairs": Levels((2, 2, 2), WithoutReplacement()),
    "hybrid": Levels((3, 2, 1), Hybrid()),
    "paths": Paths(4, 4),
    "delayed": Paths(3, 3, trunk=2),
}
PAIRS = [
    (tree, law)
    for tree, grower in GROWERS.items()
    for law, entry in LAWS.items()
    if law not in ("optimal", "coupled") and entry().refuses(grower.law) is None
]


def needs(device: str) -> torch.device:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device(device)


class RandomNet:
    """Logits that are a fixed function of how often it was asked."""

    def __init__(self, vocabulary: int, seed: int) -> None:
        self.size, self.generator = vocabulary, torch.Generator().manual_seed(seed)

    def begin(self, view: BatchView) -> tuple[torch.Tensor, State]:
        return self._logits(view.size, 1), ()

    def extend(self, view: BatchView, front: Front, state: State) -> tuple[torch.Tensor, State]:
        return self._logits(*front.tokens.shape), ()

    def vocabulary(self, level: int | None) -> None:
        return None

    def _logits(self, *shape: int) -> torch.Tensor:
        return 3 * torch.randn(*shape, self.size, generator=self.generator, dtype=torch.float64)


def batch_of(count: int, device: torch.device = torch.device("cpu")) -> BatchView:  # noqa: B008
    ones, number = torch.ones(count, dtype=torch.int64, device=device), torch.arange(count, device=device)
    return BatchView(
        lengths=ones,
        seeds=number * 7919,
        roots=number,
        temperature=ones.float(),
        rows=number,
        history=number[:, None],
        block_table=number[:, None],
        max_nodes=100 * ones,
        max_depth=100 * ones,
        may_look=device.type == "cpu",
    )


@cache
def trees(name: str, count: int, vocabulary: int) -> tuple[TokenTree, torch.Tensor]:
    """A batch of drawn trees and a target that mostly agrees with the draft, in float64."""
    net = RandomNet(vocabulary, 3)
    grower = GROWERS[name]
    tree = grower.grow(net, batch_of(count), grower.max_nodes, KeyedRng()).tree.packed()[0]
    p = torch.softmax(net._logits(tree.num_nodes), -1)
    first = tree.tries[:, 0]
    drawn = (first >= 0) & (tree.q_row[first.clamp(min=0)] >= 0)
    assert tree.q is not None
    p[drawn] = 0.3 * p[drawn] + 0.7 * tree.q[tree.q_row[first[drawn]]]
    return tree, p


def moved(tree: TokenTree, device: torch.device, dtype: torch.dtype) -> TokenTree:
    names = ("parents", "offsets", "owner", "local", "depth", "ancestors", "tries")
    merged = None if tree.shape.merged is None else tree.shape.merged.to(device)
    shape = replace(tree.shape, merged=merged, **{name: getattr(tree.shape, name).to(device) for name in names})
    q = None if tree.q is None else tree.q.to(device, dtype)
    return TokenTree(tree.tokens.to(device), shape, tree.draw.to(device), tree.q_row.to(device), q)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "law"), PAIRS)
def test_decisions_are_those_of_the_reference(name: str, law: str, device: str) -> None:
    """On the same random numbers; two in a hundred may differ, where a number fell within rounding of a border."""
    where, count = needs(device), 100
    tree, p = trees(name, count, 1000)
    want = LAWS[law]().verify(tree, p, batch_of(count), KeyedRng())
    single = moved(tree, where, torch.float32)
    got = LAWS[law]().verify(single, p.to(where, torch.float32), batch_of(count, where), KeyedRng())
    same = (want.length == got.length.cpu()) & (want.bonus == got.bonus.cpu())
    same &= (want.path == got.path.cpu()).all(1)
    assert int(same.sum()) >= 98


LOSSY = ("typical", "threshold", "relaxed", "lenient", "mixture")
FUSED = (
    *("block", "naive", "walk", "rrsw", "traversal", "layer", "layer-proportional", "kseq", "layer-kseq"),
    *LOSSY,
)


def has_kernels(where: torch.device, law: str) -> bool:
    return law not in ("typical", "threshold", "relaxed") if where.type == "cuda" else kernels() is not None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "law"), [pair for pair in PAIRS if pair[1] in FUSED])
def test_whole_verdicts_decide_as_the_odds_do(name: str, law: str, device: str) -> None:
    """By kernels from rows to tokens, or by odds and two draws; one in a hundred may fall on a border."""
    where, count = needs(device), 100
    tree, p = trees(name, count, 1000)
    tree, p = moved(tree, where, torch.float32), p.to(where, torch.float32)
    view, verifier = batch_of(count, where), LAWS[law]()
    assert isinstance(verifier, NodeLaw)
    got = verifier.at_once(tree, p, view)
    if not has_kernels(where, law):
        assert got is None
        return
    verifier.at_once = lambda *_: None
    want = verifier.verify(tree, p, view, KeyedRng())
    assert got is not None
    assert got.path.shape == want.path.shape
    same = (want.length == got.length) & (want.bonus == got.bonus) & (want.path == got.path).all(1)
    assert int(same.sum()) >= 99
    assert (got.drift is None) == (want.drift is None) == (law not in LOSSY)
    if got.drift is not None and want.drift is not None:
        assert torch.allclose(got.drift[same], want.drift[same], rtol=1e-5, atol=1e-9, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "law"), [pair for pair in PAIRS if pair[1] in (*FUSED, "gbv", "match")])
def test_verdicts_can_be_captured(name: str, law: str) -> None:
    """As one CUDA graph for trees of one shape: replayed with another target it gives that target's verdict."""
    where, count = needs("cuda"), 20
    tree, p = trees(name, count, 1000)
    tree, p = moved(tree, where, torch.float32), p.to(where, torch.float32)
    view, verifier, shown = batch_of(count, where), LAWS[law](), p.flip(0).contiguous()

    def verdict() -> Verdict:
        return verifier.verify(tree, shown, view, KeyedRng())

    verdict()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = verdict()
    shown.copy_(p)
    graph.replay()
    want = verdict()
    assert torch.equal(got.path, want.path)
    assert torch.equal(got.bonus, want.bonus)


@pytest.mark.parametrize("law", ["walk", "traversal", "layer", "layer-proportional", "gbv", "lenient", "mixture"])
def test_where_nothing_is_left_nothing_is_invented(law: str) -> None:
    """p and q agree but for rounding: what is left is nothing, and the token after the path still comes from p."""
    tree, p = trees("paths" if law == "gbv" else "without-replacement", 50, 1000)
    tree = moved(tree, torch.device("cpu"), torch.float32)
    assert tree.q is not None
    first = tree.tries[:, 0].clamp(min=0)
    p = torch.where((tree.tries[:, :1] >= 0), tree.q[tree.q_row[first].clamp(min=0)], p.float())
    verdict = LAWS[law]().verify(tree, p, batch_of(50), KeyedRng())
    assert bool((p[verdict.ends, verdict.bonus] > 0).all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "law"), PAIRS)
def test_neighbours_do_not_matter(name: str, law: str, device: str) -> None:
    """The batch the other way round, and every tree alone: bit for bit the same verdict."""
    where, count = needs(device), 12
    tree, p = trees(name, count, 500)
    tree, p = moved(tree, where, torch.float32), p.to(where, torch.float32)
    view, make = batch_of(count, where), LAWS[law]
    together = make().verify(tree, p, view, KeyedRng())
    for b in (0, 5, 11):
        part, nodes = tree.take(torch.tensor([b], device=where))
        alone = make().verify(part, p[nodes.whole], view.take(torch.tensor([b], device=where)), KeyedRng())
        assert int(alone.length[0]) == int(together.length[b])
        assert int(alone.bonus[0]) == int(together.bonus[b])
        length = int(alone.length[0]) + 1
        assert nodes.in_whole(alone).path[0, :length].tolist() == together.path[b, :length].tolist()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("law", sorted({law for _, law in PAIRS}))
def test_neighbours_of_another_kind_do_not_matter(law: str, device: str) -> None:
    """Trees of several growers in one batch: each gets the verdict it gets among its own kind."""
    where, count = needs(device), 12
    kinds = [name for name, suits in PAIRS if suits == law]
    parts = [trees(name, count, 500) for name in kinds]
    batch = moved(pack([tree for tree, _ in parts]), where, torch.float32)
    view = batch_of(count * len(kinds), where)
    view = replace(view, seeds=view.seeds[:count].repeat(len(kinds)))
    rows = torch.cat([p for _, p in parts]).to(where, torch.float32)
    together = LAWS[law]().verify(batch, rows, view, KeyedRng())
    for i, (tree, p) in enumerate(parts):
        own = moved(tree, where, torch.float32)
        alone = LAWS[law]().verify(own, p.to(where, torch.float32), batch_of(count, where), KeyedRng())
        here = slice(i * count, (i + 1) * count)
        assert together.bonus[here].tolist() == alone.bonus.tolist()
        assert together.length[here].tolist() == alone.length.tolist()
        start, width = int(batch.offsets[i * count]), alone.path.shape[1]
        path = torch.where(alone.path >= 0, alone.path + start, -1)
        assert together.path[here, :width].tolist() == path.tolist()


VOCABULARY = 150_000
SUPPORT = (3, 1000, 70_000, 149_999)  # the draft's tokens: few, so that all trees can be written down


def one_level_trees(name: str) -> tuple[TokenTree, list[float], torch.Tensor, torch.Tensor]:
    """Every tree of two draws behind one node, its chance, and the float64 rows of draft and target."""
    generator = torch.Generator().manual_seed(1)
    p = torch.softmax(2 * torch.randn(VOCABULARY, generator=generator, dtype=torch.float64), 0)
    heavy = torch.zeros_like(p)
    heavy[list(SUPPORT)] = torch.tensor([0.4, 0.1, 0.2, 0.05], dtype=torch.float64)
    p = 0.25 * p + heavy
    q = torch.zeros_like(p)
    q[list(SUPPORT)] = torch.tensor([0.3, 0.3, 0.3, 0.1], dtype=torch.float64)
    q32 = q.float()
    chances, rows, parts = [], [q32], []
    for a, b in itertools.product(SUPPORT, repeat=2):
        if name == "without-replacement":
            if a == b:
                continue
            rest = q32.clone()
            rest[a] = 0
            rows.append(rest / rest.sum())
            chances.append(float(q[a] * q[b] / (1 - q[a])))
            parts.append((a, b, len(rows) - 1))
        else:
            chances.append(float(q[a] * q[b]))
            parts.append((a, b, 0))
    count = len(parts)
    tokens = torch.tensor([[0, a, b] for a, b, _ in parts]).view(-1)
    draw = int(Draw.WITHOUT_REPLACEMENT if name == "without-replacement" else Draw.IID)
    one = TreeShape.of(torch.tensor([-1, 0, 0]), torch.tensor([0, 3]))
    tree = TokenTree(
        tokens=tokens,
        shape=one.tiled(count, tokens.device),
        draw=torch.tensor([0, draw, draw]).repeat(count),
        q_row=torch.tensor([[-1, 0, row] for _, _, row in parts]).view(-1),
        q=torch.stack(rows),
    )
    return tree, chances, p, q


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "law"),
    [("iid", n) for n in ("walk", "naive", "kseq", "traversal", "layer", "layer-proportional", "layer-kseq")]
    + [("without-replacement", n) for n in ("rrsw", "traversal", "layer-proportional")],
)
def test_single_precision_moves_the_law_by_less_than_a_hundred_thousandth(name: str, law: str, device: str) -> None:
    """150,000 tokens, float32 rows: the law of the next token over all trees, from the shipped odds and residuals."""
    where = needs(device)
    tree, chances, p, _ = one_level_trees(name)
    tree = moved(tree, where, torch.float32)
    rows = p.float().to(where).expand(tree.num_nodes, -1).contiguous()
    verifier = LAWS[law]()
    assert isinstance(verifier, NodeLaw)
    odds = verifier.odds(tree, rows)
    left = odds.left(tree.offsets[:-1]).double()
    left = left / left.sum(-1, keepdim=True)
    law_of_next = torch.zeros(VOCABULARY, dtype=torch.float64)
    for b, chance in enumerate(chances):
        law_of_next += chance * float(odds.stop[3 * b]) * left[b].cpu()
        for child in (3 * b + 1, 3 * b + 2):
            law_of_next[int(tree.tokens[child])] += chance * float(odds.stop[child])
    assert float((law_of_next - p).abs().sum() / 2) <= 1e-5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocabulary", [5, 257, 49_152, 150_001])
@pytest.mark.parametrize("laws", [1, 2, 5])
def test_the_residuals_mass_is_the_references(vocabulary: int, laws: int, device: str) -> None:
    """Rows and point masses mixed, repeated and out of order, nothing taken in places; to single precision."""
    where = needs(device)
    generator = torch.Generator().manual_seed(vocabulary + laws)
    p = torch.softmax(3 * torch.randn(7, vocabulary, generator=generator), -1)
    q = torch.softmax(3 * torch.randn(4, vocabulary, generator=generator), -1)
    nodes = torch.tensor([6, 0, 3, 3, 5])
    rows = torch.randint(-1, 4, (5, laws), generator=generator)
    tokens = torch.randint(0, vocabulary, (5, laws), generator=generator)
    tokens[1] = tokens[1, 0]
    scales = torch.rand(5, laws, generator=generator, dtype=torch.float64) * (torch.arange(5) != 2)[:, None]
    weight = torch.rand(5, generator=generator, dtype=torch.float64)
    exact = Residual(p.double(), nodes, weight, q.double(), rows, tokens, scales).mass_reference()
    parts = (p, nodes, weight, q, rows, tokens, scales)
    there = Residual(*(x.to(where) for x in parts))
    assert torch.allclose(there.mass().cpu(), exact, rtol=1e-6, atol=1e-7)
    written = Residual(p.double(), nodes, weight, q.double(), rows, tokens, scales).written_out_reference()
    assert torch.allclose(there.written_out().cpu().double(), written, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocabulary", [3, 257, 49_152])
def test_the_bar_of_k_draws_is_the_references(vocabulary: int, device: str) -> None:
    """Equal laws, near ones and far ones, one draw, several and none."""
    where = needs(device)
    generator = torch.Generator().manual_seed(vocabulary)
    q = torch.softmax(3 * torch.randn(4, vocabulary, generator=generator, dtype=torch.float64), -1)
    p = torch.stack([q[0], 0.9 * q[1] + 0.1 * q[2], q[3], q[1]])
    nodes, rows = torch.tensor([0, 1, 2, 3, 1, 1]), torch.tensor([0, 1, 0, 2, 1, -1])
    weight = torch.tensor([1.0, 0.7, 1.0, 0.4, 1.0, 1.0], dtype=torch.float64)
    count = torch.tensor([4, 3, 2, 2, 1, 0])
    want = kseq_bar_reference(p, q, nodes, weight, rows, count)
    moved_there = (x.to(where) for x in (p.float(), q.float(), nodes, weight, rows, count))
    got = kseq_bar(*moved_there)
    # Where two laws are equal, rounding decides how near to 1 the bar is: that it is lossless, and what it accepts, is
    # what counts.
    assert bool((got[0] * (1 - (1 - got[1]) ** count.to(where)) <= got[1] + 1e-6).all())
    accepted = [1 - (1 - beta.cpu()) ** count for _, beta in (got, want)]
    assert torch.allclose(*accepted, atol=1e-4)
