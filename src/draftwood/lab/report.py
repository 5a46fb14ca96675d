"""What the laboratory measured, as one page of HTML and as tables for a terminal.

The page asks for nothing from outside and runs no script, so it can be mailed, archived and printed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

Cell = Mapping[str, Any]

MISSING = "–"
PLOTTED = "paths"  # the family whose laws are drawn over K
LOSSY = "lossy"
READING = (
    "Each figure is the expected number of tokens a step (accepted drafts plus one) ± its standard error over"
    " contexts, K counts paths or children, and bold is the best lossless law of its tree family in that column."
)
LABEL_GAP = 16.0  # pixels between the lines of two labels
VERDICTS = {True: "holds", False: "does not hold here"}

# Name: (light, dark). The seven series colours stay apart for all three kinds of colour blindness, and each stands
# out from its paper by 3:1 or more. Text is never coloured by series.
COLOURS = {
    "paper": ("#ffffff", "#15181c"),
    "ink": ("#1b1f24", "#e6e8ea"),
    "muted": ("#5a626c", "#a2abb5"),
    "rule": ("#d9dde2", "#353b43"),
    "band": ("#f3f5f7", "#1f242a"),
    "bar": ("#6f8fb3", "#5f82aa"),
    "c0": ("#3650d1", "#5172f6"),
    "c1": ("#ea4e20", "#dd410d"),
    "c2": ("#29a086", "#5cc19c"),
    "c3": ("#a7157f", "#a96699"),
    "c4": ("#222222", "#e3e3e3"),
    "c5": ("#a679ed", "#b995f6"),
    "c6": ("#664811", "#ffc216"),
}
SERIES = 7
MARKERS = (  # six shapes and seven colours: 42 laws before a pair repeats
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z",
    "M-3.6 -3.6h7.2v7.2h-7.2z",
    "M0 -4.8L4.6 3.4H-4.6z",
    "M0 -5L5 0L0 5L-5 0z",
    "M0 4.8L4.6 -3.4H-4.6z",
    "M-3.6 -3.6L3.6 3.6M-3.6 3.6L3.6 -3.6",
)
STYLE = """
*{box-sizing:border-box}
body{margin:0 auto;max-width:60rem;padding:1rem;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.5rem;line-height:1.25}h2{font-size:1.2rem;margin-top:2.5rem}
.setup,figcaption,dt,.none{color:var(--muted)}
.scroll{overflow-x:auto}figure{margin:1.5rem 0}figcaption{font-size:.875rem}
table{border-collapse:collapse;min-width:34rem;font-variant-numeric:tabular-nums;overflow-wrap:normal}
th,td{padding:.25rem .75rem;text-align:left;border-bottom:1px solid var(--rule)}
.figures th,.figures td{white-space:nowrap}
.figures td,.figures thead th+th{text-align:right}
thead th{border-bottom:2px solid var(--ink)}
tbody th{font-weight:400;background:var(--paper)}
.figures tbody th[scope=row]{position:sticky;left:0;padding-left:1.5rem}
.family th{background:var(--band);font-style:italic}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.125rem 1rem;font-size:.875rem}dd{margin:0}
svg{display:block;min-width:42rem;width:100%;max-width:48rem;font:12px system-ui,sans-serif}
svg text{fill:var(--ink)}svg .muted{fill:var(--muted)}svg .best{font-weight:700}
.grid{stroke:var(--rule)}.bar{fill:var(--bar)}
.line{fill:none;stroke:currentColor;stroke-width:1.75;stroke-linejoin:round}
.carried{fill:none;stroke:currentColor;stroke-dasharray:1 4;stroke-linecap:round}
.leader,.whisker{fill:none;stroke:currentColor;opacity:.6}
.marker{fill:currentColor;stroke:currentColor;stroke-width:1.5}
"""


@dataclass(frozen=True)
class Group:
    """Rows that compete: the lossless laws of one tree family, or everything lossy."""

    name: str
    lossless: bool
    rows: dict[str, dict[int, Cell]] = field(default_factory=dict)

    def best(self, k: int) -> float | None:
        """The best figure of a column as it is printed, so that printed ties are all best; nothing for lossy laws."""
        found = [round(cells[k]["tokens"], 2) for cells in self.rows.values() if k in cells]
        return max(found) if found and self.lossless else None

    def is_best(self, law: str, k: int) -> bool:
        """Whether this is the figure to set in bold."""
        cell = self.rows[law].get(k)
        return cell is not None and self.lossless and round(cell["tokens"], 2) == self.best(k)


def write_html(record: Mapping[str, Any]) -> str:
    """The whole report as one page."""
    title = escape(f"Acceptance laws: {record['target']} with drafts of {record['draft']}")
    setup = (
        f"{record['contexts']} contexts of {record['prompts']} prompts, depth {record['depth']}, seed {record['seed']}."
    )
    parts = [
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        f"<title>{title}</title><style>{_colours()}{STYLE}</style></head><body>",
        f'<h1>{title}</h1><p>{READING}</p><p class="setup">{escape(setup)}</p>',
        *(_html_temperature(record, temperature) for temperature in _temperatures(record)),
        _html_orderings(record.get("orderings", ())),
        _html_provenance(record.get("provenance", {})),
        "</body></html>\n",
    ]
    return "\n".join(part for part in parts if part)


def tables(record: Mapping[str, Any]) -> Iterator[Table]:
    """The same figures for a terminal: one table a temperature, and one of the published orderings."""
    ks = _columns(record)
    for temperature in _temperatures(record):
        table = Table(box=box.SIMPLE_HEAD, title=f"T = {temperature:g}, tokens a step", title_justify="left")
        table.add_column("Law")
        for k in ks:
            table.add_column(f"K = {k}", justify="right", no_wrap=True)
        for group in _groups(record, temperature):
            table.add_row(Text(group.name, style="italic"))
            for law, cells in group.rows.items():
                styles = ["bold" if group.is_best(law, k) else "" for k in ks]
                figures = [Text(_figure(cells.get(k)), style=style) for k, style in zip(ks, styles, strict=True)]
                table.add_row(Text(f"  {law}"), *figures)
            table.add_section()
        yield table
    if record.get("orderings"):
        table = Table("Claim", "Published", "Here", "", box=box.SIMPLE_HEAD, title="Published orderings")
        table.title_justify = "left"
        for line in record["orderings"]:
            table.add_row(*(Text(text) for text in _ordering(line)))
        yield table


def _temperatures(record: Mapping[str, Any]) -> list[float]:
    return sorted({cell["temperature"] for cell in record["cells"]})


def _columns(record: Mapping[str, Any]) -> list[int]:
    return sorted({1, 2, 3, 4} | {cell["paths"] for cell in record["cells"]})


def _groups(record: Mapping[str, Any], temperature: float) -> list[Group]:
    groups: dict[tuple[bool, str], Group] = {}
    for cell in record["cells"]:
        if cell["temperature"] != temperature:
            continue
        lossless = bool(cell["lossless"])
        name = cell["tree"] if lossless else LOSSY
        law = cell["law"] if lossless else f"{cell['law']} ({cell['tree']})"
        row = groups.setdefault((lossless, name), Group(name, lossless)).rows.setdefault(law, {})
        if cell["paths"] in row:
            raise ValueError(f"two cells for T = {temperature:g}, {name}, {law}, K = {cell['paths']}")
        if _known(cell["tokens"]):
            row[cell["paths"]] = cell
    return sorted(groups.values(), key=lambda group: (not group.lossless, group.name != PLOTTED))


def _known(value: Any) -> bool:
    return value is not None and math.isfinite(value)


def _figure(cell: Cell | None) -> str:
    if cell is None:
        return MISSING
    error = cell.get("error")  # one context alone has none
    return f"{cell['tokens']:.2f}" + (f" ± {error:.2f}" if _known(error) else "")


def _details(cell: Cell) -> str:
    error = f" ± {cell['error']:.4f}" if _known(cell.get("error")) else ""
    nodes = f", {cell['nodes']:.1f} nodes" if _known(cell.get("nodes")) else ""
    contexts = f", {cell['contexts']} contexts" if _known(cell.get("contexts")) else ""
    return f"{cell['tokens']:.4f}{error}{nodes}{contexts}"


def _ordering(line: Mapping[str, Any]) -> tuple[str, str, str, str]:
    return str(line["claim"]), str(line["published"]), str(line["here"]), VERDICTS.get(line["holds"], "undecided")


def _colours() -> str:
    light, dark = ("".join(f"--{name}:{pair[theme]};" for name, pair in COLOURS.items()) for theme in (0, 1))
    series = "".join(f".s{i}{{color:var(--c{i})}}" for i in range(SERIES))
    return f":root{{color-scheme:light dark;{light}}}\n@media(prefers-color-scheme:dark){{:root{{{dark}}}}}\n{series}"


def _html_temperature(record: Mapping[str, Any], temperature: float) -> str:
    groups, ks = _groups(record, temperature), _columns(record)
    lossless = [group for group in groups if group.lossless and any(group.rows.values())]
    parts = [
        f"<h2>T = {temperature:g}</h2>",
        _scroll(_html_figures(groups, ks), f"Tokens a step at T = {temperature:g}"),
    ]
    plotted = next((group for group in lossless if group.name == PLOTTED), None)
    if plotted is not None:
        caption = (
            f"Tokens a step of the lossless laws on the family “{PLOTTED}”, T = {temperature:g}. Bars are one standard"
            " error. A dotted line carries a law that stops at fewer paths on for comparison."
        )
        parts.append(_plot(_line_plot(plotted, _plotted_laws(record), ks), caption))
    if len(lossless) > 1:
        caption = f"The best lossless law of each tree family, T = {temperature:g}. Mind the nodes: families differ."
        parts.append(_plot(_family_plot(lossless, ks), caption))
    return "\n".join(parts)


def _html_figures(groups: Sequence[Group], ks: Sequence[int]) -> str:
    head = "".join(f'<th scope="col">K = {k}</th>' for k in ks)
    rows = [f'<table class="figures"><thead><tr><th scope="col">Law</th>{head}</tr></thead>']
    for group in groups:
        rows.append('<tbody><tr class="family">')
        rows.append(f'<th colspan="{len(ks) + 1}" scope="rowgroup">{escape(group.name)}</th></tr>')
        for law, cells in group.rows.items():
            figures = "".join(_html_cell(cells.get(k), group.is_best(law, k)) for k in ks)
            rows.append(f'<tr><th scope="row">{escape(law)}</th>{figures}</tr>')
        rows.append("</tbody>")
    return "\n".join([*rows, "</table>"])


def _html_cell(cell: Cell | None, best: bool) -> str:
    if cell is None:
        return f'<td class="none">{MISSING}</td>'
    text = f"<b>{_figure(cell)}</b>" if best else _figure(cell)
    return f'<td title="{escape(_details(cell))}">{text}</td>'


def _html_orderings(orderings: Sequence[Mapping[str, Any]]) -> str:
    if not orderings:
        return ""
    head = "".join(f'<th scope="col">{name}</th>' for name in ("Claim", "Published", "Here", "Verdict"))
    rows = ["".join(f"<td>{escape(text)}</td>" for text in _ordering(line)) for line in orderings]
    body = "\n".join(f"<tr>{row}</tr>" for row in rows)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"
    return f"<h2>Published orderings</h2>\n{_scroll(table, 'Published orderings')}"


def _html_provenance(provenance: Mapping[str, Any]) -> str:
    if not provenance:
        return ""
    entries = (f"<dt>{escape(str(key))}</dt><dd>{escape(str(value))}</dd>" for key, value in provenance.items())
    return "<h2>Provenance</h2>\n<dl>" + "\n".join(entries) + "</dl>"


def _scroll(content: str, label: str) -> str:
    # Focusable, so that a keyboard can scroll it too.
    return f'<div class="scroll" role="region" aria-label="{escape(label)}" tabindex="0">\n{content}\n</div>'


def _plot(svg: str, caption: str) -> str:
    return f"<figure>{_scroll(svg, caption)}<figcaption>{escape(caption)}</figcaption></figure>"


def _plotted_laws(record: Mapping[str, Any]) -> dict[str, int]:
    """A number for each law that is the same at every temperature, so that a law keeps its colour and its shape."""
    laws = (cell["law"] for cell in record["cells"] if cell["lossless"] and cell["tree"] == PLOTTED)
    return {law: i for i, law in enumerate(dict.fromkeys(laws))}


@dataclass(frozen=True)
class Frame:
    """Where the values of a line plot lie on the page."""

    ks: Sequence[int]
    ticks: Sequence[float]
    right: float
    bottom: float
    left: float = 52
    top: float = 12

    def x(self, k: int) -> float:
        """The middle of what is drawn for K, which is wider than a point."""
        return self.left + 36 + (self.right - self.left - 72) * self.ks.index(k) / (len(self.ks) - 1)

    def y(self, tokens: float) -> float:
        """The height of a figure, counted downwards."""
        low, high = self.ticks[0], self.ticks[-1]
        return self.bottom - (self.bottom - self.top) * (tokens - low) / (high - low)


def _line_plot(group: Group, numbers: Mapping[str, int], ks: Sequence[int]) -> str:
    rows = {law: dict(sorted(cells.items())) for law, cells in group.rows.items() if cells}
    labels = {law: law if max(cells) == ks[-1] else f"{law} (K ≤ {max(cells)})" for law, cells in rows.items()}
    room = 44 + 7 * max(map(len, labels.values()))
    shown = [cell for cells in rows.values() for cell in cells.values()]
    frame = Frame(ks, _ticks(shown), right=max(720 - room, 380), bottom=max(300, LABEL_GAP * len(rows)) + 12)
    ends = {law: frame.y(list(cells.values())[-1]["tokens"]) for law, cells in rows.items()}
    heights = dict(zip(ends, spread(list(ends.values()), frame.top, frame.bottom), strict=True))
    parts = [f'<svg viewBox="0 0 {frame.right + room:.0f} {frame.bottom + 28:.0f}" role="img">', _axes(frame)]
    for i, (law, cells) in enumerate(rows.items()):
        shift = (i - (len(rows) - 1) / 2) * min(8, 60 / len(rows))  # laws that agree would hide each other
        number = numbers[law]
        parts.append(f'<g class="s{number % SERIES}">')
        parts.extend(_series(law, cells, frame, shift, MARKERS[number % len(MARKERS)]))
        parts.append(_label(labels[law], frame.right, ends[law], heights[law], MARKERS[number % len(MARKERS)]))
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"])


def _series(law: str, cells: Mapping[int, Cell], frame: Frame, shift: float, marker: str) -> Iterator[str]:
    points = [(frame.x(k) + shift, frame.y(cell["tokens"])) for k, cell in cells.items()]
    yield f'<polyline class="line" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'
    kind = "leader" if max(cells) == frame.ks[-1] else "carried"
    yield f'<path class="{kind}" d="M{points[-1][0]:.1f} {points[-1][1]:.1f}H{frame.right:.1f}"/>'
    for (k, cell), (x, y) in zip(cells.items(), points, strict=True):
        yield f"<g><title>{escape(law)}, K = {k}: {_details(cell)}</title>"
        low, high = (frame.y(value) for value in _interval(cell))
        yield f'<path class="whisker" d="M{x:.1f} {low:.1f}V{high:.1f}"/>'
        yield f'<path class="marker" transform="translate({x:.1f} {y:.1f})" d="{marker}"/></g>'


def _label(text: str, x: float, end: float, height: float, marker: str) -> str:
    leader = f'<path class="leader" d="M{x:.1f} {end:.1f}L{x + 18:.1f} {height:.1f}"/>'
    sign = f'<path class="marker" transform="translate({x + 25:.1f} {height:.1f})" d="{marker}"/>'
    return f'{leader}{sign}<text class="label" x="{x + 35:.1f}" y="{height + 4:.1f}">{escape(text)}</text>'


def _axes(frame: Frame) -> str:
    places = max(0, -math.floor(math.log10(frame.ticks[1] - frame.ticks[0]) + 1e-9))
    parts = []
    for tick in frame.ticks:
        y = frame.y(tick)
        parts.append(f'<path class="grid" d="M{frame.left} {y:.1f}H{frame.right:.1f}"/>')
        parts.append(
            f'<text class="muted" x="{frame.left - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:.{places}f}</text>'
        )
    for k in frame.ks:
        x, y = frame.x(k), frame.bottom + 18
        parts.append(f'<text class="muted" x="{x:.1f}" y="{y:.1f}" text-anchor="middle">K = {k}</text>')
    middle = (frame.top + frame.bottom) / 2
    turn = f'transform="translate(14 {middle:.1f}) rotate(-90)" text-anchor="middle"'
    return "\n".join([*parts, f'<text class="muted" {turn}>tokens a step</text>'])


def _interval(cell: Cell) -> tuple[float, float]:
    error = cell["error"] if _known(cell.get("error")) else 0.0
    return cell["tokens"] - error, cell["tokens"] + error


def _ticks(cells: Sequence[Cell]) -> list[float]:
    """Round numbers around all figures and their errors."""
    low, high = min(_interval(cell)[0] for cell in cells), max(_interval(cell)[1] for cell in cells)
    rough = max(high - low, 0.02) / 6
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [i * step for i in range(first, max(last, first + 1) + 1)]


def spread(wanted: Sequence[float], top: float, bottom: float) -> list[float]:
    """Heights for labels, around the wanted ones and in their order, at least LABEL_GAP apart."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    down = _stacked([wanted[i] for i in order], top, bottom)
    up = [-height for height in reversed(_stacked([-wanted[i] for i in reversed(order)], -bottom, -top))]
    middle = {i: (low + high) / 2 for i, low, high in zip(order, down, up, strict=True)}  # keeps the gap of both
    return [middle[i] for i in range(len(wanted))]


def _stacked(wanted: Sequence[float], least: float, most: float) -> list[float]:
    heights: list[float] = []
    for height in wanted:
        heights.append(max(height, least))
        least = heights[-1] + LABEL_GAP
    for i in reversed(range(len(heights))):  # what was pushed out at the end comes back
        heights[i] = min(heights[i], most)
        most = heights[i] - LABEL_GAP
    return heights


def _family_plot(groups: Sequence[Group], ks: Sequence[int]) -> str:
    names, panel, row = 16 + 7 * max(len(group.name) for group in groups), 140, 52
    longest = max(cell["tokens"] for group in groups for cells in group.rows.values() for cell in cells.values())
    parts = [f'<svg viewBox="0 0 {names + panel * len(ks)} {28 + row * len(groups)}" role="img">']
    for column, k in enumerate(ks):
        left = names + panel * column
        found = {group.name: _best_row(group, k) for group in groups}
        top = max((cell["tokens"] for _, cell in filter(None, found.values())), default=0.0)
        parts.append(f'<text class="muted" x="{left}" y="16">K = {k}</text>')
        for i, (name, best) in enumerate(found.items()):
            y = 32 + row * i
            parts.append(_family_bar(name, k, best, left, y, (panel - 16) / longest, top))
    for i, group in enumerate(groups):
        parts.append(f'<text x="0" y="{32 + row * i + 12}">{escape(group.name)}</text>')
    return "\n".join([*parts, "</svg>"])


def _best_row(group: Group, k: int) -> tuple[str, Cell] | None:
    found = [(law, cells[k]) for law, cells in group.rows.items() if k in cells]
    return max(found, key=lambda row: row[1]["tokens"]) if found else None


def _family_bar(name: str, k: int, best: tuple[str, Cell] | None, x: int, y: int, scale: float, top: float) -> str:
    if best is None:
        return f'<text class="muted" x="{x}" y="{y + 12}">{MISSING}</text>'
    law, cell = best
    weight = ' class="best"' if round(cell["tokens"], 2) == round(top, 2) else ""
    short = law if len(law) <= 14 else f"{law[:13]}…"  # the whole name is in the hover text
    nodes = (
        f'<text class="muted" x="{x}" y="{y + 38}">{cell["nodes"]:.1f} nodes</text>'
        if _known(cell.get("nodes"))
        else ""
    )
    return (
        f"<g><title>{escape(name)}, K = {k}, {escape(law)}: {_details(cell)}</title>"
        f'<text{weight} x="{x}" y="{y + 12}">{cell["tokens"]:.2f} {escape(short)}</text>'
        f'<rect class="bar" x="{x}" y="{y + 18}" width="{scale * cell["tokens"]:.1f}" height="8" rx="2"/>{nodes}</g>'
    )
