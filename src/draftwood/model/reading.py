"""Values of a model's configuration, each refused by name where it is not what it must be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .rope import RopeConfig, require, shown
from .spec import ACTIVATIONS

SIZES = {  # and the largest that is believed: larger than any published model's
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 18,
    "intermediate_size": 1 << 20,
    "num_layers": 1 << 12,
    "num_heads": 1 << 14,
    "num_kv_heads": 1 << 14,
    "head_dim": 1 << 14,
    "max_positions": 1 << 31,
}
_LARGEST_INTEGER = 1 << 31
_LARGEST_NUMBER = 1e30  # which leaves out infinity, and NaN compares with nothing
_MOST_FACTORS = 1 << 14


def integer(source: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A whole number; `default` where the file has nothing or null."""
    value = source.get(key)
    value = default if value is None else value
    plain = isinstance(value, int) and not isinstance(value, bool)
    require(plain, f"its configuration has {key} = {shown(value)} where one whole number is needed")
    whole = int(value)  # pyright: ignore[reportArgumentType]
    require(
        abs(whole) <= _LARGEST_INTEGER,
        f"its configuration has {key} = {shown(whole)}, and {_LARGEST_INTEGER} is the largest number that is supported",
    )
    return whole


def optional_integer(source: Mapping[str, Any], key: str) -> int | None:
    """A whole number or nothing."""
    return None if source.get(key) is None else integer(source, key)


def layer_count(source: Mapping[str, Any], key: str) -> int:
    """Checked at once: lists as long as this are made before the record is."""
    count, most = integer(source, key), SIZES["num_layers"]
    require(0 < count <= most, f"its configuration has {key} = {count}, which must be from 1 to {most}")
    return count


def number(source: Mapping[str, Any], key: str, default: float | None) -> float:
    """A finite number; `default` where the file has nothing or null."""
    value = source.get(key)
    value = default if value is None else value
    require(
        isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST_NUMBER,
        f"its configuration has {key} = {shown(value)} where a number is needed",
    )
    return float(value)  # pyright: ignore[reportArgumentType]


def optional_number(source: Mapping[str, Any], key: str) -> float | None:
    """A finite number or nothing."""
    return None if source.get(key) is None else number(source, key, None)


def activation(name: object) -> str:
    """Our name of an activation."""
    require(
        isinstance(name, str) and name in ACTIVATIONS,
        f"activation {shown(name)} is not supported; supported are {', '.join(ACTIVATIONS)}",
    )
    return ACTIVATIONS[str(name)]


def token_ids(value: int | Sequence[int] | None) -> tuple[int, ...]:
    """The ids of an `eos_token_id` entry, which files write as nothing, one number or a list."""
    if value is None:
        return ()
    listed: Sequence[Any] = value if isinstance(value, list | tuple) else [value]
    require(
        all(isinstance(index, int) and abs(index) < _LARGEST_INTEGER for index in listed),
        f"its eos_token_id is {shown(value)} where one whole number or a list of them is needed",
    )
    return tuple(listed)


def layer_kinds(config: Mapping[str, Any], num_layers: int) -> tuple[bool, ...] | None:
    """Of `layer_types`, which layers have a sliding window; None where the file says nothing."""
    kinds = config.get("layer_types")
    if kinds is None:
        return None
    known = ("sliding_attention", "full_attention")
    require(
        isinstance(kinds, list | tuple) and len(kinds) == num_layers,
        f"its layer_types are {shown(kinds)} where a list of {num_layers} is needed",
    )
    require(
        all(kind in known for kind in kinds),
        f"its layer_types {shown([kind for kind in kinds if kind not in known])} are not supported",
    )
    return tuple(kind == "sliding_attention" for kind in kinds)


def every_nth_full(config: Mapping[str, Any], num_layers: int, every: int) -> tuple[int | None, ...]:
    """Windows where `layer_types` says so; else all layers slide but every so-and-so-many-th."""
    window = optional_integer(config, "sliding_window")
    kinds = layer_kinds(config, num_layers)
    if kinds is None:
        require(every > 0, f"its sliding_window_pattern is {every}, which must be positive")
        kinds = tuple(bool((i + 1) % every) for i in range(num_layers))
    return tuple(window if slides else None for slides in kinds)


def hf_rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Everything a `config.json` says of rotary embedding, in one table."""
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    require(isinstance(given, Mapping), f"its rope_scaling is {shown(given)} where a table is needed")
    parameters = {"rope_theta": config.get("rope_theta"), **given}
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    parameters["rope_type"] = "longrope" if kind == "su" else kind  # "su": the name in early Phi-3 files
    if config.get("original_max_position_embeddings"):
        parameters["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    return parameters


def hf_rotated(config: Mapping[str, Any], head_dim: int) -> int:
    """How many dimensions of a head are turned."""
    parameters = hf_rope_parameters(config)
    share = number(parameters, "partial_rotary_factor", 0) or number(config, "partial_rotary_factor", 0) or 1.0
    require(0 < share <= 1, f"its partial_rotary_factor is {share}, which must be above 0 and at most 1")
    return int(head_dim * share)


def hf_max_positions(config: Mapping[str, Any]) -> int:
    """The longest text the model may be run on."""
    stated = integer(config, "max_position_embeddings")
    require(stated > 0, f"its configuration has max_position_embeddings = {stated}, which must be positive")
    parameters = hf_rope_parameters(config)
    original = optional_integer(parameters, "original_max_position_embeddings") or stated
    if parameters["rope_type"] == "dynamic":
        # Dynamic NTK changes its base with the length of the text, once past the original context. Keys in
        # the cache keep their old rotation, so longer texts would depend on their chunking: stop there.
        return min(stated, original)
    if parameters["rope_type"] == "yarn":  # Qwen2.5 states the length before scaling
        return max(stated, int(original * (number(parameters, "factor", 1) or 1)))
    return stated


def hf_rope(config: Mapping[str, Any], max_positions: int) -> RopeConfig:
    """Rotary embedding as a `config.json` describes it."""
    parameters = hf_rope_parameters(config)
    stated = integer(config, "max_position_embeddings")
    original = integer(parameters, "original_max_position_embeddings", stated)
    optional: dict[str, Any] = {
        name: float(parameters[name])
        for name in _ROPE_NUMBERS
        if parameters.get(name) is not None and number(parameters, name, None) is not None
    }
    return RopeConfig(
        theta=number(parameters, "rope_theta", 10_000.0),
        kind=str(parameters["rope_type"]),
        factor=number(parameters, "factor", stated / max(original, 1)),
        original_max_positions=original,
        max_positions=max_positions,
        truncate=bool(parameters.get("truncate", True)),
        short_factor=_factors(parameters, "short_factor"),
        long_factor=_factors(parameters, "long_factor"),
        **optional,
    )


def _factors(parameters: Mapping[str, Any], key: str) -> tuple[float, ...]:
    given = parameters.get(key) or []
    require(
        isinstance(given, list | tuple) and len(given) <= _MOST_FACTORS,
        f"its rope parameters have {key} = {shown(given)} where a list of at most {_MOST_FACTORS} numbers is needed",
    )
    return tuple(number({key: factor}, key, None) for factor in given)


_ROPE_NUMBERS = (
    "low_freq_factor",
    "high_freq_factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)
