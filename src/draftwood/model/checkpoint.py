"""Weights by their Hugging Face names, whatever file they lie in.

A checkpoint is opened by an alias, a folder, a `.gguf` file or a hub id. Tensors are read one at a time and
checked against the configuration, so that a damaged or mismatched file is refused here, with the reason, and
not in a forward. Pickles are never read: loading one runs its code.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor

from ..errors import CheckpointError
from ..machine import why_unwritable
from . import store
from .blocks import NUMBERS, Blocks, warn_of_expanded
from .config import ModelConfig
from .families import FAMILIES, Place
from .families.base import Change
from .files import read_object
from .folder import StoredRows, first_line, open_safetensors, stored_rows, tensor_files, text_name
from .gguf import GgufTensor, embedding_rows, read_groups
from .gguf_split import part_paths, read_whole_gguf
from .lora_folder import described, is_adapter
from .names import expected_shape
from .quantised import Scaled, read_scaled, scheme_of, stored_under
from .rope import refusing_malformed
from .universal_folder import UniversalCheckpoint
from .weights import Matrix

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

HUB_PATTERNS = ["*.safetensors", "*.json", "tokenizer.model", "*.jinja", "merges.txt"]
MAX_CONFIG = 1 << 22  # bytes of a config.json
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}


class Checkpoint(Protocol):
    """What a model is built from."""

    name: str

    @property
    def config(self) -> ModelConfig:
        """What the model looks like."""
        ...

    def has(self, name: str) -> bool:
        """Whether the tensor of this Hugging Face name is there."""
        ...

    def tensor(self, name: str) -> Tensor:
        """Read one tensor: in its stored float type, or float32 if it was quantised."""
        ...

    def matrix(self, name: str) -> Matrix:
        """Read one matrix: as `tensor`, or in groups of whole numbers if it is stored so."""
        ...

    def forget(self) -> None:
        """Keep nothing in memory of what was read so far."""
        ...

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that came with the weights."""
        ...


def files_of(checkpoint: Checkpoint) -> Sequence[Path]:
    """Where its tensors lie, if that is in files."""
    return getattr(checkpoint, "files", ())


def open_checkpoint(name: str | Path, impl: str = "auto") -> Checkpoint:
    """Open an alias ("smollm2"), a folder with safetensors, a `.gguf` file, or a hub id ("org/name").

    `impl` is what will compute it: "own", "transformers", or "auto", which is our decoder where it knows the family.
    """
    path = Path(name).expanduser()
    if str(name) in store.EMBEDDED and not path.is_dir():
        return _open_file(store.fetch(str(name)), impl, str(name))
    if path.is_dir():
        return _open_folder(path, None, impl)
    if path.is_file():
        return _open_file(path, impl)
    if isinstance(name, str) and path.suffix != ".gguf" and HUB_ID.fullmatch(name) and name[0] not in "./":
        return _open_folder(_from_hub(name), name, impl)
    raise CheckpointError(
        f"There is no model {str(name)!r} here. Give an alias ({', '.join(store.EMBEDDED)}), a folder with "
        "config.json and *.safetensors, a .gguf file, or a Hugging Face id such as org/name."
    )


def _open_folder(folder: Path, name: str | None, impl: str) -> Checkpoint:
    if is_adapter(folder):
        raise CheckpointError(described(folder))
    stated = _read_config(folder)
    if impl == "transformers" or (impl == "auto" and _is_foreign(stated.get("model_type"))):
        return UniversalCheckpoint(folder, stated, name)
    return SafetensorsCheckpoint(folder, name)


def _is_foreign(model_type: object) -> bool:
    """Whether our decoder does not know it, and another might."""
    return isinstance(model_type, str) and model_type not in FAMILIES


def _open_file(path: Path, impl: str, name: str | None = None) -> Checkpoint:
    if impl == "transformers":
        raise CheckpointError(f"transformers' modules run folders with config.json and *.safetensors, not {path}.")
    if path.suffix == ".gguf":
        return GgufCheckpoint(path, name)
    if path.suffix == ".safetensors":
        raise CheckpointError(f"{path} is only the weights; give the folder it lies in, with its config.json.")
    raise CheckpointError(f"{path} is no model file we can read; give a .gguf file or a safetensors folder.")


def _from_hub(name: str) -> Path:
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


def _family_reads_it(stated: Mapping[str, Any]) -> bool:
    """Whether a family knows its own quantised tensors, as gpt-oss does."""
    family, quantised = FAMILIES.get(str(stated.get("model_type"))), stated.get("quantization_config")
    known = None if family is None else family.reads_quantised
    return known is not None and isinstance(quantised, Mapping) and quantised.get("quant_method") == known


class SafetensorsCheckpoint:
    """A Hugging Face folder: config.json, and one or several safetensors files."""

    def __init__(self, folder: Path, name: str | None = None) -> None:
        from .tokenizer import folder_eos_ids

        self.name = name or str(folder)
        self._folder = folder
        stated = _read_config(folder)
        self._scheme = None if _family_reads_it(stated) else scheme_of(stated, self.name)
        plain = {key: value for key, value in stated.items() if key != "quantization_config"}
        config = ModelConfig.from_hf(stated if self._scheme is None else plain)
        self.config = dataclasses.replace(config, eos_token_ids=folder_eos_ids(folder))
        self._family = FAMILIES[config.family]
        found = tensor_files(folder)
        known_as = text_name if self._family.within else str  # in files of models that see images
        self._names = {known_as(name): name for name in found}
        self._files = {known_as(name): path for name, path in found.items()}
        self._opened: dict[Path, Any] = {}
        self._tokenizer: Tokenizer | None = None
        if not self.config.tied_head and not self.has("lm_head.weight"):
            raise _missing("lm_head.weight", self.name)

    @property
    def folder(self) -> Path:
        """Where it lies."""
        return self._folder

    @property
    def files(self) -> list[Path]:
        """All that hold tensors, in the order of their names."""
        return sorted(set(self._files.values()))

    def has(self, name: str) -> bool:
        """Whether the tensor is there; a tied model's copy of its head is not counted."""
        there = self._place(name) is not None or self._quantised_name(name) is not None
        return there and not (name == "lm_head.weight" and self.config.tied_head)

    def tensor(self, name: str) -> Tensor:
        """Read one tensor of ours, and nothing else of its files."""
        if not self.has(name):
            raise _missing(name, self.name)
        scaled = self._scaled(name)
        value = self._plain(name) if scaled is None else scaled.numbers()
        if value.dtype not in _FLOATS:
            raise CheckpointError(
                f"{name} in {self.name} is stored as {value.dtype}, a quantised form that is not supported; "
                "use the original checkpoint, or a GGUF file."
            )
        return _checked(name, value, self.config)

    def _place(self, name: str) -> Place | None:
        """Where a tensor of ours lies, None if it is not there."""
        places = self._family.places(name, self.config)
        return next((place for place in places if all(theirs in self._files for theirs in place.names)), None)

    def _plain(self, name: str) -> Tensor:
        """A tensor of ours that is not quantised."""
        place = self._place(name)
        if place is None:
            raise _missing(name, self.name)
        stored = self._stored(place)
        with refusing_malformed(f"its tensor {place.names[0]}"):
            return stored[0] if place.change is None else place.change(self.config, *stored)

    def _stored(self, place: Place) -> list[Tensor]:
        with refusing_malformed(f"its tensor {place.names[0]}"):
            return [self._read(theirs, place.entry) for theirs in place.names]

    def _quantised_name(self, name: str) -> str | None:
        """What the file calls a quantised matrix of ours; None if there is none, or if it is a part of one there."""
        if self._scheme is None:
            return None
        whole = [own.names[0] for own in self._family.places(name, self.config) if own.is_whole]
        return next((own for own in whole if any(other in self._files for other in (own, *stored_under(own)))), None)

    def matrix(self, name: str) -> Matrix:
        """The tensor: these files hold no groups of ours."""
        return self.tensor(name)

    def blocks(self, name: str) -> Blocks | None:
        """A quantised or float16 matrix for our kernels, None where it is neither or does not fit into blocks."""
        scaled, place = self._scaled(name), self._place(name)
        if scaled is not None:
            return scaled.blocks()
        if place is not None and place.blocks is not None:
            found = place.blocks(self.config, *self._stored(place))
            _check_shape(name, found.shape, self.config)
            return found
        rows = self.rows(name)
        if rows is not None and rows.dtype != torch.float16:
            return None
        value = self.tensor(name)
        if value.dtype != torch.float16 or value.dim() != 2:
            return None
        return Blocks("F16", value.contiguous().view(torch.uint8).numpy(), value.shape[1])

    def _scaled(self, name: str) -> Scaled | None:
        shape, stored = expected_shape(name, self.config), self._quantised_name(name)
        if self._scheme is None or stored is None or shape is None or len(shape) != 2:
            return None
        return read_scaled(self._scheme, lambda n: self._read(n) if n in self._files else None, stored, shape)

    def forget(self) -> None:
        """Close the files; they are opened again when something is asked for."""
        self._opened.clear()

    def tokenizer(self) -> Tokenizer:
        """The tokenizer in the same folder, read once."""
        from .tokenizer import Tokenizer

        self._tokenizer = self._tokenizer or Tokenizer.from_folder(self._folder)
        return self._tokenizer

    def rows(self, name: str) -> StoredRows | None:
        """A matrix that lies in a file as it is, to be read some rows at a time; None for others."""
        place = self._place(name)
        if place is None or not place.is_whole or self._quantised_name(name) in self._files:
            return None
        stored = place.names[0]
        found = stored_rows(self._slice(stored), lambda own: self._slice(stored)[own])
        if found is not None:
            _check_shape(name, found.shape, self.config)
        return found

    def _slice(self, name: str) -> Any:
        path = self._files[name]
        if path not in self._opened:
            self._opened[path] = open_safetensors(path)
        try:
            return self._opened[path].get_slice(self._names[name])
        except SafetensorError as error:  # the index promised what the file does not hold
            raise _missing(name, str(path)) from error

    def _read(self, name: str, entry: int | None = None) -> Tensor:
        found = self._slice(name)
        return self._opened[self._files[name]].get_tensor(self._names[name]) if entry is None else found[entry]


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        ggufs = sorted(file.name for file in folder.glob("*.gguf"))
        hint = f"; to run {ggufs[0]}, give that file itself" if ggufs else ""
        raise CheckpointError(f"{folder} has no config.json, so it is not a model folder{hint}.")
    return read_object(path, MAX_CONFIG)


class GgufCheckpoint:
    """One GGUF file, its tensors under their Hugging Face names and in the layout of those."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.name = name or str(path)
        self._path, self._file = path, read_whole_gguf(path)
        self._warned = False
        self._tokenizer: Tokenizer | None = None
        tensors = self._file.tensors
        vectors = {name: self._file.dequantize(own).tolist() for name, own in tensors.items() if name in ROPE_VECTORS}
        fields = {"vocab_size": embedding_rows(self._file), **self._file.fields}
        self.config = ModelConfig.from_gguf(fields, tensors.keys(), vectors)
        form = FAMILIES[self.config.family].gguf
        if form is None:
            raise CheckpointError(f"GGUF files of {self.config.family} models are not read.")
        self._form = form

    @property
    def files(self) -> list[Path]:
        """The one, or its parts."""
        return part_paths(self._path)

    def has(self, name: str) -> bool:
        """Whether the file has the tensor, under its own name for it."""
        place = self._form.place(name, self.config)
        return place is not None and place.name in self._file.tensors

    def _find(self, name: str) -> tuple[GgufTensor, tuple[Change, ...]]:
        """Where a tensor of ours lies, and which of its rows are ours."""
        place = self._form.place(name, self.config)
        stored = None if place is None else self._file.tensors.get(place.name)
        if place is None or stored is None:
            raise _missing(name, self.name)
        return (stored if place.entry is None else stored.entry(place.entry)), place.picks

    def tensor(self, name: str) -> Tensor:
        """Read and dequantise one tensor; 16-bit tensors keep their type."""
        stored, picks = self._find(name)
        value = torch.from_numpy(self._file.dequantize(stored))
        value = value.to(_STORED_TYPES.get(stored.type, torch.float32))
        expected = expected_shape(name, self.config)
        if expected is not None and value.dim() != len(expected) and value.numel() == math.prod(expected):
            value = value.view(expected)  # GGUF writes a matrix of one row as a vector, and norms of heads as matrices
        return _checked(name, self._picked(name, value, picks), self.config)

    def matrix(self, name: str) -> Matrix:
        """A quantised tensor as it is, if its blocks are groups of ours; else the tensor."""
        stored, picks = self._find(name)
        groups = read_groups(stored)
        if groups is None:
            return self.tensor(name)
        picked = self._picked(name, groups, picks)
        _check_shape(name, tuple(picked.shape), self.config)
        return picked

    def blocks(self, name: str) -> Blocks | None:
        """A matrix in the file's own bytes; None where our kernels do not multiply its type."""
        if not self._warned:
            self._warned = True
            warn_of_expanded(self.name, self._file.tensors.values())
        stored, picks = self._find(name)
        if len(stored.shape) != 2 or stored.type not in NUMBERS:
            return None
        picked = self._picked(name, Blocks(stored.type, stored.data, stored.shape[1]), picks)
        _check_shape(name, picked.shape, self.config)
        return picked

    def _picked(self, name: str, rows: Any, picks: Sequence[Change]) -> Any:
        """Of whichever form rows are in."""
        with refusing_malformed(f"its tensor {name}"):
            for pick in picks:
                rows = pick(self.config, rows)
        return rows

    def forget(self) -> None:
        """Unload the file's pages."""
        self._file.forget()

    def tokenizer(self) -> Tokenizer:
        """The tokenizer stated in the file's metadata, built once."""
        from .tokenizer import Tokenizer

        if self._tokenizer is None:
            self._tokenizer = Tokenizer.from_gguf(self._file.fields)
            self._file.forget_lists()
        return self._tokenizer


_STORED_TYPES = {"F16": torch.float16, "BF16": torch.bfloat16}
ROPE_VECTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def _missing(name: str, where: str) -> CheckpointError:
    return CheckpointError(
        f"{where} has no tensor {name}: the file is incomplete or of another architecture than it says. "
        "Download or convert the model again."
    )


def _checked(name: str, value: Tensor, config: ModelConfig) -> Tensor:
    _check_shape(name, tuple(value.shape), config)
    return value


def _check_shape(name: str, shape: tuple[int, ...], config: ModelConfig) -> None:
    expected = expected_shape(name, config)
    if expected is not None and shape != expected:
        raise CheckpointError(
            f"{name} has shape {shape} where the configuration says {expected}: weights and "
            "configuration do not belong together. Download or convert the model again."
        )
