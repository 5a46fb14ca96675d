"""Drafters as they live on a device: every proposal is made from the seats, in one fixed shape, without the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from draftwood.cache.kv import Places, stage_behind
from draftwood.cache.resident import NeedsNothing
from draftwood.cache.seats import Kind, SeatedView
from draftwood.growers.levels import Levels
from draftwood.growers.pickers import Frontier, Guessable
from draftwood.model.batch import ForwardBatch
from draftwood.model.runner import ModelRunner
from draftwood.ops.lookup import suffix_lookup
from draftwood.protocols import BatchView, Randomness, Verifier
from draftwood.tree import POINT_CHAIN, DraftLaw, Draw, TokenTree
from draftwood.treebuilder import TreeBuilder

State = tuple[Tensor, ...]  # what a level of a tree leaves for the next one


def round_sizes(most: int) -> list[int]:
    """Chain lengths worth a graph of their own, up to `most`."""
    steps = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
    return sorted({0, most, *(step for step in steps if step < most)})


def only_compares(kind: Kind, verifier: Verifier) -> bool:
    """Whether a node that holds no token is refused like any wrong one: the law looks at nothing but equality."""
    return verifier.name == "match" or (kind.greedy and verifier.lossless)


class ResidentNone(NeedsNothing):
    """Bare roots."""

    law = POINT_CHAIN
    reads = False
    waits = False
    sizes: Sequence[int] = (0,)

    def depth(self, nodes: int) -> int:
        """There is nothing below the root."""
        return 0

    def suits(self, kind: Kind, verifier: Verifier) -> bool:
        """There is nothing to verify; what a lossy law has to say about that, it says step by step."""
        return verifier.lossless

    def propose(self, view: SeatedView, nodes: int, rng: Randomness) -> TokenTree:
        """Nothing but the last committed token."""
        return TokenTree.roots(view.roots)

    def prepare(self, view: BatchView, size: int, nodes: int) -> None:
        """Nothing to ask the host for."""

    def read(self, batch: ForwardBatch) -> None:
        """Nothing to read."""

    def keep(self, view: SeatedView, tree: TokenTree, index: Tensor, length: Tensor) -> None:
        """Nothing to keep."""


class ResidentLookup(NeedsNothing):
    """What followed the last few tokens when they stood in the text before; see `ngram.py`."""

    law = POINT_CHAIN
    reads = False
    waits = False

    def __init__(self, nodes: int, longest: int, shortest: int) -> None:
        self.sizes = round_sizes(nodes)
        self.longest = longest
        self.shortest = shortest
        self._chains: dict[tuple[int, int], TokenTree] = {}

    def depth(self, nodes: int) -> int:
        """A chain."""
        return nodes

    def suits(self, kind: Kind, verifier: Verifier) -> bool:
        """Where nothing is found the chain is filled up with tokens that only a comparison can refuse."""
        return only_compares(kind, verifier)

    def propose(self, view: SeatedView, nodes: int, rng: Randomness) -> TokenTree:
        """A chain of what followed; -1 where nothing did."""
        found = suffix_lookup(view.history, view.rows, view.lengths, nodes, self.longest, self.shortest)
        return self._chain(len(view.rows), nodes, found.device).refilled(
            torch.cat([view.roots[:, None], found], 1).view(-1)
        )

    def _chain(self, size: int, nodes: int, device: torch.device) -> TokenTree:
        key = size, nodes
        if key not in self._chains:
            one = ([0] * (nodes + 1), list(range(-1, nodes)))
            self._chains[key] = known(TokenTree.of_points([one] * size, device))
        return self._chains[key]

    def prepare(self, view: BatchView, size: int, nodes: int) -> None:
        """Nothing to ask the host for."""

    def read(self, batch: ForwardBatch) -> None:
        """The seats hold all there is to know."""

    def keep(self, view: SeatedView, tree: TokenTree, index: Tensor, length: Tensor) -> None:
        """Nothing to keep."""


@dataclass
class Level:
    """The nodes whose children are chosen together."""

    columns: Tensor  # [B, k]
    depth: Tensor  # [B, k]
    places: Places


@dataclass
class Shape:
    """A fixed tree for a batch: what is known of it before a token is."""

    tree: TokenTree
    widths: tuple[int, ...]
    levels: list[Level]
    parents: list[Tensor]  # [B, k] each: where in the level above the parents of a level's nodes stand
    sources: list[Tensor]  # [B * k] each: the same among the nodes of all trees in the level above

    @classmethod
    def of(cls, grower: Levels, size: int, device: torch.device) -> Shape:
        """Let the grower's numbering happen once, with no tokens."""
        builder = TreeBuilder(torch.zeros(size, dtype=torch.int64, device=device), whole=True)
        columns = torch.zeros(size, 1, dtype=torch.int64, device=device)
        grown = [columns]
        for width in grower.widths:
            added = [_add(builder, columns, draw) for draw in _draws(grower, width)]
            columns = torch.cat(added, 1)
            grown.append(columns)
        tree = known(builder.build()[0])
        words = tree.ancestors.view(size, builder.num_columns, -1)
        every = torch.arange(size, device=device)[:, None]
        levels = []
        for own in grown:
            depth = builder.depth.gather(1, own)
            places = Places(own - 1, depth - 1)
            if not grower.law.chain:
                bits = words[every, own].flatten(0, 1)
                places = replace(places, ancestors=bits, max_depth=len(grown), max_nodes=int(own.max()))
            levels.append(Level(own, depth, places))
        # Children stand one behind the other: the first of every parent, then the second of every parent, …
        above = [None, *grown]
        parents = [
            torch.zeros_like(own)
            if up is None
            else torch.arange(own.shape[1], device=device).expand_as(own) % up.shape[1]
            for own, up in zip(grown, above, strict=False)
        ]
        breadth = [1, *(own.shape[1] for own in grown)]
        sources = [(own + count * every).view(-1) for own, count in zip(parents, breadth, strict=False)]
        return cls(tree, grower.widths, levels, parents, sources)


def _draws(grower: Levels, width: int) -> list[Draw]:
    """How each of the children of a node is chosen; unfailing pickers choose all of them alike."""
    (draw,) = grower.picker.draws
    return [draw] * width


def _add(builder: TreeBuilder, parents: Tensor, draw: Draw) -> Tensor:
    tokens, alive = torch.zeros_like(parents), torch.ones_like(parents, dtype=torch.bool)
    if draw == Draw.POINT:
        return builder.add(parents, tokens, alive)
    return builder.add_drawn(parents, tokens, alive, draw, torch.zeros(*parents.shape, 1, device=parents.device))


def known(tree: TokenTree) -> TokenTree:
    """The same tree without laws, once everything about its structure has been looked at: a graph cannot look."""
    return tree.refilled(tree.tokens)


class LevelTrees:
    """Trees of a fixed shape, grown level by level. Subclasses give logits: at the roots, then at each level."""

    waits = False

    def __init__(self, grower: Levels, device: torch.device, deepest: int | None = None) -> None:
        self.grower, self._device = grower, device
        self._deepest = deepest or len(grower.widths)
        self._shapes: dict[tuple[int, int], Shape] = {}

    @property
    def law(self) -> DraftLaw:
        """The grower's."""
        return self.grower.law

    @cached_property
    def sizes(self) -> Sequence[int]:
        """As many whole levels as fit, and as there are guesses for; asked for in every round."""
        fitting = [self.grower.within(nodes) for nodes in round_sizes(self.grower.max_nodes)[1:]]
        return sorted({0, *(each.max_nodes for each in fitting if each and len(each.widths) <= self._deepest)})

    def depth(self, nodes: int) -> int:
        """As many levels as fit."""
        levels = self.grower.within(nodes)
        return 0 if levels is None else len(levels.widths)

    def suits(self, kind: Kind, verifier: Verifier) -> bool:
        """Any law that is exact for its trees."""
        return verifier.lossless and verifier.refuses(self.law) is None

    def prepare(self, view: BatchView, size: int, nodes: int) -> None:
        """Nothing to ask the host for."""

    def propose(self, view: SeatedView, nodes: int, rng: Randomness) -> TokenTree:
        """Level by level."""
        shape = self._shape(len(view.rows), nodes)
        tokens, laws = [view.roots[:, None]], []
        logits, state = self.begin(view)
        for number, width in enumerate(shape.widths):
            level = shape.levels[number]
            if number:
                logits, state = self.extend(view, shape, number, tokens, state)
            frontier = Frontier(level.columns, level.depth, logits, view, rng, self.among(number))
            children = list(self.grower.picker.children(frontier, width))
            chosen = [child.tokens for child in children]
            tokens.append(chosen[0] if width == 1 else torch.cat(chosen, 1))
            laws += [child.q.flatten(0, 1) for child in children if child.q is not None]
        return shape.tree.refilled(torch.cat(tokens, 1).view(-1), torch.cat(laws) if laws else None)

    def _shape(self, size: int, nodes: int) -> Shape:
        if (size, nodes) not in self._shapes:
            grower = self.grower.within(nodes)
            assert grower is not None, "sizes offers no tree without a level"
            self._shapes[size, nodes] = Shape.of(grower, size, self._device)
        return self._shapes[size, nodes]

    def among(self, number: int) -> Guessable | None:
        """The tokens that logits at level `number` are of; None: all."""
        return None

    def begin(self, view: SeatedView) -> tuple[Tensor, State]:
        """Logits at the roots [B, 1, R], and whatever the next level needs of it."""
        raise NotImplementedError

    def extend(
        self, view: SeatedView, shape: Shape, number: int, tokens: list[Tensor], state: State
    ) -> tuple[Tensor, State]:
        """Logits at the nodes of level `number`, whose tokens [B, k] are the last of all levels'. [B, k, R]."""
        raise NotImplementedError


class ResidentModel(LevelTrees, NeedsNothing):
    """A small model of the target's vocabulary and a tree of fixed shape; its cache lies under the target's pages.

    Whatever an accepted path ends with it may not have run; so a round begins with the last two committed tokens.
    """

    reads = True

    def __init__(self, runner: ModelRunner, grower: Levels) -> None:
        super().__init__(grower, runner.device)
        self.runner = runner
        self._ends: dict[int, tuple[Places, Tensor]] = {}

    def begin(self, view: SeatedView) -> tuple[Tensor, State]:
        """Logits at the roots, once the token before each has been run again."""
        places, last = self._last_two(len(view.rows))
        tokens = view.history[view.rows[:, None], (view.lengths[:, None] + places.index).clamp(min=0)]
        return self._run(view, tokens, places, last)[:, None], ()

    def extend(
        self, view: SeatedView, shape: Shape, number: int, tokens: list[Tensor], state: State
    ) -> tuple[Tensor, State]:
        """The cache knows their parents."""
        return self._run(view, tokens[-1], shape.levels[number].places).view(*tokens[-1].shape, -1), state

    def _last_two(self, size: int) -> tuple[Places, Tensor]:
        """Where the last two committed tokens lie, and which rows are the last."""
        if size not in self._ends:
            device = self.runner.device
            steps = torch.arange(-2, 0, device=device).expand(size, 2).contiguous()
            self._ends[size] = Places(steps, steps), torch.arange(1, 2 * size, 2, device=device)
        return self._ends[size]

    def _run(self, view: SeatedView, tokens: Tensor, places: Places, logit_rows: Tensor | None = None) -> Tensor:
        highest = self.runner.model.config.max_positions
        page_size = self.runner.cache.page_size
        batch = stage_behind(view.lengths, view.block_table, tokens, places, page_size, highest, logit_rows)
        return self.runner.forward(batch).logits

    def read(self, batch: ForwardBatch) -> None:
        """The same rows through the small model, for its cache alone."""
        self.runner.forward(batch)

    def keep(self, view: SeatedView, tree: TokenTree, index: Tensor, length: Tensor) -> None:
        """Move what was accepted, as the target does."""
        self.runner.cache.keep(view.block_table, view.lengths, index, length, chain=self.law.chain)
