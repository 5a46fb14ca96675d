"""Drafters that fail: an exception from a drafter costs requests their drafts, never their answers.

A guard stands between the engine and a drafter. When a call raises, the step goes on with bare roots, the drafter
forgets the sequences of that step, so that nothing half done reaches a later proposal, and the failure is counted.
After some failures in a row the drafter is switched off, and decoding goes on without drafts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar, runtime_checkable

import torch

from draftwood.protocols import BatchView, Budget, Drafter, Features, Randomness, Span
from draftwood.tree import DraftLaw, TokenTree, Verdict

MOST_IN_A_ROW = 3  # steps that fail one after the other before a drafter is switched off
QUIET_SECONDS = 60.0  # between two lines of the log about the same error
log = logging.getLogger(__name__)
T = TypeVar("T")


class DrafterFailed(Exception):
    """A drafter raised an exception on the device's path, where its state cannot be taken apart."""

    def __init__(self, call: str, error: Exception) -> None:
        super().__init__(f"{call}: {error}")
        self.call = call
        self.error = error


@contextmanager
def attributed(call: str) -> Iterator[None]:
    """Tell a drafter's exceptions from all others: they become `DrafterFailed`.

    Not so what torch raises while a graph is captured: that says only that the call needs the host.
    """
    try:
        yield
    except Exception as error:
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if capturing and isinstance(error, RuntimeError):
            raise
        raise DrafterFailed(call, error) from error


@dataclass
class DrafterHealth:
    """What has gone wrong with one drafter: written by the compute thread, read by anybody."""

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


class GuardedDrafter:
    """Another drafter, whose exceptions end here."""

    def __init__(self, drafter: Drafter, name: str) -> None:
        self.drafter = drafter
        self._health = DrafterHealth(name)
        self._proposed = False  # what `observe` would tell about the present step means something to the drafter

    @property
    def health(self) -> Sequence[DrafterHealth]:
        """Its own."""
        return (self._health,)

    @property
    def law(self) -> DraftLaw:
        """The drafter's."""
        return self.drafter.law

    @property
    def max_nodes(self) -> int:
        """The drafter's."""
        return self.drafter.max_nodes

    @property
    def needs(self) -> frozenset[int]:
        """The drafter's, unless it is switched off."""
        return frozenset() if self._health.disabled else self.drafter.needs

    def propose(self, view: BatchView, budget: Budget, rng: Randomness) -> TokenTree:
        """The drafter's trees; bare roots if it fails or is switched off."""
        self._proposed = False
        if self._health.disabled:
            return TokenTree.roots(view.roots)
        tree = self._attempt("propose", view.seq_ids, lambda: self._trees(view, budget, rng))
        self._proposed = tree is not None
        return TokenTree.roots(view.roots) if tree is None else tree

    def _trees(self, view: BatchView, budget: Budget, rng: Randomness) -> TokenTree:
        tree = self.drafter.propose(view, budget, rng)
        if tree.num_trees != len(view.seq_ids):
            raise ValueError(f"{tree.num_trees} trees were proposed for {len(view.seq_ids)} sequences")
        return tree

    def read(self, spans: Sequence[Span], features: Features) -> None:
        """Let the drafter read."""
        if not self._health.disabled:
            self._attempt("read", [span.seq_id for span in spans], lambda: self.drafter.read(spans, features))

    def observe(self, view: BatchView, tree: TokenTree, verdict: Verdict, features: Features) -> None:
        """Tell the drafter, if the trees are its own and nothing has failed in this step so far."""
        if not self._proposed or self._health.disabled:
            return
        self._attempt("observe", view.seq_ids, lambda: self.drafter.observe(view, tree, verdict, features))
        if self._proposed:
            self._health.worked()

    def release(self, seq_id: int) -> None:
        """Let it forget the sequence, also once it is switched off: it may hold memory."""
        try:
            self.drafter.release(seq_id)
        except Exception as error:
            self._health.failed("release", error)

    def _attempt(self, call: str, seq_ids: Sequence[int], attempt: Callable[[], T]) -> T | None:
        """What the call returns; None if it raised, and then the drafter knows nothing of these sequences any more."""
        try:
            return attempt()
        except Exception as error:
            self._proposed = False
            self._health.failed(call, error)
            for seq_id in seq_ids:
                self.release(seq_id)
            return None


def guarded(drafter: Drafter, name: str) -> IsolatedDrafter:
    """The same behind a guard, unless it has guards inside: then one failing part leaves the others alone."""
    return drafter if isinstance(drafter, IsolatedDrafter) else GuardedDrafter(drafter, name)
