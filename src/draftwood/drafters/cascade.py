"""A middle level checks what an inner drafter guesses before the target does: chains of the middle's own words, several
of which come of one forward of it.

    inner    guesses a tree behind the text                    a─b, a─c
    middle   runs the last token and the tree in one forward:  would say a, c, then d     -> a c d
    inner    guesses behind a c d, where it can                …
    target   checks the chain                                  a c d …

A draft is the token that the middle holds likeliest, so it is chosen, not drawn, and every law for chosen tokens is
exact, whatever inner and middle are. Or it is drawn from what the middle holds, with noise of its own, and a guess is
kept if it is what was drawn. Guesses decide how far a chain goes, never what is drawn at a place, and no draw is
dropped for its value: laws for drawn chains are exact with the middle's distributions.

How many forwards the middle makes, or whether the inner tree goes to the target as it is, is chosen step by step where
the host may look (`rates.py`); a captured step always makes as many.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from draftwood.batch import ForwardBatch
from draftwood.cache.kv import Places
from draftwood.drafters.chains import Chains, Rows
from draftwood.drafters.lookup import LookupDrafter, chains_behind
from draftwood.drafters.model import ModelDrafter
from draftwood.drafters.ngram import NgramDrafter
from draftwood.drafters.rates import Rates
from draftwood.drafters.view import ViewDrafter
from draftwood.drafting import Drafter, Front, Proposal, Silent, State
from draftwood.entries import Entry, split_spec
from draftwood.errors import IncompatibleParts
from draftwood.growers.pickers import Frontier
from draftwood.model.runner import ModelRunner
from draftwood.protocols import LOGITS, BatchView, Features, HostView, Randomness
from draftwood.tree import POINT_TREE, DraftLaw, Draw, Verdict


class Middle(Protocol):
    """A model between: a view of the target, or a second model."""

    runner: ModelRunner

    @property
    def needs(self) -> frozenset[int]:
        """See `Drafter`."""
        ...

    @property
    def reads(self) -> bool:
        """See `Drafter`."""
        ...

    def attach(self, target: ModelRunner) -> None:
        """See `Drafter`."""
        ...

    def ingest(self, batch: ForwardBatch, features: Features | None) -> None:
        """See `Drafter`."""
        ...

    def begin_with(self, view: BatchView, tokens: Tensor, places: Places, room: int) -> tuple[Tensor, State]:
        """Logits at the roots and at nodes behind them, in one forward. [B, 1 + k, R]."""
        ...

    def extend(self, view: BatchView, front: Front, state: State) -> tuple[Tensor, State]:
        """See `FrontierModel`."""
        ...

    def keep(self, view: BatchView, columns: Tensor, length: Tensor) -> None:
        """Keep what it has run of the accepted path."""
        ...


class CascadeDrafter(Silent):
    """Chains of at most `nodes` tokens by at most `rounds` forwards of the middle, each of which checks `ahead` nodes
    of the inner drafter; `drawn` from what the middle says, or its likeliest.
    """

    remembers = True

    def __init__(
        self, inner: Drafter, middle: Middle, nodes: int = 8, rounds: int = 3, ahead: int = 4, drawn: int = 0
    ) -> None:
        if nodes < 1 or rounds < 1 or ahead < 1:
            raise ValueError("a cascade needs at least one node, one round and one node ahead")
        if not inner.law.draws <= POINT_TREE.draws:
            raise ValueError("the inner drafter of a cascade has to choose its tokens, and this one draws them")
        if middle.needs:
            raise ValueError(
                "the middle of a cascade is one that keeps nothing of the target's layers: not hot-experts"
            )
        if inner.reads or not inner.needs <= {LOGITS} or inner.staged(inner.max_nodes):
            raise ValueError("the inner drafter of a cascade is one without a network, such as ngram or recycling")
        self.inner, self.middle = inner, middle
        self.max_nodes, self._rounds = nodes, min(rounds, nodes)
        self._ahead = max(size for size in inner.sizes if size <= ahead)
        self.needs, self.waits = inner.needs, inner.waits
        self.law = DraftLaw(frozenset({Draw.IID}), chain=True, grown=True) if drawn else POINT_TREE
        self._drawn = bool(drawn)
        # A model with a cache of its own has to run what is accepted; guesses are not drawn.
        self.rates = Rates(self._rounds, least=1 if middle.reads or drawn else 0)

    @property
    def reads(self) -> bool:
        """If the middle does."""
        return self.middle.reads

    @property
    def sizes(self) -> Sequence[int]:
        """Any."""
        return range(self.max_nodes + 1)

    @property
    def _columns(self) -> int:
        """Places that the middle writes to."""
        return self._rounds * (1 + self._ahead)

    def attach(self, target: ModelRunner) -> None:
        """Tell both."""
        self.inner.attach(target)
        self.middle.attach(target)
        if self.middle.runner.model.config.recurrent:
            raise IncompatibleParts("The middle of a cascade runs its own words in turn: it has no recurrent layers.")

    def depth(self, nodes: int) -> int:
        """A chain."""
        return nodes

    def staged(self, nodes: int) -> int:
        """All that the middle is asked about."""
        return max(self._columns, nodes) if nodes else 0

    def prepare(self, view: HostView, size: int, nodes: int) -> None:
        """The inner drafter's part."""
        if nodes:
            self.inner.prepare(view, size, self._ahead)

    def propose(self, view: BatchView, nodes: int, rng: Randomness) -> Proposal:
        """What the middle says, or the inner tree where that is expected to be faster."""
        if nodes == 0:
            return Proposal.bare(view)
        began = time.perf_counter()
        guess = self.inner.propose(view, self._ahead, rng)
        if not view.may_look:
            return self._said(view, nodes, min(self._rounds, nodes), guess, rng)[0]
        guess, guessed = guess.packed(), time.perf_counter()
        rounds, made, proposal = self.rates.choose(nodes), 0, guess.limited(view)
        if rounds:
            proposal, count, rounds = self._said(view, nodes, rounds, guess, rng)
            made = int(count.sum())
        else:
            proposal = replace(proposal, columns=torch.zeros_like(proposal.tree.tokens))
        self.rates.proposed(view, guess.tree, (began, guessed, time.perf_counter()), rounds, made)
        return proposal

    def _said(
        self, view: BatchView, nodes: int, rounds: int, guess: Proposal, rng: Randomness
    ) -> tuple[Proposal, Tensor, int]:
        """What the middle says in so many forwards, how many tokens that is of each sequence, and forwards made."""
        chains, made = Chains.empty(view, nodes, self._columns), 0
        state, laws = (), list[Tensor]()
        while True:
            rows = chains.rows(guess.tree, first=made == 0)
            if made == 0:
                logits, state = self.middle.begin_with(view, rows.tokens[:, 1:], rows.places(1), self._columns)
            else:
                front = Front(rows.tokens, rows.depth, None, rows.depth, None, (), rows.places(0))
                logits, state = self.middle.extend(view, front, state)
            chains.follow(guess.tree, rows, self._choices(view, rows, logits, laws, rng).view(-1))
            made += 1
            if made == rounds or (view.may_look and bool((chains.count >= nodes).all())):
                break
            guess = self._guess_again(chains.behind(view), rng)
        columns = torch.nn.functional.pad(chains.columns[:, :-1], (1, 0)).view(-1)
        tree = chains_behind(view.roots, chains.tokens[:, :-1])
        if laws:
            row = torch.nn.functional.pad(chains.said[:, :-1], (1, 0), value=-1).view(-1).where(tree.tokens >= 0, -1)
            tree = replace(tree, draw=torch.where(row < 0, 0, int(Draw.IID)), q_row=row, q=torch.cat(laws))
        proposal = Proposal(tree, columns).limited(view)
        return proposal.within_pages(view, self.middle.runner.cache, self._columns), chains.count, made

    def _choices(self, view: BatchView, rows: Rows, logits: Tensor, laws: list[Tensor], rng: Randomness) -> Tensor:
        """What the middle says behind each row [B, 1 + k]; if that is drawn, `laws` get what it was drawn from."""
        if not self._drawn:
            return logits.argmax(-1)
        columns = rows.base + torch.arange(rows.depth.shape[1], device=logits.device).expand_as(rows.depth)
        frontier = Frontier(columns, rows.depth, logits, view, rng)
        laws.append(frontier.q.flatten(0, 1))
        return frontier.pick(frontier.q, 0)

    def _guess_again(self, view: BatchView, rng: Randomness) -> Proposal:
        """Behind text that is not committed, which the host has prepared nothing for."""
        return Proposal.bare(view) if self.inner.waits else self.inner.propose(view, self._ahead, rng)

    def ingest(self, batch: ForwardBatch, features: Features | None) -> None:
        """Tell both."""
        if self.middle.reads:
            self.middle.ingest(batch, features)
        if features is not None:
            self.inner.ingest(batch, features)

    def commit(self, view: BatchView, proposal: Proposal, verdict: Verdict, features: Features) -> None:
        """Tell both what became of it."""
        if view.may_look:
            self.rates.committed(view, proposal, verdict, time.perf_counter())
        if proposal.tree.num_drafted:
            self.middle.keep(view, proposal.columns_of(verdict.path), verdict.length)
        self.inner.commit(view, proposal, verdict, features)

    def release(self, seq_id: int) -> None:
        """The inner drafter forgets it."""
        self.inner.release(seq_id)


CASCADE = Entry(
    CascadeDrafter,
    {"inner": "suffix", "middle": "layer-skip", "nodes": 8, "rounds": 3, "ahead": 4, "drawn": 0},
    "what a middle level (early-exit, layer-skip, self-int8, model:NAME) says, checking an inner drafter's guesses; "
    "settings of either behind it: middle=early-exit:layers=9+window=512; drawn=1: its words are drawn",
)


def build_cascade(settings: Mapping[str, str], build: Callable[[str], Drafter]) -> CascadeDrafter:
    """From its settings, and what builds drafters by name."""

    def made(inner: str, middle: str, **sizes: int) -> CascadeDrafter:
        models = build(spec_of(middle))
        if not isinstance(models, ViewDrafter | ModelDrafter):
            raise ValueError(f"the middle of a cascade is a part of the target, or model:NAME, not {middle}")
        return CascadeDrafter(_again(build(spec_of(inner))), models, **sizes)

    return replace(CASCADE, make=made).build("drafter", "cascade", settings)


def middle_of(drafter: str | Drafter) -> str | Drafter:
    """The name of a cascade's middle, which is what takes memory; other drafters as they are."""
    if not isinstance(drafter, str) or drafter.partition(":")[0] != "cascade":
        return drafter
    return spec_of({**CASCADE.defaults, **split_spec(drafter)[1]}["middle"])


def spec_of(part: str) -> str:
    """A drafter's name as it is written elsewhere: inside a cascade, its settings are joined by +."""
    name, colon, rest = part.partition(":")
    return part if name in ("model", "combined") else name + colon + rest.replace("+", ",")


def _again(inner: Drafter) -> Drafter:
    """One that looks into the view instead of the host's texts, where that is the same: it can guess behind what is not
    committed.
    """
    if isinstance(inner, NgramDrafter) and inner.branches == 1:
        return LookupDrafter(inner.max_nodes, inner.longest, inner.shortest)
    return inner
