"""A drafter in PARD's layout: an ordinary language model whose config names a mask."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftwood import LLM, EngineConfig, SamplingParams
from draftwood.drafters.pard import ParallelDrafter
from draftwood.errors import IncompatibleParts
from tiny import tiny_folder

CONFIG = EngineConfig(device="cpu", dtype="float64", cache_tokens=2048, controller="fixed")


def marked(folder: Path, mask: object) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "spd_type": "pard", "pard_token": mask}))
    return folder


def test_it_guesses_and_changes_nothing(tmp_path: Path) -> None:
    target, draft = tiny_folder(tmp_path / "target"), marked(tiny_folder(tmp_path / "draft"), 7)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    with LLM(target, config=CONFIG) as plain, LLM(target, drafter=str(draft), config=CONFIG) as llm:
        assert isinstance(llm.engine.drafter, ParallelDrafter)
        got, want = llm.generate(["abc", "the cat"], params), plain.generate(["abc", "the cat"], params)
    assert [result.token_ids for result in got] == [result.token_ids for result in want]
    assert all(result.stats.drafted for result in got)


@pytest.mark.parametrize("mask", [None, -1, 10**6, "x"])
def test_a_mask_that_is_none_is_refused(tmp_path: Path, mask: object) -> None:
    target, draft = tiny_folder(tmp_path / "target"), marked(tiny_folder(tmp_path / "draft"), mask)
    with pytest.raises(IncompatibleParts, match="names no mask"):
        LLM(target, drafter=str(draft), config=CONFIG)
