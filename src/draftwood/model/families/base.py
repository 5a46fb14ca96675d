"""What every family's file is made of: how its configuration is read, and where its tensors lie.

A family is one file with one `Family` in it. `read` turns a `config.json` into a `ModelConfig`, most often the plain
one (`plain`) with some layers changed (`with_layers_changed`). `tensors` maps our names within a layer to theirs:

    our module, or module.weight / module.bias   ->   their module; a `Stored` with their whole tensor names and what
                                                      is done with them; or several of these, of which the first is
                                                      taken that the checkpoint has

A `*` stands for the number of an expert. Modules that are not named are called alike in the checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..config import ModelConfig
from ..reading import (
    activation,
    hf_max_positions,
    hf_rope,
    hf_rotated,
    integer,
    layer_count,
    number,
    optional_integer,
    token_ids,
)
from ..rope import RopeConfig, require
from ..spec import LayerSpec, MlpSpec, NormSpec, StreamSpec

if TYPE_CHECKING:
    from ..blocks import Blocks
    from .in_gguf import GgufForm

LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
EXPERT = re.compile(r"\.experts\.(\d+)\.")
Change = Callable[..., Tensor]  # (config, *tensors as stored) -> our tensor


@dataclass(frozen=True)
class Stored:
    """Tensors of a checkpoint that one of ours is made of; names within the layer, or whole ones for the rest."""

    names: tuple[str, ...]
    change: Change
    of_expert: bool = False  # only the entry of our expert's number is read
    blocks: Callable[..., Blocks] | None = None  # the same for our kernels, without loss; takes what `change` takes


@dataclass(frozen=True)
class Place:
    """Where one tensor of ours lies: whole names, which entry of the first dimension, and what to do with them."""

    names: tuple[str, ...]
    entry: int | None = None
    change: Change | None = None
    blocks: Callable[..., Blocks] | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it is one tensor of the file as it is."""
        return len(self.names) == 1 and self.entry is None and self.change is None


Spelling = str | Stored
Tensors = Mapping[str, Spelling | tuple[Spelling, ...]]


@dataclass(frozen=True)
class Family:
    """A family of models, by the `model_type` of its configurations."""

    name: str
    read: Callable[[Mapping[str, Any]], ModelConfig]
    layer: str = "model.layers.{}."
    tensors: Tensors = field(default_factory=dict)  # of a layer
    top: Tensors = field(default_factory=dict)  # of the rest
    prefixes: tuple[str, ...] = ("",)  # what all names may begin with
    norm_offset: float = 0.0  # added to the weights of norms
    interleaved: bool = False  # rotates neighbours, 0 with 1, where we turn i with i + rotated / 2
    reads_quantised: str | None = None  # the `quant_method` it can read
    gguf: GgufForm | None = None
    within: str | None = None  # the entry of the configuration that describes the text model, where it has others too

    def places(self, name: str, config: ModelConfig) -> list[Place]:
        """Where a tensor of ours may lie in a checkpoint, likeliest first."""
        match = LAYER_NAME.fullmatch(name)
        stem, _, kind = name.rpartition(".")
        module, table, begin = stem, self.top, ""
        if match is not None:
            number, module, kind = match.groups()
            table, begin = self.tensors, self.layer.format(number)
        expert = EXPERT.search(f".{module}.")
        which = None if expert is None else int(expert[1])
        pattern = module if which is None else EXPERT.sub(".experts.*.", f".{module}.").strip(".")
        spelled = table.get(f"{pattern}.{kind}", table.get(pattern, pattern))
        changes = [change for change in (self._folded(module, kind), self._ordered(module, kind, config)) if change]
        return [
            _place(prefix + begin, spelling, kind, which, changes)
            for spelling in (spelled if isinstance(spelled, tuple) else (spelled,))
            for prefix in self.prefixes
        ]

    def _folded(self, module: str, kind: str) -> Change | None:
        """What norms' weights lack."""
        if not self.norm_offset or kind != "weight" or "norm" not in module.rpartition(".")[2]:
            return None
        return lambda config, weight: weight.to(torch.promote_types(weight.dtype, torch.float32)) + self.norm_offset

    def _ordered(self, module: str, kind: str, config: ModelConfig) -> Change | None:
        """Rows of queries and keys in the order in which we turn them."""
        if not self.interleaved or module not in TURNED:
            return None
        match = config.layer_specs[0].attention
        return lambda config, rows: halves_of_pairs(rows, config.head_dim, match.rotated)


TURNED = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.q_norm", "self_attn.k_norm")


def _place(begin: str, spelling: Spelling, kind: str, expert: int | None, changes: Sequence[Change]) -> Place:
    if isinstance(spelling, str):
        theirs = spelling if expert is None else spelling.replace("*", str(expert))
        return Place((f"{begin}{theirs}.{kind}",), None, _in_turn(changes))
    names = tuple(begin + (name if expert is None else name.replace("*", str(expert))) for name in spelling.names)
    entry = expert if spelling.of_expert else None
    return Place(names, entry, _in_turn([spelling.change, *changes]), None if changes else spelling.blocks)


def _in_turn(changes: Sequence[Change]) -> Change | None:
    if not changes:
        return None

    def change(config: ModelConfig, *stored: Tensor) -> Tensor:
        value = changes[0](config, *stored)
        for following in changes[1:]:
            value = following(config, value)
        return value

    return change


def halves_of_pairs(rows: Tensor, head_dim: int, rotated: int) -> Tensor:
    """Rows of heads that turn neighbours 2i and 2i + 1, as rows of heads that turn i and i + rotated / 2."""
    order = torch.cat([torch.arange(rotated).view(-1, 2).t().reshape(-1), torch.arange(rotated, head_dim)])
    return rows.unflatten(0, (-1, head_dim))[:, order].flatten(0, 1)


def query_rows(config: ModelConfig, fused: Tensor) -> Tensor:
    """Queries of queries, keys and values one below the other."""
    return fused[: config.num_heads * config.head_dim]


def key_rows(config: ModelConfig, fused: Tensor) -> Tensor:
    """Keys of queries, keys and values one below the other."""
    begin, size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return fused[begin : begin + size]


def value_rows(config: ModelConfig, fused: Tensor) -> Tensor:
    """Values of queries, keys and values one below the other."""
    return fused[(config.num_heads + config.num_kv_heads) * config.head_dim :]


def upper_half(config: ModelConfig, fused: Tensor) -> Tensor:
    """The first half of the rows: gates, where gates and ups lie one below the other."""
    return fused[: fused.shape[0] // 2]


def lower_half(config: ModelConfig, fused: Tensor) -> Tensor:
    """The second half of the rows."""
    return fused[fused.shape[0] // 2 :]


@dataclass(frozen=True)
class PlainChoices:
    """What families of plain decoders differ in, beside the numbers in their files."""

    head_dim: int | None = None  # where the file says nothing; None: hidden size / heads
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    partial_rotary: bool = False  # where it is not read, a file that asks for it is refused
    experts: bool = False


def plain(
    config: Mapping[str, Any],
    family: str,
    choices: PlainChoices = PlainChoices(),
    windows: tuple[int | None, ...] | None = None,
) -> ModelConfig:
    """A configuration with the usual spelling, read as a plain decoder's."""
    _refuse_extras(config, choices)
    num_layers = layer_count(config, "num_hidden_layers")
    num_heads = integer(config, "num_attention_heads")
    hidden_size = integer(config, "hidden_size")
    usual_head_dim = choices.head_dim or hidden_size // max(num_heads, 1)
    head_dim = integer({"head_dim": config.get("head_dim") or None}, "head_dim", usual_head_dim)
    max_positions = hf_max_positions(config)
    rope, rotated = hf_rope(config, max_positions), hf_rotated(config, head_dim)
    decoder = ModelConfig(
        family=family,
        vocab_size=integer(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=integer(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=integer(config, "num_key_value_heads", num_heads),
        head_dim=head_dim,
        max_positions=max_positions,
        norm_eps=number(config, "rms_norm_eps", 1e-6),
        rope=rope if rotated == head_dim else RopeConfig(rope.theta, max_positions=max_positions),
        tied_head=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=choices.qkv_bias,
        output_bias=choices.output_bias,
        mlp_bias=choices.mlp_bias,
        qk_norm=choices.qk_norm,
        windows=windows or (None,) * num_layers,
        activation=activation(config.get("hidden_act", "silu")),
        eos_token_ids=token_ids(config.get("eos_token_id")),
        bos_token_id=optional_integer(config, "bos_token_id"),
    )
    return decoder if rotated == head_dim else _partly_turned(decoder, rope, rotated)


def _partly_turned(decoder: ModelConfig, rope: RopeConfig, rotated: int) -> ModelConfig:
    def change(i: int, layer: LayerSpec) -> LayerSpec:
        return replace(layer, attention=replace(layer.attention, rope=rope, rotated=rotated))

    return with_layers_changed(decoder, change)


def _refuse_extras(config: Mapping[str, Any], choices: PlainChoices) -> None:
    experts = config.get("num_local_experts") or config.get("num_experts")
    require(choices.experts or not experts, "it is a mixture of experts, which its family is not known to be")
    share = hf_rotated(config, 1000) / 1000
    require(choices.partial_rotary or share == 1, f"only {share:.0%} of each head is rotated; that is not supported")


def renamed(config: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """A configuration with some of its entries under the usual names: theirs -> usual."""
    usual = {names[key]: value for key, value in config.items() if key in names}
    return {**config, **usual}


def with_layers_changed(
    config: ModelConfig, change: Callable[[int, LayerSpec], LayerSpec], stream: StreamSpec | None = None
) -> ModelConfig:
    """The same model with every layer changed, and `stream` around them."""
    layers = tuple(change(i, layer) for i, layer in enumerate(config.layer_specs))
    windows = tuple(layer.attention.window for layer in layers)
    return replace(config, layers=layers, windows=windows, stream=stream or config.stream)


def layer_normed(config: ModelConfig, bias: bool = True) -> ModelConfig:
    """The same model with layer norms where it has root-mean-square norms."""
    norm = NormSpec(config.norm_eps, centred=True, bias=bias)
    stream = replace(config.stream, final_norm=norm)
    return with_layers_changed(config, lambda i, layer: replace(layer, norm=norm), stream)


def plain_mlp(config: ModelConfig) -> ModelConfig:
    """The same model with MLPs that have no gate."""

    def change(i: int, layer: LayerSpec) -> LayerSpec:
        return replace(layer, mlp=MlpSpec(config.intermediate_size, config.activation, False, config.mlp_bias))

    return with_layers_changed(config, change)
