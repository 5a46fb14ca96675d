"""Where compiled kernels are kept. Code is loaded from there, so only this user may be able to write to it.

The folder and the file must be the user's own, no links, and not writable by others. A file's name ends in the digest
of its content, so that one that was cut off or damaged is compiled again.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from pathlib import Path

from draftwood.errors import DraftwoodError
from draftwood.machine import advise_home, home

_DIGITS = 16
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class BuildError(DraftwoodError):
    """The kernels could not be compiled here."""


def private_folder() -> Path:
    """A folder that only this user can write to; if `native` belongs to another user, one with the user's number."""
    above = home()
    own = above / "native", above / f"native-{_user()}"
    try:
        above.mkdir(parents=True, exist_ok=True)
        _check_above(above)
        for folder in own:
            if _made_private(folder):
                return folder
    except OSError as error:
        raise BuildError(advise_home(error)) from error
    raise BuildError(
        f"{own[0]} and {own[1]} belong to other users or are links, so no code is loaded from there. Set "
        "DRAFTWOOD_HOME to a folder of your own"
    )


def find(folder: Path, key: str) -> Path | None:
    """The library kept under this key, if it is whole and no other user can have written it; others are removed."""
    for path in sorted(folder.glob(f"kernels-{key}-*.so")):
        if _is_own_file(path) and path.stem.rpartition("-")[2] == _digest(path):
            return path
        path.unlink(missing_ok=True)
    return None


def keep(library: Path, folder: Path, key: str) -> Path:
    """Move a library, just compiled, to its place in one step: another process may be doing the same."""
    library.chmod(0o700)
    return library.replace(folder / f"kernels-{key}-{_digest(library)}.so")


def _user() -> int:
    return os.geteuid() if hasattr(os, "geteuid") else 0


def _check_above(folder: Path) -> None:
    """Who can rename folders here could put another in the place of ours; a sticky folder such as /tmp forbids that."""
    mode = folder.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise BuildError(
            f"{folder} can be written to by every user, so no code is loaded from there. Run `chmod o-w` on it, or set "
            "DRAFTWOOD_HOME to a folder of your own"
        )


def _made_private(folder: Path) -> bool:
    """Whether the folder is ours alone now. What others could have put into it is removed."""
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or not _is_own(found):
        return False
    if found.st_mode & _OTHERS_WRITE:
        folder.chmod(0o700)
        for entry in folder.iterdir():
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    return True


def _is_own_file(path: Path) -> bool:
    found = path.lstat()
    return stat.S_ISREG(found.st_mode) and _is_own(found) and not found.st_mode & _OTHERS_WRITE


def _is_own(found: os.stat_result) -> bool:
    return not hasattr(os, "geteuid") or found.st_uid == os.geteuid()


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:_DIGITS]
