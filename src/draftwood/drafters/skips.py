"""Which layers a model's drafts leave out, as `draftwood search-skip` has found: kept beside the model, or in our own
folder where nothing can be written there.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from draftwood.errors import IncompatibleParts
from draftwood.machine import home, why_unwritable
from draftwood.model.checkpoint import Checkpoint, files_of

log = logging.getLogger(__name__)
NAME = "draftwood-skip.json"


@dataclass(frozen=True)
class SkipSet:
    """Layers that drafts leave out, and what came of that."""

    skipped: tuple[int, ...]
    depth: int  # tokens of a chain of drafts
    ratio: float  # expected tokens a second, over plain decoding's
    acceptance: float  # of a drafted token
    policy: str
    weights: str = "stored"
    attention: tuple[int, ...] = ()  # layers of which that alone is left out
    mlp: tuple[int, ...] = ()

    @property
    def sets(self) -> tuple[tuple[int, ...], ...]:
        """Layers left out, those without attention, and those without MLP."""
        return self.skipped, self.attention, self.mlp


def find_skips(checkpoint: Checkpoint) -> SkipSet | None:
    """What was found for a model, if anything; a file that is of another model is passed over."""
    for path in _places(checkpoint):
        found = _read(path, checkpoint)
        if found is not None:
            return found
    return None


def require_skips(checkpoint: Checkpoint) -> SkipSet:
    """The same, or what to do."""
    found = find_skips(checkpoint)
    if found is None:
        raise IncompatibleParts(
            f"It is not known which layers of '{checkpoint.name}' drafts can leave out: run `draftwood search-skip "
            f"{checkpoint.name}` once, or name them, as in layer-skip:skip=10x11x12."
        )
    if found.ratio <= 1:
        log.warning(
            "The best layers to leave out of '%s' were expected to decode at %.2f times the plain speed.",
            checkpoint.name, found.ratio,
        )  # fmt: skip
    return found


def save_skips(found: SkipSet, checkpoint: Checkpoint) -> Path:
    """Write it down, in one step, in the first place that can be written to."""
    text = json.dumps(asdict(found) | {"model": _fingerprint(checkpoint)}, indent=1)
    *others, last = _places(checkpoint)
    for path in others:
        try:
            return _write(path, text)
        except OSError as error:
            if why_unwritable(error) is None:
                raise
    return _write(last, text)


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
    return path


def _places(checkpoint: Checkpoint) -> Iterator[Path]:
    """Beside a file under its name, in a folder under ours, and last in our own folder."""
    files = files_of(checkpoint)
    if files:
        first = Path(files[0])
        yield first.with_name(f"{first.name}.{NAME}") if first.suffix == ".gguf" else first.parent / NAME
    yield home() / "skips" / f"{_fingerprint(checkpoint)}.json"


def _fingerprint(checkpoint: Checkpoint) -> str:
    """Of what the model looks like and is called: weights are not read."""
    facts = {"config": asdict(checkpoint.config), "name": Path(checkpoint.name).name}
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _read(path: Path, checkpoint: Checkpoint) -> SkipSet | None:
    try:
        raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        sets = [tuple(int(layer) for layer in raw[name]) for name in ("skipped", "attention", "mlp")]
        count = checkpoint.config.num_layers
        if raw["model"] != _fingerprint(checkpoint) or not all(_possible(own, count) for own in sets):
            return None
        numbers = int(raw["depth"]), float(raw["ratio"]), float(raw["acceptance"])
        return SkipSet(sets[0], *numbers, str(raw["policy"]), str(raw["weights"]), *sets[1:])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _possible(skipped: tuple[int, ...], layers: int) -> bool:
    return list(skipped) == sorted(set(skipped)) and all(0 <= i < layers for i in skipped) and len(skipped) < layers
