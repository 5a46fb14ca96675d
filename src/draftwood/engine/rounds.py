"""Rounds that live on the device: guess, score, keep, all from what the seats hold; on CUDA each is one captured graph.

A round is the engine's step without the host in it. Its code is the same whether it is captured or run call by call;
capturing only takes the host out of the way. Graphs are made when first needed, by (batch, nodes, length of the longest
sequence, kind of sampling). Prompts are read by graphs too, if they are short; while others decode, in their rounds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from draftwood.cache.kv import stage_trees
from draftwood.cache.resident import ResidentDrafter, round_batch
from draftwood.cache.seats import Kind, SeatedView, Seats
from draftwood.cache.text import SEQUENCES, TextFrame
from draftwood.drafters.resident import ResidentNone
from draftwood.engine.plan import Plan
from draftwood.engine.scoring import stage_prompts
from draftwood.engine.trace import NUM_FACTS, facts, step_trace
from draftwood.faults import DrafterFailed, DrafterHealth, attributed
from draftwood.model.batch import ForwardBatch, with_text
from draftwood.model.runner import ModelRunner
from draftwood.ops.choice import likeliest
from draftwood.protocols import Features, Randomness, Span, Verifier
from draftwood.request import StepTrace
from draftwood.sampling import target_distribution
from draftwood.tree import HostVerdict, TokenTree, Verdict
from draftwood.verifiers.path import keep_chosen

HOST = torch.device("cpu")
PATIENCE = 32  # rounds' time that may be lost by making do with others: preparing one takes as long, or longer
FREE_ROWS = 256  # take as long as reading all weights, and each as many more as long again
LONG_TABLES = 0.1  # what is lost with longer tables than needed
APART = 1.0  # plain rounds' time that is lost by reading pieces of prompts apart: weights are read once more
READINGS = (16, 32, 64, 128, 256, 512)  # rows of pieces of prompts that are read by one graph
RIDES = (64, 128, 256, 512)  # the same within a round
MOST_RIDES = 48  # such rounds: there are many sizes, and each takes memory that nobody else gets back
LENGTHS = (1024, 4096, 16384)  # tokens: kernels are cut up for what sequences could have, not for what they have


def seats_for(target: ModelRunner, capacity: int, max_nodes: int) -> Seats:
    """Room for sequences as long as the model and its cache let them be."""
    tables = target.cache.tables
    longest = min(target.model.config.max_positions, tables.capacity) + 2 * max_nodes + 2
    return Seats(capacity, longest, tables.page_size, target.cache.scratch_page, target.device)


@dataclass(frozen=True)
class Size:
    """What a round has room for."""

    batch: int  # sequences
    nodes: int  # of each one's tree, without the root
    pages: int  # of each sequence
    text: int = 0  # rows of prompts

    @property
    def rows(self) -> int:
        """That the target runs."""
        return self.batch * (1 + self.nodes) + self.text

    def lost_with(self, other: Size) -> float:
        """Plain rounds' time that is lost by running a larger or shorter one: rows for nobody, tokens not guessed."""
        idle = (other.batch - self.batch) * (1 + other.nodes) / FREE_ROWS
        unguessed = (self.nodes - other.nodes) / (1 + self.nodes)
        return idle + unguessed + (LONG_TABLES if other.pages > self.pages else 0.0)


@dataclass
class Round:
    """One size and kind of round, ready to be run again and again."""

    rows: Tensor  # [B] seats, written before every run
    run: Callable[[], None]
    outcome: Tensor  # [B, 3 + D] what the last run earned, see `Seats.advance`
    facts: Tensor | None  # [B * (1 + N), 6] what it guessed, if anybody wants to know


@dataclass(frozen=True)
class _Replay:
    """A graph, and what it was captured from: a graph keeps nothing alive of what it reads."""

    graph: torch.cuda.CUDAGraph
    run: Callable[[], None]

    def __call__(self) -> None:
        self.graph.replay()


@dataclass
class Launched:
    """A round on its way: where its outcome will be, and when."""

    host: Tensor  # [B, 3 + D]
    arrived: torch.cuda.Event | None
    size: int  # sequences; the rest of the batch is padding
    facts: Tensor | None = None  # [B * (1 + N), 6]

    def wait(self) -> HostVerdict:
        """The outcome, once it is there."""
        if self.arrived is not None:
            self.arrived.synchronize()
        rows = self.host[: self.size].tolist()
        return HostVerdict(
            tokens=[[*row[3 : 3 + row[0]], row[1]] for row in rows],
            accepted=[row[0] for row in rows],
            drafted=[row[2] for row in rows],
            drift=[0.0] * len(rows),
        )

    def trace(self, b: int) -> StepTrace | None:
        """What the round did for its b-th sequence, if it was made to tell; once the outcome is there."""
        if self.facts is None:
            return None
        tree = self.facts.view(len(self.host), -1, NUM_FACTS)[b].tolist()
        return step_trace(tree, int(self.host[b, 1]), self.size, self.size * len(tree))


@dataclass
class Rounds:
    """Runs rounds, and keeps those it has captured."""

    target: ModelRunner
    drafter: ResidentDrafter
    law_of: Callable[[str | None], Verifier]  # by the name a request gives
    rng: Randomness
    seats: Seats
    captures: bool  # False: call by call, to look inside, or where there are no graphs
    health: DrafterHealth = field(default_factory=lambda: DrafterHealth("drafter"))
    _known: dict[tuple[Size, Kind], Round] = field(default_factory=dict)
    _refused: set[Kind] = field(default_factory=set)
    _roots: dict[int, TokenTree] = field(default_factory=dict)
    _lost: dict[tuple[Size, Kind], float] = field(default_factory=dict)  # rounds' time, by what was wanted
    _frames: dict[tuple[int, int], TextFrame] = field(default_factory=dict)  # by rows and pages
    _readings: dict[tuple[int, int], Callable[[], None]] = field(default_factory=dict)
    _pool: Any = None
    _side: Any = None

    @property
    def ready(self) -> list[Round]:
        """Rounds that have been prepared so far."""
        return list(self._known.values())

    def can_run(self, kind: Kind) -> bool:
        """Whether rounds of this kind need nothing from the host."""
        return kind not in self._refused and self.drafter.suits(kind, self.law_of(kind.law))

    def prepare(self, size: Size, kind: Kind) -> bool:
        """Have such a round ready; False, now and ever after, if its law turns out to look at values on the host.

        Raises `DrafterFailed` if the drafter cannot run it; see `go_on_plainly`.
        """
        try:
            self._round(size, kind)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if not self.captures:
                raise
            reason = str(error).splitlines()[0]
            logging.getLogger(__name__).warning("No rounds for %s, it goes step by step: %s", kind, reason)
            self._refused.add(kind)
        return kind not in self._refused

    def is_ready(self, size: Size, kind: Kind) -> bool:
        """Whether such a round has been prepared."""
        return (size, kind) in self._known

    def size_for(self, count: int, room: int, pages: int, kind: Kind) -> Size:
        """What to run `count` sequences with, of which none has more than so many `pages`, when there is room for so
        many nodes each.

        Preparing a round takes as long as dozens of them. So the best of those that are ready is taken, until as much
        has been lost by it. One that guesses nothing is no substitute: drafters that read along would fall behind.
        """
        nodes = max(size for size in self.drafter.sizes if size <= room)
        wanted = Size(round_batch(count), nodes, self._pages_for(pages))
        if (wanted, kind) in self._known:
            return wanted
        ready = [known for known, its_kind in self._known if its_kind == kind and self._holds(known.pages, pages)]
        fitting = [
            known
            for known in ready
            if count <= known.batch and known.nodes <= nodes and (known.nodes > 0) == (nodes > 0) and not known.text
        ]
        instead = min(fitting, key=wanted.lost_with, default=wanted)
        return wanted if self._missed(wanted, kind, wanted.lost_with(instead)) else instead

    def with_room_for(self, spans: Sequence[Span], size: Size, kind: Kind, max_rows: int) -> Size | None:
        """A round like that of `size` which reads these pieces of prompts as well. None where they are to be read
        apart: because they do not fit, or because no such round is ready and little has been lost by that so far.
        """
        rows = sum(span.end - span.start for span in spans)
        rides = [replace(size, text=text) for text in RIDES if text >= rows]
        rides = [ride for ride in rides if ride.rows <= max_rows]
        if not rides or len(spans) > SEQUENCES or not self._holds(size.pages, self._most_pages(spans)):
            return None
        wanted = rides[0]
        if (wanted, kind) in self._known:
            return wanted
        lost = {ride: (ride.text - wanted.text) / FREE_ROWS for ride in rides if (ride, kind) in self._known}
        instead = min((ride for ride in lost if lost[ride] < APART), key=lambda ride: ride.text, default=None)
        may_prepare = sum(known.text > 0 for known, _ in self._known) < MOST_RIDES
        missed = self._missed(wanted, kind, APART if instead is None else lost[instead])
        return wanted if missed and may_prepare else instead

    def _missed(self, wanted: Size, kind: Kind, lost: float) -> bool:
        """So much was lost once more because such a round is not ready: whether it is time to prepare it."""
        self._lost[wanted, kind] = self._lost.get((wanted, kind), 0.0) + lost
        return self._lost[wanted, kind] > PATIENCE

    def _most_pages(self, spans: Sequence[Span]) -> int:
        return max(len(self.target.cache.tables.pages(span.seq_id)) for span in spans)

    def _pages_for(self, pages: int) -> int:
        whole = self.seats.num_pages
        rounded = (length // self.target.cache.page_size for length in LENGTHS)
        return next((some for some in rounded if some < whole and self._holds(some, pages)), whole)

    def _holds(self, some: int, pages: int) -> bool:
        """The last is nobody's: what a sequence that has ended unheard writes behind its own pages goes there."""
        return pages < some or some == self.seats.num_pages

    def launch(self, plan: Plan, size: Size, kind: Kind, spans: Sequence[Span] = ()) -> Launched:
        """Start a round of a `size` that holds the plan's sequences, and pieces of prompts; nobody waits for it."""
        seq_ids = [item.seq.id for item in plan.items]
        todo = self._round(size, kind)
        if spans:
            self._frame(size.text, size.pages).fill(self.target.cache.stage_text(spans, HOST))
        if size.nodes and self.drafter.waits:
            with attributed("prepare"):
                self.drafter.prepare(plan.view(HOST), size.batch, size.nodes)
        todo.rows.copy_(self.seats.rows(seq_ids, size.batch))
        todo.run()
        told = None if todo.facts is None else _on_its_way(todo.facts)
        outcome = _on_its_way(todo.outcome)
        if todo.outcome.device.type == "cpu":
            return Launched(outcome, None, len(seq_ids), told)
        arrived = torch.cuda.Event()
        arrived.record()
        return Launched(outcome, arrived, len(seq_ids), told)

    def read(self, spans: Sequence[Span]) -> None:
        """Run pieces of prompts through target and drafter: a few short ones by a graph, others call by call."""
        rows = sum(span.end - span.start for span in spans)
        if not self.captures or len(spans) > SEQUENCES or rows > READINGS[-1]:
            return self._run_text(self.target.cache.stage_text(spans))
        size = next(size for size in READINGS if size >= rows), self._pages_for(self._most_pages(spans))
        if size not in self._readings:
            self._readings[size] = self._prepare_reading(*size)
        self._frame(*size).fill(self.target.cache.stage_text(spans, HOST))
        self._readings[size]()

    def read_scored(self, plan: Plan) -> Tensor:
        """The same, call by call, with logits at the plan's `scored_rows`. [K, V]."""
        batch = stage_prompts(plan, self.target.cache)
        out = self.target.forward(batch, self.drafter.needs)
        self._hand_on(replace(batch, logit_rows=batch.logit_rows[:0]), out.features)
        return out.logits

    def _frame(self, rows: int, pages: int) -> TextFrame:
        if (rows, pages) not in self._frames:
            cache = self.target.cache
            self._frames[rows, pages] = TextFrame(rows, pages, cache.page_size, cache.scratch_page, self.seats.device)
        return self._frames[rows, pages]

    def _prepare_reading(self, rows: int, pages: int) -> Callable[[], None]:
        frame = self._frame(rows, pages)
        frame.clear()
        return self._ready(lambda: self._run_text(frame.batch))  # on nobody's pages

    def _run_text(self, batch: ForwardBatch) -> None:
        self._hand_on(batch, self.target.forward(batch, self.drafter.needs).features)

    def _hand_on(self, text: ForwardBatch, features: Features) -> None:
        """Let the drafter know of text, and of what the target has made of its rows."""
        with attributed("read"):
            if self.drafter.needs:
                self.drafter.take_in(text, features)
            if self.drafter.reads:
                self.drafter.read(text)

    def go_on_plainly(self, failure: DrafterFailed) -> None:
        """Run rounds without drafts from now on. Whatever was under way may simply be run again: a round moves its
        sequences on by its last act, and what it wrote before that lies behind their texts.

        For good: what the drafter has read is part of every captured round, and cannot be read again for it.
        """
        self.health.failed(failure.call, failure.error, for_good=True)
        if self.seats.device.type == "cuda":
            torch.cuda.synchronize()  # graphs that are still running are about to be dropped
        self.drafter = ResidentNone()
        for made in (self._known, self._readings, self._lost, self._refused):
            made.clear()

    def rehearsals(self, kind: Kind) -> list[Callable[[], object]]:
        """What compiles a piece of a prompt, a plain round and one with guesses, each without the others."""
        sizes = (Size(1, nodes, self._pages_for(1)) for nodes in {0, self.drafter.sizes[-1]})
        piece = partial(self._prepare_reading, READINGS[0], self._pages_for(1))
        return [piece, *(partial(self._prepare, size, kind) for size in sizes)]

    def seconds(self, seq_ids: Sequence[int], nodes: int, kind: Kind, repeats: int) -> float:
        """How long such a round takes on the device, nothing in between; what the sequences earn is not heard."""
        todo = self._round_of(seq_ids, nodes, kind)
        todo.run()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            todo.run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000 / repeats

    def _round_of(self, seq_ids: Sequence[int], nodes: int, kind: Kind) -> Round:
        """For these sequences and no more."""
        pages = self._pages_for(self.seats.most_pages(seq_ids))
        todo = self._round(Size(len(seq_ids), nodes, pages), kind)
        todo.rows.copy_(self.seats.rows(seq_ids, len(seq_ids)))
        return todo

    def _round(self, size: Size, kind: Kind) -> Round:
        known = self._known.get((size, kind))
        if known is None:
            known = self._known[size, kind] = self._prepare(size, kind)
        return known

    def _prepare(self, size: Size, kind: Kind) -> Round:
        rows = torch.full((size.batch,), self.seats.nobody, device=self.seats.device)
        depth = self.drafter.depth(size.nodes) if size.nodes else 0
        outcome = torch.zeros(size.batch, 3 + depth, dtype=torch.int64, device=self.seats.device)
        shape = size.rows - size.text, NUM_FACTS
        told = torch.zeros(shape, dtype=torch.float64, device=self.seats.device) if kind.traced else None
        if size.text:
            self._frame(size.text, size.pages).clear()

        def run() -> None:
            self._step(rows, size, kind, outcome, told)

        return Round(rows, self._ready(run), outcome, told)  # on nobody's seat

    def _step(self, rows: Tensor, size: Size, kind: Kind, outcome: Tensor, told: Tensor | None) -> None:
        """The decode step, from seats to seats."""
        view, nodes = self.seats.view(rows, kind, size.pages), size.nodes
        with attributed("propose"):
            tree = self.drafter.propose(view, nodes, self.rng) if nodes else self._bare_roots(view)
        memory = self.target.cache
        batch = stage_trees(
            view,
            tree,
            memory.page_size,
            self.target.model.config.max_positions,
            chain=not nodes or self.drafter.law.chain,
        )
        text = self._frame(size.text, size.pages).batch if size.text else None
        out = self.target.forward(batch if text is None else with_text(batch, text), self.drafter.needs)
        verdict = self._verdict(out.logits, tree, view, kind)
        if told is not None:
            told.copy_(facts(out.logits, tree, verdict, view))
        if nodes:
            index = tree.local[verdict.path.clamp(min=0)]
            memory.keep(view.block_table, view.lengths, index, verdict.length, chain=batch.linear)
            with attributed("keep"):
                self.drafter.keep(view, tree, index, verdict.length)
        if self.drafter.needs:
            with attributed("learn"):
                self.drafter.learn(view, verdict.path, out.features)
        if text is not None:
            self._hand_on(text, {layer: rows[len(batch.tokens) :] for layer, rows in out.features.items()})
        self.seats.advance(view, tree, verdict, outcome)

    def _verdict(self, logits: Tensor, tree: TokenTree, view: SeatedView, kind: Kind) -> Verdict:
        law = self.law_of(kind.law)
        if kind.greedy and law.lossless:  # without chance every lossless law keeps the longest match
            choices = likeliest(logits)
            return keep_chosen(tree, choices) if tree.num_drafted else Verdict.of_roots(tree, choices)
        return law.verify(tree, target_distribution(logits, tree, view), view, self.rng)

    def _bare_roots(self, view: SeatedView) -> TokenTree:
        size = len(view.rows)
        if size not in self._roots:
            self._roots[size] = TokenTree.roots(torch.zeros_like(view.rows))
        return self._roots[size].refilled(view.roots)

    def _ready(self, run: Callable[[], None]) -> Callable[[], None]:
        """The same once everything is compiled; where there are graphs, as one."""
        if self.captures:
            return self._captured(run)
        run()
        return run

    def _captured(self, run: Callable[[], None]) -> Callable[[], None]:
        """The same as one CUDA graph. Graphs run one after the other and leave nothing behind but their outcome, so all
        of them share their memory.
        """
        if self._pool is None:
            self._pool, self._side = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            run()  # libraries set themselves up in the first call on a stream
        torch.cuda.current_stream().wait_stream(self._side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._side):
            run()
        return _Replay(graph, run)


def _on_its_way(found: Tensor) -> Tensor:
    """A copy for the host, which is there when the device gets to it."""
    if found.device.type == "cpu":
        return found.clone()
    return torch.empty(found.shape, dtype=found.dtype, pin_memory=True).copy_(found, non_blocking=True)
