"""Steps of an answer as the page reads them: what was guessed, how likely it was, and what came of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from draftwood.model.tokenizer import Tokenizer
from draftwood.request import Event, GuessedTree, SpeculationStats, StepTrace, TracedToken
from draftwood.server.logprob_buffer import LogprobBuffer, Spoken

Json = dict[str, Any]
DIGITS = 6  # of a probability, or of a second


class Tracer:
    """Tells each step of one answer once all its tokens are certain. What a stop string took back is not told."""

    def __init__(self, choice: int, drafter: str, tokenizer: Tokenizer) -> None:
        self._choice = choice
        self._drafter = drafter
        self._tokenizer = tokenizer
        self._margin: LogprobBuffer[TracedToken] = LogprobBuffer(tokenizer)
        self._steps: deque[tuple[StepTrace, SpeculationStats, float]] = deque()  # not told yet
        self._spoken: list[Spoken[TracedToken]] = []  # of those steps
        self._before = 0.0

    def add(self, event: Event) -> list[Json]:
        """The steps that can be told now."""
        emitted: Sequence[TracedToken] = ()
        if event.step is not None:
            emitted = event.step.emitted
            self._steps.append((event.step, event.stats, event.stats.seconds - self._before))
            self._before = event.stats.seconds
        self._spoken += self._margin.add(emitted, event)
        told = []
        while self._steps and (event.finished or len(self._spoken) >= len(self._steps[0][0].emitted)):
            step, stats, seconds = self._steps.popleft()
            own, self._spoken = self._spoken[: len(step.emitted)], self._spoken[len(step.emitted) :]
            if own:
                told.append(self._written(step, stats, seconds, own))
        return told

    def _written(
        self, step: StepTrace, stats: SpeculationStats, seconds: float, spoken: Sequence[Spoken[TracedToken]]
    ) -> Json:
        return {
            "choice": self._choice,
            "step": stats.steps,
            "seconds": round(seconds, DIGITS),
            "drafter": self._drafter,
            "law": stats.law,
            "batch": step.num_sequences,
            "rows": step.num_rows,
            "tree": None if step.tree is None else self._tree(step.tree),
            "emitted": [_emitted(token) for token in spoken],
        }

    def _tree(self, tree: GuessedTree) -> Json:
        spelled = [self._tokenizer.piece(token, skip_special=False) for token in tree.tokens]
        return {
            "tokens": tree.tokens,
            "texts": [text.decode("utf-8", "replace") for text in spelled],
            "parents": tree.parents,
            "p": [_rounded(p) for p in tree.p],
            "q": [_rounded(q) for q in tree.q],
            "accepted": tree.accepted,
            "members": tree.members,
        }


def _emitted(spoken: Spoken[TracedToken]) -> Json:
    token = spoken.entry
    return {
        "token": token.token,
        "text": spoken.text,
        "kind": str(token.kind),
        "depth": token.depth,
        "node": token.node,
        "p": _rounded(token.p),
        "q": _rounded(token.q),
    }


def _rounded(probability: float | None) -> float | None:
    return None if probability is None else round(probability, DIGITS)
