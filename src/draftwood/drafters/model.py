"""A second language model as drafter: its own weights, its own cache, any grower.

It catches up without a special case: whatever committed tokens its cache does not hold yet are pending, be it the
prompt, the last accepted leaf it never ran, or everything since it was last asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from draftwood.cache.kv import NodeRows
from draftwood.drafters.growths import fixed_growth
from draftwood.drafters.resident import ResidentModel
from draftwood.model.runner import ModelRunner
from draftwood.protocols import BatchView, Budget, Features, Grower, Randomness, Span
from draftwood.tree import DraftLaw, TokenTree, Verdict
from draftwood.treebuilder import TreeBuilder


@dataclass
class Growth:
    """One round of growing: the draft model as a `FrontierModel`, and what it ran."""

    runner: ModelRunner
    view: BatchView
    seats: list[int]  # indices of the view's sequences that have room in the draft cache
    max_rows: int
    ran: Tensor = field(init=False)  # [B, C] bool

    def __post_init__(self) -> None:
        self.ran = torch.ones(len(self.view.seq_ids), 1, dtype=torch.bool, device=self.runner.device)

    def begin(self, view: BatchView) -> Tensor:
        """Run everything pending, in chunks; logits at the roots. [B, V], zeros without a seat."""
        logits = self.runner.no_logits(len(view.seq_ids))
        behind = list(self.seats)
        while behind:
            spans, ready, behind = self._next_chunk(behind)
            out = self.runner.forward(self.runner.cache.stage(spans, None))
            done = [i for i, b in enumerate(ready) if b is not None]
            logits[[ready[i] for i in done]] = out.logits[done].to(logits.dtype)
            for span in spans:
                self.runner.cache.tables.advance(span.seq_id, span.end, span.tokens)
        return logits

    def _next_chunk(self, behind: list[int]) -> tuple[list[Span], list[int | None], list[int]]:
        """Spans within `max_rows`, which sequence each of them finishes, and who is left."""
        spans: list[Span] = []
        ready: list[int | None] = []
        rows = self.max_rows
        left = list(behind)
        while left and rows > 0:
            b = left[0]
            tokens = self.view.tokens[b]
            start = self.runner.cache.tables.num_cached(self.view.seq_ids[b])
            end = min(len(tokens), start + rows)
            spans.append(Span(self.view.seq_ids[b], tokens, start, end))
            ready.append(b if end == len(tokens) else None)
            rows -= end - start
            if end < len(tokens):
                break
            left.pop(0)
        return spans, ready, left

    def extend(self, builder: TreeBuilder, columns: Tensor) -> Tensor:
        """Run the living nodes in `columns`. [B, k] -> [B, k, V]."""
        seated = torch.zeros(builder.num_trees, dtype=torch.bool, device=columns.device)
        seated[[b for b in self.seats if self._reserve(b, builder.num_columns)]] = True
        runs = builder.alive.gather(1, columns) & seated[:, None]
        logits = self.runner.no_logits(*columns.shape)
        if not bool(runs.any()):
            return logits
        logits[runs] = self._run_nodes(builder, columns, runs).to(logits.dtype)
        grown = torch.zeros_like(builder.alive)
        grown[:, : self.ran.shape[1]] = self.ran
        self.ran = grown.scatter(1, columns, grown.gather(1, columns) | runs)
        return logits

    def _reserve(self, b: int, num_columns: int) -> bool:
        return self.runner.cache.tables.reserve(self.view.seq_ids[b], len(self.view.tokens[b]) + num_columns - 1)

    def _run_nodes(self, builder: TreeBuilder, columns: Tensor, runs: Tensor) -> Tensor:
        nodes = NodeRows.of_growth(builder, columns, runs, self.seats)
        rows = torch.arange(len(nodes.tokens), device=columns.device)
        return self.runner.forward(self.runner.cache.stage(self._ended_spans(), nodes, rows)).logits

    def _ended_spans(self) -> list[Span]:
        seated = [(self.view.seq_ids[b], self.view.tokens[b]) for b in self.seats]
        return [Span(seq_id, tokens, len(tokens), len(tokens)) for seq_id, tokens in seated]

    def keep(self, columns: Tensor, length: Tensor) -> None:
        """Commit the nodes at `columns` [B, D + 1], root first, as far as they were accepted and run."""
        deep = torch.arange(columns.shape[1], device=columns.device) <= length[:, None]
        run = self.ran.gather(1, columns.clamp(max=self.ran.shape[1] - 1)) & (columns < self.ran.shape[1])
        kept = (deep & run).long().cumprod(1).sum(1) - 1
        cache, spans = self.runner.cache, self._ended_spans()
        if not spans:
            return
        seats = torch.tensor(self.seats, device=columns.device)
        base = torch.tensor([span.end for span in spans], device=columns.device)
        cache.keep(cache.block_table(spans), base, columns[seats], kept[seats])
        for span, gained in zip(spans, kept[seats].tolist(), strict=True):
            cache.tables.advance(span.seq_id, span.end + gained, span.tokens)


class ModelDrafter:
    """A small model of the target's vocabulary, and a grower."""

    needs: frozenset[int] = frozenset()

    def __init__(self, runner: ModelRunner, grower: Grower, max_rows: int = 512) -> None:
        self.runner = runner
        self.grower = grower
        self.max_rows = max_rows
        self._growth: Growth | None = None
        self._columns: Tensor | None = None
        self._known: dict[int, None] = {}  # sequences with a table, least recently drafted for first

    @property
    def law(self) -> DraftLaw:
        """The grower's."""
        return self.grower.law

    @property
    def max_nodes(self) -> int:
        """The grower's."""
        return self.grower.max_nodes

    def propose(self, view: BatchView, budget: Budget, rng: Randomness) -> TokenTree:
        """Grow a tree for every sequence that finds a seat in the draft cache; bare roots for the others."""
        seats = self._seat(view, budget)
        sitting = torch.zeros_like(view.max_nodes)
        sitting[seats] = 1
        view = replace(view, max_nodes=view.max_nodes * sitting)
        self._growth = self.start(view, seats)
        tree, self._columns = self.grower.grow(self._growth, view, budget, rng).build()
        return tree

    def start(self, view: BatchView, seats: list[int]) -> Growth:
        """A round of growing for the sequences `seats` of the view."""
        return Growth(self.runner, view, seats, self.max_rows)

    @property
    def room(self) -> int:
        """Rows it may write behind a text."""
        return self.max_nodes

    def read(self, spans: Sequence[Span], features: Features) -> None:
        """It needs nothing."""

    def observe(self, view: BatchView, tree: TokenTree, verdict: Verdict, features: Features) -> None:
        """Keep what was accepted of what it ran; the rest stays pending."""
        assert self._growth is not None, "observe() without propose()"
        assert self._columns is not None
        columns = self._columns[verdict.path.clamp(min=0)].masked_fill(verdict.path < 0, 0)
        self._growth.keep(columns, verdict.length)
        self._growth = self._columns = None

    def resident(self, target: ModelRunner) -> ResidentModel | None:
        """The same model under the target's pages, where the tree's shape is known beforehand."""
        own, theirs = self.runner.cache, target.cache
        alike = (own.page_size, own.scratch_page) == (theirs.page_size, theirs.scratch_page)
        growth = fixed_growth(self.grower)  # others leave their nodes in another order than they came in
        return ResidentModel(self.runner, growth) if alike and growth is not None else None

    def release(self, seq_id: int) -> None:
        """Free its pages."""
        self._known.pop(seq_id, None)
        self.runner.cache.tables.close(seq_id)

    def _seat(self, view: BatchView, budget: Budget) -> list[int]:
        """The sequences of the view for which the draft cache has, or can make, room."""
        if budget.max_nodes < 1:
            return []
        staying = set(view.seq_ids)
        wanting = [b for b, room in enumerate(view.max_nodes.tolist()) if room > 0 and int(view.max_depth[b]) > 0]
        return [b for b in wanting if self._find_room(view, b, staying)]

    def _find_room(self, view: BatchView, b: int, staying: set[int]) -> bool:
        tables, seq_id, tokens = self.runner.cache.tables, view.seq_ids[b], view.tokens[b]
        if len(tokens) + self.room > self.runner.model.config.max_positions:
            return False
        if seq_id not in self._known:
            tables.open(seq_id, tokens, view.params[b].cache_salt)
        self._known.pop(seq_id, None)
        self._known[seq_id] = None
        while not tables.reserve(seq_id, len(tokens) + self.room):
            idle = next((known for known in self._known if known not in staying), None)
            if idle is None:
                self.release(seq_id)
                return False
            self.release(idle)
        return True
