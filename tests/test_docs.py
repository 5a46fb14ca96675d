"""What the documents name exists: files, headings, modules, commands and their options."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer.main

from draftwood.cli.app import app

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
AS_WRITTEN = ("docs/adr/0*.md", "docs/notes/*.md", "docs/lossless.md")  # their prose was left alone
REWRITTEN = [page for page in PAGES if not any(page.match(pattern) for pattern in AS_WRITTEN)]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def headings(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), f"{page.name} links to {link}"
        assert not anchor or anchor in headings(target), f"{page.name} links to {link}, a heading that is not there"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_exist_with_their_options(page: Path) -> None:
    group: Any = typer.main.get_command(app)
    for block in FENCE.findall(page.read_text()):
        for line in block.replace("\\\n", " ").splitlines():
            words = line.split("#")[0].split()
            if len(words) < 2 or not words[0].endswith("draftwood"):
                continue
            command = group
            while words[1:] and words[1] in getattr(command, "commands", {}):
                command = command.commands[words.pop(1)]
            assert command is not group, line
            known = {option for part in command.params for option in (*part.opts, *part.secondary_opts)}
            given = {word for word in words[1:] if re.fullmatch(r"--?[a-z][\w-]*", word)}
            assert given <= known, f"{page.name}: {line}"


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_files_that_are_named_exist(page: str) -> None:
    folders = [ROOT, *(ROOT / "src/draftwood").rglob(""), *(ROOT / "tests").rglob("")]
    for name in re.findall(r"`([\w/]+\.(?:py|c|h))`", (ROOT / page).read_text()):
        assert any((folder / name).is_file() for folder in folders), f"{page} names {name}"


@pytest.mark.parametrize("page", REWRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_prose_names_its_actors(page: Path) -> None:
    """Plain technical English: a subject that can be looked up."""
    text = re.sub(r"`[^`]*`", "", FENCE.sub("", page.read_text()))
    assert re.findall(r"\b(?:nobody|somebody|everybody|whoever)\b", text, re.IGNORECASE) == []
