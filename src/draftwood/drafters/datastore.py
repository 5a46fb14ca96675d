"""A datastore: the tokens of a user's files and a suffix array over them, in files that are mapped, not read (REST).

A folder with `datastore.json` and one safetensors file a segment. New files are added as another segment; small ones
are merged, so that there are never many.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from draftwood.errors import CheckpointError, IncompatibleParts, InvalidRequest
from draftwood.model.files import read_object
from draftwood.model.tokenizer import Tokenizer
from draftwood.ops.suffix_array import SuffixArray, sorted_places

MANIFEST, KIND = "datastore.json", "draftwood datastore 1"
DEPTH = 32  # tokens that places are sorted by: a match and what follows it
SEGMENT = 1 << 24  # tokens of a segment; sorting one takes about 0.6 GB
MOST_SEGMENTS = 8  # before the smallest are merged
DOCUMENT = 100_000  # characters that are encoded at a time
BORDER = -1  # behind every document
AGAIN = "Build it again: draftwood datastore build FILES… --model MODEL --out FOLDER."

Report = Callable[[int, int], None]  # bytes done, and of how many


@dataclass(frozen=True)
class Manifest:
    """What a datastore says of itself."""

    fingerprint: str  # of the tokenizer
    vocab_size: int
    files: dict[str, str] = field(default_factory=dict)  # name: hash of the content
    segments: dict[str, int] = field(default_factory=dict)  # name: tokens

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Checked for its form."""
        found = read_object(folder / MANIFEST)
        if not found:
            raise InvalidRequest(f"There is no datastore in '{folder}'. {AGAIN}")
        files: Any = found.get("files")
        segments: Any = found.get("segments")
        right = found.get("kind") == KIND and isinstance(found.get("fingerprint"), str)
        right = (
            right and isinstance(found.get("vocab_size"), int) and _is_table(files, str) and _is_table(segments, int)
        )
        right = right and all(Path(name).name == name for name in segments or ())
        if not right:
            raise CheckpointError(f"{folder / MANIFEST} is not what this version writes. {AGAIN}")
        return cls(found["fingerprint"], found["vocab_size"], {**files}, {**segments})

    def write(self, folder: Path) -> None:
        """All of it or nothing."""
        part = folder / f"{MANIFEST}.part"
        part.write_text(json.dumps({"kind": KIND} | vars(self), indent=1), encoding="utf-8")
        os.replace(part, folder / MANIFEST)

    def require(self, tokenizer: Tokenizer) -> None:
        """Refuse another vocabulary."""
        if tokenizer.fingerprint != self.fingerprint:
            raise IncompatibleParts(f"The datastore was built for another vocabulary than the model's. {AGAIN}")


def _is_table(found: Any, kind: type) -> bool:
    return isinstance(found, dict) and all(isinstance(k, str) and isinstance(v, kind) for k, v in found.items())


class Datastore:
    """All segments, open."""

    def __init__(self, folder: Path) -> None:
        self.manifest = Manifest.read(folder)
        self.segments = [_open(folder / name) for name in self.manifest.segments]

    @property
    def tokens(self) -> int:
        """Of all segments, borders between documents included."""
        return sum(len(segment.tokens) for segment in self.segments)


def _open(path: Path) -> SuffixArray:
    try:
        with safe_open(path, framework="pt") as file:  # its tensors are mapped
            about = file.metadata() or {}
            tokens, order = (file.get_tensor(name).numpy() for name in ("tokens", "order"))
        if about.get("kind") != KIND or not tokens.dtype == order.dtype == np.int32 or tokens.ndim != 1:
            raise ValueError("it is of another kind")
        return SuffixArray(tokens, order, DEPTH)
    except (OSError, SafetensorError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}. {AGAIN}") from error


@dataclass(frozen=True)
class Built:
    """What came of building."""

    added: int  # files
    known: int  # files that were there already
    tokens: int  # of the whole datastore


def build(folder: Path, paths: Sequence[Path], tokenizer: Tokenizer, vocab_size: int, report: Report) -> Built:
    """Add files, and those in folders, to the datastore in `folder`; files that it has already are passed over.

    What is interrupted leaves the datastore as it was before or has some of the files; run it again to go on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    manifest = Manifest(tokenizer.fingerprint, vocab_size)
    if (folder / MANIFEST).exists():
        manifest = Manifest.read(folder)
        manifest.require(tokenizer)
    for stray in set(folder.glob("*.safetensors*")) - {folder / name for name in manifest.segments}:
        stray.unlink()  # of a run that was interrupted
    files = sorted({file for path in paths for file in _files(path)})
    contents = {str(file.resolve()): _hash(file) for file in files}
    new = [Path(name) for name, content in contents.items() if manifest.files.get(name) != content]
    size, done, batch, waiting = sum(file.stat().st_size for file in new), 0, array("i"), dict[str, str]()
    for number, file in enumerate(new, 1):
        for tokens in _documents(file, tokenizer):
            batch.extend([*tokens, BORDER])
            if len(batch) >= SEGMENT:  # one file alone
                manifest, batch = _added(folder, manifest, batch[:SEGMENT], {}), batch[SEGMENT:]
        waiting[str(file)] = contents[str(file)]
        if len(batch) >= SEGMENT // 2 or number == len(new):
            manifest, batch, waiting = _added(folder, manifest, batch, waiting), array("i"), {}
        done += file.stat().st_size
        report(done, size)
    return Built(len(new), len(files) - len(new), sum(manifest.segments.values()))


def _added(folder: Path, manifest: Manifest, tokens: array[int], files: dict[str, str]) -> Manifest:
    """With another segment; if there are too many then, the smallest that fit into one are merged."""
    segments = dict(manifest.segments)
    gone: list[str] = []
    parts = [np.asarray(tokens, dtype=np.int32)]
    if len(segments) >= MOST_SEGMENTS:
        for name, count in sorted(segments.items(), key=lambda item: item[1]):
            if sum(map(len, parts)) + count > SEGMENT:
                break
            parts.append(_open(folder / name).tokens)
            gone.append(name)
            del segments[name]
    whole = np.concatenate(parts)
    if len(whole):
        name = f"{uuid.uuid4().hex}.safetensors"
        save_file({"tokens": whole, "order": sorted_places(whole, DEPTH)}, folder / f"{name}.part", {"kind": KIND})
        os.replace(folder / f"{name}.part", folder / name)
        segments[name] = len(whole)
    made = Manifest(manifest.fingerprint, manifest.vocab_size, manifest.files | files, segments)
    made.write(folder)
    for name in gone:
        (folder / name).unlink()
    return made


def _files(path: Path) -> Iterator[Path]:
    if path.is_dir():
        yield from (file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
    elif path.is_file():
        yield path
    else:
        raise InvalidRequest(f"There is no file '{path}' to build a datastore from.")


def _hash(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _documents(file: Path, tokenizer: Tokenizer) -> Iterator[list[int]]:
    """The texts of a file as tokens: each line of JSON lines, or all of it; what is no text has none."""
    try:
        with file.open(encoding="utf-8") as lines:
            texts: Iterable[str] = (_said(line, file) for line in lines) if file.suffix == ".jsonl" else _parts(lines)
            for text in texts:
                if text:
                    yield tokenizer.encode(text, special=False)
    except UnicodeDecodeError:
        return


def _parts(lines: Iterable[str]) -> Iterator[str]:
    """A text in parts of whole lines, but no longer line than a part may be."""
    whole = iter(lines)
    while part := "".join(islice(whole, 1000)):
        yield from (part[start : start + DOCUMENT] for start in range(0, len(part), DOCUMENT))


def _said(line: str, file: Path) -> str:
    """All that an entry says."""
    if not line.strip():
        return ""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(
            f"A line of '{file}' is no JSON: {error}. Correct it, or give it another ending."
        ) from error
    return "\n".join(_strings(entry))


def _strings(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    elif isinstance(entry, list | dict):
        for part in entry.values() if isinstance(entry, dict) else entry:
            yield from _strings(part)
