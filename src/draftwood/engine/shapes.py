"""Shapes of captured steps: which there should be, and which of those that are ready serves a batch best.

A captured step serves every batch that fits into it: fewer sequences, fewer pages, requests that ask for less. Shapes
are captured at start, most useful first, and later while the engine is idle, most missed first; never while a request
waits. Until the best shape is there the nearest one runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from draftwood.drafting import BATCHES, padded_batch, tree_sizes
from draftwood.protocols import StepMode

FREE_ROWS = 256  # rows that take as long as reading all weights; each as many more take as long again
LONG_TABLES = 0.1  # plain steps lost by a block table that is longer than needed
UNUSED_WORK = 0.05  # plain steps lost by a step that edits logits or scores tokens that no request asks for
LAUNCHED_ONE_BY_ONE = 8.0  # plain steps lost by a step that is not captured
MIXED_ROWS = (64, 128, 256, 512)  # prefill rows of a mixed step
CHEAP_ROWS = 128  # rows of a step that costs little more than one row
WHOLE_TABLES = 16  # sequences from which on tables have room for any length
LENGTHS = (1024, 4096, 16384)  # tokens: kernels are split for the longest possible sequence, not for the present one
MOST_CAPTURED = 256  # each keeps its memory
ALTERNATIVES = (20, 100)  # per token, beside its own log-probability
COARSE_BATCHES = (1, 8, 32, 128)
MOST_TREE_SIZES = 12  # of which all are captured
GREEDY = StepMode(greedy=True)
USUAL_MODES = (GREEDY, StepMode(truncates=True))
EVERYTHING = StepMode(truncates=True, limited=True)


def padded_count(count: int, batch: int) -> int:
    """Sequences with edits, masks or scores that a step has room for: none, one, a few, all."""
    return next((some for some in (0, 1, 8) if count <= some < batch), batch)


@dataclass(frozen=True)
class StepShape:
    """What a step has room for."""

    batch: int  # sequences
    nodes: int  # that it scores of each one's tree, without the root; of several sequences: on average
    pages: int  # of each sequence
    text: int = 0  # prefill rows
    edited: int = 0  # sequences whose logits are edited
    masked: int = 0  # sequences that the host gives masks for
    scored: int = 0  # sequences with log-probabilities
    alternatives: int = 0  # for each of their tokens
    proposed: int = 0  # nodes of each sequence's tree, of all of which the likeliest are scored; no fewer than `nodes`

    def __post_init__(self) -> None:
        object.__setattr__(self, "proposed", max(self.proposed, self.nodes))

    @property
    def rows(self) -> int:
        """Rows of the target's forward."""
        return self.batch * (1 + self.nodes) + self.text

    @property
    def extras(self) -> tuple[int, int, int, int]:
        """Room for what single requests ask for."""
        return self.edited, self.masked, self.scored, self.alternatives

    def holds(self, other: StepShape) -> bool:
        """Whether a batch of shape `other` can run in this one, perhaps with smaller trees. A shape without nodes is no
        substitute for one with: a drafter with its own KV cache would fall behind.
        """
        nodes = self.nodes <= other.nodes and (self.nodes > 0) == (other.nodes > 0) and self.proposed <= other.proposed
        extras = all(mine >= asked for mine, asked in zip(self.extras, other.extras, strict=True))
        extras = extras and (self.masked > 0) == (other.masked > 0)  # masks make the host wait for the trees
        return nodes and extras and self.batch >= other.batch and self.pages >= other.pages and self.text >= other.text

    def lost_with(self, other: StepShape) -> float:
        """Plain steps lost by running `other` instead: padding rows, tokens that are not drafted, unused work."""
        idle = ((other.batch - self.batch) * (1 + other.nodes) + other.text - self.text) / FREE_ROWS
        undrafted = (self.nodes - other.nodes) / (1 + self.nodes)
        unused = UNUSED_WORK * sum(theirs > mine for mine, theirs in zip(self.extras, other.extras, strict=True))
        return idle + undrafted + unused + (LONG_TABLES if other.pages > self.pages else 0.0)


Key = tuple[StepShape, StepMode]


@dataclass
class ShapePlan:
    """Chooses shapes: for a batch, and to capture next."""

    sizes: Sequence[int]  # of trees
    max_batch: int
    max_rows: int
    whole_table: int  # pages of the longest possible sequence
    page_size: int
    surplus: int = 1  # see `Drafter`
    missed: dict[Key, float] = field(default_factory=dict)  # plain steps lost by shapes that are not ready

    @classmethod
    def for_trees(
        cls, sizes: Sequence[int], max_batch: int, max_rows: int, whole_table: int, page_size: int, surplus: int = 1
    ) -> ShapePlan:
        """A plan for trees of `sizes`, of which few enough are captured where there are many."""
        worth = set(sizes) if len(sizes) <= MOST_TREE_SIZES else set(tree_sizes(sizes[-1]))
        return cls([size for size in sizes if size in worth], max_batch, max_rows, whole_table, page_size, surplus)

    def proposed(self, batch: int, nodes: int) -> int:
        """Nodes of each sequence's tree where so many of each are scored on average."""
        wanted = nodes if batch == 1 else self.surplus * nodes
        return max(nodes, max(size for size in self.sizes if size <= wanted))

    def pages_for(self, pages: int, batch: int = 1) -> int:
        """Pages of the smallest block table for sequences of so many. Its last entry is scratch: a finished sequence
        still runs one step, and writes there. Many sequences fill the GPU without splitting their keys, so their tables
        may as well have room for any length.
        """
        if batch >= WHOLE_TABLES:
            return self.whole_table
        rounded = (length // self.page_size for length in LENGTHS)
        return next((some for some in rounded if pages < some < self.whole_table), self.whole_table)

    def wanted(self, exact: StepShape) -> StepShape:
        """The shape to capture for a batch of shape `exact`."""
        batch = padded_batch(exact.batch)
        edited, masked, scored = (padded_count(count, batch) for count in exact.extras[:3])
        text = next((rows for rows in MIXED_ROWS if rows >= exact.text), exact.text) if exact.text else 0
        alternatives = next((k for k in ALTERNATIVES if k >= exact.alternatives), exact.alternatives)
        nodes = max(size for size in self.sizes if size <= exact.nodes)
        return StepShape(
            batch, nodes, self.pages_for(exact.pages, batch), text, edited, masked, scored,
            alternatives if scored else 0, self.proposed(batch, nodes),
        )  # fmt: skip

    def nearest(self, wanted: StepShape, mode: StepMode, ready: Sequence[Key]) -> Key | None:
        """The shape that is ready and loses least; None if none is better than a step that is not captured."""
        fitting = [key for key in ready if key[0].holds(wanted) and key[1].covers(mode)]
        best = min(fitting, key=lambda key: (wanted.lost_with(key[0]), key[1] != mode), default=None)
        return best if best is not None and wanted.lost_with(best[0]) < LAUNCHED_ONE_BY_ONE else None

    def remember(self, wanted: StepShape, mode: StepMode, found: Key | None) -> None:
        """What is lost by running `found` instead."""
        if found != (wanted, mode):
            lost = LAUNCHED_ONE_BY_ONE if found is None else wanted.lost_with(found[0])
            self.missed[wanted, mode] = self.missed.get((wanted, mode), 0.0) + lost

    def next(self, ready: Sequence[Key]) -> Key | None:
        """What to capture next: what was missed most, then what is likely to be asked for; None: nothing."""
        if len(ready) >= MOST_CAPTURED:
            return None
        known = set(ready)
        by_loss = sorted(self.missed, key=lambda key: -self.missed[key])
        return next((key for key in (*by_loss, *self.usual()) if key not in known), None)

    def first(self) -> list[Key]:
        """What every greedy batch can run in: few batch sizes, tables for any length, plain and with the largest tree
        that is cheap. One sequence and the largest batch, which holds all others, come first.
        """
        batches = sorted(self._coarse, key=lambda batch: (batch not in (1, self.max_batch), batch))
        trees = [self._basis(batch) for batch in batches]
        return [(own, GREEDY) for own in dict.fromkeys([*(own[-1] for own in trees), *(own[0] for own in trees)])]

    def usual(self) -> Iterator[Key]:
        """Shapes by how much is lost without them. First what every batch can run in, for greedy requests, for all, and
        with everything a request may ask for; then smaller trees, and prompts beside all of them. Then what is faster:
        short tables for small batches, other trees, batch sizes in between.
        """
        first = [shape for shape, _ in self.first()]
        for mode in USUAL_MODES:
            yield from ((shape, mode) for shape in first)
        for shape in first:
            room = {"edited": shape.batch, "scored": shape.batch, "alternatives": ALTERNATIVES[0]}
            yield replace(shape, **room), EVERYTHING
        smaller = [shape for batch in self._coarse for shape in self._basis(batch)[1:-1]]
        for mode in USUAL_MODES:
            yield from ((shape, mode) for shape in smaller)
        for text in reversed(MIXED_ROWS):
            mixed = [replace(shape, text=text) for shape in first + smaller if shape.batch > 1]
            yield from ((shape, mode) for mode in USUAL_MODES for shape in mixed)
        for mode in USUAL_MODES:
            yield from ((shape, mode) for batch in self._coarse for shape in self._trees(batch))
        for mode in USUAL_MODES:
            yield from ((shape, mode) for batch in self._batches for shape in self._trees(batch))

    @property
    def _batches(self) -> list[int]:
        return [batch for batch in BATCHES if batch < self.max_batch] + [self.max_batch]

    @property
    def _coarse(self) -> list[int]:
        return [batch for batch in self._batches if batch in COARSE_BATCHES or batch == self.max_batch]

    def _basis(self, batch: int) -> list[StepShape]:
        """Trees whose rows cost little for so many sequences, each about half as large as the one before, and none; for
        sequences of any length.
        """
        rows = max(CHEAP_ROWS, 2 * batch)
        trees = [replace(shape, pages=self.whole_table) for shape in self._trees(batch) if shape.rows <= rows]
        chosen = [trees[0]]
        for shape in trees[1:]:
            if shape.nodes == 0 or 1 + shape.nodes <= (1 + chosen[-1].nodes) / 2:
                chosen.append(shape)
        return chosen

    def _trees(self, batch: int) -> list[StepShape]:
        """Every size of tree that so many sequences have rows for, the largest first."""
        most = self.max_rows // batch - 1
        pages = self.pages_for(1, batch)
        fitting = [size for size in reversed(self.sizes) if size <= max(most, 0)]
        return [StepShape(batch, size, pages, proposed=self.proposed(batch, size)) for size in fitting]
