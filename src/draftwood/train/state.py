"""A run on disk: all that the next step depends on, written whole or not at all, read back exactly or refused.

A checkpoint is a folder `step-…` with safetensors and JSON, and a manifest of digests of its files.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import os
import random
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from draftwood.errors import InvalidRequest

PREFIX = "step-"
WEIGHTS, REST, RECORD, MANIFEST = "module.safetensors", "rest.safetensors", "state.json", "manifest.json"
BEST, METRICS = "best.safetensors", "metrics.jsonl"
TENSOR, TUPLE, TABLE = "$tensor", "$tuple", "$table"


@dataclass(frozen=True)
class Snapshot:
    """All that the rest of a run follows from. `cursor` is where in the data it stands, `progress` the loop's own."""

    step: int
    module: Mapping[str, Tensor]
    optimizer: Any = None  # of tensors, numbers, strings, None, lists, tuples and dicts, as are the rest
    rng: Any = None
    cursor: Mapping[str, int] = field(default_factory=dict)
    best: float | None = None
    progress: Mapping[str, Any] = field(default_factory=dict)


def rng_state() -> dict[str, Any]:
    """The states of the global generators of Python and torch, on all devices."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"python": random.getstate(), "torch": torch.get_rng_state(), "cuda": cuda}


def restore_rng(state: Mapping[str, Any]) -> None:
    """Put the global generators back; those of GPUs only where there are as many as there were."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def pack(tree: Any, tensors: dict[str, Tensor]) -> Any:
    """The tree as JSON can hold it, with every tensor put into `tensors` and named in its place."""
    if isinstance(tree, Tensor):
        name = str(len(tensors))
        tensors[name] = _apart(tree)
        return {TENSOR: name}
    if isinstance(tree, Mapping):
        return {TABLE: [[pack(key, tensors), pack(value, tensors)] for key, value in tree.items()]}
    if isinstance(tree, tuple):
        return {TUPLE: [pack(value, tensors) for value in tree]}
    if isinstance(tree, list):
        return [pack(value, tensors) for value in tree]
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    raise InvalidRequest(f"A {type(tree).__name__} cannot be saved with a run; use tensors, numbers and strings.")


def unpack(packed: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `pack` was given."""
    if isinstance(packed, list):
        return [unpack(value, tensors) for value in packed]
    if not isinstance(packed, dict):
        return packed
    if TENSOR in packed:
        return tensors[packed[TENSOR]]
    if TUPLE in packed:
        return tuple(unpack(value, tensors) for value in packed[TUPLE])
    return {unpack(key, tensors): unpack(value, tensors) for key, value in packed[TABLE]}


def save(folder: Path, snapshot: Snapshot, keep: int = 2) -> Path:
    """Write a checkpoint and leave only the last `keep`; a crash at any point leaves the earlier ones untouched.

    Checkpoints of later steps, of a run that was gone back from, are removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for rubbish in folder.glob(f".{PREFIX}*.partial"):
        shutil.rmtree(rubbish)
    final = folder / f"{PREFIX}{snapshot.step:09d}"
    draft = folder / f".{final.name}.partial"
    draft.mkdir()
    try:
        _write(snapshot, draft)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)  # on a full disk its room is needed
        raise
    if final.exists():
        final.rename(folder / f".{final.name}.old.partial")
    draft.rename(final)
    _to_disk([folder])
    steps = checkpoints(folder)
    kept = [path for path in steps if path.name <= final.name][-keep:]
    for path in (*(path for path in steps if path not in kept), *folder.glob(f".{PREFIX}*.partial")):
        shutil.rmtree(path)
    return final


def _write(snapshot: Snapshot, folder: Path) -> None:
    """All files of a checkpoint, on disk."""
    save_file({name: _apart(tensor) for name, tensor in snapshot.module.items()}, folder / WEIGHTS)
    tensors: dict[str, Tensor] = {}
    parts = ("optimizer", "rng", "cursor", "best", "progress")
    record = {name: pack(getattr(snapshot, name), tensors) for name in parts}
    save_file(tensors, folder / REST)
    (folder / RECORD).write_text(json.dumps({"step": snapshot.step} | record))
    digests = {name: _digest(folder / name) for name in (WEIGHTS, REST, RECORD)}
    (folder / MANIFEST).write_text(json.dumps(digests))
    _to_disk([*folder.iterdir(), folder])


def write_text(path: Path, text: str) -> None:
    """Replace a file at once: on a full disk the old one stays."""
    draft = path.with_name(f".{path.name}.partial")
    try:
        draft.write_text(text)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first, whole or not."""
    return sorted(path for path in folder.glob(f"{PREFIX}*") if path.is_dir())


def load(path: Path) -> Snapshot:
    """Read a checkpoint, or refuse it with InvalidRequest if a single byte of it is not as it was written."""
    try:
        digests = json.loads((path / MANIFEST).read_text())
        wrong = [name for name in (WEIGHTS, REST, RECORD) if digests[name] != _digest(path / name)]
        if wrong:
            raise InvalidRequest(f"The checkpoint {path} is damaged: {', '.join(wrong)} is not as it was written.")
        record = json.loads((path / RECORD).read_text())
        tensors = load_file(path / REST)
        parts = {name: unpack(value, tensors) for name, value in record.items()}
        return Snapshot(module=load_file(path / WEIGHTS), **parts)
    except InvalidRequest:
        raise
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise InvalidRequest(f"The checkpoint {path} is damaged and cannot be read ({reason}).") from error


def load_latest(folder: Path, report: Callable[[str], None] = lambda line: None) -> Snapshot | None:
    """The newest whole checkpoint, or None if there is none at all; damaged ones are reported and passed over.

    If all are damaged it refuses, rather than let a long run begin again without a word.
    """
    paths = checkpoints(folder)
    for path in reversed(paths):
        try:
            return load(path)
        except InvalidRequest as error:
            report(f"{error} Going back to the one before it.")
    if paths:
        raise InvalidRequest(f"All checkpoints in {folder} are damaged. Remove the folder to begin the run again.")
    return None


def save_best(folder: Path, module: nn.Module, step: int, score: float) -> Path:
    """Keep the weights with the best score so far, in one file that is replaced at once."""
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f".{BEST}.partial"
    weights = {name: _apart(tensor) for name, tensor in module.state_dict().items()}
    try:
        save_file(weights, draft, metadata={"step": str(step), "score": repr(score)})
        _to_disk([draft])
        draft.replace(folder / BEST)
    finally:
        draft.unlink(missing_ok=True)
    return folder / BEST


def load_best(folder: Path, module: nn.Module) -> tuple[int, float]:
    """Put the best weights of a run into the module; their step and score."""
    path = folder / BEST
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata()
        weights = load_file(path)
        found = int(about["step"]), float(about["score"])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise InvalidRequest(f"There are no best weights that can be read at {path} ({error}).") from error
    load_module(module, weights)
    return found


def load_module(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Put weights into a module, which must have exactly these."""
    try:
        module.load_state_dict(weights)
    except RuntimeError as error:
        raise InvalidRequest(f"The saved weights are of another module. {error}") from None


class Journal:
    """metrics.jsonl, and TensorBoard's events where that is installed. Lines of steps not reached yet are dropped."""

    def __init__(self, folder: Path, step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / METRICS
        lines = path.read_text().splitlines() if path.exists() else []
        write_text(path, "".join(line + "\n" for line in lines if _step_of(line) <= step))
        self._file = path.open("a")
        self._events: Any = None
        if importlib.util.find_spec("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

            self._events = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add the numbers of a step, on disk at once."""
        self._file.write(json.dumps({"step": step} | dict(values)) + "\n")
        self._file.flush()
        for name, value in values.items() if self._events else ():
            self._events.add_scalar(name, value, step)

    def close(self) -> None:
        """Nothing can be added after this."""
        self._file.close()
        if self._events:
            self._events.close()


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf  # cut off in the middle


def _apart(tensor: Tensor) -> Tensor:
    """A copy in main memory that shares nothing with others (tied weights are saved twice)."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _to_disk(paths: Iterable[Path]) -> None:
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
