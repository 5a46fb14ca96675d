"""A trained drafter's files: its config.json, and its tensors by the names they were published with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from draftwood.errors import CheckpointError
from draftwood.model import checkpoint
from draftwood.model.folder import from_hub, open_safetensors, tensor_files

PICKLES = ("*.pt", "*.bin", "*.pth")


@dataclass(frozen=True)
class DrafterFiles:
    """What a folder holds; tensors are read one at a time, when they are asked for."""

    name: str
    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], Tensor]

    @property
    def target_name(self) -> str | None:
        """The model it was trained for, where its configuration names one."""
        ours, speculators = _table(self.config, "draftwood"), _table(self.config, "speculators_config")
        named = (
            ours.get("target"),
            _table(speculators, "verifier").get("name_or_path"),
            self.config.get("base_model_name_or_path"),
        )
        return next((name for name in named if isinstance(name, str) and name), None)

    @property
    def target_hidden_size(self) -> int | None:
        """The hidden size of that model, where it follows from the configuration."""
        layers = _table(self.config, "transformer_layer_config")
        stated = (self.config.get("target_hidden_size"), layers.get("hidden_size"), self.config.get("hidden_size"))
        return next((size for size in stated if isinstance(size, int)), None)

    def has(self, prefix: str) -> bool:
        """Whether there is a tensor whose name begins so."""
        return any(name.startswith(prefix) for name in self.shapes)


def _table(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key)
    return value if isinstance(value, Mapping) else {}


def open_drafter(path: str | Path, *, allow_pickle: bool = False) -> DrafterFiles:
    """Open a drafter's folder or hub id: config.json and safetensors.

    Pickles (`.pt`, `.bin`) are read only if `allow_pickle` says so, and then nothing but tensors is taken from them.
    """
    folder, name = _folder_of(path), str(path)
    config = checkpoint._read_config(folder)
    if any(folder.glob("*.safetensors")):
        return _from_safetensors(folder, name, config)
    pickles = sorted(file for pattern in PICKLES for file in folder.glob(pattern))
    if not pickles:
        raise CheckpointError(f"{name} has a config.json but no weights (*.safetensors); download them too.")
    if not allow_pickle:
        raise CheckpointError(
            f"{name} has its weights only as a pickle ({pickles[0].name}), which could run code of its own when it is "
            "loaded. If you trust where it comes from, say --allow-pickle (in Python allow_pickle=True); better, "
            "convert it to safetensors."
        )
    return _from_pickles(pickles, name, config)


def _folder_of(path: str | Path) -> Path:
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_file():
        raise CheckpointError(f"{path} is a single file; give the folder it lies in, with its config.json.")
    if isinstance(path, str) and checkpoint.HUB_ID.fullmatch(path) and path[0] not in "./":
        return from_hub(path)
    raise CheckpointError(
        f"There is no drafter {str(path)!r} here. Give a folder with config.json and *.safetensors, or a Hugging Face "
        "id such as org/name."
    )


def _from_safetensors(folder: Path, name: str, config: Mapping[str, Any]) -> DrafterFiles:
    places = tensor_files(folder)
    opened = cache(open_safetensors)
    shapes: dict[str, tuple[int, ...]] = {}
    for tensor, file in places.items():
        if tensor not in opened(file).keys():  # noqa: SIM118
            raise CheckpointError(f"{file} lacks {tensor}, which its index promises. Download the drafter again.")
        shapes[tensor] = tuple(opened(file).get_slice(tensor).get_shape())
    return DrafterFiles(name, config, shapes, lambda tensor: opened(places[tensor]).get_tensor(tensor))


def _from_pickles(pickles: list[Path], name: str, config: Mapping[str, Any]) -> DrafterFiles:
    from draftwood.nets.layouts.pickles import read_pickle

    tensors = {key: value for file in pickles for key, value in read_pickle(file).items()}
    return DrafterFiles(name, config, {key: tuple(value.shape) for key, value in tensors.items()}, tensors.__getitem__)
