"""What goes to the terminal: answers on stdout, everything about them on stderr."""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.text import Text

from draftwood.errors import DraftwoodError
from draftwood.request import Event, FinishReason, SpeculationStats

GUESSED = "green"  # tokens that a drafter had guessed
WIDE = 160  # columns of a table that is not shown in a terminal
# A model may emit escape sequences; a terminal must not obey them.
_CONTROLS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])


def explain(message: str) -> None:
    """An error, as one paragraph."""
    console = stderr()
    console.print(Text.assemble(("Error: ", "bold red"), message), soft_wrap=not console.is_terminal)


def say(message: str) -> None:
    """News that are not part of the answer."""
    console = stderr()
    console.print(Text(message, style="dim"), soft_wrap=not console.is_terminal)


def stdout() -> Console:
    """Where answers and tables go."""
    interactive = sys.stdout.isatty()
    return Console(highlight=False, width=None if interactive else WIDE)


def stderr() -> Console:
    """Where everything else goes."""
    return Console(stderr=True, highlight=False)


def write_json(record: dict[str, Any]) -> None:
    """One line on stdout."""
    sys.stdout.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
    sys.stdout.flush()


def coloured(pieces: Iterable[tuple[str, bool]]) -> Text:
    """A text with its guessed parts in colour, fit for a terminal."""
    return Text.assemble(*((text.translate(_CONTROLS), GUESSED if guessed else "") for text, guessed in pieces))


@dataclass
class Transcript:
    """One answer, as its events add up."""

    pieces: list[tuple[str, bool]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    moments: list[float] = field(default_factory=list)  # when each event came, in seconds since submission
    finish_reason: FinishReason = FinishReason.CANCELLED  # until an event says otherwise

    @property
    def text(self) -> str:
        """What was said."""
        return "".join(text for text, _ in self.pieces)

    @property
    def unsteadiness(self) -> float:
        """Mean over median time between events: 1 if nothing held the answer up."""
        gaps = [after - before for before, after in itertools.pairwise(self.moments)]
        return statistics.mean(gaps) / statistics.median(gaps) if gaps and statistics.median(gaps) > 0 else 1.0

    def add(self, event: Event) -> None:
        """Take an event; the engine's own failure is raised here."""
        self.pieces += event.pieces
        self.token_ids += event.token_ids
        self.stats = event.stats
        self.moments.append(event.stats.seconds)
        self.finish_reason = event.finish_reason or self.finish_reason
        if event.finish_reason is FinishReason.ERROR:
            raise DraftwoodError(event.error or "The answer failed for an unknown reason.")

    def record(self) -> dict[str, Any]:
        """Its text and figures, for `--json`."""
        stats = self.stats
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "num_tokens": stats.num_tokens,
            "prompt_tokens": stats.prompt_tokens,
            "steps": stats.steps,
            "drafted": stats.drafted,
            "accepted": stats.accepted,
            "members": dict(stats.members),
            "tokens_per_step": round(stats.tokens_per_step, 4),
            "acceptance": round(stats.acceptance, 4),
            "seconds": round(stats.seconds, 4),
            "tokens_per_second": round(stats.tokens_per_second, 2),
            "law": stats.law,
            "lossless": stats.lossless,
            "drift": stats.drift,
            "seed": stats.seed,
            "reproducible": stats.reproducible,
            "finish_reason": str(self.finish_reason),
        }


def figures(stats: SpeculationStats) -> str:
    """What speculation did, in one line."""
    return (
        f"{stats.num_tokens} tokens in {stats.steps} steps · {stats.tokens_per_step:.2f} tokens/step · "
        f"{stats.acceptance:.0%} of {stats.drafted} guesses accepted · {stats.tokens_per_second:.1f} tokens/s"
        f"{'' if stats.lossless else f' · NOT the model’s own words: {lossy_note(stats)}'}"
    )


def seed_note(stats: SpeculationStats) -> str:
    """What a seed is worth where the tokens depend on trees or on what else is computed."""
    return (
        f"With the law '{stats.law}' and these settings this seed may give other tokens another time; it gives the "
        "same with --strict and without --law."
    )


def lossy_note(stats: SpeculationStats) -> str:
    """What a lossy law may have done to an answer."""
    how_far = (
        "not known how far" if stats.drift is None else f"by {stats.drift:.3g} in total variation, all steps added"
    )
    return f"the law '{stats.law}' moved their distribution, {how_far}"


class AnswerPrinter:
    """Prints an answer while it comes: in colour on a terminal, as plain text elsewhere."""

    def __init__(self) -> None:
        self._console = stdout()
        self._fresh = True  # nothing written on the current line yet

    def event(self, event: Event) -> None:
        """Print what an event brought."""
        if not event.text:
            return
        self._fresh = event.text.endswith("\n")
        if self._console.is_terminal:
            self._console.print(coloured(event.pieces), end="", soft_wrap=True)
        else:
            sys.stdout.write(event.text)
            sys.stdout.flush()

    def end(self) -> None:
        """Leave the cursor at the start of a line."""
        if not self._fresh:
            sys.stdout.write("\n")
            sys.stdout.flush()
