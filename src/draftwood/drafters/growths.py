"""The ways trees grow on a device: of one fixed shape, or wherever the draft is likeliest; see `growth.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from draftwood.cache.batch_state import DeviceBatchView, SamplingMode
from draftwood.cache.kv import Places
from draftwood.cache.resident import round_sizes
from draftwood.drafters.growth import Front, Growth, Guesser, known, only_compares
from draftwood.growers.levels import Levels
from draftwood.growers.pickers import ChildPicker, Frontier
from draftwood.growers.ranked import Beam
from draftwood.ops.beam import Chosen, Offers, likeliest_tree, offer
from draftwood.protocols import Grower, Randomness, Verifier
from draftwood.tree import BITS, DraftLaw, Draw, TokenTree
from draftwood.treebuilder import TreeBuilder

MOST_OFFERS = 2048  # of a tree that are ranked together


def fixed_growth(grower: Grower) -> FixedGrowth | None:
    """How trees that look the same every time come to be on a device; None: these do not."""
    return FixedGrowth(grower) if isinstance(grower, Levels) and grower.picker.unfailing else None


def growth_of(grower: Grower, deepest: int | None) -> Growth | None:
    """How the grower's trees come to be on a device, where guesses reach so deep; None: only with the host's help."""
    if isinstance(grower, Levels):
        return fixed_growth(replace(grower, widths=grower.widths[:deepest]))
    if not isinstance(grower, Beam):
        return None
    reachable = replace(grower, depth=min(grower.depth, deepest or grower.depth))
    fits = reachable.nodes <= reachable.num_offers <= MOST_OFFERS
    return RankedGrowth(reachable) if fits else None


@dataclass(frozen=True)
class _Level:
    """The nodes of a fixed tree whose children are chosen together."""

    columns: Tensor  # [B, k]
    depth: Tensor  # [B, k]
    places: Places
    parents: Tensor  # [B, k] where in the level above their parents stand
    sources: Tensor  # [B * k] the same among the nodes of all trees


@dataclass(frozen=True)
class _FixedFront(Front):
    """One of them, with tokens."""

    level: _Level

    @cached_property
    def places(self) -> Places:
        return self.level.places

    @cached_property
    def sources(self) -> Tensor:
        return self.level.sources


@dataclass(frozen=True)
class _Shape:
    """A fixed tree for a batch: what is known of it before a token is."""

    tree: TokenTree
    widths: tuple[int, ...]
    levels: list[_Level]

    @classmethod
    def of(cls, grower: Levels, size: int, device: torch.device) -> _Shape:
        """Let the grower's numbering happen once, with no tokens."""
        builder = TreeBuilder(torch.zeros(size, dtype=torch.int64, device=device), whole=True)
        columns = torch.zeros(size, 1, dtype=torch.int64, device=device)
        grown = [columns]
        for width in grower.widths:
            added = _add(builder, columns, width, grower.picker)
            columns = torch.cat(added, 1)
            grown.append(columns)
        tree = known(builder.build()[0])
        words = tree.ancestors.view(size, builder.num_columns, -1)
        every = torch.arange(size, device=device)[:, None]
        levels = []
        for own, up in zip(grown, [grown[0], *grown], strict=False):
            depth = builder.depth.gather(1, own)
            places = Places(own - 1, depth - 1)
            if not grower.law.chain:
                bits = words[every, own].flatten(0, 1)
                places = replace(places, ancestors=bits, max_depth=len(grown), max_nodes=int(own.max()))
            # Children stand one behind the other: the first of every parent, then the second of every parent, …
            parents = torch.arange(own.shape[1], device=device).expand_as(own) % up.shape[1]
            levels.append(_Level(own, depth, places, parents, (parents + up.shape[1] * every).view(-1)))
        return cls(tree, grower.widths, levels)


def _add(builder: TreeBuilder, parents: Tensor, width: int, picker: ChildPicker) -> list[Tensor]:
    """The children of nodes, the first of each, the second of each, and so on; unfailing pickers choose all of them
    alike, and draw all of them from one law.
    """
    (draw,) = picker.draws
    tokens, alive = torch.zeros_like(parents), torch.ones_like(parents, dtype=torch.bool)
    if draw == Draw.POINT:
        return [builder.add(parents, tokens, alive) for _ in range(width)]
    laws = builder.add_laws(torch.zeros(*parents.shape, 1, device=parents.device))
    return [builder.add_drawn(parents, tokens, alive, draw, laws) for _ in range(width)]


@dataclass
class FixedGrowth:
    """Trees of a shape that is known before anything is."""

    grower: Levels
    _shapes: dict[tuple[int, int], _Shape] = field(default_factory=dict)

    @property
    def law(self) -> DraftLaw:
        """The grower's."""
        return self.grower.law

    @property
    def levels(self) -> int:
        """As many as it has widths for."""
        return len(self.grower.widths)

    def asked(self, nodes: int) -> int:
        """No more than there are."""
        return nodes

    @property
    def sizes(self) -> Sequence[int]:
        """As many whole levels as fit."""
        fitting = [self.grower.within(nodes) for nodes in round_sizes(self.grower.max_nodes)[1:]]
        return sorted({0, *(each.max_nodes for each in fitting if each)})

    def depth(self, nodes: int) -> int:
        """As many levels as fit."""
        levels = self.grower.within(nodes)
        return 0 if levels is None else len(levels.widths)

    def suits(self, kind: SamplingMode, verifier: Verifier) -> bool:
        """Any law that is exact for its trees."""
        return verifier.lossless and verifier.refuses(self.law) is None

    def grow(self, guesser: Guesser, view: DeviceBatchView, nodes: int, rng: Randomness) -> TokenTree:
        """Level by level."""
        shape = self._shape(len(view.rows), nodes, view.rows.device)
        tokens, laws, front = [view.roots[:, None]], [], None
        logits, state = guesser.begin(view)
        for number, width in enumerate(shape.widths):
            level = shape.levels[number]
            if number:
                front = _FixedFront(number, tokens[-1], level.parents, front, level)
                logits, state = guesser.extend(view, front, state)
            frontier = Frontier(level.columns, level.depth, logits, view, rng, guesser.among(number))
            children = list(self.grower.picker.children(frontier, width))
            chosen = [child.tokens for child in children]
            tokens.append(chosen[0] if width == 1 else torch.cat(chosen, 1))
            if (q := children[0].q) is not None:  # that of all of them, as in `_add`
                laws.append(q.flatten(0, 1))
        return shape.tree.refilled(torch.cat(tokens, 1).view(-1), torch.cat(laws) if laws else None)

    def _shape(self, size: int, nodes: int, device: torch.device) -> _Shape:
        if (size, nodes) not in self._shapes:
            grower = self.grower.within(nodes)
            assert grower is not None, "sizes offers no tree without a level"
            self._shapes[size, nodes] = _Shape.of(grower, size, device)
        return self._shapes[size, nodes]


@lru_cache(maxsize=1024)
def _columns(size: int, width: int, number: int, words: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Level `number` of trees with `width` nodes a level: places, depths and own bits. 2 x [B, k], [B, k, W]."""
    place = torch.arange((number - 1) * width, number * width, device=device)
    word = torch.arange(words, device=device)
    bits = torch.where(place[:, None] // BITS == word, torch.ones_like(place)[:, None] << (place % BITS)[:, None], 0)
    index = place.expand(size, -1).contiguous()
    return index, torch.full_like(index, number - 1), bits.expand(size, -1, -1).contiguous()


@dataclass(frozen=True)
class _RankedFront(Front):
    """The likeliest nodes of a level."""

    above: _RankedFront | None
    chosen: Chosen
    columns: int  # nodes a network may be asked about in the whole tree

    @cached_property
    def places(self) -> Places:
        index, depth, _ = self._own
        nodes = self.number * index.shape[1]
        return Places(index, depth, self.ancestors.flatten(0, 1), self.number + 1, nodes)

    @cached_property
    def ancestors(self) -> Tensor:
        """The nodes of the levels so far on the way to each, itself included, as bits. [B, k, W]."""
        own = self._own[2]
        if self.above is None:
            return own
        return own | self.above.ancestors.gather(1, self.parents[..., None].expand_as(own))

    @property
    def _own(self) -> tuple[Tensor, Tensor, Tensor]:
        return _columns(*self.tokens.shape, self.number, max(1, -(-self.columns // BITS)), self.tokens.device)


@dataclass
class RankedGrowth:
    """Trees of the likeliest nodes, whatever shape that gives; see `growers.Beam`."""

    grower: Beam
    _trees: dict[tuple[int, int], TokenTree] = field(default_factory=dict)

    @property
    def law(self) -> DraftLaw:
        """The grower's."""
        return self.grower.law

    @property
    def levels(self) -> int:
        """As many as are offered."""
        return self.grower.depth

    def asked(self, nodes: int) -> int:
        """The likeliest of every level but the last, whatever is kept of them."""
        return self.grower.width * (self.grower.depth - 1)

    @property
    def sizes(self) -> Sequence[int]:
        """Any."""
        return round_sizes(self.grower.nodes)

    def depth(self, nodes: int) -> int:
        """The likeliest may all lie on one path."""
        return min(nodes, self.levels)

    def suits(self, kind: SamplingMode, verifier: Verifier) -> bool:
        """Which nodes are siblings is not known before: only comparisons look at no more than tokens."""
        return only_compares(kind, verifier)

    def grow(self, guesser: Guesser, view: DeviceBatchView, nodes: int, rng: Randomness) -> TokenTree:
        """Offer level by level, then choose."""
        width, depth, size = self.grower.width, self.grower.depth, len(view.rows)
        offers, front = Offers.room(size, width, depth, view.rows.device), None
        logits, state = guesser.begin(view)
        for level in range(depth):
            among = guesser.among(level)
            tokens = None if among is None else among.tokens
            chosen = offer(offers, level, logits, view.temperature, tokens, front and front.chosen)
            if level + 1 < depth:
                front = _RankedFront(level + 1, chosen.tokens, chosen.parents, front, chosen, self.asked(nodes))
                logits, state = guesser.extend(view, front, state)
        links = likeliest_tree(offers, view.roots, nodes)
        return self._tree(size, nodes, view.rows.device).relinked(**vars(links))

    def _tree(self, size: int, nodes: int, device: torch.device) -> TokenTree:
        """Any of its size and depth."""
        if (size, nodes) not in self._trees:
            deepest = self.depth(nodes)
            parents = [-1, *range(deepest), *[0] * (nodes - deepest)]
            self._trees[size, nodes] = known(TokenTree.of_points([([0] * (1 + nodes), parents)] * size, device))
        return self._trees[size, nodes]
