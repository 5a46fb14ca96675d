"""Tensor parallelism as a checkpoint: a rank's part of every matrix, by the names and shapes of a smaller model.

Products whose outputs are heads or units of an MLP are split by rows, those whose inputs are by columns; what the
latter give is summed over the ranks. A rank reads no more of a mapped file than its part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from draftwood.errors import InvalidRequest
from draftwood.model.checkpoint import Checkpoint
from draftwood.model.config import ModelConfig
from draftwood.model.names import HEAD, expected_shape
from draftwood.model.spec import ExpertsSpec, HeadNorms, LayerSpec, MlpSpec
from draftwood.model.tokenizer import Tokenizer
from draftwood.model.universal_folder import UniversalCheckpoint, UniversalConfig
from draftwood.model.weights import GROUP, Matrix, Quantised, WeightFormat
from draftwood.ranks import ALONE, Ranks

SUMMED = ("self_attn.o_proj.bias", "down_proj.bias")  # added once: by rank 0
T = TypeVar("T", Tensor, Quantised)


class ShardedCheckpoint:
    """One rank's part of another checkpoint; `config` describes that part."""

    def __init__(self, whole: Checkpoint, ranks: Ranks, weights: WeightFormat) -> None:
        self.name = whole.name
        self.ranks = ranks
        self._whole = whole
        self.config = sharded(whole.config, ranks.size, weights)

    def has(self, name: str) -> bool:
        """Whether the whole checkpoint has it."""
        return self._whole.has(name)

    def tensor(self, name: str) -> Tensor:
        """This rank's part of a tensor; of a bias that is added to a sum, zeros on all ranks but the first."""
        value = self._part(name, self._whole.tensor(name))
        return torch.zeros_like(value) if self.ranks.rank and name.endswith(SUMMED) else value.contiguous()

    def matrix(self, name: str) -> Matrix:
        """This rank's part of a matrix."""
        value = self._whole.matrix(name)
        return self._part(name, value) if isinstance(value, Quantised) else self._part(name, value).contiguous()

    def _part(self, name: str, value: T) -> T:
        if name == f"{HEAD}.weight":
            return value[vocabulary_part(self.config.vocab_size, self.ranks)]
        local = expected_shape(name, self.config)
        if local is None or tuple(value.shape) == local:
            return value
        rows = slice(None) if value.shape[0] == local[0] else _own(self.ranks, local[0])
        part = value[rows]
        if len(local) == 1 or value.shape[1] == local[1]:
            return part
        return _columns(part, _own(self.ranks, local[1]))

    def forget(self) -> None:
        """Keep nothing in memory of what was read so far."""
        self._whole.forget()

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that came with the weights."""
        return self._whole.tokenizer()


def share_of(checkpoint: Checkpoint, ranks: Ranks, weights: WeightFormat) -> Checkpoint:
    """What a rank loads of a checkpoint: all of it, where there is only one."""
    if isinstance(checkpoint, UniversalCheckpoint):
        return checkpoint.shared(ranks)
    return checkpoint if ranks.size == 1 else ShardedCheckpoint(checkpoint, ranks, weights)


def ranks_of(checkpoint: Checkpoint) -> Ranks:
    """Who computes what this checkpoint is a part of."""
    return checkpoint.ranks if isinstance(checkpoint, ShardedCheckpoint) else ALONE


def vocabulary_part(vocab_size: int, ranks: Ranks) -> Tensor:
    """The tokens whose logits a rank computes, as many on each; beyond the vocabulary its last one again."""
    each = -(-vocab_size // ranks.size)
    return torch.arange(ranks.rank * each, (ranks.rank + 1) * each).clamp(max=vocab_size - 1)


def sharded(config: ModelConfig, size: int, weights: WeightFormat) -> ModelConfig:
    """What one of `size` ranks computes of a model; refused where that does not divide."""
    if config.encoder is not None or config.recurrent:
        raise InvalidRequest("A model with an encoder or recurrent layers is not split over ranks yet: leave tp at 1.")
    if isinstance(config, UniversalConfig):
        return config  # its modules are split once they are loaded
    for reason in _obstacles(config, size, weights):
        raise InvalidRequest(f"This model cannot be split over {size} ranks: {reason}. Choose another tp.")
    return replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=config.num_kv_heads // size,
        intermediate_size=config.intermediate_size // size,
        layers=tuple(_narrower(layer, size) for layer in config.layers),
    )


def _obstacles(config: ModelConfig, size: int, weights: WeightFormat) -> Iterator[str]:
    for count, name in ((config.num_heads, "attention heads"), (config.num_kv_heads, "key-value heads")):
        if count % size:
            yield f"its {count} {name} do not divide by {size}"
    norms = [layer.only_attention.head_norm for layer in config.layer_specs]
    if any(norm is not None and norm.over == HeadNorms.WHOLE for norm in norms):
        yield "it norms all heads of a row together"
    inputs = {width for layer in config.layer_specs for width in _widths(layer)}
    for width in sorted(inputs):
        if width % size:
            yield f"its MLPs are {width} wide, which does not divide by {size}"
    if weights.name in ("stored", "float32", "bfloat16", "fp8"):
        return
    inputs.add(config.num_heads * config.head_dim)
    for width in sorted(inputs):
        if width // size % GROUP:
            yield f"weights stored as {weights.name} lie in groups of {GROUP}, which {width} / {size} inputs cut apart"


def _widths(layer: LayerSpec) -> Iterator[int]:
    mlp = layer.only_mlp
    if isinstance(mlp, MlpSpec):
        yield mlp.width
        return
    yield mlp.expert.width
    if mlp.shared is not None:
        yield mlp.shared.width


def _narrower(layer: LayerSpec, size: int) -> LayerSpec:
    mlp = layer.only_mlp
    if isinstance(mlp, ExpertsSpec):
        shared = mlp.shared and replace(mlp.shared, width=mlp.shared.width // size)
        expert = replace(mlp.expert, width=mlp.expert.width // size)
        return replace(layer, mlp=replace(mlp, expert=expert, shared=shared))
    return replace(layer, mlp=replace(mlp, width=mlp.width // size))


def _own(ranks: Ranks, each: int) -> slice:
    return slice(ranks.rank * each, (ranks.rank + 1) * each)


def _columns(part: T, own: slice) -> T:
    if not isinstance(part, Quantised):
        return part[:, own]
    if own.start % GROUP or own.stop % GROUP:
        raise InvalidRequest(
            f"This model's weights lie in groups of {GROUP} inputs, which its parts would cut apart. Choose another tp."
        )
    groups = slice(own.start // GROUP, own.stop // GROUP)
    minimum = None if part.minimum is None else part.minimum[:, groups].contiguous()
    return Quantised(part.storage, part.codes[:, own].contiguous(), part.scale[:, groups].contiguous(), minimum)
