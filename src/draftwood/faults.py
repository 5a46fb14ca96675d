"""Drafters that fail: an exception from a drafter costs requests their drafts, never their answers.

A guard stands between the engine and a drafter. When a call raises, the step goes on with bare roots, and the failure
is counted. What a drafter has missed by it makes later drafts worse, not wrong. After some failures, one after the
other, the drafter is switched off, and decoding goes on without drafts; at once if it fails where values may not be
looked at: there a step is captured, and the drafter is not asked again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar, runtime_checkable

import torch

from draftwood.batch import ForwardBatch
from draftwood.drafting import Drafter, Proposal
from draftwood.links import may_look
from draftwood.model.runner import ModelRunner
from draftwood.protocols import BatchView, Features, HostView, Randomness
from draftwood.tree import DraftLaw, Verdict

MOST_IN_A_ROW = 3  # failures one after the other before a drafter is switched off
QUIET_SECONDS = 60.0  # between two lines of the log about the same error
log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass
class DrafterHealth:
    """What has gone wrong with one drafter: written by the compute thread, read by any."""

    name: str
    failures: int = 0
    in_a_row: int = 0
    last_error: str | None = None
    disabled: bool = False
    clock: Callable[[], float] = time.monotonic
    _logged: dict[tuple[str, type], float] = field(default_factory=dict)  # when each error was last written down

    def failed(self, call: str, error: Exception, *, for_good: bool = False) -> None:
        """A call of the drafter raised; switch it off if that has happened too often, or `for_good`."""
        self.failures += 1
        self.in_a_row += 1
        self.last_error = f"{type(error).__name__} in {call}: {error}"
        self._log(call, error)
        if not self.disabled and (for_good or self.in_a_row >= MOST_IN_A_ROW):
            self.disabled = True
            log.error(
                "The drafter '%s' is switched off after %d failures: answers go on without drafts, and are the same. "
                "Restart the engine to use it again.",
                self.name,
                self.failures,
            )

    def worked(self) -> None:
        """A whole step went well."""
        self.in_a_row = 0

    def _log(self, call: str, error: Exception) -> None:
        key, now = (call, type(error)), self.clock()
        if key not in self._logged or now - self._logged[key] >= QUIET_SECONDS:
            self._logged[key] = now
            log.error("The drafter '%s' failed: %s", self.name, self.last_error, exc_info=error)


@runtime_checkable
class IsolatedDrafter(Drafter, Protocol):
    """A drafter whose calls raise nothing."""

    @property
    def health(self) -> Sequence[DrafterHealth]:
        """Of each drafter in it."""
        ...


@runtime_checkable
class Compound(Protocol):
    """A drafter made of others, some of which may fail while it goes on."""

    @property
    def health_of_members(self) -> Sequence[DrafterHealth]:
        """Of each of these."""
        ...


def members_of(drafter: Drafter) -> tuple[str, ...]:
    """The names of the drafters that a drafter is made of; none for most."""
    return tuple(health.name for health in drafter.health_of_members) if isinstance(drafter, Compound) else ()


class GuardedDrafter:
    """Another drafter, whose exceptions end here."""

    def __init__(self, drafter: Drafter, name: str) -> None:
        self.drafter = drafter
        self._health = DrafterHealth(name)
        self._prepared = False  # the present step began with `prepare`
        self._failed = False  # in the present step, or since

    @property
    def health(self) -> Sequence[DrafterHealth]:
        """Its own, and its members' if it has any."""
        members = self.drafter.health_of_members if isinstance(self.drafter, Compound) else ()
        return (self._health, *members)

    @property
    def law(self) -> DraftLaw:
        """The drafter's."""
        return self.drafter.law

    @property
    def max_nodes(self) -> int:
        """The drafter's."""
        return self.drafter.max_nodes

    @property
    def sizes(self) -> Sequence[int]:
        """The drafter's."""
        return self.drafter.sizes

    @property
    def surplus(self) -> int:
        """The drafter's."""
        return self.drafter.surplus

    @property
    def needs(self) -> frozenset[int]:
        """The drafter's, unless it is switched off."""
        return frozenset() if self._health.disabled else self.drafter.needs

    @property
    def reads(self) -> bool:
        """Whether the drafter does, unless it is switched off."""
        return not self._health.disabled and self.drafter.reads

    @property
    def waits(self) -> bool:
        """Whether the drafter does, unless it is switched off."""
        return not self._health.disabled and self.drafter.waits

    @property
    def remembers(self) -> bool:
        """Whether the drafter does."""
        return self.drafter.remembers

    def attach(self, target: ModelRunner) -> None:
        """Pass it on: what raises here is an engine that cannot be built."""
        self.drafter.attach(target)

    def depth(self, nodes: int) -> int:
        """The drafter's."""
        return self.drafter.depth(nodes)

    def staged(self, nodes: int) -> int:
        """The drafter's."""
        return self.drafter.staged(nodes)

    def prepare(self, view: HostView, size: int, nodes: int) -> None:
        """Let the host make its trees."""
        if not self._health.disabled:
            self._begin_step()
            self._prepared = True
            self._attempt("prepare", lambda: self.drafter.prepare(view, size, nodes))

    def propose(self, view: BatchView, nodes: int, rng: Randomness) -> Proposal:
        """The drafter's trees; bare roots if it fails or is switched off."""
        proposal = self.proposed(view, lambda: self._trees(view, nodes, rng))
        return Proposal.bare(view) if proposal is None else proposal

    def proposed(self, view: BatchView, attempt: Callable[[], T]) -> T | None:
        """What a call for the drafter's trees returns; None if it fails or is switched off."""
        prepared, self._prepared = self._prepared, False
        if self._health.disabled or (prepared and self._failed and view.may_look):
            return None
        if not (prepared or self.drafter.waits):
            self._begin_step()
        return self._attempt("propose", attempt, for_good=not view.may_look)

    def _trees(self, view: BatchView, nodes: int, rng: Randomness) -> Proposal:
        proposal = self.drafter.propose(view, nodes, rng)
        if proposal.tree.num_trees != view.size:
            raise ValueError(f"{proposal.tree.num_trees} trees were proposed for {view.size} sequences")
        return proposal

    def ingest(self, batch: ForwardBatch, features: Features | None) -> None:
        """Let the drafter read."""
        if not self._health.disabled:
            captured = not may_look(batch.tokens)
            self._attempt("ingest", lambda: self.drafter.ingest(batch, features), for_good=captured)

    def commit(self, view: BatchView, proposal: Proposal, verdict: Verdict, features: Features) -> None:
        """Tell the drafter; also of bare roots in place of what it failed to propose."""
        if not self._health.disabled:
            told = view, proposal, verdict, features
            self._attempt("commit", lambda: self.drafter.commit(*told), for_good=not view.may_look)

    def release(self, seq_id: int) -> None:
        """Let it forget the sequence, also once it is switched off: it may hold memory."""
        try:
            self.drafter.release(seq_id)
        except Exception as error:
            self._health.failed("release", error)

    def _begin_step(self) -> None:
        """If nothing has failed since the last step began, it went well."""
        if not self._failed:
            self._health.worked()
        self._failed = False

    def _attempt(self, call: str, attempt: Callable[[], T], *, for_good: bool = False) -> T | None:
        """What the call returns; None if it raised.

        What torch raises while a graph is captured is passed on: it says only that the call needs the host.
        """
        try:
            return attempt()
        except Exception as error:
            capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
            if capturing and isinstance(error, RuntimeError):
                raise
            self._failed = True
            self._health.failed(call, error, for_good=for_good)
            return None


def guarded(drafter: Drafter, name: str) -> IsolatedDrafter:
    """The same behind a guard, unless it has guards inside: then one failing part leaves the others alone."""
    return drafter if isinstance(drafter, IsolatedDrafter) else GuardedDrafter(drafter, name)
