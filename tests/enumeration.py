"""Enumerating sources of randomness, and the exact criterion of losslessness.

`law_of(run)` replays `run(rng)` through every outcome of its draws, depth first, so the shipped control flow itself is
what is measured: `round_law` is the law of one round, grower and `verify` included. `node_law` is the quick way for
laws that are told by their odds: all draft trees the grower can draw stand side by side in one batch (`drafts_of`), the
odds are asked once, and the two draws of `NodeLaw.verify` are added up. `assert_lossless` checks criterion (1): with
h(s) the probability that a round emits the string s, the sum over the prefixes s of y of h(s) p(y | s) is p(y), for
every string y one longer than the tree. All of it also `blind`: on trees of one size, absent nodes included, without a
look at values (`no_sync.py`), as where a step is captured.

`Enumerator` refuses a key that was used before, by a pick or by a race: a pick's number is the noise of token 0 in a
race with the same key. `SharedNoise` computes what such draws do together instead, and `shared_law` is the law of a
round under it: trees that race with the target's noise (`Coupled`), verified by a law that picks.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from types import SimpleNamespace

import torch
from torch import Tensor

from draftwood.cache.kv import Places
from draftwood.drafters.calibration import Calibration
from draftwood.drafters.cascade import CascadeDrafter
from draftwood.drafters.graft import Candidates, Rated
from draftwood.drafters.remote_protocol import Draft, Guess
from draftwood.drafters.remote_sampler import RowsFrame
from draftwood.drafting import Front, FrontierModel, Grower, Proposal, Silent, State
from draftwood.growers import Levels, StaticShape, WithoutReplacement
from draftwood.protocols import BatchView, Randomness, Verifier
from draftwood.tree import DraftLaw, Draw, TokenTree
from draftwood.verifiers import NodeLaw, Odds
from draftwood.wire import packer, unpacker
from no_sync import looking, no_looking
from trees import gained, pack

Row = tuple[float, ...]
Prefix = tuple[int, ...]
Rows = Callable[[Prefix], Row]  # prefix -> distribution of the next token
Law = dict[Prefix, float]  # string -> probability that a round emits it

MOST_TREES = 5000  # in one batch


@dataclass
class Enumerator:
    """Follows a script of choices and writes down where it could have gone instead."""

    script: list[int]
    options: list[int] = field(default_factory=list)  # outcomes there were at each choice
    weight: float = 1.0
    used: set[int] = field(default_factory=set)

    def _choose(self, weights: Sequence[float], key: int) -> int:
        possible = [i for i, w in enumerate(weights) if w > 0]
        if len(possible) < 2:
            return possible[0] if possible else 0
        assert key not in self.used, "two draws share a key: they would not be independent"
        self.used.add(key)
        at = len(self.options)
        if at == len(self.script):
            self.script.append(0)
        self.options.append(len(possible))
        chosen = possible[self.script[at]]
        self.weight *= weights[chosen] / sum(weights)
        return chosen

    def pick(self, weights: Tensor, keys: Tensor) -> Tensor:
        with looking():
            _check_weights(weights)
            rows = weights.clamp(min=0).tolist()
            chosen = [self._choose(w, k) for w, k in zip(rows, keys.tolist(), strict=True)]
            return torch.tensor(chosen, dtype=torch.int64)

    def race(self, weights: Tensor, keys: Tensor, winners: int = 1) -> Tensor:
        """A race ends like draws without replacement; its first place uses the key itself."""
        left, places = weights.clone(), []
        for place in range(winners):
            places.append(self.pick(left, keys * 1000 + place if place else keys))
            left = left.scatter(1, places[-1][:, None], 0.0)
        return torch.stack(places, 1)


Powers = list[tuple[float, float]]  # (c, a): the sum of c u^a


@dataclass(frozen=True)
class Uniform:
    """What the draws so far have told of one uniform number u: a density between two borders."""

    density: Powers = field(default_factory=lambda: [(1.0, 0.0)])
    low: float = 0.0
    high: float = 1.0

    @property
    def mass(self) -> float:
        return sum(c / (a + 1) * (self.high ** (a + 1) - self.low ** (a + 1)) for c, a in self.density)

    def between(self, low: float, high: float) -> Uniform | None:
        low, high = max(low, self.low), min(high, self.high)
        return Uniform(self.density, low, high) if low < high else None

    def times(self, powers: Powers) -> Uniform:
        product = [(c * d, a + b) for c, a in self.density for d, b in powers]
        return Uniform(product, self.low, self.high)


@dataclass
class SharedNoise(Enumerator):
    """Draws of one key are functions of one random variable: the joint law of picks and a race, in closed form.

    A pick looks where u lies on the cumulated weights. A race gives token i the time E_i / w_i with E_0 = -log u, so
    the others, which run at the rates w_i, are all slower than token 0 with probability u^(their rates / w_0).
    """

    known: dict[int, Uniform] = field(default_factory=dict)
    raced: dict[int, tuple[list[float], list[int]]] = field(default_factory=dict)  # by key: weights and places

    def _choose(self, weights: Sequence[float], key: int) -> int:
        borders = [0.0, *itertools.accumulate(w / sum(weights) for w in weights)]
        borders[-1] = 1.0
        number = self.known.get(key, Uniform())
        return self._branch(key, [number.between(*cell) for cell in itertools.pairwise(borders)])

    def _branch(self, key: int, outcomes: Sequence[Uniform | None]) -> int:
        """Take one of the outcomes, each told by what u is known to be after it."""
        chances = [0.0 if outcome is None else outcome.mass for outcome in outcomes]
        now = self.known.get(key, Uniform()).mass
        assert abs(sum(chances) - now) <= 1e-12, "the outcomes of a draw are not all there is"
        chosen = self._free([chance if chance > 1e-15 else 0.0 for chance in chances])
        outcome = outcomes[chosen]
        assert outcome is not None
        self.known[key] = outcome
        return chosen

    def _free(self, weights: Sequence[float]) -> int:
        """A choice that nothing else depends on."""
        return super()._choose(weights, -1 - len(self.options))

    def race(self, weights: Tensor, keys: Tensor, winners: int = 1) -> Tensor:
        with looking():
            rows = [self._run(w, k, winners) for w, k in zip(weights.tolist(), keys.tolist(), strict=True)]
            return torch.tensor(rows, dtype=torch.int64)

    def _run(self, weights: list[float], key: int, winners: int) -> list[int]:
        if key in self.raced:
            same, places = self.raced[key]
            assert (same, len(places)) == (weights, winners), "two different races share a key: that is not modelled"
            return places
        assert sum(w > 0 for w in weights) >= winners, "fewer runners than winners"
        places = self._until_token_0(weights, key, winners) if weights[0] > 0 else []
        while len(places) < winners:
            places.append(self._free([0.0 if i in places else w for i, w in enumerate(weights)]))
        self.raced[key] = (weights, places)
        return places

    def _until_token_0(self, weights: list[float], key: int, winners: int) -> list[int]:
        """The places up to that of token 0, or all of them if it comes later."""
        before = self.known.get(key, Uniform())
        rates, product, running, places = [sum(weights[1:])], 1.0, [(1.0, 0.0)], []
        while len(places) < winners:
            arrives = [
                (product / math.prod(other - rate for other in rates if other != rate), rate / weights[0])
                for rate in rates
            ]
            passed = [*running, *((-c, a) for c, a in arrives)]  # one more token is faster than token 0
            outcomes: list[Uniform | None] = [before.times(arrives)]
            for i, w in enumerate(weights[1:], 1):
                runs = w > 0 and i not in places
                outcomes.append(before.times([(c * w / rates[-1], a) for c, a in passed]) if runs else None)
            places.append(self._branch(key, outcomes))
            if places[-1] == 0:
                break
            w = weights[places[-1]]
            running, product = [(c * w / rates[-1], a) for c, a in passed], product * w
            rates.append(sum(x for i, x in enumerate(weights) if i and i not in places))
        return places


def _check_weights(weights: Tensor) -> None:
    assert bool((weights >= -1e-15).all()), "a weight is negative"
    assert bool(torch.isfinite(weights).all()), "a weight is not a number"


def outcomes_of(
    run: Callable[[Enumerator], Hashable], used: Collection[int] = (), source: type[Enumerator] = Enumerator
) -> list[tuple[Hashable, Enumerator]]:
    """What `run` returns for every outcome of its draws, and the source each came from; `used` keys are taken."""
    outcomes: list[tuple[Hashable, Enumerator]] = []
    script: list[int] = []
    while True:
        rng = source(script, used=set(used))
        outcomes.append((run(rng), rng))
        script = rng.script[: len(rng.options)]
        while script and script[-1] + 1 == rng.options[len(script) - 1]:
            script.pop()
        if not script:
            return outcomes
        script[-1] += 1


def law_of(
    run: Callable[[Enumerator], Hashable], used: Collection[int] = (), source: type[Enumerator] = Enumerator
) -> dict[Hashable, float]:
    """The exact law of what `run` returns."""
    law: dict[Hashable, float] = defaultdict(float)
    for outcome, rng in outcomes_of(run, used, source):
        law[outcome] += rng.weight
    return dict(law)


def view_of(
    temperature: float = 1.0, nodes: int = 100, depth: int = 100, root: int = 0, sequences: int = 1
) -> BatchView:
    """`sequences` requests that differ in nothing but number and seed."""
    each = torch.ones(sequences, dtype=torch.int64)
    return BatchView(
        lengths=each,
        seeds=torch.arange(7, 7 + sequences),
        roots=each * root,
        temperature=each * torch.tensor(temperature),
        rows=torch.arange(sequences),
        history=torch.full((sequences, 1), root),
        block_table=each[:, None] * 0,
        max_nodes=each * nodes,
        max_depth=each * depth,
        may_look=True,
    )


@dataclass(frozen=True)
class TableModel:
    """A drafter's network as a table: the logits are the logarithms of its rows."""

    rows: Rows

    def begin(self, view: BatchView) -> tuple[Tensor, State]:
        return self._logits([()]).expand(view.size, 1, -1), ()

    def extend(self, view: BatchView, front: Front, state: State) -> tuple[Tensor, State]:
        ways = zip(front.path.flatten(0, 1).tolist(), front.depth.flatten().tolist(), strict=True)
        return self._logits([tuple(path[:depth]) for path, depth in ways]).view(*front.tokens.shape, -1), ()

    def vocabulary(self, level: int | None) -> None:
        return None

    def _logits(self, prefixes: list[Prefix]) -> Tensor:
        return torch.tensor([self.rows(prefix) for prefix in prefixes], dtype=torch.float64).log()


@dataclass(frozen=True)
class Grafted:
    """A grower's draws with the likeliest nodes of another beside and behind them: which ones depends on the draws."""

    drawn: Levels
    chosen: Levels
    max_nodes: int
    judged: bool = False  # as nothing may: by what was drawn

    @property
    def law(self) -> DraftLaw:
        return DraftLaw(self.drawn.law.draws | {Draw.POINT}, chain=False, grafted=True)

    def grow(self, model: FrontierModel, view: BatchView, nodes: int, rng: Randomness) -> Proposal:
        other = TableModel(random_rows(77, len(model.rows(()))))
        made = [self.drawn.grow(model, view, self.drawn.max_nodes, rng)]
        made.append(self.chosen.grow(other, view, self.chosen.max_nodes, rng))
        candidates = Candidates.of(made)
        if self.judged:
            candidates = replace(candidates, source=candidates.source + 1)
        rated = Rated.of(candidates, Calibration(6), 3)
        return rated.taken(view, nodes, 0.0, made[0].tree.q)


@dataclass(frozen=True)
class FromAfar:
    """What a drafter elsewhere draws from rows of `entries` tokens, over the wire, and what is drawn here beside it."""

    places: int
    entries: int
    width: int = 1

    @property
    def shape(self) -> StaticShape:
        nodes = tuple((0,) * place + (rank,) for place in range(self.places) for rank in range(self.width))
        return StaticShape(nodes, WithoutReplacement())

    @property
    def law(self) -> DraftLaw:
        return self.shape.law

    @property
    def max_nodes(self) -> int:
        return self.shape.max_nodes

    def grow(self, model: TableModel, view: BatchView, nodes: int, rng: Randomness) -> Proposal:
        vocabulary, paths = len(model.rows(())), [[] for _ in range(view.size)]
        for place in range(self.places):
            rows = [self._row(model.rows(tuple(guess.tokens[0] for guess in path))) for path in paths]
            q = torch.zeros(view.size, vocabulary, dtype=torch.float64)
            for own, row in zip(q, rows, strict=True):
                own[[token for token, _ in row]] = torch.tensor(
                    [weight for _, weight in row], dtype=torch.float64
                ).softmax(0)
            for path, row, token in zip(paths, rows, rng.pick(q, view.seeds * 1000 + place).tolist(), strict=True):
                path.append(Guess((token,), row))
        drafts = [json.dumps(packer(Draft)(Draft(0, 1, 1, tuple(path), False))) for path in paths]
        frame = RowsFrame(view.size, self.places, self.entries, vocabulary, torch.empty(0, dtype=torch.float64))
        frame.fill([unpacker(Draft)(json.loads(draft)).guesses for draft in drafts])
        return replace(self.shape, picker=frame).grow(frame, view, nodes, rng)

    def _row(self, q: Row) -> tuple[tuple[int, float], ...]:
        best = sorted(range(len(q)), key=lambda token: -q[token])[: self.entries]
        return tuple((token, math.log(q[token])) for token in best if q[token])


@dataclass
class TableMiddle:
    """The same as a cascade's middle: rows are told by the columns on the way to them."""

    table: FrontierModel
    tokens: Tensor | None = None  # [B, 64] by column

    reads, needs = False, frozenset()
    runner = SimpleNamespace(cache=SimpleNamespace(page_size=1000, scratch_page=-1))

    def begin_with(self, view: BatchView, tokens: Tensor, places: Places, room: int) -> tuple[Tensor, State]:
        self.tokens = torch.zeros(view.size, 64, dtype=torch.int64)
        first, state = self.table.begin(view)
        return torch.cat([first, self._rows(tokens, places)], 1), state

    def extend(self, view: BatchView, front: Front, state: State) -> tuple[Tensor, State]:
        return self._rows(front.tokens, front.places), state

    def _rows(self, tokens: Tensor, places: Places) -> Tensor:
        assert self.tokens is not None
        assert places.ancestors is not None
        self.tokens.scatter_(1, places.index, tokens)
        words = places.ancestors.view(*tokens.shape, -1)[..., 0].tolist()
        ways = [
            tuple(own[column] for column in range(64) if word >> column & 1)
            for own, row in zip(self.tokens.tolist(), words, strict=True)
            for word in row
        ]
        return self.table._logits(ways).view(*tokens.shape, -1)


class Guesses(Silent):
    """An inner drafter: a token and its twin, each with one more behind it, by the last token alone."""

    law, max_nodes, sizes = DraftLaw(frozenset({Draw.POINT}), chain=False), 3, range(4)

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary

    def propose(self, view: BatchView, nodes: int, rng: Randomness) -> Proposal:
        trees = [([t, (t + 1) % self.vocabulary, t, t], [-1, 0, 0, 1]) for t in view.roots.tolist()]
        return Proposal(TokenTree.of_points([(tokens[: 1 + nodes], above[: 1 + nodes]) for tokens, above in trees]))


@dataclass(frozen=True)
class Cascaded:
    """Chains that a cascade draws."""

    max_nodes: int
    rounds: int
    ahead: int
    leaves_out: int = -1  # as nothing may: chains that end in this token are a token shorter

    law = DraftLaw(frozenset({Draw.IID}), chain=True, grown=True)

    def grow(self, model: FrontierModel, view: BatchView, nodes: int, rng: Randomness) -> Proposal:
        inner = Guesses(len(model.rows(())))  # type: ignore[attr-defined]
        cascade = CascadeDrafter(inner, TableMiddle(model), nodes, self.rounds, self.ahead, drawn=True)  # type: ignore[arg-type]
        view = replace(view, may_look=False)
        made = cascade._said(view, nodes, self.rounds, inner.propose(view, self.ahead, rng), rng)[0]
        if self.leaves_out < 0:
            return made
        last = (made.tree.tries < 0).all(1) & (made.tree.tokens == self.leaves_out)
        return replace(made, tree=made.tree.without(last))


def prefixes_of(tree: TokenTree) -> list[Prefix]:
    """The tokens on the way to each node, the root's own left out; none to an absent one. [M]."""
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    prefixes: list[Prefix] = []
    for token, parent in zip(tokens, parents, strict=True):
        prefixes.append((*prefixes[parent], token) if parent >= 0 and token >= 0 else ())
    return prefixes


def target_rows(tree: TokenTree, p: Rows) -> Tensor:
    return torch.tensor([p(prefix) for prefix in prefixes_of(tree)], dtype=torch.float64)


def emitted(tree: TokenTree, verdict) -> Prefix:
    return tuple(gained(tree, verdict)[0])


@dataclass
class Scripts:
    """Every tree of a batch follows a script of its own: all outcomes of `draws` draws a tree side by side."""

    draws: int
    vocabulary: int
    asked: int = 0  # draws a tree so far; those beyond the script all fall on the first token
    used: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        assert self.vocabulary**self.draws <= MOST_TREES, "too many draft trees"
        every = list(itertools.product(range(self.vocabulary), repeat=self.draws))
        self.script = torch.tensor(every, dtype=torch.int64).view(len(every), -1)  # [B, draws]
        self.weight = torch.ones(len(every), dtype=torch.float64)

    def pick(self, weights: Tensor, keys: Tensor) -> Tensor:
        _check_weights(weights)
        rows = weights.view(len(self.script), -1, self.vocabulary)
        here = slice(self.asked, self.asked + rows.shape[1])
        self.asked += rows.shape[1]
        self.used |= set(keys.tolist())
        assert len(self.used) == self.asked * len(rows), "two draws share a key: they would not be independent"
        if self.asked > self.draws:
            return torch.zeros_like(keys)
        chosen, total = self.script[:, here], rows.sum(-1)
        chance = rows.gather(2, chosen[..., None])[..., 0] / torch.where(total > 0, total, 1)
        # With nothing to choose from there is one outcome, and no node comes of it.
        self.weight *= torch.where(total > 0, chance, (chosen == 0).double()).prod(1)
        return chosen.flatten()


@dataclass(frozen=True, eq=False)
class Drafts:
    """All draft trees a grower can draw, as one batch, and how likely each is."""

    tree: TokenTree
    chance: Tensor  # [B] float64
    vocabulary: int

    @cached_property
    def prefixes(self) -> list[Prefix]:
        """Of every node. [M]."""
        return prefixes_of(self.tree)

    @cached_property
    def distinct(self) -> list[Prefix]:
        """Every prefix once."""
        return list(dict.fromkeys(self.prefixes))

    @cached_property
    def index(self) -> Tensor:
        """Which of the distinct prefixes each node has. [M]."""
        number = {prefix: i for i, prefix in enumerate(self.distinct)}
        return torch.tensor([number[prefix] for prefix in self.prefixes])

    def rows(self, p: Rows) -> Tensor:
        """The target's row at every node. [M, V]."""
        return torch.tensor([p(prefix) for prefix in self.distinct], dtype=torch.float64)[self.index]

    def strings(self, ends: Tensor) -> Law:
        """What is emitted, from the chances `ends` [M, V] of every node and the token after it."""
        sums = torch.zeros(len(self.distinct), self.vocabulary, dtype=torch.float64).index_add_(0, self.index, ends)
        return {
            (*prefix, token): value
            for prefix, row in zip(self.distinct, sums.tolist(), strict=True)
            for token, value in enumerate(row)
            if value != 0
        }


@lru_cache(maxsize=512)
def padded_drafts_of(grower: Grower, q: Rows, nodes: int = 100, depth: int = 100) -> Drafts:
    """Every tree the shipped grower can draw from `q`, grown as one batch; all of one size, absent nodes included."""
    vocabulary = len(q(()))
    rng = Scripts(0, vocabulary)
    tree = _grow_all(grower, q, nodes, depth, rng)
    while rng.asked > rng.draws:  # until the script is long enough for every tree
        rng = Scripts(rng.asked, vocabulary)
        tree = _grow_all(grower, q, nodes, depth, rng)
    tree.validate()
    assert tree.sizes.tolist() == [1 + grower.max_nodes] * tree.num_trees
    possible = rng.weight > 0
    chance = rng.weight[possible]
    assert abs(float(chance.sum()) - 1) <= 1e-12
    return Drafts(tree.take(possible.nonzero()[:, 0])[0], chance, vocabulary)


@lru_cache(maxsize=512)
def drafts_of(grower: Grower, q: Rows, nodes: int = 100, depth: int = 100) -> Drafts:
    """The same without absent nodes."""
    drafts = padded_drafts_of(grower, q, nodes, depth)
    tree = drafts.tree.packed()[0]
    tree.validate()
    return replace(drafts, tree=tree)


def _grow_all(grower: Grower, q: Rows, nodes: int, depth: int, rng: Scripts) -> TokenTree:
    view = view_of(nodes=nodes, depth=depth, sequences=len(rng.script))
    return grower.grow(TableModel(q), view, grower.max_nodes, rng).tree


_packed = lru_cache(maxsize=64)(lambda drafts: pack([each.tree for each in drafts]))


def odds_of(law: NodeLaw, tree: TokenTree, rows: Tensor) -> Odds:
    """The odds of all trees of a batch at once: they are chances, and sum to one over each tree."""
    odds = law.odds(tree, rows)
    with looking():
        ends = odds.ends(tree)
        sums = torch.zeros(tree.num_trees, dtype=torch.float64).index_add_(0, tree.owner, ends)
        assert bool((ends >= -1e-15).all()), "a chance is negative"
        assert bool(((sums - 1).abs() <= 1e-12).all()), "the odds of a tree do not sum to one"
    return odds


def node_law(law: NodeLaw, drafts: Drafts, p: Rows, *, blind: bool = False) -> Law:
    """h(s) by adding up what `NodeLaw.verify` draws: one pick among the nodes, one in the vocabulary."""
    (h,) = node_laws(law, [(drafts, p)], blind=blind)
    return h


def node_laws(law: NodeLaw, problems: Sequence[tuple[Drafts, Rows]], *, blind: bool = False) -> list[Law]:
    """`node_law` of several drafts and targets, all their trees in one batch."""
    tree = _packed(tuple(drafts for drafts, _ in problems)) if len(problems) > 1 else problems[0][0].tree
    rows = torch.cat([drafts.rows(p) for drafts, p in problems])
    there = (tree.tokens >= 0).nonzero()[:, 0]
    with no_looking() if blind else nullcontext():
        odds = odds_of(law, tree, rows)
        some = odds.left(there)
    _check_weights(some)
    left = torch.zeros_like(rows).index_copy_(0, there, some)
    left = torch.where(left.amax(-1, keepdim=True) > 0, left, rows)
    chance = torch.cat([drafts.chance for drafts, _ in problems])
    ends = (chance[tree.owner] * odds.ends(tree))[:, None] * left / left.sum(-1, keepdim=True)
    parts = ends.split([drafts.tree.num_nodes for drafts, _ in problems])
    return [drafts.strings(part) for (drafts, _), part in zip(problems, parts, strict=True)]


@lru_cache(maxsize=512)
def _drawn_one_by_one(
    grower: Grower, q: Rows, nodes: int, depth: int, blind: bool
) -> list[tuple[TokenTree, Enumerator]]:
    view = view_of(nodes=nodes, depth=depth)

    def run(rng: Enumerator) -> TokenTree:
        tree = grower.grow(TableModel(q), view, grower.max_nodes, rng).tree
        tree.validate()
        return tree if blind else tree.packed()[0]

    return outcomes_of(run)


def round_law(
    grower: Grower, verifier: Verifier, p: Rows, q: Rows, nodes: int = 100, depth: int = 100, *, blind: bool = False
) -> Law:
    """h(s): the law of what one round of the shipped grower and verifier emits, draw by draw, keys and all."""
    view = view_of(nodes=nodes, depth=depth)
    # Where it does not know whether it has left a tree, `match` runs the same race again.
    source = SharedNoise if blind and not isinstance(verifier, NodeLaw) else Enumerator
    law: Law = defaultdict(float)
    for tree, drawn in _drawn_one_by_one(grower, q, nodes, depth, blind):
        rows = target_rows(tree, p)

        def run(rng: Enumerator, tree: TokenTree = tree, rows: Tensor = rows) -> Prefix:
            with no_looking() if blind else nullcontext():
                verdict = verifier.verify(tree, rows, replace(view, may_look=not blind), rng)
            return emitted(tree, verdict)

        for text, chance in law_of(run, drawn.used, source).items():
            law[text] += drawn.weight * chance
    return dict(law)


def shared_law(grower: Grower, verifier: Verifier, p: Rows, q: Rows, *, blind: bool = False) -> Law:
    """`round_law`, but draws with one key share their noise instead of being refused."""
    view = view_of()

    def run(rng: Enumerator) -> Prefix:
        tree = grower.grow(TableModel(q), view, grower.max_nodes, rng).tree
        tree = tree if blind else tree.packed()[0]
        rows = target_rows(tree, p)
        with no_looking() if blind else nullcontext():
            verdict = verifier.verify(tree, rows, replace(view, may_look=not blind), rng)
        return emitted(tree, verdict)

    return law_of(run, source=SharedNoise)


def accepted_of(h: Law) -> float:
    """The number of draft tokens a round may expect to keep."""
    return sum(chance * (len(s) - 1) for s, chance in h.items())


def law_distance(h: Law, other: Law) -> float:
    """The largest difference between two laws of a round."""
    return max(abs(h.get(s, 0.0) - other.get(s, 0.0)) for s in h.keys() | other.keys())


def law_error(h: Law, p: Rows, vocabulary: int) -> float:
    """The largest violation of criterion (1) over all strings one longer than anything the tree can hold."""
    longest = max(len(s) for s in h)
    worst = abs(sum(h.values()) - 1)
    for y in itertools.product(range(vocabulary), repeat=longest):
        reached = sum(h.get(y[:n], 0.0) * continuation(p, y, n) for n in range(1, longest + 1))
        worst = max(worst, abs(reached - continuation(p, y, 0)))
    return worst


def continuation(p: Rows, y: Prefix, start: int) -> float:
    """p(y[start:] | y[:start])."""
    chance = 1.0
    for i in range(start, len(y)):
        chance *= p(y[:i])[y[i]]
    return chance


def assert_lossless(h: Law, p: Rows, vocabulary: int, tolerance: float = 1e-12) -> None:
    error = law_error(h, p, vocabulary)
    assert error <= tolerance, f"criterion (1) is violated by {error:.2e}"


def dirichlet(rng: random.Random, vocabulary: int, alpha: float) -> Row:
    gammas = [rng.gammavariate(alpha, 1) + 1e-9 for _ in range(vocabulary)]
    return tuple(g / sum(gammas) for g in gammas)


def random_rows(seed: int, vocabulary: int, alpha: float = 1.0) -> Rows:
    return cache(lambda prefix: dirichlet(random.Random(f"{seed}/{prefix}"), vocabulary, alpha))


def aligned_rows(p: Rows, seed: int, vocabulary: int, mix: float) -> Rows:
    noise = random_rows(seed + 10_000, vocabulary)
    return cache(lambda v: tuple(mix * a + (1 - mix) * b for a, b in zip(p(v), noise(v), strict=True)))


def constant(*row: float) -> Rows:
    return lambda prefix: tuple(x / sum(row) for x in row)
