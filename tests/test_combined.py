"""Several drafters in one tree: on the host and on the device, by what was measured, with and without draws."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from draftwood.assembly import build_lookup, is_lookup
from draftwood.drafters.calibration import MEMORY
from draftwood.drafters.combined import CombinedDrafter
from draftwood.drafters.ngram import NgramDrafter
from draftwood.drafters.suffix import SuffixDrafter
from draftwood.drafting import Drafter, Proposal, Silent
from draftwood.engine.trace import members_told
from draftwood.errors import InvalidRequest
from draftwood.faults import GuardedDrafter
from draftwood.growers import Best, Independent, Levels, Paths, WithoutReplacement
from draftwood.protocols import BatchView, Features, Randomness
from draftwood.rng import KeyedRng
from draftwood.tree import POINT_TREE, DraftLaw, Draw, TokenTree, Verdict
from draftwood.verifiers import LAWS
from enumeration import TableModel, random_rows
from no_sync import no_looking
from test_host_drafters import agree_with_parents, batch_view, host_view, paths_of
from tiny import tiny_runner

V = 13
Chances = Mapping[tuple[int, ...], float]


@dataclass
class Told(Silent):
    """Proposes the paths it is told to, one batch of them for all sequences, with chances or without."""

    paths: Sequence[Chances]
    law: DraftLaw = POINT_TREE
    max_nodes: int = 9
    scores: bool = True
    committed: list[Tensor] = field(default_factory=list)

    @property
    def sizes(self) -> range:
        return range(self.max_nodes + 1)

    def depth(self, nodes: int) -> int:
        return 4

    def propose(self, view: BatchView, nodes: int, rng: Randomness) -> Proposal:
        trees, survival = [], []
        for root, paths in zip(view.roots.tolist(), self.paths, strict=True):
            ways = sorted(paths, key=len)[:nodes]
            trees.append(
                ([root, *(way[-1] for way in ways)], [-1, *((ways.index(w[:-1]) + 1 if w[1:] else 0) for w in ways)])
            )
            survival += [1.0, *(paths[way] for way in ways)]
        tree = TokenTree.of_points(trees)
        return Proposal(tree, None, torch.tensor(survival, dtype=torch.float64) if self.scores else None)

    def commit(self, view: BatchView, proposal: Proposal, verdict: Verdict, features: Features) -> None:
        self.committed.append(proposal.columns_of(verdict.path))


@dataclass
class Growing(Silent):
    """Grows trees from a table."""

    grower: object
    seed: int = 3

    @property
    def law(self) -> DraftLaw:
        return self.grower.law

    @property
    def max_nodes(self) -> int:
        return self.grower.max_nodes

    @property
    def sizes(self) -> Sequence[int]:
        return self.grower.sizes

    def depth(self, nodes: int) -> int:
        return self.grower.depth_of(nodes)

    def propose(self, view: BatchView, nodes: int, rng: Randomness) -> Proposal:
        return self.grower.grow(TableModel(random_rows(self.seed, V)), view, nodes, rng)


def combined(*sources: Drafter, nodes: int = 9, least: float = 0.0) -> CombinedDrafter:
    made = CombinedDrafter(sources, nodes, least)
    made.attach(tiny_runner())
    return made


def said(drafter: CombinedDrafter, view: BatchView, proposal: Proposal, texts: Sequence[Sequence[int]]) -> None:
    drafter.commit(view, proposal, follow(proposal, texts), {})


def follow(proposal: Proposal, texts: Sequence[Sequence[int]]) -> Verdict:
    """The target went on with these tokens, as far as they are in the trees."""
    tree, paths, lengths = proposal.tree, [], []
    for b, text in enumerate(texts):
        path = [int(tree.offsets[b])]
        for token in text[:-1]:
            path += [n for n in tree.tries[path[-1]].tolist() if n >= 0 and int(tree.tokens[n]) == token][:1]
        paths.append(path)
        lengths.append(len(path) - 1)
    deepest = max(tree.max_depth, *lengths)
    path = torch.tensor([[*own, *[-1] * (1 + deepest - len(own))] for own in paths])
    bonus = torch.tensor([text[n] for text, n in zip(texts, lengths, strict=True)])
    return Verdict(path, torch.tensor(lengths), bonus)


def tree_of(proposal: Proposal, b: int = 0) -> dict[tuple[int, ...], float]:
    """Each path's chance."""
    tree, found = proposal.packed().tree, {}
    survival = proposal.packed().survival
    for node in range(tree.num_nodes):
        if int(tree.owner[node]) == b and tree.depth[node] > 0:
            way = tree.paths[node, 1:]
            found[tuple(tree.tokens[way[way >= 0]].tolist())] = float(survival[node])
    return found


BLIND = pytest.mark.parametrize("blind", [False, True])


def propose(drafter: CombinedDrafter, view: BatchView, nodes: int, blind: bool) -> Proposal:
    view = replace(view, may_look=not blind)
    made = drafter.propose(view, nodes, KeyedRng())
    agree_with_parents(made.tree)
    return made


def one(count: int = 1) -> BatchView:
    return batch_view([[0]] * count)


@BLIND
def test_sources_are_merged_by_path_and_agreement_makes_likelier(blind: bool) -> None:
    first = Told([{(1,): 0.5, (1, 2): 0.25, (1, 2, 3): 0.125}])
    second = Told([{(1,): 0.5, (1, 2): 0.25, (1, 2, 4): 0.125}])
    third = Told([{(5,): 0.25}])
    made = propose(combined(first, second, third), one(), 9, blind)
    want = {(1,): 0.75, (1, 2): 0.75**2, (1, 2, 3): 0.75**2 / 2, (1, 2, 4): 0.75**2 / 2, (5,): 0.25}
    assert tree_of(made) == pytest.approx(want)
    small = propose(combined(first, second, third), one(), 3, blind)
    assert set(tree_of(small)) == {(1,), (1, 2), (1, 2, 3)}
    assert set(tree_of(propose(combined(first, second, third, least=0.5), one(), 9, blind))) == {(1,), (1, 2)}


@BLIND
def test_siblings_are_never_more_than_certain(blind: bool) -> None:
    made = propose(combined(Told([{(1,): 0.9}]), Told([{(2,): 0.6}])), one(), 9, blind)
    assert tree_of(made) == pytest.approx({(1,): 0.6, (2,): 0.4})


@BLIND
def test_each_source_hears_where_it_keeps_the_nodes_of_the_path(blind: bool) -> None:
    first, second = Told([{(1,): 0.5, (3,): 0.4, (3, 4): 0.3}]), Told([{(3,): 0.5, (3, 5): 0.3, (6,): 0.1}])
    drafter = combined(first, second)
    view = replace(one(), may_look=not blind)
    made = propose(drafter, view, 9, blind)
    assert bool(made.members[(made.tree.tokens >= 0) & (made.tree.depth > 0)].any(1).all()), "known to one of them"
    said(drafter, view, made, [[3, 5, 9]])
    assert first.committed[0][0, :3].tolist() == [0, 2, 0]
    assert second.committed[0][0, :3].tolist() == [0, 1, 3]


@BLIND
def test_nodes_count_for_all_that_propose_them(blind: bool) -> None:
    first, second = Told([{(1,): 0.5, (3,): 0.4, (3, 4): 0.3}, {}]), Told([{(3,): 0.5, (3, 5): 0.3}, {(6,): 0.4}])
    made = propose(combined(first, second), one(2), 9, blind)
    verdict = follow(made, [[3, 5, 9], [7]])
    assert members_told(made, verdict).tolist() == [[3, 2, 0, 0, 1, 2, 0, 0], [0, 1, 0, 0, 0, 0, 0, 0]]
    assert members_told(Proposal(made.tree), verdict).sum() == 0, "a drafter of its own"


@BLIND
def test_a_source_that_is_wrong_loses_its_place(blind: bool) -> None:
    drafter = combined(Told([{(2,): 0.9, (2, 2): 0.81}]), Told([{(1,): 0.5, (1, 1): 0.25}]), nodes=1)
    view = replace(one(), may_look=not blind)
    assert set(tree_of(propose(drafter, view, 1, blind))) == {(2,)}
    for _ in range(20):
        said(drafter, view, propose(drafter, view, 1, blind), [[1, 1, 0]])
    made = tree_of(propose(drafter, view, 1, blind))
    assert set(made) == {(1,)}
    assert made[1,] > 0.8, "what it says is measured, whether its nodes are in trees or not"


@BLIND
def test_what_agreement_is_worth_is_measured(blind: bool) -> None:
    """Two sources that say the same always know no more than one."""
    drafter, view = combined(Told([{(1,): 0.5}]), Told([{(1,): 0.5}])), replace(one(), may_look=not blind)
    for i in range(400):
        said(drafter, view, propose(drafter, view, 9, blind), [[1 + i % 2, 0]])
    assert tree_of(propose(drafter, view, 9, blind))[1,] == pytest.approx(0.5, abs=0.05)
    assert float(drafter._calibration.counts.max()) <= MEMORY + 1


@BLIND
def test_sources_without_chances_and_sequences_that_only_fill_the_batch_up(blind: bool) -> None:
    paths = [{(1,): 0.5}, {(1,): 0.5}]
    drafter = combined(Told(paths, scores=False), Told(paths, scores=False))
    view = replace(one(2), may_look=not blind, salts=torch.tensor([0, -1]))
    made = propose(drafter, view, 9, blind)
    assert tree_of(made) == pytest.approx({(1,): 0.75})
    said(drafter, view, made, [[1, 0], [2, 0]])
    if blind:  # where the host may look there are no such sequences
        assert float(drafter._calibration.counts[1, :-1].sum()) == 3, "two sources and their agreement, once"


def random_paths(rng: random.Random, count: int) -> Chances:
    paths: dict[tuple[int, ...], float] = {(): 1.0}
    while len(paths) <= count:
        above = rng.choice(list(paths))
        if len(above) < 4:
            paths[*above, rng.randrange(3)] = paths[above] * rng.choice((0.2, 0.5, 0.9))
    del paths[()]
    return paths


def test_host_and_device_say_the_same_and_nothing_is_looked_at() -> None:
    rng = random.Random(1)
    sides = [combined(Told([]), Told([], scores=False), Told([]), nodes=7) for _ in range(2)]
    view = replace(one(3), history=torch.zeros(5, 1, dtype=torch.int64), rows=torch.tensor([3, 0, 4]))
    for step in range(40):
        paths = [[random_paths(rng, rng.randrange(6)) for _ in range(3)] for _ in range(3)]
        text = [[rng.randrange(3) for _ in range(5)] for _ in range(3)]
        limited = replace(view, max_nodes=torch.tensor([7, 2, 7])) if step % 3 == 0 else view
        trees = []
        for blind, drafter in enumerate(sides):
            for source, own in zip(drafter.sources, paths, strict=True):
                source.paths = own
            here = replace(limited, may_look=not blind)
            made = propose(drafter, here, 7, bool(blind))
            trees.append([tree_of(made, b) for b in range(3)])
            said(drafter, here, made, text)
        for b in range(3):
            assert trees[0][b] == pytest.approx(trees[1][b])
    both = [side._calibration.counts[:, :-1] for side in sides]
    assert torch.equal(*both)
    assert float(both[0][1].sum()) > 100


class Ready(Told):
    """Has grown its trees already."""

    def propose(self, view: BatchView, nodes: int, rng: Randomness) -> Proposal:
        return self.paths[0]


def test_nothing_is_looked_at() -> None:
    here = replace(one(3), may_look=False)
    growers = Levels((2, 1), Independent()), Levels((2, 2), WithoutReplacement()), Levels((2, 2), Best())
    made = [Growing(grower).propose(here, grower.max_nodes, KeyedRng()) for grower in growers]
    laws = [grower.law for grower in growers]
    drafter = combined(*(Ready([own], law) for own, law in zip(made, laws, strict=True)))
    drafter.propose(here, 9, KeyedRng())
    with no_looking():
        made = drafter.propose(here, 9, KeyedRng())
        path = made.tree.offsets[:-1, None].expand(-1, 3).contiguous()
        drafter.commit(here, made, Verdict(path, here.lengths * 0, here.roots), {})
    assert float(drafter._calibration.counts[1, :-1].sum()) > 0


@BLIND
def test_the_draws_of_one_source_stand_as_they_were_drawn(blind: bool) -> None:
    drawn, points = Growing(Levels((2, 1), Independent())), Told([{(1,): 0.9, (1, 2): 0.8, (7,): 0.5}])
    drafter = combined(points, drawn)
    assert drafter.law == DraftLaw(frozenset({Draw.IID, Draw.POINT}), chain=False, grafted=True)
    assert drafter.sources[0] is drawn
    alone = drawn.propose(one(), 4, KeyedRng())
    whole = propose(drafter, replace(one(), min_accept_prob=0.9), 6, blind).packed().tree
    assert whole.tokens[1:5].tolist() == alone.tree.tokens[1:].tolist()
    assert whole.draw[:5].tolist() == alone.tree.draw.tolist()
    assert torch.equal(whole.q[whole.q_row[1:5]], alone.tree.q[alone.tree.q_row[1:5]])
    assert whole.draw[5:].tolist() == [Draw.POINT] * (whole.num_nodes - 5)


@BLIND
def test_draws_that_cannot_be_kept_are_chosen_tokens(blind: bool) -> None:
    """Those of a second source that draws, and of paths."""
    second = combined(Growing(Levels((1, 1), Independent())), Growing(Levels((2, 1), Independent()), 5))
    tree = propose(second, one(), 9, blind).packed().tree
    assert (tree.draw > 0).sum() == 2
    merged = combined(Told([{(1,): 0.5}]), Growing(Paths(2, 2)))
    assert merged.law == POINT_TREE
    assert propose(merged, one(), 9, blind).tree.q is None


class Failing(Told):
    def propose(self, view: BatchView, nodes: int, rng: Randomness) -> Proposal:
        raise ArithmeticError("broken")


@pytest.mark.usefixtures("drafters_may_fail")
def test_a_source_that_fails_costs_its_own_nodes() -> None:
    drafter = combined(Failing([{}]), Told([{(1,): 0.5}]))
    for _ in range(4):
        assert set(tree_of(propose(drafter, one(), 9, False))) == {(1,)}
    assert [health.disabled for health in drafter.health_of_members] == [True, False]
    whole = GuardedDrafter(drafter, "combined")
    assert [health.disabled for health in whole.health] == [False, True, False]
    with patch("draftwood.drafters.combined.graft_on_host", side_effect=ArithmeticError("broken")):
        for _ in range(3):
            assert whole.propose(one(), 9, KeyedRng()).tree.num_drafted == 0, "what merges them is guarded too"
    assert [health.disabled for health in whole.health] == [True, True, False]


def test_what_is_kept_of_requests_is_dropped_when_they_end() -> None:
    suffix, ngram = SuffixDrafter(nodes=6), NgramDrafter()
    drafter = combined(suffix, ngram, nodes=6)
    for seq_id in range(5):
        view = replace(host_view([[1, 2, 3, 1, 2]]), seq_ids=(seq_id,))
        drafter.prepare(view, 1, 6)
        assert (3,) in paths_of(propose(drafter, batch_view([[1, 2, 3, 1, 2]]), 6, False).tree)
        drafter.release(seq_id)
    assert (suffix._readings, ngram._indices) == ({}, {})


def test_default_laws_are_exact_for_their_mixtures() -> None:
    """What `auto` takes is not refused."""
    from draftwood.verifiers import default_law

    for picker in (Independent(), WithoutReplacement()):
        law = combined(Growing(Levels((2,), picker)), Told([{}])).law
        assert LAWS[default_law(law)]().refuses(law) is None
        assert "combined trees" in (LAWS["optimal"]().refuses(law) or "")


def test_names_with_settings() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert is_lookup("combined:ngram+suffix,nodes=8")
    assert not is_lookup("combined:eagle3+suffix")
    for spec in ("combined:ngram+suffix,nodes=8", "combined:sources=ngram+suffix,nodes=8"):
        made = build_lookup(spec, cpu)
        assert [type(source) for source in made.sources] == [NgramDrafter, SuffixDrafter]
        assert made.max_nodes == 8
    assert build_lookup("combined", gpu).max_nodes == build_lookup("suffix", gpu).max_nodes == 15
    assert build_lookup("suffix:least=0.5,shared=0", cpu).least == 0.5
    for spec in (
        "combined:suffix",
        "combined:suffix+suffix",
        "suffix:nodes=0",
        "suffix:4",
        "combined:ngram+suffix,x=1",
    ):
        with pytest.raises(InvalidRequest):
            build_lookup(spec, cpu)


def test_a_combination_needs_several() -> None:
    one_alone = NgramDrafter()
    for sources in ([], [one_alone], [one_alone, one_alone], [NgramDrafter() for _ in range(5)]):
        with pytest.raises(ValueError, match="at least two"):
            CombinedDrafter(sources)
    with pytest.raises(ValueError, match="at least one node"):
        CombinedDrafter([one_alone, NgramDrafter()], 0)
