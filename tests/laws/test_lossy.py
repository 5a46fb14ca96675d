"""Laws that change what the model says: each does what its definition says, and none is ever taken for lossless."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from torch import Tensor

from draftwood.assembly import TREES as SHAPES
from draftwood.assembly import build_grower, build_verifier
from draftwood.drafting import Grower
from draftwood.errors import InvalidRequest
from draftwood.growers import (
    Beam,
    Best,
    Coupled,
    Hybrid,
    Independent,
    Levels,
    Paths,
    WithoutReplacement,
    chain,
)
from draftwood.ops.native import kernels
from draftwood.protocols import BatchView, Verifier
from draftwood.request import SamplingParams
from draftwood.rng import KeyedRng
from draftwood.tree import POINT_CHAIN, POINT_TREE, DraftLaw, Draw, TokenTree, Verdict
from draftwood.verifiers import LAWS, default_law
from draftwood.verifiers.law import Odds
from draftwood.verifiers.lossy import Relaxed, Typical
from enumeration import (
    Rows,
    TableModel,
    aligned_rows,
    assert_lossless,
    continuation,
    law_error,
    prefixes_of,
    random_rows,
    round_law,
    target_rows,
    view_of,
)
from no_sync import no_looking
from tiny import Ask, Harness, generated, no_drafter, tiny_runner, with_model
from trees import pack, padded, tree_of

V = 5
LOSSY = ("typical", "threshold", "relaxed", "lenient", "mixture")
LOSSLESS = tuple(name for name in LAWS if name not in LOSSY)


# --- what may be had by which name


def test_the_laws_and_their_order() -> None:
    """Lossless ones first, the lossy ones at the end, under their own names."""
    assert tuple(LAWS) == (
        *("match", "coupled", "token", "block", "naive", "walk", "rrs", "rrsw", "kseq", "hybrid", "traversal"),
        *("layer", "layer-proportional", "layer-kseq", "gbv", "optimal"),
        *LOSSY,
    )
    for name, entry in LAWS.items():
        law = entry()
        assert law.name == name
        assert law.lossless == (name not in LOSSY)
        assert entry.says


@pytest.mark.parametrize("law", LOSSLESS)
def test_lossless_laws_have_nothing_to_loosen(law: str) -> None:
    assert LAWS[law].defaults == {}
    for setting in ("threshold=0.5", "lenience=0.5", "weight=0.5", "temperature=2"):
        with pytest.raises(InvalidRequest, match=rf"'{law}' has no setting .* \(it has: none\)"):
            build_verifier(f"{law}:{setting}")


@pytest.mark.parametrize(
    "spec",
    [
        "typical:threshold=-0.1",
        "typical:threshold=1.1",
        "typical:alpha=nan",
        "threshold:single=2",
        "threshold:total=0",
        "relaxed:k=0",
        "relaxed:margin=-1",
        "lenient:lenience=0",
        "lenient:lenience=1.5",
        "mixture:weight=-1",
        "mixture:weight=1.01",
    ],
)
def test_settings_out_of_range_are_refused(spec: str) -> None:
    with pytest.raises(InvalidRequest, match=r"cannot be built: .*(between|at least)"):
        build_verifier(spec)


def test_settings_arrive() -> None:
    typical, relaxed = build_verifier("typical:threshold=0.2,alpha=0.5"), build_verifier("relaxed:k=7,margin=inf")
    assert (typical.threshold, typical.alpha) == (0.2, 0.5)
    assert (relaxed.k, relaxed.margin) == (7, math.inf)
    assert build_verifier("mixture:weight=0.25").weight == 0.25
    assert LAWS["typical"].defaults == {"threshold": 0.3, "alpha": 0.09}


def every_draft_law() -> list[DraftLaw]:
    draws = [frozenset(d) for n in range(5) for d in itertools.combinations(Draw, n)]
    laws = [
        DraftLaw(d, chain=chain, paths=paths)
        for d, chain, paths in itertools.product(draws, (False, True), (False, True))
    ]
    return [*laws, POINT_CHAIN, POINT_TREE]


def test_no_drafts_whatever_get_a_lossy_law_by_default() -> None:
    for drafts in every_draft_law():
        assert LAWS[default_law(drafts)]().lossless, drafts


@pytest.mark.parametrize("shape", SHAPES)
def test_the_default_is_exact_for_what_growers_promise(shape: str) -> None:
    drafts = build_grower(shape).law
    assert LAWS[default_law(drafts)]().refuses(drafts) is None


@pytest.mark.parametrize("law", LOSSY)
def test_a_law_that_promises_nothing_refuses_nothing(law: str) -> None:
    assert all(LAWS[law]().refuses(drafts) is None for drafts in every_draft_law())


# --- the definitions, written out again

Stops = dict[int, tuple[float, list[float]]]  # node -> how likely the path ends there, and the law of the next token


@dataclass(frozen=True)
class Toy:
    """One tree as plain lists."""

    tokens: list[int]
    parents: list[int]
    draws: list[list[int]]  # the nodes drawn behind each node, in order, repeats and all
    laws: list[list[float]]  # the law each node was drawn from
    p: list[list[float]]

    @classmethod
    def of(cls, tree: TokenTree, p: Tensor) -> Toy:
        laws = tree.law_rows(torch.arange(tree.num_nodes), p).tolist()
        tries = [[n for n in row if n >= 0] for row in tree.tries.tolist()]
        return cls(tree.tokens.tolist(), tree.parents.tolist(), tries, laws, p.tolist())

    def path(self, node: int) -> list[int]:
        return [] if node == 0 else [*self.path(self.parents[node]), node]

    def child(self, node: int, token: int) -> int | None:
        return next((c for c in self.draws[node] if self.tokens[c] == token), None)


def deepest(toy: Toy, good: Callable[[list[float], int], bool]) -> Stops:
    """The longest path of good tokens, the first of several; then a token of the target's own."""
    reached = [
        node
        for node in range(len(toy.tokens))
        if all(good(toy.p[toy.parents[n]], toy.tokens[n]) for n in toy.path(node))
    ]
    best = max(reached, key=lambda node: (len(toy.path(node)), -node))
    return {best: (1.0, toy.p[best])}


def typical(toy: Toy, threshold: float = 0.3, alpha: float = 0.09) -> Stops:
    def good(row: list[float], token: int) -> bool:
        entropy = -sum(x * math.log(x) for x in row if x > 0)
        return row[token] > min(threshold, alpha * math.exp(-entropy))

    return deepest(toy, good)


def relaxed(toy: Toy, k: int = 3, margin: float = 0.5) -> Stops:
    def good(row: list[float], token: int) -> bool:
        better = sum(x > row[token] for x in row)
        return row[token] > 0 and better < k and math.log(max(row) / row[token]) <= margin

    return deepest(toy, good)


def walked(toy: Toy, judge: Callable[[int], tuple[list[tuple[int, float]], list[float]]]) -> Stops:
    """From the root down: `judge` gives the children of a node with their chances, and what is drawn from otherwise.

    A token drawn otherwise that is in the tree all the same is gone on from.
    """
    stops: Stops = {}

    def visit(node: int, chance: float) -> None:
        accepted, left = judge(node)
        total = sum(left)
        rest = 1.0
        onward: dict[int, float] = {}
        for child, share in accepted:
            onward[child] = onward.get(child, 0.0) + rest * share
            rest *= 1 - share
        ends = [0.0] * len(left)
        for token, x in enumerate(left):
            child = toy.child(node, token)
            if total > 0 and child is not None:
                onward[child] = onward.get(child, 0.0) + rest * x / total
            elif total > 0:
                ends[token] = rest * x / total
        if sum(ends) > 0:
            stops[node] = (chance * sum(ends), [x / sum(ends) for x in ends])
        for child, share in onward.items():
            visit(child, chance * share)

    visit(0, 1.0)
    return stops


def rejection(toy: Toy, node: int, target: list[float], lenience: float = 1.0):
    """One draw after the other, each against what the earlier ones left."""
    accepted = []
    for child in toy.draws[node]:
        q, x = toy.laws[child], toy.tokens[child]
        accepted.append((child, min(1.0, target[x] / (lenience * q[x]))))
        left = [max(a - b, 0.0) for a, b in zip(target, q, strict=True)]
        target = [a / sum(left) for a in left] if sum(left) > 0 else left
    return accepted, target


def lenient(toy: Toy, lenience: float = 0.7) -> Stops:
    return walked(toy, lambda node: rejection(toy, node, toy.p[node], lenience))


def threshold(toy: Toy, single: float = 0.9, total: float = 1.0) -> Stops:
    """One coin a node: the first child whose running sum of p reaches the coin, or that is likely enough by itself."""

    def judge(node: int):
        row, seen, below = toy.p[node], 0.0, 0.0  # `below`: the part of [0, 1] where the coin has been answered
        shares, tokens = [], []
        for child in toy.draws[node]:
            token = toy.tokens[child]
            if token in tokens:
                continue
            tokens.append(token)
            seen += row[token]
            reach = 1.0 if row[token] >= single else min(1.0, seen / total)
            shares.append((child, max(reach - below, 0.0)))
            below = max(below, reach)
        rest, accepted = 1.0, []
        for child, share in shares:
            accepted.append((child, share / rest if rest > 0 else 1.0))
            rest -= share
        return accepted, [0.0 if t in tokens else x for t, x in enumerate(row)]

    return walked(toy, judge)


def mixed_row(toy: Toy, node: int, weight: float) -> list[float]:
    if not toy.draws[node]:
        return toy.p[node]
    return [weight * a + (1 - weight) * b for a, b in zip(toy.p[node], toy.laws[toy.draws[node][0]], strict=True)]


def mixture(toy: Toy, weight: float = 0.9) -> Stops:
    return walked(toy, lambda node: rejection(toy, node, mixed_row(toy, node, weight)))


TREES: dict[str, Grower] = {
    "chain": chain(3),
    "chosen": Levels((3, 2), Best()),
    "beam": Beam(nodes=7, width=3, depth=3),
    "sampled chain": Levels((1, 1, 1), Independent()),
    "independent": Levels((3, 2), Independent()),
    "without replacement": Levels((3, 2), WithoutReplacement()),
    "hybrid": Levels((3, 1), Hybrid()),
    "paths": Paths(3, 2),
    "paths behind a trunk": Paths(2, 2, trunk=1),
    "coupled": Levels((2, 2), Coupled()),
}
DEFINITIONS: dict[str, Callable[[Toy], Stops]] = {
    "typical": typical,
    "typical:threshold=0.05,alpha=0.9": lambda toy: typical(toy, 0.05, 0.9),
    "typical:threshold=1,alpha=1": lambda toy: typical(toy, 1.0, 1.0),
    "relaxed": relaxed,
    "relaxed:k=2,margin=3": lambda toy: relaxed(toy, 2, 3.0),
    "relaxed:k=9,margin=inf": lambda toy: relaxed(toy, 9, math.inf),
    "threshold": threshold,
    "threshold:single=0.4,total=0.7": lambda toy: threshold(toy, 0.4, 0.7),
    "threshold:single=1,total=0.3": lambda toy: threshold(toy, 1.0, 0.3),
    "lenient": lenient,
    "lenient:lenience=0.2": lambda toy: lenient(toy, 0.2),
    "mixture": mixture,
    "mixture:weight=0.3": lambda toy: mixture(toy, 0.3),
    "mixture:weight=0": lambda toy: mixture(toy, 0.0),
}


@cache
def toys(tree: str) -> list[tuple[TokenTree, Tensor]]:
    """Twelve trees drawn from the tree's grower, targets sharp and flat, drafts alike and unlike; with target rows."""
    made = []
    for seed in range(12):
        p = random_rows(seed, V, (0.3, 1.0, 3.0)[seed % 3])
        q = aligned_rows(p, seed, V, 0.6) if seed % 2 else random_rows(seed + 900, V)
        view = replace(view_of(), seeds=torch.tensor([seed]))
        grower = TREES[tree]
        grown = grower.grow(TableModel(q), view, grower.max_nodes, KeyedRng()).tree.packed()[0]
        made.append((grown, target_rows(grown, p)))
    return made


def rows_left(odds: Odds, nodes: list[int], p: Tensor) -> list[list[float]]:
    left = odds.left(torch.tensor(nodes))
    left = torch.where(left.amax(-1, keepdim=True) > 0, left, p[nodes])
    return (left / left.sum(-1, keepdim=True)).tolist()


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("spec", DEFINITIONS)
def test_each_does_what_its_definition_says(spec: str, tree: str) -> None:
    for grown, p in toys(tree):
        want = DEFINITIONS[spec](Toy.of(grown, p))
        odds = build_verifier(spec).odds(grown, p)
        expected = [want.get(node, (0.0, []))[0] for node in range(grown.num_nodes)]
        assert odds.stop.tolist() == pytest.approx(expected, abs=1e-12)
        nodes = [node for node, (chance, _) in want.items() if chance > 1e-9]
        for node, row in zip(nodes, rows_left(odds, nodes, p), strict=True):
            assert row == pytest.approx(want[node][1], abs=1e-9)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("spec", DEFINITIONS)
def test_absent_nodes_change_no_odds(spec: str, tree: str) -> None:
    """Nor does it that values may not be looked at."""
    for seed, (grown, p) in enumerate(toys(tree)[:6]):
        whole, place = padded(grown, grown.widest + seed % 4, seed)
        rows = torch.full((whole.num_nodes, V), 1 / V, dtype=torch.float64).index_copy_(0, place, p)
        want = build_verifier(spec).odds(grown, p)
        with no_looking():
            odds = build_verifier(spec).odds(whole, rows)
            left = odds.left(place)
        assert odds.ends(whole)[place].tolist() == pytest.approx(want.stop.tolist(), abs=1e-12)
        assert float(odds.ends(whole).sum()) == pytest.approx(1, abs=1e-12)
        assert torch.allclose(left, want.left(torch.arange(grown.num_nodes)), atol=1e-12)
        assert odds.drift is not None
        assert want.drift is not None
        assert odds.drift[place].tolist() == pytest.approx(want.drift.tolist(), abs=1e-12, nan_ok=True)


@pytest.mark.parametrize("law", LOSSY)
def test_settings_matter_on_these_trees(law: str) -> None:
    outcomes = set()
    for spec, definition in DEFINITIONS.items():
        if spec.partition(":")[0] == law:
            stops = [definition(Toy.of(grown, p)) for tree in TREES for grown, p in toys(tree)]
            outcomes.add(tuple((node, round(chance, 9)) for stop in stops for node, (chance, _) in stop.items()))
    assert len(outcomes) == sum(spec.partition(":")[0] == law for spec in DEFINITIONS)


@pytest.mark.parametrize("spec", DEFINITIONS)
def test_a_batch_is_its_trees_one_by_one(spec: str) -> None:
    """Deepest, first and left over are questions of one tree each."""
    singles = [toy for name in ("without replacement", "sampled chain", "chosen") for toy in toys(name)[:4]]
    batch, p = pack([grown for grown, _ in singles]), torch.cat([rows for _, rows in singles])
    together = build_verifier(spec).odds(batch, p)
    for b, (grown, rows) in enumerate(singles):
        start = int(batch.offsets[b])
        alone = build_verifier(spec).odds(grown, rows)
        here = slice(start, start + grown.num_nodes)
        assert together.stop[here].tolist() == pytest.approx(alone.stop.tolist(), abs=1e-12)
        assert together.drift is not None
        assert alone.drift is not None
        assert together.drift[here].tolist() == pytest.approx(alone.drift.tolist(), abs=1e-12, nan_ok=True)


def by_odds(law: Verifier, tree: TokenTree, p: Tensor, view: BatchView) -> Verdict:
    law.at_once = lambda *_: None  # type: ignore[attr-defined]
    return law.verify(tree, p, view, KeyedRng())


@pytest.mark.skipif(kernels() is None, reason="no C compiler")
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("spec", DEFINITIONS)
def test_verdicts_in_one_call_are_those_of_the_odds(spec: str, tree: str) -> None:
    """All twelve trees in one batch, in single precision, on many random numbers."""
    grown = pack([grown for grown, _ in toys(tree)])
    single = replace(grown, q=None if grown.q is None else grown.q.float())
    p = torch.cat([rows for _, rows in toys(tree)]).float()
    for round_ in range(5):
        view = replace(view_of(sequences=12), seeds=torch.arange(12) + 100 * round_, lengths=torch.arange(12))
        got = build_verifier(spec).at_once(single, p, view)  # type: ignore[attr-defined]
        want = by_odds(build_verifier(spec), single, p, view)
        for name in ("path", "length", "bonus"):
            assert getattr(got, name).tolist() == getattr(want, name).tolist()
        assert got.drift.tolist() == pytest.approx(want.drift.tolist(), rel=1e-5, abs=1e-7, nan_ok=True)


@pytest.mark.skipif(kernels() is None, reason="no C compiler")
@pytest.mark.parametrize("vocabulary", [3, 16, 257, 49_152])
@pytest.mark.parametrize("sharpness", [0.0, 1.0, 3.0, 10.0])
def test_bars_over_whole_vocabularies_are_where_the_definitions_put_them(vocabulary: int, sharpness: float) -> None:
    """A hair above the token's probability, and a hair below."""
    generator = torch.Generator().manual_seed(vocabulary)
    row = torch.softmax(sharpness * torch.randn(vocabulary, generator=generator), 0)
    row[0] = 0  # what logarithms must not trip over
    token = int(row.topk(2).indices[1])
    tree, p, exact = TokenTree.of_points([([0, token], [-1, 0])]), row.expand(2, -1).contiguous(), row.double()

    def accepted(law: Typical | Relaxed) -> bool:
        verdict = law.at_once(tree, p, view_of())
        assert verdict is not None
        return bool(verdict.length)

    wanted, alpha = float(exact[token]), float(exact[token] * torch.special.entr(exact).sum().exp())
    assert accepted(Typical(1.0, min(0.99999 * alpha, 1.0)))
    assert alpha > 0.999 or not accepted(Typical(1.0, 1.00001 * alpha))
    assert accepted(Typical(0.9999999 * wanted, 1.0))
    rank, gap = int((row > row[token]).sum()) + 1, float((exact.max() / exact[token]).log())
    assert accepted(Relaxed(rank, math.inf))
    assert accepted(Relaxed(vocabulary + 1, gap + 1e-9))
    assert rank == 1 or not accepted(Relaxed(rank - 1, math.inf))
    assert gap == 0 or not accepted(Relaxed(vocabulary + 1, gap - 1e-9))


@pytest.mark.parametrize("law", LOSSY)
def test_what_is_drawn_is_what_the_odds_say(law: str) -> None:
    """A round draw by draw, keys and all, against the definition summed over every tree."""
    p, q = random_rows(3, 3), random_rows(4, 3)
    grower = Levels((1, 1), Independent())
    got = round_law(grower, LAWS[law](), p, q)
    want: dict[tuple[int, ...], float] = {}
    for x, y in itertools.product(range(3), repeat=2):
        grown = chain_of([x, y], [q(()), q((x,))])
        chance = q(())[x] * q((x,))[y]
        for node, (share, row) in DEFINITIONS[law](Toy.of(grown, target_rows(grown, p))).items():
            for token, value in enumerate(row):
                text = (*prefixes_of(grown)[node], token)
                want[text] = want.get(text, 0.0) + chance * share * value
    assert all(got.get(s, 0.0) == pytest.approx(chance, abs=1e-12) for s, chance in want.items())
    assert sum(got.values()) == pytest.approx(1, abs=1e-12)


def chain_of(tokens: list[int], laws: list[tuple[float, ...]]) -> TokenTree:
    count = len(tokens)
    q = torch.tensor(laws, dtype=torch.float64)
    return tree_of([0, *tokens], [-1, *range(count)], [0, count + 1], q_row=[-1, *range(count)], q=q)


# --- where nothing is loosened, nothing is lost

SMALL_TREES: dict[str, tuple[Grower, int]] = {
    "sampled chain": (Levels((1, 1), Independent()), 3),
    "independent": (Levels((2, 1), Independent()), 2),
    "without replacement": (Levels((2,), WithoutReplacement()), 3),
    "hybrid": (Levels((2, 1), Hybrid()), 3),
    "paths": (Paths(2, 2), 2),
    "chosen": (Levels((2, 1), Best()), 3),
}


@pytest.mark.parametrize("tree", SMALL_TREES)
@pytest.mark.parametrize("spec", ["threshold:single=1,total=1", "lenient:lenience=1", "mixture:weight=1"])
def test_with_nothing_loosened_they_are_lossless(spec: str, tree: str) -> None:
    grower, vocabulary = SMALL_TREES[tree]
    for seed in range(2):
        p, q = random_rows(seed, vocabulary), random_rows(seed + 60, vocabulary)
        assert_lossless(round_law(grower, build_verifier(spec), p, q), p, vocabulary)


@pytest.mark.parametrize("law", LOSSY)
def test_with_their_own_settings_they_are_not(law: str) -> None:
    """The criterion notices: a lossy law that passed for lossless would make it worthless."""
    worst = 0.0
    for seed in range(6):
        p, q = random_rows(seed, 3, 0.5), random_rows(seed + 60, 3)
        worst = max(worst, law_error(round_law(Levels((1, 1), Independent()), LAWS[law](), p, q), p, 3))
    assert worst > 1e-3


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("spec", ["lenient:lenience=1", "mixture:weight=1"])
def test_with_nothing_loosened_they_are_walk(spec: str, tree: str) -> None:
    for grown, p in toys(tree):
        mine, walk = build_verifier(spec).odds(grown, p), LAWS["walk"]().odds(grown, p)
        assert torch.equal(mine.stop, walk.stop)
        every = torch.arange(grown.num_nodes)
        assert torch.equal(mine.left(every), walk.left(every))


# --- the certificate of the mixture


def distance(a: Rows | tuple[float, ...], b: Rows | tuple[float, ...]) -> float:
    return sum(abs(x - y) for x, y in zip(a, b, strict=True)) / 2


@pytest.mark.parametrize("weight", [0.0, 0.25, 0.9, 1.0])
@pytest.mark.parametrize(
    "grower",
    [Levels((1,), Independent()), Levels((2,), Independent()), Levels((2,), WithoutReplacement()), Paths(2, 1)],
    ids=["one", "two", "without-replacement", "paths"],
)
def test_a_step_of_the_mixture_follows_exactly_the_mixture(grower: Grower, weight: float) -> None:
    """So it is exactly (1 - w) TV(p, q) away from the model, and says so."""
    for seed in range(4):
        p, q = random_rows(seed, 3), random_rows(seed + 80, 3)
        law = build_verifier(f"mixture:weight={weight}")
        h = round_law(grower, law, p, q)
        first = tuple(sum(chance for s, chance in h.items() if s[0] == x) for x in range(3))
        mixed = tuple(weight * a + (1 - weight) * b for a, b in zip(p(()), q(()), strict=True))
        assert first == pytest.approx(mixed, abs=1e-12)
        away = (1 - weight) * distance(p(()), q(()))
        assert abs(distance(first, p(())) - away) <= 1e-12
        grown = grower.grow(TableModel(q), view_of(), grower.max_nodes, KeyedRng()).tree.packed()[0]
        odds = law.odds(grown, target_rows(grown, p))
        assert odds.drift is not None
        assert odds.drift.tolist() == pytest.approx([away] * grown.num_nodes, abs=1e-12), "leaves add nothing"


@pytest.mark.parametrize("weight", [0.2, 0.7])
@pytest.mark.parametrize("tree", ["sampled chain", "independent", "paths", "without replacement"])
def test_all_of_a_round_follows_the_mixture(tree: str, weight: float) -> None:
    """Criterion (1) with the mixture in the place of the target, wherever the tree has something to say."""
    grower, vocabulary = SMALL_TREES[tree]
    p, q = random_rows(1, vocabulary), random_rows(2, vocabulary)
    depth = 1 if tree == "without replacement" else 2

    def mixed(prefix: tuple[int, ...]) -> tuple[float, ...]:
        w = weight if len(prefix) < depth else 1.0
        return tuple(w * a + (1 - w) * b for a, b in zip(p(prefix), q(prefix), strict=True))

    assert_lossless(round_law(grower, build_verifier(f"mixture:weight={weight}"), p, q), mixed, vocabulary)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("weight", [0.3, 0.9, 1.0])
def test_drift_adds_up_along_the_path(tree: str, weight: float) -> None:
    for grown, p in toys(tree):
        toy = Toy.of(grown, p)
        drift = build_verifier(f"mixture:weight={weight}").odds(grown, p).drift
        assert drift is not None
        for node in range(grown.num_nodes):
            steps = [distance(mixed_row(toy, n, weight), toy.p[n]) for n in (0, *toy.path(node))]
            assert float(drift[node]) == pytest.approx(sum(steps), abs=1e-12)


def test_the_certificate_bounds_the_whole_text() -> None:
    """The expected drift of a round is at least the total variation between its texts and the model's."""
    for seed, weight in itertools.product(range(2), (0.0, 0.5, 0.8)):
        p, q = random_rows(seed, 3), random_rows(seed + 30, 3)
        law = build_verifier(f"mixture:weight={weight}")
        h = round_law(Levels((1, 1), Independent()), law, p, q)
        every = list(itertools.product(range(3), repeat=3))
        reached = [sum(h.get(y[:n], 0.0) * continuation(p, y, n) for n in (1, 2, 3)) for y in every]
        away = sum(abs(r - continuation(p, y, 0)) for r, y in zip(reached, every, strict=True)) / 2
        expected = 0.0
        for x, y in itertools.product(range(3), repeat=2):
            grown = chain_of([x, y], [q(()), q((x,))])
            odds = law.odds(grown, target_rows(grown, p))
            assert odds.drift is not None
            expected += q(())[x] * q((x,))[y] * float((odds.stop * odds.drift).sum())
        assert away <= expected + 1e-12
        assert away > 0.3 * expected


# --- what is said about it


@pytest.mark.parametrize("law", LAWS)
def test_drift_of_a_verdict(law: str) -> None:
    """Lossless: none at all. Lossy: a number with a certificate, unknown without one."""
    grown = chain_of([1, 2], [(0.5, 0.3, 0.2), (0.2, 0.2, 0.6)])
    p = target_rows(grown, random_rows(8, 3))
    if LAWS[law]().refuses(DraftLaw(frozenset({Draw.IID}), chain=True, paths=True)) is not None:
        grown = TokenTree.of_points([([0, 1, 2], [-1, 0, 1])])
    verdict = LAWS[law]().verify(grown, p, view_of(), KeyedRng())
    (drift,) = [0.0] if verdict.drift is None else verdict.drift.tolist()
    if law == "mixture":
        assert 0 < drift < 3
    elif law in LOSSY:
        assert math.isnan(drift)
    else:
        assert drift == 0


@pytest.mark.parametrize("law", LOSSY)
def test_without_guesses_there_is_no_drift_and_the_words_are_the_models(law: str) -> None:
    roots = TokenTree.roots(torch.tensor([0, 1]))
    p = torch.tensor([[0.2, 0.8], [0.7, 0.3]], dtype=torch.float64)
    odds = LAWS[law]().odds(roots, p)
    assert odds.stop.tolist() == [1, 1]
    assert torch.equal(odds.left(torch.arange(2)), p)
    assert odds.drift is not None
    assert odds.drift.tolist() == [0, 0]


@pytest.mark.parametrize("law", LOSSY)
def test_no_law_changes_the_rows_it_is_given(law: str) -> None:
    for grown, p in toys("without replacement") + toys("chosen"):
        before = p.clone()
        odds = LAWS[law]().odds(grown, p)
        odds.left(torch.arange(grown.num_nodes))
        assert torch.equal(p, before)


def test_an_answers_drift_is_the_sum_of_its_rounds() -> None:
    drafter = with_model(Levels((1, 1, 1), Independent()))(torch.float64)
    harness = Harness(tiny_runner(), drafter, LAWS["mixture"](weight=0.5))
    drifts: list[float] = []
    verify = harness.engine.verifier.verify

    def listening(*arguments):
        verdict = verify(*arguments)
        drifts.extend(verdict.drift.tolist())
        return verdict

    harness.engine.verifier.verify = listening
    (answer,) = harness.run([Ask((1, 2), SamplingParams(temperature=1.0, seed=4, max_tokens=20))])
    assert answer.drift == pytest.approx(sum(drifts))
    assert answer.drift > 0
    assert answer.stats(0.0).drift == answer.drift


def test_one_unknown_round_makes_the_whole_unknown() -> None:
    drafter = with_model(Levels((1, 1), Independent()))(torch.float64)
    harness = Harness(tiny_runner(), drafter, LAWS["typical"]())
    (answer,) = harness.run([Ask((1,), SamplingParams(temperature=1.0, seed=4, max_tokens=9))])
    assert math.isnan(answer.drift)
    stats = [event.stats.drift for event in harness.events]
    assert stats[-1] is None
    assert all(drift in (0.0, None) for drift in stats)


@pytest.mark.parametrize("spec", ["typical", "threshold", "relaxed", "lenient", "mixture:weight=1"])
@pytest.mark.parametrize("tree", ["chosen", "sampled chain", "without replacement", "paths"])
def test_at_temperature_zero_there_is_only_one_good_token(spec: str, tree: str) -> None:
    """They have no short cut there; their odds must come to the same."""
    asks = [Ask((i, 2), SamplingParams(seed=i, max_tokens=10)) for i in range(3)]
    want = generated(Harness(tiny_runner(), no_drafter(torch.float64), LAWS["match"]()).run(asks))
    harness = Harness(tiny_runner(), with_model(TREES[tree])(torch.float64), build_verifier(spec))
    assert generated(harness.run(asks)) == want
