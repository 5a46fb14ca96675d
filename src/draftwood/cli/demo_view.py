"""How the demo looks: two columns that grow in a terminal, plain blocks in a pipe, and a picture."""

from __future__ import annotations

import io
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.terminal_theme import MONOKAI
from rich.text import Text

from draftwood.cli.screen import Transcript, coloured

if TYPE_CHECKING:
    from draftwood.cli.demo import Comparison, Summary
    from draftwood.cli.demo_prompts import DemoPrompt

FRAME_SECONDS = 0.1  # drawing more often would cost the engine time
SVG_WIDTH = 108
WITHHELD = "–"


class ColumnView:
    """Both sides next to each other, redrawn in place."""

    def __init__(self, console: Console, drafter: str) -> None:
        self._console = console
        self._drafter = drafter
        self._live: Live | None = None
        self._sides = (Transcript(), Transcript())
        self._drawn = 0.0

    def begin(self, number: int, prompt: DemoPrompt, plain: Transcript, speculative: Transcript) -> None:
        """Print the prompt and open two empty columns."""
        self._console.print(_heading(number, prompt))
        self._sides = (plain, speculative)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._live.start()
        self.changed()

    def changed(self) -> None:
        """Redraw, but not too often."""
        now = time.perf_counter()
        if self._live is None or now - self._drawn < FRAME_SECONDS:
            return
        self._drawn = now
        room = max(4, self._console.height - 6)
        self._live.update(_columns(*self._sides, self._drafter, self._console, room), refresh=True)

    def end(self, comparison: Comparison) -> None:
        """Replace the moving columns by the whole texts, and say how it went."""
        self.close()
        self._console.print(_columns(*self._sides, self._drafter, self._console))
        self._console.print(_verdict(comparison))
        self._console.print()

    def close(self) -> None:
        """Give the terminal back."""
        if self._live is not None:
            self._live.stop()
            self._live = None


class BlockView:
    """For pipes and logs: whole answers, one below the other."""

    def __init__(self, console: Console, drafter: str) -> None:
        self._console = console
        self._drafter = drafter

    def begin(self, number: int, prompt: DemoPrompt, plain: Transcript, speculative: Transcript) -> None:
        """Print the prompt."""
        self._print(_heading(number, prompt))

    def changed(self) -> None:
        """Nothing: a log wants whole answers."""

    def end(self, comparison: Comparison) -> None:
        """Print both answers and how it went."""
        for title, side in (
            ("plain", comparison.plain),
            (f"speculative ({self._drafter})", comparison.speculative),
        ):
            self._print(Text(f"--- {title}: {_rate(side)}"))
            self._print(coloured(side.pieces))
        self._print(_verdict(comparison))
        self._print(Text())

    def close(self) -> None:
        """Nothing was opened."""

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True)
        self._console.file.flush()


def print_summary(console: Console, summary: Summary) -> None:
    """The table, and why it may lack ratios."""
    console.print(summary_table(summary))
    if summary.why_withheld is not None:
        console.print(Text(summary.why_withheld, style="dim"), soft_wrap=not console.is_terminal)


def summary_table(summary: Summary) -> Table:
    """All prompts, and the median; fits 80 columns."""
    table = Table(box=box.SIMPLE_HEAD, show_footer=True)
    shown = summary.why_withheld is None
    table.add_column("Prompt", footer="median")
    table.add_column("Tokens", justify="right")
    table.add_column("Tokens\na step", justify="right")
    table.add_column("Guesses\naccepted", justify="right")
    table.add_column("Plain\ntok/s", justify="right")
    table.add_column("Spec.\ntok/s", justify="right")
    table.add_column("Ratio", justify="right", footer=f"{summary.median_ratio:.2f}x" if shown else WITHHELD)
    table.add_column("Identical", footer=_yes(summary.identical))
    for comparison in summary.comparisons:
        stats = comparison.speculative.stats
        table.add_row(
            comparison.prompt.title,
            str(stats.num_tokens),
            f"{stats.tokens_per_step:.2f}",
            f"{stats.acceptance:.0%}",
            *_times(comparison, steady=summary.steady),
            _yes(comparison.identical),
        )
    return table


def _times(comparison: Comparison, *, steady: bool) -> tuple[str, str, str]:
    """Tokens a second of both sides, and their ratio; withheld where they would be noise."""
    if not steady:
        return (WITHHELD, WITHHELD, WITHHELD)
    rates = (side.stats.tokens_per_second for side in (comparison.plain, comparison.speculative))
    plain, speculative = (f"{rate:.1f}" for rate in rates)
    return plain, speculative, f"{comparison.ratio:.2f}x" if comparison.is_plausible else WITHHELD


def draw_svg(path: Path, summary: Summary, drafter: str) -> None:
    """The prompt with the most tokens a step, and the table, as a picture."""
    console = Console(record=True, width=SVG_WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    best = max(summary.comparisons, key=lambda comparison: comparison.speculative.stats.tokens_per_step)
    console.print(_heading(summary.comparisons.index(best) + 1, best.prompt))
    console.print(_columns(best.plain, best.speculative, drafter, console, rates=summary.steady))
    console.print(_verdict(best))
    print_summary(console, summary)
    picture = console.export_svg(title="draftwood demo", theme=MONOKAI)
    # A picture should load nothing: the viewer's own monospaced font will do.
    path.write_text(re.sub(r"@font-face\s*\{.*?\}", "", picture, flags=re.DOTALL), encoding="utf-8")


def _heading(number: int, prompt: DemoPrompt) -> Text:
    return Text.assemble((f"{number}. {prompt.title}", "bold"), "\n", (prompt.text, "dim"))


def _columns(
    plain: Transcript,
    speculative: Transcript,
    drafter: str,
    console: Console,
    room: int | None = None,
    *,
    rates: bool = True,
) -> RenderableType:
    grid = Table.grid(expand=True)
    grid.add_column(ratio=1)
    grid.add_column(ratio=1)
    width = console.width // 2 - 4
    sides = ((plain, "plain"), (speculative, f"speculative ({drafter})"))
    grid.add_row(*(_panel(side, title, console, width, room, rates=rates) for side, title in sides))
    return grid


def _panel(side: Transcript, title: str, console: Console, width: int, room: int | None, *, rates: bool) -> Panel:
    lines = coloured(side.pieces).wrap(console, width)
    shown = lines if room is None else lines[-room:]
    about = _rate(side) if rates else _counts(side)
    return Panel(Group(*shown), title=title, subtitle=about, title_align="left", subtitle_align="left")


def _rate(side: Transcript) -> str:
    if not side.stats.steps:
        return "waiting"
    return f"{_counts(side)}, {side.stats.tokens_per_second:.1f} tok/s"


def _counts(side: Transcript) -> str:
    return f"{side.stats.num_tokens} tokens, {side.stats.steps} steps"


def _verdict(comparison: Comparison) -> Text:
    """What holds whether or not the machine was steady; ratios are for the summary, which knows whether it was."""
    same = ("Identical tokens", "green") if comparison.identical else ("THE ANSWERS DIFFER", "bold red")
    return Text.assemble(same, f" · {comparison.speculative.stats.tokens_per_step:.2f} tokens/step")


def _yes(value: bool) -> str:
    return "yes" if value else "NO"
