"""What a model weighs, and the layouts its products may have."""

from __future__ import annotations

import pytest
import torch

from draftwood.model.transformer import Transformer
from draftwood.ops import linear
from draftwood.ops.linear import DenseLinear, PackedLinear, TiedHead, make_linear, make_tied_head
from tiny import CPU, TinyCheckpoint, tensor_names, tiny_config


@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_counted_once(tied: bool) -> None:
    config = tiny_config(tie_word_embeddings=tied)
    checkpoint = TinyCheckpoint(config)
    stored = sum(checkpoint.tensor(name).numel() for name in tensor_names(config)) * 8
    norms = 2 * config.num_layers + 1
    extra = norms * (config.hidden_size + 1) * 8  # each norm keeps its weight scaled, and a floor
    assert Transformer(checkpoint, torch.float64, CPU).num_bytes == stored + extra


@pytest.mark.parametrize("rows", [1, 2, 5, 40])
@pytest.mark.parametrize("bias", [True, False])
def test_every_layout_computes_the_same(rows: int, bias: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    weight, x = torch.randn(96, 48, generator=generator), torch.randn(rows, 48, generator=generator)
    offset = torch.randn(96, generator=generator) if bias else None
    residual = torch.randn(rows, 96, generator=generator)
    want = torch.nn.functional.linear(x.double(), weight.double(), None if offset is None else offset.double())
    layouts = [DenseLinear(weight.t().contiguous(), offset), PackedLinear(weight, offset)]
    layouts += [] if bias else [TiedHead(weight)]
    for layout in layouts:
        assert (layout(x) - want).abs().max() < 1e-4
        assert (layout.add_to(residual, x) - residual - want).abs().max() < 1e-4


def test_only_wide_float32_outputs_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "WIDE", 64)
    assert isinstance(make_linear(torch.zeros(64, 8)), PackedLinear)
    assert isinstance(make_linear(torch.zeros(63, 8)), DenseLinear)
    assert isinstance(make_linear(torch.zeros(64, 8, dtype=torch.float64)), DenseLinear)
    head, embedding = make_tied_head(torch.arange(64.0 * 8).view(64, 8))
    assert isinstance(head, TiedHead)
    assert embedding[3].tolist() == [24.0 + i for i in range(8)]
