"""The report: every figure on the page and in the terminal, nothing from outside, and labels one can read."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any

import pytest
from rich.console import Console

from draftwood.lab import report

TEMPERATURES = (0.0, 0.6, 1.0)
LAWS = ("token", "block", "walk", "gbv", "traversal", "khisti", "match")  # the first two on one path only
VOID = {"meta", "br", "hr", "img", "link", "input"}


def a_cell(temperature: float, tree: str, law: str, paths: int, tokens: float, **more: Any) -> dict[str, Any]:
    cell = {"temperature": temperature, "tree": tree, "paths": paths, "law": law, "lossless": True}
    return cell | {"tokens": tokens, "error": 0.05 + paths / 1000, "nodes": 3.2 * paths, "contexts": 48} | more


def cells() -> Iterator[dict[str, Any]]:
    for temperature in TEMPERATURES:
        base = 3.4 - temperature
        for i, law in enumerate(LAWS):
            for paths in (1,) if law in ("token", "block") else (1, 2, 3, 4):
                gain = (0.2 + 0.003 * i) * (paths - 1) ** 0.7  # ends that lie closer than a label is high
                yield a_cell(temperature, "paths", law, paths, base + 0.011 * i + gain)
        yield a_cell(temperature, "chosen", "walk", 1, base + 0.07)
        for paths in (2, 3, 4):
            yield a_cell(temperature, "without-replacement", "walk", paths, base + 0.25 * paths)
            yield a_cell(temperature, "without-replacement", "gbv", paths, base + 0.27 * paths - 0.05)
            yield a_cell(temperature, "hybrid", "walk", paths, base + 0.26 * paths)
            yield a_cell(temperature, "paths", "typical", paths, base + 0.9 + 0.1 * paths, lossless=False)


@pytest.fixture
def record() -> dict[str, Any]:
    claim = {"claim": "block over token on one path, T=1", "published": "+5 to +8 %", "here": "+3.1 % (1.9 to 4.3)"}
    other = {"claim": "gbv & walk < traversal", "published": "+2 %", "here": "-0.1 %"}
    facts = {"version": "0.1.0", "command": "draftwood laws --seed 0", "machine": "8 cores", "date": "2026-01-01"}
    made = {"target": "qwen1.5b", "draft": "qwen0.5b", "contexts": 48, "prompts": 12, "depth": 5, "seed": 0}
    orderings = [claim | {"holds": True}, other | {"holds": False}]
    return made | {"cells": list(cells()), "orderings": orderings, "provenance": facts}


class Page(HTMLParser):
    """A page's texts, its table rows and the tags that are still open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.tables: list[list[list[tuple[str, bool]]]] = []  # tables of rows of (text, bold)
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append(("", False))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if "td" in self.open or "th" in self.open:
            before, _ = self.tables[-1][-1][-1]
            self.tables[-1][-1][-1] = (before + data, "b" in self.open)


def sections(table: list[list[tuple[str, bool]]]) -> dict[str, dict[str, list[tuple[str, bool]]]]:
    """Family, law, figures."""
    found: dict[str, dict[str, list[tuple[str, bool]]]] = {}
    for row in table[1:]:
        if len(row) == 1:
            found[row[0][0]] = {}
        else:
            found[list(found)[-1]][row[0][0]] = row[1:]
    return found


def test_the_page_is_whole_and_asks_for_nothing(record: dict[str, Any]) -> None:
    html = report.write_html(record)
    page = Page(html)
    assert page.open == []
    assert "http" not in html
    assert "url(" not in html
    tags = {tag for tag, _ in page.seen}
    assert {"svg", "table", "dl", "title"} <= tags
    assert not tags & {"script", "link", "img", "iframe"}
    assert not [name for _, attrs in page.seen for name in attrs if name in ("src", "href") or name.startswith("on")]
    assert "prefers-color-scheme:dark" in html


def test_every_law_and_figure_is_on_the_page(record: dict[str, Any]) -> None:
    page = Page(report.write_html(record))
    assert len(page.tables) == len(TEMPERATURES) + 1
    for temperature, table in zip(TEMPERATURES, page.tables, strict=False):
        assert [text for text, _ in table[0]] == ["Law", "K = 1", "K = 2", "K = 3", "K = 4"]
        found = sections(table)
        for cell in record["cells"]:
            if cell["temperature"] == temperature and cell["lossless"]:
                figure, _ = found[cell["tree"]][cell["law"]][cell["paths"] - 1]
                assert figure == f"{cell['tokens']:.2f} ± {cell['error']:.2f}"
    text = "\n".join(page.text)
    assert "qwen1.5b" in text
    assert "48 contexts of 12 prompts" in text
    assert [row[-1][0] for row in page.tables[-1][1:]] == ["holds", "does not hold here"]
    for line in record["orderings"]:
        assert [line["claim"], line["published"], line["here"]] in [[t for t, _ in r[:3]] for r in page.tables[-1]]
    for key, value in record["provenance"].items():
        assert key in text
        assert value in text


def test_the_best_of_each_column_is_bold_in_its_family(record: dict[str, Any]) -> None:
    for table in Page(report.write_html(record)).tables[: len(TEMPERATURES)]:
        for family, laws in sections(table).items():
            for column in range(4):
                figures = [row[column] for row in laws.values()]
                best = max((text for text, _ in figures if text != report.MISSING), default=None)
                lossy = family == report.LOSSY
                assert [bold for _, bold in figures] == [text == best and not lossy for text, _ in figures]


def test_lossy_laws_stand_apart_at_the_end(record: dict[str, Any]) -> None:
    record["cells"].reverse()
    for table in Page(report.write_html(record)).tables[: len(TEMPERATURES)]:
        found = sections(table)
        assert next(iter(found)) == "paths"
        assert list(found)[-1] == report.LOSSY
        assert list(found[report.LOSSY]) == ["typical (paths)"]
        assert all("typical" not in law for family in list(found)[:-1] for law in found[family])


def test_what_was_not_measured_is_a_dash(record: dict[str, Any]) -> None:
    record["cells"] += [
        a_cell(1.0, "delayed", "walk", 2, float("nan")),
        a_cell(1.0, "delayed", "walk", 3, 2.5, error=None),
    ]
    delayed = sections(Page(report.write_html(record)).tables[2])["delayed"]["walk"]
    assert [text for text, _ in delayed] == ["–", "–", "2.50", "–"]


def test_a_cell_measured_twice_is_an_error(record: dict[str, Any]) -> None:
    record["cells"].append(record["cells"][0])
    with pytest.raises(ValueError, match="two cells for T = 0, paths, token, K = 1"):
        report.write_html(record)


def test_names_are_only_text(record: dict[str, Any]) -> None:
    evil = "<script>alert('\"&')</script>"
    for cell in record["cells"]:
        cell["law"] += evil
        if cell["tree"] == "hybrid":
            cell["tree"] += evil
    for line in record["orderings"]:
        line |= {"claim": evil, "published": evil, "here": evil}
    record |= {"target": evil, "draft": evil, "depth": evil, "provenance": {evil: evil}}
    html = report.write_html(record)
    page = Page(html)
    assert page.open == []
    assert "<script" not in html
    assert "script" not in {tag for tag, _ in page.seen}
    assert not [name for _, attrs in page.seen for name in attrs if name.startswith("on")]
    assert evil in "".join(page.text)


def plots(html: str) -> list[str]:
    return [svg for svg in re.findall(r"<svg.*?</svg>", html, re.S) if 'class="label"' in svg]


def test_labels_of_lines_do_not_overlap_and_stay_inside(record: dict[str, Any]) -> None:
    found = plots(report.write_html(record))
    assert len(found) == len(TEMPERATURES)
    for svg in found:
        width, height = map(float, re.search(r'viewBox="0 0 (\d+) (\d+)"', svg).groups())  # type: ignore[union-attr]
        labels = re.findall(r'<text class="label" x="([\d.]+)" y="([\d.]+)">([^<]*)<', svg)
        assert {text.split()[0] for _, _, text in labels} == set(LAWS)
        ys = sorted(float(y) for _, y, _ in labels)
        assert all(b - a >= 15 for a, b in pairwise(ys))
        assert ys[0] > 8
        assert ys[-1] < height
        assert all(float(x) + 6.5 * len(text) <= width for x, _, text in labels)
        assert "typical" not in svg


def test_points_say_their_figures(record: dict[str, Any]) -> None:
    texts = Page(report.write_html(record)).text
    for cell in record["cells"]:
        if cell["tree"] == "paths" and cell["lossless"]:
            start = f"{cell['law']}, K = {cell['paths']}: {cell['tokens']:.4f} ± {cell['error']:.4f}"
            assert any(text.startswith(start) for text in texts)


def test_a_law_keeps_its_colour_when_another_is_missing(record: dict[str, Any]) -> None:
    record["cells"] = [c for c in record["cells"] if c["temperature"] != 0.6 or c["law"] != "walk"]
    kept = []
    for svg in plots(report.write_html(record)):
        series = re.findall(r'<g class="s(\d)">.*?class="label"[^>]*>(\S+)', re.sub(r"\n", " ", svg))
        kept.append({law.split("<")[0]: number for number, law in series})
    assert len(kept[1]) == len(LAWS) - 1
    assert kept[1].items() <= kept[0].items()
    assert kept[0] == kept[2]


def test_many_labels_are_spread_in_order() -> None:
    wanted = [100.0, 101.0, 99.0, 300.0, 299.0, 12.0]
    got = report.spread(wanted, 12, 300)
    assert sorted(range(6), key=wanted.__getitem__) == sorted(range(6), key=got.__getitem__)
    ordered = sorted(got)
    assert all(b - a >= report.LABEL_GAP for a, b in pairwise(ordered))
    assert ordered[0] >= 12
    assert ordered[-1] <= 300


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", [0, 1])
def test_colours_stand_out_from_their_paper(theme: int) -> None:
    def contrast(name: str, paper: str) -> float:
        bright, dim = sorted((luminance(report.COLOURS[n][theme]) for n in (name, paper)), reverse=True)
        return (bright + 0.05) / (dim + 0.05)

    assert all(contrast(name, paper) >= 4.5 for name in ("ink", "muted") for paper in ("paper", "band"))
    assert all(contrast(name, "paper") >= 3 for name in ("bar", *(f"c{i}" for i in range(report.SERIES))))


def test_a_record_of_one_cell_is_drawn(record: dict[str, Any]) -> None:
    record |= {"cells": [a_cell(1.0, "paths", "block", 1, 3.0, error=float("nan"))], "orderings": []}
    del record["provenance"]
    html = report.write_html(record)
    assert Page(html).open == []
    assert len(plots(html)) == 1
    assert "Published orderings" not in html
    assert len(list(report.tables(record))) == 1


def test_terminal_tables_hold_the_same_figures(record: dict[str, Any]) -> None:
    record["orderings"][0]["claim"] = "[red]block[/red] over token"  # names are text, not markup
    made = list(report.tables(record))
    assert len(made) == len(TEMPERATURES) + 1
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system="standard")
    for temperature, table in zip(TEMPERATURES, made, strict=False):
        with console.capture() as capture:
            console.print(table)
        styled = capture.get()
        text = re.sub(r"\x1b\[[\d;]*m", "", styled)
        assert f"T = {temperature:g}" in text
        assert text.index("lossy") > text.index("hybrid")
        for cell in record["cells"]:
            if cell["temperature"] == temperature:
                assert cell["law"] in text
                assert f"{cell['tokens']:.2f} ± {cell['error']:.2f}" in text
        best = max(c["tokens"] for c in record["cells"] if c["temperature"] == temperature and c["tree"] == "hybrid")
        assert f"\x1b[1m{best:.2f} ± 0.05\x1b[0m" in styled
    with console.capture() as capture:
        console.print(made[-1])
    assert "does not hold here" in capture.get()
    assert "[red]block[/red]" in capture.get()
