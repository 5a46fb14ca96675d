"""What is asked of the system."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from draftwood import machine
from draftwood.machine import reading_ahead


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "draftwood-reader"]


def test_all_of_every_file_is_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "BLOCK", 100)
    files = [tmp_path / name for name in ("a", "b", "empty")]
    for file, size in zip(files, (1000, 250, 0), strict=True):
        file.write_bytes(bytes(size))
    seen: list[tuple[str, int]] = []
    real = Path.open

    class Spy:
        def __init__(self, path: Path) -> None:
            self.path, self.file = path, real(path, "rb", buffering=0)

        def __enter__(self) -> Spy:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def seek(self, start: int) -> None:
            self.start = start
            self.file.seek(start)

        def readinto(self, block: bytearray) -> None:
            seen.extend((self.path.name, self.start + i) for i in range(self.file.readinto(block) or 0))

    monkeypatch.setattr(Path, "open", lambda path, *_, **__: Spy(path))
    with reading_ahead(files):
        for reader in readers():
            reader.join(10)
    assert sorted(seen) == [("a", i) for i in range(1000)] + [("b", i) for i in range(250)]


def test_reading_ahead_ends_with_the_block(tmp_path: Path) -> None:
    file = tmp_path / "large"
    with file.open("wb") as sparse:
        sparse.truncate(1 << 34)

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
