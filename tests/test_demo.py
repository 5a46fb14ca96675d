"""What the demo shows of times: nothing that a busy machine, not speculation, has made."""

from __future__ import annotations

import html
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from draftwood.cli import app
from draftwood.cli.demo import PROMPTS, Comparison, Summary
from draftwood.cli.demo_view import draw_svg, print_summary
from draftwood.cli.screen import Transcript
from draftwood.request import SpeculationStats
from tiny import tiny_folder

RATIO = re.compile(r"\d\.\d\dx")
PICTURE = Path(__file__).parent.parent / "docs" / "demo.svg"


def side(steps: int, seconds: float, tokens: int = 60, stall: float = 0.0) -> Transcript:
    """An answer whose steps take equally long, but for one that something may have held up."""
    stats = SpeculationStats(steps=steps, num_tokens=tokens, drafted=50, accepted=tokens - steps, seconds=seconds)
    moments = [seconds * i / steps + (stall if i > 3 else 0.0) for i in range(steps)]
    return Transcript([("text", False)], list(range(tokens)), stats, moments)


def compared(ratio: float = 1.5, steps: int = 30, seconds: float = 0.6, stall: float = 0.0) -> Comparison:
    """60 tokens plainly in so many seconds, and so many times as fast in fewer steps."""
    return Comparison(PROMPTS[0], side(60, seconds), side(steps, seconds / ratio, stall=stall))


def shown(summary: Summary, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    print_summary(console, summary)
    return console.file.getvalue()  # type: ignore[attr-defined]


def drawn(path: Path) -> str:
    return html.unescape(re.sub(r"<[^>]*>", "\n", path.read_text())).replace("\xa0", " ")


def test_a_steady_machine_gives_ratios() -> None:
    summary = Summary([compared(1.5), compared(1.25), compared(1.75), compared(2.0)])
    assert RATIO.findall(shown(summary)) == ["1.50x", "1.25x", "1.75x", "2.00x", "1.62x"]
    assert summary.why_withheld is None


@pytest.mark.parametrize(
    "disturbed",
    [compared(1.5, seconds=3.0), compared(1.5, stall=2.0)],
    ids=["a slower answer than the others", "a step that was held up"],
)
def test_an_unsteady_machine_gives_no_ratio(disturbed: Comparison, tmp_path: Path) -> None:
    summary = Summary([compared(), disturbed, compared(), compared()])
    assert not summary.steady
    draw_svg(tmp_path / "demo.svg", summary, "ngram")
    for text in (shown(summary), drawn(tmp_path / "demo.svg")):
        assert not RATIO.search(text)
        assert not re.search(r"\d tok/s", text)
        words = " ".join(text.split())
        assert "not steady enough to compare" in words
        assert "run the demo again" in words
        assert "2.00" in text, "tokens a step are counted, not timed"


def test_a_ratio_above_the_tokens_of_a_step_is_noise() -> None:
    """60 tokens in 30 steps are two a step, so guessing cannot have made it 2.6 times as fast."""
    summary = Summary([compared(1.5), compared(2.6), compared(1.5), compared(1.5)])
    assert summary.steady
    assert RATIO.findall(shown(summary)) == ["1.50x"] * 3
    assert "not steady enough to compare" in shown(summary).replace("\n", " ")


def test_the_table_fits_80_columns() -> None:
    lines = shown(Summary([compared(1.5, seconds=0.06)] * 4)).splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    assert any("Identical" in line for line in lines)


def test_the_picture_in_the_docs_shows_no_ratio_above_its_tokens_a_step() -> None:
    cells = [line.strip() for line in drawn(PICTURE).splitlines() if line.strip()]
    starts = [cells.index(prompt.title) for prompt in PROMPTS]
    for start in starts:
        per_step, ratio = cells[start + 2], cells[start + 6]
        assert float(per_step) >= 1
        assert ratio == "–" or float(ratio.removesuffix("x")) <= float(per_step)


# --- JSON


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_folder(tmp_path_factory.mktemp("models") / "roomy", max_position_embeddings=4096))


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """80 columns, with somebody in front of them."""

    def watched() -> Console:
        return Console(file=sys.stdout, force_terminal=True, color_system=None, width=80, legacy_windows=False)

    monkeypatch.setenv("DRAFTWOOD_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("draftwood.cli.demo.stdout", watched)


def demo(folder: str, *arguments: str) -> Any:
    sizes = ("-n", "6", "--dtype", "float64", "--cache-tokens", "4096")
    result = CliRunner().invoke(app, ["demo", "-m", folder, *sizes, *arguments])
    assert result.exit_code == 0, result.stderr
    return result


@pytest.mark.usefixtures("terminal")
def test_a_terminal_gets_json_only_if_it_asks(folder: str) -> None:
    assert "{" not in demo(folder).stdout.splitlines()[-1]
    summary = json.loads(demo(folder, "--json").stdout.splitlines()[-1])
    assert summary["identical"] is True
    assert {"steady", "median_ratio"} <= summary.keys()
