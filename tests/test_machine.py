"""What is asked of the system."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from draftwood import machine
from draftwood.machine import reading_ahead
from draftwood.model.store import local_files


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "draftwood-reader"]


def test_all_of_every_file_is_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "BLOCK", 100)
    files = [tmp_path / name for name in ("a", "b", "empty")]
    for file, size in zip(files, (1000, 250, 0), strict=True):
        file.write_bytes(bytes(size))
    seen: list[tuple[str, int]] = []
    real = machine._have_read

    def spy(path: Path, start: int, block: bytearray) -> None:
        seen.append((path.name, start))
        real(path, start, block)

    monkeypatch.setattr(machine, "_have_read", spy)
    with reading_ahead(files):
        with reading_ahead(files[:1]):
            pass  # it is being read already
        for reader in readers():
            reader.join(10)
    assert sorted(seen) == [("a", start) for start in range(0, 1000, 100)] + [("b", 0), ("b", 100), ("b", 200)]
    assert not machine._being_read


def test_a_piece_is_read_unless_it_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, block = tmp_path / "file", bytearray(4)
    file.write_bytes(b"abcdefgh")
    monkeypatch.setattr(machine, "_is_in_memory", lambda *_: False)
    machine._have_read(file, 2, block)
    assert block == b"cdef"
    monkeypatch.setattr(machine, "_is_in_memory", lambda *_: True)
    machine._have_read(file, 4, block)
    assert block == b"cdef"


def test_files_that_are_not_there_are_left_to_others(tmp_path: Path) -> None:
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    with reading_ahead([tmp_path / "absent", tmp_path / "broken", tmp_path]):
        assert not readers()


def test_more_than_there_is_memory_for_is_not_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(1000))
    monkeypatch.setattr(machine, "free_memory", lambda: 1999)
    with reading_ahead([file]):
        assert not readers()


def test_memory_is_counted_where_the_system_tells() -> None:
    assert machine.free_memory() > 1 << 20


def test_reading_ahead_ends_with_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "large"
    with file.open("wb") as sparse:
        sparse.truncate(1 << 34)
    monkeypatch.setattr(machine, "free_memory", lambda: 1 << 40)
    monkeypatch.setattr(machine, "_have_read", lambda *_: time.sleep(0.1))  # a very slow disk

    def fail_meanwhile() -> None:
        with reading_ahead([file]):
            assert readers()
            raise KeyError

    with pytest.raises(KeyError):
        fail_meanwhile()
    assert not readers()


def test_a_file_that_goes_away_is_no_reason_to_fail(tmp_path: Path) -> None:
    file = tmp_path / "short-lived"
    file.write_bytes(bytes(10))
    with reading_ahead([file]):
        file.unlink(missing_ok=True)


def test_weights_are_found_without_torch(tmp_path: Path) -> None:
    for name in ("b.safetensors", "a.safetensors", "config.json"):
        (tmp_path / name).touch()
    assert local_files(str(tmp_path)) == [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    (tmp_path / "model.safetensors").touch()
    assert local_files(str(tmp_path)) == [tmp_path / "model.safetensors"], "others beside it are not its weights"
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        (tmp_path / name).touch()
    assert [file.name for file in local_files(str(tmp_path))] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert local_files(str(tmp_path / "config.json")) == [tmp_path / "config.json"]
    assert local_files("smollm2") == local_files("org/name") == []
