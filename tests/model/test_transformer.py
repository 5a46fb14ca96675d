"""What a model weighs, and the layouts its products may have."""

from __future__ import annotations

import pytest
import torch

from draftwood.model.transformer import Transformer
from draftwood.ops.linear import RoundedInputs, make_linear, make_tied_head
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
def test_a_product_is_a_product(rows: int, bias: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    weight, x = torch.randn(96, 48, generator=generator), torch.randn(rows, 48, generator=generator)
    offset = torch.randn(96, generator=generator) if bias else None
    residual = torch.randn(rows, 96, generator=generator)
    want = torch.nn.functional.linear(x.double(), weight.double(), None if offset is None else offset.double())
    layout = make_linear(weight, offset)
    assert (layout(x) - want).abs().max() < 1e-4
    assert (layout.add_to(residual, x) - residual - want).abs().max() < 1e-4
    halved = RoundedInputs(layout, lambda inputs: inputs * 0)
    assert torch.equal(halved(x), layout(x * 0))
    assert torch.equal(halved.add_to(residual, x), layout.add_to(residual, x * 0))


def test_a_tied_head_shares_the_embedding() -> None:
    head, embedding = make_tied_head(torch.arange(64.0 * 8).view(64, 8))
    assert embedding[3].tolist() == [24.0 + i for i in range(8)]
    assert head(torch.eye(8))[2].tolist() == embedding[:, 2].tolist()
