"""The narrow waist: every border between the parts of a decode step, and the values that cross it.

Legend: B sequences that sample in a step · M tree nodes of the batch, roots included · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from draftwood.request import SamplingParams
from draftwood.tree import DraftLaw, TokenTree, Verdict
from draftwood.treebuilder import TreeBuilder


@dataclass(frozen=True)
class Budget:
    """How much a step may guess: draft nodes a sequence, the root not counted."""

    max_nodes: int
    worth: float = 0.0  # the chance of acceptance below which a node costs more than it gives, as far as one can tell
    why: object = field(default="", compare=False)  # the controller's reason; its `str` is for people, if any ask


@dataclass(frozen=True)
class Load:
    """What a controller sees of the queue."""

    num_running: int
    num_waiting: int
    context: float = 0.0  # mean length of those that run
    padded: bool = False  # every sequence runs as many nodes, whether they were guessed or not


@dataclass(frozen=True)
class StepReport:
    """What came of a step, for controllers and telemetry."""

    num_rows: int  # rows the target ran: pending tokens and draft nodes
    num_sampling: int
    drafted: int
    accepted: int
    emitted: int
    outcomes: tuple[tuple[int, int], ...] = ()  # (drafted, accepted) of each sequence that sampled
    draft_seconds: float | None = 0.0  # None: cannot be told apart
    step_seconds: float | None = None  # of all of it, where that is known instead
    context: float = 0.0  # mean length of those that sampled, where that is
    room: int = 0  # draft nodes that each of them could have had


@dataclass(frozen=True)
class TimedStep:
    """A step that only decoded, and the seconds it took as a whole."""

    report: StepReport
    seconds: float


@dataclass(frozen=True)
class Truncation:
    """What is cut off each sequence's distribution before drawing; see `SamplingParams`."""

    top_k: Tensor  # [B] int64, beyond every vocabulary where it is off
    top_p: Tensor  # [B] float64
    min_p: Tensor  # [B] float64

    OFF = (1 << 31, 1.0, 0.0)

    @classmethod
    def limits(cls, params: SamplingParams) -> tuple[int, float, float]:
        """One request's limits."""
        return (params.top_k or cls.OFF[0], params.top_p, params.min_p) if params.truncates else cls.OFF


class Constraint(Protocol):
    """What one answer may be: a grammar, somewhere along its way."""

    @property
    def error(self) -> str | None:
        """Why nothing can follow any more, or None. From then on everything is allowed, and the answer must end."""
        ...

    def allowed(self, answer: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> Tensor:
        """What may follow each node of a tree behind `answer`, along the node's own path; the first node is the end of
        the answer itself, the parents of the others count inside the tree. [n, V] bool, on the host.
        """
        ...


@dataclass(frozen=True)
class BatchView:
    """What drafters and verifiers may know of the sequences that sample in this step; nobody writes to it."""

    seq_ids: tuple[int, ...]
    tokens: Sequence[Sequence[int]]  # committed tokens of each, the root last
    prompt_lengths: tuple[int, ...]
    params: tuple[SamplingParams, ...]
    bad_words: tuple[tuple[tuple[int, ...], ...], ...]  # tokenised
    lengths: Tensor  # [B] int64 committed tokens: the position of the next token, and the name of this round
    seeds: Tensor  # [B] int64
    temperature: Tensor  # [B] float32
    max_nodes: Tensor  # [B] int64 draft nodes that have room
    max_depth: Tensor  # [B] int64 draft tokens that could still be emitted
    # Tokens that the caller expects of each answer, and what each may be; nothing at all where nobody asks for it.
    predictions: tuple[tuple[int, ...], ...] = field(default=(), kw_only=True)
    constraints: tuple[Constraint | None, ...] = field(default=(), kw_only=True)
    # Stop tokens that may not end an answer yet, because it would be shorter than its `min_tokens`.
    early_stop_ids: tuple[frozenset[int], ...] = field(default=(), kw_only=True)

    @cached_property
    def roots(self) -> Tensor:
        """The last committed token of each sequence. [B]."""
        return torch.tensor([tokens[-1] for tokens in self.tokens], device=self.lengths.device)

    @cached_property
    def truncation(self) -> Truncation:
        """What is cut off before drawing."""
        columns = zip(*map(Truncation.limits, self.params), strict=True)
        dtypes = (torch.int64, torch.float64, torch.float64)
        return Truncation(
            *(torch.tensor(c, dtype=t, device=self.lengths.device) for c, t in zip(columns, dtypes, strict=True))
        )

    def take(self, rows: Sequence[int]) -> BatchView:
        """The same of some of the sequences."""
        return BatchView(
            seq_ids=tuple(self.seq_ids[b] for b in rows),
            tokens=[self.tokens[b] for b in rows],
            prompt_lengths=tuple(self.prompt_lengths[b] for b in rows),
            params=tuple(self.params[b] for b in rows),
            bad_words=tuple(self.bad_words[b] for b in rows),
            lengths=self.lengths[rows],
            seeds=self.seeds[rows],
            temperature=self.temperature[rows],
            max_nodes=self.max_nodes[rows],
            max_depth=self.max_depth[rows],
            predictions=tuple(self.predictions[b] for b in rows) if self.predictions else (),
            constraints=tuple(self.constraints[b] for b in rows) if self.constraints else (),
            early_stop_ids=tuple(self.early_stop_ids[b] for b in rows) if self.early_stop_ids else (),
        )


Features = Mapping[int, Tensor]  # layer -> [rows, hidden] the residual stream after it


@dataclass(frozen=True)
class Span:
    """Committed tokens [start, end) of one sequence that a forward has to run."""

    seq_id: int
    tokens: Sequence[int]
    start: int
    end: int


class Randomness(Protocol):
    """The only two ways to be random. Keys name a draw; see rng.py for what makes them safe."""

    def pick(self, weights: Tensor, keys: Tensor) -> Tensor:
        """An index in proportion to `weights`. [B, V], [B] -> [B] int64."""
        ...

    def race(self, weights: Tensor, keys: Tensor, winners: int = 1) -> Tensor:
        """Indices in proportion to `weights`, none twice, by noise that similar weights share. [B, winners]."""
        ...


class Drafter(Protocol):
    """Guesses trees. Returning bare roots is always right: cold, without room, or out of ideas."""

    @property
    def law(self) -> DraftLaw:
        """How the nodes of every tree are chosen."""
        ...

    @property
    def max_nodes(self) -> int:
        """The largest tree it would like to propose for one sequence, the root not counted."""
        ...

    @property
    def needs(self) -> frozenset[int]:
        """Layers of the target whose output it wants to observe; usually none."""
        ...

    def propose(self, view: BatchView, budget: Budget, rng: Randomness) -> TokenTree:
        """A tree for each sequence of the view, within `budget` and the view's room."""
        ...

    def read(self, spans: Sequence[Span], features: Features) -> None:
        """What the target made of committed tokens, span by span. Only called for those who need something."""
        ...

    def observe(self, view: BatchView, tree: TokenTree, verdict: Verdict, features: Features) -> None:
        """What became of the proposal; with what the target made of its nodes, in the tree's order."""
        ...

    def release(self, seq_id: int) -> None:
        """The sequence is gone; forget it. Also called for sequences it never saw."""
        ...


class FrontierModel(Protocol):
    """What a neural drafter is to a grower: something that scores the nodes of a growing tree."""

    def begin(self, view: BatchView) -> Tensor:
        """Logits at the roots. [B, V]."""
        ...

    def extend(self, builder: TreeBuilder, columns: Tensor) -> Tensor:
        """Logits at the living nodes in `columns` [B, k]; dead ones get any row. [B, k, V]."""
        ...


@runtime_checkable
class ChainModel(FrontierModel, Protocol):
    """One that can guess several tokens on end by itself, which saves the steps in between."""

    def chain(self, view: BatchView, depth: int) -> Tensor | None:
        """The likeliest token after each text, the likeliest after that, …; None: ask step by step. [B, depth]."""
        ...


class Grower(Protocol):
    """A tree shape; knows no network."""

    @property
    def law(self) -> DraftLaw:
        """How it chooses nodes."""
        ...

    @property
    def max_nodes(self) -> int:
        """Its largest tree, the root not counted."""
        ...

    def grow(self, model: FrontierModel, view: BatchView, budget: Budget, rng: Randomness) -> TreeBuilder:
        """Grow a tree for each sequence of the view."""
        ...


class Verifier(Protocol):
    """An acceptance law: a pure function of the tree, the target's rows and the randomness."""

    name: str
    lossless: bool
    reproducible: bool  # seed, prompt and model alone decide the tokens, whatever trees it is given

    def refuses(self, law: DraftLaw) -> str | None:
        """Why it would not be exact for such trees, or None if it is."""
        ...

    def verify(self, tree: TokenTree, p: Tensor, view: BatchView, rng: Randomness) -> Verdict:
        """Keep a path of each tree. `p` [M, V] is the target's distribution after each node."""
        ...


class Controller(Protocol):
    """Decides how much to guess."""

    def budget(self, load: Load) -> Budget:
        """The budget of the next step."""
        ...

    def observe(self, report: StepReport) -> None:
        """What came of the last one."""
        ...


@runtime_checkable
class PredictsSeconds(Protocol):
    """A controller that knows what a step costs."""

    def predicted_seconds(self, report: StepReport) -> float | None:
        """What a step like this one should take, drafting included; None where nothing was measured to tell by."""
        ...
