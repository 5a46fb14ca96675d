"""The page's files: served out of the package, nothing beside them, and behind the same door as everything else."""

from __future__ import annotations

import base64
import re
import socket
from pathlib import Path

import pytest

import draftwood
from draftwood import LLM
from draftwood.server.files import FOLDER, KINDS
from serving import NAME, Serving, serving


@pytest.fixture(scope="module")
def guarded(llm: LLM):
    with serving(llm, api_keys=("first", "sec:ond")) as running:
        yield running


def basic(text: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(text.encode()).decode()}


def test_the_page_and_its_files(served: Serving) -> None:
    with served.http() as http:
        page = http.get("/")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert page.content == (FOLDER / "index.html").read_bytes() == http.get("/page/index.html").content
        for path in (path for path in FOLDER.rglob("*") if path.is_file()):
            served_file = http.get(f"/page/{path.relative_to(FOLDER).as_posix()}")
            assert served_file.status_code == 200, f"{path.name}: a kind that nobody serves"
            assert served_file.headers["content-type"] == KINDS[path.suffix]
            assert served_file.content == path.read_bytes()


def test_browsers_are_told_what_to_trust_and_to_ask_again(served: Serving) -> None:
    with served.http() as http:
        page = http.get("/")
        policy = page.headers["content-security-policy"]
        assert policy.startswith("default-src 'self'; img-src 'self' data:")
        assert "unsafe" not in policy
        assert page.headers["x-content-type-options"] == "nosniff"
        assert page.headers["cache-control"] == "no-cache"
        same = http.get("/", headers={"If-None-Match": page.headers["etag"]})
        assert (same.status_code, same.content) == (304, b"")
        assert http.get("/", headers={"If-None-Match": '"other"'}).status_code == 200


ESCAPES = [
    "/page/../app.py",
    "/page/..%2Fapp.py",
    "/page/..%2f..%2f..%2f..%2fpyproject.toml",
    "/page/%2e%2e/app.py",
    "/page/..%5capp.py",
    "/page//etc/passwd",
    "/page/%2Fetc%2Fpasswd",
    "/page/index.html%00",
    "/page/index.html/",
    "/page/.",
    "/page/",
    "/page/nothing.js",
    "/page/__init__.py",
]


@pytest.mark.parametrize("path", ESCAPES)
def test_nothing_else_is_there(served: Serving, path: str) -> None:
    """Spoken by hand: a client would tidy the path up."""
    address = ("127.0.0.1", int(served.url.rsplit(":", 1)[1]))
    with socket.create_connection(address) as line:
        line.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: line.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 404")
    assert b'"code":"unknown_url"' in answer


def test_a_browser_is_asked_for_the_key_and_then_sends_it_everywhere(guarded: Serving) -> None:
    with guarded.http() as http:
        for path in ("/", "/page/index.html", "/page/nothing"):
            refused = http.get(path)
            assert refused.status_code == 401
            assert refused.headers["www-authenticate"] == 'Basic realm="draftwood"'
        assert http.get("/v1/models").headers["www-authenticate"] == "Bearer"
        for right in ("anybody:first", ":sec:ond", "é:first"):
            assert http.get("/", headers=basic(right)).status_code == 200
            assert http.get("/v1/models", headers=basic(right)).json()["data"][0]["id"] == NAME
            assert http.get("/live?count=1", headers=basic(right)).status_code == 200
        for text in ("first:", "first", "a:firs", "a:", ":", "a:ond", "a:b:first"):
            assert http.get("/", headers=basic(text)).status_code == 401, text
        right = basic("anybody:first")["Authorization"]
        wrongs = ("Basic", "Basic !!!", "Basic AAAAA", right.replace("Basic", "Bearer"), "Digest first", right + "AAAA")
        for wrong in wrongs:
            assert http.get("/", headers={"Authorization": wrong}).status_code == 401, wrong


def test_files_are_part_of_the_package() -> None:
    """The wheel takes whatever lies in the package's folder and is not ignored by git."""
    source = Path(draftwood.__file__).parent
    assert FOLDER.is_relative_to(source)
    root = source.parents[1]
    settings = (root / "pyproject.toml").read_text()
    assert 'packages = ["src/draftwood"]' in settings
    assert not re.search(r"^\s*(exclude|only-include)\b", settings, re.MULTILINE)
    ignored = (root / ".gitignore").read_text().split()
    assert not [line for line in ignored if line.endswith(tuple(KINDS)) or line.rstrip("/").endswith("page")]
