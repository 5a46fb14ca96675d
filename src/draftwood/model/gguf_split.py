"""GGUF files in parts: NAME-00001-of-00003.gguf and its siblings are read as one file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .gguf import GgufFile, GgufTensor, read_gguf

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def part_paths(path: Path) -> list[Path]:
    """All parts of the model that this file is one of, in order; itself alone if its name says nothing of parts."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    paths = [path.with_name(f"{match['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    if path not in paths:
        raise CheckpointError(f"{path} calls itself part {int(match['number'])} of {count}: there is no such part.")
    return paths


def read_whole_gguf(path: Path) -> GgufFile:
    """The file, and the parts it belongs to where it is one of several."""
    paths = part_paths(path)
    missing = [part.name for part in paths if not part.is_file()]
    if missing and path.is_file():
        raise CheckpointError(
            f"{path} is one of {len(paths)} parts, and {len(missing)} of them are not beside it: "
            f"{', '.join(missing[:4])}{' ...' if len(missing) > 4 else ''}. Download them into the same folder."
        )
    files = [read_gguf(part) for part in paths] if not missing else [read_gguf(path)]
    _check_counts(path, files)
    if len(files) == 1:
        return files[0]
    buffers = tuple(buffer for file in files for buffer in file.mapped)
    return GgufFile(paths[0], files[0].fields, _merged(path, files), buffers)


def _check_counts(path: Path, files: Sequence[GgufFile]) -> None:
    for number, file in enumerate(files):
        count = _whole(file, "split.count", 1)
        if len(files) == 1 and count > 1:
            raise CheckpointError(
                f"{path} is one of {count} parts, and its name does not say which: give the parts "
                "their own names again (NAME-00001-of-00003.gguf), or join the parts (llama-gguf-split --merge)."
            )
        if len(files) > 1 and (count != len(files) or _whole(file, "split.no", number) != number):
            raise CheckpointError(
                f"{file.path} is by its own account not part {number + 1} of {len(files)}: the parts do not belong "
                "together. Download the model again."
            )


def _whole(file: GgufFile, key: str, default: int) -> int:
    value: Any = file.fields.get(key, default)
    if not isinstance(value, int):
        raise CheckpointError(f"{file.path} states {key} as {value!r}. Download or convert the model again.")
    return max(value, default)


def _merged(path: Path, files: Sequence[GgufFile]) -> dict[str, GgufTensor]:
    tensors: dict[str, GgufTensor] = {}
    for file in files:
        twice = tensors.keys() & file.tensors.keys()
        if twice:
            raise CheckpointError(f"{file.path} repeats {min(twice)} of another part. Download the model again.")
        tensors |= file.tensors
    expected = files[0].fields.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise CheckpointError(
            f"The parts of {path} have {len(tensors)} tensors together and should have {expected}. "
            "Download the model again."
        )
    return tensors
