"""Drafts of the target itself: some of its layers, its weights rounded, or a part of the text it remembers.

A view reads the keys and values that the target has made of the text, in the target's pages, and keeps none of its own.
What it writes lies where the target writes when it verifies: at the last committed token, which the target has not run,
and behind the text. The target writes there before it reads there. So a view reads no prompts, and nothing has to be
kept, moved or freed for it.

    slots        0 … n-2                 n-1      n, n+1, …
    target       keys and values         -        -
    a view       reads them, its layers  root     nodes it is asked about
    verifying    reads them              writes   writes
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from draftwood.batch import ROUTES, ForwardBatch
from draftwood.cache.kv import Places, behind_last, stage_behind
from draftwood.drafters.grown import GrownDrafter
from draftwood.drafters.hot_experts import HotExperts
from draftwood.drafters.swift import WINDOW, SkipSearch
from draftwood.drafting import Front, Grower, Proposal, State, Vocabulary
from draftwood.errors import IncompatibleParts
from draftwood.model.config import ModelConfig
from draftwood.model.runner import Model, ModelRunner, Narrowable, Sliceable
from draftwood.model.spec import NONE, Sublayers, apart
from draftwood.protocols import BatchView, Features, Randomness
from draftwood.tree import Verdict, nodes_on

Layers = Callable[[ModelConfig], Sequence[int]]  # of a model, those that a view runs, rising


@dataclass(frozen=True)
class Window:
    """What a view reads of a long text: its first `sinks` tokens and its last `recent` ones, in whole pages."""

    sinks: int
    recent: int

    def __post_init__(self) -> None:
        if self.sinks < 0 or self.recent < 1:
            raise ValueError("a window needs at least one recent token, and sinks that are not negative")

    def pages(self, page_size: int) -> tuple[int, int]:
        """Pages at the beginning and at the end."""
        return -(-self.sinks // page_size), -(-self.recent // page_size) + 1


@dataclass(frozen=True)
class View:
    """A part of a model that drafts for it; without settings all of it."""

    layers: Layers | None = None
    changed: Callable[[Model], Model] | None = None  # the same model with other weights, or without some parts
    window: Window | None = None
    without: Sublayers = NONE  # attention and MLPs of its layers that do not run
    trials: int = 0  # of other sets of these, while answers are generated
    experts: int | None = None  # of each mixture it runs so many, those that are hot; 0: half as many as a row goes to

    def of(self, target: Model, hot: HotExperts | None = None) -> Model:
        """The part of this target, with the experts that are `hot`. Refuses what it cannot be made of."""
        if not isinstance(target, Sliceable):
            raise IncompatibleParts(
                "The target runs in stages, or on transformers' own modules: no part of it can draft."
            )
        model = target if self.changed is None else self.changed(target)
        if type(model) is not type(target) or not isinstance(model, Sliceable):  # who order keys in their own way
            raise IncompatibleParts("With rounded weights the target runs on other kernels; take another drafter.")
        if hot is not None:
            if not isinstance(model, Narrowable):
                raise IncompatibleParts("The target's routers cannot be narrowed; take another drafter.")
            model = model.narrowed(hot.allowed, hot.top_k)
        if self.layers is not None or self.without != NONE:
            _require_known(target.config, [*self.without.attention, *self.without.mlp])
            if self.without != NONE:
                _require_apart(target.config)
            model = model.part(self._chosen(target.config, self.layers or without_layers(())), self.without)
        if self.window is not None and any(spec.window for spec in model.config.layer_specs):
            raise IncompatibleParts(
                "Some layers of the target look back through windows of their own; a windowed draft would gain little."
            )
        return model

    @staticmethod
    def _chosen(config: ModelConfig, layers: Layers) -> Sequence[int]:
        chosen = layers(config)
        if not chosen or list(chosen) != sorted(set(chosen)) or not 0 <= chosen[0] <= chosen[-1] < config.num_layers:
            raise IncompatibleParts(
                f"A draft runs some of the layers 0 to {config.num_layers - 1}, rising, not {list(chosen)}."
            )
        return chosen


class ViewDrafter(GrownDrafter):
    """Drafts with a part of its target, with any grower."""

    runner: ModelRunner  # its model, on the target's pages

    def __init__(self, view: View, grower: Grower) -> None:
        super().__init__(grower)
        self.view = view
        self.needs = frozenset() if view.experts is None else frozenset({ROUTES})
        self._hot: HotExperts | None = None
        self._search = SkipSearch(view.trials) if view.trials else None

    def attach(self, target: ModelRunner) -> None:
        """Of which it runs a part."""
        self._target = target
        if self._search is not None:
            _require_apart(target.model.config)
            self._search.attach(target.model.config)
        if self.view.experts is not None:
            mixtures = target.model.config.mixtures
            if not mixtures:
                raise IncompatibleParts(
                    "The target is no mixture of experts, and 'hot-experts' drafts with some of them."
                )
            self._hot = HotExperts(mixtures, self.view.experts, target.device)
        self._take_part()

    def _take_part(self) -> None:
        part = self.view if self._search is None else replace(self.view, without=self._search.without)
        self.runner = ModelRunner.over(part.of(self._target.model, self._hot), self._target.cache)

    def ingest(self, batch: ForwardBatch, features: Features | None) -> None:
        """Counts the experts of a prompt's rows; padding writes to the scratch page."""
        if self._hot is not None and features is not None:
            cache = self.runner.cache
            self._hot.count(features[ROUTES], batch.slots // cache.page_size != cache.scratch_page)

    def commit(self, view: BatchView, proposal: Proposal, verdict: Verdict, features: Features) -> None:
        """Counts the experts of the nodes that were kept; a sequence that stands for none has one token."""
        if self._hot is not None:
            steps = torch.arange(verdict.path.shape[1], device=verdict.path.device)
            kept = (steps <= verdict.length[:, None]) & (view.lengths > 1)[:, None]
            self._hot.count(features[ROUTES], nodes_on(proposal.tree, verdict.path, kept) > 0)

    def staged(self, nodes: int) -> int:
        """The nodes that the grower asks about, and what another set is tried on."""
        return max(self.grower.staged(nodes), WINDOW if self._search is not None and nodes else 0)

    def propose(self, view: BatchView, nodes: int, rng: Randomness) -> Proposal:
        """Grow a tree for every sequence."""
        if not nodes:
            return Proposal.bare(view)
        if self._search is not None and view.may_look and self._search.changed(view, self._target):
            self._take_part()
        return self.grower.grow(self, view, nodes, rng)

    def begin(self, view: BatchView) -> tuple[Tensor, State]:
        """Logits at the roots, and what is read of the text. [B, 1, R]."""
        state = self.seen(view, self.staged(self.max_nodes))
        places = _last(view.size, view.roots.device)
        return self.run(view, state, view.roots[:, None], places).view(view.size, 1, -1), state

    def begin_with(self, view: BatchView, tokens: Tensor, places: Places, room: int) -> tuple[Tensor, State]:
        """The same, and in the same forward logits at nodes `tokens` [B, k] behind them; so many places are written to
        in all. [B, 1 + k, R].
        """
        state = self.seen(view, room)
        every = torch.cat([view.roots[:, None], tokens], 1)
        return self.run(view, state, every, behind_last([places], 1)).view(*every.shape, -1), state

    def extend(self, view: BatchView, front: Front, state: State) -> tuple[Tensor, State]:
        """The pages know their parents; states do not, and all nodes so far are run. [B, k, R]."""
        tokens, places = front.tokens, front.places
        if self.runner.model.config.recurrent:
            tokens, places = torch.cat([view.roots[:, None], front.asked], 1), front.behind_last(1)
        made = self.run(view, state, tokens, places).view(*tokens.shape, -1)
        return made[:, -front.tokens.shape[1] :], state

    def vocabulary(self, level: int | None) -> Vocabulary | None:
        """All tokens."""
        return None

    def keep(self, view: BatchView, columns: Tensor, length: Tensor) -> None:
        """The target keeps what it makes itself."""

    def seen(self, view: BatchView, places: int) -> State:
        """Of each sequence, the tokens that are read [B], pages for them and `places` more [B, P'], and how many tokens
        are left out [B, 1]. Places for which a sequence has no page are in the scratch page.
        """
        cache, table = self.runner.cache, view.block_table
        more = -(-places // cache.page_size) + 1
        table = torch.nn.functional.pad(table, (0, more), value=cache.scratch_page)
        everything = view.lengths, table, torch.zeros_like(view.lengths)[:, None]
        if self.view.window is None:
            return everything
        sinks, recent = self.view.window.pages(cache.page_size)
        if table.shape[1] <= sinks + recent + more:
            return everything
        last = (view.lengths - 1) // cache.page_size
        first = (last - recent + 1).clamp(min=sinks)
        kept = first[:, None] + _steps(recent + more, table.device)
        near = table.gather(1, kept.clamp(max=table.shape[1] - 1))
        left_out = (first - sinks) * cache.page_size
        return view.lengths - left_out, torch.cat([table[:, :sinks], near], 1), left_out[:, None]

    def run(self, view: BatchView, seen: State, tokens: Tensor, places: Places) -> Tensor:
        """Logits for `tokens` [B, n] at their places behind what is `seen` of each text. [B * n, R]."""
        lengths, table, left_out = seen
        limits = self.runner.cache.page_size, (highest := self.runner.model.config.max_positions)
        batch = stage_behind(lengths, table, tokens, places, *limits, source_lengths=view.source_lengths)
        if self.view.window is not None:  # keys keep the positions they have in the whole text
            positions = (batch.positions.view_as(tokens) + left_out).clamp(max=highest - 1)
            batch = replace(batch, positions=positions.view(-1))
        if view.turn_shifts is not None:
            turns = batch.positions.view_as(tokens) + view.turn_shifts[:, None]
            batch = replace(batch, turns=turns.view(-1).expand(3, -1))
        if view.states is not None:
            batch = replace(batch, states=view.states, columns=places.index.reshape(-1))
        return self.runner.forward(batch).logits


def first_layers(count: int) -> Layers:
    """Leave early: the first layers alone, a third of them for 0."""
    return lambda config: range(min(count, config.num_layers) or -(-config.num_layers // 3))


def without_layers(skipped: Sequence[int]) -> Layers:
    """All layers but these."""

    def kept(config: ModelConfig) -> Sequence[int]:
        _require_known(config, skipped)
        return [i for i in range(config.num_layers) if i not in set(skipped)]

    return kept


def _require_known(config: ModelConfig, skipped: Iterable[int]) -> None:
    unknown = [i for i in skipped if not 0 <= i < config.num_layers]
    if unknown:
        raise IncompatibleParts(
            f"There is no layer {unknown[0]} to be skipped: the target's are 0 to {config.num_layers - 1}."
        )


def _require_apart(config: ModelConfig) -> None:
    if not apart(config.layer_specs):
        raise IncompatibleParts(
            "Attention and MLP of this target's layers cannot be left out apart; leave out whole layers: skip=…"
        )


@lru_cache(maxsize=1024)
def _last(size: int, device: torch.device) -> Places:
    """The last token of each sequence."""
    steps = torch.full((size, 1), -1, device=device)
    return Places(steps, steps)


@lru_cache(maxsize=1024)
def _steps(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, device=device)
