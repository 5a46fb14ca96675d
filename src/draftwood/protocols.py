"""The narrow waist: every border between the parts of a decode step, and the values that cross it.

What drafters and tree growers are is in `drafting.py`; they need caches and models.
Legend: B sequences of a step · M tree nodes of the batch, roots included · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Protocol, runtime_checkable

from torch import Tensor

from draftwood.batch import Images, Source
from draftwood.request import SamplingParams
from draftwood.tree import DraftLaw, TokenTree, Verdict

LOGITS = -1  # of a drafter's `needs`: the target's logits at tree nodes; rows of prompts have none
PREDICTED = 32  # draft nodes for what the caller expects of an answer, beside the drafter's own


@dataclass(frozen=True)
class Gain:
    """How many times as many tokens a second steps with drafts give as plain ones do; None: not known."""

    expected: float | None = None  # of the chosen size, where there is something to propose; 1: no drafts
    measured: float | None = None  # by the clock, of steps with drafts lately


@dataclass(frozen=True)
class Budget:
    """How much a step may guess: draft nodes a sequence, the root not counted."""

    max_nodes: int
    min_accept_prob: float = 0.0  # chance of acceptance below which a node costs more than it gives
    why: object = field(default="", compare=False)  # the controller's reason; its `str` is for people, if any ask
    gain: Gain = field(default=Gain(), compare=False)
    max_prompt_rows: int | None = None  # beside sequences that decode, so that these wait no longer than promised
    drafters: Mapping[int, str] = field(default_factory=dict)  # sequence -> which drafts, unless its request names one
    seconds: float | None = None  # that the step is expected to take; None: not known


@dataclass(frozen=True)
class Pace:
    """What a running sequence has been promised for the tokens behind its first."""

    per_token: float  # seconds
    left: float  # seconds until its next token is due; less than 0: it is late
    gain: float = 1.0  # what drafts gain it, relative to what they gain an average sequence


@dataclass(frozen=True)
class Load:
    """What a controller sees of the queue."""

    num_running: int
    num_waiting: int
    context: float = 0.0  # mean length of those that run
    padded: bool = False  # every sequence runs as many nodes, whether they were guessed or not
    paces: tuple[Pace, ...] = ()  # of those that decode and were promised one
    sequences: tuple[int, ...] = ()  # that run


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
    step_seconds: float | None = None  # of all of it, drafting included; None: something else took time meanwhile
    context: float = 0.0  # mean length of those that sampled, where that is
    room: int = 0  # draft nodes that each of them could have had
    prompt_rows: int = 0  # that were prefilled in the same time
    whole_seconds: float | None = None  # of all of it, those rows included; None: something else took time as well
    sequences: tuple[int, ...] = ()  # that `outcomes` are of
    drafters: tuple[str | None, ...] = ()  # of each, by the name that requests give


@dataclass(frozen=True)
class TimedStep:
    """A step that only decoded, and the seconds it took as a whole."""

    report: StepReport
    seconds: float


@dataclass(frozen=True)
class StepMode:
    """What the code of a step has to do: the union of what its requests ask for. A captured step has one."""

    laws: tuple[str | None, ...] = (None,)  # acceptance laws by the name a request gives, None: the engine's
    drafters: tuple[str | None, ...] = (None,)  # likewise
    greedy: bool = False  # every sequence takes the likeliest token, and every law is lossless
    truncates: bool = False  # some have top-k, top-p or min-p
    limited: bool = False  # some may have fewer or less deep draft nodes than others, or need more
    predicted: bool = False  # some come with the text their caller expects
    masked: bool = False  # the host gives masks of what may follow the nodes of some
    traced: bool = False  # some ask for traces
    adapted: bool = False  # some have an adapter of the target

    def covers(self, other: StepMode) -> bool:
        """Whether a step of this mode also does what `other` does."""
        flags = (f.name for f in fields(self) if f.type == "bool" and f.name != "greedy")
        named = set(other.laws) <= set(self.laws) and set(other.drafters) <= set(self.drafters)
        return named and self.greedy <= other.greedy and all(getattr(self, f) >= getattr(other, f) for f in flags)


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


@dataclass(frozen=True)
class LogitEdits:
    """What comes between logits and temperature for E of the sequences of a step, most recent tokens included."""

    which: Tensor  # [E] int64 sequences of the batch; one may come again
    bias_tokens: Tensor  # [E, A] int64, padded with any token
    bias: Tensor  # [E, A] float64, 0 where it is padded
    penalties: Tensor  # [E, 3] float64 repetition, presence, frequency
    stop_tokens: Tensor  # [E, S] int64 what may not end an answer before its minimum length, -1 padded
    min_lengths: Tensor  # [E] int64 tokens, the prompt's included, before which that holds
    source_lengths: Tensor  # [E] int64 first tokens that an encoder has read, which are no text of the answer's
    prompt_lengths: Tensor  # [E] int64 source included
    lengths: Tensor  # [E] int64
    history: Tensor  # [E, L] int64 committed tokens


@dataclass(frozen=True)
class NodeMasks:
    """What may follow some nodes of a step's trees, by the grammars and bad words of their requests."""

    nodes: Tensor  # [K] int64; one may come again
    allowed: Tensor  # [K, V] bool


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
class HostView:
    """What the host knows of the sequences of a step; it may be behind the device by one step."""

    seq_ids: tuple[int, ...]
    tokens: Sequence[Sequence[int]]  # committed tokens of each, the root last
    prompt_lengths: tuple[int, ...]
    params: tuple[SamplingParams, ...]
    max_nodes: tuple[int, ...]  # draft nodes that have room
    max_depth: tuple[int, ...]  # draft tokens that could still be emitted
    drafters: tuple[str | None, ...] = ()  # which drafts for each, by name; () where there is one
    bad_words: tuple[tuple[tuple[int, ...], ...], ...] = ()  # tokenised; () where no request has any
    predictions: tuple[tuple[int, ...], ...] = ()  # tokens that the caller expects of each answer; likewise
    constraints: tuple[Constraint | None, ...] = ()  # likewise
    resting: HostView | None = None  # sequences that decode, but not in this step

    def take(self, rows: Sequence[int]) -> HostView:
        """The same of some of the sequences."""
        columns = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "resting"}
        taken = {name: tuple(column[b] for b in rows) if column else () for name, column in columns.items()}
        return HostView(**taken, resting=self.resting)


@dataclass(frozen=True)
class BatchView:
    """What drafters and laws may know of the sequences of a step: tensors on its device, read only."""

    lengths: Tensor  # [B] int64 committed tokens: the position of the next token, and the name of this round
    seeds: Tensor  # [B] int64
    roots: Tensor  # [B] int64 the last committed token of each
    temperature: Tensor  # [B] float32
    rows: Tensor  # [B] int64 rows of `history`
    history: Tensor  # [any, L] int64 committed tokens, row by row
    block_table: Tensor  # [B, P] int64 pages of each sequence, never -1
    states: Tensor | None = None  # [B] int64 where their states lie, for models with recurrent layers
    salts: Tensor | None = None  # [any] int64 row by row, less than 0 where rows only fill up: who may learn from whom
    mode: StepMode = field(default_factory=StepMode)
    truncation: Truncation | None = None  # None: nothing is cut off
    max_nodes: Tensor | None = None  # [B] int64 own nodes of the drafter that have room; None: as many as the step has
    max_depth: Tensor | None = None  # [B] int64 draft tokens that could still be emitted; None: any number
    law: Tensor | None = None  # [B] int64 which of the mode's laws each has; None: there is one
    drafter: Tensor | None = None  # [B] int64 likewise
    adapters: Tensor | None = None  # [B] int64 which of the target's adapters each has, -1: none; None: none has
    edits: LogitEdits | None = None
    source_lengths: Tensor | None = None  # [B] int64 first tokens that an encoder reads; None: there is no encoder
    turn_shifts: Tensor | None = None  # [B] int64 added to positions for rotation; None: no images have such rows
    need: Tensor | None = (
        None  # [B] float32 accepted tokens that keep each sequence's promise; None: nothing is promised
    )
    gained: int | None = None  # no sequence has gained more tokens in the last step; None: as many as a tree is deep
    min_accept_prob: float = 0.0  # chosen nodes that are less likely to be accepted should be absent
    may_look: bool = False  # values may be looked at on the host: nothing is captured, and looking is cheap

    @property
    def size(self) -> int:
        """B."""
        return self.lengths.shape[0]

    @property
    def num_run(self) -> Tensor:
        """Tokens of each sequence that are in the target's KV cache: all but the last. [B]."""
        return self.lengths - 1

    def take(self, rows: Tensor) -> BatchView:
        """The view of some of its sequences [b]; without logit edits, which only the whole step needs."""
        per_sequence = ("lengths", "seeds", "roots", "temperature", "rows", "block_table")
        optional = (
            "states",
            "max_nodes",
            "max_depth",
            "law",
            "drafter",
            "adapters",
            "source_lengths",
            "turn_shifts",
            "need",
        )
        taken = {name: getattr(self, name)[rows] for name in per_sequence}
        taken |= {name: part[rows] for name in optional if (part := getattr(self, name)) is not None}
        limits = self.truncation
        if limits is not None:
            taken["truncation"] = Truncation(limits.top_k[rows], limits.top_p[rows], limits.min_p[rows])
        return replace(self, edits=None, **taken)


# layer -> [rows, hidden] the residual stream after it; `LOGITS` -> [rows, V], of tree nodes only
Features = Mapping[int, Tensor]


@dataclass(frozen=True)
class Span:
    """Committed tokens [start, end) of one sequence that a forward has to run."""

    seq_id: int
    tokens: Sequence[int]  # those of its source included
    start: int
    end: int
    source: Source | None = None  # what an encoder reads before the text
    images: Images | None = None  # what stands at its image tokens
    adapter: int = -1  # which of the target's adapters its request has; -1: none


class Randomness(Protocol):
    """The only two ways to be random. Keys name a draw; see rng.py for what makes them safe."""

    def pick(self, weights: Tensor, keys: Tensor) -> Tensor:
        """An index in proportion to `weights`. [B, V], [B] -> [B] int64."""
        ...

    def race(self, weights: Tensor, keys: Tensor, winners: int = 1) -> Tensor:
        """Indices in proportion to `weights`, none twice, by noise that similar weights share. [B, winners]."""
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
