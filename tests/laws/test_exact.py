"""Criterion (1) to 1e-12 for every lossless law and every draw it does not refuse, through the shipped growers.

Trees that share the target's noise (`Coupled`) are not here: test_shared_noise.py has them with laws that draw, and
with `match` they give the very text of plain decoding (tests/engine/test_equals_plain_decoding.py).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import pytest
import torch

from draftwood.drafting import Grower
from draftwood.errors import DraftwoodError
from draftwood.growers import (
    Beam,
    Best,
    BestFirst,
    Greedy,
    Hybrid,
    Independent,
    Levels,
    Paths,
    StaticShape,
    WithoutReplacement,
    chain,
)
from draftwood.tree import Draw, TokenTree
from draftwood.verifiers import LAWS, NodeLaw, gbv
from enumeration import (
    Drafts,
    Enumerator,
    Grafted,
    Rows,
    TableModel,
    aligned_rows,
    assert_lossless,
    constant,
    dirichlet,
    drafts_of,
    emitted,
    law_distance,
    law_error,
    law_of,
    node_law,
    node_laws,
    padded_drafts_of,
    random_rows,
    round_law,
    target_rows,
    view_of,
)
from no_sync import no_looking
from trees import pruned, tree_of

SEEDS = 30


@dataclass(frozen=True)
class Case:
    grower: Grower
    vocabulary: int
    nodes: int = 100  # room for draft nodes: where it runs out, leaves lie at different depths

    def drafts(self, q: Rows) -> Drafts:
        return drafts_of(self.grower, q, self.nodes)

    def assert_lossless(self, law: str, pairs: Sequence[tuple[Rows, Rows]]) -> None:
        """And so where values may not be looked at: with the very same law of the round."""
        laws = node_laws(LAWS[law](), [(self.drafts(q), p) for p, q in pairs])
        for h, (p, _) in zip(laws, pairs, strict=True):
            assert_lossless(h, p, self.vocabulary)
        if law == "optimal":  # asks a solver on the host
            return
        padded = [(padded_drafts_of(self.grower, q, self.nodes), p) for p, q in pairs]
        for h, (p, _), looked in zip(node_laws(LAWS[law](), padded, blind=True), pairs, laws, strict=True):
            assert_lossless(h, p, self.vocabulary)
            assert law_distance(h, looked) <= 1e-13


TREES = {
    "chain": Case(chain(2), 3),
    "sampled-chain": Case(Levels((1, 1), Independent()), 3),
    "sampled-chain-of-three": Case(Levels((1, 1, 1), Independent()), 2),
    "without-replacement-chain": Case(Levels((1, 1), WithoutReplacement()), 3),
    "tail-chain": Case(Levels((1, 1), Hybrid()), 3),
    "iid": Case(Levels((2, 1), Independent()), 2),
    "iid-2-2": Case(Levels((2, 2), Independent()), 2),
    "iid-of-three": Case(Levels((3,), Independent()), 3),
    "iid-1-2": Case(Levels((1, 2), Independent()), 2),
    "iid-cut": Case(Levels((2, 2), Independent()), 2, nodes=3),
    "without-replacement": Case(Levels((2, 1), WithoutReplacement()), 3),
    "without-replacement-of-three": Case(Levels((3,), WithoutReplacement()), 4),
    "without-replacement-beyond-support": Case(Levels((3, 1), WithoutReplacement()), 2),
    "without-replacement-cut": Case(Levels((2, 2), WithoutReplacement()), 3, nodes=3),
    "greedy": Case(Greedy(3, 3), 3),
    "greedy-in-rounds": Case(Greedy(4, 2), 3),
    "greedy-beyond-support": Case(Greedy(4, 4), 2),
    "sequoia": Case(StaticShape(((0,), (1,), (0, 0)), WithoutReplacement()), 3),
    "hybrid": Case(Levels((2, 1), Hybrid()), 3),
    "hybrid-of-three": Case(Levels((3,), Hybrid()), 4),
    "hybrid-cut": Case(Levels((2, 2), Hybrid()), 3, nodes=4),
    "static": Case(StaticShape(((0,), (1,), (0, 0), (0, 1), (0, 0, 0))), 3),
    "beam": Case(Beam(nodes=4, width=2, depth=2), 3),
    "best-first": Case(BestFirst(nodes=4, width=1, forwards=3), 3),
    "path": Case(Paths(1, 2), 3),
    "paths": Case(Paths(2, 2), 2),
    "paths-of-three-tokens": Case(Paths(2, 2), 3),
    "three-paths": Case(Paths(3, 2), 2),
    "deep-paths": Case(Paths(2, 3), 2),
    "paths-cut": Case(Paths(2, 2), 2, nodes=3),
    "deep-paths-cut": Case(Paths(2, 3), 2, nodes=5),
    "three-paths-cut": Case(Paths(3, 2), 2, nodes=4),
    "delayed": Case(Paths(2, 1, trunk=1), 2),
    "delayed-paths": Case(Paths(2, 2, trunk=1), 2),
    "grafted-chain": Case(Grafted(Levels((1, 1), Independent()), Levels((2, 1), Best()), 5), 3),
    "grafted-iid": Case(Grafted(Levels((2, 1), Independent()), Levels((2, 1), Best()), 7), 3),
    "grafted-without-replacement": Case(Grafted(Levels((2, 1), WithoutReplacement()), Levels((2, 1), Best()), 6), 3),
    "grafted-hybrid": Case(Grafted(Levels((2, 1), Hybrid()), Levels((1, 2), Best()), 6), 3),
}
# Few draft trees, so that all draws of a round can be followed one by one.
SMALL = (
    "grafted-chain",
    "chain",
    "sampled-chain",
    "iid",
    "without-replacement-beyond-support",
    "hybrid-of-three",
    "hybrid-cut",
    "static",
    "beam",
    "best-first",
    "paths",
    "paths-cut",
    "delayed",
)
HUGE = ("without-replacement-cut", "paths-of-three-tokens")  # no use following every draw
LOSSLESS = [name for name in LAWS if LAWS[name]().lossless]
NODE_LAWS = [name for name in LOSSLESS if isinstance(LAWS[name](), NodeLaw)]
PAIRS = [(tree, law) for tree in TREES for law in LOSSLESS if LAWS[law]().refuses(TREES[tree].grower.law) is None]
QUICK_PAIRS = [(tree, law) for tree, law in PAIRS if law in NODE_LAWS and law != "optimal"]
OPTIMAL_TREES = [tree for tree, law in PAIRS if law == "optimal" and tree in SMALL]


@cache
def rows_of(seed: int, vocabulary: int) -> tuple[Rows, Rows]:
    """Target and draft: Dirichlet rows, spiky and flat, every third draft like its target."""
    p = random_rows(seed, vocabulary, (0.3, 1.0)[seed % 2])
    alike = aligned_rows(p, seed, vocabulary, 0.7)
    return p, alike if seed % 3 == 0 else random_rows(seed + 500, vocabulary, (1.0, 0.3)[seed // 2 % 2])


@cache
def adversarial(vocabulary: int) -> dict[str, tuple[Rows, Rows]]:
    mixed, other = random_rows(3, vocabulary), random_rows(4, vocabulary)
    first, last, half = [0.0] * vocabulary, [0.0] * vocabulary, [0.0] * vocabulary
    first[0], last[-1] = 1.0, 1.0
    half[: vocabulary // 2] = [1.0] * (vocabulary // 2)
    rest = [1 - x for x in half]
    most = [*[1.0] * (vocabulary - 1), 0.0]  # fewer tokens than some trees have siblings

    def punched(rows: Rows, hole: int) -> Rows:
        """`rows` without one token, another one at every depth."""
        return lambda v: constant(*(0.0 if t == (hole + len(v)) % vocabulary else x for t, x in enumerate(rows(v))))(v)

    return {
        "zeros in p": (constant(*half), mixed),
        "zeros in q": (mixed, constant(*rest)),
        "zeros in both": (punched(mixed, 0), punched(other, 1)),
        "the same zeros": (punched(mixed, 0), punched(other, 0)),
        "more siblings than tokens": (mixed, constant(*most)),
        "p equals q": (mixed, mixed),
        "disjoint": (constant(*half), constant(*rest)),
        "one-hot p": (constant(*last), mixed),
        "one-hot q": (mixed, constant(*first)),
        "both one-hot, equal": (constant(*first), constant(*first)),
        "both one-hot, different": (constant(*first), constant(*last)),
        "ties": (constant(*[1.0] * vocabulary), constant(*[1.0] * vocabulary)),
        "ties in p / q": (constant(*[2.0] * (vocabulary - 1), 1.0), constant(*[1.0] * (vocabulary - 1), 5.0)),
        "siblings nearly always alike": (mixed, constant(1.0, *[1e-6] * (vocabulary - 1))),
    }


@pytest.mark.parametrize(("tree", "law"), QUICK_PAIRS)
def test_random_rows(tree: str, law: str) -> None:
    """30 pairs of rows each, the odds of all their draft trees in one batch."""
    TREES[tree].assert_lossless(law, [rows_of(seed, TREES[tree].vocabulary) for seed in range(SEEDS)])


@pytest.mark.parametrize(("tree", "law"), QUICK_PAIRS)
def test_adversarial_rows(tree: str, law: str) -> None:
    TREES[tree].assert_lossless(law, list(adversarial(TREES[tree].vocabulary).values()))


@pytest.mark.parametrize("tree", OPTIMAL_TREES)
def test_the_optimal_law(tree: str) -> None:
    """A linear program a node: small trees, two random pairs of rows and some of the adversarial ones."""
    case = TREES[tree]
    hard = [adversarial(case.vocabulary)[name] for name in ("zeros in both", "p equals q", "one-hot q")]
    case.assert_lossless("optimal", [rows_of(1, case.vocabulary), rows_of(3, case.vocabulary), *hard])


@pytest.mark.parametrize(
    ("widths", "vocabulary", "seed"), [((2,), 3, 20), ((2,), 4, 20), ((2,), 4, 30), ((3,), 3, 2), ((3,), 3, 20)]
)
def test_the_optimal_law_where_tokens_are_rarer_than_a_solver_cares_for(
    widths: tuple[int, ...], vocabulary: int, seed: int
) -> None:
    """Chances of 1e-8 are below the tolerance of the linear program, not of the law."""
    p, q = random_rows(seed, vocabulary, 0.1), random_rows(seed + 500, vocabulary, 0.1)
    Case(Levels(widths, Independent()), vocabulary).assert_lossless("optimal", [(p, q)])


@pytest.mark.usefixtures("quick_bars")
@pytest.mark.parametrize(("tree", "law"), [(tree, law) for tree, law in PAIRS if tree in SMALL and law != "optimal"])
def test_every_draw_of_a_round_one_by_one(tree: str, law: str) -> None:
    """The shipped `verify` and its keys, two pairs of rows; for laws told by their odds also that both ways agree."""
    case, shipped = TREES[tree], LAWS[law]()
    for seed in (1, 3):
        p, q = rows_of(seed, case.vocabulary)
        h = round_law(case.grower, shipped, p, q, case.nodes)
        assert_lossless(h, p, case.vocabulary)
        if isinstance(shipped, NodeLaw):
            assert law_distance(h, node_law(shipped, case.drafts(q), p)) <= 1e-14


@pytest.mark.usefixtures("quick_bars")
@pytest.mark.parametrize(
    ("tree", "law"),
    [(tree, law) for tree, law in PAIRS if law == "match" and tree in SMALL]
    + [(tree, law) for tree, law in QUICK_PAIRS if tree in ("hybrid-of-three", "paths-cut")],
)
def test_draws_where_values_may_not_be_looked_at(tree: str, law: str) -> None:
    """On trees of one size: the very same law of the round."""
    case, shipped = TREES[tree], LAWS[law]()
    p, q = rows_of(1, case.vocabulary)
    blind = round_law(case.grower, shipped, p, q, case.nodes, blind=True)
    assert_lossless(blind, p, case.vocabulary)
    assert law_distance(blind, round_law(case.grower, shipped, p, q, case.nodes)) <= 1e-13


@pytest.mark.parametrize("tree", [tree for tree in TREES if tree not in SMALL + HUGE])
def test_match_on_larger_trees(tree: str) -> None:
    """It has no odds to ask, so every draw is followed: one pair of rows each, but not on the largest."""
    case = TREES[tree]
    p, q = rows_of(len(tree), case.vocabulary)
    assert_lossless(round_law(case.grower, LAWS["match"](), p, q, case.nodes), p, case.vocabulary)


@pytest.mark.parametrize("name", adversarial(3))
@pytest.mark.parametrize("law", ["match", "walk", "traversal", "layer-proportional"])
def test_adversarial_rows_one_by_one(name: str, law: str) -> None:
    p, q = adversarial(3)[name]
    assert_lossless(round_law(Levels((2,), WithoutReplacement()), LAWS[law](), p, q), p, 3)


@pytest.mark.parametrize(
    ("tree", "ranked"),
    [("paths-of-three-tokens", 1), ("paths-of-three-tokens", 2), ("three-paths", 1), ("delayed-paths", 1)],
)
def test_only_some_tokens_are_ranked_by_what_the_target_likes(
    tree: str, ranked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vocabulary has more tokens than `gbv` cares to sort; any fixed order will do."""
    monkeypatch.setattr(gbv, "RANKED", ranked)
    TREES[tree].assert_lossless("gbv", [rows_of(seed, TREES[tree].vocabulary) for seed in range(SEEDS)])


@pytest.mark.parametrize("law", LOSSLESS)
def test_no_guesses_at_all(law: str) -> None:
    p = random_rows(1, 3)
    tree = TokenTree.roots(torch.tensor([0]))
    h = law_of(lambda rng: emitted(tree, LAWS[law]().verify(tree, target_rows(tree, p), view_of(), rng)))
    assert_lossless(h, p, 3)


def test_the_optimal_law_says_where_it_cannot_run() -> None:
    tree = drafts_of(Levels((2,), Independent()), random_rows(2, 3)).tree
    with no_looking(), pytest.raises(DraftwoodError, match="runs on a CPU only"):
        LAWS["optimal"]().odds(tree, torch.full((tree.num_nodes, 3), 1 / 3))


@pytest.mark.parametrize("law", NODE_LAWS)
def test_no_room_for_guesses(law: str) -> None:
    p, q = rows_of(1, 3)
    for grower in (Levels((2, 1), Independent()), Paths(2, 2), Beam(nodes=4, width=2, depth=2)):
        drafts = drafts_of(grower, q, 0)
        assert drafts.tree.num_nodes == drafts.tree.num_trees
        assert_lossless(node_law(LAWS[law](), drafts, p), p, 3)


def mixed_siblings(laws: torch.Tensor) -> Drafts:
    """A tail draw, the chosen token 2 and an independent draw behind one root: all they can be."""
    every = list(itertools.product(range(4), repeat=2))
    trees = len(every)
    tree = tree_of(
        tokens=[token for tail, free in every for token in (0, tail, 2, free)],
        parents=[node for b in range(trees) for node in (-1, 4 * b, 4 * b, 4 * b)],
        offsets=range(0, 4 * trees + 1, 4),
        draw=[Draw.POINT, Draw.TAIL, Draw.POINT, Draw.IID] * trees,
        q_row=[-1, 1, -1, 0] * trees,
        q=laws,
    )
    chance = torch.tensor([float(laws[1, tail] * laws[0, free]) for tail, free in every], dtype=torch.float64)
    possible = chance > 0
    return Drafts(tree.take(possible.nonzero()[:, 0])[0], chance[possible], 4)


@pytest.mark.parametrize("law", ["walk", "naive", "traversal", "layer", "layer-proportional", "optimal"])
def test_any_mixture_of_independent_draws_under_one_parent_is_exact(law: str) -> None:
    """Each row is the law of its draw given the earlier ones, whatever kind they are of."""
    for seed in range(2 if law == "optimal" else SEEDS):
        p, rng = random_rows(seed, 4), random.Random(seed)
        laws = torch.tensor([dirichlet(rng, 4, 1.0), dirichlet(rng, 4, 1.0)], dtype=torch.float64)
        laws[1, 2] = 0
        laws[1] /= laws[1].sum()
        assert_lossless(node_law(LAWS[law](), mixed_siblings(laws), p), p, 4)


INDEPENDENT_DRAWS = (Levels((2,), Independent()), Paths(2, 1), Levels((3,), Independent()), Paths(3, 1))


@pytest.mark.parametrize(
    "law", ["naive", "walk", "rrs", "kseq", "traversal", "layer", "layer-proportional", "layer-kseq"]
)
def test_draws_that_are_merged_beside_draws_that_are_not(law: str) -> None:
    """Two drafters of one engine: of one, draws that agree are one node, of the other they are two."""
    for seed in range(6):
        p, q = random_rows(seed, 3), random_rows(100 + seed, 3)
        for drafts, blind in ((drafts_of, False), (padded_drafts_of, True)):
            for h in node_laws(LAWS[law](), [(drafts(grower, q), p) for grower in INDEPENDENT_DRAWS], blind=blind):
                assert_lossless(h, p, 3)


def test_an_edit_that_looked_at_drawn_tokens_is_exact_once_it_forgets_the_draws() -> None:
    """Drop every drawn token that the draft itself thought unlikely: biased with q kept, exact as point masses."""
    p, q = random_rows(4, 3), random_rows(5, 3)
    grower = Levels((2,), WithoutReplacement())
    errors = {}
    for judged in (True, False):

        def run(rng: Enumerator, judged: bool = judged) -> tuple[int, ...]:
            tree = grower.grow(TableModel(q), view_of(), 2, rng).tree.packed()[0]
            likely = torch.tensor([1.0, *(q(())[t] for t in tree.tokens[1:].tolist())]) > 0.3
            tree = pruned(tree, likely)
            tree = tree.forget_draws() if judged else tree
            return emitted(tree, LAWS["walk"]().verify(tree, target_rows(tree, p), view_of(), rng))

        errors[judged] = law_error(law_of(run), p, 3)
    assert errors[True] <= 1e-12
    assert errors[False] > 1e-3


def test_every_string_of_a_chain_is_reachable() -> None:
    """The enumerator itself: as many outcomes as there are, and their weights sum to one."""
    h = round_law(chain(1), LAWS["match"](), random_rows(0, 3), random_rows(1, 3))
    best = max(range(3), key=lambda t: random_rows(1, 3)(())[t])
    assert set(h) == {(t,) for t in range(3) if t != best} | set(itertools.product([best], range(3)))
    assert sum(h.values()) == pytest.approx(1, abs=1e-12)


# --- What is refused, and why.

KINDS: dict[str, Grower] = {
    "chosen chain": chain(2),
    "chosen tree": Beam(nodes=4, width=2, depth=2),
    "drawn chain": Levels((1, 1), Independent()),
    "independent": Levels((2, 2), Independent()),
    "unrepeated chain": Levels((1, 1), WithoutReplacement()),
    "unrepeated pair": Levels((2, 1), WithoutReplacement()),
    "unrepeated three": Levels((3,), WithoutReplacement()),
    "tail chain": Levels((1, 1), Hybrid()),
    "hybrid": Levels((2, 1), Hybrid()),
    "path": Paths(1, 2),
    "paths": Paths(2, 2),
    "delayed": Paths(2, 1, trunk=1),
}
CHAINS = {"chosen chain", "drawn chain", "unrepeated chain", "tail chain", "path"}
CHOSEN = {"chosen chain", "chosen tree"}
UNREPEATED = {"unrepeated chain", "unrepeated pair", "unrepeated three"}
FROM_THE_TAIL = {"tail chain", "hybrid"}
WHOLE_PATHS = {"path", "paths", "delayed"}
INDEPENDENT = {"drawn chain", "independent"} | WHOLE_PATHS
TAKES = {
    "match": set(KINDS),
    "coupled": set(KINDS),
    "token": CHAINS,
    "block": CHAINS,
    "naive": set(KINDS),
    "walk": set(KINDS),
    "rrs": INDEPENDENT,
    "rrsw": UNREPEATED,
    "kseq": INDEPENDENT,
    "hybrid": CHOSEN | FROM_THE_TAIL,
    "traversal": set(KINDS),
    "layer": set(KINDS),
    "layer-proportional": set(KINDS),
    "layer-kseq": INDEPENDENT,
    "gbv": WHOLE_PATHS,
    "optimal": set(KINDS) - UNREPEATED,
}


@pytest.mark.parametrize("law", LOSSLESS)
def test_what_a_law_is_not_made_for_it_refuses_in_a_sentence(law: str) -> None:
    for kind, grower in KINDS.items():
        answer = LAWS[law]().refuses(grower.law)
        assert (answer is None) == (kind in TAKES[law]), f"{law} on {kind}: {answer}"
        assert answer is None or len(answer.split()) > 4


@pytest.mark.parametrize(
    ("law", "grower", "vocabulary"),
    [
        ("kseq", Levels((2,), WithoutReplacement()), 3),
        ("kseq", Levels((2,), Hybrid()), 3),
        ("kseq", Beam(nodes=2, width=2, depth=1), 3),
        ("layer-kseq", Levels((2, 1), WithoutReplacement()), 3),
        ("layer-kseq", Levels((2,), Hybrid()), 3),
        ("gbv", Levels((2, 1), Independent()), 2),
        ("gbv", Levels((2,), Hybrid()), 3),
        ("gbv", Levels((2,), WithoutReplacement()), 3),
        ("block", Levels((2, 1), Independent()), 2),
        ("block", Beam(nodes=4, width=2, depth=2), 3),
        ("optimal", Levels((2,), WithoutReplacement()), 3),
    ],
)
def test_a_refusal_is_needed(law: str, grower: Grower, vocabulary: int) -> None:
    """Verified all the same, such trees give another law than the target's."""
    shipped = LAWS[law]()
    assert shipped.refuses(grower.law)
    pairs = [rows_of(seed, vocabulary) for seed in range(3 if law == "optimal" else 10)]
    assert max(law_error(node_law(shipped, drafts_of(grower, q), p), p, vocabulary) for p, q in pairs) > 1e-4
