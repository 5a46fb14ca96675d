"""Several drafters in one batch: each request may name the one that drafts for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_

import torch
from torch import Tensor

from draftwood.drafters.several import Several, fitting
from draftwood.drafting import Drafter, Proposal
from draftwood.errors import InvalidRequest
from draftwood.faults import DrafterHealth, GuardedDrafter
from draftwood.joining import choose, join
from draftwood.protocols import BatchView, Features, HostView, Randomness
from draftwood.shape import follow
from draftwood.tree import POINT_TREE, DraftLaw, Verdict


@dataclass(frozen=True)
class _Asked:
    """A drafter that some requests of a step may name, and by which of the mode's names."""

    guard: GuardedDrafter
    names: tuple[int, ...]

    def own(self, view: BatchView) -> Tensor:
        """The sequences that it drafts for. [B] bool."""
        if view.drafter is None:
            return torch.ones_like(view.lengths, dtype=torch.bool)
        own = view.drafter == self.names[0]
        for name in self.names[1:]:
            own = own | (view.drafter == name)
        return own


class OfferedDrafters(Several):
    """The drafter each request names, and one for those that name none.

    What is promised about trees (`law`) is the promise of the default, or of all in `choice`, from which one is chosen
    for each request that names none (`engine/choice.py`). A request that names a drafter is asked about that one. Each
    is guarded by itself: one that fails costs only its own requests their drafts. Text and accepted paths of all
    sequences go to every drafter that keeps features, for which drafter a text is read is not known. Other networks
    read what they have not drafted for when they are told to (`ingest`).
    """

    def __init__(self, default: Drafter, others: Mapping[str, Drafter], choice: Sequence[str] = ()) -> None:
        self.default = default
        self.others = dict(others)
        self.choice = tuple(choice)
        self.sizes = sorted(
            set().union(*(drafter.sizes for drafter in self._all))
        )  # each takes its own next smaller one
        names = {id(drafter): name for name, drafter in reversed(self.others.items())}
        super().__init__({names.get(id(drafter), "default"): drafter for drafter in self._all})
        self._guards = {id(guard.drafter): guard for guard in self.guards}

    @property
    def law(self) -> DraftLaw:
        """Of trees for requests that name none."""
        return reduce(or_, (self.others[name].law for name in self.choice), self.default.law)

    @property
    def max_nodes(self) -> int:
        """The most that any of them proposes."""
        return max(drafter.max_nodes for drafter in self._all)

    @property
    def surplus(self) -> int:
        """The default's, unless another one draws: nodes of its trees are not selected by their chances."""
        points = all(drafter.law.draws <= POINT_TREE.draws for drafter in self._all)
        return self.default.surplus if points else 1

    @property
    def health(self) -> Sequence[DrafterHealth]:
        """Of each drafter, the default's first."""
        return self.health_of_members

    @property
    def _all(self) -> list[Drafter]:
        return list({id(drafter): drafter for drafter in (self.default, *self.others.values())}.values())

    def reads_for(self, name: str | None) -> bool:
        """Whether the drafter of that name keeps up with texts by a network of its own."""
        return self._guard_of(name).reads

    def drafter_of(self, name: str | None) -> Drafter:
        """The drafter of a request that names `name`."""
        if name is None:
            return self.default
        if name not in self.others:
            raise InvalidRequest(f"There is no drafter '{name}' here; there are {', '.join(self.others)}.")
        return self.others[name]

    def prepare(self, view: HostView, size: int, nodes: int) -> None:
        """Ask those that requests of the batch name; for sequences of others they have no room."""
        for guard in dict.fromkeys(self._guards_of(view)):
            guard.prepare(self._own_part(view, guard), size, fitting(guard, nodes))

    def _guards_of(self, view: HostView) -> list[GuardedDrafter]:
        return [self._guard_of(name) for name in view.drafters or [None] * len(view.seq_ids)]

    def _own_part(self, view: HostView, guard: GuardedDrafter) -> HostView:
        own = [other is guard for other in self._guards_of(view)]
        resting = None if view.resting is None else self._own_part(view.resting, guard)
        return replace(view if all(own) else _without_others(view, own), resting=resting)

    def propose(self, view: BatchView, nodes: int, rng: Randomness) -> Proposal:
        """Each drafter's trees for its own sequences."""
        asked = self._asked(view)
        if len(asked) == 1:
            return _proposal(asked[0].guard, view, nodes, rng)
        return _joined(asked, view, nodes, rng) if view.may_look else _chosen(asked, view, nodes, rng)

    def commit(self, view: BatchView, proposal: Proposal, verdict: Verdict, features: Features) -> None:
        """Tell each drafter what became of the whole batch; of other drafters' nodes it keeps features at most."""
        columns = proposal.tree.local if proposal.columns is None else proposal.columns
        asked = {drafter.guard: drafter for drafter in self._asked(view)}
        for guard in self.guards:
            if guard not in asked and not guard.needs:
                continue
            own = proposal
            if guard not in asked:
                own = replace(proposal, columns=torch.zeros_like(columns))
            elif len(asked) > 1:
                theirs = ~asked[guard].own(view)[proposal.tree.owner]
                own = replace(proposal, columns=columns.masked_fill(theirs, 0))
            guard.commit(view, own, verdict, {layer: features[layer] for layer in guard.needs})

    def _guard_of(self, name: str | None) -> GuardedDrafter:
        return self._guards[id(self.drafter_of(name))]

    def _asked(self, view: BatchView) -> list[_Asked]:
        """The drafters that the step's mode names."""
        names: dict[GuardedDrafter, list[int]] = {}
        for number, name in enumerate(view.mode.drafters):
            names.setdefault(self._guard_of(name), []).append(number)
        return [_Asked(guard, tuple(numbers)) for guard, numbers in names.items()]


def _without_others(view: HostView, own: Sequence[bool]) -> HostView:
    """The same sequences, with room and predictions only for a drafter's own."""
    rooms = tuple(room if mine else 0 for room, mine in zip(view.max_nodes, own, strict=True))
    predictions = (
        tuple(p if mine else () for p, mine in zip(view.predictions, own, strict=True)) if view.predictions else ()
    )
    return replace(view, max_nodes=rooms, predictions=predictions)


def _proposal(guard: GuardedDrafter, view: BatchView, nodes: int, rng: Randomness) -> Proposal:
    """A drafter's trees with at most `nodes` nodes; not even asked where there is nothing to ask for."""
    size = fitting(guard, nodes)
    return guard.propose(view, size, rng) if size or view.mode.predicted else Proposal.bare(view)


def _joined(asked: Sequence[_Asked], view: BatchView, nodes: int, rng: Randomness) -> Proposal:
    """Every drafter's proposal for its own sequences, joined as they are."""
    parts, places = [], []
    for drafter in asked:
        rows = drafter.own(view).nonzero()[:, 0]
        if drafter.guard.waits or view.mode.predicted:  # prepared for the whole batch
            parts.append(_part(_proposal(drafter.guard, view, nodes, rng).packed(), rows))
        else:
            parts.append(_proposal(drafter.guard, view.take(rows), nodes, rng).packed())
        places.append(rows)
    tree, maps = join([part.tree for part in parts], places)
    columns = torch.zeros_like(tree.tokens)
    for part, nodes_of in zip(parts, maps, strict=True):
        columns[nodes_of.whole] = part.tree.local if part.columns is None else part.columns
    return Proposal(tree, columns)


def _part(proposal: Proposal, rows: Tensor) -> Proposal:
    """The trees of some sequences."""
    tree, nodes = proposal.tree.take(rows)
    columns = proposal.tree.local if proposal.columns is None else proposal.columns
    return Proposal(tree, columns[nodes.whole])


def _chosen(asked: Sequence[_Asked], view: BatchView, nodes: int, rng: Randomness) -> Proposal:
    """Every drafter's proposal for the whole batch, of which each sequence takes its own drafter's."""
    parts = [_proposal(drafter.guard, view, nodes, rng) for drafter in asked]
    which = torch.zeros_like(view.lengths)
    for number, drafter in enumerate(asked):
        which = torch.where(drafter.own(view), number, which)
    tree, source = choose([part.tree for part in parts], which)
    columns = torch.zeros_like(source)
    for number, part in enumerate(parts):
        own = part.tree.local if part.columns is None else part.columns
        mine = which[tree.owner] == number
        columns = torch.where(mine, follow(own, torch.where(mine, source, -1)).clamp(min=0), columns)
    return Proposal(tree, columns)
