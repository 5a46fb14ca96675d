"""How many forwards of a cascade's middle pay: expected tokens by expected seconds, from what steps have shown.

CAS-Spec's objective, with measured times: with r forwards a step is expected to give 1 + the chances that the tokens of
r forwards are all accepted, in the time of the inner drafter, r forwards of the middle, and the target. With none the
inner tree goes to the target as it is. What was tried least recently is tried again now and then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from draftwood.drafting import Proposal
from draftwood.protocols import BatchView
from draftwood.tree import TokenTree, Verdict

NEWEST = 0.1  # share of the newest step in a mean
AGAIN = 24  # steps after which another choice is tried
DEEPEST = 32  # depths that are told apart
PRIOR = (1.5, 2.0)  # accepted, of drafts, at each depth before anything is known


@dataclass
class _Mean:
    """Of what was seen, old things fading."""

    value: float | None = None

    def add(self, seen: float) -> None:
        self.value = seen if self.value is None else self.value + NEWEST * (seen - self.value)


@dataclass(frozen=True)
class _Waiting:
    """A step whose outcome is not known yet."""

    rounds: int
    guesses: dict[int, set[tuple[int, ...]]]  # of each row of the batch state, paths of the inner tree
    left: float


@dataclass
class Rates:
    """What steps with 0 … `most` forwards of the middle have given and cost; fewer than `least` are not tried."""

    most: int
    least: int = 0
    _steps: int = 0
    _depths: list[list[float]] = field(default_factory=lambda: [list(PRIOR) for _ in range(DEEPEST)])
    _direct: _Mean = field(default_factory=_Mean)  # tokens of the inner tree that the target agrees with
    _gain: _Mean = field(default_factory=_Mean)  # tokens that a forward of the middle gives
    _inner: _Mean = field(default_factory=_Mean)  # seconds
    _forward: _Mean = field(default_factory=_Mean)
    _target: dict[int, _Mean] = field(default_factory=dict)  # by forwards of the middle
    _waiting: _Waiting | None = None

    def choose(self, nodes: int) -> int:
        """Forwards of the middle in the next step, for chains of `nodes` tokens."""
        self._steps += 1
        choices = range(self.least, min(self.most, nodes) + 1)
        untried = [rounds for rounds in choices if rounds not in self._target]
        if untried:
            return untried[-1]
        if self._steps % AGAIN == 0:
            return choices[self._steps // AGAIN % len(choices)]
        return max(choices, key=lambda rounds: self.rate(rounds, nodes))

    def rate(self, rounds: int, nodes: int) -> float:
        """Expected tokens of a sequence in a second."""
        seconds = (self._inner.value or 0.0) + rounds * (self._forward.value or 0.0)
        seconds += self._target[rounds].value or 0.0
        gained = self._expected(min(nodes, rounds * (self._gain.value or 1.0))) if rounds else self._direct.value or 0.0
        return (1.0 + gained) / max(seconds, 1e-9)

    def _expected(self, tokens: float) -> float:
        """Accepted tokens of a chain of so many."""
        chance, total = 1.0, 0.0
        for hits, trials in self._depths:
            if tokens <= 0:
                break
            chance *= hits / trials
            total += chance * min(tokens, 1.0)
            tokens -= 1.0
        return total

    def proposed(
        self, view: BatchView, guess: TokenTree, times: tuple[float, float, float], rounds: int, made: int
    ) -> None:
        """Trees go to the target now, after `rounds` forwards that gave `made` tokens in all; `times`: when the step
        began, when the inner drafter was done, and now.
        """
        began, guessed, left = times
        self._inner.add(guessed - began)
        if rounds:
            self._forward.add((left - guessed) / rounds)
            self._gain.add(made / (rounds * view.size))
        self._waiting = _Waiting(rounds, _paths(view, guess), left)

    def committed(self, view: BatchView, proposal: Proposal, verdict: Verdict, now: float) -> None:
        """What the target said of the trees."""
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            return
        self._target.setdefault(waiting.rounds, _Mean()).add(now - waiting.left)
        tree = proposal.tree
        paths = tree.tokens[verdict.path.clamp(min=0)][:, 1:].tolist()
        lengths, bonus, sizes = verdict.length.tolist(), verdict.bonus.tolist(), (tree.sizes - 1).tolist()
        for b, row in enumerate(view.rows.tolist()):
            known = waiting.guesses.get(row)
            if known is None:
                continue
            said = [*paths[b][: lengths[b]], bonus[b]]
            agreed = next((n for n in range(len(said), 0, -1) if tuple(said[:n]) in known), 0)
            self._direct.add(agreed)
            if waiting.rounds:
                self._learn(lengths[b], sizes[b])

    def _learn(self, accepted: int, drafted: int) -> None:
        for depth in range(min(drafted, accepted + 1, DEEPEST)):
            record = self._depths[depth]
            record[0] += depth < accepted
            record[1] += 1
            if record[1] > 1 / NEWEST**2:
                record[:] = record[0] / 2, record[1] / 2


def _paths(view: BatchView, guess: TokenTree) -> dict[int, set[tuple[int, ...]]]:
    """The paths of each sequence's tree, by its row."""
    rows, tokens, owner = view.rows.tolist(), guess.tokens.tolist(), guess.owner.tolist()
    parents: Sequence[int] = guess.parents.tolist()
    found: dict[int, set[tuple[int, ...]]] = {row: set() for row in rows}
    paths: list[tuple[int, ...]] = []
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        paths.append(() if parent < 0 or token < 0 else (*paths[parent], token))
        if paths[-1]:
            found[rows[owner[node]]].add(paths[-1])
    return found
