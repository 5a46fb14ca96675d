"""What a decoder looks like, whichever file format said so.

One frozen record, `ModelConfig`, is all the transformer needs to know. Its two readers translate the
spellings of Hugging Face `config.json` files and of GGUF metadata; whatever they cannot translate exactly is
refused with the reason, since a model that is nearly right would still produce fluent text.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .rope import RopeConfig, refusing_malformed, require, shown

__all__ = ["GGUF_CONTROL", "ModelConfig", "RopeConfig", "gguf_eos_ids", "token_ids"]

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_pytorch_tanh"}

GGUF_CONTROL = 3  # the token type of markers such as <|im_end|>
_END_TOKENS = {"</s>", "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama, Mistral, Qwen2 or Qwen3 family; families differ only in these values."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    rope: RopeConfig
    tied_head: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]  # sliding window of each layer, the token itself included; None: full
    activation: str
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    def __post_init__(self) -> None:
        require(self.family in FAMILIES, _unsupported_family(self.family))
        for name, most in _SIZES.items():
            size = getattr(self, name)
            require(isinstance(size, int), f"{name} is {shown(size)}, which must be a whole number")
            require(size > 0, f"{name} is {shown(size)}, which must be positive")
            require(size <= most, f"{name} is {shown(size)}, and {most} is the largest that is supported")
        require(
            self.num_heads % self.num_kv_heads == 0,
            f"{self.num_heads} attention heads cannot share {self.num_kv_heads} key-value heads evenly",
        )
        require(self.head_dim % 2 == 0, f"head_dim is {self.head_dim}, and rotary embedding needs an even one")
        require(self.norm_eps > 0, f"norm_eps is {self.norm_eps}, which must be positive")
        require(
            len(self.windows) == self.num_layers,
            f"{len(self.windows)} attention windows were given for {self.num_layers} layers",
        )
        require(
            all(window is None or window > 0 for window in self.windows),
            f"attention windows must be positive: {shown(self.windows)}",
        )
        require(
            self.activation in ACTIVATIONS.values(),
            f"activation {self.activation!r} is not supported; supported are {', '.join(ACTIVATIONS)}",
        )
        self.rope.inverse_frequencies(self.head_dim)  # refuses a wrong number of factors here and now

    def first(self, count: int) -> ModelConfig:
        """Its first layers alone."""
        return replace(self, num_layers=count, windows=self.windows[:count])

    def with_layers(self, count: int) -> ModelConfig:
        """So many layers like these, each of which sees all of the text."""
        return replace(self, num_layers=count, windows=(None,) * count)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read a `config.json`, as transformers 4 (`rope_scaling`) or 5 (`rope_parameters`) spells it."""
        with refusing_malformed("its config.json"):
            return cls._from_hf(config)

    @classmethod
    def _from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        family = config.get("model_type")
        require(family in FAMILIES, _unsupported_family(family))
        _refuse_variants(config)
        num_layers = _layer_count(config, "num_hidden_layers")
        num_heads = _integer(config, "num_attention_heads")
        hidden_size = _integer(config, "hidden_size")
        usual_head_dim = 128 if family == "qwen3" else hidden_size // max(num_heads, 1)
        max_positions = _hf_max_positions(config)
        attention_bias = family in ("llama", "qwen3") and bool(config.get("attention_bias"))
        return cls(
            family=str(family),
            vocab_size=_integer(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_integer(config, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=_integer(config, "num_key_value_heads", num_heads),
            head_dim=_integer({"head_dim": config.get("head_dim") or None}, "head_dim", usual_head_dim),
            max_positions=max_positions,
            norm_eps=_number(config, "rms_norm_eps", 1e-6),
            rope=_hf_rope(config, max_positions),
            tied_head=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2" or attention_bias,
            output_bias=attention_bias,
            mlp_bias=family == "llama" and bool(config.get("mlp_bias")),
            qk_norm=family == "qwen3",
            windows=_hf_windows(config, num_layers),
            activation=_activation(config.get("hidden_act", "silu")),
            eos_token_ids=token_ids(config.get("eos_token_id")),
            bos_token_id=_optional_integer(config, "bos_token_id"),
        )

    @classmethod
    def from_gguf(
        cls,
        fields: Mapping[str, Any],
        tensor_names: Collection[str],
        rope_factors: Sequence[float] | None = None,
    ) -> ModelConfig:
        """Read GGUF metadata.

        `rope_factors` are the values of the tensor `rope_freqs.weight`: how GGUF states Llama 3.1's scaling.
        """
        with refusing_malformed("its GGUF metadata"):
            return cls._from_gguf(fields, tensor_names, rope_factors)

    @classmethod
    def _from_gguf(
        cls, fields: Mapping[str, Any], tensor_names: Collection[str], rope_factors: Sequence[float] | None
    ) -> ModelConfig:
        family = fields.get("general.architecture")
        require(family in ("llama", "qwen2", "qwen3"), _unsupported_family(family))
        own = {key.removeprefix(f"{family}."): value for key, value in fields.items()}
        require(not own.get("expert_count"), "it is a mixture of experts; only dense models are supported")
        num_layers = _layer_count(own, "block_count")
        num_heads = _integer(own, "attention.head_count")
        hidden_size = _integer(own, "embedding_length")
        head_dim = _integer(own, "attention.key_length", hidden_size // max(num_heads, 1))
        max_positions = _integer(own, "context_length")
        window = _optional_integer(own, "attention.sliding_window") or None
        return cls(
            family=str(family),
            vocab_size=own.get("vocab_size") or len(fields.get("tokenizer.ggml.tokens", ())),
            hidden_size=hidden_size,
            intermediate_size=_integer(own, "feed_forward_length"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=_integer(own, "attention.head_count_kv", num_heads),
            head_dim=head_dim,
            max_positions=max_positions,
            norm_eps=_number(own, "attention.layer_norm_rms_epsilon", None),
            rope=_gguf_rope(own, tensor_names, rope_factors, head_dim),
            tied_head="output.weight" not in tensor_names,
            qkv_bias="blk.0.attn_q.bias" in tensor_names,
            output_bias="blk.0.attn_output.bias" in tensor_names,
            mlp_bias="blk.0.ffn_gate.bias" in tensor_names,
            qk_norm="blk.0.attn_q_norm.weight" in tensor_names,
            windows=(window,) * num_layers,
            activation="silu",
            eos_token_ids=gguf_eos_ids(fields),
            bos_token_id=_optional_integer(fields, "tokenizer.ggml.bos_token_id"),
        )


_SIZES = {  # and the largest that is believed: larger than any published model's
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
_MOST_FACTORS = 1 << 14


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


def gguf_eos_ids(fields: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids that end an answer: those the file names, and control tokens known to do nothing else.

    GGUF has room for one end of sequence, where the model's `generation_config.json` often lists several.
    """
    named = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens, kinds = fields.get("tokenizer.ggml.tokens", []), fields.get("tokenizer.ggml.token_type", [])
    control = (index for index, kind in enumerate(kinds) if kind == GGUF_CONTROL and index < len(tokens))
    known = [index for index in control if tokens[index] in _END_TOKENS]
    return tuple(sorted({index for index in (*named, *known) if index is not None}))


def _unsupported_family(family: object) -> str:
    return (
        f"its architecture is {shown(family)}; supported are {', '.join(FAMILIES)} (dense, text only), "
        "which also cover SmolLM2, TinyLlama and other models in the Llama format"
    )


def _integer(source: Mapping[str, Any], key: str, default: int | None = None) -> int:
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


def _optional_integer(source: Mapping[str, Any], key: str) -> int | None:
    return None if source.get(key) is None else _integer(source, key)


def _layer_count(source: Mapping[str, Any], key: str) -> int:
    """Checked at once: lists as long as this are made before the record is."""
    count, most = _integer(source, key), _SIZES["num_layers"]
    require(0 < count <= most, f"its configuration has {key} = {count}, which must be from 1 to {most}")
    return count


def _number(source: Mapping[str, Any], key: str, default: float | None) -> float:
    value = source.get(key)
    value = default if value is None else value
    require(
        isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST_NUMBER,
        f"its configuration has {key} = {shown(value)} where a number is needed",
    )
    return float(value)  # pyright: ignore[reportArgumentType]


_LARGEST_NUMBER = 1e30  # which leaves out infinity, and NaN compares with nothing


def _activation(name: object) -> str:
    require(
        isinstance(name, str) and name in ACTIVATIONS,
        f"activation {shown(name)} is not supported; supported are {', '.join(ACTIVATIONS)}",
    )
    return ACTIVATIONS[str(name)]


def _refuse_variants(config: Mapping[str, Any]) -> None:
    architectures = config.get("architectures") or []
    require(
        isinstance(architectures, list) and all(isinstance(name, str) for name in architectures),
        f"its architectures are {shown(architectures)} where a list of names is needed",
    )
    require(
        not architectures or any("ForCausalLM" in name for name in architectures),
        f"it is a {', '.join(architectures)[:200]}, which has no language-model head; use a ForCausalLM checkpoint",
    )
    require(
        not config.get("quantization_config"),
        "its weights are quantised (quantization_config); use the original safetensors checkpoint, or a GGUF "
        "file of the model",
    )
    experts = config.get("num_local_experts") or config.get("num_experts")
    require(not experts, "it is a mixture of experts; only dense models are supported")


def _hf_rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    require(isinstance(given, Mapping), f"its rope_scaling is {shown(given)} where a table is needed")
    parameters = {"rope_theta": config.get("rope_theta"), **given}
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    parameters["rope_type"] = "longrope" if kind == "su" else kind  # "su": the name in early Phi-3 files
    if config.get("original_max_position_embeddings"):
        parameters["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    partial = _number(parameters, "partial_rotary_factor", 0) or _number(config, "partial_rotary_factor", 0) or 1.0
    require(partial == 1.0, f"only {partial:.0%} of each head is rotated; that is not supported")
    return parameters


def _hf_max_positions(config: Mapping[str, Any]) -> int:
    stated = _integer(config, "max_position_embeddings")
    require(stated > 0, f"its configuration has max_position_embeddings = {stated}, which must be positive")
    parameters = _hf_rope_parameters(config)
    original = _optional_integer(parameters, "original_max_position_embeddings") or stated
    if parameters["rope_type"] == "dynamic":
        # Dynamic NTK changes its base with the length of the text, once past the original context. Keys in
        # the cache keep their old rotation, so longer texts would depend on their chunking: stop there.
        return min(stated, original)
    if parameters["rope_type"] == "yarn":  # Qwen2.5 states the length before scaling
        return max(stated, int(original * (_number(parameters, "factor", 1) or 1)))
    return stated


def _hf_rope(config: Mapping[str, Any], max_positions: int) -> RopeConfig:
    parameters = _hf_rope_parameters(config)
    stated = _integer(config, "max_position_embeddings")
    original = _integer(parameters, "original_max_position_embeddings", stated)
    optional = {
        name: float(parameters[name])
        for name in _ROPE_NUMBERS
        if parameters.get(name) is not None and _number(parameters, name, None) is not None
    }
    return RopeConfig(
        theta=_number(parameters, "rope_theta", 10_000.0),
        kind=str(parameters["rope_type"]),
        factor=_number(parameters, "factor", stated / max(original, 1)),
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
    return tuple(_number({key: factor}, key, None) for factor in given)


_ROPE_NUMBERS = (
    "low_freq_factor",
    "high_freq_factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)


def _hf_windows(config: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    family = config["model_type"]
    # The families' default where the file says nothing; null means none.
    window = _optional_integer({"sliding_window": 4096, **config}, "sliding_window")
    if family == "llama":
        window = None
    if family in ("qwen2", "qwen3") and not config.get("use_sliding_window", False):
        window = None
    if window is None or family == "mistral":
        return (window,) * num_layers
    kinds = config.get("layer_types")
    if kinds is None:
        first = _integer(config, "max_window_layers", 28)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    known = ("sliding_attention", "full_attention")
    require(
        isinstance(kinds, list | tuple) and len(kinds) == num_layers,
        f"its layer_types are {shown(kinds)} where a list of {num_layers} is needed",
    )
    require(
        all(kind in known for kind in kinds),
        f"its layer_types {shown([kind for kind in kinds if kind not in known])} are not supported",
    )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _gguf_rope(
    own: Mapping[str, Any], tensor_names: Collection[str], factors: Sequence[float] | None, head_dim: int
) -> RopeConfig:
    require(
        not any(name.startswith(("rope_factors_long", "rope_factors_short")) for name in tensor_names),
        "its GGUF file carries LongRoPE factor tensors; use the safetensors checkpoint",
    )
    rotated = _optional_integer(own, "rope.dimension_count") or head_dim
    require(rotated == head_dim, f"only {rotated} of {head_dim} dimensions are rotated; that is not supported")
    theta = _number(own, "rope.freq_base", 10_000.0)
    max_positions = _integer(own, "context_length")
    original = _optional_integer(own, "rope.scaling.original_context_length") or max_positions
    if "rope_freqs.weight" in tensor_names:
        require(factors is not None, "its rope_freqs.weight was not read")
        stretched = tuple(float(factor) for factor in factors or ())
        return RopeConfig(
            theta, "longrope", 1.0, original, max_positions, attention_factor=1.0,
            short_factor=stretched, long_factor=stretched,
        )  # fmt: skip
    kind = str(own.get("rope.scaling.type") or "none").replace("none", "default")
    factor = _number(own, "rope.scaling.factor", _number(own, "rope.scale_linear", 0) or 1.0)
    attention = _number(own, "rope.scaling.attn_factor", 1.0)
    if kind == "yarn":  # GGUF's factor multiplies the paper's, Hugging Face's replaces it
        attention *= 1 + 0.1 * math.log(max(factor, 1.0))
    if kind == "default" and factor != 1.0:
        kind = "linear"
    return RopeConfig(theta, kind, factor, original, max_positions, attention_factor=attention)
