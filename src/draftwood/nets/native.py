"""A network's decoder layers on our own kernels: one call of C on a CPU, a dozen of Triton's on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn

from draftwood.batch import ForwardBatch, ForwardOutput, GivenRows, Pages
from draftwood.model.config import ModelConfig
from draftwood.model.native import NativeTransformer
from draftwood.model.weights import FORMATS
from draftwood.nets.embeddings import TargetEmbeddings
from draftwood.nets.parts import DraftHead, VocabularyHead
from draftwood.nets.shared import BareTensors
from draftwood.ops.native import Kernels, kernels

ROUNDED = "w8a8"  # a draft may be wrong: bytes cost little acceptance and a quarter of the time

_HEAD = "model.embed_tokens.weight"  # the head's rows stand for the embedding too, which is not asked for


class ContextWriter(Protocol):
    """Keys and values of what a network sees but does not run."""

    def __call__(self, rows: Tensor, positions: Tensor, slots: Tensor, cache: Pages) -> None:
        """Of rows [N, hidden] at positions [N], to slots [N] of every layer."""
        ...


class NativeLayers(Protocol):
    """Layers, last norm and head of a network with parameters `layers.*` and `norm`."""

    def run(self, batch: ForwardBatch, pages: Pages, residual: Tensor, wide: Tensor | None) -> tuple[Tensor, Tensor]:
        """The stream after the last layer, at all rows, and logits at `logit_rows`. [N, hidden], [K, R]."""
        ...

    @property
    def write_context(self) -> ContextWriter | None:
        """Has every layer's keys and values of the same rows written; None: it has no kernels for that."""
        ...

    def refresh(self) -> None:
        """The network's weights are others now."""
        ...


class _Decoder(Protocol):
    """A model that takes rows which are no tokens."""

    @property
    def config(self) -> ModelConfig:
        """Of its layers."""
        ...

    def forward(self, batch: ForwardBatch, cache: Pages, needs: frozenset[int], given: GivenRows) -> ForwardOutput:
        """Run the rows of `batch`, which begin with what is `given`."""
        ...


class _Layers:
    """A decoder with the weights of a network."""

    def __init__(self, decoder: _Decoder) -> None:
        self._decoder, self._last = decoder, decoder.config.num_layers - 1

    def run(self, batch: ForwardBatch, pages: Pages, residual: Tensor, wide: Tensor | None) -> tuple[Tensor, Tensor]:
        """See `NativeLayers`."""
        given = GivenRows(residual.contiguous(), None if wide is None else wide.contiguous())
        out = self._decoder.forward(batch, pages, frozenset({self._last}), given)
        return out.features[self._last], out.logits


class CpuLayers(_Layers):
    """In C, with rounded weights of its own."""

    write_context: ContextWriter | None = None

    def __init__(self, library: Kernels, net: nn.Module, config: ModelConfig, head: DraftHead) -> None:
        self._network = net, config, head
        self._model = NativeTransformer(library, _tensors(*self._network), FORMATS[ROUNDED])
        super().__init__(self._model)

    def refresh(self) -> None:
        """Pack them again, and the head's rows if they are its own."""
        tensors, head = _tensors(*self._network), self._network[-1]
        self._model.refresh(tensors)
        if head.own:
            self._model.refresh_words(tensors)


class CudaLayers(_Layers):
    """In Triton. The network's parameters become views of what the kernels read: there is one copy of each weight."""

    def __init__(self, net: nn.Module, config: ModelConfig, head: DraftHead, words: TargetEmbeddings) -> None:
        from draftwood.model.cuda import CudaTransformer  # Triton is there where CUDA is

        # The target's positions are all asked for, however short the texts were that the network learnt from.
        longest = max(config.max_positions, words.config.max_positions)
        tensors = _tensors(net, replace(config, max_positions=longest), head)
        model = CudaTransformer(tensors, words.dtype, words.device)
        views = model.views()
        head.matrix.data = views.pop(_HEAD)
        for name, parameter in net.named_parameters():
            parameter.data = views.get(f"model.{name}", parameter.data)
        self.write_context = model.write_context
        super().__init__(model)

    def refresh(self) -> None:
        """There is nothing to renew."""


def _tensors(net: nn.Module, config: ModelConfig, head: DraftHead) -> BareTensors:
    own = {f"model.{name}": tensor for name, tensor in net.state_dict().items()}
    own[_HEAD] = head.matrix.detach()
    return BareTensors(type(net).__name__, replace(config, vocab_size=head.size, tied_head=True), own)


def native_layers(
    net: nn.Module, config: ModelConfig, head: VocabularyHead, words: TargetEmbeddings
) -> NativeLayers | None:
    """Where there are kernels for it; None: torch does it."""
    if not isinstance(head, DraftHead) or head.bias is not None:
        return None
    if words.device.type == "cuda" and words.dtype != torch.float64:
        return CudaLayers(net, config, head, words)
    library = kernels() if words.device.type == "cpu" and words.dtype == torch.float32 else None
    return None if library is None else CpuLayers(library, net, config, head)


def native_linear(linear: nn.Linear) -> Callable[[Tensor], Tensor]:
    """The same product with the same weights, by our own kernels where there are some for few rows."""
    weight = linear.weight.detach()
    if weight.device.type != "cuda" or weight.dtype == torch.float64:
        return linear
    from draftwood.ops.cuda.linear import CudaLinear, Stream, pack  # likewise

    product = CudaLinear(pack([weight], linear.in_features), None if linear.bias is None else linear.bias.detach())
    return lambda x: product(Stream(x))
