"""A Hugging Face folder that transformers' own modules will run: its configuration, what it is refused for, its files.

Only transformers' own classes are used, found by `model_type`; nothing in a folder is executed, and nothing is fetched.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import CheckpointError, InvalidRequest
from ..ranks import ALONE, Ranks
from .config import ModelConfig
from .encoders import encoder_of, modules_of
from .families import FAMILIES
from .files import read_object
from .folder import open_safetensors, tensor_files
from .reading import SIZES
from .rope import RopeConfig, require, shown
from .spec import EncoderSpec
from .weights import FORMATS, WeightFormat

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

OLDEST, NEWEST = (5, 20), (6, 0)  # of transformers, whose internals move: this one is left out
DTYPES = (torch.float32, torch.float64)
INSTALL = "pip install 'draftwood[universal]'"
DEFAULT_CONTEXT = 2048  # of models that state none, as those without positions
# What would have transformers fetch or choose code, or leave values to a file that it reads for itself.
_NOT_READ = ("auto_map", "attn_implementation", "experts_implementation", "torch_dtype", "dtype", "use_kernels")
_WINDOWS = ("window", "attention_chunk", "local_attention", "attention_types")
_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")


@dataclass(frozen=True, slots=True)
class UniversalConfig(ModelConfig):
    """A decoder that transformers computes; what its layers are is not known here, and plans go by these sizes."""

    model_type: str = ""
    parameters: int = 0  # as counted in its files
    planes: int = 0  # rows of `plane` numbers that a token's keys and values take; 0: not known before it is loaded
    plane: int = 0

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers", "max_positions"):
            size = getattr(self, name)
            require(isinstance(size, int) and 0 < size <= SIZES.get(name, 1 << 31), f"{name} is {shown(size)}")

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """All layers' keys and values as one pile of planes, of which one half is the 'keys'."""
        return (1, self.planes // 2, self.plane) if self.planes else (self.num_layers, self.num_kv_heads, self.head_dim)


class UniversalCheckpoint:
    """A folder with config.json and safetensors, which transformers' modules read by themselves."""

    def __init__(self, folder: Path, stated: Mapping[str, Any], name: str | None = None) -> None:
        from .tokenizer import folder_eos_ids

        self.name = name or str(folder)
        self.ranks: Ranks = ALONE
        self.folder = folder
        self.stated = readable(folder, stated)
        self._files = tensor_files(folder)
        with_own = hf_config(self.stated)
        self.config = _described(with_own, folder_eos_ids(folder), _count(self.files), self._encoder(with_own))

    @property
    def files(self) -> list[Path]:
        """All that hold tensors, in the order of their names."""
        return sorted(set(self._files.values()))

    @property
    def windows(self) -> dict[str, Any]:
        """What its configuration says of windows, chunks or local attention, its defaults included."""
        stated = hf_config(self.stated).get_text_config(decoder=True).to_dict()
        return {key: value for key, value in stated.items() if any(word in key for word in _WINDOWS)}

    def shared(self, ranks: Ranks) -> UniversalCheckpoint:
        """The same as one of these ranks reads it."""
        part = copy(self)
        part.ranks = ranks
        return part

    def _encoder(self, config: Any) -> EncoderSpec | None:
        if not config.is_encoder_decoder:
            return None
        generation = read_object(self.folder / "generation_config.json")
        return encoder_of(config, {**self.stated, **generation}, modules_of(config))

    def has(self, name: str) -> bool:
        """Nothing is known under our names."""
        return False

    def tensor(self, name: str) -> Tensor:
        """Refused: only modules of transformers know where its tensors are."""
        raise CheckpointError(
            f"{self.name} runs on transformers' own modules, which share no tensors: trained draft heads and training "
            "need a family that our decoder knows (docs/models.md). Use --drafter ngram or model:NAME."
        )

    def matrix(self, name: str) -> Tensor:
        """Refused, as `tensor`."""
        return self.tensor(name)

    def forget(self) -> None:
        """Nothing of it is kept."""

    def tokenizer(self) -> Tokenizer:
        """The tokenizer in the same folder."""
        from .tokenizer import Tokenizer

        return Tokenizer.from_folder(self.folder)


def require_transformers(why: str) -> None:
    """Refuse where transformers is missing, or a version that was not tried."""
    try:
        version = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        raise CheckpointError(f"{why}, and it is not installed: {INSTALL}.") from None
    numbers = tuple(int("".join(filter(str.isdigit, part)) or 0) for part in version.split(".")[:2])
    if not OLDEST <= numbers < NEWEST:
        oldest, newest = (".".join(map(str, each)) for each in (OLDEST, NEWEST))
        raise CheckpointError(f"{why}, from {oldest} on and before {newest}; here is {version}: {INSTALL}.")


def require_supported(
    name: str, dtype: torch.dtype, device: torch.device, weights: WeightFormat, encoder: bool = False
) -> None:
    """Refuse what was not shown to be exact."""
    way = f"{name} runs on transformers' own modules"
    if device.type != "cpu" and encoder:
        raise InvalidRequest(f"{way} behind an encoder, so far on a CPU only; use device='cpu' (--device cpu).")
    if dtype not in DTYPES:
        raise InvalidRequest(
            f"{way}, which are checked when loaded, and {dtype} is too coarse to tell rounding from a wrong mask; use "
            "dtype='float32' (--dtype float32)."
        )
    if weights is not FORMATS["stored"]:
        raise InvalidRequest(f"{way}, which do not read weights stored as {weights.name}; leave weights alone.")


def hf_config(stated: Mapping[str, Any]) -> Any:
    """The configuration as transformers' own class of this `model_type` reads it; a refusal where there is none."""
    kind = stated.get("model_type")
    require_transformers(
        f"This model cannot be run: its architecture is {shown(kind)}, which only transformers could run"
    )
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    known = isinstance(kind, str) and kind in CONFIG_MAPPING
    ours = f"our decoder knows {', '.join(FAMILIES)}, and"
    require(known, f"its architecture is {shown(kind)}; {ours} transformers {_version()} does not know it either")
    try:
        config = CONFIG_MAPPING[str(kind)].from_dict(dict(stated))
    except Exception as error:  # its classes validate in their own ways
        raise CheckpointError(f"This model cannot be run: transformers refuses its config.json: {error}.") from error
    if config.is_encoder_decoder:
        require(modules_of(config) is not None, f"its architecture is {shown(kind)}, which has an encoder for no text")
        return config
    require(type(config) in MODEL_FOR_CAUSAL_LM_MAPPING, f"its architecture is {shown(kind)}, which is no text decoder")
    modules: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    require(
        not modules._is_stateful,
        f"its architecture is {shown(kind)}: some of its layers are recurrent, and a state that has taken in a draft "
        "token cannot give it back. Use a model whose layers all attend, or a family with recurrent layers that our "
        "decoder knows (docs/models.md)",
    )
    return config


def _version() -> str:
    return metadata.version("transformers")


def readable(folder: Path, stated: Mapping[str, Any]) -> dict[str, Any]:
    """What transformers is given of a config.json."""
    require(
        not stated.get("quantization_config"),
        "its weights are quantised (quantization_config), which transformers' modules are not asked to read here; use "
        "the original safetensors checkpoint",
    )
    require(
        not (folder / "adapter_config.json").exists(),
        "the folder holds an adapter (adapter_config.json); merge it into the model and save that",
    )
    for name in _LAYER_COUNTS:  # of which transformers makes lists
        count = stated.get(name)
        require(not isinstance(count, int) or count <= SIZES["num_layers"], f"{name} is {shown(count)}")
    return _without(stated)


def _without(table: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in table.items() if not key.lstrip("_").startswith(_NOT_READ)}
    return {key: _without(value) if isinstance(value, dict) else value for key, value in kept.items()}


def _count(files: list[Path]) -> int:
    """Numbers in all tensors."""
    total = 0
    for file in files:
        opened = open_safetensors(file)
        for name in opened.keys():  # noqa: SIM118
            size = 1
            for length in opened.get_slice(name).get_shape():
                size *= length
            total += size
    return total


def _described(config: Any, eos: tuple[int, ...], parameters: int, encoder: EncoderSpec | None) -> UniversalConfig:
    """Its sizes under our names; transformers gives most of its configurations the same attributes."""
    text = config.get_text_config(decoder=True)
    sizes = {**text.to_dict(), **{ours: getattr(text, ours, None) for ours in text.attribute_map}}

    def size(*names: str, default: int) -> int:
        return next((sizes[n] for n in names if isinstance(sizes.get(n), int) and sizes[n] > 0), default)

    hidden = size("hidden_size", default=0)
    heads = size("decoder_attention_heads", "num_attention_heads", default=1)
    layers = size("decoder_layers", "num_decoder_layers", "num_hidden_layers", default=0)
    return UniversalConfig(
        family=str(text.model_type),
        vocab_size=size("decoder_vocab_size", "vocab_size", default=0),
        hidden_size=hidden,
        intermediate_size=size("intermediate_size", "decoder_ffn_dim", "ffn_dim", "n_inner", default=4 * hidden),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=size("num_key_value_heads", default=heads),
        head_dim=size("head_dim", default=hidden // heads),
        max_positions=_context(sizes) if encoder is None else encoder.max_source + encoder.max_text,
        norm_eps=1e-6,
        rope=RopeConfig(),
        tied_head=bool(config.tie_word_embeddings),
        qkv_bias=False, output_bias=False, mlp_bias=False, qk_norm=False,
        windows=(None,) * layers,
        activation="silu",
        eos_token_ids=eos,
        bos_token_id=sizes.get("bos_token_id"),
        encoder=encoder,
        model_type=str(config.model_type),
        parameters=parameters,
    )  # fmt: skip


def _context(sizes: Mapping[str, Any]) -> int:
    """Positions it may have; those behind which transformers would turn by other frequencies than before are not used:
    they would depend on what else is in the batch."""
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    stated = next((sizes[n] for n in names if isinstance(sizes.get(n), int)), DEFAULT_CONTEXT)
    ropes = [sizes.get("rope_parameters"), sizes.get("rope_scaling")]
    ropes += [inner for rope in ropes if isinstance(rope, dict) for inner in rope.values()]
    for rope in ropes:
        if isinstance(rope, dict) and str(rope.get("rope_type", rope.get("type"))) in ("dynamic", "longrope"):
            original = rope.get("original_max_position_embeddings") or sizes.get("original_max_position_embeddings")
            stated = min(stated, original) if isinstance(original, int) else stated
    return stated
