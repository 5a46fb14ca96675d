"""Drafters that need no network, several of them in a batch, and predictions: what they propose, anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import pytest
import torch
from torch import Tensor

from draftwood.assembly import build_lookup
from draftwood.batch import ForwardBatch
from draftwood.drafters.branches import as_points, with_branches
from draftwood.drafters.by_request import OfferedDrafters
from draftwood.drafters.lookup import LookupDrafter
from draftwood.drafters.model import ModelDrafter
from draftwood.drafters.ngram import NgramDrafter
from draftwood.drafters.none import NoDrafter
from draftwood.drafters.points import PointDrafter, PointTree
from draftwood.drafters.predicted import PredictedDrafter
from draftwood.drafters.scripted import ScriptedDrafter
from draftwood.drafting import Proposal, Silent
from draftwood.growers import Beam, Independent, Levels, WithoutReplacement
from draftwood.joining import choose, join
from draftwood.links import HostLinks
from draftwood.protocols import PREDICTED, BatchView, Features, HostView, Span, StepMode
from draftwood.request import SamplingParams
from draftwood.rng import KeyedRng
from draftwood.shape import TreeShape
from draftwood.tree import POINT_TREE, DraftLaw, Draw, TokenTree, Verdict
from enumeration import TableModel, view_of
from no_sync import looking, no_looking
from tiny import tiny_runner
from trees import padded, tree_of

Paths = set[tuple[int, ...]]


def host_view(texts: Sequence[Sequence[int]], nodes: int = 100, depth: int = 100, **others) -> HostView:
    count = len(texts)
    return HostView(
        seq_ids=tuple(range(count)),
        tokens=texts,
        prompt_lengths=(1,) * count,
        params=others.pop("params", (SamplingParams(),) * count),
        max_nodes=(nodes,) * count,
        max_depth=(depth,) * count,
        **others,
    )


def batch_view(texts: Sequence[Sequence[int]], nodes: int = 100, depth: int = 100, **others) -> BatchView:
    longest = max(map(len, texts))
    each = torch.tensor([len(text) for text in texts])
    return replace(
        view_of(nodes=nodes, depth=depth, sequences=len(texts)),
        lengths=each,
        roots=torch.tensor([text[-1] for text in texts]),
        history=torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts]),
        **others,
    )


def paths_of(tree: TokenTree, b: int | None = None) -> Paths:
    """Ways from below the root, of all trees or of one."""
    nodes = [i for i in range(tree.num_nodes) if tree.tokens[i] >= 0 and b in (None, int(tree.owner[i]))]
    ways = []
    for node in nodes:
        way: list[int] = []
        while tree.parents[node] >= 0:
            way.insert(0, int(tree.tokens[node]))
            node = int(tree.parents[node])
        ways.append(tuple(way))
    assert len(set(ways)) == len(ways), "a node is there twice"
    return {way for way in ways if way}


def agree_with_parents(tree: TokenTree) -> None:
    """All that a shape says follows from the parents of the nodes that are there."""
    tree.validate()
    packed, _ = tree.packed()
    links = HostLinks()
    for start, end in zip(packed.offsets[:-1].tolist(), packed.offsets[1:].tolist(), strict=True):
        above = [parent - start if parent >= 0 else -1 for parent in packed.parents[start:end].tolist()]
        links.add_tree(packed.tokens[start:end].tolist(), above)
    assert packed.depth.tolist() == links.depth
    assert packed.local.tolist() == links.local
    width = len(links.words()[0])
    assert packed.shape.ancestors[:, :width].tolist() == links.words()
    assert [{n for n in row if n >= 0} for row in packed.tries.tolist()] == [set(row) for row in links.children]
    there = tree.tokens >= 0
    local = tree.local
    for node in there.nonzero()[:, 0].tolist():
        bits, at = 0, node
        while tree.parents[at] >= 0:
            bits, at = bits | 1 << int(local[at] - 1), int(tree.parents[at])
        words = [word & (1 << 64) - 1 for word in tree.shape.ancestors[node].tolist()]
        assert sum(word << 64 * i for i, word in enumerate(words)) == bits


def proposed(drafter, texts, count: int, size: int | None = None, blind: bool = False, **limits) -> TokenTree:
    """What it proposes where the host may look, or in a step of `size` sequences where it may not."""
    size = size or len(texts)
    drafter.prepare(host_view(texts, **limits), size, count)
    view = batch_view([*texts, *[[0]] * (size - len(texts))], **limits)
    if not blind:
        return drafter.propose(view, count, KeyedRng()).packed().tree
    drafter.propose(replace(view, may_look=False), count, KeyedRng())  # as before a capture
    drafter.prepare(host_view(texts, **limits), size, count)
    with no_looking():
        tree = drafter.propose(replace(view, may_look=False), count, KeyedRng()).tree
    assert tree.sizes.tolist() == [1 + count] * size
    agree_with_parents(tree)
    return tree


def proposal(drafter, tokens: list[int], nodes: int = 100, depth: int = 100, budget: int = 100) -> Paths:
    budget = min(budget, drafter.max_nodes)
    tree = proposed(drafter, [tokens], budget, nodes=nodes, depth=depth)
    tree.validate()
    assert paths_of(tree) == paths_of(proposed(drafter, [tokens], budget, 1, True, nodes=nodes, depth=depth))
    return paths_of(tree)


def leaves(paths: Paths) -> Paths:
    return {p for p in paths if not any(q[: len(p)] == p and q != p for q in paths)}


@pytest.mark.parametrize("kind", [NgramDrafter, LookupDrafter])
def test_longest_match_first(kind) -> None:
    text = [1, 2, 3, 7, 0, 2, 3, 8, 0, 1, 2, 3]
    assert leaves(proposal(kind(nodes=2, longest=3), text)) == {(7, 0)}, "1 2 3 beats the later 2 3"
    assert leaves(proposal(kind(nodes=2, longest=2), text)) == {(8, 0)}, "of equals the most recent"


def test_several_continuations_make_a_tree() -> None:
    text = [1, 2, 5, 6, 1, 2, 5, 7, 1, 2, 9, 9, 1, 2]
    drafter = NgramDrafter(nodes=6, longest=2, shortest=2, branches=2)
    assert leaves(proposal(drafter, text)) == {(9, 9, 1, 2)} or (5, 7) in proposal(drafter, text)
    assert {p[0] for p in proposal(drafter, text)} <= {9, 5}


@pytest.mark.parametrize("kind", [NgramDrafter, LookupDrafter])
def test_no_match_no_guess(kind) -> None:
    assert proposal(kind(), [1, 2, 3, 4, 5]) == set()
    assert proposal(kind(), [1]) == set()


def test_lookup_keeps_up_with_a_growing_text() -> None:
    drafter = NgramDrafter(nodes=3, longest=2, shortest=2)
    text = [4, 5, 6]
    assert proposal(drafter, text) == set()
    text += [1, 4, 5]
    assert leaves(proposal(drafter, text)) == {(6, 1, 4)}
    drafter.release(0)
    assert drafter._indices == {}


@pytest.mark.parametrize("kind", [NgramDrafter, LookupDrafter])
def test_limits_of_a_point_tree(kind) -> None:
    assert leaves(proposal(kind(nodes=9, longest=1, shortest=1), [1, 2, 3, 1], nodes=2)) == {(2, 3)}
    assert leaves(proposal(kind(nodes=9, longest=1, shortest=1), [1, 2, 3, 1], depth=1)) == {(2,)}
    assert proposal(kind(nodes=9, longest=1, shortest=1), [1, 2, 3, 1], budget=0) == set()
    tree = PointTree(root=0, max_nodes=3, max_depth=2)
    tree.add_path([1, 2, 3])
    tree.add_path([1, 4])
    tree.add_path([5])
    assert (tree.tokens, tree.parents) == ([0, 1, 2, 4], [-1, 0, 1, 1])


def test_where_rows_are_run_anyhow_the_last_token_is_reason_enough() -> None:
    lone = [1, 2, 3, 1]
    assert proposal(NgramDrafter(), lone) == set(), "a row of its own would have to be paid for"
    assert leaves(proposal(LookupDrafter(), lone)) == {(2, 3, 1)}
    kinds = (NgramDrafter, LookupDrafter)
    assert [[kind(**own).shortest for kind in kinds] for own in ({}, {"longest": 1})] == [[2, 1], [1, 1]]
    assert [kind(shortest=3).shortest for kind in kinds] == [3, 3]


def test_rows_cost_a_gpu_little_so_more_is_looked_up_there() -> None:
    usual = {device: build_lookup("ngram", torch.device(device)).max_nodes for device in ("cpu", "cuda")}
    assert usual == {"cpu": 4, "cuda": 15}
    assert build_lookup("ngram:longest=3", torch.device("cuda")).max_nodes == 15, "other settings leave it alone"


def test_a_gpu_looks_up_one_branch_itself() -> None:
    made = [build_lookup(f"ngram:branches={n}", torch.device(on)) for n in (1, 2) for on in ("cpu", "cuda")]
    assert [type(drafter) for drafter in made] == [NgramDrafter, LookupDrafter, NgramDrafter, NgramDrafter]
    assert [drafter.waits for drafter in made] == [True, False, True, True]


IMPOSSIBLE = [{"shortest": -1}, {"longest": 0}, {"shortest": 3, "longest": 2}, {"nodes": 0}, {"branches": 0}]


@pytest.mark.parametrize("settings", IMPOSSIBLE)
def test_impossible_settings_are_refused(settings: dict) -> None:
    with pytest.raises(ValueError, match="n-gram drafter needs"):
        NgramDrafter(**settings)
    if "branches" not in settings:
        with pytest.raises(ValueError, match="n-gram drafter needs"):
            LookupDrafter(**settings)


def test_a_script_may_branch() -> None:
    drafter = ScriptedDrafter(lambda tokens: [[1, 2], [1, 3]], 9)
    assert proposal(drafter, [0]) == {(1,), (1, 2), (1, 3)}
    drafter.release(0)


def test_a_point_drafter_must_say_something() -> None:
    drafter = PointDrafter()
    drafter.max_nodes = 1
    with pytest.raises(NotImplementedError):
        proposal(drafter, [0])


def test_a_frame_holds_many_trees_and_bare_roots_where_there_are_none() -> None:
    """More nodes than a word has bits, and fewer sequences than the step has room for."""
    drafter = ScriptedDrafter(lambda tokens: [[i, *range(tokens[-1])] for i in range(7)], 80)
    texts = [[1, 9], [1], [1, 3]]
    seen, blind = proposed(drafter, texts, 80), proposed(drafter, texts, 80, size=5, blind=True)
    assert [paths_of(blind, b) for b in range(5)] == [*(paths_of(seen, b) for b in range(3)), set(), set()]
    assert blind.tokens.view(5, 81)[:, 0].tolist() == [9, 1, 3, 0, 0]


def test_a_frame_is_empty_once_its_drafter_fails() -> None:
    paths = [[1, 2]]
    drafter = ScriptedDrafter(lambda tokens: paths, 3)
    assert paths_of(proposed(drafter, [[0]], 3, blind=True)) == {(1,), (1, 2)}
    drafter.script = lambda tokens: [[], *paths[5]]  # type: ignore[assignment]
    with pytest.raises(IndexError):
        drafter.prepare(host_view([[0]]), 1, 3)
    view = replace(batch_view([[0]]), may_look=False)
    assert paths_of(drafter.propose(view, 3, KeyedRng()).tree) == set()
    assert paths_of(drafter.propose(replace(view, may_look=True), 3, KeyedRng()).tree) == set()


def test_trees_of_a_step_that_was_not_prepared_are_bare() -> None:
    drafter = ScriptedDrafter(lambda tokens: [[1, 2]], 3)
    drafter.prepare(host_view([[0]]), 1, 3)
    assert drafter.propose(batch_view([[0], [0]]), 3, KeyedRng()).tree.num_drafted == 0
    assert paths_of(drafter.propose(replace(batch_view([[0]]), may_look=False), 2, KeyedRng()).tree) == set()


# Several batches as one.


def some_trees() -> list[TokenTree]:
    """Of two, one and three sequences; drawn, chosen, and drawn with repeats."""
    q = torch.rand(3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    drawn = tree_of([1, 2, 3, 4, 0], [-1, 0, 0, -1, 3], [0, 3, 5], q_row=[-1, 0, 0, -1, 1], q=q[:2])
    chosen = tree_of([2, 3, 4, 1], [-1, 0, 1, 0], [0, 4])
    twice = tree_of([3, 2, 0, 1], [-1, 0, -1, -1], [0, 2, 3, 4], q_row=[-1, 0, -1, -1], q=q[2:], drawn=[0, 1, 1, 2, 3])
    return [drawn, chosen, twice]


def same_tree(one: TokenTree, other: TokenTree) -> None:
    """Two batches of one tree."""
    assert one.tokens.tolist() == other.tokens.tolist()
    for name in ("parents", "depth", "local"):
        assert getattr(one, name).tolist() == getattr(other, name).tolist(), name
    assert [[n for n in row if n >= 0] for row in one.tries.tolist()] == [
        [n for n in row if n >= 0] for row in other.tries.tolist()
    ]
    assert one.shape.ancestors[:, 0].tolist() == other.shape.ancestors[:, 0].tolist()
    assert one.draw.tolist() == other.draw.tolist()
    for mine, theirs in zip(one.q_row.tolist(), other.q_row.tolist(), strict=True):
        assert (mine < 0) == (theirs < 0)
        if mine >= 0:
            assert one.q is not None
            assert other.q is not None
            assert torch.equal(one.q[mine], other.q[theirs])


def test_joined_batches_are_taken_apart_again() -> None:
    trees, places = some_trees(), [torch.tensor(own) for own in ([1, 4], [0], [2, 3, 5])]
    with no_looking():
        whole, maps = join(trees, places)
    whole.validate()
    assert whole.shape.repeats
    assert whole.offsets.diff().tolist() == [4, 3, 2, 1, 2, 1]
    for tree, own, nodes in zip(trees, places, maps, strict=True):
        again, taken = whole.take(own)
        for b in range(tree.num_trees):
            one = torch.tensor([b])
            same_tree(again.take(one)[0], tree.take(one)[0])
        assert taken.whole.tolist() == nodes.whole.tolist()
        assert nodes.part[nodes.whole].tolist() == list(range(tree.num_nodes))
        assert int((nodes.part >= 0).sum()) == tree.num_nodes


def test_chosen_trees_are_those_of_their_batches() -> None:
    """Trees of one size each, absent nodes among them; the largest decides."""
    drawn, chosen, twice = some_trees()
    four = torch.tensor([0, 1, 0, 1])
    batches = [
        padded(join([drawn, drawn], [four[:2] * 2, four[:2] * 2 + 1])[0], 4)[0],
        padded(join([chosen] * 4, [torch.tensor([b]) for b in range(4)])[0], 6)[0],
        TokenTree.roots(torch.tensor([1, 2, 3, 4])),
        padded(join([twice, chosen], [torch.tensor([0, 1, 2]), torch.tensor([3])])[0], 5)[0],
    ]
    which = torch.tensor([0, 1, 2, 3])
    with no_looking():
        tree, source = choose(batches, which)
    assert tree.sizes.tolist() == [6] * 4
    for b, number in enumerate(which.tolist()):
        one = torch.tensor([b])
        same_tree(tree.take(one)[0].packed()[0], batches[number].take(one)[0].packed()[0])
        mine = (tree.owner == b) & (source >= 0)
        assert tree.tokens[mine].tolist() == batches[number].tokens[source[mine]].tolist()
    assert (tree.tokens[source < 0] < 0).all()
    assert torch.equal(tree.parents[source < 0], (source < 0).nonzero()[:, 0])


# Branches.


def chain_tree(tokens: Sequence[Sequence[int]]) -> TokenTree:
    return TokenTree.of_points([(list(path), list(range(-1, len(path) - 1))) for path in tokens])


BRANCHES = {
    "nothing shared": ([(0, 1, 2)], [(5, 6)], [{(1,), (1, 2), (5,), (5, 6)}]),
    "shared beginning": ([(0, 1, 2)], [(1, 6)], [{(1,), (1, 2), (1, 6)}]),
    "all shared": ([(0, 1, 2)], [(1, 2)], [{(1,), (1, 2)}]),
    "goes on": ([(0, 1)], [(1, 2, 3)], [{(1,), (1, 2), (1, 2, 3)}]),
    "bare": ([(0,)], [(1, 2)], [{(1,), (1, 2)}]),
    "no branch": ([(0, 1)], [(-1, -1)], [{(1,)}]),
    "mixed": (
        [(0, 1, 2), (0,), (0, 4)],
        [(1, 3, -1), (-1, -1, -1), (4, 4, 4)],
        [{(1,), (1, 2), (1, 3)}, set(), {(4,), (4, 4), (4, 4, 4)}],
    ),
}


@pytest.mark.parametrize("name", BRANCHES)
@pytest.mark.parametrize("size", [None, 5])
def test_a_branch_joins_its_tree_where_they_agree(name: str, size: int | None) -> None:
    own, paths, wanted = BRANCHES[name]
    tree = chain_tree(own)
    if size is not None:
        tree = padded(tree, size, seed=3)[0]
        tree = replace(tree, shape=replace(tree.shape, ancestors=ancestors_of(tree)))
    table = torch.tensor(paths)
    with no_looking():
        whole = with_branches(Proposal(tree), table)
    agree_with_parents(whole.tree)
    assert [paths_of(whole.tree, b) for b in range(len(own))] == wanted
    assert whole.columns is not None
    for node in range(whole.tree.num_nodes):
        b, column = int(whole.tree.owner[node]), int(whole.columns[node])
        if column:
            first = int(tree.offsets[b])
            assert whole.tree.tokens[node] == tree.tokens[first + column]


def ancestors_of(tree: TokenTree) -> Tensor:
    """The words of trees of fewer than 64 nodes, from their parents."""
    words = []
    for node in range(tree.num_nodes):
        bits = 0
        while tree.parents[node] >= 0 and int(tree.parents[node]) != node:
            bits, node = bits | 1 << int(tree.local[node] - 1), int(tree.parents[node])
        words.append([bits])
    return torch.tensor(words)


@pytest.mark.parametrize("picker", [Independent(), WithoutReplacement()])
def test_only_trees_with_predictions_forget_their_draws(picker) -> None:
    view = replace(view_of(sequences=3), max_nodes=None, max_depth=None, may_look=False)
    grower = Levels((3, 2), picker)
    tree = grower.grow(TableModel(lambda prefix: (0.5, 0.3, 0.2)), view, grower.max_nodes, KeyedRng()).tree
    which = torch.tensor([False, True, False])
    with no_looking():
        points = as_points(tree, which, may_repeat=Draw.IID in grower.law.draws)
    points.validate()
    for b in range(3):
        one, own = (whole.take(torch.tensor([b]))[0] for whole in (points, tree))
        if not which[b]:
            same_tree(one, own)
            continue
        assert (one.draw == int(Draw.POINT)).all()
        assert (one.q_row == -1).all()
        assert paths_of(one) <= {
            tuple(int(own.tokens[n]) for n in path[1:] if n >= 0)
            for path in own.paths.tolist()
            if own.tokens[path[0]] >= 0
        }


# Predictions.


def expected_view(texts, predictions, **limits) -> HostView:
    return host_view(texts, predictions=tuple(tuple(p) for p in predictions), **limits)


def predicted_tree(drafter, texts, predictions, count: int, blind: bool, **limits) -> TokenTree:
    view = replace(batch_view(texts, **limits), mode=StepMode(predicted=True, limited=True))
    host = expected_view(texts, predictions, **limits)
    assert view.max_nodes is not None
    own = torch.tensor([PREDICTED * bool(path) for path in predictions])
    view = replace(view, max_nodes=(view.max_nodes - own).clamp(min=0))
    if not blind:
        drafter.prepare(host, len(texts), count)
        return drafter.propose(view, count, KeyedRng()).packed().tree
    view = replace(view, may_look=False)
    drafter.propose(view, count, KeyedRng())  # as before a capture
    drafter.prepare(host, len(texts), count)
    with no_looking():
        tree = drafter.propose(view, count, KeyedRng()).tree
        again = drafter.propose(view, count, KeyedRng()).tree
    assert tree.sizes.tolist() == [1 + count + PREDICTED] * len(texts)
    agree_with_parents(tree)
    if not drafter.drafter.waits:
        assert int((again.tokens >= 0).sum()) == len(texts), "a prediction is for one step"
    return tree


@pytest.mark.parametrize("blind", [False, True])
def test_a_prediction_is_a_branch_from_where_the_answer_is(blind: bool) -> None:
    drafter = PredictedDrafter(ScriptedDrafter(lambda tokens: [[1, 2], [7]], 3))
    texts, predictions = [[0, 5], [0, 5], [0]], [(5, 1, 3, 4), (), (7, 7)]
    tree = predicted_tree(drafter, texts, predictions, 3, blind)
    own = {(1,), (1, 2), (7,)}
    assert [paths_of(tree, b) for b in range(3)] == [own | {(1, 3), (1, 3, 4)}, own, own | {(7, 7)}]


@pytest.mark.parametrize("blind", [False, True])
@pytest.mark.parametrize(("room", "branch", "own"), [(PREDICTED + 2, 9, 2), (PREDICTED, 9, 0), (5, 5, 0)])
def test_predictions_have_room_of_their_own(blind: bool, room: int, branch: int, own: int) -> None:
    drafter = PredictedDrafter(ScriptedDrafter(lambda tokens: [[1, 2, 3]], 3))
    tree = predicted_tree(drafter, [[0]], [tuple(range(5, 14))], 3, blind, nodes=room)
    found = paths_of(tree)
    fits = min(branch, 8)  # tokens at first
    assert len(leaves({p for p in found if p[0] == 5})) == 1
    assert max(len(p) for p in found if p[0] == 5) == fits
    assert max((len(p) for p in found if p[0] == 1), default=0) == own


@cache
def chain_shape(size: int, nodes: int) -> TreeShape:
    with looking():
        return chain_tree([range(nodes + 1)] * size).shape.known()


@dataclass
class Recorder(Silent):
    """Proposes a chain of one token of its own, and writes down what it is told."""

    token: int
    max_nodes: int = 2
    needs: frozenset[int] = frozenset({1})
    reads: bool = True
    law: DraftLaw = POINT_TREE
    asked: list[BatchView] = field(default_factory=list)
    told: list[tuple[Proposal, Verdict, Features]] = field(default_factory=list)
    read: list[ForwardBatch] = field(default_factory=list)

    @property
    def sizes(self) -> range:
        return range(self.max_nodes + 1)

    def depth(self, nodes: int) -> int:
        return nodes

    def propose(self, view: BatchView, nodes: int, rng) -> Proposal:
        self.asked.append(view)
        shape = chain_shape(view.size, nodes)
        tokens = torch.full((view.size, nodes + 1), self.token)
        tokens[:, 0] = view.roots
        return Proposal(TokenTree.chosen(tokens.view(-1), shape)).limited(view)

    def ingest(self, batch, features: Features | None) -> None:
        self.read.append(batch)

    def commit(self, view: BatchView, proposal: Proposal, verdict: Verdict, features: Features) -> None:
        self.told.append((proposal, verdict, features))


def accepted(tree: TokenTree, paths: Sequence[Sequence[int]]) -> Verdict:
    """A verdict that keeps these tokens."""
    rows = []
    for b, path in enumerate(paths):
        nodes = [int(tree.offsets[b])]
        for token in path:
            children = [n for n in tree.tries[nodes[-1]].tolist() if n >= 0]
            nodes.append(next(n for n in children if tree.tokens[n] == token))
        rows.append(nodes + [-1] * (tree.max_depth + 1 - len(nodes)))
    return Verdict(torch.tensor(rows), torch.tensor([len(path) for path in paths]), torch.zeros(len(paths)).long())


def features_of(tree: TokenTree) -> Features:
    return {1: torch.arange(tree.num_nodes)[:, None].double(), 2: torch.zeros(tree.num_nodes, 1)}


@pytest.mark.parametrize("blind", [False, True])
def test_the_inner_drafter_hears_of_its_own_nodes_and_reads_the_branch(blind: bool) -> None:
    inner = Recorder(token=3)
    drafter = PredictedDrafter(inner)
    drafter.attach(tiny_runner())
    texts = [[0, 1], [0, 2, 2], [0, 4]]
    view = replace(batch_view(texts), mode=StepMode(predicted=True, limited=True), may_look=not blind)
    host = expected_view(texts, [(1, 3, 7, 8, 9), (), ()])
    drafter.prepare(host, 3, 2)
    proposal = drafter.propose(view, 2, KeyedRng())
    proposal = proposal if blind else proposal.packed()
    verdict = accepted(proposal.tree, [(3, 7, 8), (3, 3), ()])
    with no_looking() if blind else torch.inference_mode():
        drafter.commit(view, proposal, verdict, features_of(proposal.tree))
    (told, heard, features), reading = inner.told[0], inner.read
    columns = told.columns_of(heard.path)
    assert columns[:, :4].tolist() == [[0, 1, 0, 0], [0, 1, 2, 0], [0, 0, 0, 0]]
    assert features[1][heard.path[0, :4]].view(-1).tolist() == heard.path[0, :4].tolist(), "in the tree's order"
    (rows,) = reading
    tokens, positions = rows.tokens.tolist(), rows.positions.tolist()
    count = len(tokens) // (3 if blind else 1)
    assert (tokens[:3], positions[:3]) == ([3, 7, 8], [2, 3, 4])
    assert count == (proposal.tree.max_depth if blind else 3)
    drafter.commit(
        replace(view, mode=StepMode()), Proposal.bare(view), accepted(TokenTree.roots(view.roots), [()] * 3), {}
    )
    assert len(reading) == 1


# Several drafters.


def offered(**others) -> OfferedDrafters:
    drafters = OfferedDrafters(Recorder(token=3), others)
    drafters.attach(tiny_runner())
    return drafters


def asked_view(texts, names, mode_names, **others) -> tuple[HostView, BatchView]:
    numbers = torch.tensor([mode_names.index(name) for name in names])
    mode = StepMode(drafters=tuple(mode_names), limited=True, predicted=others.pop("predicted", False))
    view = replace(batch_view(texts), mode=mode, drafter=numbers if len(mode_names) > 1 else None)
    return host_view(texts, drafters=tuple(names), **others), view


TEXTS = [[0, 1], [0, 2], [0, 5], [0, 6, 6]]
NAMES = [None, "host", "other", "default"]


@pytest.mark.parametrize("blind", [False, True])
def test_each_sequence_gets_the_tree_of_its_own_drafter(blind: bool) -> None:
    host_drafter = ScriptedDrafter(lambda tokens: [[tokens[-1], 8], [9]], 4)
    drafters = offered(host=host_drafter, other=Recorder(token=7, max_nodes=1))
    drafters.others["default"] = drafters.default
    host, view = asked_view(TEXTS, NAMES, [None, "default", "host", "other"])
    view = replace(view, may_look=not blind)
    drafters.propose(view, 4, KeyedRng())  # as before a capture
    drafters.prepare(host, 4, 4)
    with no_looking() if blind else torch.inference_mode():
        proposal = drafters.propose(view, 4, KeyedRng())
    tree = proposal.tree
    agree_with_parents(tree)
    assert [paths_of(tree, b) for b in range(4)] == [
        {(3,), (3, 3)}, {(2,), (2, 8), (9,)}, {(7,)}, {(3,), (3, 3)},
    ]  # fmt: skip
    assert tree.num_nodes == (20 if blind else 12)
    default: Recorder = drafters.default  # type: ignore[assignment]
    assert default.asked[-1].size == (4 if blind else 2)


@pytest.mark.parametrize("blind", [False, True])
def test_each_drafter_hears_of_its_own_nodes_and_keeps_features_of_all(blind: bool) -> None:
    other, blind_one = Recorder(token=7, max_nodes=1), Recorder(token=8, needs=frozenset())
    idle, careless = Recorder(token=2, needs=frozenset({2})), Recorder(token=2, needs=frozenset())
    drafters = offered(other=other, blind=blind_one, idle=idle, careless=careless)
    host, view = asked_view(TEXTS, [None, "other", "blind", "other"], [None, "blind", "other"])
    view = replace(view, may_look=not blind)
    drafters.prepare(host, 4, 2)
    proposal = drafters.propose(view, 2, KeyedRng())
    tree = proposal.tree
    verdict = accepted(tree, [(3, 3), (7,), (8, 8), ()])
    with no_looking() if blind else torch.inference_mode():
        drafters.commit(view, proposal, verdict, features_of(tree))
    path = verdict.path
    wanted = {
        3: [[0, 1, 2], [0, 0, 0], [0, 0, 0], [0, 0, 0]],
        7: [[0, 0, 0], [0, 1, 0], [0, 0, 0], [0, 0, 0]],
        8: [[0, 0, 0], [0, 0, 0], [0, 1, 2], [0, 0, 0]],
    }
    default: Recorder = drafters.default  # type: ignore[assignment]
    for drafter in (default, other, blind_one):
        ((told, heard, features),) = drafter.told
        assert told.columns_of(heard.path).tolist() == wanted[drafter.token]
        assert set(features) == drafter.needs
        if drafter.needs:
            assert features[1][path[1, :2]].view(-1).tolist() == path[1, :2].tolist()
    ((told, _, features),) = idle.told
    assert told.columns_of(path).tolist() == [[0] * path.shape[1]] * 4
    assert set(features) == {2}
    assert careless.told == []


def test_texts_go_to_all_that_keep_something_of_them() -> None:
    both, features_only = Recorder(token=1), Recorder(token=2, reads=False)
    reader, neither = Recorder(token=4, needs=frozenset()), Recorder(token=5, needs=frozenset(), reads=False)
    drafters = offered(both=both, features=features_only, reader=reader, neither=neither)
    batch = tiny_runner()
    batch.cache.tables.open(0, ())
    batch.cache.tables.reserve(0, 3)
    rows = batch.cache.stage_text([Span(0, [1, 2, 3], 0, 3)])
    drafters.ingest(rows, {1: torch.zeros(3, 1)})
    assert [len(d.read) for d in (both, features_only, reader, neither)] == [1, 1, 1, 0]
    drafters.ingest(rows, None)
    assert [len(d.read) for d in (both, features_only, reader, neither)] == [2, 1, 2, 0]


@pytest.mark.parametrize("blind", [False, True])
def test_predictions_reach_the_drafter_of_their_request(blind: bool) -> None:
    """As the engine offers them: each drafter with predictions of its own."""
    one, other = (PredictedDrafter(ScriptedDrafter(lambda _, token=token: [[token] * 2], 2)) for token in (3, 4))
    drafters = OfferedDrafters(one, {"other": other, "none": PredictedDrafter(NoDrafter())})
    drafters.attach(tiny_runner())
    names = [None, "other", "none", "other"]
    host, view = asked_view(
        TEXTS, names, [None, "none", "other"], predicted=True, predictions=((1, 9), (2, 4, 8), (5, 6), ())
    )
    view = replace(view, may_look=not blind)
    drafters.propose(view, 2, KeyedRng())
    drafters.prepare(host, 4, 2)
    with no_looking() if blind else torch.inference_mode():
        tree = drafters.propose(view, 2, KeyedRng()).tree
    agree_with_parents(tree)
    assert [paths_of(tree, b) for b in range(4)] == [
        {(3,), (3, 3), (9,)}, {(4,), (4, 4), (4, 8)}, {(6,)}, {(4,), (4, 4)},
    ]  # fmt: skip


def test_sizes_are_those_of_all_and_each_proposes_its_own_next_smaller_one() -> None:
    drafters = offered(none=NoDrafter(), many=ScriptedDrafter(lambda tokens: [[1] * 9], 7))
    assert list(drafters.sizes) == list(range(8))
    assert (drafters.max_nodes, drafters.depth(7), drafters.depth(1)) == (7, 7, 1)
    assert drafters.propose(replace(batch_view([[0]]), may_look=False), 7, KeyedRng()).tree.num_drafted == 2


@pytest.mark.parametrize("picker", [Independent(), WithoutReplacement()])
def test_trees_are_bare_where_it_is_not_known_who_expects_what(picker) -> None:
    """A step captured with predictions, and not prepared: some laws take no chosen tokens, others no draws."""
    grower = Levels((2, 1), picker)

    class Sampling(Recorder):
        def propose(self, view: BatchView, nodes: int, rng) -> Proposal:
            with looking():  # growers have tests of their own
                return grower.grow(TableModel(lambda prefix: (0.5, 0.3, 0.2)), view, nodes, rng)

    drafter = PredictedDrafter(Sampling(token=0, max_nodes=4))
    view = replace(batch_view([[0], [0]]), mode=StepMode(predicted=True), may_look=False)
    drafter.propose(view, 4, KeyedRng())
    with no_looking():
        unknown = drafter.propose(view, 4, KeyedRng()).tree
    assert [paths_of(unknown, b) for b in range(2)] == [set(), set()]
    drafter.prepare(host_view([[0], [0]]), 2, 4)
    assert int((drafter.propose(view, 4, KeyedRng()).tree.q_row >= 0).sum()) > 0, "no request expects anything"


def test_rows_are_shared_only_where_no_drafter_draws() -> None:
    """Whether a drawn node is scored must not depend on draws, so such trees are not selected from."""
    points, drawn = (
        ModelDrafter(tiny_runner(), Beam(4, 2, 2)),
        ModelDrafter(tiny_runner(), Levels((2,), WithoutReplacement())),
    )
    assert OfferedDrafters(points, {"none": NoDrafter()}).surplus == points.surplus > 1
    assert OfferedDrafters(points, {"drawn": drawn}).surplus == 1
