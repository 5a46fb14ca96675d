"""GGUF files in parts: any part stands for the whole, and parts that do not belong together are refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from draftwood.errors import CheckpointError
from draftwood.model.checkpoint import files_of, open_checkpoint
from draftwood.model.gguf import read_gguf
from draftwood.model.gguf_split import part_paths

from .test_blocks import MIXTURES, write_model


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    write_model(tmp_path / "m.gguf", MIXTURES["Q4_K_M"], parts=9)
    return sorted(tmp_path.glob("m-*.gguf"))


def test_any_part_opens_the_whole(parts: list[Path], tmp_path: Path) -> None:
    assert [path.name for path in parts] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    whole = open_checkpoint(write_model(tmp_path / "whole.gguf", MIXTURES["Q4_K_M"]))
    for path in parts:
        checkpoint = open_checkpoint(path)
        assert list(files_of(checkpoint)) == parts
        assert checkpoint.config == whole.config
        for name in ("model.embed_tokens.weight", "model.norm.weight", "model.layers.1.mlp.down_proj.weight"):
            assert torch.equal(checkpoint.tensor(name), whole.tensor(name))
        checkpoint.forget()
        assert torch.equal(checkpoint.tensor("lm_head.weight"), whole.tensor("lm_head.weight"))


def test_a_part_that_is_not_there_is_named(parts: list[Path]) -> None:
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=r"one of 3 parts.*m-00002-of-00003\.gguf\. Download"):
        open_checkpoint(parts[0])


def test_a_renamed_part_says_what_to_do(parts: list[Path], tmp_path: Path) -> None:
    shutil.copy(parts[0], tmp_path / "renamed.gguf")
    with pytest.raises(CheckpointError, match=r"one of 3 parts, and its name does not say which"):
        open_checkpoint(tmp_path / "renamed.gguf")


def test_parts_of_two_models_are_refused(parts: list[Path]) -> None:
    shutil.copy(parts[2], parts[1])
    with pytest.raises(CheckpointError, match=r"00002-of-00003\.gguf is by its own account not part 2 of 3"):
        open_checkpoint(parts[0])


def test_a_part_that_was_cut_is_refused(parts: list[Path]) -> None:
    parts[2].write_bytes(parts[2].read_bytes()[:-64])
    with pytest.raises(CheckpointError, match="truncated"):
        open_checkpoint(parts[0])


@pytest.mark.parametrize("name", ["m-00004-of-00003.gguf", "m-00000-of-00003.gguf", "m-00001-of-00000.gguf"])
def test_names_of_parts_that_cannot_be_are_refused(parts: list[Path], name: str) -> None:
    path = shutil.copy(parts[0], parts[0].with_name(name))
    with pytest.raises(CheckpointError, match="there is no such part"):
        open_checkpoint(path)


def test_a_name_that_only_looks_like_a_part_is_read_for_what_it_is(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m-00001-of-00001.gguf", MIXTURES["F16"])
    assert part_paths(path) == [path]
    assert open_checkpoint(path).tensor("model.norm.weight").numel() == 256
    assert read_gguf(path).path == path
