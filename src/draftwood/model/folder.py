"""The safetensors of a model folder: which file holds which tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import CheckpointError
from ..machine import why_unwritable
from . import store
from .files import read_json

HUB_PATTERNS = ["*.safetensors", "*.json", "tokenizer.model", "*.jinja", "merges.txt"]
KINDS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}  # as blocks call them
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class StoredRows:
    """A matrix in a file: only the rows that are asked for are read, so that a large one never lies in memory twice."""

    shape: tuple[int, int]
    dtype: torch.dtype
    read: Callable[[slice], Tensor]

    def __getitem__(self, rows: slice) -> Tensor:
        return self.read(rows)


@runtime_checkable
class RowSource(Protocol):
    """A checkpoint that can read a matrix some rows at a time."""

    def rows(self, name: str) -> StoredRows | None:
        """The matrix of this Hugging Face name, None where it cannot."""
        ...


def stored_rows(found: Any, read: Callable[[slice], Tensor]) -> StoredRows | None:
    """For a slice of safetensors' own; None where it is no matrix of floats."""
    shape, dtype = tuple(found.get_shape()), _DTYPES.get(found.get_dtype())
    return None if dtype is None or len(shape) != 2 else StoredRows(shape, dtype, read)


def safetensors_offset(path: Path, name: str) -> int:
    """Where a tensor begins in its file, which was opened before: the header has been checked."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return 8 + size + json.loads(file.read(size))[name]["data_offsets"][0]


def tensor_files(folder: Path) -> dict[str, Path]:
    """Which file holds each tensor: by the index where there is one, else by looking into the files."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return _indexed_files(folder, index)
    files = store.folder_files(folder)
    if not files:
        raise _no_weights(folder)
    return {name: file for file in files for name in open_safetensors(file).keys()}  # noqa: SIM118


def _indexed_files(folder: Path, index: Path) -> dict[str, Path]:
    content = read_json(index)
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise CheckpointError(f"{index} has no weight_map of names. Download or convert the model again.")
    outside = sorted(file for file in set(names.values()) if Path(str(file)).name != file)
    if outside:
        raise CheckpointError(f"{index} points outside its folder, to {outside[0]}; it is not to be trusted.")
    missing = sorted(file for file in set(names.values()) if not (folder / file).is_file())
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of its {len(set(names.values()))} weight files: "
            f"{', '.join(missing[:4])}{' ...' if len(missing) > 4 else ''}. Download the model again."
        )
    return {name: folder / file for name, file in names.items()}


def _no_weights(folder: Path) -> CheckpointError:
    pickles = [file for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern)]
    if pickles:
        return CheckpointError(
            f"{folder} has its weights only as pickles ({pickles[0].name}), which can run any code when "
            "loaded, so they are not read. Convert them to safetensors: with transformers, "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)."
        )
    return CheckpointError(f"{folder} has a config.json but no *.safetensors file; download the weights too.")


def open_safetensors(path: Path) -> Any:
    """Open one file; it is checked against its header's promises when tensors are read."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged or truncated ({first_line(error)}). Download it again.") from error


def first_line(error: BaseException) -> str:
    """What an error says, or its name."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__).rstrip(" .")


def from_hub(name: str) -> Path:
    """The folder of a hub id, downloaded where it is not there yet."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    advice = "give the path of a local folder or .gguf file instead"
    try:
        return Path(snapshot_download(name, allow_patterns=HUB_PATTERNS))
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{name} is not in the local hub cache and the hub cannot be reached ({first_line(error)}). "
            f"Check the network, or {advice}."
        ) from error
    except (HfHubHTTPError, HFValidationError) as error:
        raise CheckpointError(
            f"The hub has no {name} for us: {first_line(error)}. Check the spelling; for a gated model, "
            f"accept its terms and run `hf auth login`; or {advice}."
        ) from error
    except OSError as error:
        reason = why_unwritable(error)
        if reason is not None:
            raise CheckpointError(
                f"{name} could not be stored: {reason}. Make room, or set HF_HOME to a folder with room that you can "
                f"write to, and run it again: files that are complete are kept. Or {advice}."
            ) from error
        raise CheckpointError(f"{name} could not be downloaded: {first_line(error)}; or {advice}.") from error


_WITHIN = (
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
)


def text_name(name: str) -> str:
    """The name of a text model's tensor without that of the model around it."""
    within = next((own for own in _WITHIN if name.startswith(own[0])), None)
    return name if within is None else within[1] + name.removeprefix(within[0])
