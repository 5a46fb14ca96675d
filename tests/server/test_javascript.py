"""JavaScript: OpenAI's client if npm can get it, plain `fetch` otherwise; skipped, with the reason, without Node."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from draftwood import LLM, SamplingParams
from serving import NAME, Serving

SCRIPT = Path(__file__).with_name("client.mjs")


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script beside what npm could install: modules are looked for where a script lies."""
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    folder = tmp_path_factory.mktemp("javascript")
    shutil.copy(SCRIPT, folder)
    if shutil.which("npm") is not None:
        command = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder), "openai@7"]
        try:
            subprocess.run(command, timeout=40, capture_output=True, check=False)
        except subprocess.TimeoutExpired:
            shutil.rmtree(folder / "node_modules", ignore_errors=True)
    return folder / SCRIPT.name


def test_a_javascript_client(script: Path, served: Serving, llm: LLM) -> None:
    command = ["node", str(script), served.url, NAME]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert told.returncode == 0, told.stderr
    got = json.loads(told.stdout)
    wanted = llm.chat([{"role": "user", "content": "the cat sat"}], SamplingParams(max_tokens=12)).text
    assert (got["whole"], got["streamed"], got["refused"]) == (wanted, wanted, 400), f"by {got['by']}"
