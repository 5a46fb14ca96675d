"""The tensors of a model by our names, which are Hugging Face's for Llama, and the shapes they must have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache

from ..errors import CheckpointError
from .config import ModelConfig
from .mixer_spec import GatedDeltaSpec, Gating, Mamba2Spec, MambaSpec, RecurrentSpec, ShortConvSpec
from .spec import AttentionSpec, ExpertsSpec, HeadNorms, LayerSpec, MlpSpec, NormSpec

EMBEDDING, HEAD, FINAL_NORM = "model.embed_tokens", "lm_head", "model.norm"
POSITIONS = "model.embed_positions"
Shape = tuple[int, ...]


@lru_cache(maxsize=32)
def tensor_shapes(config: ModelConfig) -> Mapping[str, Shape]:
    """Every tensor of a model."""
    shapes = dict(_around(config))
    for i, layer in enumerate(config.layer_specs):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer_shapes(config, layer)}
    return shapes


def expected_shape(name: str, config: ModelConfig) -> Shape | None:
    """The shape a tensor must have by the configuration; None for names that are not the decoder's."""
    shapes = tensor_shapes(config)
    if name in shapes:
        return shapes[name]
    stem, _, kind = name.rpartition(".")
    if name == f"{HEAD}.weight":
        return shapes[f"{EMBEDDING}.weight"]  # there is a copy in some files
    if stem.endswith(("self_attn.q_norm", "self_attn.k_norm")):
        return (config.head_dim,)
    weight = shapes.get(f"{stem}.weight")
    return None if weight is None or kind != "bias" else weight[:1]


def check_shape(name: str, shape: Shape, config: ModelConfig) -> None:
    """Refuse a tensor that is not of the shape it must have."""
    expected = expected_shape(name, config)
    if expected is not None and shape != expected:
        raise CheckpointError(
            f"{name} has shape {shape} where the configuration says {expected}: weights and "
            "configuration do not belong together. Download or convert the model again."
        )


def missing_tensor(name: str, where: str) -> CheckpointError:
    """What to say where a tensor should be and is not."""
    return CheckpointError(
        f"{where} has no tensor {name}: the file is incomplete or of another architecture than it says. "
        "Download or convert the model again."
    )


def count_parameters(config: ModelConfig) -> int:
    """Numbers in all tensors of a model."""
    return sum(_product(shape) for shape in tensor_shapes(config).values())


def parameters_by_kind(config: ModelConfig) -> tuple[int, int, int]:
    """Those in the layers' matrices; in embedding and head; in vectors, and in tables of positions."""
    layers = ends = vectors = 0
    for name, shape in tensor_shapes(config).items():
        if len(shape) == 2 and name.startswith("model.layers."):
            layers += _product(shape)
        elif name in (f"{EMBEDDING}.weight", f"{HEAD}.weight"):
            ends += _product(shape)
        else:
            vectors += _product(shape)
    return layers, ends, vectors


def count_active_parameters(config: ModelConfig) -> int:
    """Those that one token makes use of: of experts, as many as the router takes."""
    total = 0
    for name, shape in tensor_shapes(config).items():
        share = 1.0
        if ".experts." in name:
            mlp = config.layer_specs[int(name.split(".")[2])].mlp
            share = mlp.top_k / mlp.count if isinstance(mlp, ExpertsSpec) else 1.0
        total += round(_product(shape) * share)
    return total


def _product(shape: Shape) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


def _around(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    words = (config.vocab_size, config.hidden_size)
    yield f"{EMBEDDING}.weight", words
    yield from norm_shapes(FINAL_NORM, config.final_norm, (config.hidden_size,))
    if not config.tied_head:
        yield f"{HEAD}.weight", words
    if config.stream.learned_positions:
        yield f"{POSITIONS}.weight", (config.max_positions, config.hidden_size)


def layer_shapes(config: ModelConfig, layer: LayerSpec) -> Iterator[tuple[str, Shape]]:
    """The tensors of one layer."""
    for name in layer.norms:
        yield from norm_shapes(name, layer.norm, (config.hidden_size,))
    if layer.attention is not None:
        yield from _attention(config, layer.attention)
    if layer.recurrent is not None:
        yield from _recurrent(config, layer.recurrent)
    if isinstance(layer.mlp, ExpertsSpec):
        yield from _experts(config, layer.mlp)
    elif layer.mlp is not None:
        yield from _mlp("mlp", config, layer.mlp)


def norm_shapes(name: str, norm: NormSpec, shape: Shape) -> Iterator[tuple[str, Shape]]:
    """Weights of a norm."""
    yield f"{name}.weight", shape
    if norm.bias:
        yield f"{name}.bias", shape


def _linear(name: str, outputs: int, inputs: int, bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)


def _attention(config: ModelConfig, attention: AttentionSpec) -> Iterator[tuple[str, Shape]]:
    hidden, dim = config.hidden_size, config.head_dim
    heads = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
    for part, count in heads.items():
        yield from _linear(f"self_attn.{part}_proj", count * dim, hidden, attention.qkv_bias)
    if attention.gated:
        yield from _linear("self_attn.gate_proj", config.num_heads * dim, hidden, attention.qkv_bias)
    yield from _linear("self_attn.o_proj", hidden, config.num_heads * dim, attention.output_bias)
    if attention.head_norm is not None:
        each = attention.head_norm.over == HeadNorms.EACH
        for part in "qk":
            shape = (dim if each else heads[part] * dim,)
            yield from norm_shapes(f"self_attn.{part}_norm", attention.head_norm.norm, shape)
    if attention.sinks:
        yield "self_attn.sinks.weight", (config.num_heads,)


def _recurrent(config: ModelConfig, mixer: RecurrentSpec) -> Iterator[tuple[str, Shape]]:
    """An input projection, a convolution of each channel by itself, an output projection, and what a kind adds."""
    plain = isinstance(mixer, GatedDeltaSpec)
    yield from _linear("mixer.in_proj", mixer.projected, config.hidden_size, not plain and mixer.bias)
    yield "mixer.conv.weight", (mixer.channels, mixer.kernel)
    if mixer.conv_bias:
        yield "mixer.conv.bias", (mixer.channels,)
    if not isinstance(mixer, ShortConvSpec):
        heads = mixer.memory[:1]
        yield "mixer.decay.weight", (mixer.width, mixer.state) if isinstance(mixer, MambaSpec) else heads
        yield "mixer.step.bias", heads
    if isinstance(mixer, MambaSpec):
        yield "mixer.skip.weight", (mixer.width,)
        yield "mixer.x_proj.weight", (mixer.rank + 2 * mixer.state, mixer.width)
        yield "mixer.step_proj.weight", (mixer.width, mixer.rank)
        if mixer.normed_by_weights:
            sizes = {"step": mixer.rank, "key": mixer.state, "query": mixer.state}
            yield from ((f"mixer.{part}_norm.weight", (size,)) for part, size in sizes.items())
    elif isinstance(mixer, Mamba2Spec):
        yield "mixer.skip.weight", (mixer.heads,)
        if mixer.gating is not Gating.PLAIN:
            yield "mixer.gain.weight", (mixer.width,)
    elif isinstance(mixer, GatedDeltaSpec):
        yield "mixer.gain.weight", (mixer.value_dim,)
    yield from _linear("mixer.out_proj", config.hidden_size, mixer.width, mixer.output_bias)


def _mlp(name: str, config: ModelConfig, mlp: MlpSpec) -> Iterator[tuple[str, Shape]]:
    for part in ("gate", "up") if mlp.gated else ("up",):
        yield from _linear(f"{name}.{part}_proj", mlp.width, config.hidden_size, mlp.bias)
    yield from _linear(f"{name}.down_proj", config.hidden_size, mlp.width, mlp.bias)


def _experts(config: ModelConfig, experts: ExpertsSpec) -> Iterator[tuple[str, Shape]]:
    yield from _linear("mlp.router", experts.count, config.hidden_size, experts.router_bias)
    for i in range(experts.count):
        yield from _mlp(f"mlp.experts.{i}", config, experts.expert)
    if experts.shared is not None:
        yield from _mlp("mlp.shared", config, experts.shared)
        if experts.shared_gate:
            yield from _linear("mlp.shared_gate", 1, config.hidden_size, False)
