"""Moving an accepted path on the device is `KVCache.keep`."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from draftwood.ops.cuda.commit import keep_path

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAGE = 16


def reference_keep_path(store: Tensor, table: Tensor, base: Tensor, index: Tensor, length: Tensor) -> None:
    for b in range(index.shape[0]):
        before = store.clone()
        for step in range(1, int(length[b]) + 1):
            source, target = int(base[b] + index[b, step] - 1), int(base[b]) + step - 1
            to = int(table[b, target // PAGE]) * PAGE + target % PAGE
            store[:, :, :, to] = before[:, :, :, int(table[b, source // PAGE]) * PAGE + source % PAGE]


def rising(depth: int, nodes: int, seed: int) -> list[int]:
    return [0, *sorted(random.Random(seed).sample(range(1, nodes + 1), depth))]


@pytest.mark.parametrize("dim", [64, 96])
@pytest.mark.parametrize("depth", [1, 5, 40])
def test_moves_what_the_cache_moves(dim: int, depth: int) -> None:
    paths = [
        rising(depth, 2 * depth, 1),  # anything
        list(range(depth + 1)),  # a chain stays
        [0, *range(2, depth + 2)],  # every step writes what the one before it read
        rising(depth, 3 * depth, 2),
    ]
    index = torch.tensor(paths, device=DEVICE)
    length = torch.tensor([depth, depth, depth, depth // 2], device=DEVICE)
    base = torch.tensor([3, 16, 31, 0], device=DEVICE)
    pages = (31 + 3 * depth) // PAGE + 1
    order = torch.randperm(4 * pages, generator=torch.Generator().manual_seed(0)).view(4, pages)
    table = torch.cat([order, torch.full((4, 1), -1)], 1).to(DEVICE)
    expected = torch.randn(2, 2, 1, 4 * pages * PAGE, dim).to(DEVICE)
    store = expected.clone()
    reference_keep_path(expected, table, base, index, length)
    keep_path(store, table, base, index, length, PAGE)
    assert torch.equal(store, expected)


def test_roots_alone_move_nothing() -> None:
    store = torch.randn(1, 2, 1, 32, 64, device=DEVICE)
    before = store.clone()
    zero = torch.zeros(1, 1, dtype=torch.int64, device=DEVICE)
    keep_path(store, zero, zero[0], zero, zero[0], PAGE)
    assert torch.equal(store, before)
