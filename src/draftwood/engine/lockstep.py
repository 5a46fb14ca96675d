"""Several ranks decode the same: each runs the whole engine on its part of the model, in step with rank 0.

Randomness is keyed and schedules follow from what arrived, so all that ranks have to be told is what depends on the
world: requests, cancellations, budgets (which follow the clock), and when to capture. Rank 0 sends that before each
step, with a digest of every token so far; a rank whose own digest is another one stops, and with it all of them.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

from draftwood.engine.engine import Engine
from draftwood.engine.orders import packed
from draftwood.engine.sequence import Sequence
from draftwood.errors import QueueFull
from draftwood.protocols import Budget, Controller, Load, StepReport
from draftwood.ranks import RankLost
from draftwood.request import Event, FinishReason

Unpack = Callable[[Mapping[str, Any]], Sequence]


class Orders(Protocol):
    """How ranks hear of each other."""

    rank: int

    def say(self, order: Mapping[str, Any]) -> None:
        """Send an order to all other ranks."""
        ...

    def hear(self) -> dict[str, Any]:
        """Wait for the next order of rank 0."""
        ...

    def delivered(self) -> None:
        """Wait until the others have heard all orders."""
        ...

    def leave_word(self, reason: str) -> None:
        """Let the others know why this rank ends."""
        ...


class Announced:
    """A controller whose budget is set before each step; the one it stands for hears how steps went."""

    def __init__(self, inner: Controller | None = None) -> None:
        self.inner = inner
        self.next = Budget(0)

    def announce(self, load: Load) -> Budget:
        """What the inner controller wants for the next step. What single requests need goes by a clock, which ranks do
        not share, so no rank is told how long the step will take.
        """
        assert self.inner is not None
        self.next = replace(self.inner.budget(load), seconds=None)
        return self.next

    def budget(self, load: Load) -> Budget:
        """As announced, whatever the load is."""
        return self.next

    def observe(self, report: StepReport) -> None:
        """For the inner controller."""
        if self.inner is not None:
            self.inner.observe(report)


class _Digest:
    """Of all tokens that steps gave, in order, and of what decides how steps run."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._sum = hashlib.blake2b(digest_size=8)

    def add(self, events: list[Event]) -> None:
        """What a step gave."""
        news = [(e.request_id, e.index, e.token_ids, e.finish_reason) for e in events]
        state = len(self._engine.runner.ready), [health.disabled for health in self._engine.health]
        self._sum.update(json.dumps([news, state]).encode())

    @property
    def value(self) -> str:
        """So far."""
        return self._sum.hexdigest()


class Leader:
    """Rank 0's engine, as its worker drives it."""

    def __init__(self, engine: Engine, ranks: Orders) -> None:
        self._engine, self._ranks = engine, ranks
        engine.controller = self._announced = Announced(engine.controller)
        self._digest = _Digest(engine)
        self._news: list[list[Any]] = []
        self.lost: str | None = None  # why the ranks cannot go on

    def add(self, sequences: list[Sequence]) -> None:
        """Queue the answers of a request here, and on the others before the next step."""
        self._engine.add(sequences)
        self._news.append(["add", [packed(seq) for seq in sequences]])

    def abort(self, request_id: int, reason: FinishReason, error: str | None = None) -> list[Event]:
        """End a request likewise."""
        self._news.append(["abort", request_id, reason])
        try:
            events = self._engine.abort(request_id, reason, error, settled=self.lost is None)
        except RankLost as failure:
            self.give_up(str(failure))
            return self._engine.abort(request_id, reason, error, settled=False)
        self._digest.add(events)
        return events

    def step(self) -> list[Event]:
        """One step of all ranks."""
        if self.lost is not None:
            raise RankLost(self.lost)
        try:
            budget = self._announced.announce(self._engine.scheduler.load)
            told = [budget.max_nodes, budget.min_accept_prob, budget.max_prompt_rows, list(budget.drafters.items())]
            self._say("step", budget=told)
            events = self._engine.step()
        except Exception as failure:  # the others may be anywhere in the same step
            self.give_up(str(failure) if isinstance(failure, RankLost) else f"{type(failure).__name__}: {failure}")
            raise
        self._digest.add(events)
        return events

    def prepare_next(self) -> bool:
        """Capture one more step on every rank."""
        if not self._engine.runner.captures or self.lost is not None:
            return False
        try:
            self._say("prepare")
            return self._engine.prepare_next()
        except Exception as failure:
            self.give_up(str(failure))
            return False

    def prepare(self, seconds: float) -> None:
        """Capture steps for so long."""
        until = time.perf_counter() + seconds
        while time.perf_counter() < until and self.prepare_next():
            pass

    def give_up(self, reason: str) -> None:
        """The ranks cannot go on."""
        if self.lost is None:
            self.lost = reason
            self._ranks.leave_word(reason)

    def close(self) -> None:
        """Let the others end."""
        if self.lost is None:
            with suppress(RankLost):  # then they have ended already
                self._say("stop")
                self._ranks.delivered()
            self.lost = "the engine is closed"

    def _say(self, what: str, **more: Any) -> None:
        news, self._news = self._news, []
        self._ranks.say({"do": what, "digest": self._digest.value, "news": news, **more})


def follow(engine: Engine, ranks: Orders, unpack: Unpack) -> None:
    """Do as rank 0 does, until it stops."""
    engine.controller = told = Announced()
    digest = _Digest(engine)
    try:
        while (order := ranks.hear())["do"] != "stop":
            _catch_up(engine, digest, order["news"], unpack)
            if order["digest"] != digest.value:
                raise RankLost(
                    f"Rank {ranks.rank} has not computed what rank 0 has, so answers would be wrong: its sums, its "
                    "memory or its version of the software differ. Start again; if it recurs, run with one rank."
                )
            if order["do"] == "prepare":
                engine.prepare_next()
                continue
            nodes, least, prompt_rows, chosen = order["budget"]
            told.next = Budget(nodes, least, max_prompt_rows=prompt_rows, drafters=dict(chosen))
            digest.add(engine.step())
    except Exception as failure:
        ranks.leave_word(f"{type(failure).__name__}: {failure}")
        raise


def _catch_up(engine: Engine, digest: _Digest, news: list[list[Any]], unpack: Unpack) -> None:
    for kind, *what in news:
        if kind == "abort":
            digest.add(engine.abort(what[0], FinishReason(what[1])))
            continue
        try:
            engine.add([unpack(plain) for plain in what[0]])
        except QueueFull:  # rank 0 would not have sent it
            raise RankLost("A rank's queue is fuller than that of rank 0.") from None
