"""The border of an engine, made of data: requests in, events out, and what it says of itself.

Whoever serves requests needs an `EngineClient` and nothing behind it: an engine in this process (`LLM`) or in another
one (`RemoteEngine`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from draftwood.config import EngineConfig
from draftwood.drafters.by_request import OfferedDrafters
from draftwood.drafters.lookups import CHOICE
from draftwood.drafting import Drafter
from draftwood.engine.engine import Engine
from draftwood.engine.reasons import kind_of
from draftwood.engine.requests import EngineRequest
from draftwood.errors import InvalidRequest
from draftwood.faults import members_of
from draftwood.protocols import PredictsSeconds, Verifier
from draftwood.request import Event
from draftwood.tree import DraftLaw

Listener = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class DrafterCard:
    """A drafter as requests know it."""

    name: str | None  # None: the engine's own, for requests that name none
    law: DraftLaw
    max_nodes: int
    is_default: bool  # the same one as the engine's own
    members: tuple[str, ...] = ()  # that it is made of

    @classmethod
    def of(cls, name: str | None, drafter: Drafter, *, usual: bool) -> DrafterCard:
        """What is known of it. A choice has no members: each tree is one drafter's, and is named by it."""
        members = () if isinstance(drafter, OfferedDrafters) else members_of(drafter)
        return cls(name, drafter.law, drafter.max_nodes, usual, members)


@dataclass(frozen=True, slots=True)
class EngineCard:
    """What does not change about an engine."""

    max_length: int  # tokens of a prompt and its answer together
    max_running: int  # answers at a time
    page_size: int  # tokens
    num_pages: int
    device: str
    law: str  # how it was asked for, such as auto
    strict: bool  # the target's logits do not depend on what else is computed in a step
    dtype: str  # that the target computes in
    drafter: DrafterCard  # its own
    offers: tuple[DrafterCard, ...] | None = None  # that requests may name; None: none, and no predictions either
    max_nodes: int = 0  # the most that any of its drafters proposes
    adapters: tuple[str, ...] = ()  # that requests may choose
    cache_dtype: str = "auto"  # of keys and values, where it is not the model's own

    @classmethod
    def of(
        cls,
        engine: Engine,
        config: EngineConfig,
        max_positions: int,
        law: str | Verifier,
        adapters: tuple[str, ...] = (),
    ) -> EngineCard:
        """Of an engine whose model has so many positions; `law` as it was asked for."""
        tables, drafter, model = engine.scheduler.tables, engine.drafter, engine.target.model
        own, offers = drafter, None
        if isinstance(drafter, OfferedDrafters):
            # Where one is chosen for each request, the choice itself is what requests get that name none.
            chosen = {f"{CHOICE}:{'+'.join(drafter.choice)}": drafter} if drafter.choice else {}
            own = drafter if chosen else drafter.default
            offers = tuple(
                DrafterCard.of(name, other, usual=other is own) for name, other in (drafter.others | chosen).items()
            )
        return cls(
            max_length=min(max_positions, tables.capacity),
            max_running=config.max_running,
            page_size=tables.page_size,
            num_pages=tables.pool.num_pages,
            device=str(config.torch_device()),
            law=law if isinstance(law, str) else law.name,
            strict=model.strict,
            dtype=str(model.dtype).removeprefix("torch."),
            drafter=DrafterCard.of(None, own, usual=True),
            offers=offers,
            max_nodes=drafter.max_nodes,
            adapters=adapters,
            cache_dtype=config.cache_dtype,
        )

    @property
    def capacity(self) -> int:
        """Tokens that the cache holds."""
        return self.page_size * self.num_pages

    def drafter_of(self, name: str | None) -> DrafterCard:
        """The drafter of a request that names `name`."""
        offers = {offer.name: offer for offer in self.offers or ()}
        if name is None:
            return self.drafter
        if name not in offers:
            known = ", ".join(str(offer) for offer in offers)
            raise InvalidRequest(f"There is no drafter '{name}' here; there are {known}.")
        return offers[name]


@dataclass(frozen=True, slots=True)
class LastStep:
    """What the last decode step took, beside what the controller predicts for its rows."""

    sequences: int
    rows: int
    seconds: float
    predicted_seconds: float | None

    @classmethod
    def of(cls, engine: Engine) -> LastStep | None:
        """None before the first."""
        step, controller = engine.last_step, engine.controller
        if step is None:
            return None
        predicted = controller.predicted_seconds(step.report) if isinstance(controller, PredictsSeconds) else None
        return cls(step.report.num_sampling, step.report.num_rows, step.seconds, predicted)


@dataclass(frozen=True, slots=True)
class DrafterState:
    """What has gone wrong with a drafter."""

    name: str
    failures: int
    disabled: bool


@dataclass(frozen=True, slots=True)
class Pulse:
    """An engine at a moment."""

    steps: int = 0
    failures: int = 0  # steps that ended in an exception
    failure: str | None = None  # the last one's
    stepping: float | None = None  # seconds that the present step has taken so far; None: there is none
    running: int = 0  # answers
    waiting: int = 0
    preemptions: int = 0
    kv_use: float = 0.0  # share of the cache in use, 1 being all
    max_nodes: int = 0  # of the last step's budget
    least_chance: float = 0.0
    why: str = ""
    reason: str = ""  # the kind of `why`
    decisions: tuple[tuple[str, int], ...] = ()  # steps by the kind of their reason
    expected_gain: float | None = None  # tokens a second with drafts, of those without
    measured_gain: float | None = None
    controller: str = ""
    last_step: LastStep | None = None
    drafters: tuple[DrafterState, ...] = ()
    drafted_by: tuple[tuple[str, int], ...] = ()  # steps of sequences by the drafter that was chosen for them, or named

    @classmethod
    def of(cls, engine: Engine, steps: int, failures: int, failure: str | None, since: float | None) -> Pulse:
        """Of an engine whose worker has counted so much."""
        scheduler = engine.scheduler
        pool, budget = scheduler.tables.pool, scheduler.budget
        return cls(
            steps=steps,
            failures=failures,
            failure=failure,
            stepping=None if since is None else time.monotonic() - since,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            preemptions=scheduler.num_preemptions,
            kv_use=1 - pool.num_available / pool.num_pages,
            max_nodes=budget.max_nodes,
            least_chance=budget.min_accept_prob,
            why=str(budget.why),
            reason=kind_of(budget.why),
            decisions=tuple(scheduler.decisions.copy().items()),
            drafted_by=tuple(scheduler.drafted_by.copy().items()),
            expected_gain=budget.gain.expected,
            measured_gain=budget.gain.measured,
            controller=type(engine.controller).__name__,
            last_step=LastStep.of(engine),
            drafters=tuple(DrafterState(health.name, health.failures, health.disabled) for health in engine.health),
        )


class EngineClient(Protocol):
    """An engine, wherever it is. Calls may come from any thread."""

    @property
    def card(self) -> EngineCard:
        """What does not change about it."""
        ...

    @property
    def pulse(self) -> Pulse:
        """Signs of life."""
        ...

    @property
    def death(self) -> str | None:
        """Why it will never answer again; None while it may."""
        ...

    def submit(self, request: EngineRequest, listener: Listener) -> None:
        """Run all answers of a request; `listener` gets every event, on a thread of the client's."""
        ...

    def cancel(self, request_id: int) -> None:
        """End a request before the next step; its listener hears of it. One that has ended is left alone."""
        ...

    def close(self) -> None:
        """Cancel everything; when this returns, no step is running and none will."""
        ...
