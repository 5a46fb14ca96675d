"""Text and JSON files of a model folder, read whole: their size is checked first, and they fail in one way only."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, DraftwoodError

MAX_JSON = 1 << 25  # bytes; an index of a large model's tensors has some ten million


def check_size(path: Path, limit: int, kind: type[DraftwoodError] = CheckpointError) -> None:
    """Refuse what is no file, or larger than `limit` bytes; nothing is read."""
    try:
        found = path.stat()
    except OSError as error:
        raise _unreadable(path, error, kind) from error
    if not stat.S_ISREG(found.st_mode):
        raise kind(f"{path} is no regular file, so it is not read. Download the model again.")
    if found.st_size > limit:
        raise kind(f"{path} has more than {limit:,} bytes, so it is not read. Download the model again.")


def read_text(path: Path, limit: int, kind: type[DraftwoodError] = CheckpointError) -> str:
    """The file's text, or an error of this kind."""
    check_size(path, limit, kind)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise _unreadable(path, error, kind) from error


def read_json(path: Path, limit: int = MAX_JSON) -> Any:
    """What a JSON file holds."""
    text = read_text(path, limit)
    try:
        return json.loads(text)
    except (ValueError, RecursionError, MemoryError) as error:
        raise _unreadable(path, error, CheckpointError) from error


def read_object(path: Path, limit: int = MAX_JSON) -> dict[str, Any]:
    """The table in a JSON file, or an empty one if there is no file."""
    if not path.exists():
        return {}
    content = read_json(path, limit)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} should hold one JSON object. Download or convert the model again.")
    return content


def _unreadable(path: Path, error: BaseException, kind: type[DraftwoodError]) -> DraftwoodError:
    return kind(f"{path} cannot be read: {error}. Download or convert the model again.")
