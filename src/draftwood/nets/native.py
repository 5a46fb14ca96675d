"""A network's decoder layers on our own CPU kernels: one call of C instead of some thirty of torch."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from draftwood.model.batch import ForwardBatch, Pages
from draftwood.model.config import ModelConfig
from draftwood.model.native import GivenRows, NativeTransformer
from draftwood.model.tokenizer import Tokenizer
from draftwood.model.weights import FORMATS
from draftwood.nets.parts import DraftHead, VocabularyHead
from draftwood.ops.native import kernels

ROUNDED = "w8a8"  # a draft may be wrong: bytes cost little acceptance and a quarter of the time


class _Layers:
    """A network's parameters under the names of a language model; the head's rows stand for the embedding too."""

    def __init__(self, net: nn.Module, config: ModelConfig, head: Tensor) -> None:
        self.name, self.config = type(net).__name__, replace(config, vocab_size=len(head), tied_head=True)
        self._tensors = {f"model.{name}": tensor for name, tensor in net.state_dict().items()}
        self._tensors["model.embed_tokens.weight"] = head

    def has(self, name: str) -> bool:
        return name in self._tensors

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]

    def matrix(self, name: str) -> Tensor:
        return self._tensors[name]

    def forget(self) -> None:
        pass

    def tokenizer(self) -> Tokenizer:
        raise NotImplementedError("layers have no texts")


class NativeLayers:
    """Layers, last norm and head of a network with parameters `layers.*` and `norm`."""

    def __init__(self, net: nn.Module, config: ModelConfig, head: DraftHead) -> None:
        library = kernels()
        assert library is not None, "asked for in `native_layers`"
        self._last = frozenset({config.num_layers - 1})
        self._model = NativeTransformer(library, _Layers(net, config, head.matrix), FORMATS[ROUNDED])

    def run(self, batch: ForwardBatch, pages: Pages, residual: Tensor, wide: Tensor | None) -> tuple[Tensor, Tensor]:
        """The stream after the last layer, at all rows, and logits at `logit_rows`. [N, hidden], [K, R]."""
        given = GivenRows(residual.contiguous(), None if wide is None else wide.contiguous())
        out = self._model.forward(batch, pages, self._last, given)
        return out.features[max(self._last)], out.logits


def native_layers(net: nn.Module, config: ModelConfig, head: VocabularyHead, dtype: torch.dtype) -> NativeLayers | None:
    """Where there are kernels for it; None: torch does it."""
    device = next(net.parameters()).device
    if device.type != "cpu" or dtype != torch.float32 or kernels() is None:
        return None
    if not isinstance(head, DraftHead) or head.bias is not None:
        return None
    return NativeLayers(net, config, head)
