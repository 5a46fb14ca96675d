"""LoRA adapters as PEFT writes them: adapter_config.json and adapter_model.safetensors, under our names for matrices.

An adapter adds `up @ down` to matrices of its base model. It is read for one model at a time: module names, fused
matrices and transposed ones are translated by the family's own table, so whatever the family can read, it can adapt.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError, IncompatibleParts
from .checkpoint import HUB_ID, Checkpoint
from .config import ModelConfig
from .families import FAMILIES, Place
from .folder import from_hub, open_safetensors
from .lora_folder import CONFIG, WEIGHTS, adapter_config
from .names import expected_shape, tensor_shapes
from .rope import refusing_malformed
from .universal_folder import UniversalConfig

_LARGEST_RANK = 1 << 12
_TENSOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.[\w-]+)?\.weight")
_REFUSED: Mapping[str, str] = {  # switches that change what is computed
    "use_dora": "it is DoRA, which also scales the columns of the merged matrix",
    "use_qalora": "it is QALoRA, which pools its inputs",
    "lora_bias": "its products have biases (lora_bias)",
    "modules_to_save": "it replaces whole modules (modules_to_save)",
    "layer_replication": "it repeats layers of its base (layer_replication)",
    "trainable_token_indices": "it changes rows of the embedding (trainable_token_indices)",
    "target_parameters": "it adapts parameters that are no modules (target_parameters)",
    "alora_invocation_tokens": "it takes effect from a token of the prompt on (aLoRA)",
    "arrow_config": "it is routed among several (Arrow)",
    "use_bdlora": "it is block-diagonal (BD-LoRA)",
}
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # initialisations that take their start off the base
_ADVICE = "Merge it into its base with PEFT (merge_and_unload) and give that folder"


@dataclass(frozen=True)
class LowRank:
    """What is added to a matrix [out, in]."""

    down: Tensor  # [r, in] float32
    up: Tensor  # [out, r] float32, scaled

    def delta(self, dtype: torch.dtype) -> Tensor:
        """[out, in]."""
        return self.up.to(dtype) @ self.down.to(dtype)


@dataclass(frozen=True)
class Adapter:
    """An adapter for one model."""

    name: str
    parts: Mapping[str, LowRank]  # by our names of matrices

    @property
    def num_bytes(self) -> int:
        """Memory of its factors."""
        return sum(part.down.nbytes + part.up.nbytes for part in self.parts.values())


def read_adapter(path: str | Path, base: Checkpoint, name: str | None = None) -> Adapter:
    """An adapter's factors for a model; whatever would be computed differently is refused."""
    folder, name = _folder_of(path), name or str(path)
    if not (folder / CONFIG).is_file():
        raise CheckpointError(f"{path} has no {CONFIG}, so it is no adapter; give the folder that PEFT has saved.")
    if not (folder / WEIGHTS).is_file():
        raise CheckpointError(f"{path} has no {WEIGHTS}; save the adapter as safetensors (PEFT's default).")
    if isinstance(base.config, UniversalConfig):
        raise IncompatibleParts(
            f"The adapter {name} cannot be used: {base.name} runs on transformers' modules. {_ADVICE}."
        )
    given = adapter_config(folder)
    with refusing_malformed(f"the {CONFIG} of {name}"):
        return _Reader(name, folder, given, base.config).adapter()


def _folder_of(path: str | Path) -> Path:
    folder = Path(path).expanduser()
    if not folder.exists() and isinstance(path, str) and HUB_ID.fullmatch(path) and path[0] not in "./":
        return from_hub(path)
    return folder


class _Reader:
    """An adapter's files, for one model."""

    def __init__(self, name: str, folder: Path, given: Mapping[str, Any], config: ModelConfig) -> None:
        self._name, self._given, self._config = name, given, config
        self._check_kind()
        self._file = open_safetensors(folder / WEIGHTS)
        self._modules = dict(self._found())

    def _refused(self, reason: str, advice: str = _ADVICE) -> CheckpointError:
        return CheckpointError(f"The adapter {self._name} cannot be used: {reason}. {advice}.")

    def _check_kind(self) -> None:
        given = self._given
        if given.get("peft_type") != "LORA":
            raise self._refused(f"it is {given.get('peft_type')!r:.60}, and only LoRA is known")
        for key, why in _REFUSED.items():
            if given.get(key):
                raise self._refused(why)
        if given.get("bias", "none") != "none":
            raise self._refused(f"it changes biases (bias = {given['bias']!r:.40})")
        start = str(given.get("init_lora_weights", ""))
        if start.startswith(_CHANGED_BASE):
            raise self._refused(f"its base was changed when it was initialised ({start:.40})")

    def _found(self) -> Iterator[tuple[str, dict[str, str]]]:
        """Modules with the names of their two tensors."""
        modules: dict[str, dict[str, str]] = {}
        for name in self._file.keys():  # noqa: SIM118
            match = _TENSOR.fullmatch(name)
            if match is None:
                raise self._refused(f"its tensor {name:.120} is none of LoRA's")
            modules.setdefault(match[1], {})[match[2]] = name
        for module, own in modules.items():
            if len(own) != 2:
                raise self._refused(f"{module} has only one of its two factors", "Save the adapter again")
            yield module, own

    def adapter(self) -> Adapter:
        family, left = FAMILIES[self._config.family], set(self._modules)
        parts: dict[str, LowRank] = {}
        for ours, shape in tensor_shapes(self._config).items():
            if len(shape) != 2 or not ours.endswith(".weight"):
                continue
            for place in family.places(ours, self._config):
                module = place.names[0].removesuffix(".weight")
                if module in self._modules:
                    parts[ours] = self._part(ours, module, place)
                    left.discard(module)
                    break
        if left:
            raise IncompatibleParts(
                f"The adapter {self._name} does not fit this model: it adapts {sorted(left)[0]} and "
                f"{len(left) - 1} other modules that are not there or cannot be adapted. Give it the base it was "
                f"trained for ({self._given.get('base_model_name_or_path')!r:.120})."
            )
        if not parts:
            raise self._refused("it holds nothing", "Save the adapter again")
        return Adapter(self._name, parts)

    def _part(self, ours: str, module: str, place: Place) -> LowRank:
        names = self._modules[module]
        down, up = (self._file.get_tensor(names[which]).float() for which in "AB")
        rank, scale = self._scale(module)
        if place.entry is not None or len(place.names) > 1:
            raise self._refused(f"{module} is a part of several matrices of this model")
        if down.dim() != 2 or up.dim() != 2 or down.shape[0] != rank or up.shape[1] != rank:
            raise self._refused(
                f"{module} has factors of shapes {tuple(up.shape)} and {tuple(down.shape)} where its rank is {rank}",
                "Save the adapter again",
            )
        if not (bool(down.isfinite().all()) and bool(up.isfinite().all())):
            raise self._refused(f"{module} holds numbers that are NaN or infinite; it is damaged", "Save it again")
        stored = (
            up.t() if self._given.get("fan_in_fan_out") else up
        )  # as the base stores the matrix: in rows or columns
        own = up if place.change is None else place.change(self._config, stored)
        expected = expected_shape(ours, self._config)
        if expected is None or (own.shape[0], down.shape[1]) != expected or own.shape[1] != rank:
            raise IncompatibleParts(
                f"The adapter {self._name} does not fit this model: {module} would add {own.shape[0]} x "
                f"{down.shape[1]} numbers to a matrix of {expected}. Give it the base it was trained for."
            )
        return LowRank(down.contiguous(), (own * scale).contiguous())

    def _scale(self, module: str) -> tuple[int, float]:
        """The rank of a module, and what its product is multiplied by."""
        given = self._given
        rank = self._number(_matching(given.get("rank_pattern"), module, given.get("r")), "r")
        alpha = self._number(_matching(given.get("alpha_pattern"), module, given.get("lora_alpha", rank)), "lora_alpha")
        if rank != int(rank) or not 1 <= rank <= _LARGEST_RANK:
            raise self._refused(f"its rank is {rank}; 1 to {_LARGEST_RANK} are possible", "Save the adapter again")
        return int(rank), alpha / (math.sqrt(rank) if given.get("use_rslora") else rank)

    def _number(self, value: object, what: str) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise self._refused(f"its {what} is {value!r:.40}, which is no number", "Save the adapter again")
        return value


def _matching(pattern: object, module: str, usual: object) -> object:
    """The entry whose key ends the module's name; keys are taken as texts, with the one wildcard that PEFT writes."""
    for key, value in (pattern if isinstance(pattern, Mapping) else {}).items():
        spelled = re.escape(str(key)).replace(r"\.\*", r"\..*").replace(r"\^", "").replace(r"\$", "")
        if re.fullmatch(rf"(?:.*\.)?{spelled}", module):
            return value
    return usual


class MergedCheckpoint:
    """A checkpoint with an adapter added to its matrices: the model that PEFT's `merge_and_unload` makes.

    A matrix stored in 16 bits is rounded to them again, as there. One that is quantised is dequantised first.
    """

    def __init__(self, base: Checkpoint, adapter: Adapter) -> None:
        self.name = f"{base.name} with {adapter.name}"
        self._base, self._adapter = base, adapter

    @property
    def config(self) -> ModelConfig:
        """The base's."""
        return self._base.config

    @property
    def files(self) -> list[Path]:
        """The base's."""
        return list(getattr(self._base, "files", ()))

    def has(self, name: str) -> bool:
        """Whether the base has it."""
        return self._base.has(name)

    def tensor(self, name: str) -> Tensor:
        """With what is added to it."""
        value, part = self._base.tensor(name), self._adapter.parts.get(name)
        if part is None:
            return value
        wide = torch.promote_types(value.dtype, torch.float32)
        return (value.to(wide) + part.delta(wide)).to(value.dtype)

    def matrix(self, name: str) -> Any:
        """As the base stores it, where nothing is added."""
        return self.tensor(name) if name in self._adapter.parts else self._base.matrix(name)

    def blocks(self, name: str) -> Any:
        """Likewise; None where something is added, or the base has none."""
        blocks = getattr(self._base, "blocks", None)
        return None if blocks is None or name in self._adapter.parts else blocks(name)

    def forget(self) -> None:
        """Close the base's files."""
        self._base.forget()

    def tokenizer(self) -> Any:
        """The base's."""
        return self._base.tokenizer()
