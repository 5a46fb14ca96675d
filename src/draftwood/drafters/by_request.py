"""Several drafters in one batch: each request may name the one that guesses for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from draftwood.cache.resident import ResidentDrafter, attach, resident_of
from draftwood.errors import InvalidRequest
from draftwood.faults import DrafterHealth, GuardedDrafter
from draftwood.model.runner import ModelRunner
from draftwood.protocols import BatchView, Budget, Drafter, Features, Randomness, Span
from draftwood.tree import DraftLaw, TokenTree, Verdict
from draftwood.treebuilder import Woven


class OfferedDrafters:
    """The drafter each request names, and one for those that name none.

    What is promised about trees (`law`) is the default's promise: whoever names another drafter has to ask that one.
    Each is guarded by itself: one that fails costs only its own requests their drafts.
    """

    def __init__(self, default: Drafter, others: Mapping[str, Drafter]) -> None:
        self.default = default
        self.others = dict(others)
        self._woven: Woven | None = None
        names = {id(drafter): name for name, drafter in reversed(self.others.items())}
        self._guards = {id(d): GuardedDrafter(d, names.get(id(d), "default")) for d in self._all}
        self._guessing: list[GuardedDrafter] = []  # in the last proposal

    @property
    def law(self) -> DraftLaw:
        """The default's."""
        return self.default.law

    @property
    def max_nodes(self) -> int:
        """The most anybody proposes."""
        return max(drafter.max_nodes for drafter in self._all)

    @property
    def needs(self) -> frozenset[int]:
        """What anybody needs."""
        return frozenset().union(*(guard.needs for guard in self._guards.values()))

    @property
    def health(self) -> Sequence[DrafterHealth]:
        """Of each drafter, the default's first."""
        return [health for guard in self._guards.values() for health in guard.health]

    @property
    def _all(self) -> list[Drafter]:
        return list({id(drafter): drafter for drafter in (self.default, *self.others.values())}.values())

    def drafter_of(self, name: str | None) -> Drafter:
        """Who guesses for a request that names `name`."""
        if name is None:
            return self.default
        if name not in self.others:
            raise InvalidRequest(f"There is no drafter '{name}' here; there are {', '.join(self.others)}.")
        return self.others[name]

    def attach(self, target: ModelRunner) -> None:
        """Tell those who want to know."""
        for drafter in self._all:
            attach(drafter, target)

    def resident(self, target: ModelRunner) -> ResidentDrafter | None:
        """The default's: requests that name another go step by step."""
        return resident_of(self.default, target)

    def propose(self, view: BatchView, budget: Budget, rng: Randomness) -> TokenTree:
        """Each drafter's trees for its own requests."""
        whose = [self._guards[id(self.drafter_of(params.drafter))] for params in view.params]
        self._guessing = list({id(drafter): drafter for drafter in whose}.values())
        if len(self._guessing) == 1:
            self._woven = None
            return self._guessing[0].propose(view, budget, rng)
        places = [[b for b, other in enumerate(whose) if other is drafter] for drafter in self._guessing]
        parts = [
            drafter.propose(view.take(rows), budget, rng) for drafter, rows in zip(self._guessing, places, strict=True)
        ]
        self._woven = Woven(parts, places)
        return self._woven.tree

    def read(self, spans: Sequence[Span], features: Features) -> None:
        """Whoever needs something sees all texts: who will guess for a prompt is not known while it is read."""
        for drafter in self._guards.values():
            if drafter.needs:
                drafter.read(spans, {layer: features[layer] for layer in drafter.needs})

    def observe(self, view: BatchView, tree: TokenTree, verdict: Verdict, features: Features) -> None:
        """Tell each drafter what became of its own trees."""
        if self._woven is None:
            return self._guessing[0].observe(view, tree, verdict, features)
        woven, self._woven = self._woven, None
        for i, drafter in enumerate(self._guessing):
            nodes = woven.nodes(i)
            own = {layer: rows[nodes] for layer, rows in features.items()}
            drafter.observe(view.take(woven.places[i]), woven.parts[i], woven.verdict(i, verdict), own)

    def release(self, seq_id: int) -> None:
        """Everybody forgets it."""
        for guard in self._guards.values():
            guard.release(seq_id)
