from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import openai
import pytest

from browser import browser
from draftwood import LLM
from serving import SMALL, Serving, serving
from tiny import tiny_folder

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=2048)


@pytest.fixture(scope="session")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, drafter="ngram:shortest=1", offers=["ngram:nodes=8,branches=2", "none"], config=SMALL) as made:
        yield made


@pytest.fixture(scope="session")
def served(llm: LLM) -> Iterator[Serving]:
    with serving(llm, "ngram:shortest=1", ("ngram:nodes=8,branches=2", "none")) as running:
        yield running


@pytest.fixture(scope="session")
def client(served: Serving) -> Iterator[openai.OpenAI]:
    with served.client() as made:
        yield made


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as running:
        yield running


@pytest.fixture(scope="module")
def blank(chromium: Browser, served: Serving) -> Iterator[Page]:
    """A page whose modules can be called."""
    page = chromium.new_page()
    page.goto(served.url)
    yield page
    page.close()
