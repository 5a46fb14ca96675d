"""Trees cut before verification: by criterion (1), through whole engines, and in what the inner drafter is told."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

import pytest
import torch

from draftwood.costs import StepCosts
from draftwood.drafters import pruned
from draftwood.drafters.model import ModelDrafter
from draftwood.drafters.ngram import NgramDrafter
from draftwood.drafters.none import NoDrafter
from draftwood.drafters.pruned import PrunedDrafter
from draftwood.drafters.scripted import ScriptedDrafter
from draftwood.growers import Beam, Hybrid, Independent, Levels, Paths, WithoutReplacement, chain
from draftwood.protocols import BatchView, Budget, Drafter, Features, Grower, Randomness
from draftwood.request import SamplingParams
from draftwood.rng import KeyedRng
from draftwood.tree import POINT_TREE, DraftLaw, TokenTree, Verdict
from draftwood.verifiers import LAWS, NodeLaw
from enumeration import (
    Drafts,
    Enumerator,
    Law,
    Rows,
    TableModel,
    assert_lossless,
    continuation,
    drafts_of,
    emitted,
    law_error,
    law_of,
    node_law,
    pack,
    random_rows,
    target_rows,
    view_of,
)
from tiny import Ask, Harness, Regime, generated, tiny_runner


def costs_of(*seconds: float) -> StepCosts:
    """By the number of rows, from one; the last two go on as a line."""
    return StepCosts(tuple(range(1, len(seconds) + 1)), (1,), (seconds,), 0.0)


def rising(slope: float, bend: float = 0.02) -> StepCosts:
    return costs_of(*(1 + slope * n + bend * n * n for n in range(24)))


FLAT = costs_of(1.0, 1.0)
STEEP = costs_of(1.0, 100.0)


@dataclass
class Recorder:
    """Proposes what it is given, and writes down what it is told."""

    tree: TokenTree
    law: DraftLaw = POINT_TREE
    max_nodes: int = 100
    needs: frozenset[int] = frozenset({3})
    seen: list[tuple[TokenTree, Verdict, Features]] = field(default_factory=list)
    released: list[int] = field(default_factory=list)

    def propose(self, view: BatchView, budget: Budget, rng: Randomness) -> TokenTree:
        return self.tree

    def observe(self, view: BatchView, tree: TokenTree, verdict: Verdict, features: Features) -> None:
        self.seen.append((tree, verdict, features))

    def release(self, seq_id: int) -> None:
        self.released.append(seq_id)


@dataclass
class TableDrafter:
    """A shipped grower on a table."""

    grower: Grower
    q: Rows
    needs: frozenset[int] = frozenset()

    @property
    def law(self) -> DraftLaw:
        return self.grower.law

    @property
    def max_nodes(self) -> int:
        return self.grower.max_nodes

    def propose(self, view: BatchView, budget: Budget, rng: Randomness) -> TokenTree:
        return self.grower.grow(TableModel(self.q), view, budget, rng).build()[0]

    def observe(self, view: BatchView, tree: TokenTree, verdict: Verdict, features: Features) -> None:
        pass

    def release(self, seq_id: int) -> None:
        pass


def cut(tree: TokenTree, costs: StepCosts, deepest: int = 0, past: int | None = None) -> TokenTree:
    """The tree as it is verified after earlier steps: proposals `deepest` levels deep, and any outcomes, by seed."""
    drafter = PrunedDrafter(Recorder(tree), costs)
    drafter._deepest = deepest
    if past is not None:
        source = torch.Generator().manual_seed(past)
        record = drafter._record
        record._tried = 9 * torch.rand(record._tried.shape, generator=source, dtype=torch.float64)
        record._hits = record._tried * torch.rand(record._tried.shape, generator=source, dtype=torch.float64)
    kept = drafter.propose(view_of(sequences=tree.num_trees), Budget(100), KeyedRng())
    kept.validate()
    return kept


# Exactness


@cache
def moody(vocabulary: int) -> Rows:
    """A draft that is sure of itself after even tokens and has no idea after odd ones."""
    root, sure, lost = {
        2: ((0.55, 0.45), (0.96, 0.04), (0.5, 0.5)),
        3: ((0.45, 0.35, 0.2), (0.9, 0.06, 0.04), (0.3, 0.36, 0.34)),
    }[vocabulary]
    return lambda prefix: root if not prefix else lost if prefix[-1] % 2 else sure


TREES: dict[str, tuple[Grower, int, StepCosts]] = {  # grower, vocabulary, costs that make the cut depend on tokens
    "without-replacement": (Levels((2, 1), WithoutReplacement()), 3, rising(0.1)),
    "without-replacement-2-2": (Levels((2, 2), WithoutReplacement()), 3, rising(0.1)),
    "iid": (Levels((2, 1), Independent()), 2, rising(0.1)),
    "iid-2-2": (Levels((2, 2), Independent()), 2, rising(0.2)),
    "iid-1-2": (Levels((1, 2), Independent()), 2, rising(0.2)),
    "hybrid": (Levels((2, 1), Hybrid()), 3, rising(0.05)),
    "paths": (Paths(2, 2), 2, rising(0.2)),
    "paths-of-three": (Paths(3, 2), 2, rising(0.2)),
    "trunk": (Paths(2, 2, 1), 2, rising(0.2)),
    "sampled-chain": (Levels((1, 1, 1), Independent()), 2, rising(0.2)),
}
EXACT = [
    (tree, law)
    for tree, (grower, _, _) in TREES.items()
    for law in LAWS
    if law != "optimal"  # needs scipy
    and isinstance(made := LAWS[law](), NodeLaw)
    and made.lossless
    and made.refuses(replace(grower.law, paths=False)) is None
]


@cache
def cut_drafts(name: str, deepest: int = 0) -> Drafts:
    """Every tree the grower can draw, each cut on its own."""
    grower, vocabulary, costs = TREES[name]
    return each_cut(grower, moody(vocabulary), lambda tree: cut(tree, costs, deepest))


def each_cut(grower: Grower, q: Rows, cutter: Callable[[TokenTree], TokenTree]) -> Drafts:
    drafts = drafts_of(grower, q)
    trees = [cutter(drafts.tree.take(torch.tensor([b]))[0]) for b in range(drafts.tree.num_trees)]
    return Drafts(pack(trees), drafts.chance, drafts.vocabulary)


def shapes(tree: TokenTree) -> set[tuple[int, ...]]:
    return {tuple(tree.take(torch.tensor([b]))[0].parents.tolist()) for b in range(tree.num_trees)}


def worst_error(law: str, drafts: Drafts, seeds: int = 3) -> float:
    rows = [random_rows(seed, drafts.vocabulary) for seed in range(seeds)]
    return max(law_error(node_law(LAWS[law](), drafts, p), p, drafts.vocabulary) for p in rows)


@pytest.mark.parametrize("deepest", [0, 4])
@pytest.mark.parametrize(("tree", "law"), EXACT)
def test_a_cut_tree_is_verified_exactly(tree: str, law: str, deepest: int) -> None:
    assert worst_error(law, cut_drafts(tree, deepest)) <= 1e-12


@cache
def any_drafts(name: str, seed: int) -> Drafts:
    """The same with any rows, costs and past."""
    grower, vocabulary, _ = TREES[name]
    costs = rising(random.Random(seed).uniform(0.02, 0.3), 0.01)
    q = random_rows(seed + 50, vocabulary, 0.5)
    return each_cut(grower, q, lambda tree: cut(tree, costs, deepest=seed % 3, past=seed))


@pytest.mark.parametrize(("tree", "law"), EXACT)
def test_whatever_the_rows_the_costs_and_the_past(tree: str, law: str) -> None:
    for seed in range(4):
        assert worst_error(law, any_drafts(tree, seed), 2) <= 1e-12


@pytest.mark.parametrize("tree", TREES)
def test_the_costs_above_do_cut_and_where_depends_on_what_was_drawn(tree: str) -> None:
    grower, vocabulary, _ = TREES[tree]
    before, after = drafts_of(grower, moody(vocabulary)).tree, cut_drafts(tree).tree
    assert after.num_nodes < before.num_nodes
    assert len(shapes(after)) > 1
    if grower.law.paths:
        assert after.drawn is not None
    else:
        assert len(shapes(before)) == 1


@pytest.mark.parametrize(("tree", "law"), [("sampled-chain", "block"), ("iid", "walk")])
def test_the_same_draw_by_draw(tree: str, law: str) -> None:
    """The drafter grows, is cut and is told, in one go, with every draw enumerated."""
    grower, vocabulary, costs = TREES[tree]
    p, view = random_rows(1, vocabulary), view_of()

    def run(rng: Enumerator) -> tuple[int, ...]:
        drafter = PrunedDrafter(TableDrafter(grower, moody(vocabulary)), costs)
        kept = drafter.propose(view, Budget(100), rng)
        verdict = LAWS[law]().verify(kept, target_rows(kept, p), view, rng)
        drafter.observe(view, kept, verdict, {})
        return emitted(kept, verdict)

    assert_lossless(law_of(run), p, vocabulary)


def test_chosen_trees_with_match() -> None:
    p, q, view = random_rows(1, 3), random_rows(2, 3), view_of()
    sizes = set()
    for slope in (0.05, 0.3, 0.5):
        drafter = PrunedDrafter(TableDrafter(Beam(nodes=4, width=2, depth=2), q), rising(slope))
        kept = drafter.propose(view, Budget(100), KeyedRng())
        sizes.add(kept.num_nodes)

        def run(rng: Enumerator, kept: TokenTree = kept) -> tuple[int, ...]:
            return emitted(kept, LAWS["match"]().verify(kept, target_rows(kept, p), view, rng))

        assert_lossless(law_of(run), p, 3)
    assert len(sizes) > 1


THREE_OF_FOUR = costs_of(1.0, 1.1, 1.2, 1.4, 1.45, 3.0)  # rows that are worth their time


@pytest.mark.parametrize(
    ("law", "grower", "costs"),
    [
        ("block", Levels((1, 1), Independent()), THREE_OF_FOUR),
        ("walk", Levels((1, 1), Independent()), THREE_OF_FOUR),
        ("layer", Levels((1, 1), Independent()), THREE_OF_FOUR),
        ("layer", Levels((2, 1), Independent()), rising(0.05)),
        ("kseq", Levels((2, 1), Independent()), rising(0.05)),
        ("layer-kseq", Levels((2, 1), Independent()), rising(0.05)),
        ("layer-kseq", Paths(2, 2), rising(0.08, 0.01)),
    ],
)
def test_trees_of_a_batch_may_decide_where_the_others_are_cut(law: str, grower: Grower, costs: StepCosts) -> None:
    """Two sequences, one forward: the law of both answers together is the product of what each should be."""
    q, p = moody(2), random_rows(3, 2)
    drafts = drafts_of(grower, q)
    single = [drafts.tree.take(torch.tensor([b]))[0] for b in range(drafts.tree.num_trees)]
    joint: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = {}
    sizes: dict[int, set[int]] = {}
    known: dict[tuple[tuple[int, ...], ...], Law] = {}

    def own_law(tree: TokenTree) -> Law:
        drawn = () if tree.drawn is None else tuple(tree.drawn.tolist())
        name = (tuple(tree.tokens.tolist()), tuple(tree.parents.tolist()), tuple(tree.q_row.tolist()), drawn)
        if name not in known:
            known[name] = node_law(LAWS[law](), Drafts(tree, torch.ones(1, dtype=torch.float64), 2), p)
        return known[name]

    for a, b in itertools.product(range(len(single)), repeat=2):
        kept = cut(pack([single[a], single[b]]), costs)
        sizes.setdefault(b, set()).add(int(kept.sizes[1]))
        h, k = (own_law(kept.take(torch.tensor([i]))[0]) for i in (0, 1))
        for s, t in itertools.product(h, k):
            weight = float(drafts.chance[a] * drafts.chance[b]) * h[s] * k[t]
            joint[s, t] = joint.get((s, t), 0.0) + weight
    assert any(len(seen) > 1 for seen in sizes.values()), "nobody's cut depends on the other"
    for y, z in itertools.product(itertools.product(range(2), repeat=3), repeat=2):
        reached = sum(
            joint.get((y[:n], z[:m]), 0.0) * continuation(p, y, n) * continuation(p, z, m)
            for n, m in itertools.product(range(1, 4), repeat=2)
        )
        assert reached == pytest.approx(continuation(p, y, 0) * continuation(p, z, 0), abs=1e-12)


# What would be biased


Hopes = pruned._Hopes


def mutated(monkeypatch: pytest.MonkeyPatch, change: Callable[[TokenTree, Hopes], Hopes]) -> None:
    right = Hopes.of.__func__  # pyright: ignore[reportFunctionMemberAccess]
    monkeypatch.setattr(Hopes, "of", classmethod(lambda cls, tree, record: change(tree, right(cls, tree, record))))


@pytest.mark.parametrize(("tree", "law"), [("without-replacement", "walk"), ("sampled-chain", "block")])
def test_a_promise_that_knows_the_token(monkeypatch: pytest.MonkeyPatch, tree: str, law: str) -> None:
    """The draft's probability of the very token that was drawn: what EAGLE-2's rerank and EVICT look at."""

    def own_probability(tree: TokenTree, hopes: Hopes) -> Hopes:
        chance = tree.drawn_probability(hopes.tries.clamp(min=0).flatten(), torch.float64).view_as(hopes.promise)
        return replace(hopes, promise=chance * (hopes.tries >= 0))

    mutated(monkeypatch, own_probability)
    grower, vocabulary, costs = TREES[tree]
    assert worst_error(law, each_cut(grower, moody(vocabulary), lambda tree: cut(tree, costs))) > 1e-3


@pytest.mark.parametrize("law", ["walk", "block"])
def test_the_best_cut_over_all_levels_at_once(monkeypatch: pytest.MonkeyPatch, law: str) -> None:
    """Where the second row costs more than the third, a token is dropped for what its own value promised further on."""
    jump = costs_of(1.0, 2.0, 2.05, 2.1)
    grower, q = Levels((1, 1, 1), Independent()), moody(2)
    assert worst_error(law, each_cut(grower, q, lambda tree: cut(tree, jump, 3))) <= 1e-12
    mutated(monkeypatch, lambda tree, hopes: replace(hopes, drawn=False))
    assert worst_error(law, each_cut(grower, q, lambda tree: cut(tree, jump))) > 1e-3


@pytest.mark.parametrize("law", ["kseq", "layer-kseq", "layer"])
def test_draws_that_agreed_counted_as_one(monkeypatch: pytest.MonkeyPatch, law: str) -> None:
    mutated(monkeypatch, lambda _, hopes: replace(hopes, repeats=False, rows=torch.ones_like(hopes.rows)))
    assert worst_error(law, each_cut(Paths(2, 2), moody(2), lambda tree: cut(tree, rising(0.2)))) > 1e-3


@pytest.mark.parametrize(
    ("law", "picker", "exact"),
    [
        ("walk", Independent(), True),
        ("traversal", Independent(), True),
        ("kseq", Independent(), False),
        ("layer-kseq", Independent(), False),
        ("walk", WithoutReplacement(), True),
        ("traversal", WithoutReplacement(), True),
    ],
)
def test_deciding_draw_by_draw_is_not_for_laws_that_weigh_draws_together(law: str, picker, exact: bool) -> None:
    """The second draw comes only where the first gave something else than 0."""

    def second_after(tree: TokenTree) -> TokenTree:
        first, second = tree.tries[1].tolist()
        drop = (torch.arange(tree.num_nodes) == second) & (tree.tokens[first] == 0)
        return tree.select(~drop, judged=False)

    error = worst_error(law, each_cut(Levels((1, 2), picker), lambda prefix: (0.5, 0.3, 0.2), second_after), 6)
    assert error <= 1e-12 if exact else error > 1e-3


def test_whole_paths_are_not_promised() -> None:
    """`gbv` knows the law of the greatest of K paths; how deep they go may not depend on the others."""
    drafter = PrunedDrafter(TableDrafter(Paths(2, 2), moody(2)), FLAT)
    assert LAWS["gbv"]().refuses(drafter.drafter.law) is None
    assert LAWS["gbv"]().refuses(drafter.law) is not None
    assert worst_error("gbv", cut_drafts("paths-of-three")) > 1e-3


# What is kept


def test_costless_rows_are_all_kept_and_unaffordable_ones_never() -> None:
    rng, view = KeyedRng(), view_of(sequences=3)
    for grower in (Beam(nodes=6, width=2, depth=3), Levels((3, 2), WithoutReplacement()), Paths(3, 3), chain(4)):
        whole = TableDrafter(grower, random_rows(1, 5)).propose(view, Budget(100), rng)
        assert cut(whole, FLAT).num_nodes == whole.num_nodes
        assert cut(whole, STEEP).num_drafted == 0


def test_chosen_trees_keep_the_best_nodes_of_all_levels() -> None:
    """Three paths behind each other: the second child of the root is worth less than the first's grandchild."""
    tree = TokenTree.of_points([([0, 1, 2, 3, 4, 5], [-1, 0, 0, 1, 3, 2])])
    kept = cut(tree, rising(0.15, 0.0))
    assert kept.tokens.tolist() == [0, 1, 3, 4]


def test_a_dear_first_row_is_paid_for_levels_to_come() -> None:
    tree = TableDrafter(Levels((1, 1, 1, 1), Independent()), lambda prefix: (0.8, 0.2)).propose(
        view_of(), Budget(9), KeyedRng()
    )
    jump = costs_of(1.0, 1.7, 1.72, 1.74, 1.76)
    assert cut(tree, jump).num_drafted == 0, "one level alone does not pay"
    assert cut(tree, jump, deepest=4).num_drafted == 4
    assert cut(tree, jump, deepest=1).num_drafted == 0


def test_a_batch_shares_out_its_rows() -> None:
    """Of two sequences the one whose draft is sure gets the rows."""
    grower, view = Levels((1, 1), Independent()), view_of(sequences=2)
    sure, lost = (
        TableDrafter(grower, lambda prefix, row=row: row).propose(view_of(), Budget(9), KeyedRng())
        for row in ((0.97, 0.01, 0.01, 0.01), (0.25, 0.25, 0.25, 0.25))
    )
    drafter = PrunedDrafter(Recorder(pack([lost, sure])), rising(0.2))
    assert drafter.propose(view, Budget(9), KeyedRng()).sizes.tolist() == [1, 3]


def accept(tree: TokenTree, *nodes: int) -> Verdict:
    return Verdict(torch.tensor([[0, *nodes]]), torch.tensor([len(nodes)]), torch.tensor([9]))


def test_what_never_comes_true_is_given_up_and_tried_again() -> None:
    whole = TokenTree.of_points([([0, 1, 2], [-1, 0, 1])])
    drafter, sizes = PrunedDrafter(Recorder(whole), rising(0.3, 0.0)), []
    for _ in range(150):
        kept = drafter.propose(view_of(), Budget(9), KeyedRng())
        sizes.append(kept.num_drafted)
        drafter.observe(view_of(), kept, accept(kept), {})
    assert sizes[0] > 0
    given_up = sizes.index(0)
    assert given_up < 10
    assert 0 < sum(size > 0 for size in sizes[given_up:]) < 30


def test_what_always_comes_true_is_kept_in_the_end() -> None:
    """Places are told apart: the first child never, the second always."""
    whole = TokenTree.of_points([([0, 1, 2, 3], [-1, 0, 0, 2])])
    drafter = PrunedDrafter(Recorder(whole), rising(0.18, 0.0))
    for _ in range(40):
        kept = drafter.propose(view_of(), Budget(9), KeyedRng())
        path = [kept.tokens.tolist().index(token) for token in (2, 3) if token in kept.tokens.tolist()]
        drafter.observe(view_of(), kept, accept(kept, *path), {})
    assert drafter.propose(view_of(), Budget(9), KeyedRng()).tokens.tolist() == [0, 2, 3]


def test_how_sure_the_draft_is_says_only_what_experience_says_it_does() -> None:
    """A draft of the target's own law is accepted however unsure it is; two draws from it would seldom agree."""
    whole = TableDrafter(Levels((1, 1), Independent()), lambda prefix: (0.25,) * 4).propose(
        view_of(), Budget(9), KeyedRng()
    )
    drafter = PrunedDrafter(Recorder(whole), rising(0.15, 0.0))
    before = drafter.propose(view_of(), Budget(9), KeyedRng()).num_drafted
    for _ in range(10):
        drafter._cut = replace(drafter._cut, keep=torch.ones(3, dtype=torch.bool))
        drafter.observe(view_of(), whole, accept(whole, 1, 2), {})
        after = drafter.propose(view_of(), Budget(9), KeyedRng()).num_drafted
    assert before < after == 2


# What the inner drafter is told


def test_verdict_and_features_come_in_the_whole_trees_numbers() -> None:
    whole = TokenTree.of_points([([0, 1, 2, 3, 4], [-1, 0, 0, 1, 3])])
    inner = Recorder(whole)
    drafter = PrunedDrafter(inner, rising(0.15, 0.0))
    kept = drafter.propose(view_of(), Budget(9), KeyedRng())
    assert kept.tokens.tolist() == [0, 1, 3, 4]
    rows = torch.arange(8.0).view(4, 2) + 1
    drafter.observe(
        view_of(), kept, Verdict(torch.tensor([[0, 1, 2, -1]]), torch.tensor([2]), accept(kept).bonus), {3: rows}
    )
    tree, verdict, features = inner.seen[0]
    assert tree is whole
    assert verdict.path.tolist() == [[0, 1, 3, -1]]
    assert verdict.length.tolist() == [2]
    assert features[3].tolist() == [[1, 2], [3, 4], [0, 0], [5, 6], [7, 8]]


def test_a_path_is_as_wide_as_the_whole_tree_is_deep() -> None:
    whole = TokenTree.of_points([([0, 1, 2], [-1, 0, 1])])
    inner = Recorder(whole)
    drafter = PrunedDrafter(inner, STEEP)
    kept = drafter.propose(view_of(), Budget(9), KeyedRng())
    drafter.observe(view_of(), kept, Verdict.of_roots(kept, torch.tensor([4])), {})
    assert inner.seen[0][1].path.tolist() == [[0, -1, -1]]


def test_everything_else_is_the_inner_drafters() -> None:
    inner = Recorder(TokenTree.roots(torch.tensor([0])), max_nodes=7)
    drafter = PrunedDrafter(inner, FLAT)
    drafter.release(5)
    assert (drafter.max_nodes, drafter.needs, inner.released) == (7, frozenset({3}), [5])
    assert drafter.law == inner.law


# Engines


class InnerHarness(Harness):
    """Also checks the pages of the drafter inside, and counts what was cut."""

    def check(self) -> None:
        super().check()
        inner = self.engine.drafter.drafter  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(inner, ModelDrafter):
            inner.runner.cache.tables.check()


V = 13
PER_ROW = StepCosts((1, 101), (1, 50), ((1.0, 6.0), (1.1, 7.1)), 0.05)
GROWERS: dict[str, Grower] = {
    "chain": chain(4),
    "beam": Beam(nodes=9, width=3, depth=3),
    "without-replacement": Levels((3, 2, 1), WithoutReplacement()),
    "sampled-chain": Levels((1, 1, 1), Independent()),
    "hybrid": Levels((2, 2), Hybrid()),
    "paths": Paths(3, 2),
}
REGIMES = {
    "one-batch": Regime(),
    "one-by-one": Regime(max_running=1),
    "starved": Regime(max_rows=24, num_pages=16),
}


def requests(temperature: float) -> list[Ask]:
    source = random.Random(7)
    return [
        Ask(
            tuple(source.randrange(V) for _ in range(source.randrange(1, 22))),
            SamplingParams(temperature=temperature, seed=100 + i, max_tokens=source.randrange(1, 26)),
        )
        for i in range(7)
    ]


@cache
def plain(temperature: float) -> list[list[int]]:
    return [
        generated(Harness(tiny_runner(), NoDrafter(), LAWS["match"]()).run([ask]))[0] for ask in requests(temperature)
    ]


def run(inner: Drafter, law: str, temperature: float, regime: Regime, costs: StepCosts = PER_ROW):
    target = tiny_runner(num_pages=regime.num_pages, page_size=regime.page_size)
    harness = InnerHarness(target, PrunedDrafter(inner, costs), LAWS[law](), regime)
    return harness, harness.run(requests(temperature))


def inner_model(grower: Grower, noise: float = 0.2, num_pages: int = 200) -> ModelDrafter:
    return ModelDrafter(tiny_runner(noise=noise, num_pages=num_pages), grower, max_rows=16)


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("grower", GROWERS)
def test_tokens_equal_plain_decoding(grower: str, temperature: float, regime: str) -> None:
    harness, answers = run(inner_model(GROWERS[grower]), "match", temperature, REGIMES[regime])
    assert generated(answers) == plain(temperature)
    assert sum(answer.accepted for answer in answers) > 0
    assert regime != "starved" or harness.engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("law", ["walk", "traversal", "layer-kseq"])
def test_other_laws_without_chance(law: str) -> None:
    grower = Paths(3, 2) if law == "layer-kseq" else GROWERS["without-replacement"]
    _, answers = run(inner_model(grower, num_pages=40), law, 0.0, REGIMES["one-batch"])
    assert generated(answers) == plain(0.0)


def test_ngrams_and_scripts_are_cut_too() -> None:
    bushy = ScriptedDrafter(lambda tokens: [[a, b] for a in range(V) for b in range(V)], 200)
    for inner in (NgramDrafter(nodes=8, longest=3, shortest=1, branches=3), bushy):
        _, answers = run(inner, "match", 1.0, REGIMES["starved"])
        assert generated(answers) == plain(1.0)


@pytest.mark.parametrize("grower", ["chain", "beam"])
def test_the_inner_cache_keeps_the_accepted_path(grower: str) -> None:
    """A draft that is the target itself is always right; it stays so only if its cache follows what was accepted."""
    seen: list[int] = []
    inner = inner_model(GROWERS[grower], noise=0.0)
    whole = inner.propose

    def propose(view: BatchView, budget: Budget, rng: Randomness) -> TokenTree:
        tree = whole(view, budget, rng)
        seen.append(tree.num_drafted)
        return tree

    inner.propose = propose
    _, answers = run(inner, "match", 0.0, REGIMES["one-batch"])
    assert generated(answers) == plain(0.0)
    drafted, accepted = sum(answer.drafted for answer in answers), sum(answer.accepted for answer in answers)
    assert drafted < sum(seen), "nothing was cut"
    assert accepted > 20
    if grower != "beam":
        assert accepted == drafted
