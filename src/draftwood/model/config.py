"""What a decoder looks like, whichever file format said so.

One frozen record, `ModelConfig`, is all a model needs to know. Its values alone describe a plain decoder, as Llama's;
what a family does otherwise stands in `layers` and `stream` (`spec.py`), written by the family's own file
(`families/`). Whatever cannot be read exactly is refused with the reason, since a model that is nearly right would
still produce fluent text.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from .mixer_spec import RecurrentSpec
from .reading import SIZES, optional_integer, token_ids
from .rope import RopeConfig, refusing_malformed, require, shown
from .spec import (
    ACTIVATIONS,
    NONE,
    AttentionSpec,
    EncoderSpec,
    ExpertsSpec,
    HeadNormSpec,
    ImageSpec,
    LayerSpec,
    MlpSpec,
    NormSpec,
    StreamSpec,
    Sublayers,
)

__all__ = ["GGUF_CONTROL", "ModelConfig", "RopeConfig", "gguf_eos_ids", "token_ids"]

GGUF_CONTROL = 3  # the token type of markers such as <|im_end|>
_END_TOKENS = {"</s>", "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<end_of_turn>"}


_PLAIN = StreamSpec()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder. Without `layers` all of them are plain: norm, attention, add; norm, gated MLP, add."""

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
    layers: tuple[LayerSpec, ...] = ()  # what each is, if they are not plain
    stream: StreamSpec = _PLAIN
    encoder: EncoderSpec | None = None  # None: a decoder alone
    images: ImageSpec | None = None  # None: it sees none

    def __post_init__(self) -> None:
        for name, most in SIZES.items():
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
        self._check_layers()

    def _check_layers(self) -> None:
        if not self.layers:
            self.rope.inverse_frequencies(self.head_dim)  # refuses a wrong number of factors here and now
            return
        described = len(self.layers)
        require(described == self.num_layers, f"{described} layers are described, and it has {self.num_layers}")
        for layer in self.layers:
            rotated = 0 if layer.attention is None else layer.attention.rotated
            require(rotated <= self.head_dim, f"{rotated} of {self.head_dim} dimensions of a head are to be rotated")

    @property
    def is_plain(self) -> bool:
        """Whether the values above describe all of it."""
        return not self.layers and self.stream == _PLAIN

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """Layers, heads and numbers of a head that the pages hold, of keys and as much of values."""
        attending = sum(layer.attention is not None for layer in self.layers) if self.layers else self.num_layers
        return attending, self.num_kv_heads, self.head_dim

    @property
    def recurrent(self) -> tuple[RecurrentSpec, ...]:
        """The mixers of those layers that keep a state of each sequence."""
        return tuple(layer.recurrent for layer in self.layers if layer.recurrent is not None)

    @property
    def layer_specs(self) -> tuple[LayerSpec, ...]:
        """What each layer is."""
        return self.layers or _plain_layers(self)

    @property
    def final_norm(self) -> NormSpec:
        """The norm before the head."""
        return self.stream.final_norm or NormSpec(self.norm_eps)

    @property
    def has_experts(self) -> bool:
        """Whether some layer is a mixture of experts."""
        return bool(self.mixtures)

    @property
    def mixtures(self) -> tuple[ExpertsSpec, ...]:
        """Those of its layers that are one."""
        return tuple(layer.mlp for layer in self.layers if isinstance(layer.mlp, ExpertsSpec))

    def part(self, layers: Sequence[int], without: Sublayers = NONE) -> ModelConfig:
        """Some of its layers alone, some of these `without` attention or MLP."""
        specs = tuple(self.layers[i] for i in layers) if self.layers else ()
        if without != NONE:
            every, (attention, mlp) = self.layer_specs, (without.attention, without.mlp)
            specs = tuple(every[i].lacking(attention=i in attention, mlp=i in mlp) for i in layers)
        return replace(self, num_layers=len(layers), windows=tuple(self.windows[i] for i in layers), layers=specs)

    def with_layers(self, count: int) -> ModelConfig:
        """So many plain layers of these sizes, each of which sees all of the text."""
        return replace(self, num_layers=count, windows=(None,) * count, layers=(), stream=_PLAIN)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read a `config.json`, as transformers 4 (`rope_scaling`) or 5 (`rope_parameters`) spells it."""
        from .families import family_of  # which know this record

        with refusing_malformed("its config.json"):
            family = family_of(config.get("model_type"))
            _refuse_variants(config, family.reads_quantised, "ForConditionalGeneration" if family.within else "LMHead")
            return family.read(_text_of(config, family.within))

    @classmethod
    def from_gguf(
        cls,
        fields: Mapping[str, Any],
        tensor_names: Collection[str],
        vectors: Mapping[str, Sequence[float]] | None = None,
    ) -> ModelConfig:
        """Read GGUF metadata. `vectors` are the values of tensors that scale rotary embedding (`rope_…`)."""
        from .families import gguf_family  # which know this record
        from .families.in_gguf import usual_entries

        with refusing_malformed("its GGUF metadata"):
            family, form, own = gguf_family(fields)
            vocabulary = own.get("vocab_size") or len(fields.get("tokenizer.ggml.tokens", ()))
            entries = usual_entries(own, tensor_names, vectors or {}) | form.entries(own)
            return replace(
                family.read({"vocab_size": vocabulary, **entries}),
                eos_token_ids=gguf_eos_ids(fields),
                bos_token_id=optional_integer(fields, "tokenizer.ggml.bos_token_id"),
            )


@lru_cache(maxsize=32)
def _plain_layers(config: ModelConfig) -> tuple[LayerSpec, ...]:
    """Layers that the values of a configuration describe."""
    norm = NormSpec(config.norm_eps)
    seeing_all = AttentionSpec(
        scale=config.head_dim**-0.5,
        rotated=config.head_dim,
        rope=config.rope,
        qkv_bias=config.qkv_bias,
        output_bias=config.output_bias,
        head_norm=HeadNormSpec(norm) if config.qk_norm else None,
    )
    mlp = MlpSpec(config.intermediate_size, config.activation, bias=config.mlp_bias)
    kinds = {window: LayerSpec(replace(seeing_all, window=window), mlp, norm) for window in set(config.windows)}
    return tuple(kinds[window] for window in config.windows)


def gguf_eos_ids(fields: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids that end an answer: those the file names, and control tokens known to do nothing else.

    GGUF has room for one end of sequence, where the model's `generation_config.json` often lists several.
    """
    named = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens, kinds = fields.get("tokenizer.ggml.tokens", []), fields.get("tokenizer.ggml.token_type", [])
    control = (index for index, kind in enumerate(kinds) if kind == GGUF_CONTROL and index < len(tokens))
    known = [index for index in control if tokens[index] in _END_TOKENS]
    return tuple(sorted({index for index in (*named, *known) if index is not None}))


_OF_IMAGES = (
    "image_token_id", "image_token_index", "boi_token_index", "eoi_token_index", "mm_tokens_per_image", "vision_config",
)  # fmt: skip


def _text_of(config: Mapping[str, Any], within: str | None) -> Mapping[str, Any]:
    """The part of a configuration that describes a text model."""
    if within is None:
        return config
    if within not in config and "hidden_size" in config:
        return config  # older files have both in one table
    text = config.get(within)
    require(isinstance(text, Mapping), f"its {within} is {shown(text)} where a table is needed")
    shared = ("eos_token_id", "bos_token_id", "tie_word_embeddings", *_OF_IMAGES)
    return {**{key: config[key] for key in shared if key in config}, **text}  # pyright: ignore[reportGeneralTypeIssues]


def _refuse_variants(config: Mapping[str, Any], reads_quantised: str | None, also: str) -> None:
    architectures = config.get("architectures") or []
    require(
        isinstance(architectures, list) and all(isinstance(name, str) for name in architectures),
        f"its architectures are {shown(architectures)} where a list of names is needed",
    )
    require(
        not architectures or any("ForCausalLM" in name or also in name for name in architectures),
        f"it is a {', '.join(architectures)[:200]}, which has no language-model head; use a ForCausalLM checkpoint",
    )
    quantised = config.get("quantization_config")
    known = isinstance(quantised, Mapping) and quantised.get("quant_method") == (reads_quantised or ...)
    require(
        not quantised or known,
        "its weights are quantised (quantization_config); use the original safetensors checkpoint, or a GGUF "
        "file of the model",
    )
